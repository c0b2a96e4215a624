// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"flag"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/settings"
)

// beKvroute makes this test binary run as kvroute, so that tests start the code that they were built
// with.
const beKvroute = "KVROUTE_TEST_IS_KVROUTE"

func TestMain(m *testing.M) {
	// Go's fuzzing starts this binary, too, with the environment of the test.
	if os.Getenv(beKvroute) != "" && !slices.Contains(os.Args, "-test.fuzzworker") {
		main()
	}
	// All tests share the environment, since most run in parallel. The race detector would
	// keep each child for a second at its end.
	for name, value := range map[string]string{
		beKvroute: "1", "GORACE": "atexit_sleep_ms=0 halt_on_error=1",
		"KVROUTE_ROUTER_PASSWORD": "secret-of-ROUTER", "KVROUTE_WORKER_PASSWORD": "secret-of-WORKER", "KVROUTE_WORKER_0_PASSWORD": "secret-of-WORKER_0",
	} {
		if err := os.Setenv(name, value); err != nil {
			panic(err)
		}
	}
	flag.Parse()
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop"))
}

// runs runs a command in this process.
func runs(t *testing.T, args ...string) (status int, out, err string) {
	t.Helper()
	var o, e bytes.Buffer
	status = run(t.Context(), args, stdio{&o, &e})
	return status, o.String(), e.String()
}

