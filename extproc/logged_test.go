// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"bytes"
	"log/slog"
	"net/netip"
	"strings"
	"testing"

	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// At level debug each routed request has a line with the worker and the sentence of the decision. At level info it has
// none.
func TestRoutedRequestsAreLogged(t *testing.T) {
	for _, level := range []slog.Level{slog.LevelDebug, slog.LevelInfo} {
		r, err := router.New(router.Config{})
		if err != nil {
			t.Fatal(err)
		}
		at := netip.MustParseAddrPort("10.0.0.1:8000")
		if err := r.SetWorker(router.WorkerInfo{ID: 1, Name: "gpu-1", Models: []string{"m"}, BlockSize: 8, Address: at}); err != nil {
			t.Fatal(err)
		}
		var lines bytes.Buffer
		s, err := extproc.New(extproc.Config{Log: slog.New(slog.NewTextHandler(&lines,
			&slog.HandlerOptions{Level: level}))}, r)
		if err != nil {
			t.Fatal(err)
		}
		g := grpc.NewServer(s.ServerOptions()...)
		s.Register(g)
		x := envoytest.Serve(t, g).Do(envoytest.Request{
			Path:   "/v1/completions",
			Body:   []byte(`{"model":"m","prompt":"secret words"}`),
			Header: []string{"x-request-id", "of-the-client"},
		})
		x.End()
		d := r.Decisions(1)[0]
		d.Candidates = nil // the request did not ask for them
		logged := strings.Contains(lines.String(), "request="+d.ID+" client_request=of-the-client worker=gpu-1 reason=\""+d.Sentence()+"\"")
		if logged != (level == slog.LevelDebug) || strings.Contains(lines.String(), "secret") {
			t.Errorf("level %v: %s", level, &lines)
		}
	}
}
