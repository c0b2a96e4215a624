// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
)

// staticFlags writes a configuration file with workers of the model "sim", given as name
// and address in turn, and returns the flag that names it. They are not probed, so requests meet their faults.
func staticFlags(t *testing.T, d *demonstration, pairs ...string) []string {
	t.Helper()
	var text strings.Builder
	text.WriteString("version: 1\nworkers:\n")
	for i := 0; i < len(pairs); i += 2 {
		fmt.Fprintf(&text, "- {name: %s, address: %q, models: [sim], block_size: 16, max_num_batched_tokens: 2048, health: none}\n", pairs[i], pairs[i+1])
	}
	file := filepath.Join(d.Dir, "kvroute.yaml")
	if err := os.WriteFile(file, []byte(text.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	return []string{"--config", file}
}

// blackHole is an address that accepts no connections: its queue is full.
func blackHole(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	at, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	address := fmt.Sprint("127.0.0.1:", at.(*syscall.SockaddrInet4).Port) //nolint:forcetypeassert // it was bound as such
	for range 16 {
		conn, err := net.DialTimeout("tcp", address, 300*time.Millisecond)
		if err != nil {
			return address
		}
		t.Cleanup(func() { _ = conn.Close() })
	}
	t.Fatal("the queue of a socket that nobody accepts at does not get full")
	return ""
}

// heldAddress reserves an address of loopback until the test ends.
func heldAddress(t *testing.T) string {
	t.Helper()
	return fmt.Sprint("127.0.0.1:", fixtures.HoldPort(t))
}

// atRest waits until no request is in flight, none waits, and no stream is open.
func atRest(t *testing.T, d *demonstration) {
	t.Helper()
	idle(t, d)
	eventually(t, "streams stay open, or requests go on waiting", func() bool {
		_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
		// The metric is absent until the first stream: a router that has just started may have had none.
		return strings.Trim(level(text, `kvroute_extproc_streams{kind="main"}`), "0") == "" && strings.Trim(level(text, `kvroute_router_queue_size{model="sim"}`), "0") == ""
	})
}

// atRestAfterAnAnswer is atRest after requests that their clients left: their load stays until the worker of
// [faulty] answers another request.
func atRestAfterAnAnswer(t *testing.T, d *demonstration) {
	t.Helper()
	eventually(t, "requests stay in flight", func() bool { n, _, _ := inFlight(t, d); return n == 0 })
	outcomeOf(t, "kvroute decides").check(t, d.send(t, "answer", false))
	atRest(t, d)
}

// level returns a metric's value, "" if it is not there.
func level(text, metric string) string {
	_, rest, _ := strings.Cut(text, "\n"+metric+" ")
	value, _, _ := strings.Cut(rest, "\n")
	return value
}

// send sends a short chat and reads the response.
func (d *demonstration) send(t *testing.T, content string, stream bool) sight {
	t.Helper()
	return look(send(t, t.Context(), "POST", d.Envoy.URL()+chatPath, chatBody(content, 4, stream), nil))
}

// A worker that cannot be reached delays its request by at most the connect timeout: then the second
// choice serves it. Without a second choice the client gets an error.
func TestWorkersThatCannotBeReached(t *testing.T) {
	t.Parallel() // mostly waits
	hole := blackHole(t)
	for _, c := range []struct {
		row     string
		bad     string
		atLeast time.Duration
	}{
		{row: "the worker refuses the connection", bad: heldAddress(t)},
		{row: "the worker does not accept the connection", bad: hole, atLeast: 400 * time.Millisecond},
	} {
		t.Run(c.row, func(t *testing.T) {
			d := newStack(t, 1, []string{"--speed", "20"})
			d.begin(t, append(staticFlags(t, d, "bad", c.bad), "--router-mode", "round-robin", "--avoid-failing", "0")...)
			reached := 0
			for i := range 6 {
				begin := time.Now()
				got := d.send(t, fmt.Sprint("question ", i), i%2 == 0)
				outcomeOf(t, c.row).check(t, got)
				eventually(t, "the decision does not end", func() bool { return !newest(t, d).Freed.IsZero() })
				if last := newest(t, d); last.WorkerName == "bad" {
					reached++
					if took := time.Since(begin); took < c.atLeast || got.header.Get("X-Sim-Worker") != "worker-1" || !last.Served.IsValid() {
						t.Errorf("after %v from %q, served by %v", took, got.header.Get("X-Sim-Worker"), last.Served)
					}
				}
				atRest(t, d)
			}
			if reached < 2 {
				t.Errorf("the worker was chosen %d times, want every other", reached)
			}
		})
	}
	t.Run("neither", func(t *testing.T) {
		d := newStack(t, 0, nil)
		d.Unrouted = true
		d.begin(t, append(staticFlags(t, d, "refuses", heldAddress(t), "swallows", hole), "--router-mode", "round-robin", "--avoid-failing", "0")...)
		for i := range 4 {
			outcomeOf(t, "the other choices fail as well").check(t, d.send(t, fmt.Sprint(i), i%2 == 0))
			atRest(t, d)
		}
		// The client disconnects while Envoy tries, unless Envoy gives up before the slot is seen.
		ctx, cancel := context.WithCancel(t.Context())
		watched := make(chan struct{})
		go func() {
			defer close(watched)
			_ = process.Until(ctx, process.Patience, "", func(context.Context) bool { n, _, _ := inFlight(t, d); return n == 1 })
			cancel()
		}()
		if resp, err := send(t, ctx, "POST", d.Envoy.URL()+chatPath, chatBody("at once", 4, false), nil); err == nil {
			_ = resp.Body.Close() // Envoy gave up first
		}
		cancel()
		<-watched
		atRest(t, d)
	})
}

// dial connects to Envoy.
func dial(t *testing.T, d *demonstration) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(d.Envoy.URL(), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	return conn
}

// Whenever a client disconnects, its request leaves nothing behind and affects no other request.
func TestClientsLeave(t *testing.T) {
	d := newStack(t, 0, nil)
	hang := make(chan struct{})
	defer close(hang)
	address := startHTTP(t, faulty(hang, make(chan struct{})))
	d.begin(t, append(staticFlags(t, d, "faulty", address), "--avoid-failing", "0", "--router-queue-threshold", "0", "--queue-wait", "9s")...)
	write := func(t *testing.T, conn net.Conn, text string) {
		t.Helper()
		if _, err := io.WriteString(conn, text); err != nil {
			t.Fatal(err)
		}
	}
	booked := func() bool { n, _, _ := inFlight(t, d); return n == 1 }
	opened := func() bool {
		_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
		return level(text, `kvroute_extproc_streams{kind="main"}`) == "1"
	}
	request := func(body string) string {
		return fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", chatPath, len(body))
	}
	hangs := chatBody("hang before headers "+strings.Repeat("long ", 100), 4, true)
	for _, c := range []struct {
		when string
		does func(t *testing.T, conn net.Conn)
	}{
		{"in its headers", func(t *testing.T, conn net.Conn) {
			write(t, conn, request(hangs)[:40])
			eventually(t, "Envoy does not see the connection", func() bool {
				n, err := d.Envoy.Stat(t.Context(), "http.llm.downstream_cx_active")
				return err == nil && n > 0
			})
		}},
		{"in its body", func(t *testing.T, conn net.Conn) {
			write(t, conn, request(hangs)+hangs[:50])
			eventually(t, "kvroute does not see the request", opened)
		}},
		{"while kvroute decides", func(t *testing.T, conn net.Conn) {
			started, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.streams_started")
			if err != nil {
				t.Fatal(err)
			}
			hold(t, d.Router)
			t.Cleanup(func() { _ = d.Router.Cmd.Process.Signal(syscall.SIGCONT) })
			write(t, conn, request(hangs)+hangs)
			eventually(t, "Envoy does not ask kvroute", func() bool {
				n, err := d.Envoy.Stat(t.Context(), "http.llm.ext_proc.kvroute.streams_started")
				return err == nil && n > started
			})
		}},
		{"while it waits for room", func(t *testing.T, conn net.Conn) {
			first := dial(t, d)
			t.Cleanup(func() { _ = first.Close() })
			write(t, first, request(hangs)+hangs)
			eventually(t, "the first request is not booked", booked)
			write(t, conn, request(hangs)+hangs)
			eventually(t, "the second request does not wait", func() bool {
				_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
				return level(text, `kvroute_router_queue_size{model="sim"}`) == "1"
			})
		}},
		{"in the prefill", func(t *testing.T, conn net.Conn) {
			write(t, conn, request(hangs)+hangs)
			eventually(t, "no slot is taken", booked)
		}},
		{"in the response", func(t *testing.T, conn net.Conn) {
			body := chatBody("hang in the stream", 4, true)
			write(t, conn, request(body)+body)
			if line, err := bufio.NewReader(conn).ReadString('\n'); err != nil || !strings.Contains(line, "200") {
				t.Errorf("the response begins with %q, %v", line, err)
			}
			if !booked() {
				t.Error("no slot is taken")
			}
		}},
		{"behind the response", func(t *testing.T, conn net.Conn) {
			body := chatBody("answer", 4, false)
			write(t, conn, request(body)+body)
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			outcomeOf(t, "kvroute decides").check(t, look(resp, err))
		}},
	} {
		for _, how := range []string{"closes", "resets"} {
			t.Run(c.when+", "+how, func(t *testing.T) {
				conn := dial(t, d)
				if tcp, ok := conn.(*net.TCPConn); ok && how == "resets" {
					if err := tcp.SetLinger(0); err != nil {
						t.Fatal(err)
					}
				}
				c.does(t, conn)
				_ = conn.Close()
				if c.when == "while kvroute decides" {
					eventually(t, "Envoy does not see that the client is gone", func() bool {
						n, err := d.Envoy.Stat(t.Context(), "http.llm.downstream_rq_active")
						return err == nil && n == 0
					})
					if err := d.Router.Cmd.Process.Signal(syscall.SIGCONT); err != nil {
						t.Fatal(err)
					}
				}
				if c.when == "while it waits for room" {
					eventually(t, "the queue keeps who has left", func() bool {
						_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
						return level(text, `kvroute_router_queue_size{model="sim"}`) == "0" && booked()
					})
				}
			})
			atRestAfterAnAnswer(t, d)
		}
	}
	outcomeOf(t, "the client leaves").check(t, sight{})
	outcomeOf(t, "kvroute decides").check(t, d.send(t, "answer", false))
}

// A body of exactly the limit passes, one byte more does not, whether its length is declared or not,
// and whether the limit is Envoy's or kvroute's.
func TestBodiesAtTheLimit(t *testing.T) {
	const limit = 200_000
	passes, tooLarge := outcomeOf(t, "kvroute decides"), outcomeOf(t, "the body is larger than the limit")
	body := func(size int) string {
		text := chatBody("", 2, false)
		return strings.Replace(text, `"content":""`, `"content":"`+strings.Repeat("a ", (size-len(text))/2)+strings.Repeat("b", (size-len(text))%2)+`"`, 1)
	}
	for _, c := range []struct {
		whose       string
		envoy, ours int
	}{
		{"both", limit, limit},
		{"Envoy's", limit, 2 * limit},
		{"kvroute's", 2 * limit, limit},
	} {
		t.Run(c.whose, func(t *testing.T) {
			d := newStack(t, 1, []string{"--speed", "1000", "--num-gpu-blocks", "65536"})
			d.EnvoyConfig.MaxBodyBytes = c.envoy
			d.EnvoyConfig.MessageTimeout, d.EnvoyConfig.MaxMessageTimeout = 30*time.Second, 40*time.Second // for busy machines
			d.begin(t, "--max-body-bytes", fmt.Sprint(c.ours), "--decision-timeout", "25s")
			for _, said := range []bool{true, false} {
				for size, want := range map[int]outcome{limit: passes, limit + 1: tooLarge, 3 * limit: tooLarge} {
					text := body(size)
					if len(text) != size {
						t.Fatalf("a body of %d bytes, want %d", len(text), size)
					}
					req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, d.Envoy.URL()+chatPath, io.MultiReader(strings.NewReader(text)))
					if err != nil {
						t.Fatal(err)
					}
					req.Header.Set("Content-Type", "application/json")
					if said {
						req.ContentLength = int64(size)
					}
					resp, err := http.DefaultClient.Do(req)
					got := look(resp, err)
					want.check(t, got)
					if size == limit && got.header.Get("X-Dynamo-Reason") == "" {
						t.Error("kvroute did not decide")
					}
					atRest(t, d)
				}
			}
		})
	}
}

// Whatever takes too long is ended by a timeout: a client that does not send, a worker that does not
// answer or stops answering, a decision.
func TestTimeouts(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 0, nil)
	hang := make(chan struct{})
	defer close(hang)
	address := startHTTP(t, faulty(hang, make(chan struct{})))
	d.EnvoyConfig.RequestTimeout, d.EnvoyConfig.IdleTimeout = 2*time.Second, 2*time.Second
	d.begin(t, append(staticFlags(t, d, "faulty", address), "--avoid-failing", "0")...)
	for _, stream := range []bool{false, true} {
		outcomeOf(t, "the worker hangs before the response").check(t, d.send(t, "hang before headers", stream))
		atRest(t, d)
	}
	outcomeOf(t, "the worker hangs in the response").check(t, d.send(t, "hang in the stream", true))
	atRest(t, d)

	body := chatBody("answer", 4, false)
	for where, text := range map[string]string{
		"the headers": "POST " + chatPath + " HTTP/1.1\r\nHost: x\r\n",
		"the body":    fmt.Sprintf("POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s", chatPath, len(body)+1, body),
	} {
		t.Run(where, func(t *testing.T) {
			conn := dial(t, d)
			defer conn.Close()
			if _, err := io.WriteString(conn, text); err != nil {
				t.Fatal(err)
			}
			if err := conn.SetReadDeadline(time.Now().Add(process.Patience)); err != nil {
				t.Fatal(err)
			}
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			outcomeOf(t, "the client is too slow to send").check(t, look(resp, err))
			atRest(t, d)
		})
	}
}

