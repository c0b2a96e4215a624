// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/kvroute/kvroute/api"
)

// budget is memory for bodies.
type budget struct {
	mu         sync.Mutex
	most, held int
}

func (b *budget) hold(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held+n > b.most {
		return false
	}
	b.held += n
	return true
}

func (b *budget) release(n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held -= n
}

// Bodies that do not end share one budget: a body beyond it gets 503, and each one is released with its request.
func TestBodiesShareOneBudget(t *testing.T) {
	t.Parallel()
	b := budget{most: 1 << 20}
	h := api.New(api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler(), HoldBody: b.hold, ReleaseBody: b.release})
	post := func(path string, body io.Reader) *httptest.ResponseRecorder {
		r := httptest.NewRequestWithContext(t.Context(), "POST", path, body)
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		return w
	}
	const question = `{"model": "m", "token_ids": [1, 2, 3, 4]}`
	body, more := io.Pipe()
	first := make(chan *httptest.ResponseRecorder)
	go func() { first <- post("/v1/best_worker", body) }()
	for _, part := range []string{question + strings.Repeat(" ", 500_000), " "} { // when the second part is read, the first one is reserved
		if _, err := io.WriteString(more, part); err != nil {
			t.Fatal(err)
		}
	}
	if w := post("/v1/best_worker", strings.NewReader(question+strings.Repeat(" ", 100_000))); w.Code != 503 || !strings.Contains(w.Body.String(), "--max-held-bytes") {
		t.Errorf("beside an unfinished body: %d %s", w.Code, w.Body)
	}
	_ = more.Close()
	if w := <-first; w.Code != 200 {
		t.Errorf("the first body: %d %s", w.Code, w.Body)
	}
	if w := post("/v1/best_worker", strings.NewReader(question)); w.Code != 200 {
		t.Errorf("afterwards: %d %s", w.Code, w.Body)
	}
	if b.held != 0 {
		t.Errorf("%d bytes are still reserved", b.held)
	}
}

// A call without a prompt takes 1 MiB.
func TestCallsWithoutPromptsTakeSmallBodies(t *testing.T) {
	t.Parallel()
	h := api.New(api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler()})
	for path, want := range map[string]int{"/v1/free": 413, "/busy_threshold": 413, "/v1/best_worker": 404} {
		r := httptest.NewRequestWithContext(t.Context(), "POST", path, strings.NewReader(`{"model": "`+strings.Repeat("x", 2<<20)+`", "token_ids": [1]}`))
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("%s: %d %.100s, want %d", path, w.Code, w.Body, want)
		}
	}
}
