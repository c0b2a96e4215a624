// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// remote asks workers for the ids of prompts whose model has no tokenizer here, and
// keeps what they said. Any number of goroutines may ask.
type remote struct {
	client *http.Client

	mu sync.Mutex
	// mu guards the fields below. The ids are in two generations: when the newer
	// has half of the limit it becomes the older, which is forgotten.
	newer, older map[[sha256.Size]byte][]uint32
	size         int // ids in newer
	limit        int // ids in both
	// failed says until when a worker is not asked again.
	failed map[netip.AddrPort]time.Time
}

// failedFor is how long a worker that did not say its ids is left alone: requests
// must not wait for it one by one.
const failedFor = 5 * time.Second

func newRemote(bytes int, client *http.Client) *remote {
	return &remote{client: client, newer: map[[sha256.Size]byte][]uint32{}, limit: bytes / 4, failed: map[netip.AddrPort]time.Time{}}
}

var (
	errCannotAsk = errors.New("a worker cannot be told all of this prompt")
	errFailed    = errors.New("the worker did not say its ids a moment ago")
)

// ids returns those of a prompt; the caller may write to them.
func (r *remote) ids(ctx context.Context, worker netip.AddrPort, model string, p router.Prompt) ([]uint32, error) {
	if !canAsk(p) || chat.MayHaveItems(p.Messages) {
		return nil, errCannotAsk
	}
	key := promptKey(model, p)
	if ids, ok := r.known(key); ok {
		return ids, nil
	}
	r.mu.Lock()
	failed := time.Now().Before(r.failed[worker])
	r.mu.Unlock()
	if failed {
		return nil, errFailed
	}
	ids, err := askTokenize(ctx, r.client, "http://"+worker.String(), model, p)
	r.mu.Lock()
	defer r.mu.Unlock()
	if errors.Is(err, context.Canceled) {
		return nil, err // by the client, who left
	}
	if err != nil {
		if len(r.failed) >= 1024 {
			clear(r.failed) // workers that are gone
		}
		r.failed[worker] = time.Now().Add(failedFor)
		return nil, err
	}
	if len(ids) <= r.limit/2 {
		r.keepLocked(key, slices.Clone(ids))
	}
	return ids, nil
}

func (r *remote) known(key [sha256.Size]byte) ([]uint32, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ids, ok := r.newer[key]
	if !ok {
		if ids, ok = r.older[key]; ok {
			r.keepLocked(key, ids)
		}
	}
	return slices.Clone(ids), ok
}

func (r *remote) keepLocked(key [sha256.Size]byte, ids []uint32) {
	const entry = 32 // what an entry costs beside its ids, in ids
	if r.size+len(ids)+entry > r.limit/2 {
		r.older, r.newer, r.size = r.newer, map[[sha256.Size]byte][]uint32{}, 0
	}
	r.newer[key] = ids
	r.size += len(ids) + entry
}

// promptKey is equal for equal prompts of a model, and for no others.
func promptKey(model string, p router.Prompt) (key [sha256.Size]byte) {
	h := sha256.New()
	for _, part := range [][]byte{
		[]byte(model), p.Messages, p.Tools, p.Prompt, p.AddGenerationPrompt, p.ContinueFinalMessage, p.ChatTemplate, p.ChatTemplateKwargs, p.AddSpecialTokens,
	} {
		var n [8]byte
		binary.LittleEndian.PutUint64(n[:], uint64(len(part)))
		h.Write(n[:])
		h.Write(part)
	}
	h.Sum(key[:0])
	return key
}
