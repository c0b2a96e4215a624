// SPDX-License-Identifier: Apache-2.0

package envoy_test

import (
	"bytes"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"flag"
	"fmt"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	bootstrapv3 "github.com/envoyproxy/go-control-plane/envoy/config/bootstrap/v3"
	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/config/trace/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/filters/cel/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/access_loggers/grpc/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/clusters/composite/v3"
	matchingv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/matching/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/common/matcher/action/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/cors/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/header_mutation/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/lua/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/router/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/set_filter_state/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/upstream_codec/v3"
	hcmv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/network/http_connection_manager/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/http/early_header_mutation/header_mutation/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/least_request/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/override_host/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/round_robin/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/load_balancing_policies/subset/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/downstream_connections/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/resource_monitors/fixed_heap/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/retry/host/previous_hosts/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/transport_sockets/tls/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/extensions/upstreams/http/v3"
	_ "github.com/envoyproxy/go-control-plane/envoy/type/matcher/v3"
	"github.com/goccy/go-yaml"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
)

var update = flag.Bool("update", false, "write the golden file")

var configs = map[string]envoy.Config{
	"default":           {ExtProc: []string{"127.0.0.1:9002"}, Pool: []string{"127.0.0.1:8001", "127.0.0.1:8002"}},
	"no pool":           {ExtProc: []string{"127.0.0.1:9002"}},
	"names":             {ExtProc: []string{"kvroute-1:9002", "kvroute-2:9002"}, Pool: []string{"worker-1.example:8000"}},
	"socket":            {ExtProc: []string{"unix:/run/kvroute.sock"}, Pool: []string{"[::1]:8001"}},
	"a list of choices": {ExtProc: []string{"127.0.0.1:9002"}, Pool: []string{"127.0.0.1:8001"}, Failover: envoy.List},
	"a list in a file":  {ExtProc: []string{"127.0.0.1:9002"}, PoolFile: "/run/kvroute/pool.json", Failover: envoy.List},
	"a file":            {ExtProc: []string{"127.0.0.1:9002"}, PoolFile: "/run/kvroute/pool.json"},
	"TLS":               {ExtProc: []string{"127.0.0.1:9002"}, CA: "/etc/ca.pem", ServerName: "kvroute.internal"},
	"TLS everywhere": {
		ExtProc: []string{"127.0.0.1:9002"}, CA: "/etc/ca.pem", ListenCert: "/etc/cert.pem", ListenKey: "/etc/key.pem",
		WorkerCA: "/etc/ca.pem", WorkerName: "worker.internal", WorkerHTTP2: true,
	},
	"TLS to a list": {ExtProc: []string{"127.0.0.1:9002"}, Pool: []string{"127.0.0.1:8001"}, Failover: envoy.List, WorkerCA: "/etc/ca.pem"},
	"full duplex":   {ExtProc: []string{"127.0.0.1:9002"}, BodyMode: envoy.FullDuplex},
	"HTTP/2":        {ExtProc: []string{"127.0.0.1:9002"}, Pool: []string{"127.0.0.1:8001"}, WorkerHTTP2: true},
	"traces":        {ExtProc: []string{"127.0.0.1:9002"}, Pool: []string{"127.0.0.1:8001"}, OTLP: "collector:4317"},
	"status":        {ExtProc: []string{"127.0.0.1:9002"}, StatusAddress: "0.0.0.0:9904"},
	"no silence":    {ExtProc: []string{"127.0.0.1:9002"}, NoSilenceTimeout: true},
	"long silence":  {ExtProc: []string{"127.0.0.1:9002"}, SilenceTimeout: 24 * time.Hour},
	"one choice":    {ExtProc: []string{"127.0.0.1:9002"}, Failover: envoy.NoFailover},
	"everything else": {
		ListenAddress: "0.0.0.0:0", AdminAddress: "[::1]:0", ExtProc: []string{"[fd00::1]:1"}, Pool: []string{"10.0.0.1:65535"},
		AllowPaths: []string{"/health", "/v1/audio/*"}, MaxHeapBytes: 1 << 30, MaxConnections: 9,
		MaxBodyBytes: 1 << 20, MessageTimeout: 250 * time.Millisecond, MaxMessageTimeout: time.Second, NoObserver: true,
	},
}

