// SPDX-License-Identifier: Apache-2.0

package slots_test

import (
	"fmt"
	"hash/fnv"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/datadriven"

	"github.com/kvroute/kvroute/slots"
)

// TestSlotStories plays the scripts in testdata. Each script explains one situation, and
// then has steps. After each step stand the loads of all workers. life.txt explains the
// columns.
//
// A prompt is a list of named pieces with their lengths in blocks of 16 tokens:
// blocks=(system:4, a:2). Prompts that begin with the same pieces share these blocks.
//
//	take a worker=1 blocks=(…) cached=64    books a slot; cached are tokens
//	first-token a                           reported; at-end: it came at some time before
//	output a tokens=20                      20 more tokens of output, reported
//	grow worker=1 rate=50                   estimates outputs: 50 tokens a second
//	move a worker=2 cached=0                another worker serves the request
//	end a                                   gives the slot back
//	infer                                   infers first tokens by rate
//	rate worker=1                           the measured rate of prefill, and its order
//	adds worker=1 blocks=(…)                blocks that a request would add
//	advance 10s                             time passes
//	expire                                  drops the slots that nobody owns
//	remove-worker 1, remove-replica 2       drops their slots
func TestSlotStories(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) == 0 {
		t.Fatalf("%d stories, %v", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) {
			s := &slotStory{now: time.Unix(1_755_000_000, 0)}
			s.slots.InferFirstTokens()
			datadriven.RunTest(t, file, s.step)
		})
	}
}

const slotBlock = 16 // tokens

// slotStory is the state of one script.
type slotStory struct {
	now     time.Time
	slots   slots.Table
	workers []int // that were named so far, sorted
	booked  uint64
}

func (s *slotStory) step(t *testing.T, d *datadriven.TestData) string {
	var out strings.Builder
	say := func(format string, args ...any) { fmt.Fprintf(&out, format+"\n", args...) }
	worker := s.worker(t, d)
	loads := true
	switch d.Cmd {
	case "take":
		for _, id := range slotNames(d) {
			if !s.take(t, d, id, worker) {
				say("%s has a slot already", id)
			}
		}
	case "first-token":
		for _, id := range slotNames(d) {
			switch news, inferred := s.slots.FirstToken(s.now, id, !d.HasArg("at-end")); {
			case !news:
				say("%s: no news", id)
			case inferred:
				say("%s: was inferred before", id)
			}
		}
	case "output":
		var tokens int
		d.ScanArgs(t, "tokens", &tokens)
		for _, id := range slotNames(d) {
			if !s.slots.AddOutputTokens(s.now, id, tokens) {
				say("%s has no slot", id)
			}
		}
	case "grow":
		s.slots.Grow(s.now, worker, slotNumber(t, d, "rate"))
	case "move":
		id := d.CmdArgs[0].Key
		if !s.slots.Move(s.now, id, worker, int(slotNumber(t, d, "cached"))) {
			say("%s does not move", id)
		}
	case "end":
		for _, id := range slotNames(d) {
			e := s.slots.Finish(s.now, id)
			switch {
			case !e.Existed:
				say("%s has no slot", id)
			case !e.Started:
				say("%s ended without a first token", id)
			default:
				say("%s ended: %.4g tokens of output", id, e.OutputTokens)
				if e.Unestimated > 0 {
					say("%s: the output of the last %v is to be estimated", id, e.Unestimated)
				}
			}
		}
	case "infer":
		for _, w := range s.workers {
			s.slots.InferByRate(s.now, w)
		}
	case "rate":
		loads = false
		switch rate, reorders := s.slots.PrefillRate(worker); {
		case reorders:
			say("the worker reorders prompts")
		case rate == 0:
			say("unknown")
		default:
			say("%.4g tokens a second", rate)
		}
	case "adds":
		loads = false
		say("%d blocks", s.slots.AdditionalBlocks(worker, slotBlocks(t, d, "")))
	case "advance":
		loads = false
		delay, err := time.ParseDuration(d.CmdArgs[0].Key)
		if err != nil {
			t.Fatalf("%s: %v", d.Pos, err)
		}
		s.now = s.now.Add(delay)
	case "expire":
		say("%d expired", s.slots.Expire(s.now))
	case "remove-worker":
		s.slots.RemoveWorker(int(parseNumber(t, d, d.CmdArgs[0].Key)))
	case "remove-replica":
		s.slots.RemoveReplica(uint64(parseNumber(t, d, d.CmdArgs[0].Key)))
	default:
		t.Fatalf("%s: unknown step %q", d.Pos, d.Cmd)
	}
	for _, i := range s.slots.TakeInferred() {
		say("%s: first token inferred by %s", i.ID, i.By)
	}
	if loads {
		s.printLoads(&out)
	}
	return out.String()
}

