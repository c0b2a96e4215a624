// SPDX-License-Identifier: Apache-2.0

package router_test

import (
	"fmt"
	"hash/fnv"
	"net/netip"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// TestStories plays the scripts in testdata/stories. Each script explains one situation, and
// then has steps with their outputs. cost_by_hand.txt explains the columns of the outputs.
//
// A prompt is a list of named pieces with their lengths in tokens: prompt=(system:960, alice:64).
// A piece of the same name begins with the same tokens in each prompt, so prompts that
// begin with the same pieces share blocks. The piece "own" is another one for each request.
// A step that names several workers or requests is played for each of them, in this order.
//
//	config kv-read=0.003 output=100         the first step: settings of the routers
//	worker gpu-1 gpu-2 batch=1000           adds or changes workers; also role=, draining
//	restart gpu-1                           the process of the worker restarts
//	leave gpu-1                             the worker leaves
//	stored gpu-1 prompt=(system:960)        the worker reports that it has cached a prompt
//	request a prompt=(…) pin=gpu-1 quiet    decides and books; quiet leaves the table out; also
//	                                        session=, priority=, wait=, replica=, second
//	loads prompt=(…)                        the potential loads of a prompt; books nothing
//	computed a                              the worker reports a's blocks as cached; a's first token
//	first-token a                           the first token alone
//	output a tokens=100                     100 more tokens of output
//	served a from=gpu-2 status=200          the response of a begins; refused: by the proxy
//	prefill-ended a, prefill-failed a       the end of a's prefill leg
//	free a                                  the end of a
//	abandon a                               the end of a, which no worker served
//	gives-up a                              the client of a leaves before the worker answers
//	advance 2s                              time passes
//	sync                                    the replicas exchange their changes
//	dies replica=1                          the other replicas learn that a replica is dead
//	workers                                 the state of all workers
func TestStories(t *testing.T) {
	files, err := filepath.Glob("testdata/stories/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d stories, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			s := &story{
				now:      time.Unix(1_755_000_000, 0),
				workers:  make(map[string]*router.WorkerInfo),
				requests: make(map[string]*storyRequest),
			}
			datadriven.RunTest(t, file, s.step)
		})
	}
}

const storyBlock = 16 // tokens

// story is the state of one script: router replicas with the same workers and a fake clock.
type story struct {
	now      time.Time
	output   int // expected length of each output, in tokens
	replicas []*storyReplica
	workers  map[string]*router.WorkerInfo
	requests map[string]*storyRequest
	out      strings.Builder // of the present step
}

// storyReplica is one router, and the changes that the other replicas have not received yet.
type storyReplica struct {
	*router.Router
	unsent []router.Change
	dead   bool
}

// storyRequest is a request in flight.
type storyRequest struct {
	tokens   []uint32
	replica  *storyReplica
	decision router.Decision
	quiet    bool
}

func (s *story) step(t *testing.T, d *datadriven.TestData) string {
	s.out.Reset()
	if len(s.replicas) == 0 {
		s.start(t, d)
	}
	switch d.Cmd {
	case "config": // see start
	case "worker", "restart", "leave", "stored":
		s.changeWorkers(t, d)
	case "request":
		for _, id := range names(d) {
			s.request(t, d, id)
		}
	case "loads":
		s.loads(t, d)
	case "computed", "first-token", "output", "served", "prefill-ended", "prefill-failed", "free", "abandon", "gives-up":
		for _, id := range names(d) {
			s.event(t, d, id)
		}
	case "advance":
		delay, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			t.Fatalf("%s: %v", d.Pos, err)
		}
		s.now = s.now.Add(delay)
		for _, r := range s.replicas {
			r.Tick()
		}
	case "sync":
		s.sync()
	case "dies":
		var dead int
		d.ScanArgs(t, "replica", &dead)
		s.replicas[dead-1].dead = true
		for _, r := range s.replicas {
			r.RemovePeer(uint64(dead))
		}
	case "workers":
		s.printWorkers()
	default:
		t.Fatalf("%s: unknown step %q", d.Pos, d.Cmd)
	}
	for _, r := range s.replicas {
		r.Decided(t.Context(), s.decided)
	}
	return s.out.String()
}