func render(t *testing.T, c envoy.Config) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := envoy.Render(&out, c); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// Each bootstrap consists of valid messages of Envoy, including every extension.
func TestBootstrapsAreValidMessages(t *testing.T) {
	for name, c := range configs {
		t.Run(name, func(t *testing.T) {
			b := parse(t, render(t, c))
			if err := b.ValidateAll(); err != nil {
				t.Error(err)
			}
			extensions := 0
			eachAny(b.ProtoReflect(), func(a *anypb.Any) {
				extensions++
				m, err := a.UnmarshalNew()
				if err != nil {
					t.Fatal(err)
				}
				if v, ok := m.(interface{ ValidateAll() error }); ok {
					if err := v.ValidateAll(); err != nil {
						t.Errorf("%s: %v", a.GetTypeUrl(), err)
					}
				}
			})
			if extensions < 8 {
				t.Errorf("%d extensions were looked at, want all", extensions)
			}
		})
	}
}

func parse(t *testing.T, text []byte) *bootstrapv3.Bootstrap {
	t.Helper()
	// Anchors are resolved by decoding into plain values first.
	return asBootstrap(t, plain(t, text))
}

func asBootstrap(t *testing.T, plain map[string]any) *bootstrapv3.Bootstrap {
	t.Helper()
	asJSON, err := yaml.MarshalWithOptions(plain, yaml.JSON())
	if err != nil {
		t.Fatal(err)
	}
	b := &bootstrapv3.Bootstrap{}
	if err := protojson.Unmarshal(asJSON, b); err != nil {
		t.Fatalf("%v\n%s", err, asJSON)
	}
	return b
}

// All listeners, and the connections to all clusters, have the limit of the silence of other machines.
func TestSilenceHasALimit(t *testing.T) {
	limit := func(options []*corev3.SocketOption) string {
		var text strings.Builder
		for _, o := range options {
			fmt.Fprint(&text, o.GetLevel(), "/", o.GetName(), "=", o.GetIntValue(), " ")
		}
		return text.String()
	}
	for silence, want := range map[time.Duration]string{
		0:               "1/9=1 6/4=10 6/5=5 6/18=30000 ",
		2 * time.Second: "1/9=1 6/4=1 6/5=1 6/18=2000 ",
	} {
		b := parse(t, render(t, envoy.Config{ExtProc: []string{"127.0.0.1:9002"}, OTLP: "collector:4317", SilenceTimeout: silence}))
		for where, options := range map[string][]*corev3.SocketOption{
			"clusters": b.GetClusterManager().GetUpstreamBindConfig().GetSocketOptions(),
			"admin":    b.GetAdmin().GetSocketOptions(),
			"listener": b.GetStaticResources().GetListeners()[0].GetSocketOptions(),
		} {
			if got := limit(options); got != want {
				t.Errorf("%v, %s: %s, want %s", silence, where, got, want)
			}
		}
		for _, c := range b.GetStaticResources().GetClusters() {
			if c.GetUpstreamBindConfig() != nil {
				t.Errorf("the cluster %s replaces the options of all clusters", c.GetName())
			}
		}
	}
	if text := render(t, configs["no silence"]); bytes.Contains(text, []byte("socket_options")) {
		t.Error("no-silence-timeout leaves socket options in the bootstrap")
	}
}

