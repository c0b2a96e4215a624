// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/fstest"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// compared has a comparison with a router, and a prober that runs.
type compared struct {
	*fleet.Comparison
	*fleet.DirectWorkers
	t      *testing.T
	router *router.Router
	prober *fleet.Prober
}

func newCompared(t *testing.T, cards ...router.Card) *compared {
	t.Helper()
	c := &compared{t: t}
	var err error
	if c.router, err = router.New(router.Config{Cards: cards}); err != nil {
		t.Fatal(err)
	}
	if c.DirectWorkers, err = fleet.NewDirectWorkers(fleet.DirectConfig{Router: c.router, Faults: c.router.SetFaults}); err != nil {
		t.Fatal(err)
	}
	c.Comparison = fleet.NewComparison(fleet.ComparisonConfig{Faults: c.router.SetFaults, Workers: c.DirectWorkers})
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	if c.prober, err = fleet.NewProber(fleet.ProberConfig{Compare: c.Comparison, Client: client, Probed: func(uint64, fleet.Probed, error) {}}); err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, c.prober.Run)
	return c
}

// set adds or changes a worker, as kvroute serve does.
func (c *compared) set(r fleet.Record) uint64 {
	c.t.Helper()
	info, err := r.Info(fleet.Networks{})
	if err != nil {
		c.t.Fatal(err)
	}
	if err := c.SetWorker(info); err != nil {
		c.t.Fatal(err)
	}
	c.Set(r, info)
	c.Follow(r, info)
	c.prober.Set(r, info)
	return info.ID
}

// faults returns the names of a worker's faults, and their texts.
func (c *compared) faults(id uint64) (names, texts string) {
	all := c.router.Workers()
	at := slices.IndexFunc(all, func(w router.WorkerState) bool { return w.ID == id }) // each rank has the same faults
	for _, f := range all[at].Faults {
		names, texts = strings.TrimSpace(names+" "+f.What), texts+f.Text
	}
	return names, texts
}

// wait waits until a worker has faults with these names.
func (c *compared) wait(id uint64, want string) {
	c.t.Helper()
	natstest.Eventually(c.t, func() bool { names, _ := c.faults(id); return names == want })
}

func (c *compared) names() []string {
	var names []string
	for _, m := range c.router.Models() {
		names = append(names, m.Names...)
	}
	return names
}

// listing answers /v1/models with a text that may change, and 404 to all else.
type listing struct {
	text  atomic.Value
	calls atomic.Int32
	at    string
}

func newListing(t *testing.T, text string) *listing {
	t.Helper()
	l := &listing{}
	l.text.Store(text)
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/models" {
			http.NotFound(w, r)
			return
		}
		l.calls.Add(1)
		fmt.Fprint(w, l.text.Load())
	}))
	t.Cleanup(s.Close)
	l.at = s.Listener.Addr().String()
	return l
}

// answers changes the answer, and waits until the prober has asked for it.
func (l *listing) answers(c *compared, id uint64, text string) {
	l.text.Store(text)
	before := l.calls.Load()
	c.prober.Compare(id)
	natstest.Eventually(c.t, func() bool { return l.calls.Load() > before })
}

const ofSim = `{"data":[{"id":"sim","root":"/m","max_model_len":4096}%s]}`

