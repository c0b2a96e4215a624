// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"fmt"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// Flags are flags of the engine that change prompts. The zero value has the engine's defaults. The fields have the
// names of vLLM's flags.
type Flags struct {
	// DefaultKwargs is --default-chat-template-kwargs: a JSON object, or nil.
	DefaultKwargs []byte
	// ExcludeTools is --exclude-tools-when-tool-choice-none.
	ExcludeTools bool
	// ContentFormat is --chat-template-content-format: string, openai, or auto, which is the default.
	ContentFormat string
	// EffortMap is --reasoning-effort-map: the efforts for the template by those of requests.
	EffortMap map[string]string
	// DisabledEffort is --anthropic-disabled-thinking-effort: an effort, or auto, which is the default.
	DisabledEffort string
}

// efforts are the reasoning efforts of Anthropic's API.
//
//nolint:gochecknoglobals // a table
var efforts = strings.Fields("low medium high xhigh max")

// check returns an error for a value that the engine's flag does not have.
func (f *Flags) check() error {
	if f.DefaultKwargs != nil {
		if v, err := jinja.FromJSON(f.DefaultKwargs); err != nil || v.Dict() == nil {
			return fmt.Errorf("default-chat-template-kwargs is not an object: %s", f.DefaultKwargs)
		}
	}
	if !slices.Contains([]string{"", "auto", "string", "openai"}, f.ContentFormat) {
		return fmt.Errorf("chat-template-content-format is %q, want auto, string or openai", f.ContentFormat)
	}
	if e := f.DisabledEffort; e != "" && e != "auto" && e != "none" && !slices.Contains(efforts, e) {
		return fmt.Errorf("anthropic-disabled-thinking-effort is %q, want auto, none, %s", e, strings.Join(efforts, ", "))
	}
	return nil
}
