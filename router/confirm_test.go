// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// asciiModel is a model whose tokens are the characters of ASCII.
func asciiModel(t *testing.T, template string) *tokenizer.Model {
	t.Helper()
	vocab := map[string]int{"Ġ": 0, "Ċ": 1}
	for c := '!'; c <= '~'; c++ {
		vocab[string(c)] = len(vocab)
	}
	text, err := json.Marshal(map[string]any{"pre_tokenizer": map[string]any{"type": "ByteLevel", "add_prefix_space": false}, "decoder": map[string]any{"type": "ByteLevel"}, "model": map[string]any{"vocab": vocab, "merges": []string{}}})
	if err != nil {
		t.Fatal(err)
	}
	m, err := tokenizer.LoadModel(fstest.MapFS{"tokenizer.json": {Data: text}, "chat_template.jinja": {Data: []byte(template)}}, tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	return m
}

const plainTemplate = `{% if enable_thinking is defined and not enable_thinking %}no thinking. {% endif %}` +
	`{% for t in tools or [] %}{{ t.function | tojson }}{% endfor %}` +
	`{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content or m.reasoning or '' }}{{ m.content }}{% endfor %}`

// storing is a fleet of one model whose engines make prompts by a template of their own, and the router that routes
// to it.
type storing struct {
	t      *testing.T
	r      *router.Router
	now    time.Time
	engine *tokenizer.Model
	stored map[uint64]map[uint64]bool // by worker: sequence hashes
	n      int
	judged []router.Judgement
	mute   bool                 // the events have no blocks that can be compared
	events bool                 // of the last observation
	reads  func(*router.Prompt) // how the engine reads a request otherwise; nil for as kvroute does
}

func newStoring(t *testing.T, workers int, engine string) *storing {
	t.Helper()
	return newStoringOf(t, workers, plainTemplate, engine)
}

func newStoringOf(t *testing.T, workers int, ours, engine string) *storing {
	t.Helper()
	s := &storing{t: t, now: time.Unix(1000, 0), engine: asciiModel(t, engine), stored: map[uint64]map[uint64]bool{}}
	s.r = newRouter(t, router.Config{
		Now: func() time.Time { return s.now }, Cards: []router.Card{{Name: "m", Prompts: asciiModel(t, ours)}}, ExplainDrift: true,
		Hooks: router.Hooks{
			Judged:  func(j router.Judgement) { s.judged = append(s.judged, j) },
			Observe: func(o router.Observation) { s.events = o.Events },
		},
	}, workers)
	return s
}

// request routes a request, and has its worker serve it.
func (s *storing) request(p router.Prompt) router.Decision {
	s.t.Helper()
	s.n++
	id := fmt.Sprint(s.n)
	d, err := s.r.BestWorker(s.t.Context(), router.Request{ID: id, Model: "m", Prompt: p})
	if err != nil {
		s.t.Fatal(err)
	}
	if s.reads != nil {
		s.reads(&p)
	}
	q, err := s.engine.Encode(s.t.Context(), nil, p, s.now)
	if err != nil || q.Mode != tokenizer.Exact {
		s.t.Fatalf("%s%s: %+v, %v", p.Messages, p.Tools, q.Reason, err)
	}
	w := d.Worker.ID
	if s.stored[w] == nil {
		s.stored[w] = map[uint64]bool{}
	}
	local := indexer.AppendLocalHashes(nil, q.IDs, 8, indexer.Seed("", ""))
	for i, sequence := range indexer.AppendSequenceHashes(nil, local) {
		if s.stored[w][sequence] || s.mute {
			continue
		}
		s.stored[w][sequence] = true
		ev := indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: sequence, Local: local[i]}}}
		if i > 0 {
			ev.HasParent, ev.Parent = true, indexer.AppendSequenceHashes(nil, local[:i])[i-1]
		}
		s.r.StoredTokens(q.IDs[i*8 : i*8+8])
		s.r.ApplyEvent(d.Worker, ev)
	}
	s.r.FirstToken(id, router.SignTold)
	s.r.Free(id)
	for range 4 {
		s.now = s.now.Add(time.Second)
		s.r.Judge()
	}
	return d
}

func (s *storing) class(name string) confirm.ClassState {
	for _, c := range s.r.Models()[0].Classes {
		if c.Class == name {
			return c
		}
	}
	return confirm.ClassState{}
}

