// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"net"
	"os"
	"regexp"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/test/bufconn"

	"github.com/kvroute/kvroute/extproc"
)

// connections counts those that a server has taken.
type connections struct{ taken atomic.Int64 }

func (*connections) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (*connections) HandleRPC(context.Context, stats.RPCStats)                         {}
func (*connections) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (c *connections) HandleConn(_ context.Context, s stats.ConnStats) {
	if _, ok := s.(*stats.ConnBegin); ok {
		c.taken.Add(1)
	}
}

// taken returns how many connections a client needs in an hour that asks every so often
// whether its connection lives, with or without a stream.
func taken(t *testing.T, interval time.Duration, stream bool, options ...grpc.ServerOption) (n int64) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		counted := new(connections)
		s, err := extproc.New(extproc.Config{}, newRouter(t))
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer(append(options, grpc.StatsHandler(counted))...)
		s.Register(server)
		l := bufconn.Listen(1 << 20)
		go func() { _ = server.Serve(l) }() // until Stop
		defer server.Stop()
		conn, err := grpc.NewClient("passthrough:", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }),
			grpc.WithIdleTimeout(0),
			grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: interval, Timeout: 5 * time.Second, PermitWithoutStream: true}))
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		if stream {
			x, err := extprocv3.NewExternalProcessorClient(conn).Process(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				_ = x.CloseSend() // the stream may have gone with its connection
			}()
		}
		for range 3600 / 10 {
			if conn.GetState() == connectivity.Idle {
				conn.Connect()
			}
			time.Sleep(10 * time.Second)
		}
		n = counted.taken.Load()
	})
	return n
}

// Envoy's way to ask whether a connection lives, as our configuration has it, is not taken
// for an attack, and neither is one thrice as eager.
func TestKeepaliveIsTolerated(t *testing.T) {
	text, err := os.ReadFile("../envoy/testdata/default.yaml")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`connection_keepalive: \{interval: (\w+), timeout: \w+\}`).FindSubmatch(text)
	if m == nil {
		t.Fatal("Envoy's configuration has no keepalive")
	}
	envoys, err := time.ParseDuration(string(m[1]))
	if err != nil || envoys < 10*time.Second {
		t.Fatalf("Envoy's interval is %v, %v", envoys, err)
	}
	s, err := extproc.New(extproc.Config{}, newRouter(t))
	if err != nil {
		t.Fatal(err)
	}
	for _, interval := range []time.Duration{10 * time.Second, envoys} {
		for _, stream := range []bool{false, true} {
			if n := taken(t, interval, stream, s.ServerOptions()...); n != 1 {
				t.Errorf("every %v, with a stream %v: %d connections in an hour, want one", interval, stream, n)
			}
		}
	}
	if n := taken(t, 10*time.Second, false); n < 2 {
		t.Errorf("%d connections to a server without our policy: this test cannot fail", n)
	}
}
