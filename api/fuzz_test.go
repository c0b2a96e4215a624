// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// FuzzBodies checks that any body gets an answer in the API's own form and no internal error, and
// that the API still serves requests afterwards.
func FuzzBodies(f *testing.F) {
	var paths []string
	for _, p := range patterns(f) {
		if p[0] == "POST" {
			paths = append(paths, strings.ReplaceAll(p[1], "{id}", "a"))
		}
	}
	for i := range paths {
		for _, body := range []string{
			``, `{}`, `{"model":"m","token_ids":[1,2,3,4,5],"request_id":"a","explain":true}`, `{"request_id":"a","tokens":5}`,
			`{"model":"m","messages":[{"role":"user","content":"hi"}],"worker_id":1,"dp_rank":0,"router_config_override":{"cost":"dynamo"}}`,
			`{"model":"m","request_id":"b","prompt":"a text","body":{"max_tokens":3},"required_taints":["t"],"preferred_taints":{"t":1e308}}`,
			`{"model":"m","active_decode_blocks_threshold":0.5}`, `{"batch_size":1}`,
			`{"name":"w","address":"10.0.0.7:8000","models":["m"]}`,
		} {
			f.Add(uint8(i), body)
		}
	}
	nc, err := nats.Connect("nats://127.0.0.1:1", nats.RetryOnFailedConnect(true))
	if err != nil {
		f.Fatal(err)
	}
	nc.Close() // the registry is unreachable, which it reports at once
	f.Fuzz(func(t *testing.T, which uint8, body string) {
		r := newRouter(t, 2)
		registry, err := fleet.NewRegistry(nc, fleet.RegistryConfig{Set: func(router.WorkerInfo) {}, Remove: func(uint64) {}})
		if err != nil {
			t.Fatal(err)
		}
		h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler(), Fleet: registry, Client: &http.Client{Transport: noWorkers{}}})
		path := paths[int(which)%len(paths)]
		status, text, _ := post(t, h, path, body)
		if status < 200 || status == 500 || status > 503 || !json.Valid([]byte(text)) {
			t.Errorf("POST %s: status %d: %s", path, status, text)
		}
		if status, text, _ := post(t, h, "/v1/potential_loads", `{"model":"m","token_ids":[1,2,3,4,5]}`); status != 200 && status != 429 {
			t.Errorf("afterwards: status %d: %s", status, text)
		}
	})
}

// noWorkers is an HTTP transport on which every request fails.
type noWorkers struct{}

func (noWorkers) RoundTrip(*http.Request) (*http.Response, error) {
	return nil, errors.New("no answer")
}
