// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	corev3 "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// The listeners of the table, and the headers that each obeys.
var listeners = []struct {
	name string
	conf extproc.Config
}{
	{"plain", extproc.Config{}},
	{"direct", extproc.Config{AllowDirect: true, Group: "west"}},
	{"trusted", extproc.Config{TrustOverrides: true}},
}

// Everything that a request may say of its routing, by header and by field of its body,
// and what becomes of it on each listener: pins need --allow-direct and nothing else,
// hints --trust-overrides and nothing else, the rest is always obeyed.
func TestInputs(t *testing.T) {
	const pinned = ", pin {7 0} any rank: true"
	for _, c := range []struct {
		name   string
		header []string // name, value
		body   string   // members of the body
		gone   bool     // the headers are removed
		// The question to the router, or the status and code with which the request is refused;
		// "" for nothing special.
		plain, direct, trusted string
	}{
		// 8.1
		{name: "pin", header: []string{"x-dynamo-worker-instance-id", "7"}, gone: true, direct: pinned},
		{name: "pin, other name", header: []string{"x-worker-instance-id", "7"}, gone: true, direct: pinned},
		{name: "pin, both names", header: []string{"x-worker-instance-id", "8", "x-dynamo-worker-instance-id", "7"}, gone: true, direct: pinned},
		{name: "pin of 64 bits", header: []string{"x-dynamo-worker-instance-id", "18446744073709551615"}, gone: true, direct: ", pin {18446744073709551615 0} any rank: true"},
		{name: "no pin", header: []string{"x-dynamo-worker-instance-id", "-1"}, gone: true, direct: "400 bad_header"},
		{name: "rank", header: []string{"x-dynamo-worker-instance-id", "7", "x-dynamo-dp-rank", "3"}, gone: true, direct: ", pin {7 3} any rank: false"},
		{name: "rank, other name", header: []string{"x-worker-instance-id", "7", "x-dp-rank", "3"}, gone: true, direct: ", pin {7 3} any rank: false"},
		{name: "no rank", header: []string{"x-dynamo-worker-instance-id", "7", "x-dynamo-dp-rank", "4294967296"}, gone: true, direct: "400 bad_header"},
		{name: "rank alone", header: []string{"x-dynamo-dp-rank", "3"}, gone: true, direct: "400 bad_header"},
		{name: "worker of our group", header: []string{"x-dynamo-router-group", "west", "x-dynamo-worker-instance-id", "7", "x-dynamo-dp-rank", "3"}, gone: true, direct: ", preferred {7 3}"},
		{name: "worker of our group, no rank", header: []string{"x-dynamo-router-group", "west", "x-dynamo-worker-instance-id", "7"}, gone: true, direct: ", preferred {7 0}"},
		{name: "worker of another group", header: []string{"x-dynamo-router-group", "east", "x-dynamo-worker-instance-id", "7"}, gone: true},
		{name: "worker of our group, another in the body", header: []string{"x-dynamo-router-group", "west", "x-dynamo-worker-instance-id", "7"}, body: `"nvext":{"backend_instance_id":8,"dp_rank":1}`, gone: true, direct: ", preferred {7 0}"},
		{name: "group, a pin in the body", header: []string{"x-dynamo-router-group", "west"}, body: `"nvext":{"backend_instance_id":8}`, gone: true},
		{name: "group, two pins in the body", header: []string{"x-dynamo-router-group", "west"}, body: `"nvext":{"backend_instance_id":8,"decode_worker_id":9,"prefill_worker_id":7}`, gone: true},
		{name: "group, a question in the body", header: []string{"x-dynamo-router-group", "west"}, body: `"nvext":{"annotations":["query_instance_id"]}`, gone: true},
		{name: "group alone", header: []string{"x-dynamo-router-group", "west"}, gone: true},
		{name: "prefill pin of the same", header: []string{"x-dynamo-worker-instance-id", "7", "x-dynamo-prefill-instance-id", "7"}, gone: true, direct: pinned + ", aggregated"},
		{name: "prefill pin of another", header: []string{"x-dynamo-worker-instance-id", "7", "x-dynamo-prefill-instance-id", "8"}, gone: true, direct: pinned + ", prefill {8 0} any rank: true"},
		{name: "prefill pin, other name", header: []string{"x-prefill-instance-id", "8"}, gone: true, direct: ", prefill {8 0} any rank: true"},
		{name: "prefill rank", header: []string{"x-dynamo-prefill-dp-rank", "8"}, gone: true, direct: "400 bad_header"},
		{name: "prefill rank, other name", header: []string{"x-prefill-dp-rank", "x"}, gone: true, direct: "400 bad_header"},
		{name: "prefill pin and rank", header: []string{"x-prefill-instance-id", "8", "x-prefill-dp-rank", "2"}, gone: true, direct: ", prefill {8 2} any rank: false"},
		{name: "aggregated", header: []string{"x-dynamo-routing-mode", "aggregated"}, gone: true, direct: ", aggregated"},
		{name: "disaggregated", header: []string{"x-dynamo-routing-mode", "disaggregated"}, gone: true, direct: ", disaggregated"},
		{name: "another mode", header: []string{"x-dynamo-routing-mode", "both"}, gone: true, direct: "400 bad_header"},
		{name: "session", header: []string{"x-dynamo-session-id", "s"}, plain: ", session s", direct: ", session s", trusted: ", session s"},
		{name: "session, another header", header: []string{"x-claude-code-session-id", "s"}, plain: ", session s", direct: ", session s", trusted: ", session s"},
		{
			name: "session, the first one counts", header: []string{"session-id", "c", "x-session-id", "b", "x-dynamo-session-id", "a"},
			plain: ", session a", direct: ", session a", trusted: ", session a",
		},
		{
			name: "last of a session", header: []string{"x-session-id", "s", "x-dynamo-session-final", "true"},
			plain: ", session s, final true", direct: ", session s, final true", trusted: ", session s, final true",
		},
		{name: "priority", header: []string{"x-dynamo-request-priority", "-5"}, gone: true, trusted: ", priority -5"},
		{name: "priority beyond an i32", header: []string{"x-dynamo-request-priority", "2147483648"}, gone: true, trusted: "400 bad_header"},
		{name: "strict priority", header: []string{"x-dynamo-request-strict-priority", "2"}, gone: true, trusted: ", strict 2"},
		{name: "target", header: []string{"x-dynamo-slo-ttft-ms", "250"}, gone: true, trusted: ", target 250ms"},
		{name: "override", header: []string{"x-dynamo-router-override", `{"alpha":0}`}, gone: true, trusted: `, override {"alpha":0}`},
		{
			name: "policy class", header: []string{"x-dynamo-meta-policy-class", "batch"}, gone: true,
			plain: ", labels {Class:batch}", direct: ", labels {Class:batch}", trusted: ", labels {Class:batch}",
		},
		{
			name: "objective and fairness", header: []string{"x-gateway-inference-objective", "batch", "x-gateway-inference-fairness-id", "me", "x-gateway-model-name-rewrite", "n"}, gone: true,
			plain: ", labels {Class:batch Fairness:me}", direct: ", labels {Class:batch Fairness:me}", trusted: ", labels {Class:batch Fairness:me}",
		},
		{
			name: "their other names", header: []string{"x-llm-d-inference-objective", "batch", "x-llm-d-inference-fairness-id", "me", "x-llm-d-model-name-rewrite", "n"}, gone: true,
			plain: ", labels {Class:batch Fairness:me}", direct: ", labels {Class:batch Fairness:me}", trusted: ", labels {Class:batch Fairness:me}",
		},
		{
			name: "request id", header: []string{"x-request-id", "r-1"},
			plain: ", labels {RequestID:r-1}", direct: ", labels {RequestID:r-1}", trusted: ", labels {RequestID:r-1}",
		},
		{
			name: "a long request id", header: []string{"x-request-id", strings.Repeat("r", 200)},
			plain: ", labels {RequestID:" + strings.Repeat("r", 128) + "}", direct: ", labels {RequestID:" + strings.Repeat("r", 128) + "}", trusted: ", labels {RequestID:" + strings.Repeat("r", 128) + "}",
		},
		{name: "tenant", header: []string{"x-tenant-id", "t"}, plain: ", salt t", direct: ", salt t", trusted: ", salt t"},
		// 8.2: what only routers say
		{
			name: "ours", gone: true, header: []string{
				"x-dynamo-worker", "10.9.9.9:1", "x-dynamo-worker-fallback", "10.9.9.9:1", "x-dynamo-worker-list", "10.9.9.9:1", "x-dynamo-request-id", "x",
				"x-dynamo-prefill-worker", "10.9.9.9:1", "x-prefiller-host-port", "10.9.9.9:1", "x-dynamo-overlap-blocks", "9", "x-data-parallel-rank", "9",
				"x-gateway-destination-endpoint", "10.9.9.9:1", "x-gateway-destination-endpoint-subset", "10.9.9.9:1", "x-gateway-destination-endpoint-served", "10.9.9.9:1",
			},
		},
		// 8.3
		{name: "token data", body: `"nvext":{"token_data":[5,6]}`, plain: ", tokens [5 6]", direct: ", tokens [5 6]", trusted: ", tokens [5 6]"},
		{
			name: "kv_transfer_params", body: `"kv_transfer_params":{"prompt_token_ids":[5,6],"do_remote_decode":true}`,
			plain: ", tokens [5 6]", direct: ", tokens [5 6]", trusted: ", tokens [5 6]",
		},
		{name: "pin of the body", body: `"nvext":{"backend_instance_id":7}`, direct: pinned},
		{name: "pin of the body, other name", body: `"nvext":{"decode_worker_id":18446744073709551615,"dp_rank":2}`, direct: ", pin {18446744073709551615 2} any rank: false"},
		{name: "two pins of the body", body: `"nvext":{"decode_worker_id":7,"backend_instance_id":8}`, direct: "400"},
		{name: "no pin in the body", body: `"nvext":{"backend_instance_id":"7"}`, direct: "400"},
		{name: "the header wins", header: []string{"x-dynamo-worker-instance-id", "7", "x-dynamo-dp-rank", "1"}, gone: true, body: `"nvext":{"backend_instance_id":8,"dp_rank":2}`, direct: ", pin {7 1} any rank: false"},
		{name: "prefill pin of the body", body: `"nvext":{"decode_worker_id":7,"prefill_worker_id":8}`, direct: pinned + ", prefill {8 0} any rank: true"},
		{name: "prefill rank of the body", body: `"nvext":{"decode_worker_id":7,"dp_rank":1,"prefill_worker_id":7,"prefill_dp_rank":1}`, direct: ", pin {7 1} any rank: false, aggregated"},
		{name: "priority of the body", body: `"nvext":{"agent_hints":{"priority":3,"strict_priority":1,"osl":9,"latency_sensitivity":8}}`, trusted: ", priority 3, strict 1, output 9"},
		{name: "priority, older name", body: `"nvext":{"agent_hints":{"latency_sensitivity":0.5}}`, trusted: ", priority 0.5"},
		{name: "the priority's header wins", header: []string{"x-dynamo-request-priority", "4"}, gone: true, body: `"nvext":{"agent_hints":{"priority":3}}`, trusted: ", priority 4"},
		{name: "no hints", body: `"nvext":{"agent_hints":{"priority":"high"}}`, trusted: "400"},
		{name: "salt", body: `"cache_salt":"b"`, plain: ", salt b", direct: ", salt b", trusted: ", salt b"},
		// The gateway's word, not the client's.
		{name: "tenant and salt", body: `"cache_salt":"b","nvext":{"cache_salt":"n"}`, header: []string{"x-tenant-id", "t"}, plain: ", salt t", direct: ", salt t", trusted: ", salt t"},
		{name: "salt of nvext", body: `"cache_salt":"b","nvext":{"cache_salt":"n"}`, plain: ", salt n", direct: ", salt n", trusted: ", salt n"},
		{
			name: "taints", body: `"nvext":{"routing_constraints":{"required_taints":["gold"],"preferred_taints":{"rack":0.5}}}`,
			trusted: ", required [gold], preferred map[rack:0.5]",
		},
		{name: "targets of the body", body: `"nvext":{"router":{"ttft_target":250,"itl_target":20}}`, trusted: ", target 250ms, labels {ITLTarget:20ms}"},
		{name: "override of the body", body: `"router_config_override":{"router_temperature":1},"nvext":{"router_config_override":{"router_temperature":1}}`},
		{name: "extra fields", body: `"nvext":{"extra_fields":["worker_id"],"annotations":["llm_metrics","query","query_instance"]}`},
		{name: "model of an adapter, stream, length", body: `"stream":false,"max_tokens":5`},
	} {
		for _, l := range listeners {
			t.Run(c.name+" "+l.name, func(t *testing.T) {
				l.conf.SessionHeaders = []string{"x-dynamo-session-id", "x-session-id", "session-id", "x-claude-code-session-id"}
				h := newHarness(t, l.conf)
				body := `{"model":"m","messages":[1]}`
				if c.body != "" {
					body = strings.TrimSuffix(body, "}") + "," + c.body + "}"
				}
				x := h.Do(envoytest.Request{Path: "/v1/chat/completions", Header: c.header, Body: []byte(body)})
				want := map[string]string{"plain": c.plain, "direct": c.direct, "trusted": c.trusted}[l.name]
				if got := outcome(h, x); got != want {
					t.Errorf("asked %q, want %q", got, want)
				}
				for i := 0; i < len(c.header); i += 2 {
					value, there := x.Header[c.header[i]]
					if c.gone && there && value == c.header[i+1] || !c.gone && !there {
						t.Errorf("the worker gets %s: %q, want it removed: %v", c.header[i], value, c.gone)
					}
				}
				var untrusted openai.SteeringFields
				if !l.conf.AllowDirect {
					untrusted |= openai.FieldPins
				}
				if !l.conf.TrustOverrides {
					untrusted |= openai.FieldHints
				}
				steers := openai.SteeringPath([]byte(body), untrusted)
				if (x.Body != nil) != (steers != "") && x.Refusal == nil || x.Body != nil && openai.SteeringPath(x.Body, untrusted) != "" {
					t.Errorf("the field %q steers; the worker gets the body %s", steers, x.Body)
				}
				x.End()
			})
		}
	}
}