// Names that only an engine lists are served while the engine lists them, by that worker only.
func TestListedNames(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	l := newListing(t, fmt.Sprintf(ofSim, ""))
	a := c.set(fleet.Record{Name: "a", Address: l.at, Models: []string{"sim"}, BlockSize: 16})
	other := newListing(t, fmt.Sprintf(ofSim, ""))
	c.set(fleet.Record{Name: "b", Address: other.at, Models: []string{"sim"}, BlockSize: 16})
	c.set(fleet.Record{Name: "base", Address: "127.0.0.1:1", Models: []string{"z-base", "z-alias"}, BlockSize: 16})
	l.answers(c, a, fmt.Sprintf(ofSim, `,{"id":"tuned","root":"/l","parent":"sim"},{"id":"second","root":"/m"},{"id":"foreign","root":"/other"},`+
		`{"id":"z-base","root":"/m"},{"id":"z-alias","root":"/m"},{"id":7},{"id":"tuned"},"x",{"id":""},{"id":"a\u0000b"}`))
	want := []string{"second", "sim", "tuned", "z-alias", "z-base"}
	natstest.Eventually(t, func() bool { names := c.names(); slices.Sort(names); return slices.Equal(names, want) })
	for _, name := range []string{"tuned", "second"} {
		for i := range 8 {
			d, err := c.router.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(name, i), Model: name, Prompt: router.Prompt{Prompt: []byte(`"x"`)}})
			if err != nil || d.WorkerName != "a" {
				t.Fatalf("%s: %v, %v", name, d.WorkerName, err)
			}
		}
	}
	for _, name := range []string{"z-base", "z-alias"} {
		if d, err := c.router.BestWorker(t.Context(), router.Request{ID: name, Model: name, Prompt: router.Prompt{Prompt: []byte(`"x"`)}}); err != nil || d.WorkerName != "base" {
			t.Errorf("%s: %v, %v", name, d.WorkerName, err)
		}
	}
	l.answers(c, a, fmt.Sprintf(ofSim, ""))
	natstest.Eventually(t, func() bool { return !slices.Contains(c.names(), "tuned") })
}

// The flags that SGLang reports replace the settings of its model, and workers with other flags have a fault.
func TestFlagsThatEnginesReport(t *testing.T) {
	t.Parallel()
	files := fstest.MapFS{
		"tokenizer.json":      {Data: []byte(`{"pre_tokenizer":{"type":"ByteLevel","add_prefix_space":false},"model":{"vocab":{"a":0,"b":1,"c":2},"merges":[]}}`)},
		"chat_template.jinja": {Data: []byte(`{{ ("b" if think else "c") if think is defined else "a" }}`)},
	}
	flags := chat.Flags{DefaultKwargs: []byte(`{"think": false}`)}
	prompts, err := tokenizer.LoadModel(files, tokenizer.ModelConfig{Profile: chat.SGLang, Flags: flags})
	if err != nil {
		t.Fatal(err)
	}
	c := newCompared(t, router.Card{Name: "sim", Prompts: prompts})
	const unavailable = "unavailable"
	// The fields of SGLang 0.5.23's /server_info that are read here.
	start := func(flags string) (*atomic.Value, string) {
		var answer atomic.Value
		answer.Store(flags)
		s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/server_info" {
				http.NotFound(w, r)
				return
			}
			if answer.Load() == unavailable {
				w.WriteHeader(http.StatusInternalServerError)
			}
			fmt.Fprintf(w, `{"version":"0.5.23",%s"disaggregation_mode":"null","kv_events":null}`, answer.Load())
		}))
		t.Cleanup(s.Close)
		return &answer, s.Listener.Addr().String()
	}
	makes := func(want uint32) bool {
		p, err := prompts.Encode(t.Context(), nil, chat.Request{Messages: []byte(`[{"role":"user","content":"x"}]`)}, time.Time{})
		return err == nil && slices.Equal(p.IDs, []uint32{want})
	}
	set := func(name, at string) uint64 {
		return c.set(fleet.Record{Name: name, Address: at, Models: []string{"sim"}, BlockSize: 16, Engine: "sglang"})
	}
	// Versions before the flag existed do not report it.
	first, at := start("")
	one := set("a", at)
	if !makes(2) {
		t.Error("the setting does not count for an engine that reports no flags")
	}
	reports := func(answer *atomic.Value, id uint64, flags, faults string, id0 uint32) {
		t.Helper()
		answer.Store(flags)
		c.prober.Compare(id)
		natstest.Eventually(t, func() bool { names, _ := c.faults(id); return names == faults && makes(id0) })
	}
	const think, none = `"default_chat_template_kwargs":{"think":true},"chat_template":null,`, `"default_chat_template_kwargs":null,"chat_template":null,`
	reports(first, one, think, "engine_flags", 1)
	if _, text := c.faults(one); !strings.Contains(text, `default-chat-template-kwargs is {"think":false}, and its engine reports {"think":true}`) {
		t.Error(text)
	}
	reports(first, one, none, "engine_flags", 0)
	reports(first, one, `"default_chat_template_kwargs":{ "think" : false },"chat_template":null,`, "", 2)
	reports(first, one, `"default_chat_template_kwargs":{"think":false},"chat_template":"/x.jinja",`, "engine_flags", 2)
	if _, text := c.faults(one); !strings.Contains(text, "--chat-template /x.jinja") {
		t.Error(text)
	}
	reports(first, one, `"default_chat_template_kwargs":{"think":false},"chat_template":null,`, "", 2)
	// A status that says nothing about the flags changes nothing.
	reports(first, one, think, "engine_flags", 1)
	first.Store(unavailable)
	if err := c.Engine(t.Context(), one); err == nil || !makes(1) {
		t.Errorf("an engine that does not answer has lost its flags: %v", err)
	}
	reports(first, one, fmt.Sprintf(`"default_chat_template_kwargs":{"think":true,"x":%q},`, strings.Repeat("x", 1<<17)), "engine_flags", 2)
	if _, text := c.faults(one); !strings.Contains(text, "131") {
		t.Error(text)
	}
	reports(first, one, `"default_chat_template_kwargs":{"think":false},`, "", 2)

	// Of several workers the one with the lowest id counts.
	second, at := start(think)
	two := set("b", at)
	if two < one {
		t.Fatal("the names have other ids than before")
	}
	c.wait(two, "engine_flags")
	if _, text := c.faults(two); !strings.Contains(text, `worker "a" of the same model with --default-chat-template-kwargs`) || !makes(2) {
		t.Error(text)
	}
	reports(second, two, `"default_chat_template_kwargs":{"think":false},`, "", 2)
	reports(second, two, think, "engine_flags", 2)
	c.router.RemoveWorker(one)
	if text := prompts.Contradicts(&engine.Flags{Kwargs: `{"think":true}`}); text == "" || !makes(1) {
		t.Error("the flags of the worker that is left do not count")
	}
	// Without a worker that reports flags the setting counts again.
	c.router.RemoveWorker(two)
	if !makes(2) {
		t.Error("the setting does not count after the last worker left")
	}
}

