// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// library builds the C library and returns its path, "" if there is no C compiler.
func library(t *testing.T) string {
	t.Helper()
	if testing.Short() {
		t.Skip("builds the C library")
	}
	if _, err := exec.LookPath("cc"); err != nil {
		t.Log("NOT TESTED: there is no C compiler, so the C library and the Python package on it are not tested")
		return ""
	}
	path := filepath.Join(t.TempDir(), "libkvroute_publisher.so")
	if runtime.GOOS == "darwin" {
		path = strings.TrimSuffix(path, ".so") + ".dylib"
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-buildmode=c-shared", "-o", path, "./bindings/c")
	build.Dir, build.Env = "../..", append(os.Environ(), "CGO_ENABLED=1")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	return path
}

func TestPublishFromOtherLanguages(t *testing.T) {
	t.Parallel() // mostly waits
	lib := library(t)
	if lib == "" {
		return
	}
	t.Run("C", func(t *testing.T) { publishFromC(t, lib) })
	t.Run("Python", func(t *testing.T) { publishFromPython(t, lib) })
}

func publishFromC(t *testing.T, lib string) {
	program := filepath.Join(t.TempDir(), "publish")
	cc := exec.CommandContext(t.Context(), "cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-I", "../../bindings/c",
		"-o", program, "../../bindings/c/testdata/publish.c", lib, "-Wl,-rpath,"+filepath.Dir(lib))
	if out, err := cc.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	publishes(t, exec.Command(program))
}

func publishFromPython(t *testing.T, lib string) {
	python, err := exec.LookPath("python3")
	if err != nil {
		t.Log("NOT TESTED: there is no Python, so the Python package is not tested")
		return
	}
	cmd := exec.Command(python, "../../bindings/python/testdata/publish.py")
	cmd.Env = append(os.Environ(), "PYTHONPATH=../../bindings/python", "PYTHONDONTWRITEBYTECODE=1", "KVROUTE_PUBLISHER_LIBRARY="+lib)
	publishes(t, cmd)
}

// publishes lets a program register an engine that sends no events itself, and publish the blocks of
// a prompt: decisions then use these blocks.
func publishes(t *testing.T, cmd *exec.Cmd) {
	path, err := envoytest.Find()
	if err != nil {
		t.Fatal(err)
	}
	e := spawn(t, "engine", "engine", "--listen", "127.0.0.1:0", "--nats-url", "", "--kv-events", "none", "--speed", "50")
	d := &demonstration{demo.Stack{Dir: t.TempDir(), EnvoyPath: path, Workers: 1, Engines: []*demo.Child{e}, Model: "sim"}}
	if d.Bus, err = startNATS("127.0.0.1:0", ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		d.Engines = nil // the program ends by itself
		d.Stop()
		http.DefaultClient.CloseIdleConnections()
	})

	// The tokens of the prompt are those that the engine would compute.
	prompt := chatBody(strings.Repeat("Whatever the language, a block is a block. ", 20), 2, false)
	_, body := whole(t, http.MethodPost, "http://"+e.At.HTTP+"/tokenize", prompt, nil)
	var said struct{ Tokens []int }
	if err := json.Unmarshal([]byte(body), &said); err != nil || len(said.Tokens) < 64 {
		t.Fatalf("%d tokens, %v", len(said.Tokens), err)
	}
	ids := filepath.Join(t.TempDir(), "ids")
	if err := os.WriteFile(ids, []byte(strings.Trim(strings.ReplaceAll(fmt.Sprint(said.Tokens), " ", "\n"), "[]")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	blocks := len(said.Tokens) / 16

	config := fmt.Sprintf(`{"nats_url":%q,"name":"foreign","kv_block_size":16,"address":%q,"models":["sim"],"model_card":%q,"engine":"own","role":"both","bootstrap":"127.0.0.1:8998"}`, d.Bus.URL(), e.At.HTTP, enginesim.ModelCard)
	cmd.Args = append(cmd.Args, config, "16", ids)
	cmd.Stderr = os.Stderr
	in, err1 := cmd.StdinPipe()
	out, err2 := cmd.StdoutPipe()
	if err1 != nil || err2 != nil || cmd.Start() != nil {
		t.Fatal("the program does not start", err1, err2)
	}
	ended := false
	t.Cleanup(func() {
		if !ended {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	lines := bufio.NewReader(out)
	readLine := func() string {
		t.Helper()
		line, err := lines.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(line)
	}
	call := func(word, want string) {
		t.Helper()
		if _, err := fmt.Fprintln(in, word); err != nil {
			t.Fatal(err)
		}
		if got := readLine(); !strings.HasPrefix(got, want) {
			t.Errorf("%s: %q, want %q", word, got, want)
		}
	}
	if got, want := readLine(), fmt.Sprint("ok ", blocks); got != want {
		t.Fatalf("it says %q, want %q", got, want)
	}
	if err := d.StartRouter(t.Context()); err != nil {
		t.Fatal(err)
	}
	overlap := func(want int) {
		t.Helper()
		eventually(t, fmt.Sprint("the blocks known do not become ", want), func() bool { return workers(t, d)[0].CachedBlocks == want })
		resp, body := reply(t, d, http.MethodPost, chatPath, prompt, nil)
		if got := resp.Header.Get("X-Dynamo-Overlap-Blocks"); resp.StatusCode != http.StatusOK || got != fmt.Sprint(want) {
			t.Errorf("status %d, overlap %s, want %d; %s", resp.StatusCode, got, want, body)
		}
	}
	overlap(0)
	if role := workers(t, d)[0].Role; role != router.Both {
		t.Errorf("the worker has the role %q, want both", role)
	}
	call("stored", fmt.Sprint("ok ", blocks))
	overlap(blocks)
	call("removed", "ok")
	overlap(blocks - 1)
	call("wrong", "error ")
	call("cleared", "ok")
	overlap(0)
	call("quit", "")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	ended = true
	eventually(t, "the worker does not leave", func() bool { return len(workers(t, d)) == 0 })
}
