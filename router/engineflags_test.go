// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// Models may have one card. The flags of its worker with the lowest id count for all of them, whatever other workers
// report, and workers with other flags have a fault, which begins and ends once.
func TestFlagsOfModelsWithOneCard(t *testing.T) {
	prompts := asciiModel(t, `{{ think }}`)
	var faults []string
	r, err := router.New(router.Config{Cards: []router.Card{{Name: "card", Prompts: prompts}}, Hooks: router.Hooks{
		Flags: func(id uint64, before, now []router.Fault) {
			faults = append(faults, fmt.Sprint(id, len(before), len(now)))
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	makes := func(want string) {
		t.Helper()
		p, err := prompts.Encode(t.Context(), nil, chat.Request{Messages: []byte(`[{"role":"user","content":"x"}]`)}, time.Time{})
		if got := string(prompts.Tokenizer().Decode(nil, p.IDs)); err != nil || got != want {
			t.Errorf("prompt %q, %v, want %q", got, err, want)
		}
	}
	add := func(id uint64, model string, flags *engine.Flags) {
		w := worker(id)
		w.Models, w.ModelCard, w.EngineFlags = []string{model}, "card", flags
		set(t, r, w)
	}
	for range 8 { // models are visited in any order
		for i, kwargs := range []string{"", `{"think":"two"}`, `{"think":"three"}`} {
			add(uint64(3-i), fmt.Sprint("model", i), &engine.Flags{Kwargs: kwargs})
		}
		makes("three")
		add(4, "another", nil)
		makes("three")
	}
	r.RemoveWorker(1)
	makes("two")
	r.RemoveWorker(2)
	if want := []string{"3 0 1", "2 0 1", "2 1 0", "3 1 0"}; !slices.Equal(faults, want) {
		t.Errorf("faults %q, want %q", faults, want)
	}
}
