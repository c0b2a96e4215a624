// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/tokenizer"
)

// Each part can be run alone: what it needs is installed and named.
func TestPartsGetTheirPrograms(t *testing.T) {
	t.Chdir("../..")
	for only, want := range map[string]string{
		"":                       "clients dynamo vllm",
		"clients":                "clients",
		"dynamo events over ZMQ": "dynamo",
		"vllm forced eviction":   "clients vllm",
		"vllm client litellm":    "clients vllm",
		"clients curl,dynamo":    "clients dynamo",
		"pd":                     "clients vllm",
		"hybrid":                 "clients vllm",
		"forced eviction":        "clients dynamo vllm",
	} {
		text, err := exec.Command("make", "--no-print-directory", "-n", "test-interop", "ONLY="+only).Output()
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, program := range []string{"clients", "dynamo", "vllm"} {
			if strings.Contains(string(text), "--"+program+" .cache/"+program) {
				got = append(got, program)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("ONLY=%q: %q, want %s", only, got, want)
		}
	}
}

// An index whose blocks are parts of the engine's has all parts of all blocks.
func TestPartsAreJoined(t *testing.T) {
	t.Parallel()
	at := func(ids ...uint64) (all []blockAt) {
		for _, id := range ids {
			all = append(all, blockAt{worker: 1, external: id})
		}
		return all
	}
	engine := at(13, 23)
	for _, c := range []struct {
		ours  []blockAt
		parts int
		equal bool
	}{
		{at(13, 23), 1, true},
		{at(13), 1, false},
		{at(11, 12, 13, 21, 22, 23), 3, true},
		{at(11, 13, 21, 22, 23), 3, false},
		{at(11, 12, 13), 3, false},
		{at(11, 12, 13, 21, 22, 24), 3, false},
		{nil, 3, false},
	} {
		if missing := differing(joined(c.ours, engine, c.parts), engine); missing == "" != c.equal {
			t.Errorf("%v in %d parts: %q", c.ours, c.parts, missing)
		}
	}
}

// Without the reference data the ids of tools, calls and thoughts are compared all the same.
func TestTheOwnTemplateShowsAllOfARequest(t *testing.T) {
	t.Chdir("../..")
	e := &env{dir: t.TempDir()}
	f := e.files()
	m, err := tokenizer.LoadModel(os.DirFS(f.model), tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	ids := func(more string) []uint32 {
		t.Helper()
		body := `{"model": "tiny", "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"` + more + `}`
		if !json.Valid([]byte(body)) {
			t.Fatal(body)
		}
		all := chats.IDs(m, []byte(body), time.Now())
		if all == nil {
			t.Fatalf("no exact ids for %s", body)
		}
		return all
	}
	plain := ids("}]")
	for what, more := range map[string]string{
		"tools":    `}], "tools": [{"type": "function", "function": {"name": "f"}}]`,
		"calls":    `, "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]}]`,
		"thoughts": `, "reasoning_content": "why"}]`,
	} {
		if slices.Equal(ids(more), plain) {
			t.Errorf("%s change nothing", what)
		}
	}
}