// Each conversion that an engine makes otherwise is found within ten requests of its class, with the first token. The
// class is routed by text until the engine agrees; the other classes are routed by tokens all the time.
func TestBrokenConversionsAreFound(t *testing.T) {
	chatOf := func(i int, more string) router.Prompt {
		return router.Prompt{Path: chat.PathChat, Messages: fmt.Appendf(nil, `[{"role":"user","content":"question %d %s"}%s]`, i, strings.Repeat("of several blocks ", 4), more)}
	}
	for _, c := range []struct {
		class, engine string
		change        func(*router.Prompt)
		more          string
		theirs        string
	}{
		{"chat+tools", strings.Replace(plainTemplate, "t.function | tojson", "(dict(t.function, strict=false)) | tojson", 1), func(p *router.Prompt) {
			p.Tools = []byte(`[{"type":"function","function":{"name":"f","description":"d"}}]`)
		}, "", "strict"},
		{"chat+system_inside", strings.Replace(plainTemplate, "for m in messages", "for m in (messages | selectattr('role', 'equalto', 'system') | list) + (messages | rejectattr('role', 'equalto', 'system') | list)", 1), func(*router.Prompt) {}, `,{"role":"system","content":"a rule"},{"role":"user","content":"go on"}`, "system"},
		{"chat+reasoning", strings.Replace(plainTemplate, "m.reasoning_content or m.reasoning or ''", "''", 1), func(*router.Prompt) {}, `,{"role":"assistant","content":"yes","reasoning_content":"because"},{"role":"user","content":"and so on, for several blocks"}`, "yes"},
		{"chat+kwargs", strings.Replace(plainTemplate, "not enable_thinking", "enable_thinking", 1), func(p *router.Prompt) { p.ChatTemplateKwargs = []byte(`{"enable_thinking":false}`) }, "", "<user"},
		{"chat", "A system prompt that the engine adds. " + plainTemplate, func(*router.Prompt) {}, "", "A system"},
	} {
		s := newStoring(t, 2, c.engine)
		requests := 0
		for ; !s.class(c.class).Unconfirmed; requests++ {
			if requests == 10 {
				t.Fatalf("%s is not found by 10 requests: %+v", c.class, s.r.Models()[0].Classes)
			}
			p := chatOf(requests, c.more)
			if c.change(&p); c.class != "chat" {
				s.request(chatOf(100+requests, ""))
			}
			if d := s.request(p); d.TokenMode != tokenizer.Exact {
				t.Errorf("%s: mode %s before it is found", c.class, d.TokenMode)
			}
		}
		for range 10 { // judge the requests that were booked before
			s.now = s.now.Add(time.Second)
			s.r.Judge()
		}
		compared := 0
		for i := range 40 {
			p := chatOf(1000+i, c.more)
			c.change(&p)
			before := s.class(c.class).Requests[confirm.Unmatched.String()]
			if d := s.request(p); d.TokenMode != tokenizer.Bytes || d.TokenReason != tokenizer.Drifted {
				t.Errorf("%s: mode %s, reason %s", c.class, d.TokenMode, d.TokenReason)
			}
			compared += int(s.class(c.class).Requests[confirm.Unmatched.String()] - before)
		}
		if compared != 2 {
			t.Errorf("%s: %d of 40 requests were compared, want 2", c.class, compared)
		}
		for _, k := range s.r.Models()[0].Classes {
			if k.Unconfirmed != (k.Class == c.class) {
				t.Errorf("%s: %+v", c.class, k)
			}
		}
		if k := s.class(c.class); k.Position < 0 || !strings.Contains(k.Theirs, c.theirs[:1]) || k.Ours == k.Theirs {
			t.Errorf("%s: %+v", c.class, k)
		}
		// The engine is replaced by one that makes the same prompts.
		s.engine = asciiModel(t, plainTemplate)
		for i := 0; s.class(c.class).Unconfirmed; i++ {
			if i == 120 {
				t.Fatalf("%s is not confirmed again: %+v", c.class, s.class(c.class))
			}
			p := chatOf(2000+i, c.more)
			c.change(&p)
			s.request(p)
		}
		p := chatOf(3000, c.more)
		if c.change(&p); s.request(p).TokenMode != tokenizer.Exact {
			t.Errorf("%s: not routed by tokens again", c.class)
		}
		kinds := []confirm.Kind{}
		for _, j := range s.judged {
			kinds = append(kinds, j.Kind)
		}
		if slices.Contains(kinds, confirm.WorkerNamed) || kinds[0] != confirm.ClassUnconfirmed || kinds[len(kinds)-1] != confirm.ClassConfirmed {
			t.Errorf("%s: changes %v", c.class, kinds)
		}
	}
}