// A configured name that the engine does not serve is a fault until the engine serves it.
func TestAModelThatIsNotServed(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	l := newListing(t, `{"data":[{"id":"llama"},{"id":"llama-lora","parent":"llama"}]}`)
	id := c.set(fleet.Record{Name: "a", Address: l.at, Models: []string{"sim"}, BlockSize: 16})
	c.wait(id, "model_not_served")
	if _, text := c.faults(id); !strings.Contains(text, "include sim, and its engine serves llama, llama-lora") {
		t.Error(text)
	}
	if names := c.names(); !slices.Equal(names, []string{"sim"}) {
		t.Errorf("names of another model are served: %v", names)
	}
	// Engines that take any name, by their record or by their own word.
	l.answers(c, id, `{"data":[{"id":"llama","owned_by":"sglang"}]}`)
	c.wait(id, "")
	l.answers(c, id, `{"data":[{"id":"llama"}]}`)
	c.wait(id, "model_not_served")
	l.answers(c, id, `{"data":[{"id":"sim"}]}`)
	c.wait(id, "")
}

// An adapter of a record that the engine does not list is a fault, and its requests go to workers that have it.
func TestAnAdapterThatIsNotServed(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	const without, with = `{"data":[{"id":"sim","owned_by":"vllm"}]}`, `{"data":[{"id":"sim","owned_by":"vllm"},{"id":"tuned","parent":"sim"}]}`
	lacks, has := newListing(t, without), newListing(t, with)
	a := c.set(fleet.Record{Name: "a", Address: lacks.at, Models: []string{"sim"}, LoRA: []string{"tuned"}, BlockSize: 16})
	c.set(fleet.Record{Name: "b", Address: has.at, Models: []string{"sim"}, LoRA: []string{"tuned"}, BlockSize: 16})
	c.wait(a, "model_not_served")
	if _, text := c.faults(a); !strings.Contains(text, "include tuned") {
		t.Error(text)
	}
	n := 0
	goes := func(to string) bool {
		n++
		d, err := c.router.BestWorker(t.Context(), router.Request{ID: fmt.Sprint(n), Model: "tuned", Prompt: router.Prompt{Prompt: []byte(`"x"`)}})
		return err == nil && d.WorkerName == to
	}
	for range 8 {
		if !goes("b") {
			t.Fatal("a request for the adapter goes to the worker that lacks it")
		}
	}
	lacks.answers(c, a, with)
	c.wait(a, "")
	natstest.Eventually(t, func() bool { return goes("a") })
}

