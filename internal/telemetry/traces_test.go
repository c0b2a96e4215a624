// SPDX-License-Identifier: Apache-2.0

package telemetry_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/telemetry"
)

// patience is how long a test waits for something that should happen soon.
const patience = time.Minute

// collector is an OpenTelemetry collector in memory.
type collector struct {
	got chan export
	// block, if not nil, holds responses back until it is closed.
	block chan struct{}
	fail  bool // refuse everything
}

// export is a request of an exporter.
type export struct {
	Headers       map[string]string
	ResourceSpans []struct {
		Resource   struct{ Attributes []attr }
		ScopeSpans []struct {
			Scope struct{ Name string }
			Spans []struct {
				Name, TraceID, SpanID, ParentSpanID, TraceState string
			}
		}
	}
}

type attr struct {
	Key   string
	Value struct{ StringValue string }
}

func newCollector() *collector { return &collector{got: make(chan export, 100)} }

// message returns an empty request of an exporter. The exporters link its type.
func message(t *testing.T) proto.Message {
	kind, err := protoregistry.GlobalTypes.FindMessageByName("opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest")
	if err != nil {
		t.Error(err)
		return &emptypb.Empty{}
	}
	return kind.New().Interface()
}

// handle handles a request.
func (c *collector) handle(ctx context.Context, m proto.Message, header map[string]string) error {
	text, err := protojson.Marshal(m)
	if err != nil {
		return err
	}
	e := export{Headers: header}
	if err := json.Unmarshal(text, &e); err != nil {
		return err
	}
	select {
	case c.got <- e:
	default:
	}
	if c.block != nil {
		select {
		case <-c.block:
		case <-ctx.Done():
		}
	}
	if c.fail {
		return errors.New("refused " + strings.Repeat("x", 10_000))
	}
	return nil
}

// http returns the endpoint of the collector over HTTP.
func (c *collector) http(t *testing.T) string {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		m := message(t)
		if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, m) != nil {
			http.Error(w, "no request", http.StatusNotFound)
			return
		}
		if err := c.handle(r.Context(), m, map[string]string{"x-key": r.Header.Get("X-Key"), "type": r.Header.Get("Content-Type")}); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
		}
	}))
	t.Cleanup(s.Close)
	return s.URL
}

// grpc returns the endpoint of the collector over gRPC.
func (c *collector) grpc(t *testing.T) string {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := grpc.NewServer(grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
		m := message(t)
		if err := s.RecvMsg(m); err != nil {
			return err
		}
		md, _ := metadata.FromIncomingContext(s.Context())
		if method, _ := grpc.MethodFromServerStream(s); method != "/opentelemetry.proto.collector.trace.v1.TraceService/Export" {
			t.Errorf("method %s", method)
		}
		if err := c.handle(s.Context(), m, map[string]string{"x-key": strings.Join(md["x-key"], ","), "type": "grpc"}); err != nil {
			return err
		}
		return s.SendMsg(&emptypb.Empty{})
	}))
	go s.Serve(l)
	t.Cleanup(s.Stop)
	return "http://" + l.Addr().String()
}

// counts are the outcomes of spans.
type counts struct {
	mu sync.Mutex
	by map[string]int
}

func (c *counts) add(n int, outcome ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.by == nil {
		c.by = map[string]int{}
	}
	c.by[outcome[0]] += n
}

func (c *counts) get() map[string]int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return maps.Clone(c.by)
}

func setenv(t *testing.T, env map[string]string) {
	t.Helper()
	for _, name := range []string{"OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_PROTOCOL", "OTEL_SDK_DISABLED"} {
		t.Setenv(name, "")
	}
	for name, value := range env {
		t.Setenv(name, value)
	}
}

