// SPDX-License-Identifier: Apache-2.0

package chat

import "strings"

// maker names code of an engine that makes prompts instead of a chat template. It is one of vLLM's tokenizer modes, or "".
type maker string

const (
	deepSeek32 maker = "deepseek_v32"
	deepSeek4  maker = "deepseek_v4"
	deepSeek41 maker = "deepseek_v41"
	kimi3      maker = "kimi_k3"
	kimiAudio  maker = "kimi_audio"
	inkling    maker = "inkling"
	cohereCode maker = "cohere"
	superAlpha maker = "alpamayo2_super"
)

// vllmMakers are the architectures whose prompts vLLM 0.33 makes in code.
//
//nolint:gochecknoglobals // a table
var vllmMakers = map[string]maker{
	"DeepseekV32ForCausalLM":             deepSeek32,
	"DeepseekV4ForCausalLM":              deepSeek4,
	"DeepseekV4ForConditionalGeneration": deepSeek4,
	"DeepseekV41ForCausalLM":             deepSeek41,
	"KimiK3ForConditionalGeneration":     kimi3,
	"MoonshotKimiaForCausalLM":           kimiAudio,
	"InklingForCausalLM":                 inkling,
	"InklingForConditionalGeneration":    inkling,
	"Alpamayo2Super":                     superAlpha,
}

// maker returns the code that makes the prompts, "" if that is the chat template.
func (f *Files) maker(p Profile) maker {
	arch := ""
	if len(f.Architectures) > 0 {
		arch = f.Architectures[0]
	}
	switch p {
	case VLLM:
		if f.Mode != "" && f.Mode != "hf" {
			return maker(f.Mode)
		}
		if f.Mode == "" {
			return vllmMakers[arch]
		}
	case SGLang:
		_, template := f.Templates["default"]
		switch {
		case f.ModelType == "deepseek_v41" || strings.Contains(arch, "DeepseekV41"):
			return deepSeek41
		case strings.Contains(arch, "DeepseekV4"):
			return deepSeek4
		case strings.Contains(arch, "KimiK3"):
			return kimi3
		case strings.Contains(arch, "InklingForConditionalGeneration"):
			return inkling
		case strings.Contains(arch, "DeepseekV3") && !template:
			return deepSeek32
		}
	}
	return ""
}

// UsesTokenizerJSON reports whether the engine reads tokenizer.json unchanged, whatever class the files name, because code makes
// the prompts.
func (f *Files) UsesTokenizerJSON(p Profile) bool {
	m := f.maker(p)
	return p == VLLM && (m == deepSeek32 || m == deepSeek4 || m == deepSeek41)
}