func TestCommands(t *testing.T) {
	for _, c := range []struct {
		args   string
		status int
		out    string
		err    string
	}{
		{"", 2, "", "usage: kvroute COMMAND"},
		{"help", 0, "external processor", ""},
		{"nonsense", 2, "", "kvroute: there is no command \"nonsense\"; `kvroute help` lists the commands\n"},
		{"serv", 2, "", `did you mean "serve"?`},
		{"-h", 0, "usage: kvroute COMMAND", ""},
		{"--version", 0, "kvroute ", ""},
		{"help config envoy", 0, "--extproc", ""},
		{"help serve", 0, "\nChoice of the worker\n  --router-mode", ""},
		{"config enovy", 2, "", `did you mean "config envoy"?`},
		{"serve --seed many", 2, "", `--seed is "many", want a whole number from 0 on; `},
		{"serve --seed", 2, "", "flag needs an argument: --seed; "},
		{"completion", 2, "", "want one of bash, zsh or fish"},
		{"completion tcsh", 2, "", "want one of bash, zsh or fish"},
		{"completion fish", 0, "complete -c kvroute", ""},
		{"version", 0, "kvroute ", ""},
		{"version --json", 0, `"go_version": "go`, ""},
		{"help explain", 0, "usage: kvroute explain [flags] ID\n\nPrint a recent decision of a running kvroute and its inputs.\n\n  ID\n        last, the x-dynamo-request-id", ""},
		{"help serve", 0, "usage: kvroute serve [flags]\n\nRun the external processor.\n", ""},
		{"explain", 2, "", "want the id of a request: last, the x-dynamo-request-id of a response, or the client's x-request-id; "},
		{"completion values serve --first-token", 0, "observer\nresponse-headers\n", ""},
		{"completion values nothing --here", 0, "", ""},
		{"version now", 2, "", `unexpected argument "now"`},
		{"serve -h", 0, "--kv-overlap-score-weight", ""},
		{"serve --no-such-flag", 2, "", "kvroute serve: there is no flag --no-such-flag; `kvroute help serve` lists the flags\n"},
		{"serve --rooter-mode kv", 2, "", `did you mean "--router-mode"?`},
		{"config", 0, "router-mode: kv", ""},
		{"config --router-mode fastest", 1, "", `kvroute config: --router-mode is "fastest", want kv, random`},
		{"config --holdout-share=5 -seed 1 -queue-wait -1s", 1, "", "--holdout-share is \"5\", want 0 to 1\n--queue-wait "},
		{"load --arrivals never", 1, "", `kvroute load: --arrivals is "never", want poisson or constant`},
		{"top --output xml", 1, "", `kvroute top: --output is "xml", want text or json`},
		{"completion values engine --preset", 0, "8b-1xh100\n32b-2xh100\n70b-4xh100\n", ""},
		{"completion values engine --role", 0, "prefill\ndecode\nboth\n", ""},
		{"completion values engine --engine", 0, "vllm\nsglang\ntrtllm\n", ""},
		{"completion values engine --block-hash", 0, "sim\nvllm\nsglang\nsequence\nrandom\n", ""},
		{"completion values demo --preset", 0, "8b-1xh100\n32b-2xh100\n70b-4xh100\n", ""},
		{"completion values replay --engine", 0, "8b\n32b\n70b\n", ""},
		{"completion values serve --overload-status", 0, "429\n503\n529\n", ""},
		{"completion values serve --nats-replicas", 0, "1\n3\n5\n", ""},
		{"completion values publish --role", 0, "aggregated\nprefill\ndecode\nboth\n", ""},
		{"config --kv-overlap-score-weight -1", 1, "", "kv-overlap-score-weight is -1, want"},
		{"config --kv-overlap-score-weight NaN", 1, "", "kv-overlap-score-weight is NaN, want"},
		{"config --http-address nowhere", 1, "", `http-address is "nowhere", want ip:port`},
		{"config --http-address 0.0.0.0:9003", 1, "", `http-address is "0.0.0.0:9003", which other machines can reach`},
		{"config --http-address :9003", 1, "", "give api-token-file, or trusted-network"},
		{"config --nats-listen 0.0.0.0:4222", 1, "", `nats-listen is "0.0.0.0:4222", which other machines can reach`},
		{"config --http-address [::]:9003", 1, "", "which other machines can reach"},
		{"config --http-address kvroute.internal:9003", 1, "", "which other machines can reach"},
		{"config --http-address [::1]:9003", 0, "[::1]:9003", ""},
		{"config --http-address localhost:9003", 0, "localhost:9003", ""},
		{"config --http-address 0.0.0.0:9003 --trusted-network", 0, "trusted-network: true", ""},
		{"config --http-address 0.0.0.0:9003 --api-token-file tokens", 0, "api-token-file: tokens", ""},
		{"config --http-address 0.0.0.0:9003 --api-token-file tokens --trusted-network", 0, "trusted-network: true", ""},
		{"config --nats-url nats://router:secret@nats:4222", 0, "nats-url: nats://router:xxxxx@nats:4222", ""},
		{"config --extproc-address 0.0.0.0:9002", 1, "", "give extproc-tls-client-ca, or trusted-network"},
		{"config --extproc-address :9002 --extproc-tls-cert c --extproc-tls-key k", 1, "", "give extproc-tls-client-ca, or trusted-network"},
		{"config --extproc-address :9002 --extproc-tls-cert c --extproc-tls-key k --extproc-tls-client-ca ca", 0, "extproc-address: :9002", ""},
		{"config --extproc-address 0.0.0.0:9002 --trusted-network", 0, "trusted-network: true", ""},
		{"config --extproc-address unix:/run/kvroute", 0, "extproc-address: unix:/run/kvroute", ""},
		{"serve --nats-url file:/nowhere/at --extproc-address 127.0.0.1:0 --http-address 127.0.0.1:0", 1, "", "nats-url: open /nowhere/at"},
		{"serve --api-token-file /nowhere/at --nats-listen 127.0.0.1:0 --extproc-address 127.0.0.1:0 --http-address 127.0.0.1:0", 1, "", "api-token-file: open /nowhere/at"},
		{"dump --api-token-file /nowhere/at", 1, "", "api-token-file: open /nowhere/at"},
		{"config --envoy-admin 127.0.0.1:9901", 1, "", `envoy-admin is "127.0.0.1:9901", want http://host:port`},
		{"config --envoy-admin http://user:secret@127.0.0.1:9901", 1, "", `envoy-admin is "http://user:xxxxx@127.0.0.1:9901", want http://host:port`},
		{"config --envoy-admin http://127.0.0.1:9901", 0, "envoy-admin: http://127.0.0.1:9901", ""},
		{"config --first-token never", 1, "", `first-token is "never"`},
		{"config --decision-timeout 0s", 1, "", "decision-timeout"},
		{"config --worker-networks 10.0.0.0", 1, "", `"10.0.0.0" is not a network`},
		{"config --config /nowhere/at.yaml", 1, "", "/nowhere"},
		{"config envoy --extproc 10.0.0.1:9002 --pool w1:8000", 0, "STRICT_DNS", ""},
		{"config envoy", 0, "name: pool", "no pool: Envoy answers 503"},
		{"config envoy --pool-file /run/pool.json", 0, "/run/pool.json", ""},
		{"config envoy --pool nothing", 1, "", `pool[0] is "nothing"`},
		{"serve --log-level loud", 1, "", `log-level is "loud"`},
		{"engine --advertise here --nats-url nats://127.0.0.1:1 --listen 127.0.0.1:0", 1, "", `advertise is "here"`},
		{"engine --preset abacus --nats-url nats://127.0.0.1:1 --listen 127.0.0.1:0", 1, "", `kvroute engine: --preset is "abacus"`},
		{"load --rate -1", 1, "", `rate is "-1"`},
		{"healthcheck --url http://127.0.0.1:1/", 1, "", "refused"},
	} {
		t.Run(c.args, func(t *testing.T) {
			status, out, err := runs(t, strings.Fields(c.args)...)
			if status != c.status || !strings.Contains(out, c.out) || !strings.Contains(err, c.err) {
				t.Errorf("status %d, want %d\nstdout (want %q):\n%s\nstderr (want %q):\n%s", status, c.status, c.out, out, c.err, err)
			}
		})
	}
}

