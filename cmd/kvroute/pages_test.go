// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// operating are the pages whose names of log lines, metrics, headers and flags are checked.
var operating = []string{"api", "disaggregation", "metrics", "observe", "operations", "protocol", "replicas", "router-groups", "troubleshooting"}

// engineFlags are flags of engines, and of docker compose, on these pages.
var engineFlags = strings.Fields(`--kv-transfer-config --enable-prompt-tokens-details --enable-cache-report --otlp-traces-endpoint --prefix-caching-hash-algo
	--enable-prefix-caching --disaggregation-mode --build --profile`)

func page(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/" + name + ".md")
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// flagsOf returns the flags of a command by its help.
func flagsOf(t *testing.T, command ...string) map[string]bool {
	t.Helper()
	_, out, err := runs(t, append(command, "-h")...)
	found := map[string]bool{}
	for _, m := range regexp.MustCompile(`(?m)^ +--?([a-z0-9][a-z0-9-]*)`).FindAllStringSubmatch(out+err, -1) {
		found["--"+m[1]] = true
	}
	return found
}

// commandNames are the commands with flags, longer names first.
var commandNames = [][]string{{"config", "envoy"}, {"config", "check"}, {"config"}, {"serve"}, {"publish"}, {"engine"}, {"demo"}, {"load"}, {"dump"}, {"replay"}, {"tokenize"}, {"doctor"}, {"explain"}, {"top"}, {"healthcheck"}}

// Log lines, metrics, headers and flags that the pages name exist.
func TestPagesNameWhatExists(t *testing.T) {
	var code strings.Builder
	if err := filepath.WalkDir("../..", func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && strings.HasPrefix(d.Name(), ".") && d.Name() != ".." {
			return filepath.SkipDir
		}
		if strings.HasSuffix(path, ".go") && !strings.HasSuffix(path, "_test.go") {
			text, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			code.Write(text)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	source := code.String()
	metrics := page(t, "metrics")
	listed := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^\\| `((?:kvroute|gen_ai)[^`]+)` \\| ([^ |]*)").FindAllStringSubmatch(metrics, -1) {
		name := strings.ReplaceAll(m[1], ".", "_") + map[string]string{"s": "_seconds", "By": "_bytes"}[m[2]]
		for _, suffix := range []string{"", "_total", "_bucket", "_sum", "_count"} {
			listed[name+suffix] = true
		}
		listed[m[1]] = true
	}
	existing := map[string]bool{"--help": true}
	for _, flag := range engineFlags {
		existing[flag] = true
	}
	for _, c := range commandNames {
		for flag := range flagsOf(t, c...) {
			existing[flag] = true
		}
	}
	logged := 0
	for _, name := range operating {
		text := page(t, name)
		for _, m := range regexp.MustCompile("\\blog `([^`]+)`").FindAllStringSubmatch(text, -1) {
			logged++
			if !strings.Contains(source, `"`+m[1]+`"`) {
				t.Errorf("%s.md: no program logs %q", name, m[1])
			}
		}
		for _, m := range regexp.MustCompile("`((?:kvroute|gen_ai)[._][a-z_.]+[a-z])[`{]").FindAllStringSubmatch(text, -1) {
			if metric := m[1]; !listed[metric] && !regexp.MustCompile(`\.(h|yaml)$|^kvroute_side$|^kvroute\.v1|^kvroute\.yaml|^gen_ai\.(request|operation|usage|token)|^kvroute\.(worker\.(name|address|rank)|served|reason|holdout|no_prefill|prompt_tokens|cached_tokens|overlap_blocks|request)`).MatchString(metric) {
				t.Errorf("%s.md: metrics.md does not list %s", name, metric)
			}
		}
		for _, header := range regexp.MustCompile("`(x-[a-z-]+[a-z])`").FindAllStringSubmatch(text, -1) {
			if !strings.Contains(source, header[1]) {
				t.Errorf("%s.md: no program knows the header %s", name, header[1])
			}
		}
		for _, flag := range regexp.MustCompile("`(?:[a-z ]+ )?(--[a-z][a-z0-9-]+)").FindAllStringSubmatch(text, -1) {
			if !existing[flag[1]] {
				t.Errorf("%s.md: no command has the flag %s", name, flag[1])
			}
		}
	}
	if logged < 20 || len(listed) < 100 || len(existing) < 100 {
		t.Errorf("%d log lines, %d metrics, %d flags: the pages are not read", logged, len(listed), len(existing))
	}
}

// Each kvroute command in a block of shell commands has only flags of that command.
func TestPagesCommandsHaveTheirFlags(t *testing.T) {
	seen := 0
	for _, name := range operating {
		for _, block := range regexp.MustCompile("(?ms)^```sh\n(.*?)^```").FindAllStringSubmatch(page(t, name), -1) {
			for line := range strings.Lines(strings.ReplaceAll(block[1], "\\\n", " ")) {
				_, command, ok := strings.Cut(" "+line, " kvroute ")
				if !ok || !regexp.MustCompile(`^(\w+=\S+ )*kvroute `).MatchString(line) {
					continue
				}
				command, _, _ = strings.Cut(command, "#")
				command, _, _ = strings.Cut(command, "|")
				words := strings.Fields(command)
				i := slices.IndexFunc(commandNames, func(c []string) bool { return len(words) >= len(c) && slices.Equal(words[:len(c)], c) })
				if i < 0 {
					t.Errorf("%s.md: there is no command %q", name, line)
					continue
				}
				seen++
				flags := flagsOf(t, commandNames[i]...)
				for _, w := range words {
					if flag, _, _ := strings.Cut(w, "="); strings.HasPrefix(w, "--") && !flags[flag] {
						t.Errorf("%s.md: kvroute %s has no flag %s", name, strings.Join(commandNames[i], " "), flag)
					}
				}
			}
		}
	}
	if seen < 15 {
		t.Errorf("%d commands: the pages are not read", seen)
	}
}

// Each block of configuration is accepted.
func TestPagesConfigurations(t *testing.T) {
	seen := 0
	for _, name := range operating {
		for _, block := range regexp.MustCompile("(?ms)^```yaml\n(.*?)^```").FindAllStringSubmatch(page(t, name), -1) {
			seen++
			file := filepath.Join(t.TempDir(), "kvroute.yaml")
			if err := os.WriteFile(file, []byte("version: 1\n"+block[1]), 0o600); err != nil {
				t.Fatal(err)
			}
			if status, _, err := runs(t, "config", "--config", file); status != 0 {
				t.Errorf("%s.md: %s\n%s", name, block[1], err)
			}
		}
	}
	if seen < 2 {
		t.Errorf("%d blocks: the pages are not read", seen)
	}
}

// pageStack prepares a folder in which commands of a page run as they stand there, but with free ports.
// The returned function replaces the ports of a text; run runs a script in the folder with kvroute and
// envoy on PATH, and stops what the script has started.
func pageStack(t *testing.T) (dir string, replace func(string) string, run func(script string) (string, error)) {
	t.Helper()
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	envoy, err := envoytest.Find()
	if err != nil {
		t.Fatal(err)
	}
	dir = t.TempDir()
	root, err := filepath.Abs("../..")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(root, "internal"), filepath.Join(dir, "internal")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(dir, "bin"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, program := range map[string]string{"kvroute": os.Args[0], "envoy": envoy} {
		if program, err = filepath.Abs(program); err == nil {
			err = os.Symlink(program, filepath.Join(dir, "bin", name))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	at := map[string]string{}
	for _, port := range []string{"8001", "8002", "8080", "9901", "9002", "9003", "5551", "5552", "5651", "5652"} {
		at[port] = fmt.Sprint("127.0.0.1:", fixtures.HoldPort(t))
	}
	pairs := []string{
		"kvroute serve ", fmt.Sprintf("kvroute serve --extproc-address %s --http-address %s ", at["9002"], at["9003"]),
		"kvroute config envoy --extproc ", fmt.Sprintf("kvroute config envoy --listen %s --admin %s --extproc ", at["8080"], at["9901"]),
		"kvroute config envoy ", fmt.Sprintf("kvroute config envoy --extproc %s --listen %s --admin %s ", at["9002"], at["8080"], at["9901"]),
		"envoy -c ", "envoy --use-dynamic-base-id -c ",
		"kvroute top ", fmt.Sprintf("kvroute top --url http://%s ", at["9003"]),
		"kvroute explain ", fmt.Sprintf("kvroute explain --url http://%s ", at["9003"]),
	}
	for port, address := range at {
		pairs = append(pairs, "127.0.0.1:"+port, address, "localhost:"+port, address)
	}
	replace = strings.NewReplacer(pairs...).Replace
	run = func(script string) (string, error) {
		// A kvroute that does not end shows its goroutines. Another program is ended without a word.
		const stop = `set +e; kill $(jobs -p) 2>/dev/null; for i in $(seq 600); do [ -z "$(jobs -rp)" ] && break; sleep 0.1; done; kill -QUIT $(jobs -rp) 2>/dev/null; wait`
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Minute)
		defer cancel()
		bash := exec.CommandContext(ctx, "bash", "-c", "set -e\ntrap '"+stop+"' EXIT\n"+script)
		bash.Dir = dir
		bash.Env = append(os.Environ(), "PATH="+filepath.Join(dir, "bin")+":"+os.Getenv("PATH"))
		bash.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		bash.Cancel = func() error { return syscall.Kill(-bash.Process.Pid, syscall.SIGQUIT) }
		bash.WaitDelay = time.Minute
		out, err := bash.CombinedOutput()
		if err == nil && bytes.Contains(out, []byte("SIGQUIT: quit")) {
			err = errors.New("a kvroute did not end within a minute")
		}
		return string(out), err
	}
	return dir, replace, run
}

// listens waits until Envoy and kvroute of a page's stack answer.
const listens = `
for i in $(seq 600); do curl -sf -m 60 http://127.0.0.1:9003/readyz >/dev/null && curl -s -m 60 http://127.0.0.1:8080/v1/models | grep -q sim && break; sleep 0.1; done
`

// The stack in observe.md starts, serves a request, and shows it in kvroute top with a cached share
// at the second time.
func TestObservePageStack(t *testing.T) {
	t.Parallel() // mostly waits
	_, replace, run := pageStack(t)
	_, text, _ := strings.Cut(page(t, "observe"), "\n## Try it\n")
	blocks := regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(text, 2)
	if len(blocks) != 2 {
		t.Fatal("observe.md does not have its two blocks of commands")
	}
	// The first request waits for the listener; the second one follows the events of the first.
	out, err := run(replace(blocks[0][1] + listens + `
for i in $(seq 600); do
` + blocks[1][1] + `
kvroute top --once --output json | grep -q '"cached_tokens":[1-9]' && break; sleep 0.1; done
`))
	if err != nil || !strings.Contains(out, "worker-1  ● healthy") || !regexp.MustCompile(`worker-\d +\d+ +[1-9]\d* %`).MatchString(out) {
		t.Errorf("%v\n%s", err, out)
	}
}

// The stacks of quickstart.md and of the README start with simulated engines, and a second request goes
// to the worker that has its beginning.
func TestQuickStarts(t *testing.T) {
	t.Parallel() // mostly waits
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	_, readmeStack, _ := strings.Cut(string(readme), "\n## Two workers behind your Envoy\n")
	quick := page(t, "quickstart")
	request := regexp.MustCompile("(?s)```sh\n(curl .*?)```").FindStringSubmatch(quick)
	if request == nil {
		t.Fatal("quickstart.md sends no request")
	}
	for name, text := range map[string]string{"README": readmeStack, "quickstart": quick} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, replace, run := pageStack(t)
			config := regexp.MustCompile("(?s)```yaml\n((?:# kvroute.yaml\n)?version: 1\n[^`]*models: \\[sim\\][^`]*)```").FindStringSubmatch(text)
			if config == nil {
				t.Fatal("there is no configuration for simulated engines")
			}
			if err := os.WriteFile(filepath.Join(dir, "kvroute.yaml"), []byte(replace(config[1])), 0o600); err != nil {
				t.Fatal(err)
			}
			var script strings.Builder
			for _, block := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(text, -1) {
				if !strings.Contains(block[1], "vllm serve Qwen") && !strings.HasPrefix(block[1], "curl") && !strings.HasPrefix(block[1], "kvroute explain") {
					script.WriteString(block[1])
				}
			}
			out, err := run(replace(script.String() + listens + `
for i in $(seq 600); do
` + strings.TrimSpace(request[1]) + ` >answer; sleep 0.1; grep -q '^x-dynamo-reason: kv' answer && break; done
cat answer
kvroute explain last
`))
			if err != nil || !regexp.MustCompile(`(?m)^x-dynamo-overlap-blocks: [1-9]`).MatchString(out) ||
				!regexp.MustCompile(`"cached_tokens": ?[1-9]`).MatchString(out) || !strings.Contains(out, "(exact)") || !strings.Contains(out, "  chosen\n") {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
}

// Links between the documents lead to files and headings.
func TestLinks(t *testing.T) {
	t.Parallel()
	var files []string
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/adr/*.md", "bench/*.md", "examples/*/*.md", "bindings/*/*.md", "deploy/*/*/*.md"} {
		found, err := filepath.Glob(filepath.Join("../..", pattern))
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, found...)
	}
	fences := regexp.MustCompile("(?s)```.*?```")
	dropped := regexp.MustCompile(`[^\w\- ]`)
	headings := func(file string) map[string]bool {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		all := map[string]bool{}
		for _, m := range regexp.MustCompile(`(?m)^#+ (.*)$`).FindAllStringSubmatch(fences.ReplaceAllString(string(text), ""), -1) {
			all[strings.ReplaceAll(dropped.ReplaceAllString(strings.ToLower(m[1]), ""), " ", "-")] = true
		}
		for _, m := range regexp.MustCompile(`<a id="([^"]+)">`).FindAllStringSubmatch(string(text), -1) {
			all[m[1]] = true
		}
		return all
	}
	seen := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`\]\(([^)\s]+)\)`).FindAllStringSubmatch(fences.ReplaceAllString(string(text), ""), -1) {
			if strings.Contains(m[1], "://") {
				continue
			}
			seen++
			path, heading, _ := strings.Cut(m[1], "#")
			to := file
			if path != "" {
				to = filepath.Join(filepath.Dir(file), path)
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s: %s leads nowhere", file, m[1])
			} else if heading != "" && strings.HasSuffix(to, ".md") && !headings(to)[heading] {
				t.Errorf("%s: %s: there is no such heading", file, m[1])
			}
		}
	}
	if seen < 100 {
		t.Errorf("%d links: the documents are not read", seen)
	}
}
