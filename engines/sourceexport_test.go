// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
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

// GiveUp is a request of missing batches without an answer, and Answer one with an answer. They log to log.
func (r TestRank) GiveUp(log *slog.Logger) {
	r.r.log = log
	r.r.gaveUp()
}
func (r TestRank) Answer() { r.r.unavailable(&r.r.noReplay, nil) }

// Take passes a message's frames to the rank.
func (r TestRank) Take(frames [][]byte) { r.r.live(frames) }

// Restart saves an engine, whose events an index has, as a worker's rank 0. It returns what a later process loads, and
// the state of the rank then.
func Restart(e *Engine, index *indexer.Index) (again *Engine, to *indexer.Index, state indexer.State, err error) {
	to = indexer.New(indexer.Config{})
	rank := func(x *indexer.Index) *rankSource {
		var s *Sources
		s, err = NewSources(SourcesConfig{
			Sink:  func(_ uint64, rank uint32, ev indexer.Event) { x.Apply(int(rank), ev) },
			Sides: func(_ uint64, rank uint32) []indexer.Event { return x.Sides(int(rank)) },
		})
		r := newRankSource(s, &EngineWorker{ID: 7, BlockSize: e.opt.BlockSize, SetLike: e.opt.SetLike}, socket{replays: true}, s.conf.Log)
		s.ranks[r] = struct{}{}
		return r
	}
	before, after := rank(index), rank(to)
	before.engine = e
	before.follower.Continue(41, 42)
	var file bytes.Buffer
	if err = before.s.Save(&file); err != nil {
		return nil, nil, "", err
	}
	if n, err := after.s.Load(&file); n != 1 || err != nil {
		return nil, nil, "", fmt.Errorf("%d ranks, %w", n, err)
	}
	after.restore()
	return after.engine, to, after.follower.State(), nil
}

func DecodeTRTLLM(data []byte) (EngineBatch, error) { return decodeTRTLLM(data) }
