// SPDX-License-Identifier: Apache-2.0

package extproc

import "sync"

// watched has the requests whose response an observer stream watches for its first token. If the main stream of
// a request ends meanwhile, the observer stream frees the request's slot: it sees, within Envoy's
// deferred_close_timeout, whether there was a token or an end of the response. Its methods may be called by any
// number of goroutines. The zero value is ready to use.
type watched struct {
	mu sync.Mutex
	// mu guards the field below.
	ended map[string]bool // by request id: the main stream has ended
}

func (w *watched) begin(id string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ended == nil {
		w.ended = make(map[string]bool)
	}
	if _, known := w.ended[id]; !known {
		w.ended[id] = false
	}
}

// handOver notes that the main stream has ended. It returns false if no observer stream watches the response.
func (w *watched) handOver(id string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	_, known := w.ended[id]
	if known {
		w.ended[id] = true
	}
	return known
}

// remove reports whether the main stream has ended.
func (w *watched) remove(id string) (ended bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	ended = w.ended[id]
	delete(w.ended, id)
	return ended
}
