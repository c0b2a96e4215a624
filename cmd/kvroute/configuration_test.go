// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/settings"
)

// topics are the sections of docs/configuration.md, each with its first setting.
var topics = []struct{ title, first, page string }{
	{"Listeners and access", "extproc-address", "operations.md#security"},
	{"NATS and the scope of the workers", "nats-url", "operations.md#nats"},
	{"Cache events and replicas", "durable-kv-events", "replicas.md"},
	{"Router groups", "group", "router-groups.md"},
	{"Choice of the worker", "router-mode", "routing.md"},
	{"The index and the stored state", "max-index-blocks", "operations.md#sizing"},
	{"Traces for `kvroute replay`, and samples", "trace-out", "observe.md"},
	{"Envoy", "second-choice", "envoy.md"},
	{"Health of workers", "avoid-failing", "workers.md#health"},
	{"Bodies, time and shutdown", "max-body-bytes", "operations.md"},
	{"Logs and prompts", "log-level", "requests.md"},
	{"In the file only", "dynamo", "workers.md"},
}

// Parts of the texts in excluded.
const (
	kvOnly     = "needs `router-mode: kv`"
	newer      = kvOnly + " and no other `cost` than dynamo_newer"
	tracked    = "excludes `no-router-track-prefill-tokens`"
	indexed    = "excludes `kv-overlap-score-weight: 0` and `router-kv-overlap-score-credit: 0`"
	tiers      = kvOnly + "; excludes the `cost` dynamo and weighted, `kv-overlap-score-weight`, and `router-kv-overlap-score-credit: 0`"
	pulls      = "needs a `kv-pull` other than off"
	weighted   = kvOnly + " and `cost: weighted`"
	otherCosts = "excludes the settings of other costs: `kv-overlap-score-weight`, `router-kv-overlap-score-credit`, `router-kv-overlap-score-credit-decay`, `router-prefill-load-scale`, `router-decode-active-request-weight`"
	noDynamo   = tracked + ", and the settings of other costs: `kv-overlap-score-weight`, `router-kv-overlap-score-credit`, `router-kv-overlap-score-credit-decay`, `router-prefill-load-scale`, `router-decode-active-request-weight`"
)

// excluded says in words which pairs of settings kvroute refuses.
var excluded = map[string]string{
	"http-tls-cert":                        "needs `http-tls-key`",
	"http-tls-key":                         "needs `http-tls-cert`",
	"extproc-tls-cert":                     "needs `extproc-tls-key`",
	"extproc-tls-key":                      "needs `extproc-tls-cert`",
	"extproc-tls-client-ca":                "needs `extproc-tls-cert` and `extproc-tls-key`",
	"router-mode":                          "direct needs `allow-direct`",
	"cost":                                 kvOnly,
	"alpha":                                kvOnly + " and the `cost` tokens or predicted_ttft; " + noDynamo,
	"attention":                            kvOnly + " and the `cost` tokens; " + noDynamo,
	"decode-weight":                        kvOnly + " and the `cost` tokens, predicted_ttft or weighted; " + otherCosts,
	"no-worker-speeds":                     kvOnly + " and the `cost` tokens or predicted_ttft; " + otherCosts,
	"router-temperature":                   kvOnly,
	"kv-overlap-score-weight":              kvOnly + " and no other `cost` than dynamo or dynamo_newer; excludes `router-prefill-load-scale`; " + tracked + ", unless it is 0",
	"router-kv-overlap-score-credit":       newer,
	"router-kv-overlap-score-credit-decay": newer + "; " + tracked + "; " + indexed,
	"router-prefill-load-scale":            newer + "; " + tracked + ", unless it is 0",
	"router-decode-active-request-weight":  newer,
	"router-host-cache-hit-weight":         tiers,
	"router-disk-cache-hit-weight":         tiers,
	"device-ratio":                         "needs `router-mode: device-aware-weighted`",
	"weighted-overlap":                     weighted,
	"weighted-requests":                    weighted,
	"weighted-kv-use":                      weighted,
	"output-rate":                          "excludes `no-router-track-output-blocks`",
	"router-queue-policy":                  "needs `router-queue-threshold`",
	"router-queue-limit":                   "needs `router-queue-threshold`",
	"queue-wait":                           "needs `router-queue-threshold`",
	"envoy-max-message-timeout":            "at least half a second more than `prefill-timeout`, unless the `prefill-leg` is header, and `queue-wait`, if `router-queue-threshold` is set, together",
	"disaggregation-tokens":                "needs a `conditional-disaggregation` that begins with `isl_`",
	"disaggregation-fraction":              "needs a `conditional-disaggregation` that begins with `isl_`",
	"kv-pull":                              "unless it is off, excludes `no-kv-events`; " + indexed,
	"kv-pull-delay":                        pulls,
	"kv-pull-token-time":                   pulls,
	"kv-pull-compute-time":                 pulls,
	"kv-pull-min-tokens":                   pulls,
	"kv-pull-limit":                        pulls,
	"session-affinity-mode":                "needs `session-affinity-ttl-secs` above 0",
	"session-headers":                      "needs `session-affinity-ttl-secs` above 0",
	"max-index-blocks":                     "excludes `no-kv-events`; " + indexed,
	"router-ttl-secs":                      indexed,
	"router-predicted-ttl-secs":            "unless it is 0, excludes `no-kv-events`; " + indexed,
	"kv-events-retention":                  "needs `durable-kv-events`; excludes `no-kv-events`",
	"group":                                "excludes `groups`",
	"groups":                               "excludes `group`",
}

