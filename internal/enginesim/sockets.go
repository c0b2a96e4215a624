// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"

	"github.com/kvroute/kvroute/internal/zmtp"
)

// SocketsConfig describes the ZeroMQ sockets on which an engine publishes its cache events. The
// zero value of each field but Endpoint means its default.
type SocketsConfig struct {
	// Format is "vllm" (default) or "sglang".
	Format string
	// Endpoint is the address that the PUB socket binds.
	Endpoint string
	// Replay is the address of the ROUTER socket that sends batches again. Default: none.
	Replay string
	Topic  string
	Rank   uint32
	// Buffer is the number of batches that can be sent again. Default 10,000.
	Buffer int
	// Queue is the number of messages of an answer that the ROUTER socket accepts at a time. While
	// they are sent it drops as many, including the end of the answer if it comes then. The queues
	// of real engines behave in the same way, with ZeroMQ's default size. Default 1,000.
	Queue int
	// DropEvery drops each n-th live batch, so that only a replay contains it. 0 drops none.
	DropEvery int
}

// Sockets publish the changes of a cache, as vLLM and SGLang do: a batch for each step,
// numbered from 0.
type Sockets struct {
	conf         SocketsConfig
	pub          publisher
	live, replay *socket // replay is nil if absent

	mu sync.Mutex
	// mu guards the fields below.
	pending []Change
	next    uint64
	buffer  [][][]byte // the live messages that can be sent again, the newest last
	drop    int        // number of the next batches to drop
}

// NewSockets binds the sockets.
func NewSockets(conf SocketsConfig) (s *Sockets, err error) {
	conf.Format = cmp.Or(conf.Format, VLLM)
	conf.Buffer, conf.Queue = cmp.Or(conf.Buffer, 10_000), cmp.Or(conf.Queue, 1000)
	if conf.Format != SGLang && conf.Format != VLLM {
		return nil, fmt.Errorf("enginesim: Format is %q, want vllm or sglang", conf.Format)
	}
	s = &Sockets{conf: conf}
	if s.live, err = bind(conf.Endpoint, 5557, int(conf.Rank), zmtp.Pub, s.pub.follow); err != nil {
		return nil, err
	}
	if conf.Replay != "" {
		if s.replay, err = bind(conf.Replay, 5657, int(conf.Rank), zmtp.Router, s.answer); err != nil {
			_ = s.live.Close() // the other error is reported
			return nil, err
		}
	}
	return s, nil
}

// Endpoints returns the addresses of the sockets, "" for an absent one.
func (s *Sockets) Endpoints() (live, replay string) {
	if s.replay != nil {
		replay = s.replay.at.String()
	}
	return s.live.at.String(), replay
}

// Run serves the sockets until ctx ends.
func (s *Sockets) Run(ctx context.Context) error {
	var replayErr error
	var wg sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	if s.replay != nil {
		wg.Go(func() {
			defer cancel()
			replayErr = s.replay.run(ctx)
		})
	}
	err := s.live.run(ctx)
	cancel()
	wg.Wait()
	return errors.Join(err, replayErr)
}

// answer sends batches again, in the newest form of four frames, with an empty batch at the end.
func (s *Sockets) answer(c *zmtp.Conn) {
	for {
		frames, err := c.Read()
		if err != nil {
			return
		}
		if len(frames) != 2 || len(frames[0]) > 0 || len(frames[1]) != 8 {
			continue
		}
		from := frames[1] // sequences are big-endian, so bytes compare as numbers do
		s.mu.Lock()
		buffer := s.buffer
		s.mu.Unlock()
		buffer = slices.DeleteFunc(slices.Clone(buffer), func(m [][]byte) bool { return bytes.Compare(m[1], from) < 0 })
		for i, m := range append(buffer, [][]byte{nil, binary.BigEndian.AppendUint64(nil, 1<<64-1), nil}) {
			if i/s.conf.Queue%2 == 1 {
				continue // the queue is full
			}
			if err := c.Write(nil, m[0], m[1], m[2]); err != nil {
				return
			}
		}
	}
}

// add queues a change for the next flush.
func (s *Sockets) add(c Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending = append(s.pending, c)
}

// flush publishes the added changes as one batch.
func (s *Sockets) flush() {
	s.mu.Lock()
	changes := s.pending
	s.pending = nil
	s.mu.Unlock()
	if len(changes) > 0 {
		s.Publish(changes...)
	}
}

// Publish publishes changes as a batch.
func (s *Sockets) Publish(changes ...Change) {
	s.PublishBody(batch(changes, s.conf.Rank, s.conf.Format == SGLang))
}

// PublishBody publishes a body as it is.
func (s *Sockets) PublishBody(body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := [][]byte{[]byte(s.conf.Topic), binary.BigEndian.AppendUint64(nil, s.next), body}
	s.next++
	s.buffer = append(s.buffer, m)
	if len(s.buffer) > s.conf.Buffer {
		s.buffer = slices.Clone(s.buffer[1:]) // a replay in progress reads the old array
	}
	switch {
	case s.drop > 0:
		s.drop--
	case s.conf.DropEvery > 0 && s.next%uint64(s.conf.DropEvery) == 0:
	default:
		s.pub.send(m...)
	}
}

// PublishFrames publishes frames as they are, valid or not.
func (s *Sockets) PublishFrames(frames ...[]byte) { s.pub.send(frames...) }

// Drop drops the next n live batches, so that only a replay contains them.
func (s *Sockets) Drop(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop = n
}

// Subscribers returns the number of subscribers.
func (s *Sockets) Subscribers() int {
	n, _ := s.pub.counts()
	return n
}

// Joined returns the number of subscriptions since the start.
func (s *Sockets) Joined() uint64 {
	_, n := s.pub.counts()
	return n
}

// Restart has the effect of a restart of the process on subscribers: connections end, numbers
// begin at 0 again, and no event is published.
func (s *Sockets) Restart() {
	s.mu.Lock()
	s.pending, s.next, s.buffer = nil, 0, nil
	s.mu.Unlock()
	s.live.disconnect()
	if s.replay != nil {
		s.replay.disconnect()
	}
}

// description returns the path and the answer with which an engine describes its sockets.
func (s *Sockets) description(blockSize int) (path string, answer map[string]any) {
	if s.conf.Format == SGLang {
		return "/server_info", map[string]any{"kv_events": map[string]any{
			"publisher": "zmq", "endpoint_host": s.live.at.Host, "endpoint_port_base": s.live.at.Port - int(s.conf.Rank), "topic": s.conf.Topic, "block_size": blockSize, "dp_size": 1,
		}}
	}
	live, replay := s.Endpoints()
	source := map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": live, "replay_endpoint": nil,
		"buffer_steps": s.conf.Buffer, "hwm": 100_000, "max_queue_size": 100_000, "topic": s.conf.Topic,
	}
	if replay != "" {
		source["replay_endpoint"] = replay
	}
	return "/kv_event_sources", map[string]any{strconv.Itoa(int(s.conf.Rank)): source}
}
