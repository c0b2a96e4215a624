// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/envoy"
)

// Requests and responses in all forms of HTTP/2 on both sides, in each mode in which Envoy sends
// bodies: with trailers, without bodies, with headers only.
func TestFormsOfHTTP2(t *testing.T) {
	t.Parallel() // mostly waits
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Errorf("the worker reads: %v", err)
		}
		w.Header().Set("X-Got", fmt.Sprintf("%s %d %s", r.Method, len(body), r.Trailer.Get("X-Sum")))
		switch does := string(body) + strings.ReplaceAll(r.URL.RawQuery, "+", " "); {
		case strings.Contains(does, "end at once"):
			w.WriteHeader(http.StatusNoContent)
		case strings.Contains(does, "trailers only"):
			w.Header().Set("Content-Type", "application/grpc") // the headers end the response
		default:
			w.Header().Set("Content-Type", "text/event-stream")
			w.Header().Set("Trailer", "X-Done")
			for i := range 3 {
				fmt.Fprintf(w, "data: {\"choices\":[{\"delta\":{\"content\":\"%d\"}}]}\n\n", i)
				_ = http.NewResponseController(w).Flush() // the client reads to the end
			}
			w.Header().Set("X-Done", "yes")
		}
	}))
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	transport := &http.Transport{Protocols: s.Config.Protocols}
	t.Cleanup(transport.CloseIdleConnections)
	client := &http.Client{Transport: transport}

	for _, mode := range []envoy.BodyMode{envoy.Buffered, envoy.BufferedPartial, envoy.Streamed, envoy.StreamedAhead, envoy.FullDuplex} {
		t.Run(mode, func(t *testing.T) {
			d := newStack(t, 0, nil)
			d.EnvoyConfig.BodyMode, d.EnvoyConfig.WorkerHTTP2 = mode, true
			d.EnvoyConfig.Pool, d.EnvoyConfig.AllowPaths = []string{strings.TrimPrefix(s.URL, "http://")}, []string{"/others"}
			d.begin(t, staticFlags(t, d, "h2", d.EnvoyConfig.Pool[0])...)
			for _, c := range []struct {
				name, method, path, body string
				trailer                  string
				status                   int
				bytes                    int // of the response
				undecided                bool
			}{
				{name: "trailers of both", method: "POST", path: chatPath, body: chatBody("hello", 2, true), trailer: "abc", status: 200, bytes: 141},
				{name: "trailers of the response", method: "POST", path: chatPath, body: chatBody("hello", 2, true), status: 200, bytes: 141},
				{name: "a response that is its headers", method: "POST", path: chatPath, body: chatBody("end at once", 2, false), trailer: "abc", status: 204},
				{name: "an empty response", method: "POST", path: chatPath, body: chatBody("trailers only", 2, false), status: 200},
				{name: "a large body with trailers", method: "POST", path: chatPath, body: chatBody(strings.Repeat("many ", 60_000), 2, true), trailer: "abc", status: 200, bytes: 141},
				{name: "of others, trailers of both", method: "POST", path: "/others", body: "x", trailer: "abc", status: 200, bytes: 141, undecided: true},
				{name: "of others, without body", method: "OPTIONS", path: "/v1/models", status: 200, bytes: 141, undecided: true},
				{name: "of others, without any body", method: "HEAD", path: "/v1/models?trailers+only", status: 200, undecided: true},
				{name: "of others, deleted", method: "DELETE", path: "/others?end+at+once", status: 204, undecided: true},
			} {
				var body io.Reader
				if c.body != "" {
					body = io.MultiReader(strings.NewReader(c.body)) // of unknown length
				}
				req, err := http.NewRequestWithContext(t.Context(), c.method, d.Envoy.URL()+c.path, body)
				if err != nil {
					t.Fatal(err)
				}
				if c.trailer != "" {
					req.Trailer = http.Header{"X-Sum": {c.trailer}}
				}
				resp, err := client.Do(req)
				if err != nil {
					t.Fatalf("%s: %v", c.name, err)
				}
				text, err := io.ReadAll(resp.Body)
				_ = resp.Body.Close() // the whole body was read
				if err != nil || resp.StatusCode != c.status || len(text) != c.bytes || c.bytes > 0 && resp.Trailer.Get("X-Done") != "yes" {
					t.Errorf("%s: status %d, %d bytes, trailers %v, %v; want %d and %d: %.200s", c.name, resp.StatusCode, len(text), resp.Trailer, err, c.status, c.bytes, text)
				}
				got, want := resp.Header.Get("X-Got"), fmt.Sprintf("%s %d %s", c.method, len(c.body), c.trailer)
				if mode != envoy.Buffered && c.trailer != "" {
					// Envoy may send such a body twice if it may retry the request: see
					// docs/envoy.md.
					got = strings.Replace(got, fmt.Sprintf(" %d ", 2*len(c.body)), fmt.Sprintf(" %d ", len(c.body)), 1)
				}
				if got != want {
					t.Errorf("%s: the worker got %q, want %q", c.name, got, want)
				}
				if decided := resp.Header.Get("X-Dynamo-Reason") != ""; decided == (c.undecided || c.trailer != "" && mode == envoy.StreamedAhead) {
					t.Errorf("%s: decided: %v", c.name, decided)
				}
				atRest(t, d)
			}
			for _, stat := range []string{"streams_failed", "message_timeouts", "spurious_msgs_received", "rejected_header_mutations"} {
				if n, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute."+stat); err != nil || n != 0 {
					t.Errorf("Envoy counts %d %s, %v", n, stat, err)
				}
			}
		})
	}
}
