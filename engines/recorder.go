// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/tinylib/msgp/msgp"
)

// Recorder writes the messages of engines' sockets, byte by byte and decoded, to a file of
// JSON lines: a recorded fault can be played back in a test. Each line is written at once,
// so a killed process leaves complete lines, except perhaps the last one. docs/protocol.md
// describes the lines.
//
// The file has the token ids of prompts, from which their text can be read.
//
// The methods may be called by any number of goroutines. A nil Recorder writes nothing.
type Recorder struct {
	mu sync.Mutex
	// mu guards the fields below.
	w     io.Writer
	left  int64
	until time.Time
	ended func(why string)
	done  bool
}

// NewRecorder returns a recorder that writes at most size bytes, for at most length. It
// calls ended once with the reason why it stops: a bound, or an error of w. ended must not
// call back.
func NewRecorder(w io.Writer, size int64, length time.Duration, ended func(why string)) *Recorder {
	return &Recorder{w: w, left: size, until: time.Now().Add(length), ended: ended}
}

// recordedMessage is a message of an engine.
type recordedMessage struct {
	Frames  []string        `json:"frames_hex"`
	Topic   string          `json:"topic"`
	Seq     int64           `json:"seq"` // -1 of the end of an answer
	Decoded json.RawMessage `json:"decoded,omitempty"`
}

// recordedLine is a line of the file.
type recordedLine struct {
	Step    string            `json:"step"`
	Note    string            `json:"note"`
	Rank    uint32            `json:"rank"`
	Time    time.Time         `json:"time"`
	Batches []recordedMessage `json:"batches,omitempty"`
	// For the answer to a request.
	Request []string          `json:"request_frames_hex,omitempty"`
	Replies []recordedMessage `json:"replies,omitempty"`
	// For an engine that is polled over HTTP.
	Body json.RawMessage `json:"body,omitempty"`
}

// Note writes an event of the recording itself.
func (r *Recorder) Note(step, note string) { r.write(recordedLine{Step: step, Note: note}) }

// live writes a message of the PUB socket.
func (r *Recorder) live(rank uint32, frames [][]byte) {
	if r != nil {
		r.write(recordedLine{Step: "live", Rank: rank, Batches: []recordedMessage{recordMessage(frames)}})
	}
}

// reply writes a message of the answer to a request.
func (r *Recorder) reply(rank uint32, request, frames [][]byte) {
	if r != nil {
		r.write(recordedLine{Step: "replay", Rank: rank, Request: inHex(request), Replies: []recordedMessage{recordMessage(frames)}})
	}
}

// news writes a change of a connection.
func (r *Recorder) news(rank uint32, step, note string) {
	if r != nil {
		r.write(recordedLine{Step: step, Rank: rank, Note: note})
	}
}

// polled writes an answer over HTTP.
func (r *Recorder) polled(rank uint32, body []byte) {
	if r != nil && json.Valid(body) {
		r.write(recordedLine{Step: "poll", Rank: rank, Body: body})
	}
}

func (r *Recorder) write(l recordedLine) {
	l.Time = time.Now().UTC()
	text, err := json.Marshal(l)
	text = append(text, '\n')
	r.mu.Lock()
	defer r.mu.Unlock()
	switch {
	case r.done:
		return
	case err != nil:
	case l.Time.After(r.until):
		err = errors.New("the time is over")
	case int64(len(text)) > r.left:
		err = errors.New("it has as many bytes as allowed")
	default:
		r.left -= int64(len(text))
		_, err = r.w.Write(text)
	}
	if err != nil {
		r.done = true
		r.ended(err.Error())
	}
}

func inHex(frames [][]byte) []string {
	all := make([]string, len(frames))
	for i, f := range frames {
		all[i] = hex.EncodeToString(f)
	}
	return all
}

func recordMessage(frames [][]byte) recordedMessage {
	m := recordedMessage{Frames: inHex(frames), Seq: -1}
	f, err := SplitFrames(frames)
	if err != nil || f.End {
		return m
	}
	m.Topic, m.Seq = f.Topic, int64(f.Sequence)
	if len(f.Body) > maxDecoded {
		return m
	}
	if v, rest, err := msgp.ReadIntfBytes(f.Body); err == nil && len(rest) == 0 {
		m.Decoded, _ = json.Marshal(readable(v)) // absent if a number is not finite
	}
	return m
}

// maxDecoded limits the batches that are written decoded: a decoded value takes many times the
// memory of its bytes.
const maxDecoded = 4 << 20

// readable replaces the byte strings in a decoded value by {"$hex": "…"}.
func readable(v any) any {
	switch v := v.(type) {
	case []byte:
		return map[string]string{"$hex": hex.EncodeToString(v)}
	case []any:
		for i := range v {
			v[i] = readable(v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = readable(v[k])
		}
	}
	return v
}
