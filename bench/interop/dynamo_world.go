// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// records reads the store.
func (f *dynamoFleet) records(ctx context.Context) (v fleet.DynamoView) {
	loopback, err := fleet.ParseNetworks(workerNetworks)
	if err != nil {
		panic(err) // a constant
	}
	d, err := fleet.NewDynamo(fleet.DynamoConfig{
		Dir: f.store, Rules: fleet.DynamoRules{Namespace: "dynamo", Frontend: f.address}, Networks: loopback,
		Changed: func(now fleet.DynamoView) { v = now },
	})
	if err != nil {
		panic(err) // the rules are constants, too
	}
	d.Read(ctx)
	return v
}

// dynamoIndex is Dynamo's own index, in a process.
type dynamoIndex struct{ *process.Lines }

func (f *dynamoFleet) startIndex() (x dynamoIndex, err error) {
	if x.Lines, err = process.StartLines(exec.Command(f.python(), "-c", dynamoTree)); err != nil {
		return x, fmt.Errorf("start Dynamo's index: %w", err)
	}
	if _, err := x.dump(); err != nil {
		x.Stop()
		return x, fmt.Errorf("start Dynamo's index: %w", err)
	}
	return x, nil
}

func (x dynamoIndex) apply(envelope []byte) error { return x.Tell(hex.EncodeToString(envelope)) }

func (x dynamoIndex) dump() ([]blockAt, error) {
	var evs []routerEvent
	err := x.Ask("", &evs)
	return appendBlocks(nil, evs...), err
}

// match returns how many leading blocks rank 0 of a worker has.
func (x dynamoIndex) match(locals []uint64, worker uint64) (int, error) {
	text, err := json.Marshal(locals)
	if err != nil {
		return 0, err
	}
	var scores map[string]int
	err = x.Ask("?"+string(text), &scores)
	return scores[fmt.Sprintf("%d/0", worker)], err
}

// listenedPlane receives what the workers publish, beside kvroute.
type listenedPlane struct {
	cancel context.CancelFunc
	parts  sync.WaitGroup
	nc     *nats.Conn // nil over ZMQ

	mu sync.Mutex
	// mu guards the fields below.
	stored, removed map[engines.WorkerRank]int // blocks
	err             error
}

// listen subscribes to all publishers. It returns before the first event.
func (f *dynamoFleet) listen(ctx context.Context, plane engines.Plane) (*listenedPlane, error) {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	p := &listenedPlane{cancel: cancel, stored: make(map[engines.WorkerRank]int), removed: make(map[engines.WorkerRank]int)}
	subjects := make(map[string]bool)
	for _, c := range plane.Channels {
		if c.Endpoint == "" {
			subjects[c.Subject] = true
			continue
		}
		at, err := zmtp.ParseEndpoint(c.Endpoint, 0, 0)
		if err != nil {
			return p, err
		}
		conn, err := zmtp.Dial(ctx, at, zmtp.Sub)
		if err == nil {
			err = conn.Subscribe(events.Topic)
		}
		if err != nil {
			return p, fmt.Errorf("listen to a worker's publisher: %w", err)
		}
		context.AfterFunc(own, func() { _ = conn.Close() }) // Read then ends
		p.parts.Go(func() {
			for {
				frames, err := conn.Read()
				if err != nil {
					p.fail(own, err)
					return
				}
				s, err := engines.SplitFrames(frames)
				if err == nil && s.Topic == events.Topic {
					err = p.take(f.index, s.Body)
				}
				p.fail(own, err)
			}
		})
	}
	for subject := range subjects {
		if p.nc == nil {
			var err error
			if p.nc, err = nats.Connect(f.nats); err != nil {
				return p, err
			}
		}
		if _, err := p.nc.Subscribe(subject, func(m *nats.Msg) { p.fail(own, p.take(f.index, m.Data)) }); err != nil {
			return p, err
		}
	}
	if p.nc != nil {
		return p, p.nc.FlushWithContext(ctx)
	}
	// The publishers do not confirm a subscription.
	at := time.Now().Add(500 * time.Millisecond)
	return p, process.Until(ctx, process.Patience, "a pause", func(context.Context) bool { return time.Now().After(at) })
}

func (p *listenedPlane) fail(ctx context.Context, err error) {
	if err == nil || ctx.Err() != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.err = errors.Join(p.err, err)
}

