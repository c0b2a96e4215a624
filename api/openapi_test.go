// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"context"
	"encoding"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"maps"
	"mime"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// sources returns the syntax trees of a package, without tests.
func sources(t *testing.T, dir string) (files []*ast.File) {
	t.Helper()
	names, err := filepath.Glob(dir + "/*.go")
	if err != nil || len(names) == 0 {
		t.Fatalf("%s has no files: %v", dir, err)
	}
	for _, name := range names {
		if strings.HasSuffix(name, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	return files
}

// firstArguments returns the string literals that are the first arguments of calls of a method.
func firstArguments(t *testing.T, files []*ast.File, method *regexp.Regexp) map[string]bool {
	t.Helper()
	found := map[string]bool{}
	for _, f := range files {
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) == 0 {
				return true
			}
			selector, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || !method.MatchString(selector.Sel.Name) {
				return true
			}
			literal, ok := call.Args[0].(*ast.BasicLit)
			if !ok || literal.Kind != token.STRING {
				return true
			}
			text, err := strconv.Unquote(literal.Value)
			if err != nil {
				t.Fatal(err)
			}
			found[text] = true
			return true
		})
	}
	return found
}

// The file has exactly the server's routes and query parameters.
func TestOpenAPIRoutes(t *testing.T) {
	s, files := readSpec(t), sources(t, ".")
	served := firstArguments(t, files, regexp.MustCompile(`^Handle(Func)?$`))
	// withPage serves these without a pattern.
	served["GET /"], served["GET /dashboard/{name}"] = true, true
	documented, parameters := map[string]bool{}, map[string]bool{}
	ids := map[string]bool{}
	for path := range s.at("paths") {
		for method := range s.at("paths", path) {
			if method == "parameters" {
				continue
			}
			documented[strings.ToUpper(method)+" "+path] = true
			op := s.at("paths", path, method)
			id, _ := op["operationId"].(string)
			if summary, _ := op["summary"].(string); id == "" || ids[id] || summary == "" || strings.HasSuffix(summary, ".") {
				t.Errorf("%s %s needs an operationId of its own, and a summary without a full stop at its end", method, path)
			}
			ids[id] = true
			for _, p := range slices.Concat(anyList(op["parameters"]), anyList(s.at("paths", path)["parameters"])) {
				if p := s.resolve(p.(map[string]any)); p["in"] == "query" {
					parameters[p["name"].(string)] = true
				} else if !strings.Contains(path, "{"+p["name"].(string)+"}") {
					t.Errorf("%s has no parameter %v", path, p["name"])
				}
			}
		}
	}
	if diff := cmp.Diff(served, documented); diff != "" {
		t.Errorf("served (-) and documented (+) routes differ:\n%s", diff)
	}
	if diff := cmp.Diff(firstArguments(t, files, regexp.MustCompile(`^FormValue$`)), parameters); diff != "" {
		t.Errorf("read (-) and documented (+) query parameters differ:\n%s", diff)
	}
}

func anyList(v any) []any {
	l, _ := v.([]any)
	return l
}

// bodies are values of the types of bodies, by the names of their schemas.
func bodies() map[string]any {
	all := map[string]any{
		"Readiness": api.Readiness{}, "Replica": api.Replica{}, "Pod": router.Pod{}, "PodSource": pods.State{}, "Peer": replicas.PeerView{}, "Envoy": envoy.State{}, "EnvoyFault": envoy.Fault{},
		"Model": router.ModelState{}, "Worker": api.Worker{}, "ForeignLoad": router.Foreign{}, "Audit": router.AuditState{}, "GroupSummary": router.SummaryState{},
		"Decision": api.Decision{}, "Rank": router.Worker{}, "Labels": router.Labels{}, "SecondChoice": router.Second{}, "Source": router.Source{}, "Candidate": api.Candidate{}, "Usage": router.Usage{},
		"CostSettings": scorer.Settings{}, "EngineModel": scorer.Engine{}, "Thresholds": scorer.Thresholds{}, "Override": scorer.Override{},
		"RequestClass": confirm.ClassState{}, "ClassWorker": confirm.WorkerState{},
		"Totals": outcomes.Totals{}, "Sample": outcomes.Sample{}, "Benefit": outcomes.Benefit{}, "Holdout": outcomes.Holdout{}, "Comparison": outcomes.Comparison{},
		"Times": outcomes.Times{}, "Bucket": outcomes.Bucket{}, "WorkerCharts": outcomes.Charts{}, "WorkerChart": outcomes.Chart{}, "Series": outcomes.Series{},
		"AttentionItem": attention.Item{}, "AttentionEvent": attention.Event{}, "Prefix": router.Prefix{},
		"PotentialLoad": router.PotentialLoad{}, "WorkerFault": router.Fault{}, "EventSource": fleet.Events{}, "Probe": fleet.Probe{},
	}
	maps.Copy(all, api.Bodies)
	return all
}

