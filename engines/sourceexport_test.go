// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"

	"github.com/kvroute/kvroute/events"
)

// Stream lets tests drive a stream.
type Stream struct{ s *stream }

// NewStream returns a stream.
func NewStream(replays bool, apply func([]byte) bool, wipe func(), count func(string, int)) *Stream {
	return &Stream{newStream(replays, apply, wipe, count)}
}

func (s *Stream) Connected(closed bool) { s.s.connected(closed) }
func (s *Stream) FromLive(sequence uint64, body []byte) {
	s.s.fromLive(batch{sequence: sequence, body: body})
}

func (s *Stream) FromReplay(sequence uint64, body []byte) {
	s.s.fromReplay(batch{sequence: sequence, body: body})
}
func (s *Stream) ReplayEnd()                     { s.s.replayEnd() }
func (s *Stream) GiveUp()                        { s.s.giveUp() }
func (s *Stream) TryAll()                        { s.s.requestAll() }
func (s *Stream) Forgive()                       { s.s.partial = false }
func (s *Stream) More()                          { s.s.requestMore() }
func (s *Stream) Reread()                        { s.s.reread() }
func (s *Stream) From() uint64                   { return s.s.from() }
func (s *Stream) Begin() uint64                  { return s.s.begin() }
func (s *Stream) Asks() int                      { return s.s.requests }
func (s *Stream) Asking() bool                   { return s.s.requesting }
func (s *Stream) State() (partial, suspect bool) { return s.s.partial, s.s.suspect }

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