// A router that has too little time to decide, or too many requests, leaves requests to the pool.
func TestTheRouterHasNoTimeOrRoom(t *testing.T) {
	d := startStack(t, 2, []string{"--speed", "5"})
	failed := func(reason string) bool {
		_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
		return level(text, fmt.Sprintf(`kvroute_extproc_fail_open_total{reason=%q}`, reason)) != ""
	}
	d.Unrouted = true
	if err := d.StartRouter(t.Context(), "--decision-timeout", "1ns"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the request is decided", func() bool {
		got := d.send(t, "hello", false)
		outcomeOf(t, "kvroute needs longer than `--decision-timeout`").check(t, got)
		return got.header.Get("X-Dynamo-Reason") == "" && failed("budget")
	})
	atRest(t, d)

	if err := d.StartRouter(t.Context(), "--max-streams", "1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "Envoy does not find kvroute", func() bool { return d.send(t, "hello", false).header.Get("X-Dynamo-Reason") != "" })
	ctx, leave := context.WithCancel(t.Context())
	defer leave()
	eventually(t, "the long request is left to Envoy's choice", func() bool { // as on a busy machine
		atRest(t, d) // otherwise the request is the second one in flight
		resp, err := send(t, ctx, "POST", d.Envoy.URL()+chatPath, chatBody("a long story", 4000, true), nil)
		if err != nil {
			t.Fatal(err)
		}
		if resp.Header.Get("X-Dynamo-Reason") == "" {
			_ = resp.Body.Close()
			return false
		}
		t.Cleanup(func() { _ = resp.Body.Close() }) // leave has ended it
		return true
	})
	eventually(t, "no slot is taken", func() bool { n, _, _ := inFlight(t, d); return n == 1 })
	got := d.send(t, "hello", false)
	outcomeOf(t, "more requests than `--max-streams` are in flight").check(t, got)
	if got.header.Get("X-Dynamo-Reason") != "" || !failed("limit") {
		t.Error("the second request at a time is decided")
	}
	leave()
	atRest(t, d)

	d.Unrouted = true
	if err := d.StartRouter(t.Context(), "--max-held-bytes", "1"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a body above the budget fails open", func() bool {
		got := d.send(t, "hello", false)
		outcomeOf(t, "all request bodies together need more than `--max-held-bytes`").check(t, got)
		return got.header.Get("X-Dynamo-Reason") == "" && failed("held_bytes")
	})
}

