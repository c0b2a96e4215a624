// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// shape is a kind of request, at a rate that leaves the machine some idle time.
type shape struct {
	name   string
	size   int
	rate   float64 // a second
	tokens int     // streamed; 0 for a document
}

// sample is one round of a shape on a variant.
type sample struct {
	p50, p99, server, proxy float64 // ms, a request
	messages                float64 // from Envoy to the server, a request
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
		errs[i] = bench.Try(func() { post(ctx, client, v.envoy.URL(), bodies[i]) })
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
	postPrompt(ctx, client, url, body, -1)
}

// postPrompt is post for a prompt that workers know by its number.
func postPrompt(ctx context.Context, client *http.Client, url string, body []byte, number int) {
	req := bench.Must(http.NewRequestWithContext(ctx, http.MethodPost, url+"/v1/chat/completions", bytes.NewReader(body)))
	req.Header.Set("Content-Type", "application/json")
	if number >= 0 {
		req.Header.Set(headerPrompt, strconv.Itoa(number))
	}
	resp := bench.Must(client.Do(req))
	defer func() { _ = resp.Body.Close() }() // read to its end
	text := bench.Must(io.ReadAll(resp.Body))
	if resp.StatusCode != http.StatusOK || !bytes.Contains(text, []byte(`"choices"`)) {
		bench.NoError(fmt.Errorf("status %d: %.200s", resp.StatusCode, text))
	}
}
