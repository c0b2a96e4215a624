// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/router"
)

// The names that requests may use are those of models with workers, from records, cards and engines.
func TestServedModels(t *testing.T) {
	c := newClock()
	r := newRouter(t, router.Config{Now: c.read, Cards: []router.Card{{Name: "m", Aliases: []string{"alias"}, LoRA: []string{"tuned"}}}}, 0)
	show := func() string {
		var all []string
		for _, m := range r.ServedModels() {
			kind := "name"
			if m.Adapter {
				kind = "adapter"
			}
			all = append(all, fmt.Sprintf("%s: %s of %s, %d tokens, %v", m.Name, kind, m.Model, m.MaxModelLen, m.Since.Sub(c.now)))
		}
		return strings.Join(all, "\n")
	}
	if got := show(); got != "" {
		t.Errorf("without workers: %s", got)
	}
	for id, length := range map[uint64]int{1: 0, 2: 8192, 3: 4096} {
		w := worker(id)
		w.MaxModelLen = length
		if id == 3 {
			w.ListedLoRA = []string{"loaded"}
		}
		set(t, r, w)
	}
	c.pass(time.Minute)
	other := worker(4)
	other.Models, other.LoRA = []string{"other", "second"}, []string{"l"}
	set(t, r, other)
	const ofOther = `
other: name of other, 0 tokens, 0s
second: name of other, 0 tokens, 0s`
	if got := show(); got != `alias: name of m, 4096 tokens, -1m0s
m: name of m, 4096 tokens, -1m0s`+ofOther+`
l: adapter of other, 0 tokens, 0s
loaded: adapter of m, 4096 tokens, -1m0s
tuned: adapter of m, 4096 tokens, -1m0s` {
		t.Errorf("the names are\n%s", got)
	}
	for id := range uint64(3) {
		r.RemoveWorker(1 + id)
	}
	if got := show(); got != ofOther[1:]+"\nl: adapter of other, 0 tokens, 0s" {
		t.Errorf("after the workers of m have left, the names are\n%s", got)
	}
}
