// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"context"
	"slices"

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

// SetEngineVersion sets the version of the engine that serves the model, as its workers register it. The profile sglang has
// rules of its own for versions before 0.5.23. It may be called at any time.
func (m *Model) SetEngineVersion(version string) {
	if m != nil && m.chat != nil {
		m.chat.SetVersion(version)
	}
}

// continued appends the ids of the text that the answer continues. SGLang encodes it like a completion, without a token for
// the beginning of a text.
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
