// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/datadriven"
	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// TestScripts plays the stories in testdata. A story is one client's, step by step;
// after each step stand what Envoy was told and what the router was asked.
func TestScripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("no scripts found: %v", err)
	}
	for _, file := range files {
		t.Run(filepath.Base(file), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &story{t: t}
				datadriven.RunTest(t, file, s.step)
			})
		})
	}
}

type story struct {
	t        *testing.T
	h        *harness
	x        *envoytest.Exchange
	observer *envoytest.Observer
}

func (s *story) step(t *testing.T, d *datadriven.TestData) string {
	if d.Cmd == "table" {
		return extproc.Table()
	}
	if d.Cmd == "server" || s.h == nil {
		s.h = newHarness(s.t, s.config(d))
		if d.Cmd == "server" {
			return ""
		}
	}
	var b strings.Builder
	switch d.Cmd {
	case "router":
		s.h.router.will(decides(t, d))
		return ""
	case "request":
		s.x = s.h.Do(request(t, d))
		printRequest(&b, s.x)
	case "respond":
		var status int
		typ := "text/event-stream"
		d.ScanArgs(t, "status", &status)
		d.MaybeScanArgs(t, "type", &typ)
		d.MaybeScanArgs(t, "from", &s.x.Upstream)
		d.MaybeScanArgs(t, "details", &s.x.Details)
		d.MaybeScanArgs(t, "attempts", &s.x.Attempts)
		headers := []string{"content-type", typ}
		if d.HasArg("retry-after") {
			var after string
			d.ScanArgs(t, "retry-after", &after)
			headers = append(headers, "retry-after", after)
		}
		printHeaders(&b, "response: ", s.x.Respond(status, headers...))
	case "respond-trailers":
		s.x.RespondTrailers()
	case "body-again":
		s.x.Stray(&extprocv3.ProcessingRequest{Request: &extprocv3.ProcessingRequest_RequestBody{RequestBody: &extprocv3.HttpBody{EndOfStream: true}}})
	case "observe":
		status, typ := 200, "text/event-stream"
		d.MaybeScanArgs(t, "status", &status)
		d.MaybeScanArgs(t, "type", &typ)
		s.observer = s.x.Observe()
		s.observer.Respond(status, "content-type", typ)
	case "chunk":
		text := strings.NewReplacer(`\n`, "\n", `\r`, "\r", "\n", "").Replace(d.Input)
		s.observer.Chunk([]byte(text), d.HasArg("last"))
	case "answer":
		fmt.Fprintf(&b, "back: %s\n", s.x.Answer(strings.Fields(d.Input)...))
	case "end":
		s.x.End()
	case "reset":
		s.x.Reset()
	case "drain":
		s.h.server.Drain()
	default:
		t.Fatalf("%s: unknown command %q", d.Pos, d.Cmd)
	}
	synctest.Wait()
	if s.observer != nil && s.observer.Ended() {
		fmt.Fprintln(&b, "observer ended")
		s.observer = nil
	}
	for _, c := range s.h.router.newCalls() {
		fmt.Fprintf(&b, "router: %s\n", c)
	}
	if n := s.h.count(s.t, "kvroute.extproc.strays"); n > 0 {
		fmt.Fprintf(&b, "strays so far: %d\n", n)
	}
	return b.String()
}

func (s *story) config(d *datadriven.TestData) (c extproc.Config) {
	c.SecondChoice = extproc.SecondNone
	if d.Cmd != "server" {
		return c
	}
	c.DecisionHeaders = d.HasArg("decision-headers")
	d.MaybeScanArgs(s.t, "first-token", &c.FirstToken)
	d.MaybeScanArgs(s.t, "max-body", &c.MaxBodyBytes)
	d.MaybeScanArgs(s.t, "overload", &c.OverloadStatus)
	d.MaybeScanArgs(s.t, "second", &c.SecondChoice)
	c.TrustOverrides, c.AllowDirect = d.HasArg("trust"), d.HasArg("direct")
	c.SessionHeaders = []string{"x-dynamo-session-id", "x-session-id"}
	return c
}

