// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

const (
	steers  = `{"model":"m","messages":[1],"kv_transfer_params":{"remote_host":"192.0.2.1"},"nvext":{"dp_rank":3,"cache_salt":"s"}}`
	cleaned = `{"model":"m","messages":[1],"nvext":{"cache_salt":"s"}}`
)

// In each mode no worker gets a body that steers: the fields are removed, or the request is refused. A trusted
// listener passes the body as it is.
func TestNoModePassesSteeringFields(t *testing.T) {
	for name, c := range map[string]struct {
		request envoytest.Request
		status  int // 0: the fields are removed
	}{
		"buffered":             {envoytest.Request{}, 0},
		"buffered, trailers":   {envoytest.Request{Trailers: true}, 0},
		"partial":              {envoytest.Request{Mode: filterv3.ProcessingMode_BUFFERED_PARTIAL}, 0},
		"full duplex":          {envoytest.Request{Mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, Chunk: 10}, 0},
		"ahead":                {envoytest.Request{Mode: filterv3.ProcessingMode_STREAMED, Ahead: true, Chunk: 10}, 0},
		"streamed":             {envoytest.Request{Mode: filterv3.ProcessingMode_STREAMED, Chunk: 10}, 400},
		"streamed, trailers":   {envoytest.Request{Mode: filterv3.ProcessingMode_STREAMED, Chunk: 10, Trailers: true}, 400},
		"compressed":           {envoytest.Request{Header: []string{"content-encoding", "gzip"}}, 415},
		"compressed, streamed": {envoytest.Request{Mode: filterv3.ProcessingMode_STREAMED, Header: []string{"content-encoding", "br"}}, 415},
	} {
		for _, trusted := range []bool{false, true} {
			t.Run(fmt.Sprint(name, trusted), func(t *testing.T) {
				h := newHarness(t, extproc.Config{TrustOverrides: trusted, AllowDirect: trusted, MaxBodyBytes: 10_000})
				r := c.request
				r.Path, r.Body = "/v1/chat/completions", []byte(strings.ReplaceAll(steers, `,"nvext":{"dp_rank":3,"cache_salt":"s"}`, ""))
				if !trusted {
					r.Body = []byte(steers)
					r.Header = append(r.Header, "content-length", fmt.Sprint(len(steers)))
				}
				x := h.Do(r)
				defer x.End()
				switch {
				case trusted && (x.Refusal != nil || x.Body != nil && string(x.Body) != string(r.Body)):
					t.Errorf("a trusted client: refusal %+v, the body %s", x.Refusal, x.Body)
				case trusted:
				case c.status != 0 && (x.Refusal == nil || x.Refusal.Status != c.status):
					t.Errorf("refusal %+v, want status %d", x.Refusal, c.status)
				case c.status == 0 && (x.Refusal != nil || string(x.Body) != cleaned || x.Header["content-length"] != fmt.Sprint(len(cleaned))):
					t.Errorf("refusal %+v, the worker gets %s, length %s", x.Refusal, x.Body, x.Header["content-length"])
				}
				want := int64(1)
				if trusted {
					want = 0
				}
				if n := h.count(t, "kvroute.extproc.steering"); n != want {
					t.Errorf("%d requests counted, want %d", n, want)
				}
			})
		}
	}
}

// Fields by which a client would make a vLLM worker announce blocks that it does not have, or connect to an address,
// do not reach the worker. Other fields beside them do.
func TestFieldsOfEnginesCachesAreRemoved(t *testing.T) {
	const rest = `"model":"m","messages":[1]`
	for field, kept := range map[string]string{
		`"vllm_xargs":{"kv_cache_report_mode":"full","a":1}`:                                   `"vllm_xargs":{"a":1}`,
		`"vllm_xargs":{"a":1,"kv_hints":{"actions":[{"action_type":"kv.fetch"}]}}`:             `"vllm_xargs":{"a":1}`,
		`"vllm_xargs":{"kv_cache_report_mode":"full","a":1,"kv_hints":7}`:                      `"vllm_xargs":{"a":1}`,
		`"vllm_xargs":{"a":1,"kv\u005fhints":7}`:                                               `"vllm_xargs":{"a":1}`,
		`"sampling_params":{"extra_args":{"a":1,"kv_cache_report_mode":"full","kv_hints":{}}}`: `"sampling_params":{"extra_args":{"a":1}}`,
		`"n":1,"kv_hints":{"actions":[]}`:                                                      `"n":1`,
		`"n":1,"kv_transfer_params":{"remote_kv_source":{"remote_host":"192.0.2.1"}}`:          `"n":1`,
		`"vllm_xargs":{"a":1}`: `"vllm_xargs":{"a":1}`,
	} {
		h := newHarness(t, extproc.Config{MaxBodyBytes: 10_000})
		body := "{" + rest + "," + field + "}"
		x := h.Do(envoytest.Request{Path: "/v1/chat/completions", Body: []byte(body)})
		got := string(x.Body)
		if x.Body == nil { // unchanged
			got = body
		}
		if want := "{" + rest + "," + kept + "}"; x.Refusal != nil || got != want {
			t.Errorf("%s: refusal %+v, the worker gets %s, want %s", field, x.Refusal, got, want)
		}
		x.End()
	}
}