// requests are the schemas of bodies that clients send: no field is there because of its Go type.
var requests = map[string]bool{"RoutingRequest": true, "Override": true, "Booking": true, "ThresholdsChange": true, "WorkerRecord": true, "EventSource": true, "Probe": true, "Heartbeat": true}

// Every field of the Go types is in the schemas, with its type and whether it is always there, and vice versa.
func TestOpenAPIFields(t *testing.T) {
	s := readSpec(t)
	names := map[reflect.Type]string{}
	for name, v := range bodies() {
		names[reflect.TypeOf(v)] = name
	}
	for name, v := range bodies() {
		schema := s.at("components", "schemas", name)
		if schema == nil {
			t.Errorf("there is no schema %s", name)
			continue
		}
		if schema["additionalProperties"] != false || schema["type"] != "object" {
			t.Errorf("%s: want type object, and additionalProperties false", name)
		}
		properties, _ := schema["properties"].(map[string]any)
		required := list(schema["required"])
		seen := map[string]bool{}
		for _, f := range fields(reflect.TypeOf(v)) {
			field, options, _ := strings.Cut(f.Tag.Get("json"), ",")
			seen[field] = true
			property, ok := properties[field].(map[string]any)
			if !ok {
				t.Errorf("%s lacks the field %q", name, field)
				continue
			}
			if always := !strings.Contains(options, "omit"); !requests[name] && always != slices.Contains(required, field) {
				t.Errorf("%s.%s: always there: %v, required: %v", name, field, always, !always)
			}
			for _, fault := range compare(s, property, f.Type, names) {
				t.Errorf("%s.%s %s", name, field, fault)
			}
		}
		for field := range properties {
			if !seen[field] {
				t.Errorf("%s has the field %q, which its Go type does not have", name, field)
			}
		}
	}
}

// fields returns the JSON fields of a struct, and those of its embedded structs unless the struct has a field of the
// same name.
func fields(of reflect.Type) (all []reflect.StructField) {
	name := func(f reflect.StructField) string {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		return name
	}
	for f := range of.Fields() {
		if f.IsExported() && f.Tag.Get("json") != "-" && !(f.Anonymous && f.Tag.Get("json") == "") {
			all = append(all, f)
		}
	}
	for f := range of.Fields() {
		if !f.Anonymous || f.Tag.Get("json") != "" {
			continue
		}
		of, optional := f.Type, f.Type.Kind() == reflect.Pointer
		if optional {
			of = of.Elem()
		}
		for _, inner := range fields(of) {
			if optional { // without the struct its fields are absent
				inner.Tag = reflect.StructTag(fmt.Sprintf(`json:"%s,omitempty"`, name(inner)))
			}
			if !slices.ContainsFunc(all, func(f reflect.StructField) bool { return name(f) == name(inner) }) {
				all = append(all, inner)
			}
		}
	}
	return all
}

