// SPDX-License-Identifier: Apache-2.0

package main

import (
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/natstest"
)

// commandBlocks are the blocks of shell commands of the pages: where each one runs.
var commandBlocks = map[string]string{
	"README: make demo":                    "TestReadmeCommands, .ci/run",
	"README: kvroute engine":               "TestQuickStarts",
	"README: curl -i":                      "TestQuickStarts",
	"quickstart: CUDA_VISIBLE_DEVICES=0":   "needs vLLM, as the page says; make test-interop runs these flags",
	"quickstart: kvroute engine":           "TestQuickStarts",
	"quickstart: kvroute config check":     "TestQuickStarts",
	"quickstart: kvroute config envoy":     "TestQuickStarts",
	"quickstart: curl -i":                  "TestQuickStarts",
	"quickstart: kvroute explain":          "TestQuickStarts",
	"observe: cat >":                       "TestObservePageStack",
	"observe: curl -s":                     "TestObservePageStack",
	"observe: kvroute top --url":           "here",
	"observe: kvroute top --once":          "here",
	"observe: kvroute explain":             "here",
	"observe: OTEL_EXPORTER_OTLP_ENDPOINT": "here",
	"api: json='content-type:":             "here",
	"commands: kvroute config":             "here",
	"disaggregation: kvroute replay":       "here",
	"envoy: kvroute serve":                 "here",
	"envoy: kvroute doctor":                "here",
	"existing-envoy: $ kvroute doctor":     "TestAnEnvoyOfYourOwnUsesKvroute",
	"existing-envoy: $ envoy --mode":       "TestAnEnvoyOfYourOwnUsesKvroute",
	"existing-envoy: $ curl -si":           "TestAnEnvoyOfYourOwnUsesKvroute",
	"operations: kill -TERM":               "here",
	"operations: docker buildx":            "needs Docker and the network, as the page says",
	"operations: kvroute serve --nats":     "here",
	"operations: kvroute serve --http-tls": "TestTheAPIOverHTTPS",
	"operations: vllm serve":               "needs vLLM, as the page says; TestEventsOverTLS runs the others",
	"replicas: kvroute serve":              "here",
	"replicas: kvroute doctor":             "here",
	"replicas: kvroute dump":               "here",
	"troubleshooting: kvroute doctor":      "here",
	"upgrade: kvroute config":              "here",
	"workers: json='content-type:":         "here",
}

// shellBlocks returns the blocks of shell commands of README and pages, by page and first words.
func shellBlocks(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, file := range append(files, "../../README.md") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile("(?ms)^ *```(?:sh|bash|console)\n(.*?)^ *```").FindAllStringSubmatch(string(text), -1) {
			name := strings.TrimSuffix(filepath.Base(file), ".md") + ": "
			for prefix := range commandBlocks {
				if strings.HasPrefix(name+strings.TrimSpace(m[1]), prefix) {
					name = prefix
				}
			}
			if all[name] != "" || commandBlocks[name] == "" {
				t.Errorf("%s: no test runs %q", file, m[1])
			}
			all[name] = m[1]
		}
	}
	return all
}