// A body in another encoding of Unicode, or with white space in front, is checked like any body. Without fields that
// steer it stays as it is. A charset that kvroute does not know is refused.
func TestNoEncodingHidesSteeringFields(t *testing.T) {
	var utf16 []byte
	for i := range len(steers) {
		utf16 = append(utf16, steers[i], 0)
	}
	plain := []byte("{\x00}\x00")
	for name, c := range map[string]struct {
		body        []byte
		contentType string
		want        string // the body for the worker; "" if the request is refused
	}{
		"UTF-16":            {utf16, "application/json", cleaned},
		"UTF-16, named":     {utf16, "application/json; charset=utf-16", cleaned},
		"a mark":            {[]byte("\xef\xbb\xbf" + steers), "application/json;charset=UTF-8", cleaned},
		"quotes":            {[]byte(steers), `application/json; charset="utf-8"`, cleaned},
		"an empty charset":  {[]byte(steers), `application/json; charset=""`, cleaned},
		"white space":       {[]byte("\r\n " + steers), "application/json", cleaned},
		"nothing to remove": {plain, "application/json", string(plain)},
		"unknown charset":   {[]byte(steers), "application/json; charset=utf-7", ""},
		"a bad parameter":   {[]byte(steers), "application/json; charset=utf-8; charset=utf-7", ""},
	} {
		for mode, r := range map[string]envoytest.Request{
			"buffered": {}, "full duplex": {Mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, Chunk: 10},
			"ahead": {Mode: filterv3.ProcessingMode_STREAMED, Ahead: true, Chunk: 10}, "streamed": {Mode: filterv3.ProcessingMode_STREAMED, Chunk: 10},
		} {
			h := newHarness(t, extproc.Config{})
			r.Path, r.Body, r.Header = "/generate", c.body, []string{"content-type", c.contentType}
			x := h.Do(r)
			got := x.Body
			if got == nil {
				got = c.body
			}
			passes := c.want != "" && (mode != "streamed" || c.want == string(plain))
			if passes != (x.Refusal == nil) || passes && string(got) != c.want {
				t.Errorf("%s, %s: refusal %+v, the worker gets %q", name, mode, x.Refusal, got)
			}
			if c.want == "" && x.Refusal != nil && (x.Refusal.Status != 415 || !strings.Contains(x.Refusal.Body, "unsupported_charset")) {
				t.Errorf("%s, %s: refusal %+v", name, mode, x.Refusal)
			}
			x.End()
		}
	}
}