// start makes the routers.
func (s *story) start(t *testing.T, d *datadriven.TestData) {
	if d.Cmd != "config" {
		t.Fatalf("%s: the first step is %q, want config", d.Pos, d.Cmd)
	}
	conf := router.Config{Scoring: scorer.Defaults(), Now: func() time.Time { return s.now }}
	replicas := 1
	d.MaybeScanArgs(t, "replicas", &replicas)
	d.MaybeScanArgs(t, "output", &s.output)
	conf.NoSpeeds = d.HasArg("no-speeds")
	for _, arg := range d.CmdArgs {
		set := map[string]func(string){
			"alpha":         func(v string) { conf.Scoring.Alpha = number(t, d, v) },
			"attention":     func(v string) { conf.Scoring.Attention = number(t, d, v) },
			"kv-read":       func(v string) { conf.Scoring.KVRead = number(t, d, v) },
			"queue":         func(v string) { conf.Queue.Threshold = new(number(t, d, v)) },
			"queue-limit":   func(v string) { conf.Queue.Limit = int(number(t, d, v)) },
			"avoid-failing": func(v string) { conf.AvoidFailing = duration(t, d, v) },
			"sessions":      func(v string) { conf.Sessions.TTL = duration(t, d, v) },
			"replicas":      func(string) {},
			"output":        func(string) {},
			"no-speeds":     func(string) {},
		}[arg.Key]
		if set == nil {
			t.Fatalf("%s: unknown setting %q", d.Pos, arg.Key)
		}
		set(strings.Join(arg.Vals, ""))
	}
	for range replicas {
		r := new(storyReplica)
		if replicas > 1 {
			conf.Hooks.Tell = func(c router.Change) {
				c.Sequence = slices.Clone(c.Sequence)
				r.unsent = append(r.unsent, c)
			}
		}
		var err error
		if r.Router, err = router.New(conf); err != nil {
			t.Fatalf("%s: %v", d.Pos, err)
		}
		s.replicas = append(s.replicas, r)
	}
}

// names returns the workers or requests that a step names.
func names(d *datadriven.TestData) (names []string) {
	flags := []string{"quiet", "draining", "refused", "second"}
	for _, arg := range d.CmdArgs {
		if len(arg.Vals) == 0 && !slices.Contains(flags, arg.Key) {
			names = append(names, arg.Key)
		}
	}
	return names
}

func number(t *testing.T, d *datadriven.TestData, v string) float64 {
	n, err := strconv.ParseFloat(v, 64)
	if err != nil {
		t.Fatalf("%s: %v", d.Pos, err)
	}
	return n
}

func duration(t *testing.T, d *datadriven.TestData, v string) time.Duration {
	n, err := time.ParseDuration(v)
	if err != nil {
		t.Fatalf("%s: %v", d.Pos, err)
	}
	return n
}

// changeWorkers applies a step about the workers that it names, at each replica.
func (s *story) changeWorkers(t *testing.T, d *datadriven.TestData) {
	for _, name := range names(d) {
		w := s.workers[name]
		switch {
		case w == nil && d.Cmd != "worker":
			t.Fatalf("%s: unknown worker %q", d.Pos, name)
		case w == nil:
			w = s.newWorker(name)
		}
		switch d.Cmd {
		case "worker":
			var role string
			d.MaybeScanArgs(t, "role", &role)
			d.MaybeScanArgs(t, "batch", &w.MaxBatchedTokens)
			w.Role, w.Draining = router.Role(role), d.HasArg("draining")
		case "restart":
			w.StartedMS++
		}
		for _, r := range s.replicas {
			switch d.Cmd {
			case "leave":
				r.RemoveWorker(w.ID)
			case "stored":
				r.ApplyEvent(router.Worker{ID: w.ID}, storedEvent(storyPrompt(t, d, name)))
			default:
				set(t, r.Router, *w)
			}
		}
	}
}

func (s *story) newWorker(name string) *router.WorkerInfo {
	id := len(s.workers) + 1
	w := &router.WorkerInfo{
		ID:        uint64(id),
		Name:      name,
		Address:   netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(id)}), 8000),
		Models:    []string{"m"},
		Engine:    "vllm",
		BlockSize: storyBlock,
	}
	s.workers[name] = w
	return w
}

