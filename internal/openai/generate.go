// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"cmp"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Engines have endpoints of their own for a prompt that needs no template: SGLang's
// /generate takes text or ids, one or a list of them, vLLM's /inference/v1/generate ids.
// Neither needs a model's name. They are completions under other names. Other prompts, and
// prompts with more than text, are routed by their size.

// engineRequest fills in the prompt of an engine's own endpoint; size is the body's.
func (f *fields) engineRequest(e Endpoint, b *Body, size int) {
	prompt := f.get("token_ids")
	if e == Generate {
		for _, name := range [...]string{"text", "input_ids", "prompt"} {
			if prompt = f.get(name); prompt != nil {
				break
			}
		}
		// Requests with different adapters share no blocks, nor do those with different extra keys.
		if lora := f.get("lora_path"); lora != nil {
			b.CacheSalt += "\x00lora\x00" + string(lora)
		}
		if key := f.get("extra_key"); key != nil {
			b.CacheSalt += "\x00key\x00" + string(key)
		}
	}
	sampling := f.get("sampling_params")
	b.MaxTokens = cmp.Or(b.MaxTokens, sampling.member("max_new_tokens").count(), sampling.member("max_tokens").count())
	items := false // there is more in the prompt than text
	for _, name := range [...]string{"image_data", "video_data", "audio_data", "features"} {
		items = items || f.get(name).some()
	}
	switch {
	case f.get("input_embeds").some():
		b.Request = chat.Request{Size: size, Inexact: Embeds}
	case items: // only the engine knows their places in the prompt
		b.Request = chat.Request{Size: size, Inexact: NoRenderer}
	case prompt.filled(), e == Generate && prompt.kind() == '"':
		b.Request = chat.Request{Path: chat.PathGenerate, Prompt: prompt}
	default:
		b.Request = chat.Request{Size: size, Inexact: NoPrompt}
	}
}

// some reports whether v is more than null or an empty list.
func (v value) some() bool { return v != nil && (v.kind() != '[' || v.filled()) }