func (p *listenedPlane) take(x dynamoIndex, envelope []byte) error {
	if err := x.apply(envelope); err != nil {
		return err
	}
	m, err := events.DecodeMessage(envelope)
	if err != nil || m.Bad > 0 {
		return fmt.Errorf("a message with %d bad events, %w", m.Bad, err)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, ev := range m.Events {
		at := engines.WorkerRank{WorkerID: ev.WorkerID, DPRank: ev.DPRank}
		switch ev.Event.Kind {
		case indexer.Stored:
			p.stored[at] += len(ev.Event.Blocks)
		case indexer.Removed:
			p.removed[at] += len(ev.Event.Externals)
		case indexer.Cleared:
		}
	}
	return nil
}

func (p *listenedPlane) stop() {
	p.cancel()
	if p.nc != nil {
		p.nc.Close()
	}
	p.parts.Wait()
}

// dynamoWorld is requests through Envoy and kvroute to Dynamo's workers, one at a time.
type dynamoWorld struct {
	*dynamoFleet
	*stack
	rng      *rand.Rand
	talks    [][]any // conversations so far
	expected map[engines.WorkerRank]int
	cached   int
	each     map[engines.WorkerRank]int
}

// body is the next request: a new conversation with one of three system prompts, or the
// next turn of an old one.
func (w *dynamoWorld) body() string {
	if n := len(w.talks); n == 0 || w.rng.IntN(3) == 0 {
		w.talks = append(w.talks, []any{message("system", words(w.rng.Uint64N(3), 60))})
	}
	i := w.rng.IntN(len(w.talks))
	w.talks[i] = append(w.talks[i], message("user", words(w.rng.Uint64(), 10+w.rng.IntN(60))))
	text := body(map[string]any{"messages": w.talks[i]}, map[string]any{"max_tokens": 1 + w.rng.IntN(24), "nvext": map[string]any{"extra_fields": []string{"worker_id"}}})
	w.talks[i] = append(w.talks[i], message("assistant", words(w.rng.Uint64(), 5)))
	if len(w.talks[i]) > 12 {
		w.talks = slices.Delete(w.talks, i, i+1)
	}
	return text
}

// dynamoAnswer is what is read of a response.
type dynamoAnswer struct {
	Usage usage `json:"usage"`
	Ext   struct {
		Worker struct {
			ID   uint64 `json:"decode_worker_id"`
			Rank uint32 `json:"decode_dp_rank"`
		} `json:"worker_id"`
	} `json:"nvext"`
	id string
}

// send sends a request and counts the blocks that the worker must store.
func (w *dynamoWorld) send(ctx context.Context, text string) (a dynamoAnswer, err error) {
	a.id = newRequestID()
	resp, err := ask(ctx, w.envoy.URL()+chatPath, text, map[string]string{"X-Request-Id": a.id})
	if err != nil {
		return a, err
	}
	if resp.status != http.StatusOK {
		return a, fmt.Errorf("status %d: %.500s", resp.status, resp.body)
	}
	if err := json.Unmarshal(resp.body, &a); err != nil {
		return a, err
	}
	if w.expected == nil {
		w.expected, w.each = make(map[engines.WorkerRank]int), make(map[engines.WorkerRank]int)
	}
	at := engines.WorkerRank{WorkerID: a.Ext.Worker.ID, DPRank: a.Ext.Worker.Rank}
	w.expected[at] += a.Usage.stored(dynamoBlock)
	w.cached += a.Usage.Details.Cached
	w.each[at]++
	return a, nil
}

// heard waits until all blocks that the workers must have stored were announced.
func (w *dynamoWorld) heard(ctx context.Context) error {
	var missing string
	err := process.Until(ctx, 20*time.Second, "the workers tell what they stored", func(context.Context) bool {
		w.plane.mu.Lock()
		defer w.plane.mu.Unlock()
		missing = ""
		if w.plane.err != nil {
			missing = w.plane.err.Error()
		}
		for at, n := range w.expected {
			if got := w.plane.stored[at]; got < n {
				missing += fmt.Sprintf("%v: %d blocks of %d; ", at, got, n)
			}
		}
		return missing == ""
	})
	if err != nil {
		return fmt.Errorf("%w: %s", err, missing)
	}
	return nil
}

// talk sends n requests and compares each response, and the index after it.
func (w *dynamoWorld) talk(ctx context.Context, r *result, n int) error {
	for i := range n {
		a, err := w.send(ctx, w.body())
		if err != nil {
			return fmt.Errorf("request %d: %w", i, err)
		}
		d, err := w.decision(ctx, a.id)
		if err != nil {
			return fmt.Errorf("request %d: %w", i, err)
		}
		r.cases++
		switch at := d.Worker; {
		case at.ID != a.Ext.Worker.ID || at.DPRank != a.Ext.Worker.Rank:
			r.differ("request %d: sent to %d, rank %d; answered by %d, rank %d", i, at.ID, at.DPRank, a.Ext.Worker.ID, a.Ext.Worker.Rank)
		case d.TokenMode != "exact" || d.PromptTokens != a.Usage.Prompt:
			r.differ("request %d: %d prompt tokens here (%s), %d there", i, d.PromptTokens, d.TokenMode, a.Usage.Prompt)
		case hits(d.OverlapBlocks, a.Usage.Prompt, dynamoBlock) != a.Usage.Details.Cached:
			r.differ("request %d: of %d tokens %d blocks of %d are foretold, and %d tokens were cached", i, a.Usage.Prompt, d.OverlapBlocks, dynamoBlock, a.Usage.Details.Cached)
		}
		if err := w.heard(ctx); err != nil {
			return fmt.Errorf("request %d: %w", i, err)
		}
		if err := w.equal(ctx, w.stack); err != nil {
			if ctx.Err() != nil {
				return err
			}
			r.differ("after request %d: %v", i, err)
		}
	}
	return nil
}

// equal waits until a kvroute's index has the blocks that Dynamo's tree has.
func (w *dynamoWorld) equal(ctx context.Context, s *stack) error {
	return equalBlocks(ctx, s, func(context.Context) ([]blockAt, error) { return w.index.dump() })
}

// equalBlocks waits until a kvroute's index has the blocks that another one has.
func equalBlocks(ctx context.Context, s *stack, dump func(context.Context) ([]blockAt, error)) error {
	var last string
	err := process.Until(ctx, 20*time.Second, "kvroute's index equals Dynamo's", func(ctx context.Context) bool {
		theirs, err := dump(ctx)
		if err != nil {
			last = err.Error()
			return false
		}
		ours, err := s.blocks(ctx)
		if err != nil {
			last = err.Error()
			return false
		}
		last = differing(ours, theirs)
		return last == ""
	})
	if err != nil {
		return fmt.Errorf("%w: %s", err, last)
	}
	return nil
}

// differing says how two sets of blocks differ, "" for not.
func differing(ours, theirs []blockAt) string {
	in := make(map[blockAt]int)
	for _, b := range ours {
		in[b]++
	}
	missing := 0
	for _, b := range theirs {
		if in[b]--; in[b] < 0 {
			missing++
		}
	}
	if len(ours) == len(theirs) && missing == 0 {
		return ""
	}
	return fmt.Sprintf("%d blocks here, %d there, %d of which are not here", len(ours), len(theirs), missing)
}

// counter returns the lines of a metric.
func (s *stack) counter(ctx context.Context, name string) (string, error) {
	data, err := process.Get(ctx, "http://"+s.router.At.HTTP+"/metrics")
	var lines []string
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, name); ok {
			lines = append(lines, strings.TrimSpace(rest))
		}
	}
	return strings.Join(lines, ", "), err
}

