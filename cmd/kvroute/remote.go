// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"crypto/sha256"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// remote requests the ids of prompts from workers, for models without a tokenizer here,
// and caches them. Any number of goroutines may call its methods.
type remote struct {
	client *http.Client

	mu sync.Mutex
	// mu guards the fields below. The cache has two generations: when the newer one has
	// half of the limit it becomes the older one, and the older one is dropped.
	newer, older map[[sha256.Size]byte][]uint32
	size         int // of newer, in ids
	limit        int // of both, in ids
	// failedUntil is when a worker that failed is asked again.
	failedUntil map[netip.AddrPort]time.Time
}

const (
	// failedFor is how long a worker that failed is not asked: otherwise each request
	// would wait for it.
	failedFor = 5 * time.Second
	// entrySize is what an entry of the cache takes beside its ids, in ids.
	entrySize = 32
	// maxFailed bounds the workers in failedUntil, some of which have left.
	maxFailed = 1024
)

func newRemote(bytes int, client *http.Client) *remote {
	return &remote{client: client, newer: map[[sha256.Size]byte][]uint32{}, limit: bytes / 4, failedUntil: map[netip.AddrPort]time.Time{}}
}

var (
	errCannotAsk = errors.New("a worker's /tokenize does not take everything of this prompt")
	errFailed    = errors.New("the worker failed to return ids a moment ago")
)

// ids returns the ids of a prompt. The caller may change them.
func (r *remote) ids(ctx context.Context, worker netip.AddrPort, model string, p router.Prompt) ([]uint32, error) {
	if !canAsk(p) || chat.MayHaveItems(p.Messages) {
		return nil, errCannotAsk
	}
	key := promptKey(model, p)
	ids, failed := r.cached(key, worker)
	switch {
	case ids != nil:
		return ids, nil
	case failed:
		return nil, errFailed
	}
	ids, err := askTokenize(ctx, r.client, "http://"+worker.String(), model, p)
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case errors.Is(err, context.Canceled): // the client left, the worker did not fail
	case err != nil:
		if len(r.failedUntil) >= maxFailed {
			clear(r.failedUntil)
		}
		r.failedUntil[worker] = time.Now().Add(failedFor)
	case len(ids) <= r.limit/2:
		r.addLocked(key, slices.Clone(ids))
	}
	return ids, err
}

// cached returns a copy of the cached ids of a prompt, and whether the worker failed lately.
func (r *remote) cached(key [sha256.Size]byte, worker netip.AddrPort) (ids []uint32, failed bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	ids, ok := r.newer[key]
	if !ok {
		if ids, ok = r.older[key]; ok {
			r.addLocked(key, ids)
		}
	}
	return slices.Clone(ids), time.Now().Before(r.failedUntil[worker])
}

func (r *remote) addLocked(key [sha256.Size]byte, ids []uint32) {
	if r.size+len(ids)+entrySize > r.limit/2 {
		r.older, r.newer, r.size = r.newer, map[[sha256.Size]byte][]uint32{}, 0
	}
	r.newer[key] = ids
	r.size += len(ids) + entrySize
}
