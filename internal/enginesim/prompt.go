// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"embed"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
)

//go:embed model
var modelFiles embed.FS

// ModelCard is the model name in the registration of a simulated worker that uses [ModelFiles].
const ModelCard = "kvroute-sim"

// ModelFiles returns the files of the simulated engine's own model: a small
// tokenizer, trained on a page of text by tools/golden, and a chat template.
func ModelFiles() fs.FS {
	files, err := fs.Sub(modelFiles, "model")
	if err != nil {
		panic(err) // the name is a constant
	}
	return files
}

// Kinds of engines, which differ in the fields that they accept as a prompt.
const (
	VLLM   = "vllm"   // chats take kv_transfer_params.prompt_token_ids; unknown fields are ignored
	SGLang = "sglang" // completions take ids, chats do not
	TRTLLM = "trtllm" // chats take prompt_token_ids; unknown fields are refused
)

// prompt is the prompt of a request.
type prompt struct {
	ids []uint32
	// form is the field that contained the ids, "text" if they were made from text.
	form string
	// returnIDs means that the client requests the ids.
	returnIDs bool
}

// readPrompt reads the prompt of a body that was parsed.
func readPrompt(ctx context.Context, engine string, model *tokenizer.Model, data []byte, body *openai.Body, now time.Time) (prompt, error) {
	var f struct {
		Prompt           json.RawMessage `json:"prompt"`
		PromptTokenIDs   []uint32        `json:"prompt_token_ids"`
		KVTransferParams *struct {
			PromptTokenIDs []uint32 `json:"prompt_token_ids"`
		} `json:"kv_transfer_params"`
		ReturnTokenIDs bool            `json:"return_token_ids"`
		NVExt          json.RawMessage `json:"nvext"`
	}
	if err := json.Unmarshal(data, &f); err != nil {
		return prompt{}, err
	}
	chat := body.Messages != nil
	switch {
	case engine == TRTLLM && (f.KVTransferParams != nil || f.NVExt != nil):
		return prompt{}, errors.New("extra inputs are not permitted")
	case engine == TRTLLM && chat && len(f.PromptTokenIDs) > 0:
		return prompt{f.PromptTokenIDs, "prompt_token_ids", f.ReturnTokenIDs}, nil
	case engine == VLLM && chat && f.KVTransferParams != nil && len(f.KVTransferParams.PromptTokenIDs) > 0:
		return prompt{f.KVTransferParams.PromptTokenIDs, "kv_transfer_params", f.ReturnTokenIDs}, nil
	}
	made, err := model.Encode(ctx, nil, body.Request, now)
	switch {
	case err != nil:
		return prompt{}, err
	case made.Mode != tokenizer.Exact && made.Reason != tokenizer.Items: // an item is replaced by its placeholder
		return prompt{}, fmt.Errorf("no prompt can be made of the request: %s", made.Reason)
	case json.Unmarshal(f.Prompt, new([]uint32)) == nil || json.Unmarshal(f.Prompt, new([][]uint32)) == nil:
		return prompt{made.IDs, "prompt", f.ReturnTokenIDs}, nil
	}
	return prompt{made.IDs, "text", f.ReturnTokenIDs}, nil
}