// worker returns the worker that a step names, 0 for none.
func (s *slotStory) worker(t *testing.T, d *datadriven.TestData) int {
	worker := 0
	if d.MaybeScanArgs(t, "worker", &worker) && !slices.Contains(s.workers, worker) {
		s.workers = append(s.workers, worker)
		slices.Sort(s.workers)
	}
	return worker
}

func (s *slotStory) take(t *testing.T, d *datadriven.TestData, id string, worker int) bool {
	b := slots.Booking{Worker: worker, Blocks: slotBlocks(t, d, id), BlockSize: slotBlock}
	b.PromptTokens = len(b.Blocks) * slotBlock
	d.MaybeScanArgs(t, "prompt", &b.PromptTokens)
	d.MaybeScanArgs(t, "cached", &b.CachedTokens)
	d.MaybeScanArgs(t, "expected", &b.ExpectedOutput)
	d.MaybeScanArgs(t, "replica", &b.Replica)
	b.Owned, b.Unseen = !d.HasArg("not-owned"), d.HasArg("unseen")
	b.NoReuse, b.PrefillUntracked = d.HasArg("no-reuse"), d.HasArg("computed")
	b.BlocksUntracked = d.HasArg("no-blocks")
	s.booked++
	b.Number = s.booked
	return s.slots.Add(s.now, id, &b)
}

// slotNames returns the requests that a step names.
func slotNames(d *datadriven.TestData) (names []string) {
	flags := []string{"at-end", "not-owned", "unseen", "no-reuse", "computed", "no-blocks"}
	for _, arg := range d.CmdArgs {
		if len(arg.Vals) == 0 && !slices.Contains(flags, arg.Key) {
			names = append(names, arg.Key)
		}
	}
	return names
}

// slotBlocks returns the sequence hashes of a step's prompt. The piece "own" is another one for
// each request.
func slotBlocks(t *testing.T, d *datadriven.TestData, own string) (sequence []uint64) {
	arg, _ := d.Arg("blocks")
	prefix := fnv.New64a()
	for _, piece := range arg.Vals {
		name, length, _ := strings.Cut(piece, ":")
		if name == "own" {
			name = "own " + own
		}
		for i := range int(parseNumber(t, d, length)) {
			fmt.Fprintln(prefix, name, i)
			sequence = append(sequence, prefix.Sum64())
		}
	}
	return sequence
}

func slotNumber(t *testing.T, d *datadriven.TestData, key string) float64 {
	var v string
	d.ScanArgs(t, key, &v)
	return parseNumber(t, d, v)
}

func parseNumber(t *testing.T, d *datadriven.TestData, v string) float64 {
	n, err := strconv.ParseFloat(v, 64)
	if err != nil {
		t.Fatalf("%s: %v", d.Pos, err)
	}
	return n
}

func (s *slotStory) printLoads(out *strings.Builder) {
	fmt.Fprintln(out, "worker  requests  waiting  pending  decoding  blocks")
	for _, w := range s.workers {
		l := s.slots.Load(w)
		fmt.Fprintf(out, "%-6d  %8d  %7d  %7d  %8d  %6d\n", w, l.Requests, l.Waiting, l.PendTokens, l.DecodeTokens, l.Blocks)
	}
}
