// SPDX-License-Identifier: Apache-2.0

package tokenizer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/kvroute/kvroute/bench/chats"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// modelPair is a model with a cache and the same model without one.
type modelPair struct{ cached, plain *tokenizer.Model }

// modelPairs are models of the simulated engine's tokenizer with the templates of the reference data. They share a cache.
func modelPairs(t testing.TB, c *tokenizer.Cache, most int) (all []modelPair) {
	t.Helper()
	texts := map[string]string{"": ""}
	if path := fixtures.Path(t, "templates", "templates.json"); path != "" {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := json.Unmarshal(b, &texts); err != nil {
			t.Fatal(err)
		}
	}
	for k, name := range slices.Sorted(maps.Keys(texts)) {
		if k >= most {
			break
		}
		conf := tokenizer.ModelConfig{ChatTemplate: texts[name], Profile: []chat.Profile{chat.VLLM, chat.SGLang, chat.TRTLLM}[k%3]}
		load := func(c *tokenizer.Cache) *tokenizer.Model {
			conf.Cache = c
			m, err := tokenizer.LoadModel(enginesim.ModelFiles(), conf)
			if err != nil {
				t.Fatal(err)
			}
			return m
		}
		all = append(all, modelPair{load(c), load(nil)})
	}
	return all
}

// worldOfChats makes bodies of conversations that go on, or change at any place.
type worldOfChats struct {
	r        *rand.Rand
	messages []string
	head     string // what stands before the messages
	tail     string
}

func newWorldOfChats(seed uint64) *worldOfChats {
	return &worldOfChats{r: rand.New(rand.NewPCG(seed, 1))}
}

