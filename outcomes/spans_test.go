// SPDX-License-Identifier: Apache-2.0

package outcomes_test

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	semconv "go.opentelemetry.io/otel/semconv/v1.41.0"
	"go.opentelemetry.io/otel/trace"

	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

const (
	parentTrace = "0af7651916cd43dd8448eb211c80319c"
	parentSpan  = "b7ad6b7169203331"
	sampled     = "00-" + parentTrace + "-" + parentSpan + "-01"
	unsampled   = "00-" + parentTrace + "-" + parentSpan + "-00"
)

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// at returns a time after the beginning of the request.
func at(ms int) time.Time { return start.Add(time.Duration(ms) * time.Millisecond) }

// finished is a request of a split model with all steps.
func finished() *router.Outcome {
	o := &router.Outcome{
		Arrival:  router.Arrival{Began: at(0), BodyAt: at(10), TraceParent: sampled, TraceState: "a=b"},
		Answered: at(210), Status: 200, LegEnded: at(180),
		Decision: router.Decision{
			ID: "0001-7", Time: at(100), Model: "llama", Reason: router.ReasonKV, Worker: router.Worker{ID: 7, DPRank: 1}, WorkerName: "gpu-7",
			Address: netip.MustParseAddrPort("10.0.0.7:8000"), Labels: router.Labels{RequestID: "client-1", Operation: "chat"},
			PromptTokens: 100, PromptBlocks: 6, OverlapBlocks: 4, CachedTokens: 64, TokenMode: tokenizer.Exact, TextBytes: 400,
			TokenizeTime: 20 * time.Millisecond, HashTime: 5 * time.Millisecond, MatchTime: 5 * time.Millisecond,
			QueueTime: 50 * time.Millisecond, PickTime: time.Millisecond,
			FirstToken: at(220), FirstTokenBy: router.SignObserver, Freed: at(400),
			Usage: &router.Usage{PromptTokens: 101, CachedTokens: 48, OutputTokens: 9, Cached: true},
		},
	}
	o.Prefill = &router.Decision{Time: at(100), WorkerName: "gpu-1", Address: netip.MustParseAddrPort("10.0.0.1:8000"), OverlapBlocks: 2}
	return o
}

// record returns the spans of a request by name, the root span as "".
func record(t testing.TB, o *router.Outcome, options ...sdktrace.TracerProviderOption) map[string]sdktrace.ReadOnlySpan {
	t.Helper()
	r := tracetest.NewSpanRecorder()
	p := sdktrace.NewTracerProvider(append(options, sdktrace.WithSpanProcessor(r))...)
	outcomes.Trace(p.Tracer("test"), o)
	spans := map[string]sdktrace.ReadOnlySpan{}
	for _, s := range r.Ended() {
		name := s.Name()
		if s.SpanKind() == trace.SpanKindServer {
			name = ""
		}
		if spans[name] != nil {
			t.Errorf("two spans %q", name)
		}
		spans[name] = s
	}
	if len(r.Started()) != len(r.Ended()) {
		t.Error("a span has not ended")
	}
	return spans
}

func attributes(s sdktrace.ReadOnlySpan) map[attribute.Key]any {
	all := map[attribute.Key]any{}
	for _, a := range s.Attributes() {
		all[a.Key] = a.Value.AsInterface()
	}
	return all
}