// compare returns what differs between a schema and a Go type.
func compare(s spec, schema map[string]any, of reflect.Type, names map[reflect.Type]string) (faults []string) {
	if of.Kind() == reflect.Pointer {
		of = of.Elem()
	}
	if name := names[of]; name != "" {
		// Two bodies may have one type.
		if ref, _ := schema["$ref"].(string); ref != "#/components/schemas/"+name {
			faults = append(faults, fmt.Sprintf("is %q, want the schema %s", ref, name))
		}
		return faults
	}
	schema = s.resolve(schema)
	var want string
	switch {
	case of == reflect.TypeFor[json.RawMessage](), of.Kind() == reflect.Interface:
		if schema["type"] != nil {
			return []string{"has a type, want any"}
		}
		return nil
	case of.Implements(reflect.TypeFor[encoding.TextMarshaler]()), of.Kind() == reflect.String:
		want = "string"
	case of == reflect.TypeFor[outcomes.Points](): // numbers, and null for one that is unknown
		want = "array"
	case of.Implements(reflect.TypeFor[json.Marshaler]()):
		return []string{"has a form of its own: " + of.String()}
	case of.Kind() == reflect.Bool:
		want = "boolean"
	case of.Kind() == reflect.Float64:
		want = "number"
	case of.Kind() == reflect.Slice:
		want = "array"
		items, _ := schema["items"].(map[string]any)
		faults = compare(s, items, of.Elem(), names)
	case of.Kind() == reflect.Map:
		want = "object"
		values, _ := schema["additionalProperties"].(map[string]any)
		faults = compare(s, values, of.Elem(), names)
	default:
		want = "integer"
	}
	if types := list(schema["type"]); !slices.Contains(types, want) {
		faults = append(faults, fmt.Sprintf("is of type %v, want %s", types, want))
	}
	return faults
}

// Enumerations have all constants of their Go types.
func TestOpenAPIEnumerations(t *testing.T) {
	s := readSpec(t)
	values := map[string]string{} // of constants that other constants are made of
	constants := map[string][]string{}
	for _, dir := range []string{"../scorer", "../slots", "../tokenizer", "../indexer", "../router"} {
		for _, f := range sources(t, dir) {
			ast.Inspect(f, func(n ast.Node) bool {
				c, ok := n.(*ast.ValueSpec)
				if !ok || len(c.Names) != len(c.Values) {
					return true
				}
				value := ""
				switch v := c.Values[0].(type) {
				case *ast.BasicLit:
					value, _ = strconv.Unquote(v.Value) // an error: it is no string
				case *ast.SelectorExpr:
					value = values[v.Sel.Name]
				}
				values[c.Names[0].Name] = value
				if typ, ok := c.Type.(*ast.Ident); ok && value != "" {
					of := filepath.Base(dir) + "." + typ.Name
					constants[of] = append(constants[of], value)
				}
				return true
			})
		}
	}
	enum := func(keys ...string) []string {
		return list(s.at(append([]string{"components", "schemas"}, keys...)...)["enum"])
	}
	for of, got := range map[string][]string{
		"router.Reason": enum("Decision", "properties", "reason"), "router.Mode": enum("Decision", "properties", "mode"),
		"router.Sign": enum("Decision", "properties", "first_token_by"), "router.NoLeg": enum("Decision", "properties", "no_prefill"),
		"router.Exclusion": enum("Candidate", "properties", "excluded"), "router.Role": enum("Role"),
		"router.EventsLevel": enum("Worker", "properties", "kv_events_level"),
		"indexer.State":      enum("Worker", "properties", "kv_events"),
		"scorer.Policy":      enum("CostName"), "tokenizer.Mode": enum("TokenMode"),
	} {
		want := slices.Sorted(slices.Values(constants[of]))
		slices.Sort(got)
		if len(want) < 3 || !slices.Equal(got, want) {
			t.Errorf("%s: the file has %q, the code %q", of, got, want)
		}
	}
	for _, x := range constants["router.Exclusion"] {
		if router.Exclusion(x).Text() == x {
			t.Errorf("the verdict %s has no text", x)
		}
	}
	for _, x := range constants["router.NoLeg"] {
		if router.NoLeg(x).Text() == x {
			t.Errorf("the reason %s for no prefill leg has no text", x)
		}
	}
	for _, x := range constants["router.Sign"] {
		d := router.Decision{FirstTokenBy: router.Sign(x), FirstToken: time.Unix(1, 0)}
		if d.FirstTokenText() == "" {
			t.Errorf("the source %s of a first token has no text", x)
		}
	}
	if diff := cmp.Diff(enum("CostName"), list(s.at("components", "schemas", "Override", "properties", "cost")["enum"])); diff != "" {
		t.Errorf("costs of an override: %s", diff)
	}
}

// caller sends requests and compares the answers with the file.
type caller struct {
	t    *testing.T
	spec spec
	seen map[string]bool // "METHOD path status content-type"
}

// do sends a request, checks the answer, and returns its body. A body of a request with status 2xx
// must fit its schema, too.
func (c *caller) do(h http.Handler, method, path, body string, status int, headers ...string) string {
	c.t.Helper()
	req := httptest.NewRequestWithContext(c.t.Context(), method, path, strings.NewReader(body))
	return c.send(h, req, body, status, headers...)
}