// eachAny calls visit for each packed message, and for the messages packed in it.
func eachAny(m protoreflect.Message, visit func(*anypb.Any)) {
	if a, ok := m.Interface().(*anypb.Any); ok {
		visit(a)
		if inner, err := a.UnmarshalNew(); err == nil {
			eachAny(inner.ProtoReflect(), visit)
		}
		return
	}
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case f.IsMap():
			if f.MapValue().Message() != nil {
				v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool {
					eachAny(v.Message(), visit)
					return true
				})
			}
		case f.Message() == nil:
		case f.IsList():
			for i := range v.List().Len() {
				eachAny(v.List().Get(i).Message(), visit)
			}
		default:
			eachAny(v.Message(), visit)
		}
		return true
	})
}

// The bootstrap has the settings that kvroute's use of Envoy depends on.
func TestContract(t *testing.T) {
	b := parse(t, render(t, configs["default"]))
	hcm := &hcmv3.HttpConnectionManager{}
	if err := b.GetStaticResources().GetListeners()[0].GetFilterChains()[0].GetFilters()[0].GetTypedConfig().UnmarshalTo(hcm); err != nil {
		t.Fatal(err)
	}
	host := hcm.GetRouteConfig().GetVirtualHosts()[0]
	if got := host.GetRequestBodyBufferLimit().GetValue(); got != 16<<20 {
		t.Errorf("the body limit is %d", got)
	}
	var clusters []string
	for _, r := range host.GetRoutes() {
		if r.GetDirectResponse() != nil {
			continue
		}
		if r.GetRoute().GetTimeout().AsDuration() != 0 || r.GetRoute().GetTimeout() == nil {
			t.Errorf("the route to %s has a timeout", r.GetRoute().GetCluster())
		}
		clusters = append(clusters, r.GetRoute().GetCluster())
	}
	if diff := cmp.Diff([]string{"workers", "workers-apart", "workers", "workers-apart", "workers", "workers-apart", "pool"}, clusters); diff != "" {
		t.Errorf("routes (-want +got):\n%s", diff)
	}
	var filters []string
	for _, f := range hcm.GetHttpFilters() {
		filters = append(filters, f.GetName())
	}
	if diff := cmp.Diff([]string{"client-id", "kvroute", "kvroute-observer", "envoy.filters.http.router"}, filters); diff != "" {
		t.Errorf("filters (-want +got):\n%s", diff)
	}
	if n := len(hcm.GetEarlyHeaderMutationExtensions()); n != 1 {
		t.Errorf("%d early header mutations: clients could name workers", n)
	}
	if diff := cmp.Diff(openai.Hints, host.GetRoutes()[7].GetRequestHeadersToRemove()); diff != "" {
		t.Errorf("hints (-list +the pool's route):\n%s", diff)
	}
	filter := &extprocv3.ExternalProcessor{}
	matched := &matchingv3.ExtensionWithMatcher{}
	if err := errors.Join(hcm.GetHttpFilters()[1].GetTypedConfig().UnmarshalTo(matched), matched.GetExtensionConfig().GetTypedConfig().UnmarshalTo(filter)); err != nil {
		t.Fatal(err)
	}
	may := regexp.MustCompile("^(" + filter.GetMutationRules().GetAllowExpression().GetRegex() + ")$")
	for _, name := range envoytest.SteeringHeaders {
		if !may.MatchString(name) {
			t.Errorf("kvroute may not remove %s", name)
		}
	}
	again := parse(t, render(t, configs["default"]))
	if !proto.Equal(b, again) {
		t.Error("the same settings give different messages")
	}
}

