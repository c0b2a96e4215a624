// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/openai"
)

// The API of a kvroute with --api-token-file answers only clients with a token. Commands and the
// Python client send the token, and SIGHUP loads another one, also after an invalid file.
func TestTheAPIHasATokenOfItsOwn(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	worker := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			e := openai.Error{Status: http.StatusBadRequest, Message: "the worker got a token"}
			e.Write(w)
			return
		}
		fmt.Fprint(w, "data: {\"choices\":[{\"text\":\"a\"}]}\n\ndata: [DONE]\n\n")
	})
	const first, second = "first-token-0123456789", "second-token-0123456789"
	dir := t.TempDir()
	tokens := filepath.Join(dir, "tokens")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(tokens, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(first + "\n")
	file := writeFile(t, fmt.Sprintf("version: 1\napi-token-file: %s\nworkers:\n- {name: a, address: %q, models: [m], block_size: 16, events: {transport: none}}\n", tokens, worker))
	c, err := demo.Start(t.Context(), dir, "kvroute", "serve", "--config", file, "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	t.Cleanup(c.Stop)
	url := "http://" + c.At.HTTP
	status := func(path, token string) int {
		t.Helper()
		header := http.Header{}
		if token != "" {
			header.Set("Authorization", "Bearer "+token)
		}
		resp, _ := whole(t, http.MethodGet, url+path, "", header)
		return resp.StatusCode
	}
	for _, path := range []string{"/healthz", "/readyz", "/metrics"} {
		if got := status(path, ""); got != 200 {
			t.Errorf("%s without a token: status %d", path, got)
		}
	}
	for token, want := range map[string]int{"": 401, second: 401, first: 200} {
		if got := status("/v1/workers", token); got != want {
			t.Errorf("with %q: status %d, want %d", token, got, want)
		}
	}

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "python3", "-B", "test_token.py", url, "m", first)
	cmd.Dir = "../../bindings/python"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	// Endpoints without a token name no worker.
	if _, text := get(t, url+"/metrics"); strings.Contains(text, worker) || !strings.Contains(text, `model="m"`) {
		t.Errorf("the metrics name the worker %s, or not its model:\n%s", worker, text)
	}
	for _, command := range []string{"dump --url " + url, "explain --url " + url + " last"} {
		name, rest, _ := strings.Cut(command, " ")
		if status, _, stderr := runs(t, strings.Fields(command)...); status != 1 || !strings.Contains(stderr, "there is no header Authorization") {
			t.Errorf("%s without a token: status %d, %s", name, status, stderr)
		}
		if status, out, stderr := runs(t, append([]string{name, "--api-token-file", tokens}, strings.Fields(rest)...)...); status != 0 || out == "" {
			t.Errorf("%s with a token: status %d, %s", name, status, stderr)
		}
	}
	if status, out, _ := runs(t, "doctor", "--url", url); status != 1 || !strings.Contains(out, "there is no header Authorization") {
		t.Errorf("doctor without a token: status %d, %s", status, out)
	}
	if status, out, stderr := runs(t, "doctor", "--url", url, "--api-token-file", tokens); status != 0 {
		t.Errorf("doctor with a token: status %d, %s%s", status, out, stderr)
	}

	reload := func(text, says string) {
		t.Helper()
		write(text)
		if err := c.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
		eventually(t, "kvroute does not say "+says, func() bool { return strings.Contains(c.LastLines(), says) })
	}
	reload("", "holds no token")
	if got := status("/v1/workers", first); got != 200 {
		t.Errorf("after a file without tokens: status %d", got)
	}
	reload(second, "msg=reloaded")
	if was, is := status("/v1/workers", first), status("/v1/workers", second); was != 401 || is != 200 {
		t.Errorf("after a new file: status %d with the old token, %d with the new one", was, is)
	}
}
