// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"context"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/tokenizer/chat"
)

// classSet is a set of classes of requests.
type classSet [chat.Classes / 32]atomic.Uint32

func (s *classSet) has(c chat.Class) bool { return s[c/32].Load()>>(c%32)&1 == 1 }

// checkedShare is one in how many prompts of an unconfirmed class have ids for a comparison.
const checkedShare = 20

// SetConfirmed says whether the engines make the same ids for requests of a class as kvroute. While they do not, the
// prompts of the class are encoded in text-block mode, and one in 20 has ids in [Prompt.Checked].
func (m *Model) SetConfirmed(c chat.Class, confirmed bool) {
	if confirmed {
		m.unconfirmed[c/32].And(^(uint32(1) << (c % 32)))
		return
	}
	m.asked[c].Store(0) // the next prompt has ids
	m.unconfirmed[c/32].Or(uint32(1) << (c % 32))
}

// inText is encode in text-block mode for a request of an unconfirmed class.
func (m *Model) inText(ctx context.Context, dst []uint32, q chat.Request, now time.Time, class chat.Class) (Prompt, error) {
	p, err := inBytes(dst, q, Drifted)
	if p.Class = class; err != nil || m.asked[class].Add(1)%checkedShare != 1 {
		return p, err
	}
	if ids, err := m.encode(ctx, nil, q, now, false); err == nil && (ids.Mode == Exact || ids.Mode == ExactPrefix) {
		p.Checked = ids.IDs[:ids.Exact]
	}
	return p, nil
}

// itemMerges is the number of tokens before an item that may merge with the item.
const itemMerges = 2
