// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/process"
)

// Envoy reaches kvroute at a socket in the file system, also when a killed kvroute left the socket
// file behind. A socket in use is not replaced.
func TestUnixSocket(t *testing.T) {
	d := newStack(t, 2, []string{"--speed", "20"})
	at := "unix:" + filepath.Join(d.Dir, "kvroute.sock")
	d.begin(t, "--extproc-address", at)
	if d.Router.At.Extproc != at {
		t.Fatalf("kvroute is at %s", d.Router.At.Extproc)
	}
	decided := func() bool { return d.send(t, "hello", false).header.Get("X-Dynamo-Reason") != "" }
	if !decided() {
		t.Error("kvroute did not decide")
	}
	if status, _, stderr := runs(t, "serve", "--extproc-address", at, "--http-address", "127.0.0.1:0", "--nats-listen", "127.0.0.1:0"); status != 1 || !strings.Contains(stderr, "another process listens at") {
		t.Errorf("a second kvroute at the socket: status %d, %s", status, stderr)
	}
	kill(t, d.Router)
	outcomeOf(t, "kvroute is not there").check(t, d.send(t, "hello", false))
	d.Router = restart(t, d.Router, d.Dir)
	eventually(t, "the next kvroute does not decide", decided)
	atRest(t, d)
}

// Addresses in use are named together, before a start loads models.
func TestAddressesInUse(t *testing.T) {
	taken := map[string]string{"extproc-address": fmt.Sprint("127.0.0.1:", listenAt(t)), "http-address": fmt.Sprint("127.0.0.1:", listenAt(t))}
	status, _, stderr := runs(t, "serve", "--extproc-address", taken["extproc-address"], "--http-address", taken["http-address"], "--config", writeFile(t, "version: 1\nmodels:\n- {name: a, tokenizer: /no/such}\n"))
	for name, at := range taken {
		if want := fmt.Sprintf("%s is %q: listen tcp %s: bind: address already in use; stop the other program, or set another address", name, at, at); status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("status %d, %s; want %s", status, stderr, want)
		}
	}
}

// listenAt returns a port at which the test listens.
func listenAt(t *testing.T) int {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l.Addr().(*net.TCPAddr).Port
}

// Connections from Envoy are renewed periodically; requests on the old connections continue.
func TestConnectionsAreRenewed(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 0, nil)
	hang := make(chan struct{})
	d.begin(t, append(staticFlags(t, d, "faulty", startHTTP(t, faulty(hang, nil))), "--extproc-connection-age", "200ms")...)
	resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("hang in the stream", 4, true), nil)
	if err != nil {
		t.Fatal(err)
	}
	opened := func() int64 {
		n, err := d.Envoy.Stat(t.Context(), "cluster.kvroute.upstream_cx_total")
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	before := opened()
	undecided := 0
	eventually(t, "connections are not renewed", func() bool {
		got := d.send(t, "hello", false)
		if outcomeOf(t, "kvroute decides").check(t, got); got.header.Get("X-Dynamo-Reason") == "" {
			undecided++
		}
		return opened() >= before+4
	})
	if undecided > 0 {
		t.Errorf("%d requests were not decided", undecided)
	}
	if n, _, _ := inFlight(t, d); n < 1 {
		t.Error("the response that goes on holds no slot")
	}
	close(hang)
	outcomeOf(t, "kvroute decides").check(t, look(resp, nil))
	if n, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.streams_failed"); err != nil || n != 0 {
		t.Errorf("Envoy counts %d failed streams, %v", n, err)
	}
	atRest(t, d)
}

// With workers that speak HTTP/2, streams, errors, resets and disconnecting clients behave as with
// HTTP/1.1, and the first token is noticed.
func TestWorkersOverHTTP2(t *testing.T) {
	hang := make(chan struct{})
	seen := make(chan string, 100)
	s := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		seen <- r.Proto
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		does := func(what string) bool { return strings.Contains(string(body), what) }
		switch {
		case does("reset before headers"):
			panic(http.ErrAbortHandler)
		case does("fail"):
			http.Error(w, `{"error":"a fault"}`, http.StatusInternalServerError)
		case does(`"stream":true`):
			w.Header().Set("Content-Type", "text/event-stream")
			fmt.Fprint(w, "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n")
			_ = http.NewResponseController(w).Flush() // fails if the client disconnected
			if does("reset in the stream") {
				<-hang
				panic(http.ErrAbortHandler)
			}
			if does("hang in the stream") {
				<-r.Context().Done() // the client disconnects
				return
			}
			fmt.Fprint(w, "data: [DONE]\n\n")
		default:
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprint(w, `{"choices":[]}`)
		}
	}))
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)

	d := newStack(t, 0, nil)
	d.EnvoyConfig.WorkerHTTP2 = true
	refuses := heldAddress(t)
	d.begin(t, append(staticFlags(t, d, "h2", strings.TrimPrefix(s.URL, "http://"), "dead", refuses), "--avoid-failing", "0", "--router-mode", "round-robin")...)
	for range 4 {
		outcomeOf(t, "the worker refuses the connection").check(t, d.send(t, "answer", false))
		outcomeOf(t, "kvroute decides").check(t, d.send(t, "answer", true))
		outcomeOf(t, "the worker answers with an error").check(t, d.send(t, "fail", false))
		atRest(t, d)
	}
	if proto := <-seen; proto != "HTTP/2.0" {
		t.Errorf("Envoy connects to the worker with %s", proto)
	}
	for len(seen) > 0 {
		<-seen
	}
	for range 4 { // often enough to meet both workers as first choice
		outcomeOf(t, "the worker resets the connection before the response").check(t, d.send(t, "reset before headers", true))
		atRest(t, d)
	}
	if n := len(seen); n != 4 {
		t.Errorf("the worker got 4 requests %d times", n)
	}
	resp, err := send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody("reset in the stream", 4, true), nil)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the first token is not noticed", func() bool { n, pend, _ := inFlight(t, d); return n == 1 && pend == 0 })
	close(hang)
	outcomeOf(t, "the worker resets it in the response").check(t, look(resp, nil))
	atRest(t, d)

	var conn net.Conn
	for range 2 {
		conn = dial(t, d)
		body := chatBody("hang in the stream", 4, true)
		if _, err := fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body), body); err != nil {
			t.Fatal(err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(process.Patience)); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
			t.Errorf("the response begins with %q, %v", line, err)
		}
		_ = conn.Close()
		atRest(t, d)
	}
}
