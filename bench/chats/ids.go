// SPDX-License-Identifier: Apache-2.0

package chats

import (
	"context"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
)

// IDs returns kvroute's token ids of a chat request, nil if kvroute refuses the body or cannot
// know the ids.
func IDs(m *tokenizer.Model, body []byte, now time.Time) []uint32 {
	b, bad := openai.Parse(openai.ChatCompletions, body)
	if bad != nil {
		return nil
	}
	p, err := m.Encode(context.Background(), nil, b.Request, now)
	if err != nil || p.Mode != tokenizer.Exact {
		return nil
	}
	return p.IDs
}
