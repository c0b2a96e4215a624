// SPDX-License-Identifier: Apache-2.0

package bench

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"
)

// Result is one request, as the client measured it. Times are in seconds from the moment at
// which the request was due.
type Result struct {
	Conversation int     `json:"conversation"`
	Turn         int     `json:"turn"`
	Due          float64 `json:"due_s"`  // after the load's beginning
	Lag          float64 `json:"lag_s"`  // until it was sent: the generator's own delay
	TTFT         float64 `json:"ttft_s"` // until the first event
	E2E          float64 `json:"e2e_s"`  // until the end

	ITL []float64 `json:"-"` // between the events that follow

	Worker       string `json:"worker,omitempty"` // that served, if a header names it
	PromptTokens int    `json:"prompt_tokens"`
	CachedTokens int    `json:"cached_tokens"`
	OutputTokens int    `json:"output_tokens"`
	Error        string `json:"error,omitempty"` // kind of failure: "status 503", "overload", "timeout", …
}

// Summary is the outcome of a load. Times are in seconds, of successful requests only.
type Summary struct {
	Requests    int            `json:"requests"`
	Errors      map[string]int `json:"errors"` // by kind
	TTFT        Quantiles      `json:"ttft_s"`
	ITL         Quantiles      `json:"itl_s"`
	E2E         Quantiles      `json:"e2e_s"`
	Lag         Quantiles      `json:"lag_s"`
	CachedShare float64        `json:"cached_share"` // of all prompt tokens
	PerWorker   map[string]int `json:"per_worker"`
	Wall        float64        `json:"wall_s"`
}

// Failed counts the requests that failed.
func (s *Summary) Failed() (n int) {
	for _, k := range s.Errors {
		n += k
	}
	return n
}

// Load puts a load on an endpoint, open loop: each request leaves at its time, whatever
// became of the requests before it, and its times count from then. If ctx ends, what
// is in flight ends too, and the error is ctx's. progress, if not nil, is called for
// each request that ended, one call at a time; record, if not nil, gets a JSON line
// for each.
func Load(ctx context.Context, conf LoadConfig, progress func(done, total int), record io.Writer) (Summary, error) {
	if err := Complete(&conf); err != nil {
		return Summary{}, fmt.Errorf("bench: %w", err)
	}
	l := loader{conf: conf, client: &http.Client{Transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
		MaxIdleConns:        conf.MaxInFlight,
		MaxIdleConnsPerHost: conf.MaxInFlight,
		IdleConnTimeout:     30 * time.Second,
		DisableCompression:  true,
	}}}
	defer l.client.CloseIdleConnections()
	requests := plan(conf)
	results := make(chan Result, len(requests))
	slots := make(chan struct{}, conf.MaxInFlight)
	l.start = time.Now()
	go func() {
		defer close(results)
		Pace(ctx, l.start, len(requests), func(i int) time.Duration { return requests[i].at }, func(i int) {
			select {
			case slots <- struct{}{}:
				results <- l.ask(ctx, &requests[i])
				<-slots
			default:
				r := l.begin(&requests[i])
				r.Error = "overload"
				results <- r
			}
		})
	}()
	all := make([]Result, 0, len(requests))
	var recordErr error
	for r := range results {
		all = append(all, r)
		if progress != nil {
			progress(len(all), len(requests))
		}
		if record != nil && recordErr == nil {
			recordErr = json.NewEncoder(record).Encode(r)
		}
	}
	if ctx.Err() != nil {
		return Summary{}, context.Cause(ctx)
	}
	if recordErr != nil {
		return Summary{}, fmt.Errorf("bench: record a request: %w", recordErr)
	}
	return summarize(all, time.Since(l.start)), nil
}

// Pace makes n calls, each in its own goroutine and due(i) after start, whatever became
// of the calls before. If ctx ends, no more calls begin. Pace returns when all calls
// that began have ended.
func Pace(ctx context.Context, start time.Time, n int, due func(i int) time.Duration, call func(i int)) {
	var running sync.WaitGroup
	defer running.Wait()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range n {
		timer.Reset(time.Until(start.Add(due(i))))
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		running.Go(func() { call(i) })
	}
}

type loader struct {
	conf   LoadConfig
	client *http.Client
	start  time.Time
}

// begin returns the result of a request that has not been sent yet.
func (l *loader) begin(p *planned) Result {
	return Result{Conversation: p.conversation, Turn: p.turn, Due: p.at.Seconds()}
}