// Each setting is a flag and a key, under one name.
func TestEverySettingIsAFlag(t *testing.T) {
	c := defaults()
	fs := newFlagSet("test")
	settings.AddFlags(fs, &c)
	var keys, flags []string
	for _, field := range reflect.VisibleFields(reflect.TypeFor[config]()) {
		if field.Anonymous {
			continue
		}
		if key, _, _ := strings.Cut(field.Tag.Get("yaml"), ","); !slices.Contains([]string{"version", "workers", "models", "groups", "dynamo", "kubernetes"}, key) {
			keys = append(keys, key)
		}
	}
	for _, key := range keys {
		if fs.Lookup(key) != nil {
			flags = append(flags, key)
		}
	}
	n := 0
	fs.VisitAll(func(*flag.Flag) { n++ })
	if diff := cmp.Diff(keys, flags); diff != "" || n != len(keys) {
		t.Errorf("%d flags; keys without a flag of their name:\n%s", n, diff)
	}
}

func writeFile(t testing.TB, text string) string {
	t.Helper()
	path := t.TempDir() + "/kvroute.yaml"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestConfigurationFile(t *testing.T) {
	path := writeFile(t, `
version: 1
router-mode: round-robin
decision-timeout: 750ms
workers:
- name: a
  worker_id: 18446744073709551615
  address: 10.0.0.7:8000
  models: [m]
`)
	c, _, err := readConfig("test", []string{"--config", path, "--seed", "7", "--decision-timeout", "1s"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if c.RouterMode != "round-robin" || c.DecisionTimeout != time.Second || c.Seed != 7 || c.HTTPAddress != "127.0.0.1:9003" {
		t.Errorf("file, flags and defaults gave %+v", c)
	}
	if len(c.Workers) != 1 || c.Workers[0].WorkerID != 1<<64-1 || c.Workers[0].Models[0] != "m" {
		t.Errorf("workers: %+v", c.Workers)
	}
	// The output of `kvroute config` is a file with the same settings.
	status, out, stderr := runs(t, "config", "--config", path)
	if status != 0 {
		t.Fatal(stderr)
	}
	again, _, err := readConfig("test", []string{"--config", writeFile(t, out), "--seed", "7", "--decision-timeout", "1s"}, nil)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if diff := cmp.Diff(c, again, cmpopts.IgnoreUnexported(fleet.DynamoEtcd{})); diff != "" {
		t.Errorf("after printing and reading (-want +got):\n%s\n%s", diff, out)
	}
}

func TestBadConfigurationFiles(t *testing.T) {
	for text, want := range map[string]string{
		"router-mode: kv":                      "version is 0, want the line version: 1",
		"version: 2":                           "version is 2, want the line version: 1",
		"version: 1\nrouter-mod: kv":           "router-mod",
		"version: 1\nseed: many":               "seed",
		"version: 1\nworkers:\n- modells: [m]": "modells",
		"version: 1\nworkers:\n- models: five": "models",
		"version: 1\nworkers:\n- name: a":      "models",
		"version: 1\n  bad: [":                 "kvroute.yaml",
		"version: 1\nworkers:\n- {name: a, models: [m], address: \"host\"}":                                                                                                             "address",
		"version: 1\nworkers:\n- {name: a, models: [m], address: \"10.0.0.1:1\", block_size: 200000}":                                                                                   "block_size is 200000",
		"version: 1\nworkers:\n- {name: a, models: [m], address: \"10.0.0.1:1\"}\n- {name: b, models: [m], address: \"10.0.0.3:1\"}\n- {name: a, models: [m], address: \"10.0.0.2:1\"}": "workers[2] (\"a\") has the id",
		"version: 1\nworkers:\n- {worker_id: 5, models: [m], address: \"10.0.0.1:1\"}\n- {worker_id: 5, models: [m], address: \"10.0.0.2:1\"}":                                          "id 5 of workers[0]",
	} {
		status, _, stderr := runs(t, "config", "--config", writeFile(t, text))
		if status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%q: status %d, stderr %q; want 1 and %q", text, status, stderr, want)
		}
	}
}
