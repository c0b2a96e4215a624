// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"strconv"
	"sync"
	"time"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/internal/msgpack"
)

// Recorder writes down what engines' sockets say, byte by byte, and what is in it, for
// people and for tests: a fault that was recorded once can be played back. It is a file
// of JSON lines, each written as a whole and at once, so a process that is killed leaves
// all of them but, perhaps, a last one cut short. docs/protocol.md has its form.
//
// The token ids of prompts are in it, from which their text can be read.
//
// The methods may be called by any number of goroutines.
type Recorder struct {
	mu sync.Mutex
	// mu guards the fields below.
	w     io.Writer
	left  int64
	until time.Time
	ended func(why string)
	done  bool
}

// NewRecorder returns a recorder that writes at most size bytes, for at most length.
// Ended is told once why nothing more is written: a bound, or an error of w. It must not
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

// recordedLine is a line: what happened, when, and the messages of it.
type recordedLine struct {
	Step    string            `json:"step"`
	Note    string            `json:"note"`
	Rank    uint32            `json:"rank"`
	Time    time.Time         `json:"time"`
	Batches []recordedMessage `json:"batches,omitempty"`
	// Of an answer to a question.
	Request []string          `json:"request_frames_hex,omitempty"`
	Replies []recordedMessage `json:"replies,omitempty"`
	// Of an engine that is asked over HTTP.
	Body json.RawMessage `json:"body,omitempty"`
}

// Note writes down that something happened.
func (r *Recorder) Note(step, note string) { r.write(recordedLine{Step: step, Note: note}) }

// live writes down a message as it was published.
func (r *Recorder) live(rank uint32, frames [][]byte) {
	if r != nil {
		r.write(recordedLine{Step: "live", Rank: rank, Batches: []recordedMessage{recordMessage(frames)}})
	}
}

// reply writes down a message of the answer to a question.
func (r *Recorder) reply(rank uint32, question, frames [][]byte) {
	if r != nil {
		r.write(recordedLine{Step: "replay", Rank: rank, Request: inHex(question), Replies: []recordedMessage{recordMessage(frames)}})
	}
}

// news writes down what happened to a socket.
func (r *Recorder) news(rank uint32, step, note string) {
	if r != nil {
		r.write(recordedLine{Step: step, Rank: rank, Note: note})
	}
}

// polled writes down what an engine answered over HTTP.
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
		err = errors.New("it has all the bytes that it may have")
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
		return m // the frames are all there is to say
	}
	m.Topic, m.Seq = f.Topic, int64(f.Sequence)
	if text, rest, err := appendReadable(nil, f.Body, 0); err == nil && len(rest) == 0 {
		m.Decoded = text
	}
	return m
}

// maxReadable bounds how deep a value is that is shown: batches have a depth of six.
const maxReadable = 32

// appendReadable appends a MessagePack value as JSON: bytes as {"$hex": "…"}, and numbers
// that JSON does not have as their names.
func appendReadable(out, in []byte, depth int) (text, rest []byte, err error) {
	if depth > maxReadable {
		return out, in, fmt.Errorf("%w: it is nested too deep", msgpack.ErrShape)
	}
	switch msgp.NextType(in) { //nolint:exhaustive // the others have no form in JSON
	case msgp.NilType:
		rest, err = msgp.ReadNilBytes(in)
		return append(out, "null"...), rest, err
	case msgp.BoolType:
		v, rest, err := msgp.ReadBoolBytes(in)
		return strconv.AppendBool(out, v), rest, err
	case msgp.IntType:
		v, rest, err := msgp.ReadInt64Bytes(in)
		return strconv.AppendInt(out, v, 10), rest, err
	case msgp.UintType:
		v, rest, err := msgp.ReadUint64Bytes(in)
		return strconv.AppendUint(out, v, 10), rest, err
	case msgp.Float32Type, msgp.Float64Type:
		v, rest, err := readNumber(in)
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return strconv.AppendQuote(out, strconv.FormatFloat(v, 'g', -1, 64)), rest, err
		}
		return strconv.AppendFloat(out, v, 'g', -1, 64), rest, err
	case msgp.StrType:
		v, rest, err := msgp.ReadStringZC(in)
		if err != nil {
			return out, in, err
		}
		text, err := json.Marshal(string(v))
		return append(out, text...), rest, err
	case msgp.BinType:
		v, rest, err := msgp.ReadBytesZC(in)
		return fmt.Appendf(out, `{"$hex":"%x"}`, v), rest, err
	case msgp.ArrayType:
		n, rest, err := msgp.ReadArrayHeaderBytes(in)
		out = append(out, '[')
		for i := uint32(0); i < n && err == nil; i++ {
			if i > 0 {
				out = append(out, ',')
			}
			out, rest, err = appendReadable(out, rest, depth+1)
		}
		return append(out, ']'), rest, err
	case msgp.MapType:
		n, rest, err := msgp.ReadMapHeaderBytes(in)
		out = append(out, '{')
		for i := uint32(0); i < n && err == nil; i++ {
			if i > 0 {
				out = append(out, ',')
			}
			if msgp.NextType(rest) != msgp.StrType {
				return out, rest, fmt.Errorf("%w: a key is no string", msgpack.ErrShape)
			}
			if out, rest, err = appendReadable(out, rest, depth+1); err != nil {
				break
			}
			out = append(out, ':')
			out, rest, err = appendReadable(out, rest, depth+1)
		}
		return append(out, '}'), rest, err
	}
	return out, in, fmt.Errorf("%w: a value of no kind that JSON has", msgpack.ErrShape)
}

func readNumber(in []byte) (float64, []byte, error) {
	if msgp.NextType(in) == msgp.Float32Type {
		v, rest, err := msgp.ReadFloat32Bytes(in)
		return float64(v), rest, err
	}
	return msgp.ReadFloat64Bytes(in)
}
