// SPDX-License-Identifier: Apache-2.0

package router

import (
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Side is a side of the comparison that [Config.HoldoutShare] makes.
type Side string

// The sides. The empty string means that a request takes no part: without HoldoutShare, if the request names its
// worker, if a hard session binds it, and if its prompt cannot be compared.
const (
	SideRouted     Side = "routed"      // routed as all requests are without HoldoutShare
	SideRoundRobin Side = "round-robin" // routed round robin, with [ReasonHoldout]
)

// holdout says which side a request is on, and which conversation it belongs to. All requests of a conversation are on
// one side, on each replica with the same [Config.Seed].
type holdout struct {
	side         Side
	conversation uint64
}

const (
	// holdoutSeed separates the draw of the side from all other draws.
	holdoutSeed = 0x686f6c646f7574
	// openingBytes limits the bytes that are hashed at each end of the opening of a conversation.
	openingBytes = 2048
)

// holdoutOf draws the side of a request, with a HoldoutShare above 0.
func (r *Router) holdoutOf(in *decisionInput) (h holdout) {
	if r.conf.Mode == Direct || in.Pinned != nil || in.Preferred != nil || in.Held != "" || in.prompt.fallback != "" ||
		in.Session != "" && r.conf.Sessions.TTL > 0 && r.conf.Sessions.Hard {
		return h
	}
	if h.conversation = conversationOf(in); h.conversation == 0 {
		return h
	}
	h.side = SideRouted
	if scorer.Draw(r.conf.Seed^holdoutSeed, h.conversation) < r.conf.HoldoutShare {
		h.side = SideRoundRobin
	}
	return h
}

// conversationOf returns a hash that all requests of a conversation have in common; 0 if the request has none. It is
// that of the session. Without a session it is that of the beginning of the prompt: the messages of a chat up to the
// first one of the user, or the first block of another prompt.
func conversationOf(in *decisionInput) uint64 {
	switch {
	case in.Session != "":
		return max(1, scorer.DrawKey(in.Session))
	case len(in.Prompt.Messages) > 0:
		text := chat.Opening(in.Prompt.Messages)
		key := scorer.DrawKey(string(text[:min(len(text), openingBytes)]))
		return max(1, key^scorer.DrawKey(string(text[max(0, len(text)-openingBytes):]))*31)
	case len(in.hashes.local) > 0:
		return max(1, in.hashes.local[0])
	}
	return 0
}
