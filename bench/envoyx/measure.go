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

// The variants, in the order in which main starts them.
const (
	without = iota
	noop
	ours
	noopUnobserved
	oursUnobserved
)

// shape is a kind of request, at a rate that leaves the machine some idle time.
type shape struct {
	name   string
	size   int
	rate   float64 // a second
	tokens int     // streamed; 0 for a document
	rows   []row   // beyond those that all shapes have
}

// row is a figure that follows from the samples of a round, by variant.
type row struct {
	what, unit string
	target     bench.Target
	value      func(r []sample) float64
}

func shapes() []shape {
	none := bench.Target{}
	// added are the rows of what kvroute adds to the no-op processor.
	added := func(p50, p99, cpu bench.Target) []row {
		return []row{
			{"p50, kvroute ÷ no-op", "×", p50, func(r []sample) float64 { return r[ours].p50 / r[noop].p50 }},
			{"p99, kvroute ÷ no-op", "×", p99, func(r []sample) float64 { return r[ours].p99 / r[noop].p99 }},
			{"server's CPU a request, kvroute − no-op", "ms", cpu, func(r []sample) float64 { return r[ours].server - r[noop].server }},
		}
	}
	other := added(none, none, none)
	return []shape{
		{"1 KB", 1 << 10, 150, 0, other},
		{"10 KB", 10 << 10, 150, 0, added(bench.AtMost(1.25), bench.AtMost(1.5), bench.AtMost(.15))},
		{"100 KB", 100 << 10, 40, 0, other},
		{"1 MB", 1 << 20, 5, 0, other},
		{"200 tokens streamed", 10 << 10, 40, 200, []row{
			{"messages to kvroute a response", "", bench.AtMost(10), func(r []sample) float64 { return r[ours].messages }},
		}},
		// The observer ends at the first event, so its part is largest in short requests with
		// short responses.
		{observedShape, 1 << 10, 200, 5, []row{
			{"observer's CPU, no-op", "ms", none, func(r []sample) float64 { return r[noop].server - r[noopUnobserved].server }},
			{"observer's CPU, kvroute", "ms", none, func(r []sample) float64 { return r[ours].server - r[oursUnobserved].server }},
		}},
	}
}

const observedShape = "5 tokens streamed"

// sample is one round of a shape on a variant.
type sample struct {
	p50, p99, server, proxy float64 // ms, a request
	messages                float64 // from Envoy to the server, a request
}

func measure(ctx context.Context, o options, variants []*variant) []bench.Figure {
	rng := rand.New(rand.NewPCG(1, 1))
	texts := newTexts(rng)
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 256, DisableCompression: true}}
	figures := idle(ctx, variants)
	for _, s := range shapes() {
		if !strings.Contains(s.name, o.only) {
			continue
		}
		tried := variants
		if s.name != observedShape {
			tried = variants[:noopUnobserved]
		}
		rows, rounds := s.all(tried), otherRounds
		var header []bench.Row
		for _, r := range rows {
			header = append(header, bench.NewRow(s.name+": "+r.what, r.unit, r.target))
			if r.target.IsSet() || s.name == observedShape {
				rounds = o.rounds
			}
		}
		all := bench.Rounds(rounds, header, func() (values []float64) {
			samples := make([]sample, len(tried))
			for _, v := range rng.Perm(len(tried)) {
				bench.Within(s.name+", "+tried[v].name, func() { samples[v] = one(ctx, client, texts, s, tried[v]) })
			}
			for _, r := range rows {
				values = append(values, r.value(samples))
			}
			fmt.Fprintf(os.Stderr, "%s: a round\n", s.name)
			return values
		})
		if s.name == observedShape {
			// The ratio of the medians, since the ratio of one round's small differences is noise.
			// If noise hides the observer's cost, the target is missed.
			noop, ours := all[len(all)-2].Median, all[len(all)-1].Median
			f := bench.NewFigure(s.name+": observer's CPU, kvroute ÷ no-op", "×", bench.AtMost(1.25), ours/noop)
			f.Met = f.Met && noop > 0 && ours > 0
			all = append(all, f)
		}
		figures = append(figures, all...)
	}
	return figures
}

// all are the rows of each variant and of the shape.
func (s *shape) all(variants []*variant) (rows []row) {
	for v, variant := range variants {
		add := func(what string, value func(s sample) float64) {
			rows = append(rows, row{what + ", " + variant.name, "ms", bench.Target{}, func(r []sample) float64 { return value(r[v]) }})
		}
		add("p50", func(s sample) float64 { return s.p50 })
		add("p99", func(s sample) float64 { return s.p99 })
		add("Envoy's CPU a request", func(s sample) float64 { return s.proxy })
		if variant.server != nil {
			add("server's CPU a request", func(s sample) float64 { return s.server })
		}
	}
	return append(rows, s.rows...)
}

// idle measures the CPU time of the servers without requests, which is included in the CPU time
// of a request.
func idle(ctx context.Context, variants []*variant) []bench.Figure {
	const what = "idle: server's CPU a second, "
	rows := []bench.Row{bench.NewRow(what+"no-op", "ms", bench.Target{}), bench.NewRow(what+"kvroute", "ms", bench.Target{})}
	return bench.Rounds(1, rows, func() []float64 {
		a, b := variants[noop].used(ctx).server, variants[ours].used(ctx).server
		<-time.After(length)
		return []float64{ms(variants[noop].used(ctx).server-a) / length.Seconds(), ms(variants[ours].used(ctx).server-b) / length.Seconds()}
	})
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
		errs[i] = bench.Try(func() { post(ctx, client, v.envoy.URL()+"/v1/chat/completions", bodies[i]) })
		took[i] = time.Since(start) - due(i)
	})
	bench.NoError(cmp.Or(errors.Join(errs...), context.Cause(ctx)))
	<-time.After(50 * time.Millisecond) // streams end after the response
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

func post(ctx context.Context, client *http.Client, url string, body []byte) {
	req := bench.Must(http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body)))
	req.Header.Set("Content-Type", "application/json")
	resp := bench.Must(client.Do(req))
	defer func() { _ = resp.Body.Close() }() // read to its end
	text := bench.Must(io.ReadAll(resp.Body))
	if resp.StatusCode != http.StatusOK || !bytes.Contains(text, []byte(`"choices"`)) {
		bench.NoError(fmt.Errorf("status %d: %.200s", resp.StatusCode, text))
	}
}
