// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
)

// The command shows a running kvroute as text and as JSON, and follows its changes.
func TestTop(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	const token = "a-token-0123456789"
	dir := t.TempDir()
	tokens, others := filepath.Join(dir, "tokens"), filepath.Join(dir, "others")
	for path, text := range map[string]string{tokens: token, others: "another-token-0123456789"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	file := writeFile(t, fmt.Sprintf("version: 1\napi-token-file: %s\nworkers:\n- {name: gpu-1, address: \"127.0.0.1:1\", models: [m], block_size: 16, events: {transport: none}}\n", tokens))
	c, err := demo.Start(t.Context(), dir, "kvroute", "serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	t.Cleanup(c.Stop)
	url := "http://" + c.At.HTTP
	book := func(id string) {
		t.Helper()
		resp, text := whole(t, http.MethodPost, url+"/v1/best_worker", fmt.Sprintf(`{"model":"m","request_id":%q,"token_ids":[1,2,3]}`, id), http.Header{"Authorization": {"Bearer " + token}})
		if resp.StatusCode != http.StatusOK {
			t.Fatalf("%s: %s", resp.Status, text)
		}
	}
	book("one")
	flags := []string{"top", "--url", url, "--api-token-file", tokens}
	status, out, stderr := runs(t, append(flags, "--once")...)
	if status != 0 || !strings.Contains(out, "gpu-1") || !strings.Contains(out, "one") || strings.ContainsRune(out, '\x1b') {
		t.Errorf("--once: status %d\n%s%s", status, out, stderr)
	}
	var all map[string]json.RawMessage
	status, out, stderr = runs(t, append(flags, "--once", "--output", "json")...)
	if err := json.Unmarshal([]byte(out), &all); err != nil || status != 0 || all["workers"] == nil || !strings.Contains(string(all["decisions"]), `"id":"one"`) {
		t.Errorf("--once --output json: status %d, %v\n%s%s", status, err, out, stderr)
	}

	lines, stop := topLines(t, append(flags, "--output", "json")...)
	awaitLine(t, lines, "decisions", `"id":"one"`)
	book("two")
	awaitLine(t, lines, "decisions", `"id":"two"`)
	awaitLine(t, lines, "replica", `"active_requests"`)
	if status := stop(); status != 130 {
		t.Errorf("after its context ended: status %d, want 130", status)
	}

	for _, c := range []struct {
		flags []string
		want  string
	}{
		{[]string{"--url", url, "--once"}, "there is no header Authorization"},
		{[]string{"--url", url, "--api-token-file", others, "--output", "json"}, "is not one of kvroute's --api-token-file"},
		{[]string{"--url", url, "--api-token-file", tokens}, "the output is not a terminal: add --once or --output json"},
	} {
		if status, _, stderr := runs(t, append([]string{"top"}, c.flags...)...); status != 1 || !strings.Contains(stderr, c.want) {
			t.Errorf("%v: status %d, %s; want %q", c.flags, status, stderr, c.want)
		}
	}
}

// topLines runs the command until stop is called, and returns the lines that it prints.
func topLines(t *testing.T, args ...string) (lines <-chan string, stop func() (status int)) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	r, w := io.Pipe()
	printed, ended := make(chan string), make(chan int, 1)
	go func() {
		ended <- run(ctx, args, stdio{w, new(bytes.Buffer)})
		_ = w.Close() // never fails
	}()
	go func() {
		defer close(printed)
		for lines := bufio.NewReader(r); ; {
			line, err := lines.ReadString('\n')
			if err != nil {
				return
			}
			printed <- line
		}
	}()
	return printed, func() int {
		cancel()
		for range printed { // until the command has closed the pipe
		}
		return <-ended
	}
}

// awaitLine waits for an object with one section that contains a text.
func awaitLine(t *testing.T, lines <-chan string, section, text string) {
	t.Helper()
	for deadline := time.After(time.Minute); ; {
		select {
		case line, open := <-lines:
			var all map[string]json.RawMessage
			if err := json.Unmarshal([]byte(line), &all); !open || err != nil || len(all) != 1 {
				t.Fatalf("%v: the line is %q", err, line)
			}
			if strings.Contains(string(all[section]), text) {
				return
			}
		case <-deadline:
			t.Fatalf("no line has %s with %s", section, text)
		}
	}
}

// The errors distinguish servers without the feed.
func TestTopWithoutAFeed(t *testing.T) {
	old := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/v1/replica" {
			http.NotFound(w, r)
			return
		}
		fmt.Fprint(w, `{"version":"0.0.1"}`)
	})
	other := startHTTP(t, http.NotFound)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	for address, want := range map[string]string{
		old:           "has version 0.0.1, which does not serve /v1/live: update it",
		other:         "want the http-address of a running kvroute",
		"127.0.0.1:1": "connection refused",
	} {
		for _, flags := range [][]string{{"--once"}, {"--output", "json"}} {
			args := slices.Concat([]string{"top", "--url", "http://" + address}, flags)
			if status, _, stderr := runs(t, args...); status != 1 || !strings.Contains(stderr, want) {
				t.Errorf("%v: status %d, %s; want %q", args, status, stderr, want)
			}
		}
	}
	if status, _, stderr := runs(t, "top", "--output", "xml"); status != 1 || !strings.Contains(stderr, `output is "xml", want text or json`) {
		t.Errorf("status %d, %s", status, stderr)
	}
}