// Requests that fail, or whose worker leaves or restarts, are not judged.
func TestNotServedRequestsAreNotJudged(t *testing.T) {
	prompt := router.Prompt{Messages: []byte(`[{"role":"user","content":"a question of several blocks"}]`)}
	for name, end := range map[string]func(r *router.Router, d router.Decision){
		"abandoned": func(r *router.Router, _ router.Decision) { r.Abandon("1") },
		"left":      func(r *router.Router, _ router.Decision) { r.Leave("1", true) },
		"refused": func(r *router.Router, d router.Decision) {
			r.Served("1", router.Response{Address: d.Address, Asked: 1, Status: 400})
			r.Free("1")
		},
		"no worker": func(r *router.Router, _ router.Decision) {
			r.Served("1", router.Response{Nowhere: true, Status: 503})
			r.Free("1")
		},
		"a worker that leaves": func(r *router.Router, d router.Decision) { r.RemoveWorker(d.Worker.ID) },
	} {
		s := newStoring(t, 1, plainTemplate)
		d, err := s.r.BestWorker(t.Context(), router.Request{ID: "1", Model: "m", Prompt: prompt})
		if err != nil {
			t.Fatal(err)
		}
		end(s.r, d)
		for range 12 {
			s.now = s.now.Add(time.Second)
			s.r.Judge()
		}
		if c := s.class("chat"); c.Requests["cancelled"] != 1 || len(c.Requests) != 1 {
			t.Errorf("%s: %+v", name, c)
		}
	}
	for name, end := range map[string]func(r *router.Router){
		"cleared":   func(r *router.Router) { r.ApplyEvent(router.Worker{ID: 1}, indexer.Event{Kind: indexer.Cleared}) },
		"suspect":   func(r *router.Router) { r.SetEventState(router.Worker{ID: 1}, "suspect") },
		"restarted": func(r *router.Router) { w := worker(1); w.StartedMS = 7; set(t, r, w) },
	} {
		s := newStoring(t, 1, plainTemplate)
		if _, err := s.r.BestWorker(t.Context(), router.Request{ID: "1", Model: "m", Prompt: prompt}); err != nil {
			t.Fatal(err)
		}
		end(s.r)
		s.r.Free("1")
		for range 12 {
			s.now = s.now.Add(time.Second)
			s.r.Judge()
		}
		if c := s.class("chat"); c.Requests["lost"] != 1 || len(c.Requests) != 1 {
			t.Errorf("%s: %+v", name, c)
		}
	}
}

// A difference in a conversation is found within ten turns, wherever it is, though each turn begins with the prompts
// of the turns before, and other conversations of the worker begin alike. A conversation without one is never
// contradicted.
func TestConversationsAreJudged(t *testing.T) {
	const tools = `[{"type":"function","function":{"name":"f","description":"a function with a text of some blocks"}}]`
	inTools := strings.Replace(plainTemplate, "t.function | tojson", "(dict(t.function, strict=false)) | tojson", 1)
	inSecond := strings.Replace(plainTemplate, "{{ m.content }}", "{{ ' ' if m.role == 'assistant' and loop.index == 2 else '' }}{{ m.content }}", 1)
	for _, c := range []struct {
		name, engine, tools string
		found               bool
	}{
		{"none", plainTemplate, "", false},
		{"none, with tools", plainTemplate, tools, false},
		{"in the tools of the first turn", inTools, tools, true},
		{"in the first answer", inSecond, "", true},
		{"in the first answer, with tools", inSecond, tools, true},
	} {
		s := newStoring(t, 1, c.engine)
		class := "chat"
		if c.tools != "" {
			class = "chat+tools"
		}
		messages := `[{"role":"user","content":"What is in the files of this folder? Look at each of them."}`
		turns := 0
		for ; turns < 10 && !s.class(class).Unconfirmed; turns++ {
			p := router.Prompt{Path: chat.PathChat, Messages: []byte(messages + "]")}
			if c.tools != "" {
				p.Tools = []byte(c.tools)
			}
			s.request(p)
			messages += fmt.Sprintf(`,{"role":"assistant","content":"answer %d, which has the length of some blocks"},{"role":"user","content":"question %d, and go on"}`, turns, turns)
			s.request(router.Prompt{Path: chat.PathChat, Messages: []byte(`[{"role":"user","content":"What is"}]`), Tools: p.Tools})
		}
		k := s.class(class)
		if k.Unconfirmed != c.found || !c.found && k.Requests[confirm.Unmatched.String()] > 0 {
			t.Errorf("%s: after %d turns: %+v", c.name, turns, k)
		}
	}
}

// A worker whose events have no blocks that can be compared counts as one without events, until a block comes.
func TestEventsWithoutBlocks(t *testing.T) {
	s := newStoring(t, 1, plainTemplate)
	s.mute = true
	for i := range 14 {
		s.mute = i < 12
		s.request(router.Prompt{Path: chat.PathChat, Messages: fmt.Appendf(nil, `[{"role":"user","content":"question %d, of several blocks"}]`, i)})
		for range 10 {
			s.now = s.now.Add(time.Second)
			s.r.Judge()
		}
		if s.events != (i < 8 || i == 13) {
			t.Errorf("request %d: events %v; %+v", i, s.events, s.class("chat"))
		}
	}
}
