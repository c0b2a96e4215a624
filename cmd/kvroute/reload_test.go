// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/internal/telemetry"
)

// SIGHUP applies added and removed workers of the configuration file.
func TestStaticWorkersAreReloaded(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	file := writeFile(t, "version: 1\nworkers:\n- {name: a, address: \"127.0.0.1:1\", models: [m], health: none}\n")
	c := serveFile(t, file)
	d := &demonstration{demo.Stack{Router: c}}
	names := func() (s string) {
		for _, w := range workers(t, d) {
			s += w.Name + w.Health
		}
		return s
	}
	if got := names(); got != "ahealthy" {
		t.Fatalf("workers are %s", got)
	}
	rewrite(t, c, file, "version: 1\nworkers:\n- {name: b, address: \"127.0.0.1:2\", models: [m], health: none}\n")
	eventually(t, "the workers are not reloaded", func() bool { return names() == "bhealthy" })
	// An invalid file changes nothing.
	rewrite(t, c, file, "version: 1\nworkers:\n- {name: c}\n")
	eventually(t, "the mistake is not reported", func() bool { return strings.Contains(c.LastLines(), "not reloaded") })
	if got := names(); got != "bhealthy" {
		t.Errorf("after a mistake the workers are %s", got)
	}
	// Nor does a file whose lists contain themselves, or that is nested without an end.
	for text, want := range map[string]string{
		"version: 1\nworkers: &x [*x]\n":                   "within its own anchor",
		"version: 1\nworkers: " + strings.Repeat("[", 1e5): "within each other",
	} {
		rewrite(t, c, file, text)
		eventually(t, want+" is not reported", func() bool { return strings.Contains(c.LastLines(), want) })
	}
	if got := names(); got != "bhealthy" {
		t.Errorf("after two wrong files the workers are %s", got)
	}
}

// Log lines name workers by the operator's names, whichever package writes the line.
func TestLogLinesNameWorkers(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	const workers = "version: 1\nworkers:\n- {name: %s, address: \"127.0.0.1:1\", models: [m], health: none}\n"
	file := writeFile(t, fmt.Sprintf(workers, "gpu-1"))
	c := serveFile(t, file)
	rewrite(t, c, file, fmt.Sprintf(workers, "gpu-2"))
	eventually(t, "the worker that left is not named", func() bool {
		return strings.Contains(c.LastLines(), `msg="a worker is gone" worker=gpu-1`)
	})
}

// Log lines of other packages contain the names, and the rank unless it is 0.
func TestWorkerNamesInLogs(t *testing.T) {
	var out strings.Builder
	names := new(workerNames)
	log := telemetry.NewLogger(&out, slog.LevelInfo, "text", names.replace)
	names.set(7, "gpu-1")
	log.Warn("a worker failed", "worker", uint64(7), "rank", uint32(0), "status", 503)
	log.With("worker", uint64(7)).Warn("events are missing", "dp_rank", uint32(3))
	log.Warn("unknown", "worker", uint64(8))
	names.set(7, "")
	log.Warn("gone", "worker", uint64(7))
	for _, want := range []string{`"a worker failed" worker=gpu-1 status=503`, `"events are missing" worker=gpu-1 dp_rank=3`, "unknown worker=8", "gone worker=7"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("want %s in\n%s", want, out.String())
		}
	}
}