// configurationPage renders docs/configuration.md from the settings.
func configurationPage(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	out.WriteString(`# Configuration

For everybody who looks up a setting of ` + "`kvroute serve`" + `. This page is generated from the settings: ` + "`go test ./cmd/kvroute -run ConfigurationPage`" + ` compares it, and writes it with ` + "`KVROUTE_WRITE=1`" + `.

- Each setting is a flag of ` + "`kvroute serve`" + ` and, under the same name, a key of the file that ` + "`--config`" + ` names. It is also an environment variable: ` + "`KVROUTE_LOG_LEVEL` for `log-level`" + ` and so on. A flag wins over a variable, and a variable over the file.
- [NVIDIA Dynamo's variables](comparison.md#dynamos-settings) ` + "`DYN_*`" + ` count where they mean the same. ` + "`KVROUTE_*`" + ` wins over them.
- The file begins with ` + "`version: 1`" + `. ` + "`kvroute config check --config FILE`" + ` reads the file and everything that it names, and prints the first mistake with its line. ` + "`kvroute config --config FILE`" + ` prints it with all defaults.
- A time has a unit, as ` + "`1.5s`" + ` or ` + "`10m`" + `. A flag without a value is true.
- kvroute reads the file again within 4 s after it or the file of the API's tokens changes, and on SIGHUP. It then applies ` + "`" + strings.Join(reloadable, "`, `") + "`" + ` and the tokens of the API. Groups need a restart if kvroute was started without any. A setting that a flag or a variable sets, too, stays as that says. It reads the TLS files of ` + "`extproc-address` and `http-address`" + ` at each handshake. One warning names the other settings that changed, which need a restart; ` + "`kvroute doctor`" + ` names them, too.
- *own* means that router replicas may differ in the setting. All other settings must be equal: ` + "`kvroute doctor`" + ` compares them.
- kvroute refuses a setting that has no effect beside another one; the column *meaning* names these. The error names both.
`)
	c := defaults()
	kinds := regexp.MustCompile(`<([^>]*)>`)
	next, count := 0, 0
	for name, s := range settings.All(&c) {
		if name == "version" {
			continue
		}
		if next < len(topics) && topics[next].first == name {
			fmt.Fprintf(&out, "\n## %s\n\n[%s](%s)\n\n| setting | type | default | meaning |\n|---|---|---|---|\n", topics[next].title, strings.Split(topics[next].page, "#")[0], topics[next].page)
			next++
		}
		kind := "text"
		switch fmt.Sprint(s.Value.Type()) {
		case "bool":
			kind = "true or false"
		case "time.Duration":
			kind = "time"
		case "int", "int64", "uint64", "*int", "float64", "*float64":
			kind = "number"
		case "[]string":
			kind = "list of texts"
		}
		help := s.Help
		if help == "" {
			if kind = "list"; name == "dynamo" || name == "kubernetes" {
				kind = "mapping"
			}
			help = map[string]string{
				"dynamo":     "how NVIDIA Dynamo's records are found: see [workers.md](workers.md#dynamos-own-discovery)",
				"kubernetes": "how workers are found by Kubernetes' API: see [workers.md](workers.md#kubernetes)",
				"models":     "the models whose prompts are tokenized exactly: see [requests.md](requests.md#models)",
				"workers":    "the workers that do not register: see [workers.md](workers.md#fields-of-a-worker)",
				"groups":     "the router groups below this router: see [router-groups.md](router-groups.md)",
			}[name]
			if help == "" {
				t.Errorf("%s has no help", name)
			}
		}
		unit := kinds.FindStringSubmatch(help)
		if unit != nil && kind != "time" && unit[1] != kind {
			kind = unit[1]
		}
		if own := s.Tag.Get("own"); own != "" {
			kind += ", own"
		}
		text := kinds.ReplaceAllString(help, "$1")
		if want := s.Tag.Get("want"); want != "" && !strings.Contains(help, strings.TrimSuffix(want, " or nothing")) {
			text += ". Accepted: " + want
		}
		if e := excluded[name]; e != "" {
			text += "; " + e
		}
		value := cmp.Or(s.Tag.Get("default"), map[bool]string{true: "false", false: "–"}[strings.HasPrefix(kind, "true")])
		fmt.Fprintf(&out, "| `%s` | %s | %s | %s |\n", name, kind, value, strings.ReplaceAll(text, "|", `\|`))
		count++
	}
	if next != len(topics) || count < 80 {
		t.Fatalf("%d of %d sections, %d settings: section %v is not reached", next, len(topics), count, topics[min(next, len(topics)-1)])
	}
	return out.String()
}