// ask sends one request and follows its response.
func (l *loader) ask(ctx context.Context, p *planned) Result {
	due := l.start.Add(p.at)
	r := l.begin(p)
	r.Lag = time.Since(due).Seconds()
	ctx, cancel := context.WithTimeout(ctx, l.conf.Timeout)
	defer cancel()
	err := l.exchange(ctx, p, due, &r)
	switch {
	case err == nil || r.Error != "":
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		r.Error = "timeout"
	case errors.Is(ctx.Err(), context.Canceled):
		r.Error = "cancelled"
	default:
		r.Error = "connection"
	}
	r.E2E = time.Since(due).Seconds()
	return r
}

func (l *loader) exchange(ctx context.Context, p *planned, due time.Time, r *Result) error {
	return Try(func() {
		body := Must(p.body(&l.conf))
		req := Must(http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(l.conf.URL, "/")+"/v1/chat/completions", bytes.NewReader(body)))
		req.Header.Set("Content-Type", "application/json")
		resp := Must(l.client.Do(req))
		defer resp.Body.Close()
		r.Worker = cmp.Or(resp.Header.Get("X-Sim-Worker"), resp.Header.Get("X-Dynamo-Worker-Instance-Id"))
		if resp.StatusCode == http.StatusOK {
			NoError(follow(resp.Body, due, r))
			return
		}
		r.Error = fmt.Sprint("status ", resp.StatusCode)
		_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
	})
}

// follow reads an event stream to its end.
func follow(body io.Reader, due time.Time, r *Result) error {
	type chunk struct {
		Usage *struct {
			PromptTokens     int `json:"prompt_tokens"`
			CompletionTokens int `json:"completion_tokens"`
			Details          struct {
				CachedTokens int `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	lines := bufio.NewScanner(body)
	lines.Buffer(make([]byte, 0, 4096), 1<<20)
	var last time.Time
	for lines.Scan() {
		data, ok := bytes.CutPrefix(lines.Bytes(), []byte("data:"))
		if !ok {
			continue
		}
		data = bytes.TrimSpace(data)
		if string(data) == "[DONE]" {
			// Reading to the end lets the connection be used again.
			_, err := io.Copy(io.Discard, body)
			return err
		}
		now := time.Now()
		if last.IsZero() {
			r.TTFT = now.Sub(due).Seconds()
		} else {
			r.ITL = append(r.ITL, now.Sub(last).Seconds())
		}
		last = now
		if bytes.Contains(data, []byte(`"usage":{`)) {
			var c chunk
			if err := json.Unmarshal(data, &c); err != nil {
				return err
			}
			r.PromptTokens, r.CachedTokens, r.OutputTokens = c.Usage.PromptTokens, c.Usage.Details.CachedTokens, c.Usage.CompletionTokens
		}
	}
	if lines.Err() == nil {
		r.Error = "incomplete" // it ended before the line DONE
	}
	return lines.Err()
}

func summarize(all []Result, wall time.Duration) Summary {
	s := Summary{Requests: len(all), Errors: map[string]int{}, PerWorker: map[string]int{}, Wall: wall.Seconds()}
	var ttft, itl, e2e, lag []float64
	prompt, cached := 0, 0
	for i := range all {
		r := &all[i]
		if r.Worker != "" {
			s.PerWorker[r.Worker]++
		}
		if r.Error != "" {
			s.Errors[r.Error]++
			continue
		}
		ttft, e2e, lag = append(ttft, r.TTFT), append(e2e, r.E2E), append(lag, r.Lag)
		itl = append(itl, r.ITL...)
		prompt += r.PromptTokens
		cached += r.CachedTokens
	}
	s.TTFT, s.ITL, s.E2E, s.Lag = NewQuantiles(ttft), NewQuantiles(itl), NewQuantiles(e2e), NewQuantiles(lag)
	if prompt > 0 {
		s.CachedShare = float64(cached) / float64(prompt)
	}
	return s
}

// Print writes the summary as a table.
func (s *Summary) Print(w io.Writer) {
	ms := func(q Quantiles) string {
		return fmt.Sprintf("mean %7.1f  p50 %7.1f  p90 %7.1f  p99 %7.1f ms", q.Mean*1e3, q.P50*1e3, q.P90*1e3, q.P99*1e3)
	}
	fmt.Fprintf(w, "requests      %d in %.1f s, %d failed\n", s.Requests, s.Wall, s.Failed())
	for _, k := range slices.Sorted(maps.Keys(s.Errors)) {
		fmt.Fprintf(w, "              %d × %s\n", s.Errors[k], k)
	}
	fmt.Fprintf(w, "TTFT          %s\nITL           %s\nE2E           %s\nsend lag      %s\n", ms(s.TTFT), ms(s.ITL), ms(s.E2E), ms(s.Lag))
	fmt.Fprintf(w, "cached share  %.3f of prompt tokens\n", s.CachedShare)
	for _, k := range slices.Sorted(maps.Keys(s.PerWorker)) {
		fmt.Fprintf(w, "worker        %s: %d requests\n", k, s.PerWorker[k])
	}
}
