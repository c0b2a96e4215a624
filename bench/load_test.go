// SPDX-License-Identifier: Apache-2.0

package bench_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/bench"
)

func TestPlanIsReproducible(t *testing.T) {
	c := bench.LoadConfig{Conversations: 10, Turns: 3, Seed: 7}
	a, err := bench.Plan(c)
	if err != nil {
		t.Fatal(err)
	}
	b, _ := bench.Plan(c)
	if diff := cmp.Diff(a, b); diff != "" || len(a) != 30 {
		t.Errorf("%d requests, want 30; the same seed differs:\n%s", len(a), diff)
	}
	c.Seed = 8
	if b, _ = bench.Plan(c); cmp.Equal(a, b) {
		t.Error("another seed gives the same load")
	}
}

func TestPlanOfConversations(t *testing.T) {
	c := bench.LoadConfig{Conversations: 200, Turns: 3, SystemPrompts: 4, SystemBytes: 100, Rate: 30, TurnGap: time.Second}
	plan, err := bench.Plan(c)
	if err != nil {
		t.Fatal(err)
	}
	systems, last, bodies := map[string]bool{}, time.Duration(0), map[int]string{}
	var firsts []time.Duration
	for _, p := range plan {
		if p.At < last {
			t.Fatalf("a request due at %v stands behind one due at %v", p.At, last)
		}
		last = p.At
		var body struct {
			Messages []struct{ Role, Content string }
		}
		if err := json.Unmarshal([]byte(p.Body), &body); err != nil {
			t.Fatal(err)
		}
		if len(body.Messages) != 2+2*p.Turn || len(body.Messages[0].Content) != 100 {
			t.Fatalf("turn %d has %d messages", p.Turn, len(body.Messages))
		}
		systems[body.Messages[0].Content] = true
		// A turn begins with all that was said before.
		before, _, _ := strings.Cut(p.Body, `],"max_tokens"`)
		if p.Turn == 0 {
			firsts = append(firsts, p.At)
		} else if !strings.HasPrefix(before, bodies[p.Conversation]) {
			t.Fatalf("turn %d of conversation %d does not continue it", p.Turn, p.Conversation)
		}
		bodies[p.Conversation] = before
	}
	if len(systems) != 4 {
		t.Errorf("%d system prompts, want 4", len(systems))
	}
	// 200 conversations of 3 requests at 30 requests a second begin within 20 s.
	if got := firsts[len(firsts)-1].Seconds(); math.Abs(got-20) > 5 {
		t.Errorf("the last conversation begins after %v s, want about 20", got)
	}
	c.Arrivals = "constant"
	plan, _ = bench.Plan(c)
	for _, p := range plan {
		if want := time.Duration(p.Conversation) * 100 * time.Millisecond; p.Turn == 0 && (p.At-want).Abs() > time.Millisecond {
			t.Errorf("conversation %d begins at %v, want %v", p.Conversation, p.At, want)
		}
	}
}

func TestBadLoads(t *testing.T) {
	for want, c := range map[string]bench.LoadConfig{
		"rate is":          {Rate: math.NaN()},
		"arrivals is":      {Arrivals: "bursty"},
		"conversations is": {Conversations: -1},
		"turn-gap is":      {TurnGap: -1},
	} {
		if _, err := bench.Load(t.Context(), c, nil, nil); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: error %v, want one that names %s", c, err, want)
		}
	}
}

// serve answers like an engine: a stream of n tokens, half of the prompt cached.
func serve(t *testing.T, before func(i int, w http.ResponseWriter) (done bool)) string {
	t.Helper()
	var mu sync.Mutex
	i := 0
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		n := i
		i++
		mu.Unlock()
		if before(n, w) {
			return
		}
		w.Header().Set("X-Sim-Worker", fmt.Sprint("w", n%2))
		fmt.Fprint(w, ": a comment is no token\n\n")
		for range 3 {
			fmt.Fprint(w, `data: {"choices":[{"delta":{"content":"x"}}]}`, "\n\n")
			_ = http.NewResponseController(w).Flush()
		}
		fmt.Fprint(w, `data: {"choices":[],"usage":{"prompt_tokens":100,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":50}}}`, "\n\ndata: [DONE]\n\n")
	}))
	t.Cleanup(s.Close)
	return s.URL
}