func (c *caller) send(h http.Handler, req *http.Request, body string, status int, headers ...string) string {
	c.t.Helper()
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	for pair := range slices.Chunk(headers, 2) {
		req.Header.Set(pair[0], pair[1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	where := req.Method + " " + req.URL.Path
	if w.Code != status {
		c.t.Errorf("%s %s: status %d, want %d: %.300s", where, body, w.Code, status, w.Body)
		return w.Body.String()
	}
	template := c.template(req.URL.Path)
	op := c.spec.at("paths", template, strings.ToLower(req.Method))
	if op == nil {
		c.t.Errorf("%s: the file has no such operation", where)
		return w.Body.String()
	}
	if status/100 == 2 && op["requestBody"] != nil {
		schema := c.spec.at("paths", template, strings.ToLower(req.Method), "requestBody", "content", "application/json", "schema")
		for _, fault := range c.spec.check(schema, decode(c.t, body), "the request's body") {
			c.t.Errorf("%s %s: %s", where, body, fault)
		}
	}
	listed := strconv.Itoa(status)
	responses, _ := op["responses"].(map[string]any)
	if responses[listed] == nil && status >= 400 {
		listed = "default"
	}
	response, ok := responses[listed].(map[string]any)
	if !ok {
		c.t.Errorf("%s: the file does not have the status %d", where, status)
		return w.Body.String()
	}
	kind, _, err := mime.ParseMediaType(w.Header().Get("Content-Type"))
	content, _ := c.spec.resolve(response)["content"].(map[string]any)
	of, ok := content[kind].(map[string]any)
	if err != nil || !ok {
		c.t.Errorf("%s: the file does not have the content type %q of status %d", where, kind, status)
		return w.Body.String()
	}
	c.seen[fmt.Sprint(req.Method, " ", template, " ", listed, " ", kind)] = true
	if kind == "application/json" {
		schema, _ := of["schema"].(map[string]any)
		for _, fault := range c.spec.check(schema, decode(c.t, w.Body.String()), "the body") {
			c.t.Errorf("%s %s: %s", where, body, fault)
		}
	}
	return w.Body.String()
}

// template returns the path of the file that a path belongs to.
func (c *caller) template(path string) string {
	best := path
	for t := range c.spec.at("paths") {
		pattern := regexp.MustCompile(`\\\{[a-z]+\\\}`).ReplaceAllString(regexp.QuoteMeta(t), `[^/]+`)
		if regexp.MustCompile("^" + pattern + "$").MatchString(path) {
			best = t
		}
	}
	return best
}

// Real answers have a status and a content type of the file, and fit their schemas. Every answer
// that the file promises is seen.
func TestOpenAPIAnswers(t *testing.T) {
	c := &caller{t, readSpec(t), map[string]bool{}}
	metrics := http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
		_, _ = io.WriteString(w, "up 1\n")
	})
	handler := func(r *router.Router, set ...func(*api.Config)) http.Handler {
		conf := api.Config{Router: r, Metrics: metrics, Scope: "n/c/e", Replica: func() api.Replica { return api.Replica{Settings: map[string]any{}} }}
		for _, f := range set {
			f(&conf)
		}
		return api.New(conf)
	}

	c.rich(handler)
	c.refusals(handler)
	c.generate(handler)
	c.registrations(handler)
	c.dumps(handler)
	c.live(handler)

	c.files(handler(newRouter(t, 0)))

	promised := map[string]bool{}
	for path := range c.spec.at("paths") {
		for method := range c.spec.at("paths", path) {
			for status := range c.spec.at("paths", path, method, "responses") {
				for kind := range c.spec.at("paths", path, method, "responses", status)["content"].(map[string]any) {
					promised[strings.ToUpper(method)+" "+path+" "+status+" "+kind] = true
				}
			}
		}
	}
	if diff := cmp.Diff(promised, c.seen); diff != "" {
		t.Errorf("promised (-) and seen (+) answers differ:\n%s", diff)
	}
}

type handlerOf = func(*router.Router, ...func(*api.Config)) http.Handler

// rich reads answers that have as many fields as possible.
func (c *caller) rich(handler handlerOf) {
	c.t.Helper()
	r := newRouter(c.t, 2)
	for _, w := range []router.WorkerInfo{
		{ID: 7, Name: "p", Role: router.Prefill, Models: []string{"split"}, BlockSize: 4, Engine: "sglang", Bootstrap: "10.0.0.7:8998", Address: netip.MustParseAddrPort("10.0.0.7:8000")},
		{ID: 8, Name: "d", Role: router.Decode, Models: []string{"split"}, BlockSize: 4, Engine: "sglang", Address: netip.MustParseAddrPort("10.0.0.8:8000")},
		{
			ID: 9, Name: "full", Models: []string{"m"}, LoRA: []string{"a"}, BlockSize: 4, DPSize: 2, TotalKVBlocks: 1000, MaxNumSeqs: 8, MaxBatchedTokens: 64, GPUType: "H100", PrefillThroughput: 5, Taints: []string{"x"},
			CPU: true, Reorders: true, Engine: "vllm", Draining: true, Events: router.EventSource{Transport: "zmq", Endpoint: "tcp://*:5557", Replay: "tcp://*:5657"}, EventsUnsure: true, Address: netip.MustParseAddrPort("10.0.0.9:8000"),
		},
		{ID: 10, Name: "east", Group: "east", Members: 3, Models: []string{"g"}, BlockSize: 4, Address: netip.MustParseAddrPort("10.1.0.1:80")},
	} {
		if err := r.SetWorker(w); err != nil {
			c.t.Fatal(err)
		}
	}
	if !r.SetSummary(10, router.Summary{Model: "g", BlockSize: 4, Taken: time.Now(), Healthy: 3, ActiveRequests: 4, Queued: 1}) {
		c.t.Fatal("the group is unknown")
	}
	h := handler(r, func(conf *api.Config) {
		conf.Replica = func() api.Replica {
			return api.Replica{
				RouterID: 1 << 63, Replica: "r", Version: "v", StartedMS: 1, Bus: true, Synced: true, Peers: []replicas.PeerView{{RouterID: 2, Replica: "s", Whole: true}},
				Envoy:    &envoy.State{URL: "http://127.0.0.1:9901", Read: time.Now(), Counts: map[string]uint64{"x": 1}, Faults: []envoy.Fault{{What: "unused", Text: "x"}}},
				Settings: map[string]any{"a": 1, "b": []string{"x"}},
			}
		}
		o := newOutcomes(c.t)
		o.finish(1)
		conf.Outcomes, conf.Holdout, conf.Docs, conf.Attention = o.Recorder, .1, attention.DocsOf("v1.0.0"), attention.NewLog(attention.DocsOf("v1.0.0"))
		conf.Prefixes = func() any { return r.HotPrefixes() }
	})
	const ids = `"token_ids":[1,2,3,4,5,6,7,8]`
	c.do(h, "POST", "/v1/best_worker", `{"model":"split","request_id":"s",`+ids+`}`, 200)
	c.do(h, "POST", "/v1/best_worker", `{"model":"g","request_id":"g",`+ids+`,"explain":true}`, 200)
	for i := range 3 {
		c.do(h, "POST", "/v1/best_worker", fmt.Sprintf(`{"model":"m","request_id":"a%d",%s,"explain":true,"preferred_taints":{"x":1},"session_id":"s","priority":1.5,"router_config_override":{"cost":"dynamo","router_temperature":0.5}}`, i, ids), 200)
	}
	r.ReportUsage("a0", router.Usage{PromptTokens: 8, OutputTokens: 1, CachedTokens: 4, Cached: true})
	for path, body := range map[string]string{
		"/v1/mark_prefill_complete": `{"request_id":"a0"}`, "/v1/add_output_tokens": `{"request_id":"a0","tokens":3}`, "/v1/free": `{"request_id":"a0"}`,
	} {
		c.do(h, "POST", path, body, 200)
		c.do(h, "POST", path, `{}`, 400)
	}
	c.do(h, "POST", "/v1/best_worker", `{"model":"m","prompt":"text","allowed_worker_ids":[1]}`, 200)
	c.do(h, "POST", "/v1/best_worker", `{"model":"m","messages":[{"role":"user","content":"x"}],"tools":null,"worker_id":1,"dp_rank":0}`, 200)
	c.do(h, "POST", "/v1/potential_loads", `{"model":"m",`+ids+`}`, 200)
	c.do(h, "POST", "/busy_threshold", `{"model":"m","active_decode_blocks_threshold":0.85,"active_prefill_tokens_threshold":null}`, 200)
	c.do(h, "POST", "/busy_threshold", `{"model":"m","active_decode_blocks_threshold":1.85}`, 400)
	c.do(h, "POST", "/busy_threshold", `{"model":"x"}`, 404)
	for _, path := range []string{
		"/healthz", "/readyz", "/metrics", "/v1/replica", "/v1/models", "/v1/workers", "/v1/decisions?id=a0", "/v1/decisions?id=s", "/v1/decisions?id=g",
		"/v1/decisions", "/v1/decisions?limit=1", "/v1/live", "/v1/history", "/v1/history?span=24h&model=m", "/openapi.yaml", "/busy_threshold",
	} {
		c.do(h, "GET", path, "", 200)
	}
	c.do(h, "GET", "/v1/decisions?id=none", "", 404)
	c.do(h, "GET", "/v1/decisions?limit=0", "", 400)
	c.do(h, "GET", "/v1/history?span=1d", "", 400)
	c.do(h, "GET", "/v1/history?model=none", "", 404)
	c.do(handler(newRouter(c.t, 0)), "GET", "/readyz", "", 503)
}

// refusals reads the errors of routing, and those that every call has in common.
func (c *caller) refusals(handler handlerOf) {
	c.t.Helper()
	one := newRouter(c.t, 1)
	h := handler(one)
	c.do(h, "POST", "/v1/best_worker", `{"model":"m","request_id":"taken","token_ids":[1]}`, 200)
	late := handler(slowRouter(c.t), func(conf *api.Config) { conf.DecisionTimeout = time.Nanosecond })
	busy := newRouter(c.t, 1)
	full := handler(busy)
	c.do(full, "POST", "/busy_threshold", `{"model":"m","active_prefill_tokens_threshold":1}`, 200)
	c.do(full, "POST", "/v1/best_worker", `{"model":"m","request_id":"a","token_ids":[1,2,3,4,5]}`, 200)
	for _, path := range []string{"/v1/best_worker", "/v1/generate", "/v1/potential_loads"} {
		c.do(h, "POST", path, `{"model":"m","request_id":"x"}`, 400)
		c.do(h, "POST", path, `{"model":"x","request_id":"x","token_ids":[1]}`, 404)
		c.do(late, "POST", path, `{"model":"m","request_id":"x","prompt":"`+strings.Repeat("a word ", 1<<20)+`"}`, 503)
		if path == "/v1/potential_loads" {
			continue // it books nothing
		}
		c.do(h, "POST", path, `{"model":"m","request_id":"taken","token_ids":[1]}`, 409)
		c.do(full, "POST", path, `{"model":"m","request_id":"b","token_ids":[1]}`, 429)
	}
	// Without a token each call is refused. The probes, the metrics and the page need none.
	file := filepath.Join(c.t.TempDir(), "tokens")
	if err := os.WriteFile(file, []byte("0123456789abcdef\n"), 0o600); err != nil {
		c.t.Fatal(err)
	}
	tokens, err := api.OpenTokens(file)
	if err != nil {
		c.t.Fatal(err)
	}
	registry, err := fleet.NewRegistry(nil, fleet.RegistryConfig{})
	if err != nil {
		c.t.Fatal(err)
	}
	guarded := handler(one, func(conf *api.Config) { conf.Tokens, conf.Fleet = tokens, registry })
	for path := range c.spec.at("paths") {
		for method := range c.spec.at("paths", path) {
			op := c.spec.at("paths", path, method)
			if open, said := op["security"]; method == "parameters" || said && len(anyList(open)) == 0 {
				continue
			}
			method, url := strings.ToUpper(method), strings.ReplaceAll(path, "{id}", "w")
			c.do(guarded, method, url, "", 401)
			if method != http.MethodPost {
				continue
			}
			c.do(guarded, method, url, "x", 415, "Content-Type", "text/plain", "Authorization", "Bearer 0123456789abcdef")
			c.do(guarded, method, url, "{}", 403, "Sec-Fetch-Site", "cross-site", "Authorization", "Bearer 0123456789abcdef")
			if op["requestBody"] != nil {
				c.do(guarded, method, url, `{"colour":"red"}`, 400, "Authorization", "Bearer 0123456789abcdef")
			}
		}
	}
	c.do(h, "POST", "/v1/free", `{"request_id":"`+strings.Repeat("x", 65<<20)+`"}`, 413)
}

// generate reads the answers of /v1/generate that depend on the worker.
func (c *caller) generate(handler handlerOf) {
	c.t.Helper()
	for status, want := range map[int]int{200: 200, 422: 422, 500: 502} {
		r := newRouter(c.t, 0)
		engine(c.t, r, func(w http.ResponseWriter, _ *http.Request) {
			if status != 200 {
				w.WriteHeader(status)
				_, _ = io.WriteString(w, `{"error":{"message":"no"}}`)
				return
			}
			_, _ = io.WriteString(w, "data: [DONE]\n\n")
		})
		c.do(handler(r), "POST", "/v1/generate", `{"model":"m","request_id":"g","token_ids":[1],"body":{"max_tokens":3}}`, want)
	}
}

// registrations reads the answers of the calls for workers without NATS.
func (c *caller) registrations(handler handlerOf) {
	c.t.Helper()
	nats := natstest.Start(c.t, 0)
	r := newRouter(c.t, 0)
	var later atomic.Int64 // of the registry's clock
	registry, err := fleet.NewRegistry(natstest.Connect(c.t, nats), fleet.RegistryConfig{
		Set: func(i router.WorkerInfo) {
			if err := r.SetWorker(i); err != nil {
				c.t.Error(err)
			}
		},
		Remove: func(id uint64) { r.RemoveWorker(id) },
		Now:    func() time.Time { return time.Now().Add(time.Duration(later.Load())) },
	})
	if err != nil {
		c.t.Fatal(err)
	}
	natstest.Run(c.t, registry.Run)
	natstest.Eventually(c.t, registry.Ready)
	if err := registry.SetStatic([]fleet.Record{{Name: "static", Address: "10.0.0.1:8000", Models: []string{"m"}}}); err != nil {
		c.t.Fatal(err)
	}
	h := handler(r, func(conf *api.Config) { conf.Fleet = registry })
	record := func(name string) string {
		return `{"v":1,"name":"` + name + `","address":"10.0.0.2:8000","models":["m"],"role":"both","block_size":16,"events":{"transport":"none"},"decode_throughput":8000,"health":{"path":"/health","interval":"1s"},"taints":["x"],"started_ms":1}`
	}
	c.do(h, "POST", "/v1/workers", record("w"), 201)
	c.do(h, "POST", "/v1/workers", `{"name":"x","address":"nowhere","models":["m"]}`, 400)
	c.do(h, "POST", "/v1/workers", record("static"), 409)
	c.do(h, "POST", "/v1/workers/w/heartbeat", `{"batch_size":1,"waiting":0,"kv_cache_util":0.5,"kv_used_blocks":2,"ts_ms":1,"cached_prefixes":{"00000000000000ff":512}}`, 200)
	c.do(h, "POST", "/v1/workers/none/heartbeat", `{}`, 404)
	c.do(h, "DELETE", "/v1/workers/none", "", 404)
	c.do(h, "DELETE", "/v1/workers/static", "", 409)
	c.do(h, "GET", "/v1/workers", "", 200)
	c.do(h, "DELETE", "/v1/workers/w", "", 200)
	c.do(h, "GET", "/v1/workers", "", 200) // lists the worker that left
	c.do(h, "POST", "/v1/workers", record("w"), 201)
	nats.Shutdown()
	nats.WaitForShutdown()
	later.Store(int64(20 * time.Second)) // the heartbeat has to put the record again
	c.away(h, "POST", "/v1/workers", record("v"))
	c.away(h, "POST", "/v1/workers/w/heartbeat", `{}`)
	c.away(h, "DELETE", "/v1/workers/w", "")
}

// away sends a request without a bus.
func (c *caller) away(h http.Handler, method, path, body string) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 50*time.Millisecond)
	defer cancel()
	c.send(h, httptest.NewRequestWithContext(ctx, method, path, strings.NewReader(body)), body, 503)
}