// storyPrompt returns the tokens of a step's prompt, of a request or worker with this name.
func storyPrompt(t *testing.T, d *datadriven.TestData, own string) (tokens []uint32) {
	arg, _ := d.Arg("prompt")
	for _, piece := range arg.Vals {
		name, length, _ := strings.Cut(piece, ":")
		if name == "own" {
			name = "own " + own
		}
		h := fnv.New32a()
		_, _ = h.Write([]byte(name))
		for i := range int(number(t, d, length)) {
			tokens = append(tokens, h.Sum32()+uint32(i))
		}
	}
	if len(tokens) == 0 {
		t.Fatalf("%s: the step has no prompt", d.Pos)
	}
	return tokens
}

// storedEvent is the event of a worker that has cached all full blocks of a prompt.
func storedEvent(tokens []uint32) indexer.Event {
	local := indexer.AppendLocalHashes(nil, tokens, storyBlock, indexer.Seed("", ""))
	ev := indexer.Event{Kind: indexer.Stored}
	for i, hash := range indexer.AppendSequenceHashes(nil, local) {
		ev.Blocks = append(ev.Blocks, indexer.Block{External: hash, Local: local[i]})
	}
	return ev
}

func (s *story) request(t *testing.T, d *datadriven.TestData, id string) {
	q, replica := &storyRequest{tokens: storyPrompt(t, d, id), quiet: d.HasArg("quiet")}, 1
	req := router.Request{ID: id, Model: "m", Tokens: q.tokens, ExpectedOutput: s.output, Explain: true}
	req.Owned, req.WantSecond = true, d.HasArg("second")
	d.MaybeScanArgs(t, "session", &req.Session)
	d.MaybeScanArgs(t, "priority", &req.StrictPriority)
	d.MaybeScanArgs(t, "replica", &replica)
	var pin, wait string
	if d.MaybeScanArgs(t, "wait", &wait) {
		req.QueueWait = duration(t, d, wait)
	}
	if d.MaybeScanArgs(t, "pin", &pin) {
		w := s.workers[pin]
		if w == nil { // the number of a worker that does not exist
			w = &router.WorkerInfo{ID: uint64(number(t, d, pin))}
		}
		req.Pinned = &router.Worker{ID: w.ID}
	}
	q.replica = s.replicas[replica-1]
	s.requests[id] = q
	decision, waits, err := q.replica.Submit(t.Context(), req)
	if waits {
		fmt.Fprintf(&s.out, "%s waits in the queue\n", id)
		return
	}
	s.decided(id, decision, err)
}

// decided prints a decision.
func (s *story) decided(id string, d router.Decision, err error) {
	if err != nil {
		fmt.Fprintf(&s.out, "%s: error: %v\n", id, err)
		return
	}
	q := s.requests[id]
	q.decision = d
	if d.QueueTime > 0 {
		fmt.Fprintf(&s.out, "%s waited for %v\n", id, d.QueueTime)
	}
	switch {
	case d.Prefill != nil:
		s.printChoice(id+", prefill", d.Prefill, prefillColumns, q.quiet)
		s.printChoice(id+", decode", &d, decodeColumns, q.quiet)
	case d.NoLeg != "":
		s.printChoice(fmt.Sprintf("%s, without a prefill leg (%s)", id, d.NoLeg), &d, columns, q.quiet)
	default:
		s.printChoice(id, &d, columns, q.quiet)
	}
}

// column is one column of the table of candidates.
type column struct {
	name  string
	value func(*router.Decision, *router.Candidate) float64
}

