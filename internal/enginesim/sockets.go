// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/indexer"
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
	sglang       bool // the format, else vLLM's
	pub          zmtp.Publisher
	live, replay net.Listener // nil if absent

	mu sync.Mutex
	// mu guards the fields below.
	pending []Change
	next    uint64
	buffer  []message // the newest last
	conns   map[*zmtp.Conn]struct{}
	drop    int // number of the next batches to drop
}

type message struct {
	sequence uint64
	body     []byte
}

// NewSockets binds the sockets.
func NewSockets(conf SocketsConfig) (*Sockets, error) {
	setDefault(&conf.Format, VLLM)
	setDefault(&conf.Buffer, 10_000)
	setDefault(&conf.Queue, 1000)
	s := &Sockets{conf: conf, conns: make(map[*zmtp.Conn]struct{})}
	if s.sglang = conf.Format == SGLang; !s.sglang && conf.Format != VLLM {
		return nil, fmt.Errorf("enginesim: Format is %q, want vllm or sglang", conf.Format)
	}
	at, err := zmtp.ParseEndpoint(conf.Endpoint, 5557, int(conf.Rank))
	if err != nil {
		return nil, err
	}
	if s.live, err = zmtp.Listen(at); err != nil {
		return nil, err
	}
	if conf.Replay == "" {
		return s, nil
	}
	if at, err = zmtp.ParseEndpoint(conf.Replay, 5657, int(conf.Rank)); err == nil {
		s.replay, err = zmtp.Listen(at)
	}
	if err != nil {
		_ = s.live.Close() // the other error is reported
		return nil, err
	}
	return s, nil
}

// Endpoints returns the addresses of the sockets, "" for an absent one.
func (s *Sockets) Endpoints() (live, replay string) {
	at := func(l net.Listener, asked string) string {
		address, ok := l.Addr().(*net.TCPAddr)
		if !ok {
			return asked
		}
		e, _ := zmtp.ParseEndpoint(asked, 0, 0) // it was parsed before
		e.Port = address.Port
		return e.String()
	}
	live = at(s.live, s.conf.Endpoint)
	if s.replay != nil {
		replay = at(s.replay, s.conf.Replay)
	}
	return live, replay
}

// Run serves the sockets until ctx ends.
func (s *Sockets) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, 2)
	wg.Go(func() { errs <- zmtp.Serve(ctx, s.live, zmtp.Pub, s.kept(s.pub.Follow)) })
	if s.replay != nil {
		wg.Go(func() { errs <- zmtp.Serve(ctx, s.replay, zmtp.Router, s.kept(s.answer)) })
	} else {
		errs <- nil
	}
	first := <-errs
	if first != nil {
		cancel()
	}
	return errors.Join(first, <-errs)
}

// kept remembers connections, so that a restart can end them.
func (s *Sockets) kept(serve func(*zmtp.Conn)) func(*zmtp.Conn) {
	return func(c *zmtp.Conn) {
		s.mu.Lock()
		s.conns[c] = struct{}{}
		s.mu.Unlock()
		serve(c)
		s.mu.Lock()
		delete(s.conns, c)
		s.mu.Unlock()
	}
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
		from := binary.BigEndian.Uint64(frames[1])
		s.mu.Lock()
		buffer := s.buffer
		s.mu.Unlock()
		sent := 0
		send := func(topic []byte, sequence uint64, body []byte) error {
			sent++
			if (sent-1)/s.conf.Queue%2 == 1 {
				return nil // the queue is full
			}
			return c.Write(nil, topic, binary.BigEndian.AppendUint64(nil, sequence), body)
		}
		for _, m := range buffer {
			if m.sequence < from {
				continue
			}
			if err := send([]byte(s.conf.Topic), m.sequence, m.body); err != nil {
				return
			}
		}
		if err := send(nil, 1<<64-1, nil); err != nil {
			return
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
	defer s.mu.Unlock()
	if len(s.pending) == 0 {
		return
	}
	body := s.batch(s.pending, s.conf.Rank)
	s.pending = nil
	s.publishLocked(body)
}

// Publish publishes changes as a batch.
func (s *Sockets) Publish(changes ...Change) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.publishLocked(s.batch(changes, s.conf.Rank))
}

// PublishBody publishes a body as it is.
func (s *Sockets) PublishBody(body []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.publishLocked(body)
}

// PublishFrames publishes frames as they are, valid or not.
func (s *Sockets) PublishFrames(frames ...[]byte) { s.pub.Send(frames...) }

func (s *Sockets) publishLocked(body []byte) {
	m := message{s.next, body}
	s.next++
	s.buffer = append(s.buffer, m)
	if len(s.buffer) > s.conf.Buffer {
		// A replay in progress reads the old array.
		s.buffer = append([]message(nil), s.buffer[1:]...)
	}
	switch {
	case s.drop > 0:
		s.drop--
	case s.conf.DropEvery > 0 && (m.sequence+1)%uint64(s.conf.DropEvery) == 0:
	default:
		s.pub.Send([]byte(s.conf.Topic), binary.BigEndian.AppendUint64(nil, m.sequence), m.body)
	}
}

// Drop drops the next n live batches, so that only a replay contains them.
func (s *Sockets) Drop(n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.drop = n
}