// Workers of one model whose engines take requests of different lengths.
func TestDifferentLengths(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	short, long := newListing(t, fmt.Sprintf(ofSim, "")), newListing(t, `{"data":[{"id":"sim","max_model_len":8192}]}`)
	a := c.set(fleet.Record{Name: "a", Address: short.at, Models: []string{"sim"}})
	b := c.set(fleet.Record{Name: "b", Address: long.at, Models: []string{"sim"}})
	c.wait(a, "max_model_len")
	c.wait(b, "")
	if _, text := c.faults(a); !strings.Contains(text, "at most 4096 tokens") || !strings.Contains(text, `worker b of the same model takes 8192`) {
		t.Error(text)
	}
	c.Comparison.Remove(b)
	c.wait(a, "")
}

// Two registered workers with one address and rank are named as one process. Ranks of one address are
// not, and neither is a worker that gets no requests.
func TestOneAddressTwice(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	r := fleet.Record{Name: "a", Address: "127.0.0.1:1", Models: []string{"sim"}, DPSize: 2}
	a := c.set(r)
	r.Name, r.DPStart = "b", 2
	b := c.set(r)
	c.wait(a, "")
	r.DPStart = 1
	c.set(r)
	c.wait(a, "same_address")
	c.wait(b, "same_address")
	if _, text := c.faults(a); !strings.Contains(text, `worker b has the same address 127.0.0.1:1`) {
		t.Error(text)
	}
	c.SetHealth(b, router.Unhealthy)
	c.wait(a, "")
	c.wait(b, "")
}

// Whatever is at /v1/models, kvroute keeps the names that it knew, and no more than 256.
// comparedFaults records the faults that a comparison passes on.
type comparedFaults map[uint64]map[string]bool

func (f comparedFaults) set(id uint64, source string, faults []router.Fault) {
	if f[id] == nil {
		f[id] = make(map[string]bool)
	}
	f[id][source] = len(faults) > 0
}