func TestGolden(t *testing.T) {
	got := render(t, configs["default"])
	if *update {
		if err := os.WriteFile("testdata/default.yaml", got, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile("testdata/default.yaml")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("go test ./envoy -update accepts this (-want +got):\n%s", diff)
	}
}

func TestRefusedSettings(t *testing.T) {
	ok := []string{"127.0.0.1:1"}
	for want, c := range map[string]envoy.Config{
		`listen is "localhost:80"`:                     {ListenAddress: "localhost:80", ExtProc: ok},
		`admin is "x"`:                                 {AdminAddress: "x", ExtProc: ok},
		`status is "0.0.0.0:0"`:                        {StatusAddress: "0.0.0.0:0", ExtProc: ok},
		`status needs a port in admin`:                 {StatusAddress: "0.0.0.0:1", AdminAddress: "[::1]:0", ExtProc: ok},
		"extproc is empty":                             {},
		`extproc[0] is "a"`:                            {ExtProc: []string{"a"}},
		`extproc[1] is "unix:/x"`:                      {ExtProc: []string{"a:1", "unix:/x"}},
		`extproc[0] is "unix:/a b"`:                    {ExtProc: []string{"unix:/a b"}},
		`pool[1] is "b:0"`:                             {ExtProc: ok, Pool: []string{"a:1", "b:0"}},
		`pool[0] is "a:99999"`:                         {ExtProc: ok, Pool: []string{"a:99999"}},
		`pool[0] is "a\": {x: y}, b: \"c:1"`:           {ExtProc: ok, Pool: []string{`a": {x: y}, b: "c:1`}},
		`pool[0] is "a\nb:1"`:                          {ExtProc: ok, Pool: []string{"a\nb:1"}},
		`pool[0] is "{{.}}:1"`:                         {ExtProc: ok, Pool: []string{"{{.}}:1"}},
		`failover is "b"`:                              {ExtProc: ok, Failover: "b"},
		"failover is list, which needs":                {ExtProc: ok, Failover: envoy.List},
		`extproc-ca is "a.pem"`:                        {ExtProc: ok, CA: "a.pem"},
		"extproc-cert and extproc-key need each other": {ExtProc: ok, CA: "/a.pem", Cert: "/b.pem"},
		"extproc-cert, extproc-key and extproc-name need extproc-ca": {ExtProc: ok, ServerName: "a"},
		`extproc-name is "a b"`:                      {ExtProc: ok, CA: "/a.pem", ServerName: "a b"},
		"tls-cert and tls-key need each":             {ExtProc: ok, ListenKey: "/b.pem"},
		`tls-cert is "a.pem"`:                        {ExtProc: ok, ListenCert: "a.pem", ListenKey: "/b.pem"},
		"worker-tls-name needs worker-tls-ca":        {ExtProc: ok, WorkerName: "a"},
		`worker-tls-name is "a\nb"`:                  {ExtProc: ok, WorkerCA: "/a.pem", WorkerName: "a\nb"},
		`worker-tls-ca is "a.pem"`:                   {ExtProc: ok, WorkerCA: "a.pem"},
		`otlp is "collector"`:                        {ExtProc: ok, OTLP: "collector"},
		`pool-file is "a.json"`:                      {ExtProc: ok, PoolFile: "a.json"},
		"pool and pool-file are both given":          {ExtProc: ok, PoolFile: "/a.json", Pool: ok},
		"max-body-bytes is -1":                       {ExtProc: ok, MaxBodyBytes: -1},
		`allow-path[1] is "/a|/b"`:                   {ExtProc: ok, AllowPaths: []string{"/a", "/a|/b"}},
		`session-header[0] is "x-dynamo-worker"`:     {ExtProc: ok, SessionHeaders: []string{"x-dynamo-worker"}},
		`session-header[1] is "x-prefiller-url"`:     {ExtProc: ok, SessionHeaders: []string{"x-dynamo-team", "x-prefiller-url"}},
		`session-header[0] is "x-dynamo-dp-rank"`:    {ExtProc: ok, SessionHeaders: []string{"x-dynamo-dp-rank"}},
		`session-header[0] is "x-dynamo-request-id"`: {ExtProc: ok, SessionHeaders: []string{"x-dynamo-request-id"}},
		`allow-path[0] is "a"`:                       {ExtProc: ok, AllowPaths: []string{"a"}},
		"max-heap-bytes is -1":                       {ExtProc: ok, MaxHeapBytes: -1},
		"max-connections is -1":                      {ExtProc: ok, MaxConnections: -1},
		"message-timeout is -1s":                     {ExtProc: ok, MessageTimeout: -time.Second},
		"request-timeout is 1ms, want a second":      {ExtProc: ok, RequestTimeout: time.Millisecond},
		"idle-timeout is -1s, want a second":         {ExtProc: ok, IdleTimeout: -time.Second},
		"silence-timeout is 1ms, want 1s to 24h":     {ExtProc: ok, SilenceTimeout: time.Millisecond},
		"silence-timeout is 25h0m0s, want 1s":        {ExtProc: ok, SilenceTimeout: 25 * time.Hour},
		"max-message-timeout is 1s, want at least":   {ExtProc: ok, MaxMessageTimeout: time.Second},
	} {
		var out bytes.Buffer
		if err := envoy.Render(&out, c); err == nil || !strings.Contains(err.Error(), want) || out.Len() > 0 {
			t.Errorf("error %v with %d bytes written, want %q and none", err, out.Len(), want)
		}
	}
}

// Envoy accepts the bootstraps.
func TestEnvoyValidates(t *testing.T) {
	if testing.Short() {
		t.Skip("starts a real Envoy")
	}
	path, err := envoytest.Find()
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range configs {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			file := filepath.Join(dir, "envoy.yaml")
			server := httptest.NewTLSServer(nil) // any certificate and key
			defer server.Close()
			key, err := x509.MarshalPKCS8PrivateKey(server.TLS.Certificates[0].PrivateKey)
			if err != nil {
				t.Fatal(err)
			}
			for setting, block := range map[*string]pem.Block{
				&c.CA: {Type: "CERTIFICATE", Bytes: server.Certificate().Raw}, &c.WorkerCA: {Type: "CERTIFICATE", Bytes: server.Certificate().Raw},
				&c.ListenCert: {Type: "CERTIFICATE", Bytes: server.Certificate().Raw}, &c.ListenKey: {Type: "PRIVATE KEY", Bytes: key},
			} {
				if *setting != "" {
					*setting = filepath.Join(dir, filepath.Base(*setting))
					if err := os.WriteFile(*setting, pem.EncodeToMemory(&block), 0o600); err != nil {
						t.Fatal(err)
					}
				}
			}
			if c.PoolFile != "" { // Envoy requires that the file exists
				c.PoolFile = filepath.Join(dir, "pool.json")
				if err := os.WriteFile(c.PoolFile, envoy.Endpoints("1", []netip.AddrPort{netip.MustParseAddrPort("[::1]:1")}, []netip.AddrPort{netip.MustParseAddrPort("[::1]:2")}), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if err := os.WriteFile(file, render(t, c), 0o600); err != nil {
				t.Fatal(err)
			}
			if out, err := exec.CommandContext(t.Context(), path, "--mode", "validate", "-c", file).CombinedOutput(); err != nil {
				t.Errorf("%v\n%s", err, out)
			}
		})
	}
	t.Run("a mistake is one", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "envoy.yaml")
		text := strings.Replace(string(render(t, configs["default"])), "cluster: workers", "cluster: nowhere", 1)
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if exec.CommandContext(t.Context(), path, "--mode", "validate", "-c", file).Run() == nil {
			t.Error("Envoy accepts a route to a cluster that does not exist")
		}
	})
}

// Envoy waits as long as kvroute's own waits take together.
func TestEnvoyWaitsForKvroutesSettings(t *testing.T) {
	for want, c := range map[string]envoy.Config{
		"max_message_timeout: 60s":    {},
		"max_message_timeout: 130.5s": {QueueWait: 10 * time.Second, PrefillTimeout: 2 * time.Minute},
	} {
		c.ExtProc = []string{"127.0.0.1:9002"}
		var out strings.Builder
		if err := envoy.Render(&out, c); err != nil || !strings.Contains(out.String(), want) {
			t.Errorf("%+v: %v, want %s", c, err, want)
		}
	}
}
