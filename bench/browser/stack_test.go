// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// patience is the longest wait for anything. It is no measure of speed.
const patience = 2 * time.Minute

// until waits for a condition. said describes the last state if it does not come.
func until(t *testing.T, what string, condition func() (said string, ok bool)) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for {
		said, ok := condition()
		if ok {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not after %v: %s", what, patience, said)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// process is a kvroute process.
type process struct {
	cmd  *exec.Cmd
	log  *logs
	exit chan struct{}
}

type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logs) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// start starts the built kvroute. The test stops it.
func start(t *testing.T, args ...string) *process {
	t.Helper()
	binary, err := filepath.Abs(cmp.Or(os.Getenv("KVROUTE_BINARY"), "../../.cache/bin/kvroute"))
	if err != nil {
		t.Fatal(err)
	}
	p := &process{cmd: exec.Command(binary, args...), log: new(logs), exit: make(chan struct{})}
	p.cmd.Stdout, p.cmd.Stderr = p.log, p.log
	if err := p.cmd.Start(); err != nil {
		t.Fatalf("%v: run make build", err)
	}
	go func() {
		_ = p.cmd.Wait()
		close(p.exit)
	}()
	t.Cleanup(func() {
		p.stop(t)
		if t.Failed() {
			text := p.log.String()
			t.Logf("kvroute %s:\n%s", args[0], text[max(0, len(text)-3000):])
		}
	})
	return p
}

func (p *process) stop(t *testing.T) {
	t.Helper()
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // an error: it has ended
	select {
	case <-p.exit:
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
		t.Errorf("%v does not end", p.cmd.Args)
	}
}

// A service is a running kvroute serve.
type service struct {
	*process
	url, state, token string
}

// serve starts kvroute serve with the workers of a configuration file.
func serve(t *testing.T, config string, flags ...string) *service {
	t.Helper()
	dir := t.TempDir()
	ready, file := filepath.Join(dir, "ready"), filepath.Join(dir, "kvroute.yaml")
	s := &service{state: filepath.Join(dir, "state")}
	if err := os.WriteFile(file, []byte("version: 1\n"+config), 0o600); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(flags, "--nats-url") {
		flags = append(flags, "--nats-listen", "127.0.0.1:0")
	}
	s.process = start(t, append([]string{
		"serve", "--config", file, "--http-address", "127.0.0.1:0", "--extproc-address", "127.0.0.1:0",
		"--state-dir", s.state, "--worker-networks", "127.0.0.0/8,10.0.0.0/8", "--ready-file", ready,
	}, flags...)...)
	var at struct{ HTTP string }
	until(t, "kvroute serve", func() (string, bool) {
		text, err := os.ReadFile(ready)
		return fmt.Sprint(err), err == nil && json.Unmarshal(text, &at) == nil && at.HTTP != ""
	})
	s.url = "http://" + at.HTTP
	return s
}

// bus is the --nats-url of the service's NATS server.
func (s *service) bus() string { return "file:" + filepath.Join(s.state, "nats-url") }

// engines starts simulated workers, and waits until kvroute may send them requests.
func (s *service) engines(t *testing.T, n int) (all []*process) {
	t.Helper()
	for i := range n {
		all = append(all, start(t, "engine", "--name", fmt.Sprint("worker-", i+1), "--listen", "127.0.0.1:0", "--nats-url", s.bus()))
	}
	until(t, "the workers", func() (string, bool) {
		var listed struct {
			Workers []struct{ Name, Health string }
		}
		s.read(t, "/v1/workers", &listed)
		healthy := 0
		for _, w := range listed.Workers {
			if w.Health == "healthy" && strings.HasPrefix(w.Name, "worker-") {
				healthy++
			}
		}
		return fmt.Sprint(listed), healthy == n
	})
	return all
}

// leave registers a worker over HTTP and deregisters it.
func (s *service) leave(t *testing.T, name string) {
	t.Helper()
	record := map[string]any{"name": name, "address": "10.0.0.77:8000", "models": []string{"sim"}}
	if status, text := s.send(t, http.MethodPost, "/v1/workers", record); status != http.StatusCreated {
		t.Fatalf("register: status %d: %s", status, text)
	}
	if status, text := s.send(t, http.MethodDelete, "/v1/workers/"+name, nil); status != http.StatusOK {
		t.Fatalf("deregister: status %d: %s", status, text)
	}
}

// send sends a request to the API and returns its response.
func (s *service) send(t *testing.T, method, path string, body any) (status int, text []byte) {
	t.Helper()
	encoded, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	var reader io.Reader
	if body != nil {
		reader = bytes.NewReader(encoded)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, s.url+path, reader)
	if err != nil {
		t.Fatal(err)
	}
	if req.Header.Set("Content-Type", "application/json"); s.token != "" {
		req.Header.Set("Authorization", "Bearer "+s.token)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if text, err = io.ReadAll(resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, text
}

// read decodes an answer of the API. Numbers keep their digits.
func (s *service) read(t *testing.T, path string, into any) {
	t.Helper()
	status, text := s.send(t, http.MethodGet, path, nil)
	dec := json.NewDecoder(bytes.NewReader(text))
	dec.UseNumber()
	if err := dec.Decode(into); err != nil || status != http.StatusOK {
		t.Fatalf("GET %s: status %d, %v", path, status, err)
	}
}

// chat has a worker answer a chat, whose system prompt others share.
func (s *service) chat(t *testing.T, id string, system, turn int) {
	t.Helper()
	if status, text := s.tryChat(t, id, system, turn); status != http.StatusOK {
		t.Fatalf("generate: status %d: %s", status, text)
	}
}

// tryChat is chat, and the request may fail.
func (s *service) tryChat(t *testing.T, id string, system, turn int) (status int, text []byte) {
	t.Helper()
	return s.send(t, http.MethodPost, "/v1/generate", map[string]any{
		"model": "sim", "request_id": id, "body": map[string]any{"max_tokens": 4},
		"messages": []map[string]string{
			{"role": "system", "content": strings.Repeat(fmt.Sprintf("You are assistant number %d of this test. ", system), 20)},
			{"role": "user", "content": fmt.Sprintf("Question %d: which worker has the blocks of this prompt?", turn)},
		},
	})
}

// book takes a slot that stays.
func (s *service) book(t *testing.T, id string, tokens int) {
	t.Helper()
	ids := make([]int, tokens)
	for i := range ids {
		ids[i] = i % 1000
	}
	if status, text := s.send(t, http.MethodPost, "/v1/best_worker", map[string]any{"model": "sim", "request_id": id, "token_ids": ids}); status != http.StatusOK {
		t.Fatalf("best_worker: status %d: %s", status, text)
	}
}
