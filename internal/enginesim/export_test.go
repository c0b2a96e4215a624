// SPDX-License-Identifier: Apache-2.0

package enginesim

import (
	"time"

	"github.com/kvroute/kvroute/indexer"
)

// Model drives the engine's model step by step, without a clock.
type Model struct {
	m model
	// Log is called with a word for each thing that happens to a request.
	Log func(id int, what string)
}

// NewModel returns a model with blocks of 16 tokens.
func NewModel(preset string, blocks int, publish func(indexer.Event), log func(id int, what string)) *Model {
	hash, err := newBlockHash("sim")
	if err != nil {
		panic(err)
	}
	cache := newCache(blocks, hash, func(c Change) { publish(c.Event) })
	return &Model{model{timing: presets[preset], blockSize: 16, maxSeqs: 256, maxTokens: 8192, cache: cache}, log}
}

// Request is a handle of a request.
type Request struct{ r *request }

// Submit adds a request with a prompt.
func (m *Model) Submit(id int, tokens []uint32, output int) Request {
	local := indexer.AppendLocalHashes(nil, tokens, 16, indexer.Seed("", ""))
	r := &request{
		tokens: tokens[:len(local)*16],
		prompt: len(tokens), local: local, sequence: indexer.AppendSequenceHashes(nil, local), output: output,
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
func (m *Model) Abort(r Request) { m.m.abort(r.r) }

// Step runs a step and returns how long it takes; 0 if there is nothing to do.
func (m *Model) Step() time.Duration {
	d := m.m.begin()
	if d > 0 {
		m.m.finish()
	}
	return d
}

// Blocks returns the number of cached blocks, of those in use, and of reserved ones.
func (m *Model) Blocks() (cached, used, reserved int) {
	return len(m.m.cache.blocks), len(m.m.cache.blocks) - m.m.cache.unused.Len(), m.m.cache.reserved
}

// Externals returns the cached blocks by the engine's own ids, with local hashes.
func (m *Model) Externals() map[uint64]uint64 {
	out := map[uint64]uint64{}
	for _, b := range m.m.cache.blocks {
		out[b.external] = b.local
	}
	return out
}

// BlockHashes returns the names of the blocks of a prompt.
func BlockHashes(kind string, tokens []uint32, size int, salt string) ([]uint64, error) {
	hash, err := newBlockHash(kind)
	if err != nil {
		return nil, err
	}
	var names []uint64
	var parent *block
	for _, sequence := range indexer.AppendSequenceHashes(nil, indexer.AppendLocalHashes(nil, tokens, size, indexer.Seed("", salt))) {
		b := &block{}
		b.id, b.external = hash(parent, sequence, tokens[len(names)*size:(len(names)+1)*size], keys{salt: salt})
		names, parent = append(names, b.external), b
	}
	return names, nil
}
