// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/settings"
)

// mutation is a wrong line of a configuration file, below its line with the version.
type mutation struct{ text, key string }

// mutations are wrong configuration files, each with the key that its error must name.
func mutations(t *testing.T) (all []mutation) {
	t.Helper()
	own := defaults()
	add := func(key, format string, args ...any) {
		all = append(all, mutation{fmt.Sprintf(format, args...), key})
	}
	for name, s := range settings.All(&own) {
		if name == "version" {
			continue
		}
		add(name[:len(name)/2]+name[len(name)/2+1:], "%s: x", name[:len(name)/2]+name[len(name)/2+1:]) // a letter is missing
		switch fmt.Sprint(s.Value.Type()) {
		case "bool":
			add(name, "%s: maybe", name)
		case "time.Duration":
			add(name, "%s: soon", name)
			add(name, "%s: 5", name) // without a unit
			add(name, "%s: 1d", name)
			add(name, "%s: 5 s # five", name)
		case "int", "int64", "*int":
			add(name, "%s: many", name)
			add(name, "%s: 1.5", name)
		case "uint64":
			add(name, "%s: -1", name)
		case "float64", "*float64":
			add(name, "%s: [1]", name)
		case "string":
			add(name, "%s: {a: b}", name)
		}
		switch want := s.Tag.Get("want"); {
		case strings.Contains(want, " or ") && !strings.HasSuffix(want, " or more"):
			add(name, "%s: %s", name, map[bool]string{true: "2", false: "purple"}[strings.ContainsAny(want, "0123456789")])
		case want != "":
			add(name, "%s: %s", name, map[bool]string{true: "-1s", false: "-1"}[fmt.Sprint(s.Value.Type()) == "time.Duration"])
		}
	}
	worker := func(key, fields string) {
		add("workers[1]"+key, "workers:\n- {name: a, models: [m], address: \"10.0.0.1:1\"}\n- {%s}", fields)
	}
	worker("", `name: a, models: [m], address: "10.0.0.2:1"`)
	worker(".address", `name: b, models: [m], address: "host"`)
	worker(".address", `name: b, models: [m]`)
	worker(".address", `name: b, models: [m], address: 5`)
	worker(".address", `name: b, models: [m], address: "10.0.0.2:100000"`)
	worker(".models", `name: b, address: "10.0.0.2:1"`)
	worker(".models", `name: b, models: m, address: "10.0.0.2:1"`)
	worker(` has a field "model"`, `name: b, model: [m], address: "10.0.0.2:1"`)
	worker(` has a field "addrss"`, `name: b, models: [m], addrss: "10.0.0.2:1"`)
	worker(".block_size", `name: b, models: [m], address: "10.0.0.2:1", block_size: -1`)
	worker(".block_size", `name: b, models: [m], address: "10.0.0.2:1", block_size: 200000`)
	worker(".block_size", `name: b, models: [m], address: "10.0.0.2:1", block_size: big`)
	worker(".total_kv_blocks", `name: b, models: [m], address: "10.0.0.2:1", total_kv_blocks: -1`)
	worker(".max_num_seqs", `name: b, models: [m], address: "10.0.0.2:1", max_num_seqs: -1`)
	worker(".prefill_tps", `name: b, models: [m], address: "10.0.0.2:1", prefill_tps: -1`)
	worker(".dp_size", `name: b, models: [m], address: "10.0.0.2:1", dp_size: 5000`)
	worker(".role", `name: b, models: [m], address: "10.0.0.2:1", role: cook`)
	worker(".bootstrap", `name: b, models: [m], address: "10.0.0.2:1", bootstrap: here`)
	worker(".health.path", `name: b, models: [m], address: "10.0.0.2:1", health: {path: health}`)
	worker(".health is a string, want names with values, or none", `name: b, models: [m], address: "10.0.0.2:1", health: off`)
	worker(` has a field "intervall"`, `name: b, models: [m], address: "10.0.0.2:1", health: {intervall: 5s}`)
	worker(".health.interval", `name: b, models: [m], address: "10.0.0.2:1", health: {interval: 5}`)
	worker(".health.interval", `name: b, models: [m], address: "10.0.0.2:1", health: {interval: 1ms}`)
	worker(".events.transport", `name: b, models: [m], address: "10.0.0.2:1", events: {transport: smoke}`)
	worker(".events.endpoint", `name: b, models: [m], address: "10.0.0.2:1", events: {transport: zmq, endpoint: here}`)
	worker(".events.endpoint", `name: b, models: [m], address: "10.0.0.2:1", events: {transport: http_poll, endpoint: here}`)
	worker(".events.replay", `name: b, models: [m], address: "10.0.0.2:1", events: {transport: zmq, replay: here}`)
	worker(` has a field "transprt"`, `name: b, models: [m], address: "10.0.0.2:1", events: {transprt: zmq}`)
	worker(".worker_id", `worker_id: -5, models: [m], address: "10.0.0.2:1"`)
	worker("", `name: b, models: [m], address: "10.0.0.1:1"`)
	worker(".v", `v: 7, name: b, models: [m], address: "10.0.0.2:1"`)
	for _, text := range []string{"workers: 5", "workers: {a: b}", "groups: 5"} {
		add(text[:strings.Index(text, ":")], "%s", text)
	}
	add("groups[0].name", `groups: [{address: "10.0.0.1:1"}]`)
	add(`groups[0] has a field "addr_ess"`, `groups: [{name: g, addr_ess: "10.0.0.1:1"}]`)
	add("groups[0]", `groups: [{name: g, address: "here"}]`)
	add("groups[0].members", `groups: [{name: g, address: "10.0.0.1:1", members: -1}]`)
	add("groups[1].name", `groups: [{name: g, address: "10.0.0.1:1"}, {name: g, address: "10.0.0.2:1"}]`)
	add("group", "group: g\ngroups: [{name: g, address: \"10.0.0.1:1\"}]")
	add("models[0].tokenizer", "models:\n- {name: a, tokenizer: /no/such/folder}")
	add("models[0].tokenizer", "models:\n- {name: a}")
	add("models[0].name", "models:\n- {tokenizer: /}")
	add("models[0].block-size", "models:\n- {name: a, tokenizer: /, block-size: -1}")
	add("models[1].name", "models:\n- {name: a, tokenizer: /}\n- {name: a, tokenizer: /}")
	add("models[0].chat-template", "models:\n- {name: a, tokenizer: /, chat-template: /no/such/file}")
	add("tokeniser", "models:\n- {name: a, tokeniser: /}")
	add("dynamo", "dynamo: {namespace: a}")
	add("dynamo", "dynamo: {dir: /no/such/folder}")
	for _, name := range []string{"nats-creds", "nats-nkey", "nats-ca", "api-token-file", "state-dir", "trace-out", "endpoint-file"} {
		add(name, "%s: /proc/no/such", name)
	}
	add("nats-cert", "nats-cert: /no/such")
	add("extproc-tls-cert", "extproc-tls-cert: /no/such")
	add("extproc-tls-cert", "extproc-tls-cert: /no/such\nextproc-tls-key: /no/such")
	add("http-tls-cert", "http-tls-cert: /no/such")
	add("http-tls-cert", "http-tls-key: /no/such\nhttp-tls-cert: /no/such")
	add("worker-tls-ca", "worker-tls-ca: /no/such")
	add("worker-tls-ca", "worker-tls-ca: /dev/null")
	add("worker-tls-name", "worker-tls-name: worker.internal")
	add("nats-url", "nats-url: ftp://x")
	add("nats-url", "nats-url: file:/no/such")
	add("nats-ca", "nats-ca: /etc/passwd")
	add("nats-cert /etc/passwd, nats-key", "nats-cert: /etc/passwd\nnats-key: /etc/passwd")
	add("http-address", "http-address: 127.0.0.1:99999")
	add("http-address", "http-address: 127.0.0.1:9002")
	add("extproc-address", "extproc-address: unix:/no/such/socket")
	add("trace-out", "trace-out: /tmp")
	add("models", "models: {a: b}")
	add("block-size", "models:\n- {name: a, tokenizer: /, block-size: x}")
	add("nats-url", `nats-url: "nats://"`)
	add("envoy-admin", "envoy-admin: 127.0.0.1:9901")
	add("worker-networks", "worker-networks: 10.0.0.0")
	add("http-address", "http-address: nowhere")
	add("http-address", "http-address: 0.0.0.0:9003")
	add("extproc-address", "extproc-address: 0.0.0.0:9002")
	add("kv-events-retention", "kv-events-retention: 1m")
	add("degraded-after", "degraded-after: 1ms")
	add("unhealthy-after", "unhealthy-after: 1s")
	add("log-level", "log-level: loud")
	add("log-format", "log-format: xml")
	add("alpha", "alpha: -1")
	add("busy-threshold", "busy-threshold: 7")
	add("kv-overlap-score-weight", "kv-overlap-score-weight: 1\ncost: tokens")
	add("output-rate", "output-rate: 5\nno-router-track-output-blocks: true")
	add("router-queue-policy", "router-queue-policy: wspt")
	add("router-mode", "router-mode: direct")
	add("seed", "seed: 1\nseed: 2")
	add("", "router-mode: [")
	return all
}

