// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

func TestHints(t *testing.T) {
	b, bad := openai.Parse(openai.Completions, []byte(`{"model":"m","prompt":"x","nvext":{"agent_hints":{"priority":-2.5,"strict_priority":3,"osl":200},
		"routing_constraints":{"required_taints":["gold"],"preferred_taints":{"rack":0.5}},"router":{"ttft_target":1500.5},"annotations":["a"]}}`))
	if bad != nil {
		t.Fatal(bad)
	}
	var got router.Request
	bad = openai.ReadHints(b.NVExt, &got)
	want := router.Request{
		Priority: -2.5, StrictPriority: 3, ExpectedOutput: 200, RequiredTaints: []string{"gold"},
		PreferredTaints: map[string]float64{"rack": .5}, TTFTTarget: 1500500 * time.Microsecond,
	}
	if diff := cmp.Diff(want, got); diff != "" || bad != nil {
		t.Errorf("hints (-want +got):\n%s%v", diff, bad)
	}
	if bad := openai.ReadHints(nil, &got); bad != nil || got.Priority != -2.5 {
		t.Errorf("no nvext: %+v, %v", got, bad)
	}
	for text, param := range map[string]string{
		`[1]`:                                 "nvext",
		`{"agent_hints":{"priority":"high"}}`: "nvext",
		`{"agent_hints":{"osl":-1}}`:          "nvext.agent_hints.osl",
		`{"agent_hints":{"priority":1e300}}`:  "nvext.agent_hints.priority",
		`{"router":{"ttft_target":-5}}`:       "nvext.router.ttft_target",
		`{"routing_constraints":{"required_taints":["` + strings.Repeat(`a","`, 64) + `"]}}`: "nvext.routing_constraints",
	} {
		if bad := openai.ReadHints([]byte(text), &got); bad == nil || bad.Param != param || bad.Status != 400 {
			t.Errorf("%s: %v, want an error about %s", text, bad, param)
		}
	}
}