func newTraces(t *testing.T, env map[string]string) (*telemetry.Traces, *counts, *fixtures.Log) {
	t.Helper()
	setenv(t, env)
	var spans counts
	var out fixtures.Log
	traces, err := telemetry.NewTraces(t.Context(), slog.New(slog.NewTextHandler(&out, nil)), spans.add)
	if err != nil || traces == nil {
		t.Fatal(traces, err)
	}
	return traces, &spans, &out
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("did not happen")
		}
	}
}

func TestSpansReachCollectors(t *testing.T) {
	for _, protocol := range []string{"grpc", "http/protobuf", ""} {
		t.Run(protocol, func(t *testing.T) {
			c := newCollector()
			env := map[string]string{"OTEL_EXPORTER_OTLP_PROTOCOL": protocol, "OTEL_EXPORTER_OTLP_HEADERS": "x-key=secret"}
			want := "application/x-protobuf"
			if protocol == "grpc" {
				env["OTEL_EXPORTER_OTLP_ENDPOINT"], want = c.grpc(t), "grpc"
			} else {
				env["OTEL_EXPORTER_OTLP_ENDPOINT"] = c.http(t)
			}
			env["OTEL_RESOURCE_ATTRIBUTES"] = "deployment.environment.name=test,broken"
			traces, spans, out := newTraces(t, env)
			_, span := traces.Tracer("x").Start(t.Context(), "a span")
			span.End()
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			if err := traces.Shutdown(ctx); err != nil {
				t.Fatal(err)
			}
			e := <-c.got
			rs := e.ResourceSpans[0]
			if s := rs.ScopeSpans[0]; s.Scope.Name != "x" || s.Spans[0].Name != "a span" || e.Headers["x-key"] != "secret" || e.Headers["type"] != want {
				t.Errorf("got %+v", e)
			}
			of := map[string]string{}
			for _, a := range rs.Resource.Attributes {
				of[a.Key] = a.Value.StringValue
			}
			if of["service.name"] != "kvroute" || of["deployment.environment.name"] != "test" || of["service.version"] == "" {
				t.Errorf("resource %v", of)
			}
			if got := spans.get(); len(got) != 1 || got["exported"] != 1 || out.String() != "" {
				t.Errorf("counted %v, logged %s", got, out)
			}
		})
	}
}