// dumps reads the two forms of the index.
func (c *caller) dumps(handler handlerOf) {
	c.t.Helper()
	r := newRouter(c.t, 1)
	h := handler(r)
	event := indexer.Event{Kind: indexer.Stored}
	for i := range uint64(3) {
		event.Blocks = append(event.Blocks, indexer.Block{External: 1<<63 + i, Local: i})
	}
	r.ApplyEvent(router.Worker{ID: 1}, event)
	text := c.do(h, "POST", "/v1/dump_events", "", 200)
	if strings.Count(text, "block_hash") != 3 {
		c.t.Errorf("the events are %s", text)
	}
	for _, sort := range []string{"0", "1"} {
		lines := strings.Split(strings.TrimSpace(c.do(h, "GET", "/v1/index/dump?sort="+sort, "", 200)), "\n")
		for i, line := range lines {
			schema := "StoredEvent"
			switch i {
			case 0:
				schema = "DumpHeader"
			case len(lines) - 1:
				schema = "DumpEnd"
			}
			for _, fault := range c.spec.check(c.spec.at("components", "schemas", schema), decode(c.t, line), schema) {
				c.t.Errorf("%s: %s", line, fault)
			}
		}
	}
	d, ok := r.Dump(nil)
	if !ok {
		c.t.Fatal("another dump runs")
	}
	c.away(h, "GET", "/v1/index/dump", "")
	c.away(h, "POST", "/v1/dump_events", "")
	d.Close()
}