func TestLoadMeasures(t *testing.T) {
	url := serve(t, func(int, http.ResponseWriter) bool { return false })
	var lines bytes.Buffer
	seen := 0
	s, err := bench.Load(t.Context(), bench.LoadConfig{URL: url + "/", Conversations: 10, Turns: 2, Rate: 400, TurnGap: time.Millisecond}, func(done, total int) {
		if seen++; done != seen || total != 20 {
			t.Errorf("progress %d of %d after %d calls", done, total, seen)
		}
	}, &lines)
	if err != nil {
		t.Fatal(err)
	}
	if s.Requests != 20 || s.Failed() != 0 || s.CachedShare != .5 || s.PerWorker["w0"] != 10 || s.PerWorker["w1"] != 10 {
		t.Errorf("summary %+v", s)
	}
	if s.TTFT.Mean <= 0 || s.TTFT.P50 > s.TTFT.P90 || s.E2E.Mean < s.TTFT.Mean {
		t.Errorf("times %+v %+v", s.TTFT, s.E2E)
	}
	if n := bytes.Count(lines.Bytes(), []byte("\n")); n != 20 {
		t.Errorf("%d lines recorded, want 20", n)
	}
	var out bytes.Buffer
	s.Print(&out)
	if !strings.Contains(out.String(), "cached share  0.500") {
		t.Errorf("printed\n%s", out.String())
	}
}

// While the server stalls, requests go on to be due; all of them must show it, not
// only the one that met the stall.
func TestAStallIsNotOmitted(t *testing.T) {
	const stall = 400 * time.Millisecond
	var once sync.Mutex
	until, stalled := time.Time{}, 0
	url := serve(t, func(i int, _ http.ResponseWriter) bool {
		once.Lock()
		if i == 10 {
			until = time.Now().Add(stall)
		}
		wait := time.Until(until)
		if wait > 0 {
			stalled++
		}
		once.Unlock()
		if wait > 0 {
			<-time.After(wait)
		}
		return false
	})
	s, err := bench.Load(t.Context(), bench.LoadConfig{URL: url, Conversations: 100, Turns: 1, Rate: 100, Arrivals: "constant"}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	// 40 of 100 requests fall into the stall and wait 200 ms on average.
	if s.TTFT.P90 < .2 || s.TTFT.Mean < .05 {
		t.Errorf("TTFT p90 %v, mean %v: a stall of %v is hidden", s.TTFT.P90, s.TTFT.Mean, stall)
	}
	if stalled < 2 {
		t.Error("the load waited for the server")
	}
}

func TestErrorsHaveKinds(t *testing.T) {
	measured := make(chan struct{})
	url := serve(t, func(i int, w http.ResponseWriter) bool {
		switch i {
		case 0:
			http.Error(w, "no", http.StatusServiceUnavailable)
		case 1:
			fmt.Fprint(w, "data: {}\n\n") // and nothing more
		case 2:
			panic(http.ErrAbortHandler)
		case 3:
			<-measured
		default:
			return false
		}
		return true
	})
	s, err := bench.Load(t.Context(), bench.LoadConfig{URL: url, Conversations: 5, Turns: 1, Rate: 20, Arrivals: "constant", Timeout: 5 * time.Second}, nil, nil)
	close(measured)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{"status 503": 1, "incomplete": 1, "connection": 1, "timeout": 1}
	if diff := cmp.Diff(want, s.Errors); diff != "" || s.Failed() != 4 {
		t.Errorf("errors (-want +got):\n%s", diff)
	}
}

func TestTooManyInFlightIsAnError(t *testing.T) {
	url := serve(t, func(int, http.ResponseWriter) bool {
		<-time.After(300 * time.Millisecond)
		return false
	})
	s, err := bench.Load(t.Context(), bench.LoadConfig{URL: url, Conversations: 10, Turns: 1, Rate: 1000, MaxInFlight: 4}, nil, nil)
	if err != nil || s.Errors["overload"] != 6 {
		t.Errorf("errors %v, %v; want 6 × overload", s.Errors, err)
	}
}

func TestALoadCanBeInterrupted(t *testing.T) {
	url := serve(t, func(int, http.ResponseWriter) bool { return false })
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	start := time.Now()
	_, err := bench.Load(ctx, bench.LoadConfig{URL: url, Conversations: 1000, Turns: 1, Rate: 20}, func(done, _ int) {
		if done == 3 {
			cancel(why)
		}
	}, nil)
	if !errors.Is(err, why) || time.Since(start) > 5*time.Second {
		t.Errorf("error %v after %v, want %v soon", err, time.Since(start), why)
	}
}