func TestTracesAreOffUnlessWanted(t *testing.T) {
	for _, c := range []struct {
		env map[string]string
		on  bool
		err string
	}{
		{map[string]string{}, false, ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "none", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, false, ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "True"}, false, ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "otlp"}, true, ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}, true, ""},
		{map[string]string{"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:1"}, true, ""},
		{map[string]string{"OTEL_TRACES_EXPORTER": "zipkin"}, false, "OTEL_TRACES_EXPORTER"},
		{map[string]string{"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_PROTOCOL": "thrift"}, false, "thrift"},
	} {
		t.Run(fmt.Sprint(c.env), func(t *testing.T) {
			setenv(t, c.env)
			traces, err := telemetry.NewTraces(t.Context(), slog.New(slog.DiscardHandler), func(int, ...string) {})
			if (traces != nil) != c.on || (err != nil) != (c.err != "") || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("got %v, %v", traces, err)
			}
			if traces != nil {
				if err := traces.Shutdown(t.Context()); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

// A collector that refuses spans, hangs or is away costs spans, not time: no caller waits, every
// span is counted, and a shutdown gives up at its deadline.
func TestDeadCollectors(t *testing.T) {
	closed := httptest.NewServer(nil)
	closed.Close()
	hangs := newCollector()
	hangs.block = make(chan struct{})
	t.Cleanup(func() { close(hangs.block) }) // before the servers are closed
	refuses := newCollector()
	refuses.fail = true
	for name, env := range map[string]map[string]string{
		"hangs, gRPC":   {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": hangs.grpc(t)},
		"hangs, HTTP":   {"OTEL_EXPORTER_OTLP_ENDPOINT": hangs.http(t)},
		"refuses, gRPC": {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": refuses.grpc(t)},
		"refuses, HTTP": {"OTEL_EXPORTER_OTLP_ENDPOINT": refuses.http(t)},
		"away, gRPC":    {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": closed.URL},
		"away, HTTP":    {"OTEL_EXPORTER_OTLP_ENDPOINT": closed.URL},
	} {
		t.Run(name, func(t *testing.T) {
			env["OTEL_BSP_MAX_QUEUE_SIZE"], env["OTEL_BSP_MAX_EXPORT_BATCH_SIZE"] = "100", "10"
			traces, spans, out := newTraces(t, env)
			tracer := traces.Tracer("x")
			const made = 5000
			for range made {
				_, span := tracer.Start(t.Context(), "a span")
				span.End()
			}
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			_ = traces.Shutdown(ctx) // an error says that the time is over
			eventually(t, func() bool {
				got := spans.get()
				return got["exported"] == 0 && got["dropped"]+got["failed"] == made && got["failed"] > 0
			})
			if got := spans.get(); strings.HasPrefix(name, "hangs") && got["failed"] > 100 {
				t.Errorf("%v: more than the queue holds were exported", got)
			}
			if n := strings.Count(out.String(), "level=WARN"); n != 1 || len(out.String()) > 1000 {
				t.Errorf("%d warnings: %s", n, out)
			}
		})
	}
}

func TestAFailureIsLoggedOnceAndItsEndToo(t *testing.T) {
	c := newCollector()
	c.fail = true
	traces, spans, out := newTraces(t, map[string]string{"OTEL_EXPORTER_OTLP_ENDPOINT": c.http(t), "OTEL_BSP_SCHEDULE_DELAY": "1"})
	send := func() {
		_, span := traces.Tracer("x").Start(t.Context(), "a span")
		span.End()
	}
	send()
	eventually(t, func() bool { return spans.get()["failed"] == 1 })
	send()
	eventually(t, func() bool { return spans.get()["failed"] == 2 })
	eventually(t, func() bool { return strings.Count(out.String(), "level=WARN") == 1 })
	c.fail = false // no request is under way
	send()
	eventually(t, func() bool { return spans.get()["exported"] == 1 && strings.Contains(out.String(), "exported again") })
	if err := traces.Shutdown(t.Context()); err != nil {
		t.Error(err)
	}
	if n := strings.Count(out.String(), "\n"); n != 2 {
		t.Errorf("logged %s", out)
	}
}

func TestServiceName(t *testing.T) {
	for env, want := range map[string]string{"": `service_name="kvroute"`, "mine": `service_name="mine"`} {
		t.Setenv("OTEL_SERVICE_NAME", env)
		m, err := telemetry.NewMetrics()
		if err != nil {
			t.Fatal(err)
		}
		w := httptest.NewRecorder()
		m.Handler().ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), "GET", "/metrics", nil))
		if !strings.Contains(w.Body.String(), want) || !strings.Contains(w.Body.String(), "target_info{") {
			t.Errorf("no %s in %s", want, w.Body)
		}
		if err := m.Shutdown(t.Context()); err != nil {
			t.Error(err)
		}
	}
}

// Spans go to the configured collector only, also if it redirects.
func TestSpansFollowNoRedirect(t *testing.T) {
	reached := make(chan string, 10)
	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { reached <- r.Method }))
	t.Cleanup(other.Close)
	asked := make(chan struct{}, 10)
	collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
	}))
	t.Cleanup(collector.Close)
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.URL)
	failed := make(chan int, 10)
	traces, err := telemetry.NewTraces(t.Context(), slog.New(slog.DiscardHandler), func(n int, outcome ...string) {
		if outcome[0] == "failed" {
			failed <- n
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	_, span := traces.Tracer("a").Start(t.Context(), "a")
	span.End()
	_ = traces.Shutdown(t.Context())
	<-asked
	if n := <-failed; n != 1 {
		t.Errorf("%d spans failed", n)
	}
	select {
	case method := <-reached:
		t.Errorf("another host got a %s", method)
	default:
	}
}