func (w *dynamoWorld) summary() string {
	stored, removed := 0, 0
	w.plane.mu.Lock()
	defer w.plane.mu.Unlock()
	for _, n := range w.plane.stored {
		stored += n
	}
	for _, n := range w.plane.removed {
		removed += n
	}
	var each []int
	for _, n := range w.each {
		each = append(each, n)
	}
	slices.Sort(each)
	return fmt.Sprintf("requests by rank %v, %d tokens cached, %d blocks stored and %d evicted", each, w.cached, stored, removed)
}

// mirror is a copy of the store in which the publishers' sockets are valves that lead to
// the real ones.
type mirror struct {
	valves []*valve
	cancel context.CancelFunc
	copies sync.WaitGroup
}

// mirror keeps a copy of the store until it is stopped.
func (f *dynamoFleet) mirror(ctx context.Context, store string) (*mirror, error) {
	own, cancel := context.WithCancel(context.WithoutCancel(ctx))
	m := &mirror{cancel: cancel}
	var replace []string
	for _, ch := range f.records(ctx).Plane.Channels {
		v, err := openValve("tcp", "127.0.0.1:0", strings.TrimPrefix(ch.Endpoint, "tcp://"))
		if err != nil {
			m.stop()
			return nil, err
		}
		m.valves = append(m.valves, v)
		replace = append(replace, ch.Endpoint+`"`, "tcp://"+v.l.Addr().String()+`"`)
	}
	copyAll := func() error { return copyStore(f.store, store, strings.NewReplacer(replace...)) }
	if err := copyAll(); err != nil {
		m.stop()
		return nil, err
	}
	m.copies.Go(func() {
		tick := time.NewTicker(2 * time.Second) // a file that nobody touches for 10 s is of a dead process
		defer tick.Stop()
		for {
			select {
			case <-own.Done():
				return
			case <-tick.C:
				_ = copyAll() // a file may go meanwhile; the next copy is right
			}
		}
	})
	return m, nil
}

// copyStore copies a folder with replacements in its files. Each file is there as a whole,
// as Dynamo writes it.
func copyStore(from, to string, replace *strings.Replacer) error {
	return filepath.WalkDir(from, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), ".") {
			return err
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
			return err
		}
		half := filepath.Join(filepath.Dir(target), ".tmp_"+filepath.Base(target))
		if err := os.WriteFile(half, []byte(replace.Replace(string(data))), 0o644); err != nil {
			return err
		}
		return os.Rename(half, target)
	})
}

func (m *mirror) cut() {
	for _, v := range m.valves {
		v.cut()
	}
}

// join lets connections come, and waits for them.
func (m *mirror) join(ctx context.Context) error {
	for _, v := range m.valves {
		v.join()
	}
	return process.Until(ctx, process.Patience, "kvroute connects to the publishers again", func(context.Context) bool {
		return !slices.ContainsFunc(m.valves, func(v *valve) bool { return !v.passing() })
	})
}

func (m *mirror) stop() {
	m.cancel()
	m.copies.Wait()
	for _, v := range m.valves {
		v.stop()
	}
}