// After any changes, each worker has the faults that a comparison of all workers with each other finds.
func TestComparisonOfChangingFleets(t *testing.T) {
	t.Parallel()
	found := comparedFaults{}
	c := fleet.NewComparison(fleet.ComparisonConfig{Faults: found.set, Workers: newCompared(t).DirectWorkers})
	rng := rand.New(rand.NewPCG(3, 4))
	type worker struct {
		info   router.WorkerInfo
		length int
	}
	workers := map[uint64]*worker{}
	healths := []router.Health{router.Healthy, router.Degraded, router.Unhealthy}
	for step := range 3000 {
		id := 1 + rng.Uint64N(12)
		switch w := workers[id]; {
		case w == nil || rng.IntN(4) == 0:
			r := fleet.Record{
				WorkerID: id, Address: fmt.Sprintf("10.0.0.%d:80", 1+rng.IntN(5)), Models: []string{fmt.Sprint("m", rng.IntN(3))}, BlockSize: 16,
			}
			info, err := r.Info(fleet.Networks{})
			if err != nil {
				t.Fatal(err)
			}
			info.Health = healths[rng.IntN(len(healths))]
			if w == nil {
				w = &worker{}
				workers[id] = w
			}
			w.info = info
			c.Set(r, info)
		case rng.IntN(4) == 0:
			c.Remove(id)
			delete(workers, id)
			delete(found, id)
		case rng.IntN(2) == 0:
			w.info.Health = healths[rng.IntN(len(healths))]
			c.SetHealth(id, w.info.Health)
		default:
			w.length = 1024 * rng.IntN(4)
			if err := c.Models(id, fmt.Appendf(nil, `{"data":[{"id":%q,"max_model_len":%d}]}`, w.info.Models[0], w.length)); err != nil {
				t.Fatal(err)
			}
		}
		for id, w := range workers {
			shorter, shares := false, false
			for other, o := range workers {
				shorter = shorter || o.info.Models[0] == w.info.Models[0] && 0 < w.length && w.length < o.length
				shares = shares || other != id && o.info.Address == w.info.Address && max(o.info.Health, w.info.Health) <= router.Degraded
			}
			if got := found[id]["length"]; got != shorter {
				t.Fatalf("step %d: worker %d is shorter: %v, want %v", step, id, got, shorter)
			}
			if got := found[id]["address"]; got != shares {
				t.Fatalf("step %d: worker %d shares its address: %v, want %v", step, id, got, shares)
			}
		}
	}
}

// A change of one worker does not read the others: it would cost seconds for each of thousands that start at once.
func TestComparisonOfLargeFleets(t *testing.T) { // not parallel: it counts allocations
	c := fleet.NewComparison(fleet.ComparisonConfig{Faults: comparedFaults{}.set, Workers: newCompared(t).DirectWorkers})
	for i := range 5000 {
		r := fleet.Record{WorkerID: uint64(i + 1), Address: fmt.Sprintf("10.1.%d.%d:80", i/250, i%250+1), Models: []string{"m"}, BlockSize: 16}
		info, err := r.Info(fleet.Networks{})
		if err != nil {
			t.Fatal(err)
		}
		c.Set(r, info)
	}
	health := router.Healthy
	if n := testing.AllocsPerRun(20, func() {
		health = router.Degraded - health
		c.SetHealth(7, health)
	}); n > 0 {
		t.Errorf("a change of one worker's health makes %v allocations, want 0: those were lists of all workers", n)
	}
}

// An engine that does not answer is asked for its models less often, until it answers.
func TestSilentEnginesAreAskedRarely(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	closed := httptest.NewServer(http.NotFoundHandler())
	at := closed.Listener.Addr().String()
	closed.Close()
	id := c.set(fleet.Record{Name: "a", Address: at, Models: []string{"sim"}, BlockSize: 16})
	rarely := func() bool { return time.Until(c.prober.ModelsDue(id)) > 20*time.Second }
	natstest.Eventually(t, func() bool {
		if rarely() {
			return true
		}
		c.prober.Compare(id) // does not wait for the period
		return false
	})
	l := newListing(t, fmt.Sprintf(ofSim, ""))
	c.set(fleet.Record{Name: "a", Address: l.at, Models: []string{"sim"}, BlockSize: 16})
	natstest.Eventually(t, func() bool { return l.calls.Load() > 0 && !rarely() })
}

func TestOddListsOfModels(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	l := newListing(t, fmt.Sprintf(ofSim, `,{"id":"tuned","parent":"sim"}`))
	id := c.set(fleet.Record{Name: "a", Address: l.at, Models: []string{"sim"}})
	natstest.Eventually(t, func() bool { return slices.Contains(c.names(), "tuned") })
	var many strings.Builder
	for i := range 10_000 {
		fmt.Fprintf(&many, `,{"id":"l%d","parent":"sim"}`, i)
	}
	for _, text := range []string{"", "<html>", `{"data":{}}`, `{"data":[]}`, `[]`, `{"data":"x"}`, "null", strings.Repeat(" ", 2<<20), `{"data":[` + strings.Repeat(`[`, 20_000)} {
		if err := c.Models(id, []byte(text)); err == nil {
			t.Errorf("%.20q: no error", text)
		}
	}
	l.answers(c, id, strings.Repeat(" ", 2<<20))
	if names := c.names(); !slices.Equal(names, []string{"sim", "tuned"}) {
		t.Errorf("names %v", names)
	}
	if err := c.Models(id, fmt.Appendf(nil, ofSim, many.String()+`,{"id":"`+strings.Repeat("x", 300)+`"}`)); err != nil {
		t.Fatal(err)
	}
	if n := len(c.names()); n != 256 {
		t.Errorf("%d names", n)
	}
}