// One warning names the changed settings of the file that a reload cannot apply, except those that a
// flag overrides. Settings that are changed back are not named.
func TestAReloadNamesWhatNeedsARestart(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	const list = "workers:\n- {name: %s, address: \"127.0.0.1:1\", models: [m], health: none}\n"
	file := writeFile(t, fmt.Sprintf("version: 1\nalpha: 0.1\n"+list, "a"))
	c := serveFile(t, file)
	is := func(want string) func() bool {
		return func() bool {
			return strings.Contains(c.LastLines(), want)
		}
	}
	rewrite(t, c, file, fmt.Sprintf("version: 1\nalpha: 0.2\nnats-inbox-prefix: _INBOX_a\nmax-streams: 100\nhttp-address: \"127.0.0.1:7\"\n"+list, "b"))
	eventually(t, "no warning names the settings", is(`settings="alpha, max-streams, nats-inbox-prefix"`))
	rewrite(t, c, file, fmt.Sprintf("version: 1\nalpha: 0.1\nseed: 5\n"+list, "c"))
	eventually(t, "no warning names the setting", is(`settings=seed`))
	if _, text := get(t, "http://"+c.At.HTTP+"/metrics"); !strings.Contains(text, `kvroute_config_reloads_total{outcome="partial"} 2`) {
		t.Error("the metric does not say that two reloads were partial")
	}
	if _, out, _ := runs(t, "doctor", "--url", "http://"+c.At.HTTP); !strings.Contains(out, "kvroute's configuration file has changes that need a restart: seed; restart kvroute\n") {
		t.Errorf("the doctor does not name the setting:\n%s", out)
	}
	rewrite(t, c, file, fmt.Sprintf("version: 1\nalpha: 0.1\nbusy-threshold: 0.25\ngroups: [{name: g, address: \"127.0.0.1:2\"}]\n"+list, "c"))
	eventually(t, "new groups are not named", is(`settings=groups`))
	eventually(t, "the threshold of the file does not apply", func() bool {
		_, text := get(t, "http://"+c.At.HTTP+"/busy_threshold")
		_, replica := get(t, "http://"+c.At.HTTP+"/v1/replica")
		return strings.Contains(text, "0.25") && strings.Contains(replica, `"busy-threshold":0.25`)
	})
	rewrite(t, c, file, fmt.Sprintf("version: 1\nrouter-mode: kvv\n"+list, "d"))
	eventually(t, "an unknown mode is not reported", is(`.yaml:2: router-mode is \"kvv\", want kv,`))
	rewrite(t, c, file, fmt.Sprintf("version: 1\n"+list+list, "d", "e"))
	eventually(t, "a file with a mistake is not reported", is("not reloaded"))
	if status, out, _ := runs(t, "doctor", "--url", "http://"+c.At.HTTP); status != 1 || !strings.Contains(out, "cannot be used; a start would fail: ") || !strings.Contains(out, "already defined") {
		t.Errorf("the doctor does not name the mistake:\n%s", out)
	}
	if n := strings.Count(c.LastLines(), "only after a restart"); n != 3 {
		t.Errorf("%d warnings, want 3:\n%s", n, c.LastLines())
	}
	// The log level takes effect at once: the reload itself is no longer logged.
	before := strings.Count(c.LastLines(), "msg=reloaded")
	rewrite(t, c, file, fmt.Sprintf("version: 1\nlog-level: error\n"+list, "f"))
	eventually(t, "the last file is not read", func() bool {
		w := workers(t, &demonstration{demo.Stack{Router: c}})
		return len(w) == 1 && w[0].Name == "f"
	})
	if n := strings.Count(c.LastLines(), "msg=reloaded"); before == 0 || n != before {
		t.Errorf("%d reloads are logged, want %d:\n%s", n, before, c.LastLines())
	}
	if _, out, _ := runs(t, "doctor", "--url", "http://"+c.At.HTTP); strings.Contains(out, "cannot be used") {
		t.Errorf("the doctor names a mistake that is mended:\n%s", out)
	}
}

