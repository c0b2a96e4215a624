// SPDX-License-Identifier: Apache-2.0

package extproc_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/router"
)

// world has random streams that disconnect, are evicted and drained at random times. The times are
// few, so that many of these meet.
type world struct {
	t   *testing.T
	h   *harness
	mu  sync.Mutex
	rnd *rand.Rand // guarded by mu

	calm bool // no stream is evicted or drained
}

// n returns a random number below most.
func (w *world) n(most int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rnd.IntN(most)
}

func (w *world) pause() { time.Sleep(time.Duration(w.n(4)) * 100 * time.Millisecond) }

// decide takes no time, some time, or waits for a worker; it may fail.
func (w *world) decide(ctx context.Context, req router.Request) (router.Decision, error) {
	result := error(nil)
	if w.n(5) == 0 {
		result = []error{router.ErrTooLate, errOther, router.ErrNoWorkers}[w.n(3)]
	}
	pause := 100 * time.Millisecond * time.Duration(w.n(4))
	switch w.n(3) {
	case 0:
		pause = 0
	case 1:
		req.Waiting(false)
		pause *= 10
	}
	select {
	case <-time.After(pause):
	case <-ctx.Done():
		return router.Decision{}, fmt.Errorf("router: decide: %w", context.Cause(ctx))
	}
	return chosen, result
}

// leaves ends the exchange with a probability of 1/8, or says that the client stays silent.
func (w *world) leaves(x *envoytest.Exchange) bool {
	w.pause()
	switch w.n(24) {
	case 0:
		x.End()
	case 1:
		x.Reset()
	case 2:
	default:
		return false
	}
	return true
}

// settle waits for an answer, which must come in time: with it, or with the end of the stream.
func (w *world) settle(x *envoytest.Exchange) bool {
	before := time.Now()
	ok := x.Settle()
	if took := time.Since(before); took >= 2*time.Second && x.Patience == 0 {
		w.t.Errorf("Envoy waited %v for an answer", took)
	}
	if w.calm && x.Left {
		w.t.Error("kvroute left a request")
	}
	return ok
}

// play plays one request of Envoy.
func (w *world) play(x *envoytest.Exchange, mode filterv3.ProcessingMode_BodySendMode) {
	chunks := []string{hello[:20], hello[20:40], hello[40:]}
	duplex, answers := mode == filterv3.ProcessingMode_FULL_DUPLEX_STREAMED, 1
	if w.leaves(x) {
		return
	}
	x.SendHeaders()
	switch mode {
	case filterv3.ProcessingMode_BUFFERED:
		if w.leaves(x) || !w.settle(x) || w.leaves(x) {
			return
		}
		x.SendBody()
	default:
		for i, c := range chunks {
			if w.leaves(x) {
				return
			}
			if m := part(c, i == len(chunks)-1); duplex {
				x.Stray(m)
			} else {
				x.Send(m)
				answers++
			}
		}
	}
	if w.leaves(x) {
		return
	}
	for i := 0; i < answers || duplex && len(x.Body) < len(hello); i++ {
		if !w.settle(x) {
			return
		}
	}
	if w.leaves(x) {
		return
	}
	x.Respond(200, "content-type", "text/event-stream")
	switch {
	case x.Left, w.leaves(x):
	case duplex:
		if text := "data: 1\n\n"; x.Answer(text) != text {
			w.t.Error("the response is changed")
		}
	}
	if w.n(3) > 0 {
		x.End()
	}
}