// Requests that kvroute answers itself.
func TestRefusals(t *testing.T) {
	other := writeFile(t, "version: 1\nworkers:\n- {name: other, address: \"127.0.0.1:1\", models: [other], health: none}\n")
	d := startStack(t, 1, []string{"--speed", "50"}, "--config", other)
	url := d.Envoy.URL()
	for _, c := range []struct{ row, method, body string }{
		{row: "the body is no JSON", method: "POST", body: `{"model":"sim","messages":[`},
		{row: "the body names no model, and there are several", method: "POST", body: `{"messages":[{"role":"user","content":"a"}]}`},
		{row: "the method is wrong", method: "GET"},
		{row: "the model is unknown", method: "POST", body: `{"model":"x","messages":[{"role":"user","content":"a"}]}`},
	} {
		outcomeOf(t, c.row).check(t, look(send(t, t.Context(), c.method, url+chatPath, c.body, nil)))
		atRest(t, d)
	}
	if err := d.Engines[0].Cmd.Process.Signal(syscall.SIGTERM); err != nil { // the engine deregisters
		t.Fatal(err)
	}
	eventually(t, "the worker does not leave", func() bool { return len(workers(t, d)) == 1 })
	outcomeOf(t, "there is no worker").check(t, d.send(t, "hello", false))
}

