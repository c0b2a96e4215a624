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
	// Special are the special tokens' texts by their names, such as bos_token.
	Special map[string]string
	// ModelType is the model_type of config.json, "" if there is no such file.
	ModelType string
	// Architectures are the architectures of config.json: they decide whether code of the engine makes the prompts.
	Architectures []string
	// Mode is the engine's --tokenizer-mode if it is set, else "".
	Mode string
	// SortTools is set if code of the model sorts the objects in tools by their keys.
	SortTools bool
	// Mistral is set for files that are Mistral's own.
	Mistral *Mistral
	// ID returns the id of a control token by its text. Prompts of gpt-oss and of Mistral's own
	// files need it. Nil means that there are no control tokens.
	ID func(text string) (id uint32, ok bool)

	broken error // why the chat_template of tokenizer_config.json cannot be read
}

// LoadFiles reads the chat template and the special tokens: chat_template.jinja,
// which wins over the chat_template of tokenizer_config.json, and
// special_tokens_map.json; and config.json, for the kind of model. read returns a file
// of the model, or an error that wraps fs.ErrNotExist; all files may be missing. The
// error names the file.
func LoadFiles(read func(name string) ([]byte, error)) (*Files, error) {
	f := &Files{Templates: map[string]string{}, Special: map[string]string{}}
	config := struct {
		ModelType     *string   `json:"model_type"`
		Architectures *[]string `json:"architectures"`
	}{&f.ModelType, &f.Architectures}
	for _, file := range []struct {
		name string
		use  func(b []byte) error
	}{
		{"special_tokens_map.json", f.readConfig},
		{"tokenizer_config.json", f.readConfig},
		{"config.json", func(b []byte) error { return json.Unmarshal(b, &config) }},
		{"chat_template.jinja", func(b []byte) error {
			f.Templates["default"] = string(b)
			return nil
		}},
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
	}
	return f, nil
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
		f.Templates["default"] = text
		return nil
	}
	var list []struct{ Name, Template string }
	if err := json.Unmarshal(raw, &list); err != nil {
		f.broken = fmt.Errorf("chat_template in tokenizer_config.json is neither a text nor a list of named texts: %w",
			ErrNoTemplate)
	}
	for _, t := range list {
		f.Templates[t.Name] = t.Template
	}
	return nil
}