// decides reads what the router will do.
func decides(t *testing.T, d *datadriven.TestData) func(context.Context, router.Request) (router.Decision, error) {
	var name, after string
	d.MaybeScanArgs(t, "error", &name)
	d.MaybeScanArgs(t, "after", &after)
	delay, err := time.ParseDuration("0" + after)
	if err != nil {
		t.Fatalf("%s: %v", d.Pos, err)
	}
	if d.HasArg("panic") {
		return func(context.Context, router.Request) (router.Decision, error) { panic("a fault in the router") }
	}
	if d.HasArg("waits") {
		return func(ctx context.Context, req router.Request) (router.Decision, error) {
			req.Waiting(false)
			return admittedAfter(delay)(ctx, req)
		}
	}
	if name == "" {
		return nil
	}
	errs := map[string]error{
		"no-workers": router.ErrNoWorkers, "unknown-model": router.ErrUnknownModel, "duplicate": router.ErrDuplicate, "other": errOther,
		"all-busy": router.ErrAllBusy, "queue-full": router.ErrQueueFull, "too-late": router.ErrTooLate,
		"pin-missing": router.ErrPinMissing, "pin-unknown": router.ErrPinnedUnknown, "pin-not-allowed": router.ErrPinnedNotAllowed, "pin-busy": router.ErrPinnedBusy,
		"pin-unknown-direct": fmt.Errorf("%w: %w", router.ErrPinnedUnknown, router.ErrNoWorkers),
		"bad-override":       fmt.Errorf("%w: alpha is -1", router.ErrBadOverride),
	}
	if errs[name] == nil {
		t.Fatalf("%s: unknown error %q", d.Pos, name)
	}
	return errorAfter(delay, fmt.Errorf("router: model: %w", errs[name]))
}

// request reads a request: the command's input is its body.
func request(t *testing.T, d *datadriven.TestData) envoytest.Request {
	r := envoytest.Request{Path: "/v1/chat/completions", Body: []byte(d.Input), Trailers: d.HasArg("trailers")}
	d.MaybeScanArgs(t, "method", &r.Method)
	d.MaybeScanArgs(t, "path", &r.Path)
	if d.HasArg("no-body") {
		r.Body = nil
	}
	if a, ok := d.Arg("header"); ok {
		r.Header = a.Vals
	}
	var mode string
	if d.MaybeScanArgs(t, "mode", &mode) {
		r.Mode = filterv3.ProcessingMode_BodySendMode(filterv3.ProcessingMode_BodySendMode_value[mode])
		r.NoBodyMode = mode == "NONE"
	}
	r.Ahead = d.HasArg("ahead")
	d.MaybeScanArgs(t, "chunk", &r.Chunk)
	return r
}

func printRequest(b *strings.Builder, x *envoytest.Exchange) {
	if x.Patience > 0 {
		fmt.Fprintf(b, "Envoy waits for %v\n", x.Patience)
	}
	switch {
	case x.Refusal != nil:
		fmt.Fprintf(b, "refused: %d\n", x.Refusal.Status)
		printHeaders(b, "", x.Refusal.Header)
		fmt.Fprintln(b, x.Refusal.Body)
		return
	case x.Left:
		fmt.Fprintln(b, "Envoy goes on alone")
	case x.Rerouted:
		fmt.Fprintln(b, "routed anew")
	default:
		fmt.Fprintln(b, "routed as it is")
	}
	delete(x.Header, "content-length") // of every request with a body; the fake Envoy checks it
	printHeaders(b, "request: ", x.Header)
	if x.Body != nil {
		fmt.Fprintf(b, "body: %s\n", x.Body)
	}
}

var requestID = regexp.MustCompile(`^0000000000000abc-[0-9a-f]{32}$`)

func printHeaders(b *strings.Builder, prefix string, h map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(h)) {
		v := h[name]
		if requestID.MatchString(v) {
			v = "<id>"
		}
		fmt.Fprintf(b, "%s%s: %s\n", prefix, name, v)
	}
}