func TestConfigurationPage(t *testing.T) {
	want := configurationPage(t)
	if os.Getenv("KVROUTE_WRITE") != "" {
		if err := os.WriteFile("../../docs/configuration.md", []byte(want), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if page(t, "configuration") != want {
		t.Error("docs/configuration.md is old: KVROUTE_WRITE=1 go test ./cmd/kvroute -run ConfigurationPage")
	}
	own := defaults()
	var titles []string
	for _, s := range settings.All(&own) {
		if topic := s.Tag.Get("topic"); topic != "" {
			titles = append(titles, topic)
		}
	}
	for i, topic := range topics { // the page and kvroute help serve have the same sections
		if i >= len(titles) || strings.ReplaceAll(topic.title, "`", "") != titles[i] {
			t.Errorf("section %d is %q, and %q in the help", i, topic.title, titles)
		}
	}
	for name := range excluded {
		if !strings.Contains(want, "| `"+name+"` |") {
			t.Errorf("%s is no setting", name)
		}
	}
}

// others are the values of a setting that TestConfigurationPageNamesPairs tries, if those by its type do not do.
var others = map[string][]string{
	"extproc-address": {"127.0.0.1:1"}, "http-address": {"127.0.0.1:2"}, "nats-listen": {"127.0.0.1:3"}, "nats-url": {"nats://127.0.0.1:4"}, "envoy-admin": {"http://127.0.0.1:5"},
	"worker-networks": {"127.0.0.0/8"}, "nats-replicas": {"3"}, "kv-events-retention": {"40m"}, "group-interval": {"2s"}, "group-probe": {"off"},
	"router-mode": {"random", "direct", "device-aware-weighted"}, "cost": {"tokens", "dynamo", "dynamo_newer", "predicted_ttft", "weighted"},
	"alpha": {"0.2"}, "decode-weight": {"2"}, "attention": {"0.1"}, "kv-overlap-score-weight": {"2", "0"}, "router-kv-overlap-score-credit": {"2", "0"}, "router-prefill-load-scale": {"2", "0"},
	"router-host-cache-hit-weight": {"0.5"}, "router-disk-cache-hit-weight": {"0.5"}, "weighted-overlap": {"0.5"}, "weighted-requests": {"0.5"}, "weighted-kv-use": {"0.5"},
	"engine-preset": {"8b"}, "busy-threshold": {"0.5"}, "router-queue-policy": {"wspt"}, "prefill-leg": {"header"}, "overload-status": {"503"}, "session-affinity-mode": {"hard"},
	"conditional-disaggregation": {"prefill_load", "isl_bounding"}, "disaggregation-fraction": {"0.5"}, "router-predicted-ttl-secs": {"5", "0"}, "audit-share": {"0.5"}, "holdout-share": {"0.5"}, "observe-share": {"0.5"},
	"second-choice": {"list"}, "first-token": {"response-headers"}, "degraded-after": {"8s"}, "unhealthy-after": {"16s"}, "log-level": {"debug"}, "log-format": {"json"},
	"kv-pull": {"body"}, "kv-pull-delay": {"1ms"}, "kv-pull-token-time": {"1ms"}, "kv-pull-compute-time": {"1ms"},
	"queue-wait": {"20s"}, "envoy-max-message-timeout": {"40s"},
}

// Of two settings of which one needs or excludes the other, the row of one names the other.
func TestConfigurationPageNamesPairs(t *testing.T) {
	type given struct{ name, value string }
	own := defaults()
	c := own
	fs := newFlagSet("serve")
	settings.AddFlags(fs, &c)
	refused := func(all ...given) bool {
		c = own
		for _, g := range all {
			if g.name == "groups" {
				c.Groups = groupList{{Name: "east"}}
				c.Groups[0].Address = "127.0.0.1:6"
			} else if err := fs.Set(g.name, g.value); err != nil {
				t.Fatalf("%s %s: %v", g.name, g.value, err)
			}
		}
		return c.check() != nil
	}
	var all []given
	for name, s := range settings.All(&own) {
		values := others[name]
		switch kind := fmt.Sprint(s.Value.Type()); {
		case values != nil || strings.Contains("version dynamo kubernetes models workers nats-creds nats-nkey nats-ca nats-cert nats-key", name): // the latter need files
		case kind == "bool":
			values = []string{fmt.Sprint(!s.Value.Bool())}
		case kind == "time.Duration":
			values = []string{"40s"}
		default:
			values = []string{"2"}
		}
		for _, v := range values {
			all = append(all, given{name, v})
		}
	}
	rows := map[string]string{}
	for line := range strings.Lines(page(t, "configuration")) {
		if cells := strings.Split(line, "`"); len(cells) > 1 && cells[0] == "| " {
			rows[cells[1]] = line
		}
	}
	names := func(row, other string) bool {
		return strings.Contains(rows[row], "`"+other+"`") || strings.Contains(rows[row], "`"+other+": ")
	}
	alone, valid := map[given]bool{}, map[given]bool{}
	for _, a := range all {
		alone[a] = !refused(a)
		valid[a] = alone[a]
	}
	for i, a := range all {
		for _, b := range all[i+1:] {
			if a.name == b.name {
				continue
			}
			together := !refused(a, b)
			valid[a], valid[b] = valid[a] || together, valid[b] || together
			if together != (alone[a] && alone[b]) && !names(a.name, b.name) && !names(b.name, a.name) {
				t.Errorf("the rows of %v and %v do not name each other; accepted alone: %v and %v, together: %v", a, b, alone[a], alone[b], together)
			}
		}
	}
	for _, a := range all {
		if !valid[a] {
			t.Errorf("%v is accepted nowhere: correct its value in others", a)
		}
	}
}
