// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"

	"github.com/kvroute/kvroute/events"
)

// Discover queries an engine for its sockets.
func Discover(ctx context.Context, w EngineWorker) (Found, error) {
	s, err := NewSources(SourcesConfig{})
	if err != nil {
		return Found{}, err
	}
	defer s.conf.Client.CloseIdleConnections()
	return s.Discover(ctx, w)
}

// Replays returns the replay endpoints of the ranks, "" for a rank without one.
func (f *Found) Replays() (endpoints []string) {
	for _, at := range f.sockets {
		if endpoints = append(endpoints, ""); at.replays {
			endpoints[len(endpoints)-1] = at.replay.String()
		}
	}
	return endpoints
}

// TestRank is a rank without sockets.
type TestRank struct{ r *rankSource }

// NewTestRank returns a rank of worker 7.
func NewTestRank(sink events.Sink) TestRank {
	s, err := NewSources(SourcesConfig{Sink: sink})
	if err != nil {
		panic(err)
	}
	r := newRankSource(s, &EngineWorker{ID: 7, BlockSize: 4}, socket{}, s.conf.Log)
	return TestRank{r}
}

// Take passes a message's frames to the rank.
func (r TestRank) Take(frames [][]byte) { r.r.live(frames) }

func DecodeTRTLLM(data []byte) (EngineBatch, error) { return decodeTRTLLM(data) }
