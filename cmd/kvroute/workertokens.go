// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// canAsk reports whether a worker's /tokenize accepts the whole prompt: one text or a chat, without
// some fields.
func canAsk(p chat.Request) bool {
	return (p.Messages != nil || len(p.Prompt) > 0 && p.Prompt[0] == '"') &&
		p.ReasoningEffort == nil && p.Documents == nil && p.TruncatePromptTokens == nil && !bytes.Contains(p.Messages, []byte(`"reasoning`))
}

// askTokenize requests the ids of a prompt from a worker's /tokenize, which vLLM has.
func askTokenize(ctx context.Context, client *http.Client, host, url, model string, p chat.Request) ([]uint32, error) {
	body := map[string]any{"model": model}
	for name, value := range map[string]json.RawMessage{
		"messages": p.Messages, "tools": p.Tools, "prompt": p.Prompt, "add_generation_prompt": p.AddGenerationPrompt,
		"continue_final_message": p.ContinueFinalMessage,
		"chat_template_kwargs":   p.ChatTemplateKwargs, "add_special_tokens": p.AddSpecialTokens,
	} {
		if value != nil {
			body[name] = value
		}
	}
	data, err := json.Marshal(body)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/tokenize", bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	req.Host = host
	req.Header.Set("Content-Type", "application/json")
	text, err := reach.Read(client, req, maxAnswer)
	if err != nil {
		return nil, err
	}
	var answer struct{ Tokens []uint32 }
	switch err := json.Unmarshal(text, &answer); {
	case err != nil:
		return nil, fmt.Errorf("%s: %w", url, err)
	case answer.Tokens == nil:
		return nil, errors.New(url + ": the answer has no tokens")
	}
	return answer.Tokens, nil
}

// around returns some ids around a position, for people.
func around(ids []uint32, at int) []uint32 {
	return ids[min(max(at-4, 0), len(ids)):min(at+5, len(ids))]
}
