// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// slowRelay forwards connections to an address, in the direction of the address at most rate bytes a second.
func slowRelay(t *testing.T, to string, rate int) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return // the test ends
			}
			conn, err := net.Dial("tcp", to)
			if err != nil {
				_ = from.Close()
				continue
			}
			go func() {
				_, _ = io.Copy(from, conn)
				_ = from.Close()
			}()
			go func() {
				defer conn.Close()
				part := make([]byte, rate/50)
				for {
					n, err := from.Read(part)
					if _, failed := conn.Write(part[:n]); err != nil || failed != nil {
						return
					}
					time.Sleep(time.Duration(n) * time.Second / time.Duration(rate))
				}
			}()
		}
	}()
	return l.Addr().String()
}

// A large body that needs longer than Envoy's message_timeout to reach kvroute is checked all the same, and its
// request is routed.
func TestSlowBodiesAreChecked(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 0, nil)
	var passed atomic.Int32
	worker := startHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if strings.Contains(string(body), "192.0.2.1") {
			passed.Add(1)
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[]}`)
	})
	d.begin(t, append(staticFlags(t, d, "a", worker), "--decision-timeout", "400ms")...)
	d.EnvoyConfig.MessageTimeout = 600 * time.Millisecond
	d.EnvoyConfig.ExtProc = []string{slowRelay(t, d.Router.At.Extproc, 400_000)}
	d.restartEnvoy(t)
	eventually(t, "kvroute does not decide", func() bool {
		resp, _ := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil)
		return resp.Header.Get("X-Dynamo-Reason") != ""
	})
	body := `{"model":"sim","kv_transfer_params":{"remote_host":"192.0.2.1"},"messages":[{"role":"user","content":"` + strings.Repeat("hello ", 120_000) + `"}]}`
	eventually(t, "a slow body is not decided", func() bool { // on a busy machine a decision may take too long
		resp, text := reply(t, d, "POST", chatPath, body, nil)
		decided := resp.StatusCode == http.StatusOK && resp.Header.Get("X-Dynamo-Reason") != ""
		if !decided {
			t.Logf("status %d: %.200s", resp.StatusCode, text)
		}
		return decided
	})
	if n := passed.Load(); n > 0 {
		t.Errorf("%d bodies pass unchecked", n)
	}
}
