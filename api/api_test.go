// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
)

func get(t *testing.T, h http.Handler, path string) (status int, body string) {
	t.Helper()
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", path, nil))
	return w.Code, w.Body.String()
}

// newRouter returns a router with a number of workers, and with a clock of the test's own if one is given.
func newRouter(t *testing.T, workers int, clock ...func() time.Time) *router.Router {
	t.Helper()
	var conf router.Config
	for _, now := range clock {
		conf.Now = now
	}
	r, err := router.New(conf)
	if err != nil {
		t.Fatal(err)
	}
	for id := range workers {
		if err := r.SetWorker(router.WorkerInfo{
			ID: uint64(id + 1), Name: "w", Models: []string{"m"}, BlockSize: 4,
			Address: netip.MustParseAddrPort("10.0.0.1:8000"),
		}); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func TestReadySaysWhatIsMissing(t *testing.T) {
	bus := true
	conf := api.Config{Router: newRouter(t, 0), Metrics: http.NotFoundHandler(), Ready: []api.Check{{Name: "nats", OK: func() bool { return bus }}}}
	if status, body := get(t, api.New(conf), "/readyz"); status != 503 || !strings.Contains(body, `"workers":false`) || !strings.Contains(body, `"nats":true`) {
		t.Errorf("without workers: %d %s", status, body)
	}
	conf.Router = newRouter(t, 1)
	if status, body := get(t, api.New(conf), "/readyz"); status != 200 || !strings.Contains(body, `"status":"ready"`) {
		t.Errorf("with a worker: %d %s", status, body)
	}
	bus = false
	if status, body := get(t, api.New(conf), "/readyz"); status != 200 || !strings.Contains(body, `"nats":false`) || !strings.Contains(body, `"status":"degraded"`) {
		t.Errorf("without the bus: %d %s", status, body)
	}
	conf.Ready[0].Required = true
	if status, body := get(t, api.New(conf), "/readyz"); status != 503 || !strings.Contains(body, `"status":"not ready"`) {
		t.Errorf("without something required: %d %s", status, body)
	}
	if status, _ := get(t, api.New(conf), "/healthz"); status != 200 {
		t.Errorf("/healthz: %d, want 200 whatever is missing", status)
	}
}

func TestDecisions(t *testing.T) {
	r := newRouter(t, 2)
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
	for _, id := range []string{"a", "b", "c"} {
		if _, err := r.BestWorker(t.Context(), router.Request{ID: id, Model: "m", Tokens: []uint32{1, 2, 3, 4}}); err != nil {
			t.Fatal(err)
		}
	}
	_, body := get(t, h, "/v1/decisions?id=b")
	var d router.Decision
	if err := json.Unmarshal([]byte(body), &d); err != nil || d.ID != "b" || len(d.Candidates) != 2 || d.Address.String() != "10.0.0.1:8000" {
		t.Errorf("decision b: %v\n%s", err, body)
	}
	if strings.Contains(body, "first_token") || strings.Contains(body, "freed") {
		t.Errorf("b has no first token and no end yet: %s", body)
	}
	_, body = get(t, h, "/v1/decisions?limit=2")
	var list struct{ Decisions []router.Decision }
	if err := json.Unmarshal([]byte(body), &list); err != nil || len(list.Decisions) != 2 || list.Decisions[0].ID != "c" {
		t.Errorf("the newest two: %v\n%s", err, body)
	}
	for path, want := range map[string]int{
		"/v1/decisions":            200,
		"/v1/decisions?id=unknown": 404,
		"/v1/decisions?limit=0":    400,
		"/v1/decisions?limit=many": 400,
		"/v1/decisions?limit=1001": 400,
		"/v1/nothing":              404,
	} {
		if status, body := get(t, h, path); status != want {
			t.Errorf("%s: %d, want %d\n%s", path, status, want, body)
		}
	}
}

func TestWorkers(t *testing.T) {
	h := api.New(api.Config{Router: newRouter(t, 2), Metrics: http.NotFoundHandler()})
	_, body := get(t, h, "/v1/workers")
	var list struct{ Workers []router.WorkerState }
	if err := json.Unmarshal([]byte(body), &list); err != nil || len(list.Workers) != 2 || list.Workers[1].ID != 2 || list.Workers[1].Health != "healthy" {
		t.Errorf("workers: %v\n%s", err, body)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "POST", "/v1/workers", nil))
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("POST /v1/workers: %d, want 405", w.Code)
	}
}

func TestReplicaSaysWhoItIs(t *testing.T) {
	conf := api.Config{Router: newRouter(t, 0), Metrics: http.NotFoundHandler(), Scope: "n/c/e"}
	for _, said := range []func() api.Replica{nil, func() api.Replica { return api.Replica{RouterID: 7, Settings: map[string]any{"a": 1}} }} {
		conf.Replica = said
		status, body := get(t, api.New(conf), "/v1/replica")
		var r api.Replica
		if err := json.Unmarshal([]byte(body), &r); err != nil || status != 200 {
			t.Fatalf("%d %s: %v", status, body, err)
		}
		if r.Scope != "n/c/e" || r.NowMS == 0 || r.Ready.Status != "not ready" || !strings.Contains(body, `"peers":[]`) || r.HashSeed != 1337 {
			t.Errorf("/v1/replica answers %s", body)
		}
		if said != nil && (r.RouterID != 7 || len(r.Settings) != 1) {
			t.Errorf("/v1/replica answers %s", body)
		}
	}
}