var (
	cachedColumn = column{"cached", func(d *router.Decision, c *router.Candidate) float64 {
		return float64(c.OverlapBlocks * d.BlockSize)
	}}
	comingColumn = column{"coming", func(d *router.Decision, c *router.Candidate) float64 {
		return float64(c.PendingBlocks * d.BlockSize)
	}}
	computeColumn = column{"compute", func(d *router.Decision, c *router.Candidate) float64 {
		return float64(max(1, d.PromptTokens-c.OverlapBlocks*d.BlockSize))
	}}
	pendingColumn = column{"pending", func(_ *router.Decision, c *router.Candidate) float64 {
		return float64(c.PendTokens)
	}}
	inFlightColumn = column{"requests", func(_ *router.Decision, c *router.Candidate) float64 {
		return float64(c.ActiveRequests)
	}}
	heldColumn = column{"held", func(_ *router.Decision, c *router.Candidate) float64 {
		return float64(c.WaitingTokens + c.DecodeTokens)
	}}
	addsColumn = column{"adds", func(_ *router.Decision, c *router.Candidate) float64 {
		return float64(c.AdditionalBlocks)
	}}
	delayColumn = column{"delay", func(_ *router.Decision, c *router.Candidate) float64 { return c.DecodeDelay }}
	speedColumn = column{"speed", func(_ *router.Decision, c *router.Candidate) float64 {
		if c.Speed == 0 {
			return 1
		}
		return c.Speed
	}}
	costColumn = column{"cost", func(_ *router.Decision, c *router.Candidate) float64 { return c.Cost }}

	columns = []column{
		cachedColumn, comingColumn, computeColumn, pendingColumn, inFlightColumn,
		heldColumn, delayColumn, speedColumn, costColumn,
	}
	prefillColumns = []column{cachedColumn, comingColumn, computeColumn, pendingColumn, inFlightColumn, costColumn}
	decodeColumns  = []column{inFlightColumn, heldColumn, addsColumn, costColumn}
)

// printChoice prints the chosen worker, why it was chosen, and a row for each worker.
func (s *story) printChoice(what string, d *router.Decision, columns []column, quiet bool) {
	fmt.Fprintf(&s.out, "%s -> %s (%s", what, d.WorkerName, d.Reason)
	if d.Policy != "" {
		fmt.Fprintf(&s.out, ", cost %s", short(d.Cost))
	}
	if d.Equal > 1 {
		fmt.Fprintf(&s.out, ", %d equal", d.Equal)
	}
	if d.ActivePrefix > 0 {
		fmt.Fprintf(&s.out, ", in use: %d tokens by %d", d.ActivePrefix, d.Sharers)
	}
	if d.Second.WorkerName != "" {
		fmt.Fprintf(&s.out, ", second %s", d.Second.WorkerName)
	}
	fmt.Fprintln(&s.out, ")")
	if quiet {
		return
	}
	compares := d.Policy != ""
	otherSpeed := func(c router.Candidate) bool { return c.Speed != 0 && c.Speed != 1 }
	if !slices.ContainsFunc(d.Candidates, otherSpeed) {
		columns = slices.DeleteFunc(slices.Clone(columns), func(c column) bool { return c.name == "speed" })
	}
	header := []string{"worker"}
	for _, c := range columns {
		header = append(header, c.name)
	}
	rows := [][]string{header}
	for i := range d.Candidates {
		c := &d.Candidates[i]
		row := []string{c.WorkerName}
		for _, col := range columns {
			switch {
			case c.Excluded != "" && col.name == "cost":
				row = append(row, string(c.Excluded))
			case c.Excluded != "" && col.name != "pending" && col.name != "requests" && col.name != "held",
				!compares && col.name == "cost":
				row = append(row, "-")
			case col.name == "speed":
				row = append(row, fmt.Sprintf("%.3g", col.value(d, c)))
			default:
				row = append(row, short(col.value(d, c)))
			}
		}
		rows = append(rows, row)
	}
	s.printTable(rows)
}

// short prints a number with at most two decimals.
func short(x float64) string {
	return strings.TrimSuffix(strings.TrimRight(strconv.FormatFloat(x, 'f', 2, 64), "0"), ".")
}

// printTable prints rows with the first column on the left and the others on the right.
func (s *story) printTable(rows [][]string) {
	widths := make([]int, len(rows[0]))
	for _, row := range rows {
		for i, cell := range row {
			widths[i] = max(widths[i], len(cell))
		}
	}
	for _, row := range rows {
		fmt.Fprintf(&s.out, "%-*s", widths[0], row[0])
		for i, cell := range row[1:] {
			fmt.Fprintf(&s.out, "  %*s", widths[i+1], cell)
		}
		fmt.Fprintln(&s.out)
	}
}

// loads prints the potential loads of a prompt.
func (s *story) loads(t *testing.T, d *datadriven.TestData) {
	req := router.Request{Model: "m", Tokens: storyPrompt(t, d, "")}
	loads, err := s.replicas[0].PotentialLoads(t.Context(), req)
	if err != nil {
		fmt.Fprintf(&s.out, "error: %v\n", err)
		return
	}
	rows := [][]string{{"worker", "prefill-tokens", "blocks", "requests", "first-token-ms"}}
	for _, l := range loads {
		rows = append(rows, []string{
			s.name(l.Worker), fmt.Sprint(l.PotentialPrefillTokens), fmt.Sprint(l.PotentialDecodeBlocks),
			fmt.Sprint(l.ActiveRequests), short(l.EstimatedTTFT),
		})
	}
	s.printTable(rows)
}

