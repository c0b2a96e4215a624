// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"slices"
	"strings"
)

// maker names code of an engine that makes prompts instead of a chat template. It is one of vLLM's tokenizer modes,
// or "".
type maker string

const (
	deepSeek32 maker = "deepseek_v32"
	deepSeek4  maker = "deepseek_v4"
	deepSeek41 maker = "deepseek_v41"
	kimi3      maker = "kimi_k3"
	kimiAudio  maker = "kimi_audio"
	inkling    maker = "inkling"
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

// sglangConversations are the model types for which SGLang 0.5.23 has a conversation in code, in place of the
// model's chat template.
//
//nolint:gochecknoglobals // a table
var sglangConversations = strings.Fields("internvl_chat deepseek_vl_v2 multi_modality phi4mm minicpmv minicpmo moss_vl deepseek-ocr " +
	"unlimited-ocr paddleocr_vl whisper")

// maker returns the code that makes the prompts, "" if that is the chat template.
func (f *Files) maker(p Profile) maker {
	arch := ""
	if len(f.Architectures) > 0 {
		arch = f.Architectures[0]
	}
	switch p {
	case VLLM:
		if f.Mode == "" { // else the engine was told to use the template
			return vllmMakers[arch]
		}
	case SGLang:
		_, template := f.Templates["default"]
		switch {
		case slices.Contains(sglangConversations, f.ModelType) && !f.given:
			return maker(f.ModelType)
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
	case TRTLLM: // nothing is known of such code
	}
	return ""
}

// UsesTokenizerJSON reports whether the engine reads tokenizer.json unchanged, whatever class the files name,
// because code makes the prompts.
func (f *Files) UsesTokenizerJSON(p Profile) bool {
	m := f.maker(p)
	return p == VLLM && (m == deepSeek32 || m == deepSeek4 || m == deepSeek41)
}

// chosen is a chat template and its name in errors.
type chosen struct{ name, text string }

// choose returns the templates that the engine uses for requests without and with tools; one without a text is missing.
func (f *Files) choose(p Profile) (plain, tools chosen) {
	named := func(name string) chosen {
		label := "chat_template"
		if name != "default" {
			label += " " + name
		}
		return chosen{label, f.Templates[name]}
	}
	plain = named("default")
	switch _, ok := f.Templates["tool_use"]; {
	case p == SGLang && f.processor != "":
		plain = chosen{"chat_template of the processor", f.processor}
		return plain, plain
	case p == SGLang && len(f.names) > 0: // it takes the first of several
		plain = named(f.names[0])
		return plain, plain
	case ok:
		tools = named("tool_use")
	default:
		tools = plain
	}
	if p == VLLM && f.processor != "" {
		plain = chosen{"chat_template of the processor", f.processor}
	}
	return plain, tools
}