// On a trusted listener a body that is not JSON is routed by load: the worker refuses it. Otherwise kvroute refuses it.
func TestBodiesThatAreNotJSON(t *testing.T) {
	for _, trusted := range []bool{true, false} {
		for _, body := range []string{`{"model":"m","messages":[`, "{\"model\":\"m\",\"messages\":[\"\t\"]}", `hello`, `[]`} {
			h := newHarness(t, extproc.Config{TrustOverrides: trusted, AllowDirect: trusted})
			x := h.Do(chat(body))
			switch {
			case !trusted && (x.Refusal == nil || x.Refusal.Status != 400):
				t.Errorf("%s: refusal %+v", body, x.Refusal)
			case trusted && (x.Refusal != nil || x.Body != nil || len(h.router.asked) != 1 || !h.router.asked[0].Unread):
				t.Errorf("%s: refusal %+v, the router is asked for %+v", body, x.Refusal, h.router.asked)
			}
			x.End()
		}
	}
	h := newHarness(t, extproc.Config{TrustOverrides: true, AllowDirect: true})
	h.router.will(func(context.Context, router.Request) (router.Decision, error) {
		return router.Decision{}, fmt.Errorf("router: %w", router.ErrUnknownModel)
	})
	x := h.Do(chat("hello"))
	x.End()
	if n := h.count(t, "kvroute.extproc.fail_open", "unreadable_body"); x.Refusal != nil || n != 1 {
		t.Errorf("with several models: refusal %+v, %d failed open", x.Refusal, n)
	}
	if x := h.Do(chat(`{"messages":[1]}`)); x.Refusal == nil || x.Refusal.Status != 400 || !strings.Contains(x.Refusal.Body, `"param":"model"`) {
		t.Errorf("no model of several: refusal %+v", x.Refusal)
	}
}

// A body that fails open keeps no steering fields, and neither does one whose client is slower than the decision.
func TestFailingOpenPassesNoSteeringFields(t *testing.T) {
	h := newHarness(t, extproc.Config{})
	h.router.will(nil)
	x := h.Do(chat(strings.Replace(steers, `"model":"m","messages":[1],`, `"prompt":[1],`, 1)))
	if x.Refusal == nil && strings.Contains(string(x.Body), "kv_transfer_params") {
		t.Errorf("the pool gets %s", x.Body)
	}
	x.End()
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{DecisionTimeout: time.Second})
		x := h.Begin(streamed(true))
		x.SendHeaders()
		x.Send(part(steers[:20], false))
		for range 2 {
			if !x.Settle() {
				t.Fatal("the beginning was not answered")
			}
		}
		x.Send(part(steers[20:], true))
		x.Settle()
		var e struct {
			Error struct{ Code, Param string }
		}
		if x.Refusal == nil || json.Unmarshal([]byte(x.Refusal.Body), &e) != nil || e.Error.Code != "steering_field" || e.Error.Param != "kv_transfer_params" {
			t.Errorf("the refusal is %+v", x.Refusal)
		}
		x.End()
	})
}

// A request without room for its body is refused where kvroute could not check the body later.
func TestNoRoomPassesNoSteeringFields(t *testing.T) {
	for name, r := range map[string]envoytest.Request{
		"buffered": {}, "full duplex": {Mode: filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, Chunk: 40}, "streamed": {Mode: filterv3.ProcessingMode_STREAMED, Chunk: 40},
	} {
		h := newHarness(t, extproc.Config{MaxHeldBytes: int64(len(steers) / 2)})
		r.Path, r.Body = "/v1/chat/completions", []byte(steers)
		if x := h.Do(r); x.Refusal == nil {
			t.Errorf("%s: the worker gets the body", name)
		}
	}
}

// Two tenants in one request are an error, the same one twice is not.
func TestTwoTenants(t *testing.T) {
	for second, status := range map[string]int{"a": 0, "b": 400, "": 400} {
		h := newUnserved(t, extproc.Config{})
		h.router.will(nil)
		answers := process(t, h.server, begin(false, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_NONE, false,
			":method", "POST", ":path", "/v1/chat/completions", "x-tenant-id", "a", "x-tenant-id", second))
		if got := int(answers[0].GetImmediateResponse().GetStatus().GetCode()); got != status {
			t.Errorf("tenants a and %q: status %d, want %d", second, got, status)
		}
	}
	for list, salt := range map[string]string{"a": "a", " a , a ": "a", "a, b": "", "a,": "", ",": "none"} {
		h := newHarness(t, extproc.Config{})
		r := chat(hello)
		r.Header = []string{"x-tenant-id", list}
		switch x := h.Do(r); {
		case salt == "" && (x.Refusal == nil || x.Refusal.Status != 400):
			t.Errorf("tenants %q: refusal %+v, want status 400", list, x.Refusal)
		case salt != "" && (x.Refusal != nil || h.router.asked[0].Salt != strings.TrimPrefix(salt, "none")):
			t.Errorf("tenants %q: refusal %+v, want the salt %q", list, x.Refusal, salt)
		default:
			x.End()
		}
	}
}
