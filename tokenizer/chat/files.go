// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"strings"
)

// Files holds what a model's files contain about chats, without the vocabulary.
type Files struct {
	// Templates are the chat templates by name: "default", and for some models
	// "tool_use" and others.
	Templates map[string]string
	// names are the names of Templates in the order of the files.
	names []string
	// processor is the chat template of the model's processor, "" if it is not another one. vLLM uses it for requests
	// without tools, SGLang for all.
	processor      string
	processorClass bool // the files name the class of a processor
	// Special are the special tokens' texts by their names, such as bos_token.
	Special map[string]string
	// ModelType is the model_type of config.json, "" if there is no such file.
	ModelType string
	// Architectures are the architectures of config.json: they decide whether code of the engine makes the prompts.
	Architectures []string
	// Context is the context length that config.json gives, in tokens; 0 if it gives none.
	Context int
	// Mode is the engine's --tokenizer-mode if it is set, else "".
	Mode string
	// SortTools is set if code of the model sorts the objects in tools by their keys.
	SortTools bool
	// Mistral is set for files that are Mistral's own.
	Mistral *Mistral
	// ID returns the id of a control token by its text. Prompts of gpt-oss and of Mistral's own
	// files need it. Nil means that there are no control tokens.
	ID func(text string) (id uint32, ok bool)

	given  bool  // the engine was started with a template
	broken error // why the chat_template of tokenizer_config.json cannot be read
}

// additional is the folder of chat templates with names.
const additional = "additional_chat_templates"

// LoadFiles reads the chat templates, the special tokens and the kind of model as transformers 5 does:
//   - chat_template.jinja and additional_chat_templates/*.jinja, which replace the chat_template of tokenizer_config.json
//   - chat_template.json and the chat_template of processor_config.json, which a processor for images or the like reads
//   - special_tokens_map.json and config.json
//
// read returns a file of the model, or an error that wraps fs.ErrNotExist; list returns the names of the files in a
// folder. All files may be missing. The error names the file.
func LoadFiles(read func(name string) ([]byte, error), list func(folder string) []string) (*Files, error) {
	f := &Files{Templates: map[string]string{}, Special: map[string]string{}}
	config := struct {
		ModelType     *string   `json:"model_type"`
		Architectures *[]string `json:"architectures"`
		Context       *int      `json:"max_position_embeddings"`
	}{&f.ModelType, &f.Architectures, &f.Context}
	for _, file := range []struct {
		name string
		use  func(b []byte) error
	}{
		{"special_tokens_map.json", f.readConfig},
		{"tokenizer_config.json", f.readConfig},
		{"config.json", func(b []byte) error { return json.Unmarshal(b, &config) }},
		{"chat_template.json", f.readProcessor},
		{"processor_config.json", f.readProcessor},
		{"preprocessor_config.json", func([]byte) error { return nil }},
	} {
		b, err := read(file.name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		if err := file.use(b); err != nil {
			return nil, fmt.Errorf("chat: %s: %w", file.name, err)
		}
		var class struct {
			Name string `json:"processor_class"`
		}
		if json.Unmarshal(b, &class) == nil && class.Name != "" {
			f.processorClass = true
		}
	}
	if err := f.readTemplates(read, list); err != nil {
		return nil, err
	}
	return f, nil
}

// readTemplates reads the files that hold one template each. If there are any, the chat_template of
// tokenizer_config.json does not count.
func (f *Files) readTemplates(read func(name string) ([]byte, error), list func(folder string) []string) error {
	names := []string{"chat_template.jinja"}
	for _, name := range list(additional) {
		if name, ok := strings.CutSuffix(strings.TrimSuffix(name, ".gz"), ".jinja"); ok {
			names = append(names, additional+"/"+name+".jinja")
		}
	}
	if len(names) > 1 { // transformers does not load such a processor
		f.processor = ""
	}
	files := Files{Templates: map[string]string{}}
	for i, file := range names {
		b, err := read(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		name := "default"
		if i > 0 {
			name = strings.TrimSuffix(strings.TrimPrefix(file, additional+"/"), ".jinja")
		}
		files.addTemplate(name, string(b))
	}
	if len(files.names) > 0 {
		f.Templates, f.names, f.broken = files.Templates, files.names, nil
	}
	return nil
}

func (f *Files) addTemplate(name, text string) {
	if _, ok := f.Templates[name]; !ok {
		f.names = append(f.names, name)
	}
	f.Templates[name] = text
}

// TemplateOfFile returns the template that an engine reads from a file with a text. SGLang has rules of its own for the
// file of --chat-template.
func TemplateOfFile(p Profile, text string) string {
	if p != SGLang {
		return text
	}
	text = strings.Trim(strings.ReplaceAll(text, "\r\n", "\n"), "\n")
	return strings.ReplaceAll(text, `\n`, "\n")
}

// SetTemplate replaces all templates by the one that the engine was started with.
func (f *Files) SetTemplate(text string) {
	f.Templates, f.names, f.processor, f.broken = map[string]string{"default": text}, []string{"default"}, "", nil
	f.given = true
}

// readProcessor reads the template of a processor. The last file counts.
func (f *Files) readProcessor(b []byte) error {
	var file struct {
		Template json.RawMessage `json:"chat_template"`
	}
	if err := json.Unmarshal(b, &file); err != nil {
		return err
	}
	_ = json.Unmarshal(file.Template, &f.processor) // what is no text is no template of a processor
	return nil
}

func (f *Files) id(text string) (uint32, bool) {
	if f.ID == nil {
		return NoID, false
	}
	return f.ID(text)
}

// SpecialTokens are the fields of tokenizer_config.json with the special tokens that every tokenizer has, in the order
// in which transformers adds them.
//
//nolint:gochecknoglobals // a table
var SpecialTokens = strings.Fields("bos_token eos_token unk_token sep_token pad_token cls_token mask_token")

func (f *Files) readConfig(b []byte) error {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(b, &fields); err != nil {
		return err
	}
	for _, name := range SpecialTokens {
		// A token is a string, or an object with its content.
		var text string
		var object struct{ Content string }
		switch raw := fields[name]; {
		case len(raw) == 0 || string(raw) == "null":
		case json.Unmarshal(raw, &text) == nil:
			f.Special[name] = text
		case json.Unmarshal(raw, &object) == nil:
			f.Special[name] = object.Content
		default:
			return fmt.Errorf("%s is neither a string nor an object", name)
		}
	}
	raw := fields["chat_template"]
	if len(raw) == 0 || string(raw) == "null" {
		return nil
	}
	var text string
	if json.Unmarshal(raw, &text) == nil {
		f.addTemplate("default", text)
		return nil
	}
	var list []struct{ Name, Template string }
	if err := json.Unmarshal(raw, &list); err != nil {
		f.broken = fmt.Errorf("chat_template in tokenizer_config.json is neither a text nor a list of named texts: %w",
			ErrNoTemplate)
	}
	for _, t := range list {
		f.addTemplate(t.Name, t.Template)
	}
	return nil
}