// live reads the stream of /v1/live until it ends, and the refusal of one stream too many. The data
// of each event fits the field of that name.
func (c *caller) live(handler handlerOf) {
	c.t.Helper()
	draining := make(chan struct{})
	close(draining)
	h := handler(newRouter(c.t, 1), func(conf *api.Config) { conf.Draining = draining })
	ctx, cancel := context.WithCancel(c.t.Context())
	defer cancel()
	c.send(h, httptest.NewRequestWithContext(ctx, "GET", "/v1/live", nil), "", 200, "Accept", "text/event-stream")

	s := httptest.NewServer(handler(newRouter(c.t, 1)))
	defer s.Close()
	var open []*feed
	for range 256 {
		open = append(open, openFeed(c.t, s))
	}
	for name, data := range open[0].until("decisions") {
		schema := c.spec.at("components", "schemas", "Live", "properties", name)
		if schema == nil {
			c.t.Errorf("the file has no section %s", name)
		}
		for _, fault := range c.spec.check(schema, decode(c.t, data), name) {
			c.t.Error(fault)
		}
	}
	c.do(s.Config.Handler, "GET", "/v1/live", "", 503, "Accept", "text/event-stream")
	for _, f := range open {
		_ = f.resp.Body.Close() // ends the stream
	}
}