// outcome says what the router was asked beside the usual, or how it was refused.
func outcome(h *harness, x *envoytest.Exchange) string {
	if x.Refusal != nil {
		var e struct {
			Error struct{ Code string }
		}
		_ = json.Unmarshal([]byte(x.Refusal.Body), &e)
		return strings.TrimSpace(fmt.Sprint(x.Refusal.Status, " ", e.Error.Code))
	}
	h.router.mu.Lock()
	defer h.router.mu.Unlock()
	req := &h.router.asked[0]
	text := steered(req)
	if p := req.PrefillPinned; p != nil {
		text += fmt.Sprintf(", prefill %v any rank: %v", *p, req.PrefillAnyRank)
	}
	if req.Split != router.SplitAuto {
		text += ", " + string(req.Split)
	}
	if p := req.Preferred; p != nil {
		text += fmt.Sprint(", preferred ", *p)
	}
	if req.Salt != "" {
		text += ", salt " + req.Salt
	}
	if req.Tokens != nil {
		text += fmt.Sprint(", tokens ", req.Tokens)
	}
	l := req.Labels
	if l.Operation = ""; l != (router.Labels{}) {
		var some []string
		for _, f := range []struct{ name, value string }{{"RequestID", l.RequestID}, {"Class", l.Class}, {"Fairness", l.Fairness}} {
			if f.value != "" {
				some = append(some, f.name+":"+f.value)
			}
		}
		if l.ITLTarget != 0 {
			some = append(some, fmt.Sprint("ITLTarget:", l.ITLTarget))
		}
		text += ", labels {" + strings.Join(some, " ") + "}"
	}
	return text
}

