// SPDX-License-Identifier: Apache-2.0

package openai

import "github.com/kvroute/kvroute/tokenizer/chat"

// Engines have endpoints of their own for a prompt that is ready: SGLang's /generate takes
// text or ids, one or a list of them, vLLM's /inference/v1/generate ids. Neither needs a
// model's name. They are completions under other names; what is none of these, and what
// has more than text in it, is the engine's to judge and routed by its size.

// engineFields are the spans of the fields that only those endpoints have.
type engineFields struct {
	text, inputIDs, tokenIDs []byte
	sampling                 []byte
	items                    bool   // there is more in the prompt than text
	embeds                   bool   // the prompt is vectors
	lora, extraKey           []byte // what keeps SGLang's blocks apart
}

// top takes a field of the body.
func (f *engineFields) top(name, value []byte) {
	switch string(name) {
	case "text":
		f.text = value
	case "input_ids":
		f.inputIDs = value
	case "token_ids":
		f.tokenIDs = value
	case "sampling_params":
		f.sampling = value
	case "image_data", "video_data", "audio_data", "features":
		f.items = f.items || some(value)
	case "input_embeds":
		f.embeds = some(value)
	case "lora_path":
		f.lora = value
	case "extra_key":
		f.extraKey = value
	}
}

// some reports whether raw is more than null or an empty list.
func some(raw []byte) bool { return raw != nil && (raw[0] != '[' || filled(raw)) }

// engineRequest fills in the prompt of an engine's own endpoint; size is the body's.
func (f *fields) engineRequest(e Endpoint, b *Body, size int) {
	prompt := f.engine.tokenIDs
	if e == Generate {
		for _, p := range [][]byte{f.engine.text, f.engine.inputIDs, f.request.Prompt} {
			if prompt = p; prompt != nil {
				break
			}
		}
		b.CacheSalt = f.engine.salt(b.CacheSalt)
	}
	if b.MaxTokens == 0 {
		if b.MaxTokens = count(member(f.engine.sampling, "max_new_tokens")); b.MaxTokens == 0 {
			b.MaxTokens = count(member(f.engine.sampling, "max_tokens"))
		}
	}
	switch {
	case f.engine.embeds:
		b.Request = chat.Request{Size: size, Inexact: Embeds}
	case f.engine.items: // whose place in the prompt is the engine's to know
		b.Request = chat.Request{Size: size, Inexact: NoRenderer}
	case !isPrompt(prompt) || e == Ids && prompt[0] != '[':
		b.Request = chat.Request{Size: size, Inexact: NoPrompt}
	default:
		b.Request = chat.Request{Prompt: prompt}
	}
}

// isPrompt reports whether raw is text, ids, or a list of either that is not empty.
func isPrompt(raw []byte) bool {
	return raw != nil && (raw[0] == '"' || raw[0] == '[' && filled(raw))
}

// salt adds what keeps blocks apart to the salt: blocks of two adapters never meet,
// and neither do those of two extra keys.
func (f *engineFields) salt(salt string) string {
	for _, part := range []struct{ name, value string }{{"lora", string(f.lora)}, {"key", string(f.extraKey)}} {
		if part.value != "" {
			salt += "\x00" + part.name + "\x00" + part.value
		}
	}
	return salt
}