func TestSpansOfARequest(t *testing.T) {
	spans := record(t, finished())
	root := spans[""]
	if root == nil || root.Name() != "chat llama" || root.Parent().SpanID().String() != parentSpan || root.SpanContext().TraceID().String() != parentTrace ||
		!root.Parent().IsRemote() || root.SpanContext().TraceState().String() != "a=b" {
		t.Fatalf("root %+v", root)
	}
	want := map[string][2]time.Time{
		"": {at(0), at(400)}, "body": {at(0), at(10)}, "tokenize": {at(20), at(40)}, "match": {at(40), at(50)}, "queue": {at(50), at(100)},
		"decide": {at(100), at(101)}, "prefill": {at(100), at(180)}, "first token": {at(100), at(220)},
	}
	got := map[string][2]time.Time{}
	for name, s := range spans {
		got[name] = [2]time.Time{s.StartTime(), s.EndTime()}
		if name != "" && (s.Parent().SpanID() != root.SpanContext().SpanID() || s.SpanContext().TraceID() != root.SpanContext().TraceID()) {
			t.Errorf("%s is not a child of the request's span", name)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(map[attribute.Key]any{
		semconv.GenAIRequestModelKey:              "llama",
		semconv.GenAIOperationNameKey:             semconv.GenAIOperationNameChat.Value.AsString(),
		semconv.GenAIUsageInputTokensKey:          int64(101),
		semconv.GenAIUsageOutputTokensKey:         int64(9),
		semconv.GenAIUsageCacheReadInputTokensKey: int64(48),
		semconv.HTTPResponseStatusCodeKey:         int64(200),
		"http.request.header.x-request-id":        []string{"client-1"},
		"kvroute.request.id":                      "0001-7",
		"kvroute.worker.name":                     "gpu-7",
		"kvroute.worker.address":                  "10.0.0.7:8000",
		"kvroute.worker.rank":                     int64(1),
		"kvroute.overlap_blocks":                  int64(4),
		"kvroute.cached_tokens":                   int64(64),
		"kvroute.prompt_tokens":                   int64(100),
		"kvroute.reason":                          "kv",
	}, attributes(root)); diff != "" {
		t.Error(diff)
	}
	if got := attributes(spans["prefill"])["kvroute.worker.name"]; got != "gpu-1" {
		t.Errorf("the prefill leg's worker is %v", got)
	}
}

// Steps without a duration, or whose times are unknown, have no span. The request's span covers all
// others.
func TestMissingTimes(t *testing.T) {
	o := finished()
	o.Began, o.BodyAt, o.Answered, o.QueueTime, o.Prefill = time.Time{}, time.Time{}, time.Time{}, 0, nil
	o.FirstToken, o.FirstTokenBy = at(300), router.SignEnd // the first token came at some time before
	spans := record(t, o)
	if len(spans) != 4 || spans["tokenize"] == nil || spans["match"] == nil || spans["decide"] == nil {
		t.Errorf("spans %v", spans)
	}
	if got := spans[""].StartTime(); got != at(70) {
		t.Errorf("begins at %v, want the begin of the decision", got)
	}
	o.Freed = time.Time{}
	if got := record(t, o)[""].EndTime(); got != at(101) {
		t.Errorf("ends at %v, want the end of the decision", got)
	}
	o = finished()
	o.Began = at(30) // a clock that was set back
	for name, s := range record(t, o) {
		if root := record(t, o)[""]; s.StartTime().Before(root.StartTime()) || s.EndTime().After(root.EndTime()) || s.EndTime().Before(s.StartTime()) {
			t.Errorf("%q: %v to %v", name, s.StartTime(), s.EndTime())
		}
	}
}

func TestErrors(t *testing.T) {
	for _, c := range []struct {
		status    int
		abandoned bool
		want      any
		failed    bool
	}{
		{200, false, nil, false}, {0, false, nil, false}, {404, false, "404", false}, {500, false, "500", true}, {503, true, "503", true}, {0, true, "no_response", true},
	} {
		o := finished()
		o.Status, o.Abandoned = c.status, c.abandoned
		root := record(t, o)[""]
		if got := attributes(root)[semconv.ErrorTypeKey]; got != c.want || (root.Status().Code == codes.Error) != c.failed {
			t.Errorf("%+v: error.type %v and %v", c, got, root.Status())
		}
	}
}

// The parent decides on sampling, and the configured sampler on requests without a parent.
func TestSampling(t *testing.T) {
	for _, c := range []struct {
		parent, sampler string
		want            bool
	}{
		{sampled, "", true},
		{unsampled, "", false},
		{"", "", true},
		{"", "parentbased_always_off", false},
		{sampled, "parentbased_always_off", true},
		{sampled, "always_off", false},
		{unsampled, "always_on", true},
	} {
		t.Setenv("OTEL_TRACES_SAMPLER", c.sampler)
		o := finished()
		o.TraceParent = c.parent
		if got := len(record(t, o)) > 0; got != c.want {
			t.Errorf("parent %q, sampler %q: sampled is %v", c.parent, c.sampler, got)
		}
	}
}

// hostile are values of traceparent that name no parent.
var hostile = []string{
	"00", "-", "00-", "00---", "01", strings.Repeat("0", 55), strings.Repeat("-", 55),
	sampled + ",", sampled + "," + sampled, sampled + " ", " " + sampled, sampled + "-00", sampled + "\x00", sampled + "\r\nx: y",
	"ff" + sampled[2:], "0g" + sampled[2:], "00-" + strings.ToUpper(parentTrace) + "-" + parentSpan + "-01",
	"00-00000000000000000000000000000000-" + parentSpan + "-01", "00-" + parentTrace + "-0000000000000000-01",
	"00-" + parentTrace + "-" + parentSpan, "00-" + parentTrace + "-" + parentSpan + "-", "00-" + parentTrace + "-" + parentSpan + "-zz",
	"00-" + parentTrace[1:] + "-" + parentSpan + "-01", "00-" + parentTrace + parentSpan + "-01", "00_" + parentTrace + "_" + parentSpan + "_01",
	"\xff\xfe", "٠٠-" + parentTrace + "-" + parentSpan + "-01", strings.Repeat("9", 1<<20),
}

func TestForgedParents(t *testing.T) {
	for _, value := range hostile {
		o := finished()
		o.TraceParent = value
		root := record(t, o)[""]
		if root == nil || root.Parent().IsValid() {
			t.Errorf("%.80q: %+v", value, root)
		}
	}
	// A broken tracestate is ignored, and its traceparent is used.
	for _, value := range []string{"\x00", "a", "=", "a=b,a=c", strings.Repeat("a=b,", 1000), strings.Repeat("x", 1<<20)} {
		o := finished()
		o.TraceState = value
		if root := record(t, o)[""]; root.Parent().SpanID().String() != parentSpan || root.SpanContext().TraceState().Len() > 0 {
			t.Errorf("%.80q: state %q", value, root.SpanContext().TraceState())
		}
	}
	// A later version may have more fields.
	o := finished()
	o.TraceParent = "01" + sampled[2:] + "-more"
	if root := record(t, o)[""]; root.Parent().SpanID().String() != parentSpan {
		t.Error("the parent of a later version is not used")
	}
}

func FuzzTrace(f *testing.F) {
	for _, value := range append(slices.Clone(hostile[:len(hostile)-1]), sampled) {
		f.Add(value, "a=b", "llama", "id", "client", int64(5), int64(-5))
	}
	f.Fuzz(func(t *testing.T, parent, state, model, id, client string, first, freed int64) {
		o := finished()
		o.TraceParent, o.TraceState, o.Model, o.ID, o.Labels.RequestID = parent, state, model, id, client
		o.WorkerName, o.FirstToken, o.Freed = model, start.Add(time.Duration(first)), start.Add(time.Duration(freed))
		spans := record(t, o, sdktrace.WithSampler(sdktrace.AlwaysSample()))
		root := spans[""]
		if root == nil {
			t.Fatal("no span")
		}
		if p := root.Parent(); p.IsValid() && !strings.Contains(strings.ToLower(parent), p.SpanID().String()) {
			t.Errorf("parent %v of %q", p, parent)
		}
		for name, s := range spans {
			if s.StartTime().Before(root.StartTime()) || s.EndTime().After(root.EndTime()) || s.EndTime().Before(s.StartTime()) {
				t.Errorf("%q: %v to %v", name, s.StartTime(), s.EndTime())
			}
			if !utf8.ValidString(s.Name()) {
				t.Errorf("name %q", s.Name())
			}
			for _, a := range s.Attributes() {
				if !utf8.ValidString(a.Value.String()) {
					t.Errorf("%s is %q", a.Key, a.Value.String())
				}
			}
		}
	})
}

func BenchmarkTrace(b *testing.B) {
	for name, parent := range map[string]string{"sampled": sampled, "unsampled": unsampled} {
		b.Run(name, func(b *testing.B) {
			p := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(drop{}))
			tracer := p.Tracer("test")
			o := finished()
			o.TraceParent = parent
			b.ReportAllocs()
			for b.Loop() {
				outcomes.Trace(tracer, o)
			}
		})
	}
}

// drop is a processor that drops all spans.
type drop struct{ sdktrace.SpanProcessor }

func (drop) OnStart(context.Context, sdktrace.ReadWriteSpan) {}
func (drop) OnEnd(sdktrace.ReadOnlySpan)                     {}