// The subset of endpoints comes by a filter of Envoy's, so every listener obeys it;
// nobody in it is a 503.
func TestSubsetLeavesNobody(t *testing.T) {
	for _, l := range listeners {
		h := newHarness(t, l.conf)
		h.router.will(func(_ context.Context, req router.Request) (router.Decision, error) {
			for _, a := range req.AllowedAddresses {
				if a == chosen.Address || a.Port() == 0 && a.Addr() == chosen.Address.Addr() {
					return chosen, nil
				}
			}
			return router.Decision{}, fmt.Errorf("router: %w", router.ErrNoWorkers)
		})
		for hint, want := range map[string]string{"10.0.0.7:8000": "", "10.0.0.7": "", "10.0.0.7:9": "503 no_worker", "10.0.0.1": "503 no_worker", "": "503 no_worker"} {
			x := h.Begin(envoytest.Request{Path: "/v1/completions", Body: []byte(`{"model":"m","prompt":"x"}`)})
			fields, err := structpb.NewStruct(map[string]any{"x-gateway-destination-endpoint-subset": hint})
			if err != nil {
				t.Fatal(err)
			}
			x.Send(&extprocv3.ProcessingRequest{
				Request: &extprocv3.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocv3.HttpHeaders{
					Headers: &corev3.HeaderMap{Headers: []*corev3.HeaderValue{{Key: ":method", Value: "POST"}, {Key: ":path", Value: "/v1/completions"}}},
				}},
				MetadataContext: &corev3.Metadata{FilterMetadata: map[string]*structpb.Struct{"envoy.lb.subset_hint": fields}},
			})
			x.Settle()
			x.SendBody()
			x.Settle()
			got := ""
			if x.Refusal != nil {
				got = outcome(h, x)
			}
			if got != want {
				t.Errorf("%s listener, hint %q: %q, want %q", l.name, hint, got, want)
			}
			x.End()
		}
	}
}