// Each block of commands in README and docs is run: here with a running stack, or where commandBlocks says.
func TestPagesCommandsRun(t *testing.T) {
	t.Parallel() // mostly waits
	dir, replace, run := pageStack(t)
	blocks := shellBlocks(t)
	quick := page(t, "quickstart")
	config := regexp.MustCompile("(?s)```yaml\n(version: 1\n[^`]*models: \\[sim\\][^`]*)```").FindStringSubmatch(quick)
	if config == nil {
		t.Fatal("quickstart.md has no configuration for simulated engines")
	}
	if err := os.WriteFile(filepath.Join(dir, "kvroute.yaml"), []byte(replace(config[1])), 0o600); err != nil {
		t.Fatal(err)
	}
	trace, err := os.Create(filepath.Join(dir, "mooncake_conversation.jsonl.gz"))
	if err != nil {
		t.Fatal(err)
	}
	zip := gzip.NewWriter(trace)
	for i := range 40 {
		fmt.Fprintf(zip, `{"timestamp": %d, "input_length": 1536, "output_length": 20, "hash_ids": [0, 1, %d]}`+"\n", i*500, i+2)
	}
	if err := zip.Close(); err != nil {
		t.Fatal(err)
	}
	if err := trace.Close(); err != nil {
		t.Fatal(err)
	}
	nats := natstest.Start(t, -1)
	bus := fmt.Sprint("127.0.0.1:", fixtures.HoldPort(t))
	// Servers of a block get free ports, and the block is done when they are ready. The other commands
	// go to the running stack.
	servers := 0
	prepare := func(block string) string {
		block = strings.ReplaceAll(block, " …", "")
		var lines []string
		for line := range strings.Lines(strings.ReplaceAll(block, "\\\n", " ")) {
			line, _, _ = strings.Cut(strings.TrimSpace(line), "   #")
			switch {
			case regexp.MustCompile(`^([A-Z_]+=\S+ )*kvroute (serve|publish)\b`).MatchString(line):
				if servers++; strings.Contains(line, " publish ") {
					line += " &\n" + `for i in $(seq 100); do kvroute top --once --url "$last" >top.out; grep -q ' healthy ' top.out && break; sleep 0.3; done; cat top.out; grep -q ' healthy ' top.out`
				} else {
					line += fmt.Sprintf(" --extproc-address 127.0.0.1:0 --http-address 127.0.0.1:0 --ready-file ready-%d &\nfor i in $(seq 300); do [ -s ready-%[1]d ] && break; sleep 0.1; done; last=http://$(jq -r .http ready-%[1]d)", servers)
				}
			case strings.HasPrefix(line, "kvroute top ") && strings.Contains(line, "--once"):
			case strings.HasPrefix(line, "kvroute top ") && strings.Contains(line, "--output"): // it runs until the user quits
				line = "timeout -k 60 5 " + line + " >top.out || [ $? = 124 ]; test -s top.out"
			case strings.HasPrefix(line, "kvroute top "): // the same, in a terminal
				line = "timeout -k 5 120 script -qec 'exec timeout --foreground -k 60 5 " + line + "' top.out </dev/null >/dev/null || [ $? = 124 ]; grep -q requests top.out"
			case strings.HasPrefix(line, "kvroute doctor "):
				line += " >doctor.out || grep -q . doctor.out" // findings are an answer, too
			}
			lines = append(lines, line)
		}
		text := strings.NewReplacer("nats://nats:4222", nats.ClientURL(), "127.0.0.1:4222", bus, "127.0.0.1:8000", "127.0.0.1:8001", "/var/lib/kvroute", "state",
			"10.0.0.1:9003", "127.0.0.1:9003", "10.0.0.2:9003", "127.0.0.1:9003", `$(pidof kvroute)`, "$serve").Replace(strings.Join(lines, "\n"))
		return replace(text)
	}
	var script strings.Builder
	for _, name := range []string{"quickstart: kvroute engine", "quickstart: kvroute config envoy"} {
		script.WriteString(replace(blocks[name]))
	}
	script.WriteString(replace("kvroute serve --config kvroute.yaml &\n") + "serve=$!\n" + replace(listens) + replace(strings.TrimSpace(blocks["quickstart: curl -i"])) + " >answer\n")
	order := []string{"workers: json", "api: json", "commands: ", "upgrade: ", "disaggregation: ", "envoy: kvroute serve", "envoy: kvroute doctor", "observe: ", "replicas: ", "troubleshooting: ", "operations: kvroute serve --nats", "operations: kill"}
	ran := map[string]bool{}
	for _, first := range order {
		for name, where := range commandBlocks {
			if where != "here" || !strings.HasPrefix(name, first) || ran[name] {
				continue
			}
			ran[name] = true
			block := prepare(blocks[name])
			fmt.Fprintf(&script, "echo '== %s'\n%s\n", strings.ReplaceAll(name, "'", ""), strings.ReplaceAll(block, "curl ", "curl -fsS -m 60 "))
		}
	}
	script.WriteString("wait $serve\necho '== end'\n")
	out, err := run("set -o pipefail\n" + script.String())
	if err != nil || !strings.Contains(out, "\n== end\n") {
		t.Errorf("%v\n%s\n--- the script\n%s", err, out, script.String())
	}
	for name, where := range commandBlocks {
		if blocks[name] == "" || where == "here" && !ran[name] {
			t.Errorf("no block begins with %q, or it did not run", name)
		}
	}
}