// Whatever streams, clients, decisions, evictions and a drain do at the same time: Envoy gets each
// answer that it waits for, nothing stays behind, and a drain ends all streams that Envoy does not
// need. The clock is fake.
func TestRandomWorldsOfStreams(t *testing.T) {
	worlds := 300
	if testing.Short() {
		worlds = 30
	}
	for seed := range worlds {
		synctest.Test(t, func(t *testing.T) {
			h := newHarness(t, extproc.Config{DecisionTimeout: time.Second, QueueWait: 2 * time.Second})
			w := &world{t: t, h: h, rnd: rand.New(rand.NewPCG(uint64(seed), 1)), calm: seed%3 == 0}
			h.router.will(w.decide)
			var playing sync.WaitGroup
			var all []*envoytest.Exchange
			for range 12 {
				r := chat(hello)
				r.Mode = []filterv3.ProcessingMode_BodySendMode{
					filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_BUFFERED, filterv3.ProcessingMode_STREAMED, filterv3.ProcessingMode_FULL_DUPLEX_STREAMED,
				}[w.n(4)]
				r.Ahead = r.Mode == filterv3.ProcessingMode_STREAMED
				x := h.Begin(r)
				playing.Go(func() { w.play(x, r.Mode) })
				if r.Mode == filterv3.ProcessingMode_BUFFERED {
					all = append(all, x)
				}
			}
			for range w.n(200) {
				if w.n(8) == 0 {
					w.pause()
				}
				if !w.calm {
					h.server.Evict()
				}
			}
			if !w.calm && w.n(2) == 0 {
				h.server.Drain()
			}
			playing.Wait()
			h.server.Drain()
			time.Sleep(time.Minute) // for the decisions
			synctest.Wait()
			for _, x := range all {
				if !x.Ended() {
					t.Error("a stream outlasts the drain")
				}
			}
			h.Kill()
			synctest.Wait()
			if n := h.router.taken(); n != 0 {
				t.Errorf("%d slots are taken at the end", n)
			}
			if n := h.server.Held(); n != 0 {
				t.Errorf("%d bytes are held at the end", n)
			}
			if n := h.count(t, "kvroute.extproc.streams"); n != 0 || h.server.Waits() != 0 {
				t.Errorf("%d streams are open at the end, %d wait", n, h.server.Waits())
			}
			if strings.Contains(h.log.String(), "panic") {
				t.Error(h.log)
			}
		})
		if t.Failed() {
			t.Fatalf("in world %d", seed)
		}
	}
}

// evicted is a stream that is evicted while its last message arrives.
type evicted struct {
	*played

	server   *extproc.Server
	evicting *sync.WaitGroup
}

func (e evicted) Recv() (*extprocv3.ProcessingRequest, error) {
	if len(e.messages) == 1 {
		e.evicting.Go(e.server.Evict)
	}
	return e.played.Recv()
}

// A message that comes with an eviction is not lost.
func TestAMessageComesWithAnEviction(t *testing.T) {
	h := newUnserved(t, extproc.Config{TrustOverrides: true, AllowDirect: true})
	for range 3000 {
		ctx, end := context.WithCancel(t.Context())
		mode := filterv3.ProcessingMode_FULL_DUPLEX_STREAMED
		p := &played{ctx: ctx, messages: []*extprocv3.ProcessingRequest{
			begin(false, mode, mode, false, ":method", "POST", ":path", "/v1/chat/completions"), part(hello[:9], false), part(hello[9:], true),
		}}
		var evicting sync.WaitGroup
		_ = h.server.Process(evicted{p, h.server, &evicting}) // never fails
		evicting.Wait()
		end()
		var back strings.Builder
		for _, a := range p.answers {
			back.Write(a.GetRequestBody().GetResponse().GetBodyMutation().GetStreamedResponse().GetBody())
		}
		if back.String() != hello {
			t.Fatalf("%q comes back", back.String())
		}
	}
}

// An eviction ends the stream that has waited longest for its body, and none that is decided.
func TestAnEvictionSparesDecidedStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHarness(t, extproc.Config{})
		decided := h.Do(chat(hello))
		var waiting [2]*envoytest.Exchange
		for i := range waiting {
			waiting[i] = h.Begin(chat(hello))
			waiting[i].SendHeaders()
			waiting[i].Settle()
			synctest.Wait()
		}
		h.server.Evict()
		synctest.Wait()
		if decided.Ended() || !waiting[0].Ended() || waiting[1].Ended() {
			t.Errorf("ended: decided %v, first %v, second %v; want only the first", decided.Ended(), waiting[0].Ended(), waiting[1].Ended())
		}
		decided.End()
		h.server.Evict()
		h.server.Evict() // there is none left
		if waiting[1].Settle() || !waiting[1].Left {
			t.Error("the second is not evicted")
		}
	})
}
