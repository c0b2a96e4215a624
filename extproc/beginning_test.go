// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// A body that Envoy cuts off goes to the worker that holds its beginning: the blocks
// are those of the whole prompt, as far as they are certain.
func TestCutBodiesGoWhereTheirBeginningIs(t *testing.T) {
	const blockSize = 8
	prompts, err := tokenizer.LoadModel(enginesim.ModelFiles(), tokenizer.ModelConfig{})
	if err != nil {
		t.Fatal(err)
	}
	r, err := router.New(router.Config{Cards: []router.Card{{Name: "m", Prompts: prompts}}})
	if err != nil {
		t.Fatal(err)
	}
	for id := range uint64(3) {
		at := netip.AddrPortFrom(netip.MustParseAddr("10.0.0.1"), uint16(8000+id))
		if err := r.SetWorker(router.WorkerInfo{ID: id, Models: []string{"m"}, BlockSize: blockSize, Address: at}); err != nil {
			t.Fatal(err)
		}
	}
	story := strings.Repeat("The old fisherman told it once more, with another end. ", 20)
	body := fmt.Sprintf(`{"model":"m","tools":[{"type":"function","function":{"name":"f"}}],"tool_choice":"auto","messages":[{"role":"system","content":"You listen."},{"role":"user","content":"%s"}],"stream":true}`, story)
	whole, bad := openai.Parse(openai.ChatCompletions, []byte(body))
	if bad != nil {
		t.Fatal(bad.Message)
	}
	prompt, err := prompts.Encode(t.Context(), nil, whole.Request, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	local := indexer.AppendLocalHashes(nil, prompt.IDs, blockSize, indexer.Seed("", ""))
	ev := indexer.Event{Kind: indexer.Stored}
	for i, l := range local {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: uint64(i + 1), Local: l})
	}
	if !r.ApplyEvent(router.Worker{ID: 2}, ev) {
		t.Fatal("the worker is not known")
	}

	s, err := extproc.New(extproc.Config{}, r)
	if err != nil {
		t.Fatal(err)
	}
	g := grpc.NewServer(s.ServerOptions()...)
	s.Register(g)
	link := envoytest.Serve(t, g)
	last := 0
	for _, at := range []int{30, 260, len(body) / 2, len(body) * 3 / 4, len(body) - 20} {
		x := link.Do(envoytest.Request{Path: "/v1/chat/completions", Body: []byte(body[:at]), Trailers: true, Mode: filterv3.ProcessingMode_BUFFERED_PARTIAL})
		if x.Refusal != nil {
			t.Fatalf("cut at %d: refused: %+v", at, x.Refusal)
		}
		d := r.Decisions(1)[0]
		x.End()
		if at < 200 {
			if d.Reason != router.ReasonUnread || d.TokenMode != "" {
				t.Errorf("cut at %d: reason %s, mode %s, want neither ids nor a guess", at, d.Reason, d.TokenMode)
			}
			continue
		}
		if x.Header["x-dynamo-worker"] != "10.0.0.1:8002" || d.TokenMode != tokenizer.ExactPrefix || d.TokenReason != tokenizer.Cut {
			t.Errorf("cut at %d: to %s, mode %s for %s", at, x.Header["x-dynamo-worker"], d.TokenMode, d.TokenReason)
		}
		if d.OverlapBlocks != d.PromptBlocks || d.OverlapBlocks <= last {
			t.Errorf("cut at %d: %d of %d blocks found, %d for less of it", at, d.OverlapBlocks, d.PromptBlocks, last)
		}
		last = d.OverlapBlocks
	}
	if last < len(local)-6 {
		t.Errorf("%d of %d blocks found of almost the whole body", last, len(local))
	}
}
