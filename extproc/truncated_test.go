// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// On a trusted listener a request with a truncated body is routed by load to a worker of its model, and the
// decision says why. What is there of the body stands for the load.
func TestTruncatedBodiesAreRoutedByLoad(t *testing.T) {
	r, err := router.New(router.Config{})
	if err != nil {
		t.Fatal(err)
	}
	for id, model := range []string{"m", "other"} {
		at := netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(8000+id))
		if err := r.SetWorker(router.WorkerInfo{ID: uint64(id), Models: []string{model}, BlockSize: 8, Address: at}); err != nil {
			t.Fatal(err)
		}
	}
	s, err := extproc.New(extproc.Config{TrustOverrides: true, AllowDirect: true}, r)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(s.ServerOptions()...)
	s.Register(g)
	link := envoytest.Serve(t, g)
	story := strings.Repeat("The old fisherman told it once more, with another end. ", 20)
	for _, endpoint := range []string{
		`/v1/chat/completions {"model":"m","messages":[{"role":"user","content":"%s"}],"stream":true}`,
		`/v1/completions {"model":"m","prompt":"%s"}`,
		`/v1/responses {"model":"m","input":"%s"}`,
	} {
		path, form, _ := strings.Cut(endpoint, " ")
		body := fmt.Sprintf(form, story)
		for _, at := range []int{40, len(body) / 2, len(body) - 20} {
			x := link.Do(envoytest.Request{Path: path, Body: []byte(body[:at]), Trailers: true, Mode: filterv3.ProcessingMode_BUFFERED_PARTIAL})
			if x.Refusal != nil || x.Header["x-dynamo-worker"] != "10.0.0.1:8000" {
				t.Fatalf("%s, truncated at %d: to %s, refused: %+v", path, at, x.Header["x-dynamo-worker"], x.Refusal)
			}
			d := r.Decisions(1)[0]
			x.End()
			if d.Reason != router.ReasonLoad || d.TokenMode != tokenizer.None || d.TokenReason != openai.Truncated || d.PromptBlocks != 0 || d.PromptTokens != (at+3)/4 {
				t.Errorf("%s, truncated at %d: %+v", path, at, d)
			}
		}
	}
	// Without the model's name there is nothing to choose between two models by.
	x := link.Do(envoytest.Request{Path: "/v1/completions", Body: []byte(`{"prompt":"a"`), Trailers: true, Mode: filterv3.ProcessingMode_BUFFERED_PARTIAL})
	if x.Refusal != nil || x.Header["x-dynamo-worker"] != "" {
		t.Errorf("of an unknown model: to %s, refused: %+v", x.Header["x-dynamo-worker"], x.Refusal)
	}
	x.End()
}