// Router groups and Dynamo's workers are not asked.
func TestOtherProgramsAreNotAsked(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	var wrong sync.Map
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { wrong.Store(r.URL.Path, true) }))
	defer s.Close()
	at := s.Listener.Addr().String()
	c.set(fleet.Record{Name: "group", Address: at, Models: []string{"sim"}, Group: "east", Events: fleet.Events{Transport: "none"}})
	c.set(fleet.Record{Name: "dynamo", Address: at, Models: []string{"sim"}, Engine: "dynamo", Events: fleet.Events{Transport: "none"}})
	l := newListing(t, fmt.Sprintf(ofSim, ""))
	id := c.set(fleet.Record{Name: "a", Address: l.at, Models: []string{"sim"}})
	l.answers(c, id, fmt.Sprintf(ofSim, "")) // the prober has seen all targets
	wrong.Range(func(path, _ any) bool { t.Errorf("kvroute asked for %v", path); return true })
}

// One process twice in the configuration is refused with both names and the field.
func TestIdentitiesInTheFile(t *testing.T) {
	t.Parallel()
	zmq := func(endpoint string) fleet.Events { return fleet.Events{Transport: "zmq", Endpoint: endpoint} }
	for _, c := range []struct {
		name string
		a, b fleet.Record
		want string
	}{
		{"two workers", fleet.Record{Name: "a", Address: "10.0.0.1:1"}, fleet.Record{Name: "b", Address: "10.0.0.1:2"}, ""},
		{"one address", fleet.Record{Name: "a", Address: "10.0.0.1:1"}, fleet.Record{Name: "b", Address: "[::ffff:10.0.0.1]:1"}, `workers[1].address ("b") has the address 10.0.0.1:1 and rank 0 of workers[0] ("a")`},
		{"ranks", fleet.Record{Name: "a", Address: "10.0.0.1:1", DPSize: 2}, fleet.Record{Name: "b", Address: "10.0.0.1:1", DPStart: 2}, ""},
		{"one rank", fleet.Record{Name: "a", Address: "10.0.0.1:1", DPSize: 3}, fleet.Record{Name: "b", Address: "10.0.0.1:1", DPStart: 2}, "rank 2"},
		{"one id", fleet.Record{Name: "a", WorkerID: 5, Address: "10.0.0.1:1"}, fleet.Record{Name: "b", WorkerID: 5, Address: "10.0.0.1:2"}, "id 5"},
		{"one socket", fleet.Record{Name: "a", Address: "10.0.0.1:1", Events: zmq("tcp://*:5557")}, fleet.Record{Name: "b", Address: "10.0.0.2:1", Events: zmq("tcp://10.0.0.1:5557")}, `workers[1].events.endpoint ("b") has the event socket tcp://10.0.0.1:5557`},
		{"sockets of two ranks", fleet.Record{Name: "a", Address: "10.0.0.1:1", Events: zmq("tcp://*:5557")}, fleet.Record{Name: "b", Address: "10.0.0.1:1", DPStart: 1, Events: zmq("tcp://*:5557")}, ""},
		{"one socket by two names", fleet.Record{Name: "a", Address: "127.0.0.1:1", Events: zmq("tcp://localhost:5557")}, fleet.Record{Name: "b", Address: "127.0.0.1:2", Events: zmq("tcp://*:5557")}, "event socket"},
		{"one path", fleet.Record{Name: "a", Address: "10.0.0.1:1", Events: zmq("ipc:///e")}, fleet.Record{Name: "b", Address: "10.0.0.1:2", Events: zmq("ipc:///e")}, "ipc:///e"},
		{"names", fleet.Record{Name: "a", Address: "e.internal:1"}, fleet.Record{Name: "b", Address: "e.internal:1"}, ""}, // after the look-up
	} {
		err := fleet.CheckIdentities([]fleet.Record{c.a, c.b}, true)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
	}
}