// Without room, requests are refused at once, or wait for the allowed time.
func TestRefusalsForLackOfRoom(t *testing.T) {
	t.Parallel() // mostly waits
	d := newStack(t, 0, nil)
	hang := make(chan struct{})
	defer close(hang)
	flags := staticFlags(t, d, "faulty", startHTTP(t, faulty(hang, make(chan struct{}))))
	d.begin(t, append(flags, "--active-prefill-tokens-threshold", "0")...)
	for _, c := range []struct {
		row   string
		flags []string
		waits int // requests that already wait
	}{
		{row: "all workers are above a threshold", flags: []string{"--active-prefill-tokens-threshold", "0"}},
		{row: "the request waits longer than `--queue-wait`", flags: []string{"--router-queue-threshold", "0", "--queue-wait", "3s"}},
		{row: "the queue is full", flags: []string{"--router-queue-threshold", "0", "--queue-wait", "9s", "--router-queue-limit", "1"}, waits: 1},
	} {
		t.Run(c.row, func(t *testing.T) {
			if err := d.StartRouter(t.Context(), append(flags, c.flags...)...); err != nil {
				t.Fatal(err)
			}
			// A health check before kvroute was ready makes Envoy leave it out until the next one.
			eventually(t, "kvroute is not ready", func() bool {
				resp, _ := get(t, "http://"+d.Router.At.HTTP+"/readyz")
				return resp.StatusCode == http.StatusOK
			})
			checks := func() int64 {
				n, err := d.Envoy.Sum(t.Context(), `^cluster\.kvroute\.health_check\.success$`)
				if err != nil {
					t.Fatal(err)
				}
				return n
			}
			earlier := checks()
			eventually(t, "Envoy does not check kvroute's health", func() bool { return checks() > earlier })
			eventually(t, "Envoy does not ask the router that started", func() bool {
				return d.send(t, "answer", false).header.Get("X-Dynamo-Reason") != ""
			})
			atRest(t, d)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			left := make(chan error)
			busy := func() {
				go func() {
					got := look(send(t, ctx, "POST", d.Envoy.URL()+chatPath, chatBody("hang before headers "+strings.Repeat("long ", 100), 4, true), nil))
					left <- got.err
				}()
			}
			busy()
			eventually(t, "no slot is taken", func() bool { _, pend, _ := inFlight(t, d); return pend > 0 })
			for range c.waits {
				busy()
			}
			eventually(t, "nobody waits", func() bool {
				_, text := get(t, "http://"+d.Router.At.HTTP+"/metrics")
				n := level(text, `kvroute_router_queue_size{model="sim"}`)
				return c.waits == 0 || n == fmt.Sprint(c.waits)
			})
			outcomeOf(t, c.row).check(t, d.send(t, "answer", false))
			leave()
			for range 1 + c.waits {
				if err := <-left; !errors.Is(err, context.Canceled) {
					t.Errorf("the client that left saw %v", err)
				}
			}
			atRest(t, d)
		})
	}
}