// A file that was replaced or rewritten is read again without a signal.
func TestTheFileIsWatched(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	config := func(name string) string {
		return fmt.Sprintf("version: 1\nworkers:\n- {name: %s, address: \"127.0.0.1:1\", models: [m], health: none}\n", name)
	}
	file := writeFile(t, config("a"))
	c := serveFile(t, file)
	is := func(want string) func() bool {
		return func() bool {
			w := workers(t, &demonstration{demo.Stack{Router: c}})
			return len(w) == 1 && w[0].Name == want
		}
	}
	eventually(t, "the file is not read", is("a"))
	if err := os.WriteFile(file, []byte(config("written")), 0o600); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was written is not read", is("written"))
	if err := os.WriteFile(file+".new", []byte(config("replaced")), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(file+".new", file); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what replaced it is not read", is("replaced"))
}

// rewrite replaces the configuration file of a running kvroute.
func rewrite(t *testing.T, c *demo.Child, file, text string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := c.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
}

// SIGHUP applies changes of the configuration file's router groups and workers together, or not at
// all.
func TestGroupsAreReloaded(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	config := func(workers string, groups ...string) string {
		var text strings.Builder
		text.WriteString("version: 1\nworkers: [" + workers + "]\ngroups:\n")
		for _, g := range groups {
			text.WriteString("- " + g + "\n")
		}
		return text.String()
	}
	group := func(name string, port int) string {
		return fmt.Sprintf("{name: %s, address: \"127.0.0.1:%d\", models: [m], block_size: 16, members: 2}", name, port)
	}
	worker := func(name string, port int) string {
		return fmt.Sprintf("{name: %s, address: \"127.0.0.1:%d\", models: [other]}", name, port)
	}
	file := writeFile(t, config(worker("a", 1), group("east", 11)))
	c := serveFile(t, file)
	reloads := func(outcome string, n int) func() bool {
		return func() bool {
			_, text := get(t, "http://"+c.At.HTTP+"/metrics")
			return strings.Contains(text, fmt.Sprintf("kvroute_config_reloads_total{outcome=%q} %d", outcome, n))
		}
	}
	is := func(want ...string) {
		t.Helper()
		var got []string
		for _, w := range workers(t, &demonstration{demo.Stack{Router: c}}) {
			got = append(got, w.Name+w.Group+" "+w.Address.String())
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("the candidates are others (-want +got):\n%s", diff)
		}
	}
	is("a 127.0.0.1:1", "easteast 127.0.0.1:11")
	rewrite(t, c, file, config(worker("b", 2), group("west", 12), group("east", 13)))
	eventually(t, "it is not reloaded", reloads("done", 1))
	is("b 127.0.0.1:2", "easteast 127.0.0.1:13", "westwest 127.0.0.1:12")
	for i, wrong := range []string{
		config(worker("c", 3), group("west", 14), group("west", 15)),
		config(worker("c", 3)+","+worker("c", 4), group("north", 14)),
		config("{name: c, models: [m], address: nowhere}", group("north", 14)), // fails after the groups changed
		config(worker("c", 3), "{name: north, port: 5}"),
	} {
		rewrite(t, c, file, wrong)
		eventually(t, "the mistake is not counted", reloads("refused", i+1))
		is("b 127.0.0.1:2", "easteast 127.0.0.1:13", "westwest 127.0.0.1:12")
	}
	rewrite(t, c, file, config("", group("west", 12)))
	eventually(t, "it is not reloaded", reloads("done", 2))
	is("westwest 127.0.0.1:12")
}

// A SIGHUP while kvroute starts does not end it: the file is read again once it runs.
func TestAReloadWhileStarting(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	// Reader and writer of this file wait for each other.
	file := filepath.Join(t.TempDir(), "kvroute.yaml")
	if err := syscall.Mkfifo(file, 0o600); err != nil {
		t.Fatal(err)
	}
	write := func(worker string, before func()) {
		t.Helper()
		var f *os.File
		eventually(t, "nobody reads the file", func() (ok bool) {
			var err error
			f, err = os.OpenFile(file, os.O_WRONLY|syscall.O_NONBLOCK, 0) // fails while no process reads
			return err == nil
		})
		defer f.Close()
		before()
		if _, err := fmt.Fprintf(f, "version: 1\nworkers:\n- {name: %s, address: \"127.0.0.1:1\", models: [m], health: none}\n", worker); err != nil {
			t.Fatal(err)
		}
	}
	c, err := demo.Launch(t.TempDir(), "kvroute", "serve", "--config", file,
		"--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Stop()
	write("a", func() {
		if err := c.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
			t.Fatal(err)
		}
	})
	if err := c.WaitReady(t.Context()); err != nil {
		t.Fatal(err)
	}
	write("b", func() {})
	eventually(t, "the workers are not reloaded", func() bool {
		ws := workers(t, &demonstration{demo.Stack{Router: c}})
		return len(ws) == 1 && ws[0].Name == "b"
	})
}