// A request with the annotation query_instance_id receives the name of its worker and goes nowhere,
// on a listener that lets clients name workers; on others it is a request like all.
func TestQueryInstanceID(t *testing.T) {
	const body = `{"model":"m","messages":[1],"nvext":{"annotations":["query_instance_id:"],"agent_hints":{}}}`
	decision := chosen
	decision.Worker.DPRank = 3
	decision.Tokens = []uint32{1, 2}
	h := newHarness(t, extproc.Config{AllowDirect: true})
	h.router.queries = true
	h.router.will(func(_ context.Context, req router.Request) (router.Decision, error) {
		if req.ID != "" || !req.WantTokens || req.WantSecond {
			t.Errorf("asked with id %q, for tokens %v, for a second choice %v", req.ID, req.WantTokens, req.WantSecond)
		}
		return decision, nil
	})
	x := h.Do(chat(body))
	const want = `{"worker_id":{"decode_worker_id":9223372036854775813,"decode_dp_rank":3,"prefill_worker_id":9223372036854775813,"prefill_dp_rank":3},"overlap_blocks":12,"token_ids":[1,2]}`
	if x.Refusal == nil || x.Refusal.Status != 200 || x.Refusal.Header["content-type"] != "application/json" || x.Refusal.Body != want {
		t.Errorf("answered %+v, want %s", x.Refusal, want)
	}
	x.End()
	if n := h.count(t, "kvroute.extproc.queries"); n != 1 || h.router.taken() != 0 {
		t.Errorf("%d queries counted, %d slots taken; want 1 and none", n, h.router.taken())
	}
	// A client can send back the worker that it received, for both parts.
	var response struct {
		Worker json.RawMessage `json:"worker_id"`
	}
	if err := json.Unmarshal([]byte(x.Refusal.Body), &response); err != nil {
		t.Fatal(err)
	}
	back := newHarness(t, extproc.Config{AllowDirect: true})
	x = back.Do(chat(fmt.Sprintf(`{"model":"m","messages":[1],"nvext":%s}`, response.Worker)))
	if got := outcome(back, x); got != ", pin {9223372036854775813 3} any rank: false, aggregated" {
		t.Errorf("sent back it is %q", got)
	}
	x.End()

	for name, c := range map[string]struct {
		err  error
		want string
	}{
		"no workers":    {router.ErrNoWorkers, "503 no_worker"},
		"unknown model": {router.ErrUnknownModel, "404 model_not_found"},
		"our fault":     {errOther, "503 no_decision"},
	} {
		h.router.will(func(context.Context, router.Request) (router.Decision, error) { return router.Decision{}, c.err })
		x := h.Do(chat(body))
		if got := outcome(h, x); got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
		x.End()
	}

	for _, conf := range []extproc.Config{{}, {TrustOverrides: true}} {
		h := newHarness(t, conf)
		x := h.Do(chat(body))
		if x.Refusal != nil || x.Header["x-dynamo-worker"] != chosen.Address.String() {
			t.Errorf("without trust: %+v, header %v", x.Refusal, x.Header)
		}
		x.End()
	}
}