// A name far behind in a long list is served, and an error of the list is asked about again soon.
func TestLongListsOfModels(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	var many strings.Builder
	for i := range 2000 {
		fmt.Fprintf(&many, `{"id":"n%d","parent":"sim"},`, i)
	}
	l := newListing(t, `{"data":[`+many.String()+`{"id":"sim"}]}`)
	id := c.set(fleet.Record{Name: "a", Address: l.at, Models: []string{"sim"}})
	natstest.Eventually(t, func() bool { return len(c.names()) == 256 })
	if what, text := c.faults(id); what != "" {
		t.Errorf("fault %s: %s", what, text)
	}
}

// A worker is compared again at once when its events or models change: a mended record ends its faults.
func TestAChangedRecordIsComparedAgain(t *testing.T) {
	t.Parallel()
	c := newCompared(t)
	l := newListing(t, fmt.Sprintf(ofSim, ""))
	r := fleet.Record{Name: "a", Address: l.at, Models: []string{"wrong"}, BlockSize: 16}
	asked := func(r fleet.Record) {
		t.Helper()
		before := l.calls.Load()
		c.set(r)
		natstest.Eventually(t, func() bool { return l.calls.Load() > before })
	}
	asked(r)
	id := r.ID()
	natstest.Eventually(t, func() bool { what, _ := c.faults(id); return what == "model_not_served" })
	r.Models = []string{"sim"}
	asked(r)
	natstest.Eventually(t, func() bool { what, _ := c.faults(id); return what == "" })
	r.Events = fleet.Events{Transport: "zmq", Endpoint: "tcp://127.0.0.1:1"}
	asked(r)
}

// A name and an address are one process; two names at one address may be behind one HTTP router.
func TestNamesOfOneProcess(t *testing.T) {
	t.Parallel()
	plain := fleet.Record{Name: "plain", Address: "127.0.0.1:8000", Models: []string{"sim"}}
	named := func(name, host string) fleet.Record {
		return fleet.Record{Name: name, Address: "127.0.0.1:8000", Host: host, Named: true, Models: []string{"sim"}}
	}
	behind := fleet.Record{Name: "behind", Address: "127.0.0.1:8000", Host: "c.example", Models: []string{"sim"}}
	for _, list := range [][]fleet.Record{{plain, named("a", "localhost:8000")}, {named("a", "localhost:8000"), plain}, {named("a", "x:8000"), named("b", "x:8000")}} {
		if err := fleet.CheckIdentities(list, false); err == nil || !strings.Contains(err.Error(), list[0].Name) || !strings.Contains(err.Error(), list[1].Name) {
			t.Errorf("%s and %s: %v", list[0].Name, list[1].Name, err)
		}
	}
	if err := fleet.CheckIdentities([]fleet.Record{named("a", "a.example"), named("b", "b.example"), behind}, false); err != nil {
		t.Error(err)
	}
}

// A health path that does not answer does not delay the question for the models.
func TestASlowHealthPathDelaysNoModels(t *testing.T) {
	asked := make(chan struct{})
	var first sync.Once
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/health" {
			select {
			case <-asked:
			case <-r.Context().Done():
				t.Error("the health probe ended, and the models were not asked for")
			}
			return
		}
		if r.URL.Path == "/v1/models" {
			first.Do(func() { close(asked) })
		}
		fmt.Fprint(w, `{"data":[{"id":"sim"}]}`)
	}))
	defer s.Close()
	c := newCompared(t)
	r := record("slow")
	r.Address, r.Health = strings.TrimPrefix(s.URL, "http://"), &fleet.Probe{}
	c.set(r)
	<-asked
}
