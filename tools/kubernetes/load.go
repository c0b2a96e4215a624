// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"
)

// tally counts what a variant did.
type tally struct {
	mu       sync.Mutex
	requests int
	decided  int // of the requests: those whose worker kvroute named
	faults   int
	failures []string
}

func (t *tally) add(o *tally) {
	t.requests, t.faults, t.failures = t.requests+o.requests, t.faults+o.faults, append(t.failures, o.failures...)
}

// text is a line of the output.
func (t *tally) text(name string, begun time.Time) string {
	return fmt.Sprintf("%-16s %5d requests, %2d faults, %d errors, %3.0f s", name, t.requests, t.faults, len(t.failures), time.Since(begun).Seconds())
}

// fault counts a fault, and returns the number of failures before it.
func (t *tally) fault() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.faults++
	return len(t.failures)
}

func (t *tally) failed() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.failures)
}

// clients is a load of requests.
type clients struct {
	tally *tally
	stop  context.CancelFunc
	done  sync.WaitGroup
}

// startLoad starts clients that send chats to an address until the load is stopped. Three of twelve read streams of
// some seconds, and a third opens a connection for each request.
func startLoad(ctx context.Context, t *tally, url string) *clients {
	c := &clients{tally: t}
	ctx, c.stop = context.WithCancel(ctx)
	for i := range 12 {
		c.done.Go(func() {
			client := &http.Client{Timeout: 2 * time.Minute, Transport: &http.Transport{DisableKeepAlives: i%3 == 0}}
			for n := 0; ctx.Err() == nil; n++ {
				tokens := 20
				if i%4 == 0 {
					tokens = 600
				}
				// A request that has begun ends, so the request does not end with ctx.
				decided, err := chat(client, url, fmt.Sprintf("client %d asks question %d", i, n/4), tokens, i%2 == 0)
				t.mu.Lock()
				if t.requests++; decided {
					t.decided++
				}
				if err != nil {
					t.failures = append(t.failures, fmt.Sprintf("%s client %d: %v", time.Now().Format("15:04:05"), i, err))
				}
				t.mu.Unlock()
				pause(ctx, 50*time.Millisecond)
			}
		})
	}
	return c
}

// end stops the load, waits for the requests in flight, and returns an error if kvroute has decided none.
func (c *clients) end() error {
	c.stop()
	c.done.Wait()
	if c.tally.requests == 0 || c.tally.decided*10 < c.tally.requests*8 {
		return fmt.Errorf("kvroute decided %d of %d requests, want at least 8 of 10", c.tally.decided, c.tally.requests)
	}
	return nil
}

// chat sends one request. It returns whether kvroute named its worker.
func chat(client *http.Client, url, text string, tokens int, stream bool) (decided bool, err error) {
	body := fmt.Sprintf(`{"model":"sim","stream":%v,"max_tokens":%d,"messages":[{"role":"user","content":%q}]}`, stream ||
		tokens > 100, tokens, strings.Repeat(text+" ", 30))
	response, err := client.Post(url+"/v1/chat/completions", "application/json", bytes.NewReader([]byte(body)))
	if err != nil {
		return false, err
	}
	defer response.Body.Close()
	decided = response.Header.Get("x-dynamo-reason") != ""
	if response.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(response.Body, 300))
		return decided, fmt.Errorf("status %d: %s", response.StatusCode, text)
	}
	last := ""
	lines := bufio.NewScanner(response.Body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if lines.Text() != "" {
			last = lines.Text()
		}
	}
	if err := lines.Err(); err != nil {
		return decided, fmt.Errorf("the response breaks off: %w", err)
	}
	if (stream || tokens > 100) && last != "data: [DONE]" {
		return decided, fmt.Errorf("the stream ends with %.80q", last)
	}
	return decided, nil
}
