// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/json"
	"time"
)

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
