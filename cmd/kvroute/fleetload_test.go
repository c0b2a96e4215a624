// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/router"
)

// The load that a worker reports in a heartbeat, or in its metrics, makes it cost more than
// an idle worker, whether its capacity is known or not. /v1/workers and explain show it.
func TestReportedLoadCounts(t *testing.T) {
	busy := fleet.Load{Running: 8, Waiting: 30, KVUtilization: .99}
	for _, cost := range []string{"tokens", "dynamo", "dynamo_newer", "predicted_ttft", "weighted"} {
		for name, report := range map[string]func(*server, router.WorkerInfo){
			"heartbeat": func(s *server, info router.WorkerInfo) { s.engineLoad(info, busy) },
			"metrics": func(s *server, info router.WorkerInfo) {
				s.rankLoads(info, map[uint32]fleet.Load{0: busy})
				s.engineLoad(info, fleet.Load{}) // an empty report must not replace the load
			},
		} {
			for _, blocks := range []int{0, 10} {
				s := server{router: routerOf(t, situation{held: []int{0, 0}}, "--cost", cost)}
				s.router.RemoveWorker(1)
				info := router.WorkerInfo{ID: 1, Name: "gpu-1", Models: []string{"m"}, BlockSize: 8, TotalKVBlocks: blocks, Address: s.router.Workers()[0].Address}
				if err := s.router.SetWorker(info); err != nil {
					t.Fatal(err)
				}
				report(&s, info)
				d, err := s.router.BestWorker(t.Context(), router.Request{ID: "it", Model: "m", Tokens: letters("ABC"), Explain: true})
				if err != nil || d.Worker.ID != 2 || d.Candidates[0].Cost <= d.Candidates[1].Cost {
					t.Errorf("%s, %s, %d blocks: worker %d, costs %v and %v, %v", cost, name, blocks, d.Worker.ID, d.Candidates[0].Cost, d.Candidates[1].Cost, err)
				}
				h := httptest.NewServer(api.New(api.Config{Router: s.router, Metrics: http.NotFoundHandler()}))
				if _, text := whole(t, "GET", h.URL+"/v1/workers", "", nil); !strings.Contains(text, `"engine_running":8`) || !strings.Contains(text, `"engine_waiting":30`) || !strings.Contains(text, `"foreign":{"requests":38`) {
					t.Errorf("%s: /v1/workers has %s", name, text)
				}
				if _, out, _ := runs(t, "explain", "--url", h.URL, "it"); !strings.Contains(out, "the load includes what kvroute did not send") || !strings.Contains(out, "38 requests, 30 of them waiting with about 720 tokens") {
					t.Errorf("%s: explain prints\n%s", name, out)
				}
				h.Close()
			}
		}
	}
}
