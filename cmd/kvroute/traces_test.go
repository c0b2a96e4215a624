// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
)

// spanStore is the end of an OpenTelemetry pipeline: it receives OTLP over gRPC and keeps the spans.
type spanStore struct {
	mu    sync.Mutex
	spans []exportedSpan
}

type exportedSpan struct {
	service                             string
	Name, TraceID, SpanID, ParentSpanID string
	StartTimeUnixNano, EndTimeUnixNano  string
	Attributes                          []struct{ Key string }
}

// startSpanStore returns a store and its address.
func startSpanStore(t *testing.T) (*spanStore, string) {
	t.Helper()
	kind, err := protoregistry.GlobalTypes.FindMessageByName("opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest")
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	store := new(spanStore)
	s := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		m := kind.New().Interface()
		if err := s.RecvMsg(m); err != nil {
			return err
		}
		text, err := protojson.Marshal(m)
		if err != nil {
			return err
		}
		if err := store.add(text); err != nil {
			t.Error(err)
		}
		return s.SendMsg(&emptypb.Empty{})
	}))
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return store, l.Addr().String()
}

func (s *spanStore) add(text []byte) error {
	var request struct {
		ResourceSpans []struct {
			Resource struct {
				Attributes []struct {
					Key   string
					Value struct{ StringValue string }
				}
			}
			ScopeSpans []struct{ Spans []exportedSpan }
		}
	}
	if err := json.Unmarshal(text, &request); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range request.ResourceSpans {
		service := ""
		for _, a := range r.Resource.Attributes {
			if a.Key == "service.name" {
				service = a.Value.StringValue
			}
		}
		for _, scope := range r.ScopeSpans {
			for _, span := range scope.Spans {
				span.service = service
				for _, id := range []*string{&span.TraceID, &span.SpanID, &span.ParentSpanID} {
					raw, err := base64.StdEncoding.DecodeString(*id)
					if err != nil {
						return err
					}
					*id = hex.EncodeToString(raw)
				}
				s.spans = append(s.spans, span)
			}
		}
	}
	return nil
}

// trace returns the spans of a trace.
func (s *spanStore) trace(id string) (spans []exportedSpan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, span := range s.spans {
		if span.TraceID == id {
			spans = append(spans, span)
		}
	}
	return spans
}

// startCollector builds OpenTelemetry's collector and starts it. It sends on what it receives to an
// address. startCollector returns where it receives OTLP over gRPC and over HTTP.
func startCollector(t *testing.T, to string) (overGRPC, overHTTP string) {
	t.Helper()
	path, err := filepath.Abs("../../.cache/bin/otelcol")
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("go", "build", "-C", "../../tools/otelcol", "-o", path, ".").CombinedOutput(); err != nil {
		t.Fatalf("build OpenTelemetry's collector: %v\n%s", err, out)
	}
	var at [2]string
	for i := range at {
		port, release, err := process.HoldPort()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(release)
		at[i] = fmt.Sprint("127.0.0.1:", port)
	}
	config := fmt.Sprintf(`{receivers: {otlp: {protocols: {grpc: {endpoint: %q}, http: {endpoint: %q}}}}, exporters: {otlp: {endpoint: %q, tls: {insecure: true}}},
service: {telemetry: {metrics: {level: none}}, pipelines: {traces: {receivers: [otlp], exporters: [otlp]}}}}`, at[0], at[1], to)
	p, err := process.Start(t.TempDir(), "otelcol", exec.Command(path, "--config", "yaml:"+strings.ReplaceAll(config, "\n", " ")))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Stop)
	if err := p.Await(t.Context(), process.Patience, "it listens", func(context.Context) bool {
		for _, a := range at {
			c, err := net.DialTimeout("tcp", a, time.Second)
			if err != nil {
				return false
			}
			c.Close()
		}
		return true
	}); err != nil {
		t.Fatal(err)
	}
	return at[0], at[1]
}

// Envoy's spans, kvroute's and the workers' belong to one trace. KVROUTE_LONG sends them through a
// real collector of OpenTelemetry.
func TestSpansJoinThoseOfEnvoy(t *testing.T) {
	pipelines := []string{"direct"}
	if fixtures.Long() {
		pipelines = append(pipelines, "collector")
	}
	for _, pipeline := range pipelines {
		t.Run(pipeline, func(t *testing.T) {
			p := newSplitFleet(t)
			store, at := startSpanStore(t)
			t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+at)
			t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")
			t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
			p.EnvoyConfig.OTLP = at
			if pipeline == "collector" {
				overGRPC, overHTTP := startCollector(t, at)
				p.EnvoyConfig.OTLP = overGRPC
				t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+overHTTP)
				t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
			}
			var parents sync.Map // traceparent that each worker got, by its name
			for name, role := range map[string]string{"p": "prefill", "d": "decode"} {
				p.add(t, name, "role: "+role)
				before := p.does[name]
				p.computes(name, func(w http.ResponseWriter, r *http.Request) {
					parents.Store(name, r.Header.Get("Traceparent"))
					before(w, r)
				})
			}
			p.start(t)
			checkJoined(t, p, store, &parents)
			checkUnsampled(t, p, store)
		})
	}
}

