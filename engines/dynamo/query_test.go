// SPDX-License-Identifier: Apache-2.0

package dynamo_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/fixtures"
)

// planeRequest is a request of Dynamo's request plane, as a worker reads it.
type planeRequest struct {
	Path    string
	Headers map[string]string
	Control struct {
		ID         string
		Codec      string                `json:"payload_codec"`
		Connection struct{ Info string } `json:"connection_info"`
	}
	Info struct{ Address, Subject, Context string }
	Body []byte
}

func readPlaneRequest(r io.Reader) (q planeRequest, err error) {
	text := func() []byte {
		var n [2]byte
		if _, e := io.ReadFull(r, n[:]); e != nil {
			err = e
			return nil
		}
		b := make([]byte, binary.BigEndian.Uint16(n[:]))
		if _, e := io.ReadFull(r, b); e != nil {
			err = e
		}
		return b
	}
	q.Path = string(text())
	headers := text()
	var size [4]byte
	if err != nil {
		return q, err
	}
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return q, err
	}
	payload := make([]byte, binary.BigEndian.Uint32(size[:]))
	if _, err := io.ReadFull(r, payload); err != nil {
		return q, err
	}
	h, b := binary.BigEndian.Uint64(payload), binary.BigEndian.Uint64(payload[8:])
	if int(24+h+b) != len(payload) {
		return q, fmt.Errorf("a header of %d bytes and a body of %d in %d", h, b, len(payload))
	}
	q.Body = payload[24+h:]
	for data, to := range map[string]any{string(headers): &q.Headers, string(payload[24 : 24+h]): &q.Control} {
		if err := json.Unmarshal([]byte(data), to); err != nil {
			return q, err
		}
	}
	return q, json.Unmarshal([]byte(q.Control.Connection.Info), &q.Info)
}

// planeWorker answers requests of the request plane. play receives each request and writes to the
// connection that the worker opens for the answer, or to nil to open none.
func planeWorker(t *testing.T, play func(planeRequest, io.Writer) error, dials func(planeRequest) bool) (address string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer c.Close()
				for {
					q, err := readPlaneRequest(c)
					if err != nil {
						return
					}
					c.Write([]byte{0, 0, 0, 0})
					if dials != nil && !dials(q) {
						continue
					}
					back, err := net.Dial("tcp", q.Info.Address)
					if err != nil {
						return
					}
					// A client that has the complete answer closes the connection, so writing the
					// rest may fail.
					if err := play(q, back); err != nil && !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
						t.Error(err)
					}
					back.Close()
				}
			}()
		}
	}()
	return l.Addr().String()
}

// say writes an answer as Dynamo's workers do.
func say(w io.Writer, subject string, bodies ...[]byte) error {
	out := dynamo.AppendTwoPart(nil, []byte(`{"subject":"`+subject+`","stream_type":"response"}`), nil)
	out = dynamo.AppendTwoPart(out, []byte(`{"error":null}`), nil)
	for _, b := range bodies {
		out = dynamo.AppendTwoPart(out, nil, b)
	}
	_, err := w.Write(dynamo.AppendTwoPart(out, []byte(`"sentinel"`), nil))
	return err
}

// data returns the body that contains an answer; last is the body after it.
func data(a *events.Answer) []byte {
	b := msgp.AppendMapHeader(nil, 2)
	b = append(msgp.AppendString(b, "data"), events.AppendAnswer(nil, a)...)
	return msgp.AppendBool(msgp.AppendString(b, "complete_final"), false)
}

func last() []byte {
	return msgp.AppendBool(msgp.AppendString(msgp.AppendMapHeader(nil, 1), "complete_final"), true)
}