// mends are words with which an error says what to do.
var mends = regexp.MustCompile(`, want |: want |did you mean|no such|which no element has|does not exist|has no dir|has neither|need|belong|has no effect|failed to find|already defined|exclude|both given|is not allowed|not found|give | is no `)

// `kvroute config check` names the line and the key of each mistake, and what is wanted there.
// testdata/config-errors.txt has all errors: KVROUTE_WRITE=1 writes it.
func TestConfigCheckNamesEachMistake(t *testing.T) {
	var golden strings.Builder
	all := mutations(t)
	for _, m := range all {
		path := writeFile(t, "version: 1\n"+m.text+"\n")
		status, out, stderr := runs(t, "config", "check", "--config", path)
		stderr = strings.ReplaceAll(stderr, path, "FILE")
		fmt.Fprintf(&golden, "%s\n    %s\n", m.text, strings.ReplaceAll(strings.TrimSpace(strings.TrimPrefix(stderr, "kvroute config check: ")), "\n", "\n    "))
		line := 2 + strings.Count(m.text, "\n")
		first, _, _ := strings.Cut(stderr, "\n")
		at := regexp.MustCompile(`^kvroute config check: FILE:(\d+): `).FindStringSubmatch(first)
		if status != 1 || out != "" || at == nil || !strings.Contains(first, m.key) || !mends.MatchString(first) {
			t.Errorf("%q: status %d, %s; want an error that names a line, %s and a mend", m.text, status, stderr, m.key)
			continue
		}
		if n := 0; at[1] != fmt.Sprint(line) && !strings.Contains(m.text, "\n") {
			_, _ = fmt.Sscan(at[1], &n)
			t.Errorf("%q: %s names line %d, want %d", m.text, stderr, n, line)
		}
	}
	if len(all) < 200 {
		t.Errorf("%d mutations, want 200 or more", len(all))
	}
	const file = "testdata/config-errors.txt"
	if os.Getenv("KVROUTE_WRITE") != "" {
		if err := os.WriteFile(file, []byte(golden.String()), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil || string(want) != golden.String() {
		t.Errorf("%s is old: KVROUTE_WRITE=1 go test ./cmd/kvroute -run %s; %v", file, t.Name(), err)
	}
}

// A right configuration is called so, and its state folder is free afterwards.
func TestConfigCheckOfARightFile(t *testing.T) {
	dir := t.TempDir()
	path := writeFile(t, fmt.Sprintf("version: 1\nstate-dir: %s/state\nworkers:\n- {name: a, models: [m], address: \"worker.example:8000\"}\n", dir))
	for range 2 {
		status, out, stderr := runs(t, "config", "check", "--config", path)
		if status != 0 || out != "the configuration is right: it lists 1 worker, 0 router groups and 0 models\n" {
			t.Errorf("status %d, printed %q and %q", status, out, stderr)
		}
	}
}

// A mistake in a flag names no line of the file, which is right.
func TestAWrongFlagNamesNoLine(t *testing.T) {
	path := writeFile(t, "version: 1\nrouter-mode: kv\n")
	status, _, stderr := runs(t, "config", "check", "--config", path, "--router-mode", "fastest")
	if status != 1 || !strings.HasPrefix(stderr, `kvroute config check: --router-mode is "fastest", want `) {
		t.Errorf("status %d, %s", status, stderr)
	}
}

// Environment variables set flags. A flag wins over its variable, and a variable over the file.
func TestEnvironment(t *testing.T) {
	path := writeFile(t, "version: 1\nseed: 1\nalpha: 0.3\n")
	program := func(env string, args ...string) string {
		t.Helper()
		cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
		cmd.Env = append(os.Environ(), strings.Fields(env)...)
		out, _ := cmd.CombinedOutput()
		return string(out)
	}
	for _, c := range []struct{ env, args, want string }{
		{"KVROUTE_SEED=2", "config", "seed: 2\n"},
		{"KVROUTE_SEED=2", "config --config FILE", "seed: 2\n"},
		{"KVROUTE_SEED=2", "config --config FILE --seed 3", "seed: 3\n"},
		{"KVROUTE_CONFIG=FILE", "config", "alpha: 0.3\n"},
		{"KVROUTE_NO_KV_EVENTS=true", "config", "no-kv-events: true\n"},
		{"DYN_ROUTER_TEMPERATURE=0.5", "config", "router-temperature: 0.5\n"},
		{"DYN_ROUTER_TEMPERATURE=0.5 KVROUTE_ROUTER_TEMPERATURE=0.7", "config", "router-temperature: 0.7\n"},
		{"DYN_ROUTER_USE_KV_EVENTS=false", "config", "no-kv-events: true\n"},
		{"DYN_ROUTER_USE_KV_EVENTS=off", "config", "no-kv-events: true\n"},
		{"DYN_ROUTER_QUEUE_THRESHOLD=", "config", "version: 1\n"},
		{"DYN_ROUTER_TRACK_ACTIVE_BLOCKS=true", "config", "no-track-active-blocks: false\n"},
		{"KVROUTE_SEED=many", "config", `environment variable KVROUTE_SEED is "many", want a whole number from 0 on`},
		{"DYN_ROUTER_USE_KV_EVENTS=perhaps", "config", `environment variable DYN_ROUTER_USE_KV_EVENTS is "perhaps", want true or false`},
		{"KVROUTE_LOG_LEVEL=loud", "publish", `KVROUTE_LOG_LEVEL is "loud"`},
		// A Kubernetes Service with the name kvroute sets these.
		{"KVROUTE_PORT=tcp://10.0.0.1:9002 KVROUTE_SERVICE_HOST=10.0.0.1 KVROUTE_SERVICE_PORT=9002", "config", "version: 1\n"},
	} {
		if got := program(strings.ReplaceAll(c.env, "FILE", path), strings.Fields(strings.ReplaceAll(c.args, "FILE", path))...); !strings.Contains(got, c.want) {
			t.Errorf("%s kvroute %s: want %q in\n%s", c.env, c.args, c.want, got)
		}
	}
	for _, c := range commandNames {
		for flag := range flagsOf(t, c...) {
			if regexp.MustCompile(`^--(port|service)\b`).MatchString(flag) {
				t.Errorf("kvroute %s has the flag %s, whose variable Kubernetes sets", strings.Join(c, " "), flag)
			}
		}
	}
}

// The comparison page names the variables of Dynamo that are accepted.
func TestDynamosVariablesAreDocumented(t *testing.T) {
	own := defaults()
	text := page(t, "comparison")
	n := 0
	for name, s := range settings.All(&own) {
		if v := strings.TrimPrefix(s.Tag.Get("dynamo"), "!"); v != "" {
			n++
			if !strings.Contains(text, "`"+v) {
				t.Errorf("docs/comparison.md does not name %s of %s", v, name)
			}
		}
	}
	if n < 20 {
		t.Errorf("%d variables", n)
	}
}

// Bash completes commands and flags by the script that kvroute prints.
func TestCompletionInBash(t *testing.T) {
	bash, err := exec.LookPath("bash")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.Symlink(os.Args[0], filepath.Join(dir, "kvroute")); err != nil {
		t.Fatal(err)
	}
	for words, want := range map[string][]string{
		"ser":                     {"serve"},
		"config ":                 {"check", "envoy", "--config", "--seed"},
		"serve --router-te":       {"--router-temperature"},
		"config envoy --exte":     nil,
		"config envoy --extpr":    {"--extproc"},
		"completion zzz":          nil,
		"completion ":             {"bash", "zsh", "fish"},
		"help serve --router-te":  {"--router-temperature"},
		"serve --router-mode ":    {"kv", "round-robin", "device-aware-weighted"},
		"serve --group-probe o":   {"on", "off"},
		"serve --router-mode zz":  nil,
		"serve --router-mode = r": {"round-robin", "random"}, // as Bash divides --router-mode=r
		"serve --router-mode =":   {"kv", "round-robin"},
		"serve --router-mode = z": nil,
		"top --output = ":         {"json"},
		"top --output j":          {"json"},
		"serve --seed 1":          nil,
	} {
		given := strings.Split("kvroute "+words, " ")
		script := fmt.Sprintf(`source <(kvroute completion bash); COMP_WORDS=(%s); COMP_CWORD=%d; _kvroute; printf '%%s\n' "${COMPREPLY[@]}"`, "'"+strings.Join(given, "' '")+"'", len(given)-1)
		cmd := exec.CommandContext(t.Context(), bash, "--norc", "-c", script)
		cmd.Env = append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		got := strings.Fields(string(out))
		if err != nil {
			t.Errorf("%q: %v\n%s", words, err, out)
		}
		for _, w := range want {
			if !slices.Contains(got, w) {
				t.Errorf("%q: %s is not among %d words: %.300s", words, w, len(got), out)
			}
		}
		if len(want) == 0 && len(got) > 0 {
			t.Errorf("%q is completed with %q", words, got)
		}
	}
}
