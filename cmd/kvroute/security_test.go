// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
)

// attacked is what workers see of attacks.
type attacked struct {
	forged  string // the address that attacks name
	mu      sync.Mutex
	passed  []string // attacks that reached a worker
	reached int      // requests that reached a worker
	id      string   // x-request-id of the last one
	gateway bool     // the configuration is Envoy Gateway's, which passes the client's id on
}

var uuid = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)

// ServeHTTP is a worker, which decodes a path as often as it can.
func (a *attacked) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	a.mu.Lock()
	defer a.mu.Unlock()
	note := func(what string) { a.passed = append(a.passed, what) }
	for name, values := range r.Header {
		if strings.Contains(strings.Join(values, ","), a.forged) {
			note("header " + name)
		}
	}
	if r.Header[http.CanonicalHeaderKey(openai.ClientRequestID)] != nil && !a.gateway {
		note("the client's request id")
	}
	if a.id = r.Header.Get("X-Request-Id"); !uuid.MatchString(a.id) {
		note("the request id " + a.id)
	}
	if err == nil && strings.Contains(string(openai.UTF8(body)), a.forged) { // a worker does not read an incomplete body
		note("body " + string(body))
	}
	p := r.URL.Path
	for range 5 {
		if plain, err := url.PathUnescape(p); err == nil {
			p = plain
		}
	}
	if p = path.Clean(strings.ReplaceAll(p, `\`, "/")); p != "/v1/models" && !strings.HasPrefix(p, "/v1/models/") && openai.HeldID(p) == "" && !slices.Contains(openai.Paths(), p) {
		note("path " + r.RequestURI)
	}
	a.reached++
	w.Header().Set("Content-Type", "application/json")
	fmt.Fprint(w, `{"choices":[]}`)
}

// take returns what has passed since the last call.
func (a *attacked) take() (passed []string, reached int, id string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	passed, reached, id = a.passed, a.reached, a.id
	a.passed, a.reached = nil, 0
	return passed, reached, id
}

// bodyAttacks returns bodies that steer, in several spellings, by a name of each.
func bodyAttacks(forged string) map[string]string {
	all := map[string]string{}
	for field := range strings.FieldsSeq(`kv_transfer_params.remote_host kv_transfer_params.remote_kv_source.remote_host ec_transfer_params.peer priority
		request_id vllm_xargs.kv_transfer_params vllm_xargs.kv_cache_report_mode vllm_xargs.kv_hints sampling_params.extra_args.kv_transfer_params
		bootstrap_host bootstrap_port bootstrap_room data_parallel_rank routed_dp_rank disagg_prefill_dp_rank rid http_worker_ipc kv_hints
		kv_router_hint encoder_urls num_items_assigned need_wait_for_mm_inputs
		disaggregated_params.ctx_request_id nvext.decode_worker_id nvext.backend_instance_id nvext.dp_rank nvext.agent_hints.priority
		nvext.routing_constraints.required_taints nvext.session_control.session_id`) {
		names := strings.Split(field, ".")
		member := fmt.Sprintf("%q", forged)
		for i, name := range slices.Backward(names) {
			if member = fmt.Sprintf("%q:%s", name, member); i > 0 {
				member = "{" + member + "}"
			}
		}
		escaped := regexp.MustCompile(`"[a-z]`).ReplaceAllStringFunc(member, func(s string) string { return fmt.Sprintf(`"\u%04x`, s[1]) })
		const rest = `"model":"sim","messages":[{"role":"user","content":"hello"}],"max_tokens":2`
		all[field] = "{" + rest + "," + member + "}"
		all[field+", first"] = "{" + member + "," + rest + "}"
		all[field+", escaped"] = "{" + escaped + "," + rest + "}"
		all[field+", twice"] = "{" + member + "," + rest + "," + member + "}"
		all[field+", n"] = "{" + rest + `,"n":2,` + member + "}"
		all[field+", behind white space"] = "\r\n {" + rest + "," + member + "}"
		all[field+", NaN"] = "{" + rest + `,"temperature":NaN,"stream":"False",` + member + "}"
		var utf16 strings.Builder
		utf16.WriteString("\xff\xfe")
		for _, c := range []byte("{" + rest + "," + member + "}") {
			utf16.WriteString(string([]byte{c, 0}))
		}
		all[field+", UTF-16"] = utf16.String()
	}
	return all
}

// pathAttacks returns spellings of paths that are for a worker's operator.
func pathAttacks() (all []string) {
	for _, p := range []string{"flush_cache", "sleep", "metrics", "v1/load_lora_adapter", "abort_request", "kv_cache_events"} {
		for _, form := range []string{
			"/%s", "//%s", "/./%s", "/%%2e/%s", "/v1/models/../../%s", "/v1/models/%%2e%%2e/%%2e%%2e/%s", "/v1/models/..%%2f..%%2f%s",
			`/v1/models/..\..\%s`, `/v1/models/..%%5c..%%5c%s`, "/v1/models/%%252e%%252e/%%252e%%252e/%s", "/v1/models/..%%252f..%%252f%s",
			"/v1/models/x/%%25252e%%25252e/%%25252e%%25252e/%%25252e%%25252e/%s", "/v1/chat/completions/../../../%s",
			"/v1/chat/completions/%%2e%%2e/%%2e%%2e/%%2e%%2e/%s", "/v1/chat/completions/..%%255c..%%255c..%%255c%s", "/v1/models/%%2E%%2e%%2F.%%2E/%s",
			"/v1/chat/completions;/../../../%s", "/%s?/v1/chat/completions", "/%s#/v1/chat/completions", "/v1/models/%%c0%%ae%%c0%%ae/../../%s",
		} {
			all = append(all, fmt.Sprintf(form, p))
		}
	}
	return all
}

// rawStatus sends a request with a target as it is, and returns the response's status, 0 for none.
func rawStatus(t *testing.T, address, method, target string) int {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second)) // fails only on a closed connection
	fmt.Fprintf(conn, "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\n\r\n", method, target, address)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	return resp.StatusCode
}

// TestSecurity replays the attacks of SECURITY.md's table in each configuration that this project writes or
// keeps, while kvroute decides and while it is dead. None may pass. `make test-security` runs it.
func TestSecurity(t *testing.T) {
	d := newStack(t, 0, nil)
	victim := &attacked{}
	forged := startHTTP(t, victim.ServeHTTP)
	worker := &attacked{forged: forged}
	pool := [2]string{startHTTP(t, worker.ServeHTTP), startHTTP(t, worker.ServeHTTP)}
	d.begin(t, append(staticFlags(t, d, "a", pool[0], "b", pool[1]), "--second-choice", "none")...)
	counts := map[string]int{}
	bodies := bodyAttacks(forged)
	for _, kvroute := range []string{d.Router.At.Extproc, ""} {
		for name, config := range configurations(t, pool, kvroute) {
			state := "kvroute decides"
			if kvroute == "" {
				state = "kvroute is dead"
			}
			t.Run(name+", "+state, func(t *testing.T) {
				proxy, err := envoytest.Start(t.Context(), envoytest.Options{Config: config})
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { _ = proxy.Stop() })
				address := strings.TrimPrefix(proxy.URL(), "http://")
				eventually(t, "a request is not served", func() bool {
					resp, _ := whole(t, "POST", proxy.URL()+chatPath, chatBody("hello", 2, false), nil)
					return resp.StatusCode == http.StatusOK
				})
				worker.take()
				worker.mu.Lock()
				worker.gateway = config[0] == '{' // JSON
				worker.mu.Unlock()
				check := func(kind, what string) (reached int, id string) {
					t.Helper()
					counts[kind]++
					passed, reached, id := worker.take()
					if _, chosen, _ := victim.take(); len(passed) > 0 || chosen > 0 {
						t.Errorf("%s: %.200s: %v passes, and %d requests reach the address that it names", kind, what, passed, chosen)
					}
					return reached, id
				}
				attack := func(kind, what, target, body string, header http.Header) {
					t.Helper()
					resp, text := whole(t, "POST", proxy.URL()+target, body, header)
					if reached, id := check(kind, what); resp.StatusCode == http.StatusOK && reached != 1 || id == header.Get("X-Request-Id") {
						t.Errorf("%s: %s: status %d, %d requests, the id %q: %.200s", kind, what, resp.StatusCode, reached, id, text)
					}
				}
				for i, header := range envoytest.SteeringHeaders {
					target := []string{chatPath, "/v1/messages", "/v1/responses", "/generate"}[i%4]
					body := `{"model":"sim","messages":[{"role":"user","content":"hello"}],"input":"hello","text":"hello","max_tokens":2}`
					for _, spelling := range []string{header, strings.ReplaceAll(header, "-", "_"), strings.Replace(header, "-", "_", 1)} {
						attack("header", spelling, target, body, http.Header{spelling: {forged}, "X-Request-Id": {"___prefill_addr_" + forged + "___decode_addr_" + forged}})
					}
				}
				for _, target := range pathAttacks() {
					rawStatus(t, address, "POST", target)
					check("path", target)
				}
				if status := rawStatus(t, address, "CONNECT", forged); status == http.StatusOK || status == 0 {
					t.Errorf("CONNECT gets %d", status)
				}
				check("path", "CONNECT")
				resp, _ := whole(t, "POST", proxy.URL()+chatPath, chatBody("hello", 2, false), http.Header{"X-Request-Id": {"mine-1.a_B"}})
				if got := resp.Header["X-Request-Id"]; resp.StatusCode != http.StatusOK || !slices.Equal(got, []string{"mine-1.a_B"}) {
					t.Errorf("status %d, the client gets the ids %q back", resp.StatusCode, got)
				}
				check("header", "a request id")
				if !worker.gateway {
					for _, id := range []string{"a b:1,c;d=\"é\"", "Root=1-67891233-abcdef012345678912345678", strings.Repeat("/", 1024)} {
						resp, _ := whole(t, "POST", proxy.URL()+chatPath, chatBody("hello", 2, false), http.Header{"X-Request-Id": {id}})
						if got := resp.Header["X-Request-Id"]; resp.StatusCode != http.StatusOK || !slices.Equal(got, []string{id}) {
							t.Errorf("status %d, the client gets the ids %q back, want %q", resp.StatusCode, got, id)
						}
						check("header", "the request id "+id)
					}
				}
				if resp, _ := whole(t, "POST", proxy.URL()+chatPath, chatBody("hello", 2, false), nil); resp.Header["X-Request-Id"] != nil {
					t.Errorf("a client without an id gets %q", resp.Header["X-Request-Id"])
				}
				check("header", "no request id")
				if kvroute == "" {
					return // SECURITY.md: bodies pass while kvroute is away
				}
				for what, body := range bodies {
					attack("body", what, chatPath, body, http.Header{})
				}
				for _, target := range openai.Paths() {
					attack("body", target, target, fmt.Sprintf(`{"model":"sim","messages":[{"role":"user","content":"a"}],"prompt":[1,2],"input":"a","text":"a","token_ids":[1,2],"max_tokens":2,"bootstrap_host":%q}`, forged), http.Header{})
				}
				body := bodies["bootstrap_host"]
				for _, method := range []string{"PUT", "PATCH", "DELETE", "GET", "QUERY"} {
					targets := []string{"/generate", "/v1/rerank", "/open_session", chatPath, "/v1/models", "/v1/models/sim", "/v1/responses/resp_1/cancel"}
					if method == "GET" || method == "DELETE" { // no engine reads their bodies on the path of a response or a model
						targets = targets[:4]
					}
					for _, target := range targets {
						whole(t, method, proxy.URL()+target, body, nil)
						check("body", method+" "+target)
					}
				}
				attack("body", "encoded", chatPath, body, http.Header{"Content-Encoding": {"br"}})
				inParts(t, proxy.URL()+chatPath, body)
				check("body", "in parts, with trailers")
				if large := strings.Repeat(" ", 17<<20); strings.Contains(name, envoy.BufferedPartial) {
					attack("body", "truncated", chatPath, body[:len(body)-1]+large+"}", http.Header{})
				}
			})
		}
	}
	if _, text := get(t, "http://"+d.Router.At.HTTP+"/metrics"); strings.Contains(text, `kvroute_extproc_fail_open_total{reason="panic"`) {
		t.Error("kvroute panicked")
	}
	t.Logf("attempts without effect: %v", counts)
	if counts["header"] < 1500 || counts["body"] < 300 || counts["path"] < 100 {
		t.Errorf("attempts: %v, want at least 1,500 with headers, 300 with bodies, 100 with paths", counts)
	}
}

// inParts sends a body over HTTP/2 in two parts with a pause longer than a decision, and trailers behind.
func inParts(t *testing.T, target, body string) {
	t.Helper()
	var protocols http.Protocols
	protocols.SetUnencryptedHTTP2(true)
	client := &http.Client{Transport: &http.Transport{Protocols: &protocols}}
	defer client.CloseIdleConnections()
	in, out := io.Pipe()
	go func() {
		_, _ = io.WriteString(out, body[:20])
		time.Sleep(1700 * time.Millisecond) // longer than --decision-timeout
		_, _ = io.WriteString(out, body[20:])
		_ = out.Close()
	}()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, target, in)
	if err != nil {
		t.Fatal(err)
	}
	req.Trailer = http.Header{"X-End": {"1"}}
	resp, err := client.Do(req)
	if err != nil {
		t.Logf("in parts: %v", err)
		return
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	_ = resp.Body.Close()
}
