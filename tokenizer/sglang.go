// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// readBySGLang returns a request as SGLang reads it.
func (m *Model) readBySGLang(q chat.Request) chat.Request {
	if q.Convert != nil && m.chat != nil {
		q = q.Convert(m.chat.Engine())
	}
	if isTokenIDs(q.InputIDs) {
		q.Prompt = q.InputIDs
	}
	q.AddSpecialTokens, q.TruncatePromptTokens = nil, nil // fields of vLLM
	return q
}

// SetEngineVersion sets the version of the engine that serves the model, as its workers register it. The profile
// sglang has rules of its own for versions before 0.5.23. It may be called at any time.
func (m *Model) SetEngineVersion(version string) {
	if m != nil && m.chat != nil {
		m.chat.SetVersion(version)
	}
}

// SetEngineFlags sets the flags that the running engine reports; nil = it does not report them. Reported keyword
// arguments replace those of [ModelConfig.Flags]. It may be called at any time.
func (m *Model) SetEngineFlags(f *engine.Flags) {
	if m != nil && m.chat != nil {
		m.chat.SetEngineFlags(f)
	}
}

// Contradicts says in a sentence how the settings of the model differ from the flags that an engine reports; "" if
// they do not. A setting that is missing contradicts only a chat template, of which engines report no more than the
// name.
func (m *Model) Contradicts(f *engine.Flags) string {
	kwargs, _ := engine.SortedKwargs(m.flags.DefaultKwargs) // LoadModel checked them
	reported, _ := engine.SortedKwargs([]byte(cmp.Or(f.Kwargs, "null")))
	switch {
	case m.flags.DefaultKwargs != nil && kwargs != reported:
		return fmt.Sprintf("default-chat-template-kwargs is %.200s, and its engine reports %.200s: kvroute uses the engine's; correct or remove the setting",
			kwargs, cmp.Or(reported, "none"))
	case f.Template != "" && !m.ownTemplate:
		return fmt.Sprintf("its engine runs with --chat-template %s, and kvroute uses the template of the model's folder: set chat-template to the same file",
			f.Template)
	case f.TemplateName != "" && !m.ownTemplate:
		return fmt.Sprintf("its engine runs with --hf-chat-template-name %s, and kvroute uses the default template of the model's folder: set chat-template to a file with that template",
			f.TemplateName)
	}
	return ""
}

// continued appends the ids of the text that the answer continues. SGLang encodes it like a completion, without a
// token for the beginning of a text.
func (m *Model) continued(ctx context.Context, p Prompt, text string) (Prompt, error) {
	from := len(p.IDs)
	var err error
	if p.IDs, _, err = m.cache.append(ctx, p.IDs, m.tok, []byte(text), framed); err != nil {
		p.IDs = p.IDs[:from]
		return p, err
	}
	if from < len(p.IDs) && m.hasBOS && p.IDs[from] == m.bos {
		p.IDs = slices.Delete(p.IDs, from, from+1)
	}
	p.Size += len(text)
	return p, nil
}