// With certificates that do not match, kvroute is treated as absent: the pool serves.
func TestWrongCertificates(t *testing.T) {
	authority, other := newAuthority(t), newAuthority(t)
	dir, elsewhere := t.TempDir(), t.TempDir()
	cert, key, ca := authority.write(dir, "kvroute.internal")
	right := struct{ cert, key, ca string }{}
	right.cert, right.key, right.ca = authority.write(dir, "envoy.internal")
	wrong := right
	wrong.cert, wrong.key, wrong.ca = other.write(elsewhere, "envoy.internal")
	d := newStack(t, 2, []string{"--speed", "20"})
	d.EnvoyConfig.Cert, d.EnvoyConfig.Key, d.EnvoyConfig.CA, d.EnvoyConfig.ServerName = right.cert, right.key, right.ca, "kvroute.internal"
	d.begin(t, "--extproc-tls-cert", cert, "--extproc-tls-key", key, "--extproc-tls-client-ca", ca)
	for name, change := range map[string]func(e *demonstration){
		"a client certificate of a stranger": func(e *demonstration) { e.EnvoyConfig.Cert, e.EnvoyConfig.Key = wrong.cert, wrong.key },
		"no client certificate":              func(e *demonstration) { e.EnvoyConfig.Cert, e.EnvoyConfig.Key = "", "" },
		"Envoy trusts somebody else":         func(e *demonstration) { e.EnvoyConfig.CA = wrong.ca },
		"kvroute has another name":           func(e *demonstration) { e.EnvoyConfig.ServerName = "envoy.internal" },
		"Envoy speaks without TLS": func(e *demonstration) {
			e.EnvoyConfig.Cert, e.EnvoyConfig.Key, e.EnvoyConfig.CA, e.EnvoyConfig.ServerName = "", "", "", ""
		},
		"Envoy knows kvroute and is known":    nil,
		"Envoy takes any name of its kvroute": func(e *demonstration) { e.EnvoyConfig.ServerName = "" },
	} {
		t.Run(name, func(t *testing.T) {
			e := *d
			trusted := change == nil || strings.Contains(name, "any name")
			if change != nil {
				change(&e)
			}
			if err := e.StartEnvoy(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = e.Envoy.Stop() })
			if trusted {
				eventually(t, "kvroute does not decide", func() bool { return e.send(t, "hello", false).header.Get("X-Dynamo-Reason") != "" })
			}
			for i := range 5 {
				got := e.send(t, "hello", i%2 == 0)
				outcomeOf(t, "Envoy and kvroute do not trust each other's certificates").check(t, got)
				if decided := got.header.Get("X-Dynamo-Reason") != ""; decided != trusted {
					t.Errorf("decided: %v", decided)
				}
			}
			atRest(t, d)
		})
	}
}