// turn changes the conversation.
func (w *worldOfChats) turn(t testing.TB) {
	r := w.r
	if len(w.messages) == 0 || r.IntN(8) == 0 {
		w.messages = nil
	}
	q := chats.Requests{R: r, Strange: 2}.Request()
	var list []json.RawMessage
	b, err := json.Marshal(q["messages"])
	if err == nil {
		err = json.Unmarshal(b, &list)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range list {
		w.messages = append(w.messages, string(m))
	}
	delete(q, "messages")
	b, err = json.Marshal(q)
	if err != nil {
		t.Fatal(err)
	}
	w.head, w.tail = `{"model":"m",`, "}"
	if rest := strings.Trim(string(b), "{}"); rest != "" && r.IntN(2) == 0 {
		w.tail = "," + string(b[1:])
	} else if rest != "" {
		w.head += string(b[1:len(b)-1]) + ","
	}
	if n := len(w.messages); n > 3 && r.IntN(8) == 0 {
		i, j := r.IntN(n), r.IntN(n)
		w.messages[i], w.messages[j] = w.messages[j], w.messages[i]
	}
}

// body returns the body of the conversation, which sometimes is not valid.
func (w *worldOfChats) body() []byte {
	r := w.r
	sep := []string{",", ",", " ,\n "}[r.IntN(3)]
	b := []byte(w.head + `"messages": [` + strings.Join(w.messages, sep) + "]" + w.tail)
	at := r.IntN(len(b))
	switch r.IntN(16) {
	case 0:
		return b[:at]
	case 1:
		b[at] = []byte("\xff\\\"a,[]{}0 \n\x00")[r.IntN(13)]
	case 2:
		odd := []string{`\ud83d`, `\ud83d\ude00`, `\u00e9`, `\n`, `"`, "\xc3", `1,`, `{},`, `"messages":[{"role":"user","content":"x"}],`, `\x`}
		return slices.Insert(b, at, []byte(odd[r.IntN(len(odd))])...)
	case 3:
		return append(b, " x"[:1+r.IntN(2)]...)
	}
	return b
}

// check reads the body with the cache and without.
func (w *worldOfChats) check(c *tokenizer.Cache, models []modelPair, body []byte) (known bool, err error) {
	original := slices.Clone(body)
	want, wantErr := openai.Parse(openai.ChatCompletions, body)
	got, gotErr := openai.Reader{Known: c}.Parse(openai.ChatCompletions, body)
	if !bytes.Equal(body, original) {
		return false, fmt.Errorf("the body was changed: %q", original)
	}
	if !reflect.DeepEqual(gotErr, wantErr) {
		return false, fmt.Errorf("%q: error %s, want %s", body, fmt.Sprint(gotErr), fmt.Sprint(wantErr))
	}
	parsed := got.Parsed
	got.Parsed = nil
	if !reflect.DeepEqual(got, want) {
		return false, fmt.Errorf("%q: %+v, want %+v", body, got, want)
	}
	got.Parsed = parsed
	if wantErr != nil {
		models = nil
	}
	now := time.Date(2026, 8, 22, 12, 0, 0, 0, time.UTC)
	for k, m := range models {
		p, err := m.cached.Encode(context.Background(), nil, got.Request, now)
		q, plainErr := m.plain.Encode(context.Background(), nil, want.Request, now)
		if p.Reused = 0; !reflect.DeepEqual(p, q) || fmt.Sprint(err) != fmt.Sprint(plainErr) {
			return false, fmt.Errorf("%q: model %d: %+v, %s; want %+v, %s", body, k, p, fmt.Sprint(err), q, fmt.Sprint(plainErr))
		}
	}
	return parsed != nil, nil
}

// Whatever bodies were read before, a body has the same fields, errors and ids with a cache as without.
func TestKnownMessagesChangeNothing(t *testing.T) {
	rounds := 600
	if testing.Short() {
		rounds = 100
	}
	for _, step := range []int{16, 64, 2048} {
		t.Run(fmt.Sprint(step), func(t *testing.T) {
			t.Parallel()
			c := tokenizer.NewCache(1 << 20)
			tokenizer.SetCacheStep(c, step)
			models := modelPairs(t, c, 100)
			w := newWorldOfChats(uint64(step))
			parsed := 0
			for k := range rounds {
				w.turn(t)
				few := k % max(1, len(models)-6)
				for range 2 {
					known, err := w.check(c, models[few:few+min(6, len(models))], w.body())
					if err != nil {
						t.Fatal(err)
					}
					if known {
						parsed++
					}
				}
				if n := c.Bytes(); n < 0 || n > 1<<20 {
					t.Fatalf("the cache takes %d bytes", n)
				}
			}
			if parsed < rounds/10 {
				t.Errorf("only %d bodies had messages that were kept", parsed)
			}
		})
	}
}

// Conversations of several goroutines share messages.
func TestKnownMessagesOfManyGoroutines(t *testing.T) {
	c := tokenizer.NewCache(1 << 20)
	tokenizer.SetCacheStep(c, 64)
	models := modelPairs(t, c, 3)
	var wg sync.WaitGroup
	for g := range 4 {
		wg.Go(func() {
			w := newWorldOfChats(uint64(g / 2)) // two have the same conversations
			for range 60 {
				w.turn(t)
				if _, err := w.check(c, models, w.body()); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
}

// What a cache keeps of a body is a copy: the cache's limit does not count the body's memory.
func TestCacheKeepsNoBody(t *testing.T) {
	c := tokenizer.NewCache(1 << 20)
	tokenizer.SetCacheStep(c, 64)
	models := modelPairs(t, c, 3)
	w := newWorldOfChats(3)
	var bodies []weak.Pointer[byte]
	for range 100 {
		w.turn(t)
		body := slices.Clone(w.body())
		bodies = append(bodies, weak.Make(&body[0]))
		if _, err := w.check(c, models, body); err != nil {
			t.Fatal(err)
		}
	}
	if c.Bytes() < 1<<16 {
		t.Errorf("the cache has only %d bytes", c.Bytes())
	}
	for k := 0; k < 10 && len(bodies) > 0; k++ {
		runtime.GC()
		bodies = slices.DeleteFunc(bodies, func(p weak.Pointer[byte]) bool { return p.Value() == nil })
	}
	if len(bodies) > 0 {
		t.Errorf("%d of 100 bodies are in memory", len(bodies))
	}
	runtime.KeepAlive(c)
	runtime.KeepAlive(models)
}

// A turn that extends a known conversation has the same messages, and reads only the rest.
func TestKnownMessagesAreShared(t *testing.T) {
	c := tokenizer.NewCache(1 << 20)
	var turns []string
	for k := range 40 {
		turns = append(turns, fmt.Sprintf(`{"role":"user","content":"%d %s"}`, k, strings.Repeat("text\\n", 80)))
	}
	read := func(n int) []*chat.Message {
		b, bad := openai.Reader{Known: c}.Parse(openai.ChatCompletions, []byte(`{"model":"m","messages":[`+strings.Join(turns[:n], ",")+`]}`))
		if bad != nil || len(b.Parsed) != n {
			t.Fatalf("%d messages of %d, %v", len(b.Parsed), n, bad)
		}
		return b.Parsed
	}
	before, after := read(39), read(40)
	same := 0
	for k, m := range before {
		if m == after[k] {
			same++
		}
	}
	if same < 39 {
		t.Errorf("%d of 39 messages were known", same)
	}
}

// FuzzKnownMessages reads two bodies with a common beginning.
func FuzzKnownMessages(f *testing.F) {
	models := modelPairs(f, nil, 1)
	f.Add([]byte(`{"model":"m","messages":[{"role":"user","content":"a\nb"},{"role":"assistant","content":null}]}`), []byte(`{"role":"user","content":[]}]}`), 40)
	f.Fuzz(func(t *testing.T, body, rest []byte, at int) {
		c := tokenizer.NewCache(1 << 16)
		tokenizer.SetCacheStep(c, 8)
		w := newWorldOfChats(0)
		cached := []modelPair{{models[0].plain, models[0].plain}}
		next := append(slices.Clone(body[:min(max(0, at), len(body))]), rest...)
		for _, b := range [][]byte{body, next, body, next} {
			if _, err := w.check(c, cached, b); err != nil {
				t.Fatal(err)
			}
		}
	})
}