// checkJoined sends a request whose trace is sampled, and compares its spans.
func checkJoined(t *testing.T, p *splitFleet, store *spanStore, parents *sync.Map) {
	t.Helper()
	const id, client = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
	if resp, body := reply(t, p.demonstration, "POST", chatPath, chatBody("hello", 7, true), http.Header{"Traceparent": {"00-" + id + "-" + client + "-01"}}); resp.StatusCode != 200 {
		t.Fatalf("status %d: %s", resp.StatusCode, body)
	}
	byID, byName := map[string]exportedSpan{}, map[string]exportedSpan{}
	eventually(t, "the spans of Envoy and kvroute arrive", func() bool {
		for _, s := range store.trace(id) {
			byID[s.SpanID], byName[s.service+": "+s.Name] = s, s
		}
		root := byName["kvroute: chat sim"]
		return byID[byID[root.ParentSpanID].ParentSpanID].service == "envoy" && byName["kvroute: prefill"].SpanID != ""
	})
	root := byName["kvroute: chat sim"]
	stream := byID[root.ParentSpanID]
	if envoys := byID[stream.ParentSpanID]; stream.service != "envoy" || envoys.ParentSpanID != client {
		t.Errorf("kvroute's span is below %+v, that below %+v, want Envoy's spans, below the client's", stream, envoys)
	}
	for _, name := range []string{"body", "tokenize", "match", "decide", "prefill"} {
		if s := byName["kvroute: "+name]; s.ParentSpanID != root.SpanID || s.StartTimeUnixNano < root.StartTimeUnixNano || s.EndTimeUnixNano > root.EndTimeUnixNano {
			t.Errorf("%s is %+v, want a child of %+v", name, s, root)
		}
	}
	for name, want := range map[string]string{"p": stream.SpanID, "d": stream.ParentSpanID} {
		if got, _ := parents.Load(name); got != "00-"+id+"-"+want+"-01" {
			t.Errorf("worker %s got the parent %v, want span %s", name, got, want)
		}
	}
}

// checkUnsampled sends a request whose trace is not sampled, and one after it that is.
func checkUnsampled(t *testing.T, p *splitFleet, store *spanStore) {
	t.Helper()
	const quiet, loud = "00000000000000000000000000000abc", "00000000000000000000000000000def"
	for _, parent := range []string{quiet + "-00f067aa0ba902b7-00", loud + "-00f067aa0ba902b7-01"} {
		reply(t, p.demonstration, "POST", chatPath, chatBody("hello", 7, true), http.Header{"Traceparent": {"00-" + parent}})
	}
	eventually(t, "the later request's spans arrive", func() bool { return len(store.trace(loud)) > 5 })
	if got := store.trace(quiet); len(got) > 0 {
		t.Errorf("spans of a trace that is not sampled: %+v", got)
	}
}

// A collector that does not answer delays neither requests nor the end of kvroute for long.
func TestACollectorThatHangs(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections, and does not read
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+l.Addr().String())
	t.Setenv("OTEL_BSP_MAX_QUEUE_SIZE", "50")
	d := startStack(t, 1, []string{"--speed", "100"})
	for i := range 30 {
		if resp, body := reply(t, d, "POST", chatPath, chatBody(fmt.Sprint("hello ", i), 1, false), nil); resp.StatusCode != 200 {
			t.Fatalf("status %d: %s", resp.StatusCode, body)
		}
	}
	eventually(t, "dropped spans are counted", func() bool {
		_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
		n := level(text, `kvroute_trace_spans_total{outcome="dropped"}`)
		return strings.Trim(n, "0") != ""
	})
	if err := d.Router.Cmd.Process.Signal(os.Interrupt); err != nil {
		t.Fatal(err)
	}
	if err := d.Router.Err(); err != nil { // waits for the end
		t.Error(err)
	}
	if text := d.Router.LastLines(); !strings.Contains(text, "the last spans were not exported") {
		t.Errorf("kvroute's log:\n%s", text)
	}
}