// kvroute's requests equal the captured requests that Dynamo 1.6.1 answered, byte by byte, and its
// answers are decoded.
func TestCapturedQueriesOverTheRequestPlane(t *testing.T) {
	dir := fixtures.Need(t, "vectors", "dynamo-1.6.1")
	type row struct {
		ID       string
		Path     string
		Request  string `json:"request_hex"`
		Response string `json:"response_hex"`
		Body     struct {
			WorkerID uint64  `json:"worker_id"`
			DPRank   uint32  `json:"dp_rank"`
			Start    *uint64 `json:"start_event_id"`
			End      *uint64 `json:"end_event_id"`
			Kind     string
		}
	}
	var all []row
	fixtures.EachLine(t, filepath.Join(dir, "recovery_query.jsonl"), func(line []byte) {
		var r row
		if err := json.Unmarshal(line, &r); err != nil {
			t.Fatal(err)
		}
		all = append(all, r)
	})
	kinds := map[events.AnswerKind]int{}
	dumps := map[int]int{}
	for _, r := range all {
		raw, _ := hex.DecodeString(r.Request)
		captured, err := readPlaneRequest(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		q := events.Query{WorkerID: r.Body.WorkerID, DPRank: r.Body.DPRank, Kind: r.Body.Kind}
		if r.Body.Start != nil {
			q.HasStart, q.Start = true, *r.Body.Start
		}
		if r.Body.End != nil {
			q.End = *r.Body.End
		}
		ours, err := dynamo.PlaneRequest(r.Path, captured.Control.ID, captured.Info.Subject, captured.Info.Address, q)
		if err != nil || !bytes.Equal(ours, raw) {
			t.Errorf("%s: our request, %v\n%q\nis not the one captured\n%q", r.ID, err, ours, raw)
		}
		response, _ := hex.DecodeString(r.Response)
		if len(response) == 0 {
			continue // see TestAnIndexerThatIsSilent
		}
		// The fake worker sends captured bytes with the subject of the test's request.
		address := planeWorker(t, func(got planeRequest, w io.Writer) error {
			if got.Path != r.Path || !bytes.Equal(got.Body, captured.Body) {
				return fmt.Errorf("asked for %s with %x", got.Path, got.Body)
			}
			_, err := w.Write(bytes.Replace(response, []byte(captured.Info.Subject), []byte(got.Info.Subject), 1))
			return err
		}, nil)
		a, publisher, err := dynamo.AskIndexer(t.Context(), dynamo.Indexer{Transport: address + "/" + r.Path, Publisher: 5}, q)
		if err != nil || publisher != 5 || a.Bad > 0 {
			t.Errorf("%s: %v, publisher %d, %d bad", r.ID, err, publisher, a.Bad)
		}
		kinds[a.Kind]++
		if a.Kind == events.AnswerDump {
			dumps[len(a.Events)]++
		}
	}
	if len(all) != 12 || kinds[events.AnswerDump] != 2 || kinds[events.AnswerEvents] != 4 || kinds[events.AnswerInvalidRange] != 2 || kinds[events.AnswerTooNew] != 2 || dumps[16] != 1 || dumps[9] != 1 {
		t.Errorf("%d queries, answered %v, dumps by size %v", len(all), kinds, dumps)
	}
}

func TestTheRequestPlaneIsAsked(t *testing.T) {
	dump := events.Answer{
		Kind: events.AnswerDump, LastEventID: 3,
		Events: []events.RouterEvent{{WorkerID: 26, DPRank: 1, EventID: 1, Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: 1, Local: 2}}}}},
	}
	twice := func(w io.Writer, subject string) error { return say(w, subject, data(&dump), data(&dump), last()) }
	for name, c := range map[string]struct {
		play func(planeRequest, io.Writer) error
		want string // part of the error; empty if the dump is expected
	}{
		"an answer":           {play: func(q planeRequest, w io.Writer) error { return say(w, q.Info.Subject, data(&dump), last()) }},
		"an answer, twice":    {play: func(q planeRequest, w io.Writer) error { return twice(w, q.Info.Subject) }},
		"byte by byte":        {play: func(q planeRequest, w io.Writer) error { return say(slowly{w}, q.Info.Subject, data(&dump), last()) }},
		"after somebody else": {play: afterStrangers(&dump)},
		"no answer":           {play: func(q planeRequest, w io.Writer) error { return say(w, q.Info.Subject, last()) }, want: "ends without one"},
		"an error": {play: func(q planeRequest, w io.Writer) error {
			b := dynamo.AppendTwoPart(nil, []byte(`{"subject":"`+q.Info.Subject+`"}`), nil)
			_, err := w.Write(dynamo.AppendTwoPart(b, []byte(`{"error":"no such endpoint"}`), nil))
			return err
		}, want: "no such endpoint"},
		"half an answer": {play: func(q planeRequest, w io.Writer) error {
			var b bytes.Buffer
			if err := say(&b, q.Info.Subject, data(&dump)); err != nil {
				return err
			}
			_, err := w.Write(b.Bytes()[:b.Len()/2])
			return err
		}, want: "EOF"},
		"no header": {play: func(q planeRequest, w io.Writer) error {
			b := dynamo.AppendTwoPart(nil, []byte(`{"subject":"`+q.Info.Subject+`"}`), nil)
			_, err := w.Write(append(b, bytes.Repeat([]byte{0xff}, 24)...))
			return err
		}, want: "unexpected shape"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			address := planeWorker(t, c.play, nil)
			a, publisher, err := dynamo.AskIndexer(t.Context(), dynamo.Indexer{Transport: address + "/1a/dynamo/backend/q", Publisher: 9}, events.Query{WorkerID: 26, DPRank: 1})
			switch {
			case c.want != "":
				if err == nil || !strings.Contains(err.Error(), c.want) {
					t.Errorf("%v, want %q", err, c.want)
				}
			case err != nil || publisher != 9 || a.Kind != events.AnswerDump || len(a.Events) != 1 || a.LastEventID != 3 || a.Events[0].Event.Blocks[0] != dump.Events[0].Event.Blocks[0]:
				t.Errorf("%+v of %d, %v", a, publisher, err)
			}
		})
	}
}