// files reads every file of the dashboard.
func (c *caller) files(h http.Handler) {
	c.t.Helper()
	c.do(h, "GET", "/", "", 200)
	c.do(h, "GET", "/dashboard/none", "", 404)
	names, err := fs.Glob(os.DirFS("../dashboard"), "*.*")
	if err != nil {
		c.t.Fatal(err)
	}
	for _, name := range names {
		if !strings.HasSuffix(name, ".go") {
			c.do(h, "GET", "/dashboard/"+name, "", 200)
		}
	}
}

// The commands of docs/api.md book a request, report its first token, and free it.
func TestAPIPageCommands(t *testing.T) {
	text, err := os.ReadFile("../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	r := newRouter(t, 0)
	if err := r.SetWorker(router.WorkerInfo{ID: 1, Models: []string{"sim"}, BlockSize: 4, Address: netip.MustParseAddrPort("10.0.0.1:8000")}); err != nil {
		t.Fatal(err)
	}
	h := api.New(api.Config{Router: r, Metrics: http.NotFoundHandler()})
	commands := regexp.MustCompile(`(?m)^curl localhost:9003(\S+) -H "\$json" -d '([^']+)'$`).FindAllStringSubmatch(string(text), -1)
	if len(commands) != 3 || strings.Count(string(text), "\ncurl ") != 3 {
		t.Fatalf("docs/api.md has the commands %q, want 3", commands)
	}
	for i, c := range commands {
		status, body, _ := post(t, h, c[1], c[2])
		if want := `"changed":true`; status != 200 || i > 0 && !strings.Contains(body, want) {
			t.Errorf("%s %s: %d %s", c[1], c[2], status, body)
		}
	}
}
