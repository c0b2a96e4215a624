// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/envoytest"
)

// Envoy refuses invalid HTTP itself, with a status, an error in OpenAI's form and no stream to kvroute, in each
// configuration that this project writes or keeps. A worker's own 400 reaches kvroute like any response. Without
// patches, Envoy Gateway has Envoy's own texts. It accepts upgrades.
func TestEnvoysOwnErrors(t *testing.T) {
	d := newStack(t, 0, nil)
	var status atomic.Int64 // of the worker
	status.Store(http.StatusOK)
	worker := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", "text/plain")
		w.WriteHeader(int(status.Load()))
	})
	d.begin(t, append(staticFlags(t, d, "a", worker), "--second-choice", "none")...)
	body := chatBody("hello", 2, false)
	post := fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n", chatPath, len(body))
	for name, config := range configurations(t, [2]string{worker, worker}, d.Router.At.Extproc) {
		t.Run(name, func(t *testing.T) {
			proxy, err := envoytest.Start(t.Context(), envoytest.Options{Config: config})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = proxy.Stop() })
			sum := func(counter string) int64 {
				t.Helper()
				n, err := proxy.Sum(t.Context(), `ext_proc.*\.`+counter+"$")
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			messages := func(want int) int64 {
				t.Helper()
				status.Store(int64(want))
				before := sum("stream_msgs_sent")
				if resp, text := whole(t, "POST", proxy.URL()+chatPath, body, nil); resp.StatusCode != want {
					t.Fatalf("status %d, %s, want %d", resp.StatusCode, text, want)
				}
				return sum("stream_msgs_sent") - before
			}
			gateway := name == "endpoint-override" || name == "original-destination"
			eventually(t, "kvroute is not asked", func() bool { return messages(http.StatusOK) > 0 })
			served := messages(http.StatusOK)
			if got := messages(http.StatusBadRequest); got < served {
				t.Errorf("kvroute gets %d messages for a worker's 400, and %d for its 200", got, served)
			}
			for what, c := range map[string]struct {
				request string
				want    int
				code    string
			}{
				"HTTP/1.0":            {strings.Replace(post, "1.1", "1.0", 1) + "\r\n" + body, 426, "http_version"},
				"101 headers":         {post + strings.Repeat("x-h: v\r\n", 101) + "\r\n" + body, 431, "headers_too_large"},
				"headers of 62 KiB":   {post + "cookie: " + strings.Repeat("c", 62<<10) + "\r\n\r\n" + body, 431, "headers_too_large"},
				"a header's bad name": {post + "bad header: v\r\n\r\n" + body, 400, "bad_http"},
				"no Host":             {strings.Replace(post, "Host: x\r\n", "", 1) + "\r\n" + body, 400, "bad_http"},
				"an unknown encoding": {"POST " + chatPath + " HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: zip\r\n\r\n", 501, "transfer_encoding"},
				"an upgrade":          {"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n", 403, "forbidden"},
				"an unknown path":     {"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", 404, "unknown_path"},
			} {
				if gateway && c.want == 403 {
					continue
				}
				before := sum("streams_started")
				got, text := rawReply(t, strings.TrimPrefix(proxy.URL(), "http://"), c.request)
				if got != c.want {
					t.Errorf("%s: status %d, want %d", what, got, c.want)
				}
				if streams := sum("streams_started") - before; streams != 0 {
					t.Errorf("%s: %d streams to kvroute", what, streams)
				}
				var e struct {
					Error struct{ Message, Type, Code string }
				}
				if err := json.Unmarshal([]byte(text), &e); name != "endpoint-override" && (err != nil || e.Error.Message == "" || e.Error.Type != "invalid_request_error" || e.Error.Code != c.code) {
					t.Errorf("%s: %q, want an error with the code %s", what, text, c.code)
				}
			}
			// The headers of this request are valid: kvroute sees them before its body.
			if got, _ := rawReply(t, strings.TrimPrefix(proxy.URL(), "http://"), "POST "+chatPath+" HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"); got != 400 && !gateway {
				t.Errorf("a bad chunk: status %d, want 400", got)
			}
		})
	}
}

// rawReply sends a text, and returns the status and the body of the response; 0 for none.
func rawReply(t *testing.T, address, request string) (status int, body string) {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second)) // fails only on a closed connection
	_, _ = io.WriteString(conn, request)                   // Envoy may have closed its side: the response says why
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	text, _ := io.ReadAll(resp.Body) // Envoy may reset the connection behind the response
	return resp.StatusCode, string(text)
}