// Workers that need to be told which rank is meant are: vLLM with one port for all, and
// Dynamo's fronts. Whatever the client says there.
func TestRanksAreNamed(t *testing.T) {
	for name, c := range map[string]struct {
		decision router.Decision
		want     map[string]string
	}{
		"vLLM, a port for all ranks": {router.Decision{Engine: "vllm", NameRank: true}, map[string]string{"x-data-parallel-rank": "3"}},
		"vLLM, a port of its own":    {router.Decision{Engine: "vllm"}, map[string]string{"x-data-parallel-rank": ""}},
		"Dynamo": {router.Decision{Engine: "dynamo"}, map[string]string{
			"x-dynamo-worker-instance-id": "7", "x-dynamo-dp-rank": "3", "x-dynamo-routing-mode": "aggregated", "x-data-parallel-rank": "",
		}},
		"a router group": {router.Decision{Group: "west"}, map[string]string{"x-dynamo-router-group": "west", "x-dynamo-worker-instance-id": "", "x-dynamo-dp-rank": ""}},
		"a router group that named its worker": {router.Decision{Group: "west", Member: &router.Worker{ID: 1 << 60, DPRank: 2}}, map[string]string{
			"x-dynamo-router-group": "west", "x-dynamo-worker-instance-id": "1152921504606846976", "x-dynamo-dp-rank": "2",
		}},
		"another": {router.Decision{Engine: "sglang"}, map[string]string{"x-data-parallel-rank": "", "x-dynamo-worker-instance-id": "", "x-dynamo-router-group": ""}},
	} {
		h := newHarness(t, extproc.Config{})
		h.router.will(func(context.Context, router.Request) (router.Decision, error) {
			d := c.decision
			d.Worker, d.Address = router.Worker{ID: 7, DPRank: 3}, netip.MustParseAddrPort("10.0.0.7:8000")
			return d, nil
		})
		x := h.Do(envoytest.Request{Path: "/v1/chat/completions", Body: []byte(hello), Header: []string{"x-data-parallel-rank", "9", "x-dynamo-worker-instance-id", "9", "x-dynamo-router-group", "east"}})
		for header, want := range c.want {
			if got := x.Header[header]; got != want {
				t.Errorf("%s: %s is %q, want %q", name, header, got, want)
			}
		}
		x.End()
	}
}

