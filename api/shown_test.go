// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/netip"
	"testing"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
)

// Every call that returns decisions has the texts of the router, for the candidates and the prefill leg, too. The live
// feed has the same sentence, though it has no candidates.
func TestDecisionsHaveTexts(t *testing.T) {
	r := newRouter(t, 2)
	for i, role := range []router.Role{router.Prefill, router.Prefill, router.Decode, router.Decode} {
		address := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 1, byte(i)}), 8000)
		w := router.WorkerInfo{
			ID: uint64(i + 20), Name: fmt.Sprint("s", i), Role: role, Models: []string{"split"},
			BlockSize: 4, Address: address,
		}
		if err := r.SetWorker(w); err != nil {
			t.Fatal(err)
		}
	}
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
	for id, model := range map[string]string{"a": "m", "b": "m", "c": "split"} {
		var best struct{ Decision api.Decision }
		_, body, _ := post(t, h, "/v1/best_worker",
			fmt.Sprintf(`{"model":%q,"request_id":%q,"token_ids":[1,2,3,4,5],"explain":true}`, model, id))
		if err := json.Unmarshal([]byte(body), &best); err != nil {
			t.Fatal(err)
		}
		kept, _ := r.Decision(id)
		if best.Decision.ReasonText != kept.Sentence() {
			t.Errorf("best_worker says %q, want %q", best.Decision.ReasonText, kept.Sentence())
		}
	}
	r.MarkPrefillCompleted("a")

	checkTexts(t, h, r)

	// The live feed keeps texts, but not what has changed since.
	r.MarkPrefillCompleted("b")
	if err := r.PrefillFailed("c"); err != nil {
		t.Fatal(err)
	}
	checkTexts(t, h, r)
}

// checkTexts compares the texts of three decisions with those of the router.
func checkTexts(t *testing.T, h http.Handler, r *router.Router) {
	t.Helper()
	var all, live []api.Decision
	for path, into := range map[string]*[]api.Decision{"/v1/decisions": &all, "/v1/live": &live} {
		if err := json.Unmarshal([]byte(field(t, h, path, "decisions")), into); err != nil || len(*into) != 3 {
			t.Fatalf("%s: %d decisions, %v", path, len(*into), err)
		}
	}
	for i := range all {
		d, _ := r.Decision(all[i].ID)
		_, body := get(t, h, "/v1/decisions?id="+d.ID)
		var one api.Decision
		if err := json.Unmarshal([]byte(body), &one); err != nil {
			t.Fatal(err)
		}
		hasTexts(t, &all[i], &d)
		hasTexts(t, &one, &d)
		l := &live[i]
		if l.ID != d.ID || l.ReasonText != d.Sentence() || l.FirstTokenText != d.FirstTokenText() ||
			!l.FirstToken.Equal(d.FirstToken) || l.Candidates != nil || l.Omitted != 0 ||
			d.Prefill != nil && l.Prefill.ReasonText != d.Prefill.Sentence() {
			t.Errorf("live has %+v", l)
		}
	}
}

// hasTexts checks the texts of a decision.
func hasTexts(t *testing.T, got *api.Decision, d *router.Decision) {
	t.Helper()
	if got.ReasonText != d.Sentence() || got.SettingsText != d.SettingsText() || got.ModeText != d.ModeText() ||
		got.FirstTokenText != d.FirstTokenText() || got.SettingsText == "" {
		t.Errorf("decision %s has other texts than the router: %+v", d.ID, got)
	}
	if len(got.Candidates) != len(d.Candidates) || len(got.Candidates) == 0 || (got.Prefill == nil) != (d.Prefill == nil) {
		t.Fatalf("decision %s has %d candidates, want %d; prefill leg %v", d.ID, len(got.Candidates), len(d.Candidates),
			got.Prefill)
	}
	for i := range d.Candidates {
		if c := &d.Candidates[i]; got.Candidates[i].VerdictText != d.Verdict(c) || got.Candidates[i].Worker != c.Worker {
			t.Errorf("candidate %+v, want the verdict %q", got.Candidates[i], d.Verdict(c))
		}
	}
	if d.Prefill != nil {
		hasTexts(t, got.Prefill, d.Prefill)
	}
}

// The list of workers and the live feed judge the events of each worker as the router does.
func TestWorkersHaveTheirEventsJudged(t *testing.T) {
	r := newRouter(t, 2)
	r.SetEventState(router.Worker{ID: 1}, "suspect")
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
	for _, path := range []string{"/v1/workers", "/v1/live"} {
		var all []api.Worker
		if err := json.Unmarshal([]byte(field(t, h, path, "workers")), &all); err != nil || len(all) != 2 {
			t.Fatalf("%s: %d workers, %v", path, len(all), err)
		}
		for i := range all {
			level, text := r.EventsState(&all[i].WorkerState)
			if all[i].EventsLevel != level || all[i].EventsText != text || (level == router.EventsFault) != (all[i].ID == 1) {
				t.Errorf("%s: %+v, want %s, %s", path, all[i], level, text)
			}
		}
	}
}
