// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"context"
	"time"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// Socket is a bound ZeroMQ socket.
type Socket struct{ *socket }

// Bind binds a socket.
func Bind(endpoint string, role zmtp.Role, handle func(*zmtp.Conn)) (Socket, error) {
	s, err := bind(endpoint, 0, 0, role, handle)
	return Socket{s}, err
}

// Run serves the socket until ctx ends.
func (s Socket) Run(ctx context.Context) error { return s.run(ctx) }

// Endpoint is the socket's endpoint with the real port.
func (s Socket) Endpoint() string { return s.at.String() }

// Publisher is the work of a PUB socket.
type Publisher struct{ p publisher }

// NewPublisher returns a publisher; 0 means the default length of the queues.
func NewPublisher(queue int) *Publisher { return &Publisher{publisher{queue: queue}} }

// Follow serves one subscriber.
func (p *Publisher) Follow(c *zmtp.Conn) { p.p.follow(c) }

// Send publishes a message and returns for how many subscribers it is dropped.
func (p *Publisher) Send(frames ...[]byte) int { return p.p.send(frames...) }

// Subscribers returns the number of connections with a subscription.
func (p *Publisher) Subscribers() int {
	n, _ := p.p.counts()
	return n
}

// Scheduler drives the engine's scheduler step by step, without a clock.
type Scheduler struct {
	m     scheduler
	flush func() // called at the end of each step; may be nil
	// Log is called with a word for each thing that happens to a request.
	Log func(id int, what string)
}

// NewScheduler returns a scheduler with blocks of 16 tokens.
func NewScheduler(preset string, blocks int, publish func(indexer.Event), log func(id int, what string)) *Scheduler {
	hash, err := newBlockHash("sim")
	if err != nil {
		panic(err)
	}
	cache := newCache(blocks, hash, func(c Change) { publish(c.Event) })
	return &Scheduler{scheduler{timing: presets[preset], blockSize: 16, maxSeqs: 256, maxTokens: 8192, cache: cache}, nil, log}
}

// NewHybridScheduler returns a scheduler of a hybrid model. publish is called with vLLM's batch of each step.
func NewHybridScheduler(text string, block, blocks, stepTokens int, publish func(batch []byte)) *Scheduler {
	h, block, err := parseHybrid(text, block)
	if err != nil {
		panic(err)
	}
	var changes []Change
	m := &Scheduler{Log: func(int, string) {}}
	m.m = scheduler{timing: presets["8b-1xh100"], blockSize: block, maxSeqs: 256, maxTokens: stepTokens}
	m.m.cache = newCache(blocks, vllmHash, func(c Change) { changes = append(changes, c) })
	m.m.cache.hybrid, m.m.cache.copies = h, true
	m.flush = func() {
		if len(changes) > 0 {
			publish(batch(changes, 0, false))
		}
		changes = nil
	}
	return m
}

// Request is a handle of a request.
type Request struct{ r *request }

// Submit adds a request with a prompt.
func (m *Scheduler) Submit(id int, tokens []uint32, output int) Request {
	r := &request{
		prefix: newPrefix(tokens, m.m.blockSize, keys{}), prompt: len(tokens), output: output,
		admitted: func(int) { m.Log(id, "admitted") },
		token:    func() { m.Log(id, "token") },
		finished: func() { m.Log(id, "finished") },
	}
	m.m.submit(r)
	return Request{r}
}

// Cached returns how many of a request's prompt tokens were found in the cache.
func (r Request) Cached() int { return r.r.cached }

// Abort aborts a request.
func (m *Scheduler) Abort(r Request) { m.m.abort(r.r) }

// Step runs a step and returns how long it takes; 0 if there is nothing to do.
func (m *Scheduler) Step() time.Duration {
	d := m.m.begin()
	if d > 0 {
		m.m.finish()
	}
	if m.flush != nil {
		m.flush()
	}
	return d
}

// Blocks returns the number of cached blocks, of those in use, and of reserved ones.
func (m *Scheduler) Blocks() (cached, used, reserved int) {
	return len(m.m.cache.blocks), len(m.m.cache.blocks) - m.m.cache.unused.Len(), m.m.cache.reserved
}

// Looked returns how many prompt tokens were looked up in the cache, and how many of them were found.
func (m *Scheduler) Looked() (queries, hits int) { return m.m.queries, m.m.hits }

// Externals returns the cached blocks by the engine's own ids, with local hashes.
func (m *Scheduler) Externals() map[uint64]uint64 {
	out := map[uint64]uint64{}
	for _, b := range m.m.cache.blocks {
		out[b.External] = b.Local
	}
	return out
}

// BlockHashes returns the names of the blocks of a prompt.
func BlockHashes(kind string, tokens []uint32, size int, salt string) ([]uint64, error) {
	hash, err := newBlockHash(kind)
	if err != nil {
		return nil, err
	}
	p := newPrefix(tokens, size, keys{salt: salt})
	var names []uint64
	var parent *blockID
	for i, sequence := range p.sequence {
		id, name := hash(parent, sequence, p.tokens[i*size:(i+1)*size], p.keys)
		names, parent = append(names, name), &id
	}
	return names, nil
}