func (s *story) name(w router.Worker) string {
	for name, info := range s.workers {
		if info.ID == w.ID {
			return name
		}
	}
	return fmt.Sprint(w.ID)
}

// event applies what becomes of a request.
func (s *story) event(t *testing.T, d *datadriven.TestData, id string) {
	q := s.requests[id]
	if q == nil {
		t.Fatalf("%s: unknown request %q", d.Pos, id)
	}
	isCommand := true
	switch d.Cmd {
	case "computed":
		computes := q.decision.Worker
		if q.decision.Prefill != nil {
			computes = q.decision.Prefill.Worker
		}
		for _, r := range s.replicas {
			r.ApplyEvent(computes, storedEvent(q.tokens))
		}
		isCommand = q.replica.MarkPrefillCompleted(id)
	case "first-token":
		isCommand = q.replica.MarkPrefillCompleted(id)
	case "output":
		var tokens int
		d.ScanArgs(t, "tokens", &tokens)
		isCommand = q.replica.AddOutputTokens(id, tokens)
	case "served":
		s.served(t, d, id, q)
	case "prefill-ended":
		isCommand = q.replica.Free(q.decision.Prefill.ID)
	case "prefill-failed":
		if err := q.replica.PrefillFailed(id); err != nil {
			fmt.Fprintf(&s.out, "error: %v\n", err)
		}
	case "free":
		isCommand = q.replica.Free(id)
	case "abandon":
		isCommand = q.replica.Abandon(id)
	case "gives-up":
		isCommand = q.replica.Leave(id, true)
	}
	if !isCommand {
		fmt.Fprintf(&s.out, "%s has no slot\n", id)
	}
}

// served reports the response to a request.
func (s *story) served(t *testing.T, d *datadriven.TestData, id string, q *storyRequest) {
	r := router.Response{Address: q.decision.Address, Asked: 1, Local: d.HasArg("refused")}
	d.ScanArgs(t, "status", &r.Status)
	var from string
	if d.MaybeScanArgs(t, "from", &from) {
		r.Address, r.Asked = s.workers[from].Address, 2
	}
	moved, avoided := q.replica.Served(id, r)
	if moved {
		fmt.Fprintf(&s.out, "the slot of %s moves to %s\n", id, from)
	}
	for _, w := range avoided {
		fmt.Fprintf(&s.out, "%s is avoided\n", s.name(w.Worker))
	}
}

// sync delivers the changes of each replica to the others.
func (s *story) sync() {
	for i, from := range s.replicas {
		for _, c := range from.unsent {
			fmt.Fprintf(&s.out, "replica %d: %s %s", i+1, c.ID, c.Kind)
			if c.Kind == router.SlotTaken || c.Kind == router.SlotMoved {
				fmt.Fprintf(&s.out, " on %s", s.name(c.Worker))
			}
			fmt.Fprintln(&s.out)
			for j, to := range s.replicas {
				if j != i {
					to.PeerChanged(uint64(i+1), c)
				}
			}
		}
		from.unsent = nil
	}
}

// printWorkers prints the state of all workers.
func (s *story) printWorkers() {
	for i, r := range s.replicas {
		if r.dead {
			continue
		}
		if len(s.replicas) > 1 {
			fmt.Fprintf(&s.out, "replica %d:\n", i+1)
		}
		rows := [][]string{{"worker", "requests", "pending", "active-blocks", "cached-blocks", "speed", "state"}}
		for _, w := range r.Workers() {
			state := w.Health
			switch {
			case w.Draining:
				state = "draining"
			case w.Failing:
				state = "failing"
			}
			rows = append(rows, []string{
				w.Name, fmt.Sprint(w.ActiveRequests), fmt.Sprint(w.PendTokens), fmt.Sprint(w.ActiveBlocks),
				fmt.Sprint(w.CachedBlocks), fmt.Sprintf("%.3g", w.Speed), state,
			})
		}
		s.printTable(rows)
	}
}