// If Envoy names the rank of each attempt, kvroute sends all ranks where they differ.
func TestRanksOfAllAttempts(t *testing.T) {
	at := netip.MustParseAddrPort("10.0.0.7:8000")
	for name, c := range map[string]struct {
		second, third router.Second
		want          [4]string // first, fallbacks, rank of all
	}{
		"other ranks": {router.Second{Address: at, NameRank: true, Worker: router.Worker{ID: 8, DPRank: 5}}, router.Second{}, [4]string{"3", "5", "", ""}},
		"another rank third": {
			router.Second{Address: at, NameRank: true, Worker: router.Worker{ID: 8, DPRank: 3}},
			router.Second{Address: at, NameRank: true, Worker: router.Worker{ID: 9, DPRank: 6}},
			[4]string{"3", "3", "6", ""},
		},
		"the same rank":     {router.Second{Address: at, NameRank: true, Worker: router.Worker{ID: 8, DPRank: 3}}, router.Second{}, [4]string{"", "", "", "3"}},
		"a rank of its own": {router.Second{Address: at, Worker: router.Worker{ID: 8}}, router.Second{}, [4]string{"3", "", "", ""}},
		"no second choice":  {router.Second{}, router.Second{}, [4]string{"", "", "", "3"}},
	} {
		h := newHarness(t, extproc.Config{})
		h.router.will(func(_ context.Context, req router.Request) (router.Decision, error) {
			if !req.RankPerAttempt {
				t.Errorf("%s: the router does not know that each attempt has its own rank", name)
			}
			return router.Decision{Engine: "vllm", NameRank: true, Worker: router.Worker{ID: 7, DPRank: 3}, Address: at, Second: c.second, Third: c.third}, nil
		})
		request := chat(hello)
		request.Metadata = []string{"x-dynamo-rank-per-attempt", "true"}
		x := h.Do(request)
		if got := [4]string{x.Header["x-dynamo-rank"], x.Header["x-dynamo-rank-fallback"], x.Header["x-dynamo-rank-fallback-2"], x.Header["x-data-parallel-rank"]}; got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		x.End()
	}
}

