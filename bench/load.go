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
	"strconv"
	"strings"
	"sync"
	"time"
)

// Result is what a client saw of one request. Times are seconds, from the moment
// the request was due.
type Result struct {
	Conversation int     `json:"conversation"`
	Turn         int     `json:"turn"`
	Due          float64 `json:"due_s"`  // after the load's beginning
	Lag          float64 `json:"lag_s"`  // until it was really sent: the client's own slowness
	TTFT         float64 `json:"ttft_s"` // until the first event
	E2E          float64 `json:"e2e_s"`  // until the end

	ITL []float64 `json:"-"` // between the events that follow

	Worker       string `json:"worker,omitempty"` // who served, as far as headers tell
	PromptTokens int    `json:"prompt_tokens"`
	CachedTokens int    `json:"cached_tokens"`
	OutputTokens int    `json:"output_tokens"`
	Error        string `json:"error,omitempty"` // kind of failure: "status 503", "overload", "timeout", …
}

// Quantiles of a measure, in seconds.
type Quantiles struct {
	Mean float64 `json:"mean"`
	P50  float64 `json:"p50"`
	P90  float64 `json:"p90"`
	P99  float64 `json:"p99"`
}

// Summary is what a load came to. Times count successful requests only.
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

// Load puts a load on an endpoint, open loop: each request leaves at its time,
// however the ones before it fare, and its times count from then. If ctx ends, what
// is in flight ends too, and the error is ctx's. Progress, if not nil, is told of
// each request that ended, one call at a time; record, if not nil, gets a JSON line
// for each.
func Load(ctx context.Context, conf LoadConfig, progress func(done, total int), record io.Writer) (Summary, error) {
	conf, err := conf.withDefaults()
	if err != nil {
		return Summary{}, err
	}
	l := loader{conf: conf, client: client(conf.MaxInFlight)}
	defer l.client.CloseIdleConnections()

	requests := plan(conf)
	results := make(chan Result, len(requests))
	slots := make(chan struct{}, conf.MaxInFlight)
	var running sync.WaitGroup
	l.start = time.Now()
	go func() {
		// The pacing goroutine ends with the last request or with ctx.
		timer := time.NewTimer(0)
		defer timer.Stop()
		for i := range requests {
			p := &requests[i]
			timer.Reset(p.at - time.Since(l.start))
			select {
			case <-ctx.Done():
				results <- l.failed(p, "cancelled")
				continue
			case <-timer.C:
			}
			select {
			case slots <- struct{}{}:
				running.Go(func() {
					results <- l.ask(ctx, p)
					<-slots
				})
			default:
				results <- l.failed(p, "overload")
			}
		}
	}()
	all := make([]Result, 0, len(requests))
	var recordErr error
	for range requests {
		r := <-results
		all = append(all, r)
		if progress != nil {
			progress(len(all), len(requests))
		}
		if record != nil && recordErr == nil {
			recordErr = json.NewEncoder(record).Encode(r)
		}
	}
	running.Wait()
	if ctx.Err() != nil {
		return Summary{}, context.Cause(ctx)
	}
	if recordErr != nil {
		return Summary{}, fmt.Errorf("bench: record a request: %w", recordErr)
	}
	return summarize(all, time.Since(l.start)), nil
}

func client(inFlight int) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
		MaxIdleConns:        inFlight,
		MaxIdleConnsPerHost: inFlight,
		IdleConnTimeout:     30 * time.Second,
		DisableCompression:  true,
	}}
}

type loader struct {
	conf   LoadConfig
	client *http.Client
	start  time.Time
}

func (l *loader) failed(p *planned, kind string) Result {
	return Result{Conversation: p.conversation, Turn: p.turn, Due: p.at.Seconds(), Error: kind}
}

// ask sends one request and follows its response.
func (l *loader) ask(ctx context.Context, p *planned) Result {
	due := l.start.Add(p.at)
	r := l.failed(p, "")
	r.Lag = time.Since(due).Seconds()
	ctx, cancel := context.WithTimeout(ctx, l.conf.Timeout)
	defer cancel()
	if err := l.exchange(ctx, p, due, &r); err != nil {
		r.Error = kind(ctx, err)
	}
	r.E2E = time.Since(due).Seconds()
	return r
}

// statusError is a response that is no success.
type statusError int

func (e statusError) Error() string { return "status " + strconv.Itoa(int(e)) }

// errIncomplete is an event stream that ended without [DONE].
var errIncomplete = errors.New("incomplete")

func kind(ctx context.Context, err error) string {
	status, isStatus := errors.AsType[statusError](err)
	switch {
	case isStatus:
		return status.Error()
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return "timeout"
	case errors.Is(ctx.Err(), context.Canceled):
		return "cancelled"
	case errors.Is(err, errIncomplete):
		return errIncomplete.Error()
	}
	return "connection"
}

func (l *loader) exchange(ctx context.Context, p *planned, due time.Time, r *Result) error {
	body, err := p.body(&l.conf)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimSuffix(l.conf.URL, "/")+"/v1/chat/completions", bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := l.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	r.Worker = cmp.Or(resp.Header.Get("X-Sim-Worker"), resp.Header.Get("X-Dynamo-Worker-Instance-Id"))
	if resp.StatusCode != http.StatusOK {
		_, _ = io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
		return statusError(resp.StatusCode)
	}
	return follow(resp.Body, due, r)
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
			// What follows is nothing; reading it lets the connection live.
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
	if err := lines.Err(); err != nil {
		return err
	}
	return errIncomplete
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
	s.TTFT, s.ITL, s.E2E, s.Lag = quantiles(ttft), quantiles(itl), quantiles(e2e), quantiles(lag)
	if prompt > 0 {
		s.CachedShare = float64(cached) / float64(prompt)
	}
	return s
}

// quantiles by nearest rank.
func quantiles(v []float64) Quantiles {
	if len(v) == 0 {
		return Quantiles{}
	}
	slices.Sort(v)
	at := func(q float64) float64 { return v[min(len(v)-1, int(q*float64(len(v))))] }
	sum := 0.0
	for _, x := range v {
		sum += x
	}
	return Quantiles{Mean: sum / float64(len(v)), P50: at(.5), P90: at(.9), P99: at(.99)}
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
