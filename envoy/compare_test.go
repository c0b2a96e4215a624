// SPDX-License-Identifier: Apache-2.0

package envoy_test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/envoy"
)

// A configuration that does not fit kvroute's settings is a fault until it fits. It is read once a minute.
func TestSettingsOfEnvoyAreCompared(t *testing.T) {
	const filter = `{"@type":"type.googleapis.com/envoy.extensions.filters.http.ext_proc.v3.ExternalProcessor",`
	ours := func(rest string) string { return filter + `"stat_prefix":"kvroute"` + rest + `}` }
	fits := ours(`,"message_timeout":"2s","max_message_timeout":"60s"`)
	for name, c := range map[string]struct {
		dump string
		want []string // in the fault's text; none means no fault
	}{
		"all fits":                    {`{"configs":[` + fits + `,{"request_body_buffer_limit":"1024"},{"http_header_name":"x-dynamo-worker"},{"http_header_name":"x-dynamo-worker-fallback"}]}`, nil},
		"a filter of others":          {`[` + fits + `,` + filter + `"stat_prefix":"other"}]`, nil},
		"an observer":                 {`[` + fits + `,` + filter + `"stat_prefix":"kvroute_observer"}]`, nil},
		"short timeouts":              {ours(`,"message_timeout":"1s"`), []string{"message_timeout is 1s, but a decision may take 1.5s", "max_message_timeout is 0s, but a request may wait 30s"}},
		"default timeouts":            {ours(""), []string{"message_timeout is 200ms", "max_message_timeout is 0s"}},
		"another limit of bodies":     {`[` + fits + `,{"request_body_buffer_limit":2048}]`, []string{"2048 bytes, but that of max-body-bytes is 1024"}},
		"the limit of a listener":     {`[` + fits + `,{"filter_chains":[],"per_connection_buffer_limit_bytes":4096}]`, []string{"4096 bytes"}},
		"the default of a listener":   {`[` + fits + `,{"filter_chains":[]}]`, []string{"1048576 bytes"}},
		"no second worker":            {`[` + fits + `,{"http_header_name":"x-dynamo-worker"}]`, []string{"no cluster reads the header x-dynamo-worker-fallback"}},
		"a list":                      {`[` + fits + `,{"override_host_sources":[{"header":"x-dynamo-worker"},{"metadata":{}}]}]`, []string{"reads a list"}},
		"the same difference twice":   {`[{"request_body_buffer_limit":2048},{"request_body_buffer_limit":2048}]`, []string{"2048"}},
		"values of the wrong types":   {`[` + fits + `,{"@type":1,"http_header_name":[],"override_host_sources":{"header":2},"request_body_buffer_limit":"x"}]`, nil},
		"an Envoy without our filter": {`{}`, nil},
	} {
		t.Run(name, func(t *testing.T) {
			x := newWatched(t)
			x.dump = c.dump
			x.pass(t, 1, nothing)
			faults := x.State().Faults
			if len(faults) != min(1, len(c.want)) || len(faults) > 0 && faults[0].What != "settings" {
				t.Fatalf("the faults are %q, want texts with %q", faults, c.want)
			}
			for _, want := range c.want {
				if strings.Count(faults[0].Text, want) != 1 {
					t.Errorf("the fault is %q, want %q once", faults[0].Text, want)
				}
			}
			x.dump = fits
			x.pass(t, 5, nothing)
			if len(x.State().Faults) != len(faults) {
				t.Error("the configuration is read more than once a minute")
			}
			x.pass(t, 1, nothing)
			if left := x.State().Faults; len(left) > 0 {
				t.Errorf("after a mend there is %q", left)
			}
		})
	}
}

// A configuration that cannot be read is logged, and is no fault.
func TestSettingsThatCannotBeRead(t *testing.T) {
	for _, dump := range []string{"", "no JSON", strings.Repeat(" ", 17<<20)} {
		x := newWatched(t)
		x.dump = dump
		x.pass(t, 1, nothing)
		if faults := x.State().Faults; len(faults) > 0 || !strings.Contains(x.log.String(), "cannot be read, so it is not compared") {
			t.Errorf("faults %q, log %s", faults, x.log.String())
		}
	}
}

// fitting are the settings to which the tests compare.
func fitting() envoy.Settings {
	return envoy.Settings{DecisionTimeout: 1500 * time.Millisecond, LongestWait: 30 * time.Second, MaxBodyBytes: 1024, SecondChoice: "header"}
}

// answerDump answers a request for the configuration.
func (x *watched) answerDump(w http.ResponseWriter) {
	if x.dump == "" {
		http.Error(w, "no configuration", http.StatusNotFound)
		return
	}
	_, _ = w.Write([]byte(x.dump)) // the reader may have enough
}
