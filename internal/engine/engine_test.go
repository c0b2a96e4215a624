// SPDX-License-Identifier: Apache-2.0

package engine_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/engine"
)

// Names are found in any spelling. An unknown engine has an empty row.
func TestSpellings(t *testing.T) {
	for name, want := range map[string]string{
		"vllm": engine.VLLM, "vLLM": engine.VLLM, "SGLang": engine.SGLang, "dynamo": engine.Dynamo,
		"trtllm": engine.TRTLLM, "TensorRT-LLM": engine.TRTLLM, "tensorrt_llm": engine.TRTLLM, "TensorRTLLM": engine.TRTLLM,
		"": "", "Another": "another", "tensorrt": "tensorrt",
	} {
		if got := engine.Canonical(name); got != want {
			t.Errorf("the canonical name of %q is %q, want %q", name, got, want)
		}
	}
	for _, name := range []string{"", "another", "vllm2"} {
		if e := engine.Of(name); e.Name != "" || e.ReadsRank || e.RefusesWhole || e.Prefill.Known() {
			t.Errorf("the unknown engine %q has the row %+v", name, e)
		}
	}
	if n := testing.AllocsPerRun(100, func() { engine.Of("trtllm"); engine.Of("another"); engine.Of("") }); n != 0 {
		t.Errorf("Of makes %v allocations, want 0", n)
	}
}

// The rows agree with themselves: a leg has one protocol, and the fields of the other one are empty.
func TestRows(t *testing.T) {
	if got, want := engine.Profiles(), []string{"vllm", "sglang", "trtllm"}; !slices.Equal(got, want) {
		t.Errorf("the profiles are %q, want %q", got, want)
	}
	gauges := 0
	for _, name := range append(engine.Profiles(), engine.Dynamo) {
		e := engine.Of(name)
		p := &e.Prefill
		if e.Name != name || e.Forwards == p.Known() {
			t.Errorf("%+v: want the name %q, and either a frontend or a protocol of prefill legs", e, name)
		}
		none := p.Member == ""
		if p.AtOnce() != (p.Known() && none) || none != (p.Value == "") || none != (len(p.Path) == 0) {
			t.Errorf("%s: %+v has fields of both protocols, or not all of one", name, p)
		}
		if e.Polled && !e.SetLike {
			t.Errorf("%s: polled events name no copies of blocks", name)
		}
		gauges += len(e.Gauges)
		for metric, g := range e.Gauges {
			if g >= engine.GaugeKinds || engine.AllGauges()[metric] != g {
				t.Errorf("%s: the metric %s is no gauge, or two engines have it", name, metric)
			}
		}
	}
	if all := engine.AllGauges(); len(all) != gauges {
		t.Errorf("%d gauges of all engines, want %d", len(all), gauges)
	}
}

// Equal keyword arguments have one form, and what no engine reports is an error.
func TestSortedKwargs(t *testing.T) {
	for text, want := range map[string]string{
		`null`: "", `{}`: "", `{"b": 1.0, "a": {"d":[1], "c":"x"}}`: `{"a":{"c":"x","d":[1]},"b":1.0}`, `{"n": 18446744073709551616}`: `{"n":18446744073709551616}`,
	} {
		if got, err := engine.SortedKwargs([]byte(text)); got != want || err != nil {
			t.Errorf("%s: %s, %v, want %s", text, got, err, want)
		}
	}
	for _, text := range []string{``, `[]`, `"{}"`, `{`, `{"a":"` + strings.Repeat("x", 1<<16) + `"}`} {
		if got, err := engine.SortedKwargs([]byte(text)); err == nil {
			t.Errorf("%.10s: %.10s, want an error", text, got)
		}
	}
	if text := (&engine.Flags{Template: "x"}).String(); text != "--chat-template x" {
		t.Error(text)
	}
}

// Objects inside keyword arguments keep the order of their keys, which templates write into prompts.
func TestKwargs(t *testing.T) {
	const text = ` { "z": {"b": 1.0, "a": [ {"d":1,"c":2} ]}, "a": true }`
	ordered, err := engine.OrderedKwargs([]byte(text))
	if err != nil || ordered != `{"a":true,"z":{"b":1.0,"a":[{"d":1,"c":2}]}}` {
		t.Errorf("%s, %v", ordered, err)
	}
	if sorted, err := engine.SortedKwargs([]byte(ordered)); err != nil || sorted != `{"a":true,"z":{"a":[{"c":2,"d":1}],"b":1.0}}` {
		t.Errorf("%s, %v", sorted, err)
	}
	for _, text := range []string{"null", "{}"} {
		if ordered, err := engine.OrderedKwargs([]byte(text)); ordered != "" || err != nil {
			t.Errorf("%s: %s, %v", text, ordered, err)
		}
	}
	for _, text := range []string{"", "[]", `"{}"`, `{"a"`, `{"a":"` + strings.Repeat("x", 64<<10) + `"}`} {
		if ordered, err := engine.OrderedKwargs([]byte(text)); err == nil {
			t.Errorf("%.20s: %s", text, ordered)
		}
	}
}
