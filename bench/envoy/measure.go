// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// answer is a worker that answers at once: a JSON document, or as many events as the
// request has max_tokens, a millisecond apart.
func answer(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	var events int
	if n, _ := fmt.Sscanf(string(body[:min(len(body), 64)]), bodyBegin, &events); n != 1 || events == 0 {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}`)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	for i := range events {
		_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"token %d\"}}]}\n\n", i)
		if out.Flush() != nil {
			return
		}
		pause(r.Context(), time.Millisecond)
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}

// bodyBegin is the beginning of a request. It tells the worker how many events to send.
const bodyBegin = `{"model":"sim","max_tokens":%d,`

// shape is a kind of request, at a rate that leaves the machine some idle time.
type shape struct {
	name     string
	size     int
	rate     float64 // a second
	tokens   int     // streamed; 0 for a document
	targets  aim
	variants []int // of those that main starts
}

// aim says which targets a shape has.
type aim uint8

const (
	nothing  aim = iota
	added        // what kvroute adds to the no-op processor
	messages     // how many a response costs
	observer     // what the observer costs
)

func shapes() []shape {
	all := []int{0, 1, 2}
	return []shape{
		{"1 KB", 1 << 10, 150, 0, nothing, all},
		{"10 KB", 10 << 10, 150, 0, added, all},
		{"100 KB", 100 << 10, 40, 0, nothing, all},
		{"1 MB", 1 << 20, 5, 0, nothing, all},
		{"200 tokens streamed", 10 << 10, 40, 200, messages, all},
		// The observer ends at the first event, so its part is largest in short requests with
		// short responses.
		{"5 tokens streamed", 1 << 10, 200, 5, observer, []int{1, 2, 3, 4}},
	}
}

// sample is one round of a shape on a variant.
type sample struct {
	p50, p99, server, proxy float64 // ms, a request
	messages                float64 // from Envoy to the server, a request
}

func measure(ctx context.Context, o options, variants []*variant) (figures []bench.Figure) {
	rng := rand.New(rand.NewPCG(1, 1))
	texts := newTexts(rng)
	figures = idle(ctx, variants)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}
	for _, s := range shapes() {
		if !strings.Contains(s.name, o.only) {
			continue
		}
		rounds := otherRounds
		if s.targets != nothing {
			rounds = o.rounds
		}
		got := make(map[int][]sample)
		for round := range rounds {
			order := slices.Clone(s.variants)
			rng.Shuffle(len(order), func(i, j int) { order[i], order[j] = order[j], order[i] })
			for _, v := range order {
				bench.Within(s.name+", "+variants[v].name, func() { got[v] = append(got[v], one(ctx, client, texts, s, variants[v])) })
			}
			fmt.Fprintf(os.Stderr, "%s: round %d of %d\n", s.name, round+1, rounds)
		}
		figures = append(figures, report(s, variants, got)...)
	}
	return figures
}

// idle returns the CPU time of the servers without requests, which is included in the CPU
// time of a request.
func idle(ctx context.Context, variants []*variant) (figures []bench.Figure) {
	begun := variants[1:3]
	before := make([]time.Duration, len(begun))
	for i, v := range begun {
		before[i] = bench.Must(bench.ProcessTime(v.server.Pid()))
	}
	start := time.Now()
	pause(ctx, length)
	for i, v := range begun {
		after := bench.Must(bench.ProcessTime(v.server.Pid()))
		figures = append(figures, bench.NewFigure("idle: server's CPU a second, "+v.name, "ms", bench.Target{}, ms(after-before[i])/time.Since(start).Seconds()))
	}
	return figures
}

// one plays a round as an open loop: each request leaves when it is due, and its time
// counts from then.
func one(ctx context.Context, client *http.Client, texts *texts, s shape, v *variant) sample {
	n := max(4, int(length.Seconds()*s.rate))
	bodies := make([][]byte, n)
	for i := range bodies {
		bodies[i] = texts.body(s.size, s.tokens)
	}
	before := v.used(ctx)
	took := make([]time.Duration, n)
	errs := make([]error, n)
	start := time.Now()
	due := func(i int) time.Duration { return time.Duration(float64(i) / s.rate * float64(time.Second)) }
	bench.Pace(ctx, start, n, due, func(i int) {
		errs[i] = post(ctx, client, v.envoy.URL()+"/v1/chat/completions", bodies[i])
		took[i] = time.Since(start) - due(i)
	})
	bench.NoError(cmp.Or(errors.Join(errs...), context.Cause(ctx)))
	pause(ctx, 50*time.Millisecond) // streams end after the response
	after := v.used(ctx)
	slices.Sort(took)
	each := func(d time.Duration) float64 { return ms(d) / float64(n) }
	return sample{
		p50: ms(took[n/2]), p99: ms(took[n*99/100]),
		server: each(after.server - before.server), proxy: each(after.proxy - before.proxy),
		messages: float64(after.messages-before.messages) / float64(n),
	}
}

func ms(d time.Duration) float64 { return d.Seconds() * 1e3 }

func post(ctx context.Context, client *http.Client, url string, body []byte) error {
	req := bench.Must(http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body)))
	req.Header.Set("Content-Type", "application/json")
	resp := bench.Must(client.Do(req))
	defer func() { _ = resp.Body.Close() }() // read to its end
	text, err := io.ReadAll(resp.Body)
	if err == nil && (resp.StatusCode != http.StatusOK || !bytes.Contains(text, []byte(`"choices"`))) {
		err = fmt.Errorf("status %d: %.200s", resp.StatusCode, text)
	}
	return err
}

// use is the CPU time and the messages of a variant so far.
type use struct {
	server, proxy time.Duration
	messages      int64
}

func (v *variant) used(ctx context.Context) (u use) {
	u.proxy = bench.Must(bench.ProcessTime(v.envoy.Pid()))
	if v.server == nil {
		return u
	}
	u.server = bench.Must(bench.ProcessTime(v.server.Pid()))
	// A filter that this Envoy does not have counts 0.
	for _, filter := range []string{"kvroute", "kvroute_observer"} {
		u.messages += bench.Must(v.envoy.Stat(ctx, "http.llm.ext_proc."+filter+".stream_msgs_sent"))
	}
	return u
}

// report turns the samples of a shape into figures, ratios round by round.
func report(s shape, variants []*variant, got map[int][]sample) (out []bench.Figure) {
	add := func(what, unit string, target bench.Target, value func(i int) float64) {
		values := make([]float64, len(got[2]))
		for i := range values {
			values[i] = value(i)
		}
		out = append(out, bench.NewFigure(s.name+": "+what, unit, target, values...))
	}
	none := bench.Target{}
	most := func(limit float64) bench.Target {
		if s.targets != added {
			return none
		}
		return bench.AtMost(limit)
	}
	for _, v := range s.variants {
		name := variants[v].name
		add("p50, "+name, "ms", none, func(i int) float64 { return got[v][i].p50 })
		add("p99, "+name, "ms", none, func(i int) float64 { return got[v][i].p99 })
		add("Envoy's CPU a request, "+name, "ms", none, func(i int) float64 { return got[v][i].proxy })
		if variants[v].server != nil {
			add("server's CPU a request, "+name, "ms", none, func(i int) float64 { return got[v][i].server })
		}
	}
	add("p50, kvroute ÷ no-op", "×", most(1.25), func(i int) float64 { return got[2][i].p50 / got[1][i].p50 })
	add("p99, kvroute ÷ no-op", "×", most(1.5), func(i int) float64 { return got[2][i].p99 / got[1][i].p99 })
	add("server's CPU a request, kvroute − no-op", "ms", most(.15), func(i int) float64 { return got[2][i].server - got[1][i].server })
	switch s.targets {
	case messages:
		add("messages to kvroute a response", "", bench.AtMost(10), func(i int) float64 { return got[2][i].messages })
	case observer:
		add("observer's CPU, no-op", "ms", none, func(i int) float64 { return got[1][i].server - got[3][i].server })
		add("observer's CPU, kvroute", "ms", none, func(i int) float64 { return got[2][i].server - got[4][i].server })
		// The ratio of the medians, since the ratio of one round's small differences is noise.
		// If noise hides the observer's cost, the target is missed.
		noop, ours := out[len(out)-2].Median, out[len(out)-1].Median
		f := bench.NewFigure(s.name+": observer's CPU, kvroute ÷ no-op", "×", bench.AtMost(1.25), ours/noop)
		f.Met = f.Met && noop > 0 && ours > 0
		out = append(out, f)
	case nothing, added:
	}
	return out
}
