// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/json"
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// presenceTopic ends the subject on which routers publish their presence.
const presenceTopic = "presence"

const (
	// presencePeriod is how often a router says that it is there.
	presencePeriod = 2 * time.Second
	// maxRouters bounds what liars can make a publisher remember.
	maxRouters = 4096
)

// audience is the routers that a publisher has heard of. The zero value is one
// without any.
type audience struct {
	routers map[uint64]listener
}

type listener struct {
	at    time.Time
	wants bool
}

// hear takes a router's presence. A router that does not say whether it wants
// events is an older one, and does.
func (a *audience) hear(now time.Time, data []byte) {
	said := struct {
		RouterID uint64 `json:"router_id"`
		Wants    *bool  `json:"wants_events"`
	}{}
	if json.Unmarshal(data, &said) != nil || said.RouterID == 0 {
		return
	}
	if a.routers == nil {
		a.routers = make(map[uint64]listener)
	}
	if _, known := a.routers[said.RouterID]; known || len(a.routers) < maxRouters {
		a.routers[said.RouterID] = listener{now, said.Wants == nil || *said.Wants}
	}
}

// listens reports whether to speak: some router wants events, or none is known. The
// latter may be because they are of another kind or about to start, and a stream
// may be there to keep the events for them.
func (a *audience) listens(now time.Time) bool {
	wanted := false
	for id, l := range a.routers {
		if now.Sub(l.at) >= 3*presencePeriod {
			delete(a.routers, id)
			continue
		}
		wanted = wanted || l.wants
	}
	return wanted || len(a.routers) == 0
}

// tell takes a router's message that it is there, or just looks at the clock. Who
// comes to be heard again is told what it missed.
func (p *Publisher) tell(now time.Time, presence []byte) {
	if !p.conf.Quiet {
		return
	}
	p.mu.Lock()
	if presence != nil {
		p.audience.hear(now, presence)
	}
	same := !p.audience.listens(now) == p.silent
	p.mu.Unlock()
	if same {
		return
	}
	p.answering.Lock()
	defer p.answering.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	silent := !p.audience.listens(now)
	if silent == p.silent {
		return
	}
	p.conf.Log.Info("routers want events, or want none any more", "wanted", !silent)
	p.silent = silent
	if silent || p.conf.LocalIndexer && !p.conf.Durable {
		return // who has missed something asks; who reads the stream does not
	}
	p.sealLocked()
	for _, rank := range p.local.Ranks() {
		content, waiting := p.local.Rank(rank)
		evs, err := content.Events()
		if err != nil { // it cannot be overtaken: we hold mu
			p.lost[rank] = true
			continue
		}
		evs = append(evs, waiting...)
		p.publishLocked(rank, indexer.Event{Kind: indexer.Cleared})
		for _, ev := range evs {
			p.publishLocked(rank, ev)
		}
	}
}
