// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
)

// turnSource returns real prose and code: the project's own.
func turnSource(t testing.TB) (prose, code string) {
	t.Helper()
	read := func(pattern string) string {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatalf("no files %s: %v", pattern, err)
		}
		var all strings.Builder
		for _, f := range files {
			b, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			all.WriteString(strings.ToValidUTF8(string(b), ""))
		}
		return all.String()
	}
	return read("../../docs/*.md"), read("../../router/*.go")
}

// turns are the messages of a conversation of about size bytes: a system prompt, then questions of
// prose, and answers of prose with code, of 1 to 10 KB together.
func turns(t testing.TB, size int) (list []string) {
	prose, code := turnSource(t)
	at := 0
	cut := func(from string, n int) string {
		i := at * 7919 % (len(from) - n)
		at += n
		return strings.ToValidUTF8(from[i:i+n], "")
	}
	total := 0
	add := func(role, text string) {
		b, err := json.Marshal(map[string]string{"role": role, "content": text})
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, string(b))
		total += len(b)
	}
	add("system", cut(prose, min(1000, size/4)))
	for k := 0; total < size; k++ {
		n := min(1000*(1+k*3%10), size/2)
		add("user", cut(prose, n/4))
		add("assistant", cut(prose, n/4)+"\n```go\n"+cut(code, n/2)+"\n```\n")
	}
	add("user", cut(prose, 200))
	return list
}

// toolTurns are turns in which the assistant calls tools with code in the arguments.
func toolTurns(t testing.TB, size int) (list []string) {
	_, code := turnSource(t)
	total := 0
	for k := 0; total < size; k++ {
		text := code[k*3001%(len(code)-2000):]
		arguments, _ := json.Marshal(map[string]string{"path": "main.go", "text": text[:1500]})
		quoted, _ := json.Marshal(string(arguments))
		result, _ := json.Marshal(text[:500])
		list = append(list, fmt.Sprintf(`{"role":"assistant","content":null,"tool_calls":[{"id":"call%d","type":"function","function":{"name":"write","arguments":%s}}]}`, k, quoted),
			fmt.Sprintf(`{"role":"tool","tool_call_id":"call%d","content":%s}`, k, result))
		total += len(list[2*k]) + len(list[2*k+1])
	}
	return append([]string{`{"role":"user","content":"Write it."}`}, list...)
}

func turnBody(messages ...string) []byte {
	return []byte(`{"model":"m","temperature":0.7,"messages":[` + strings.Join(messages, ",") + `],"stream":true,"max_tokens":300}`)
}

func turnModel(t testing.TB, cache *tokenizer.Cache) *tokenizer.Model {
	t.Helper()
	files := enginesim.ModelFiles()
	if dir := fixtures.Path(t, "tokenizers", "qwen3"); dir != "" {
		files = os.DirFS(dir)
	}
	m, err := tokenizer.LoadModel(files, tokenizer.ModelConfig{Cache: cache})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// turnMark is replaced by a number that makes a turn new.
const turnMark = "@@@@@@@@"

// BenchmarkTurn takes the body of the next turn of a known conversation to the hashes of its blocks. New is what the
// turn adds to the messages.
func BenchmarkTurn(b *testing.B) {
	cache := tokenizer.NewCache(64 << 20)
	m := turnModel(b, cache)
	for _, size := range []int{1, 10, 100, 220, -220} {
		for _, fresh := range []int{1, 4} {
			kind, of := "KB", turns
			if size < 0 {
				kind, of = "KB of calls", toolTurns
			}
			list := of(b, max(size, -size)<<10)
			prose, code := turnSource(b)
			body := turnBody(list...)
			var ids []uint32
			var local, sequence []uint64
			turn := func(body []byte) tokenizer.Prompt {
				q, bad := openai.Reader{Known: cache}.Parse(openai.ChatCompletions, body)
				if bad != nil {
					b.Fatal(bad)
				}
				p, err := m.Encode(context.Background(), ids[:0], q.Request, time.Time{})
				if err != nil || p.Mode != tokenizer.Exact {
					b.Fatal(p.Mode, p.Reason, err)
				}
				ids = p.IDs
				local = indexer.AppendLocalHashes(local[:0], ids, 16, indexer.Seed("", ""))
				sequence = indexer.AppendSequenceHashes(sequence[:0], local)
				return p
			}
			turn(body)
			var bodies [][]byte
			i := 0
			for k := range 64 {
				half := fresh << 9
				answer, _ := json.Marshal(code[k*997:][:half])
				question, _ := json.Marshal(prose[k*997:][:half])
				next := `{"role":"assistant","content":"` + turnMark + string(answer[1:]) + `},{"role":"user","content":` + string(question) + `}`
				bodies = append(bodies, turnBody(append(slices.Clip(list), next)...))
			}
			b.Run(fmt.Sprintf("%d%s/new=%dKB", max(size, -size), kind, fresh), func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(int64(len(body)))
				reused, taken := 0, time.Duration(0)
				for b.Loop() {
					b.StopTimer()
					i++
					turn(body)
					next := bodies[i%len(bodies)]
					at := bytes.LastIndex(next, []byte(turnMark))
					copy(next[at:], fmt.Sprintf("%08x", i))
					b.StartTimer()
					start := bench.CPUTime()
					p := turn(next)
					taken += bench.CPUTime() - start
					copy(next[at:], turnMark)
					reused += p.Reused
				}
				b.ReportMetric(float64(taken)/float64(b.N), "cpu-ns/op")
				b.ReportMetric(float64(len(ids)), "tokens")
				b.ReportMetric(float64(reused)/float64(b.N), "reused")
			})
		}
	}
}
