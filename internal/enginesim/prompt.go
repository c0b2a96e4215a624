// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
)

// Kinds of engines, which differ in the fields that they accept as a prompt.
const (
	VLLM   = "vllm"   // chats take kv_transfer_params.prompt_token_ids; unknown fields are ignored
	SGLang = "sglang" // completions take ids, chats do not
	TRTLLM = "trtllm" // chats take prompt_token_ids; unknown fields are refused
)

// promptFields are the fields in which a client sends a prompt as token ids.
type promptFields struct {
	Prompt           json.RawMessage `json:"prompt"`
	PromptTokenIDs   []uint32        `json:"prompt_token_ids"`
	KVTransferParams *struct {
		PromptTokenIDs []uint32 `json:"prompt_token_ids"`
	} `json:"kv_transfer_params"`
	ReturnTokenIDs bool `json:"return_token_ids"`

	NVExt json.RawMessage `json:"nvext"`
}

// promptOf returns the token ids of a request, and the field that contained them: "text" if the
// ids were made from text.
func (e *Engine) promptOf(ctx context.Context, data []byte, body *openai.Body, f *promptFields, now time.Time) (ids []uint32, form string, err error) {
	if err := json.Unmarshal(data, f); err != nil {
		return nil, "", err
	}
	chat := body.Messages != nil
	switch {
	case e.conf.Engine == TRTLLM && (f.KVTransferParams != nil || f.NVExt != nil):
		return nil, "", fmt.Errorf("extra inputs are not permitted")
	case e.conf.Engine == TRTLLM && chat && len(f.PromptTokenIDs) > 0:
		return f.PromptTokenIDs, "prompt_token_ids", nil
	case e.conf.Engine == VLLM && chat && f.KVTransferParams != nil && len(f.KVTransferParams.PromptTokenIDs) > 0:
		return f.KVTransferParams.PromptTokenIDs, "kv_transfer_params", nil
	}
	prompt, err := e.conf.Prompts.Encode(ctx, nil, body.Request, now)
	switch {
	case err != nil:
		return nil, "", err
	case prompt.Mode == tokenizer.Exact, prompt.Reason == tokenizer.Items: // an item is replaced by its placeholder
	default:
		return nil, "", fmt.Errorf("no prompt can be made of the request: %s", prompt.Reason)
	}
	form = "text"
	if json.Unmarshal(f.Prompt, new([]uint32)) == nil || json.Unmarshal(f.Prompt, new([][]uint32)) == nil {
		form = "prompt"
	}
	return prompt.IDs, form, nil
}
