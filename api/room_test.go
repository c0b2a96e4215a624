// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/router"
)

// A worker of one model too many is refused with the reason, and is accepted once another model has no workers any more.
func TestARegistrationWithoutRoomIsRefused(t *testing.T) {
	t.Parallel()
	r := newRouter(t, 0)
	const models = 1024 // of a router
	for i := range models {
		if err := r.SetWorker(router.WorkerInfo{
			ID: uint64(i + 1), Models: []string{fmt.Sprint("model ", i)}, BlockSize: 16, Address: netip.MustParseAddrPort("10.0.0.1:8000"),
		}); err != nil {
			t.Fatal(err)
		}
	}
	registry, err := fleet.NewRegistry(natstest.Connect(t, natstest.Start(t, 0)), fleet.RegistryConfig{
		Room: func(info router.WorkerInfo) error { return r.CheckRoom(&info) },
		Set: func(info router.WorkerInfo) {
			if err := r.SetWorker(info); err != nil {
				t.Error(err)
			}
		},
		Remove: r.RemoveWorker,
	})
	if err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, registry.Run)
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), Fleet: registry})
	post := func(model string) *httptest.ResponseRecorder {
		for {
			q := httptest.NewRequestWithContext(t.Context(), "POST", "/v1/workers", strings.NewReader(
				fmt.Sprintf(`{"v": 1, "name": "new", "address": "10.0.0.2:8000", "models": [%q], "block_size": 16}`, model)))
			q.Header.Set("Content-Type", "application/json")
			w := httptest.NewRecorder()
			if h.ServeHTTP(w, q); w.Code != http.StatusServiceUnavailable { // the registry is not open yet
				return w
			}
		}
	}
	if w := post("new"); w.Code != 400 || !strings.Contains(w.Body.String(), "1024 models with workers") {
		t.Errorf("one model too many: %d %s", w.Code, w.Body)
	}
	if w := post("model 7"); w.Code != 201 {
		t.Errorf("a model that exists: %d %s", w.Code, w.Body)
	}
	r.RemoveWorker(1)
	if w := post("new"); w.Code != 201 {
		t.Errorf("after another model has no workers: %d %s", w.Code, w.Body)
	}
}