// slowly writes byte by byte.
type slowly struct{ w io.Writer }

func (s slowly) Write(data []byte) (int, error) {
	for i := range data {
		if _, err := s.w.Write(data[i : i+1]); err != nil {
			return i, err
		}
	}
	return len(data), nil
}

// afterStrangers answers after other peers have connected.
func afterStrangers(dump *events.Answer) func(planeRequest, io.Writer) error {
	return func(q planeRequest, w io.Writer) error {
		for _, hello := range []string{"GET / HTTP/1.1\r\n\r\nHost: x and more that fills a header\r\n", ""} {
			c, err := net.Dial("tcp", q.Info.Address)
			if err != nil {
				return err
			}
			io.WriteString(c, hello)
			c.Close()
		}
		c, err := net.Dial("tcp", q.Info.Address)
		if err != nil {
			return err
		}
		defer c.Close()
		if err := say(c, "another", data(dump), last()); err != nil {
			return err
		}
		return say(w, q.Info.Subject, data(dump), last())
	}
}

func TestAnIndexerThatIsSilent(t *testing.T) {
	address := planeWorker(t, nil, func(planeRequest) bool { return false })
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, _, err := dynamo.AskIndexer(ctx, dynamo.Indexer{Transport: address + "/q"}, events.Query{}); err == nil || dynamo.Nobody(err) {
		t.Errorf("nobody dials: %v", err)
	}
	closed := fmt.Sprintf("127.0.0.1:%d", fixtures.HoldPort(t))
	for transport, nobody := range map[string]bool{closed + "/q": true, closed: false, "": false, "127.0.0.1/q": false} {
		if _, _, err := dynamo.AskIndexer(t.Context(), dynamo.Indexer{Transport: transport}, events.Query{}); err == nil || dynamo.Nobody(err) != nobody {
			t.Errorf("%q: %v", transport, err)
		}
	}
}

func FuzzRequestPlane(f *testing.F) {
	var b bytes.Buffer
	if err := say(&b, "s", data(&events.Answer{Kind: events.AnswerTooNew, LastEventID: 4}), last()); err != nil {
		f.Fatal(err)
	}
	f.Add(b.Bytes())
	f.Fuzz(func(t *testing.T, answer []byte) {
		dynamo.ReadPlaneAnswer(bufio.NewReader(bytes.NewReader(answer)))
	})
}
