// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bytes"
	"context"
	"net"
	"runtime"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// background calls run until the test's end.
func background(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

// bind binds a socket until the test's end, and returns its endpoint with the real port. No
// goroutine outlives the socket.
func bind(t *testing.T, endpoint string, role zmtp.Role, handle func(*zmtp.Conn)) string {
	t.Helper()
	ignored := goleak.IgnoreCurrent()
	t.Cleanup(func() { goleak.VerifyNone(t, ignored) })
	s, err := enginesim.Bind(endpoint, role, handle)
	if err != nil {
		t.Fatal(err)
	}
	background(t, s.Run)
	return s.Endpoint()
}

func eventually(t *testing.T, ok func() bool) {
	t.Helper()
	for range 500 {
		if ok() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Fatal("the condition did not hold in time")
}

func read(t *testing.T, c *zmtp.Conn) string {
	t.Helper()
	frames, err := c.Read()
	if err != nil {
		t.Fatal(err)
	}
	return string(bytes.Join(frames, []byte("|")))
}

func TestPublishAndSubscribe(t *testing.T) {
	for _, endpoint := range []string{"tcp://127.0.0.1:0", "ipc://" + t.TempDir() + "/pub"} {
		t.Run(endpoint[:3], func(t *testing.T) {
			p := enginesim.NewPublisher(0)
			e := bind(t, endpoint, zmtp.Pub, p.Follow)
			all, some := dial(t, e, zmtp.Sub), dial(t, e, zmtp.Sub)
			for c, prefix := range map[*zmtp.Conn]string{all: "", some: "b"} {
				if err := c.Subscribe(prefix); err != nil {
					t.Fatal(err)
				}
			}
			eventually(t, func() bool { return p.Subscribers() == 2 })
			long := strings.Repeat("x", 300_000)
			for _, m := range [][2]string{{"a", "1"}, {"b", long}, {"bc", ""}, {"c", "4"}} {
				if n := p.Send([]byte(m[0]), []byte(m[1])); n != 0 {
					t.Errorf("dropped for %d", n)
				}
			}
			for _, want := range []string{"a|1", "b|" + long, "bc|", "c|4"} {
				if got := read(t, all); got != want {
					t.Errorf("got %.40q, want %.40q", got, want)
				}
			}
			for _, want := range []string{"b|" + long, "bc|"} {
				if got := read(t, some); got != want {
					t.Errorf("got %.40q, want %.40q", got, want)
				}
			}
			all.Close()
			eventually(t, func() bool { return p.Subscribers() == 1 })
		})
	}
}

func TestRequestsAreAnswered(t *testing.T) {
	e := bind(t, "tcp://127.0.0.1:0", zmtp.Router, func(c *zmtp.Conn) {
		for {
			frames, err := c.Read()
			if err != nil {
				return
			}
			if c.Write(nil, append([]byte("re: "), frames[1]...)) != nil {
				return
			}
		}
	})
	c := dial(t, e, zmtp.Dealer)
	for _, text := range []string{"a", "b"} {
		if err := c.Write(nil, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if got := read(t, c); got != "|re: "+text {
			t.Errorf("got %q", got)
		}
	}
}

// A subscriber that does not read loses messages, and delays nothing.
func TestASlowSubscriberLosesMessages(t *testing.T) {
	p := enginesim.NewPublisher(4)
	e := bind(t, "tcp://127.0.0.1:0", zmtp.Pub, p.Follow)
	c := dial(t, e, zmtp.Sub)
	if err := c.Subscribe(""); err != nil {
		t.Fatal(err)
	}
	eventually(t, func() bool { return p.Subscribers() == 1 })
	body := make([]byte, 1<<20)
	lost := 0
	for range 64 {
		lost += p.Send(body)
	}
	if lost == 0 {
		t.Error("64 MiB were kept")
	}
}

// Connections cost little until they subscribe, and a subscription that is too long is refused
// with its connection.
func TestManySubscribersTakeLittle(t *testing.T) {
	p := enginesim.NewPublisher(0)
	e := bind(t, "tcp://127.0.0.1:0", zmtp.Pub, p.Follow)
	memory := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := memory()
	var conns []*zmtp.Conn
	for range 200 {
		conns = append(conns, dial(t, e, zmtp.Sub))
	}
	if took := memory() - before; took > 100<<20 {
		t.Errorf("200 connections without a subscription take %d MiB", took>>20)
	}
	for _, c := range conns {
		if err := c.Subscribe(""); err != nil {
			t.Fatal(err)
		}
	}
	eventually(t, func() bool { return p.Subscribers() == len(conns) })
	one := []byte{1}
	if long := append(one, make([]byte, 1<<21)...); conns[0].Write(long) == nil {
		eventually(t, func() bool { return p.Subscribers() < len(conns) })
	}
}

func TestAUnixSocketIsReplacedIfNobodyListens(t *testing.T) {
	endpoint := "ipc://" + t.TempDir() + "/s"
	first, err := enginesim.Bind(endpoint, zmtp.Pub, nil)
	if err != nil {
		t.Fatal(err)
	}
	if l, err := enginesim.Bind(endpoint, zmtp.Pub, nil); err == nil {
		l.Close()
		t.Error("the socket is taken from its owner")
	}
	first.Listener.(*net.UnixListener).SetUnlinkOnClose(false) // as after a crash
	first.Close()
	second, err := enginesim.Bind(endpoint, zmtp.Pub, nil)
	if err != nil {
		t.Fatal(err)
	}
	second.Close()
}
