// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/api"
)

// A web page cannot change anything through the browser that shows it, even on loopback and even
// under a name of its own that resolves to kvroute.
func TestWebPagesAreRefused(t *testing.T) {
	s := httptest.NewServer(api.New(api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler()}))
	defer s.Close()
	port := s.URL[strings.LastIndexByte(s.URL, ':'):]
	const body, kind = `{"model":"m","token_ids":[1]}`, "application/json"
	for name, c := range map[string]struct {
		method, path, host, origin, site, kind, body string
		want                                         int
	}{
		"a program":                        {"POST", "/v1/best_worker", "", "", "", kind, body, 200},
		"a program, by localhost":          {"POST", "/v1/best_worker", "localhost" + port, "", "", kind + "; charset=utf-8", body, 200},
		"a program, by IPv6":               {"POST", "/v1/best_worker", "[::1]" + port, "", "", kind, body, 200},
		"its own page":                     {"POST", "/v1/best_worker", "127.0.0.1" + port, "http://127.0.0.1" + port, "same-origin", kind, body, 200},
		"text":                             {"POST", "/v1/best_worker", "", "", "", "text/plain", body, 415},
		"a form":                           {"POST", "/v1/best_worker", "", "", "", "application/x-www-form-urlencoded", body, 415},
		"nothing said":                     {"POST", "/v1/best_worker", "", "", "", "", body, 415},
		"another page":                     {"POST", "/v1/best_worker", "", "http://evil.example", "", kind, body, 403},
		"another page, as text":            {"POST", "/v1/best_worker", "", "http://evil.example", "", "text/plain", body, 403},
		"a page of another port":           {"POST", "/v1/best_worker", "127.0.0.1" + port, "http://127.0.0.1:1", "", kind, body, 403},
		"a page without an origin":         {"POST", "/v1/best_worker", "", "null", "", kind, body, 403},
		"another site":                     {"POST", "/v1/best_worker", "", "", "cross-site", kind, body, 403},
		"a name that leads here":           {"POST", "/v1/best_worker", "evil.example" + port, "http://evil.example" + port, "same-origin", kind, body, 403},
		"a name that leads here, silently": {"POST", "/v1/best_worker", "evil.example" + port, "", "", kind, body, 403},
		"reading by such a name":           {"GET", "/v1/workers", "evil.example" + port, "", "", "", "", 403},
		"reading by localhost":             {"GET", "/v1/workers", "localhost" + port, "http://grafana.example", "cross-site", "", "", 200},
		"a probe by any name":              {"GET", "/healthz", "kvroute.internal" + port, "", "", "", "", 200},
		"an empty body":                    {"POST", "/v1/dump_events", "", "", "", "", "", 200},
		"an empty body of another page":    {"POST", "/v1/dump_events", "", "http://evil.example", "", "", "", 403},
		"taking back a worker elsewhere":   {"DELETE", "/v1/workers/a", "", "http://evil.example", "", "", "", 403},
	} {
		req, err := http.NewRequestWithContext(t.Context(), c.method, s.URL+c.path, strings.NewReader(c.body))
		if err != nil {
			t.Fatal(err)
		}
		req.Host = c.host
		for header, value := range map[string]string{"Origin": c.origin, "Sec-Fetch-Site": c.site, "Content-Type": c.kind} {
			if value != "" {
				req.Header.Set(header, value)
			}
		}
		resp, err := s.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if resp.StatusCode != c.want {
			t.Errorf("%s: status %d, want %d", name, resp.StatusCode, c.want)
		}
	}
}

// With tokens, which no page has, kvroute may have any host name.
func TestNamesAreFreeWithTokens(t *testing.T) {
	tokens, err := api.OpenTokens(tokenFile(t, tokenA))
	if err != nil {
		t.Fatal(err)
	}
	s := httptest.NewServer(api.New(api.Config{Router: newRouter(t, 1), Metrics: http.NotFoundHandler(), Tokens: tokens}))
	defer s.Close()
	req, err := http.NewRequestWithContext(t.Context(), "POST", s.URL+"/v1/best_worker", strings.NewReader(`{"model":"m","token_ids":[1]}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Host = "kvroute.example"
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Authorization", "Bearer "+tokenA)
	resp, err := s.Client().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		t.Errorf("status %d", resp.StatusCode)
	}
}

// The dashboard needs no token and may be read by any name. No path of it leads to the API.
func TestDashboardIsOpen(t *testing.T) {
	tokens, err := api.OpenTokens(tokenFile(t, tokenA))
	if err != nil {
		t.Fatal(err)
	}
	for name, conf := range map[string]api.Config{"token": {Tokens: tokens}, "no token": {}} {
		conf.Router, conf.Metrics = newRouter(t, 1), http.NotFoundHandler()
		s := httptest.NewServer(api.New(conf))
		defer s.Close()
		refused := http.StatusForbidden // by the header Host
		if conf.Tokens != nil {
			refused = http.StatusUnauthorized
		}
		for path, want := range map[string]int{
			"/": 200, "/dashboard/main.js": 200, "/dashboard/none.js": 404, "/dashboard/": 404,
			"/v1/workers": refused, "/v1/live": refused, "/v1/decisions": refused, "/dashboard": refused, "//": refused, "/./": refused,
			"/dashboard/../v1/workers": 404, "/dashboard/%2e%2e/v1/workers": 404, "/dashboard%2fmain.js": 200, "/dashboard/..%2fv1%2fworkers": 404,
		} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+path, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Host = "evil.example"
			resp, err := http.DefaultTransport.RoundTrip(req) // follows no redirect
			if err != nil {
				t.Fatal(err)
			}
			_ = resp.Body.Close()
			if resp.StatusCode != want {
				t.Errorf("%s, %s: status %d, want %d", name, path, resp.StatusCode, want)
			}
		}
	}
}