// Subscribers returns the number of subscribers.
func (s *Sockets) Subscribers() int { return s.pub.Subscribers() }

// Joined returns the number of subscriptions since the start.
func (s *Sockets) Joined() uint64 { return s.pub.Joined() }

// Restart has the effect of a restart of the process on subscribers: connections end, numbers
// begin at 0 again, and no event is published.
func (s *Sockets) Restart() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending, s.next, s.buffer = nil, 0, nil
	for c := range s.conns {
		_ = c.Close() // its goroutine removes it
	}
}

// batch encodes changes as the engine does: [time, events, rank], each event a map with its type.
func (s *Sockets) batch(changes []Change, rank uint32) []byte {
	var events []byte
	n := 0
	for i := range changes {
		c := &changes[i]
		switch c.Kind {
		case indexer.Stored:
			events = s.stored(events, c)
			n++
		case indexer.Removed:
			for _, e := range c.Externals { // one each, as vLLM does
				events = named(msgp.AppendMapHeader(events, 3), "type", "BlockRemoved")
				events = msgp.AppendArrayHeader(msgp.AppendString(events, "block_hashes"), 1)
				events = named(s.hash(events, e), "medium", "GPU")
				n++
			}
		default:
			events = named(msgp.AppendMapHeader(events, 1), "type", "AllBlocksCleared")
			n++
		}
	}
	b := msgp.AppendFloat64(msgp.AppendArrayHeader(nil, 3), float64(time.Now().UnixMicro())/1e6)
	b = append(msgp.AppendArrayHeader(b, uint32(n)), events...)
	return msgp.AppendUint32(b, rank)
}

// named appends a field with a text, or nil for an empty text.
func named(b []byte, field, value string) []byte {
	b = msgp.AppendString(b, field)
	if value == "" {
		return msgp.AppendNil(b)
	}
	return msgp.AppendString(b, value)
}

func (s *Sockets) stored(b []byte, c *Change) []byte {
	// SGLang has a field for the salt; vLLM puts it among the first block's extra keys.
	salt := c.Salt
	if !s.sglang && c.HasParent {
		salt = ""
	}
	extra := salt != "" || !s.sglang && c.LoRA != ""
	fields := uint32(8)
	if extra {
		fields++
	}
	b = named(msgp.AppendMapHeader(b, fields), "type", "BlockStored")
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "block_hashes"), uint32(len(c.Blocks)))
	for _, block := range c.Blocks {
		b = s.hash(b, block.External)
	}
	if b = msgp.AppendString(b, "parent_block_hash"); c.HasParent {
		b = s.hash(b, c.Parent)
	} else {
		b = msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(msgp.AppendString(b, "token_ids"), uint32(len(c.Tokens)))
	for _, t := range c.Tokens {
		b = msgp.AppendUint32(b, t)
	}
	b = msgp.AppendInt(msgp.AppendString(b, "block_size"), len(c.Tokens)/len(c.Blocks))
	b = named(named(named(b, "lora_id", ""), "medium", "GPU"), "lora_name", c.LoRA)
	switch {
	case !extra:
	case s.sglang:
		b = named(b, "cache_salt", salt)
	default: // the adapter on each block, the salt on the first
		b = msgp.AppendArrayHeader(msgp.AppendString(b, "extra_keys"), uint32(len(c.Blocks)))
		for i := range c.Blocks {
			b = extraKeys(b, c.LoRA, salt, i == 0)
		}
	}
	return b
}

func extraKeys(b []byte, lora, salt string, first bool) []byte {
	var keys []string
	if lora != "" {
		keys = append(keys, lora)
	}
	if first && salt != "" {
		keys = append(keys, salt)
	}
	if keys == nil {
		return msgp.AppendNil(b)
	}
	b = msgp.AppendArrayHeader(b, uint32(len(keys)))
	for _, key := range keys {
		b = msgp.AppendString(b, key)
	}
	return b
}

// hash appends the name of a block, which SGLang writes as a signed number.
func (s *Sockets) hash(b []byte, hash uint64) []byte {
	if s.sglang {
		return msgp.AppendInt64(b, int64(hash))
	}
	return msgp.AppendUint64(b, hash)
}

// routes serves the engines' descriptions of their sockets.
func (s *Sockets) routes(mux *http.ServeMux, blockSize int) {
	live, replay := s.Endpoints()
	if s.sglang {
		e, _ := zmtp.ParseEndpoint(live, 0, 0) // an endpoint of this process
		mux.HandleFunc("GET /server_info", func(w http.ResponseWriter, _ *http.Request) {
			reply(w, map[string]any{"kv_events": map[string]any{
				"publisher": "zmq", "endpoint_host": e.Host, "endpoint_port_base": e.Port - int(s.conf.Rank), "topic": s.conf.Topic, "block_size": blockSize, "dp_size": 1,
			}})
		})
		return
	}
	source := map[string]any{
		"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": live, "replay_endpoint": nil,
		"buffer_steps": s.conf.Buffer, "hwm": 100_000, "max_queue_size": 100_000, "topic": s.conf.Topic,
	}
	if replay != "" {
		source["replay_endpoint"] = replay
	}
	mux.HandleFunc("GET /kv_event_sources", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, map[string]any{strconv.Itoa(int(s.conf.Rank)): source})
	})
}
