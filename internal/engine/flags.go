// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"
)

// Flags are flags of a running engine that change prompts, as the engine reports them.
type Flags struct {
	// Kwargs is --default-chat-template-kwargs, as [OrderedKwargs] returns it; "" = none.
	Kwargs string `json:",omitempty"`
	// Template is --chat-template: a name that the engine knows, or a path on the engine's machine; "" = none.
	// TemplateName is --hf-chat-template-name.
	Template     string `json:",omitempty"`
	TemplateName string `json:",omitempty"`
}

// Equal reports whether two engines report the same; nil = they do not report their flags.
func (f *Flags) Equal(o *Flags) bool { return f == o || f != nil && o != nil && *f == *o }

// String names the flags that are set, as a command line has them.
func (f *Flags) String() string {
	var set []string
	for _, flag := range []struct{ name, value string }{
		{"--default-chat-template-kwargs", f.Kwargs}, {"--chat-template", f.Template}, {"--hf-chat-template-name", f.TemplateName},
	} {
		if flag.value != "" {
			set = append(set, fmt.Sprintf("%s %.200s", flag.name, flag.value))
		}
	}
	if set == nil {
		return "no flags for prompts"
	}
	return strings.Join(set, " ")
}

// maxKwargs limits the keyword arguments of a chat template, in bytes.
const maxKwargs = 64 << 10

// OrderedKwargs returns keyword arguments of a chat template, a JSON object or null, without spaces and with sorted
// keys. Objects inside keep the order of their keys, which templates write into prompts. The form of null and of the
// empty object is "". Other JSON, and more than 64 KiB, are errors.
func OrderedKwargs(text []byte) (string, error) {
	return compacted(text, new(map[string]json.RawMessage))
}

// SortedKwargs is OrderedKwargs with sorted keys in all objects: one form for all objects with equal values.
func SortedKwargs(text []byte) (string, error) { return compacted(text, new(map[string]any)) }

func compacted[V any](text []byte, kwargs *map[string]V) (string, error) {
	if len(text) > maxKwargs {
		return "", fmt.Errorf("%d bytes, at most %d are read", len(text), maxKwargs)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	if err := d.Decode(kwargs); err != nil || len(*kwargs) == 0 {
		return "", err
	}
	sorted, err := json.Marshal(*kwargs)
	return string(sorted), err
}