// If Envoy sends each attempt the Host of its own worker, kvroute names the second one's where it must differ.
func TestHostsOfBothAttempts(t *testing.T) {
	at := netip.MustParseAddrPort("10.0.0.7:8000")
	for name, c := range map[string]struct {
		second router.Second
		want   [5]string // hosts, ranks, rank of both
	}{
		"another host": {
			router.Second{Address: at, Host: "b.example", NameHost: true, NameRank: true, Worker: router.Worker{ID: 8, DPRank: 3}},
			[5]string{"a.example", "b.example", "3", "3", ""},
		},
		"any host": {
			router.Second{Address: at, Host: "b.example", NameRank: true, Worker: router.Worker{ID: 8, DPRank: 3}},
			[5]string{"a.example", "", "", "", "3"},
		},
	} {
		h := newHarness(t, extproc.Config{})
		h.router.will(func(_ context.Context, req router.Request) (router.Decision, error) {
			if !req.HostPerAttempt {
				t.Errorf("%s: the router does not know that each attempt has its own Host", name)
			}
			return router.Decision{Engine: "vllm", NameRank: true, Host: "a.example", Worker: router.Worker{ID: 7, DPRank: 3}, Address: at, Second: c.second}, nil
		})
		request := chat(hello)
		request.Metadata = []string{"x-dynamo-rank-per-attempt", "true", "x-dynamo-host-per-attempt", "true"}
		x := h.Do(request)
		got := [5]string{}
		for i, header := range []string{"x-dynamo-worker-host", "x-dynamo-worker-fallback-host", "x-dynamo-rank", "x-dynamo-rank-fallback", "x-data-parallel-rank"} {
			got[i] = x.Header[header]
		}
		if got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
		x.End()
	}
}

// The prefill request names the rank where the decode request does, and has the request's id.
func TestThePrefillWorkersRankIsNamed(t *testing.T) {
	headers := make(chan http.Header, 2)
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		headers <- r.Header
		_, _ = w.Write([]byte(`{"kv_transfer_params":{"a":1}}`))
	}))
	defer worker.Close()
	for named, want := range map[bool]string{true: "3", false: ""} {
		h := newHarness(t, extproc.Config{})
		h.router.will(func(_ context.Context, req router.Request) (router.Decision, error) {
			d, leg := chosen, req.ID+"/prefill"
			h.router.mu.Lock()
			h.router.slots[leg] = true
			h.router.mu.Unlock()
			d.Prefill = &router.Decision{
				ID: leg, Engine: "vllm", NameRank: named, Worker: router.Worker{ID: 7, DPRank: 3},
				Address: netip.MustParseAddrPort(strings.TrimPrefix(worker.URL, "http://")),
			}
			return d, nil
		})
		const id = "5a5d0d64-8ab5-4d7a-a1a5-7ddcd6b1de9b"
		for sent, passes := range map[string]string{id: id, "___prefill_addr_10.0.0.1:1___": ""} {
			r := chat(hello)
			r.Header = append(r.Header, "x-request-id", sent)
			x := h.Do(r)
			x.End()
			got := <-headers
			if got.Get("x-data-parallel-rank") != want || got.Get("x-request-id") != passes {
				t.Errorf("a rank to name: %v; headers %v, the request's id %q", named, got, sent)
			}
		}
	}
}

// A query has as long as a decision has.
func TestQueriesAreBounded(t *testing.T) {
	h := newHarness(t, extproc.Config{AllowDirect: true, DecisionTimeout: 20 * time.Millisecond})
	h.router.queries = true
	h.router.will(until(nil))
	x := h.Do(chat(`{"model":"m","messages":[1],"nvext":{"annotations":["query_instance_id"]}}`))
	if got := outcome(h, x); got != "503 no_decision" {
		t.Errorf("%s, want 503", got)
	}
	x.End()
}
