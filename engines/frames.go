// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/binary"
	"fmt"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/msgpack"
)

// Frames is a decoded ZMQ message.
type Frames struct {
	Topic string
	// Plane means that the message is one of the event plane and Body is an envelope. Otherwise it
	// is an engine's message, live or replayed.
	Plane     bool
	Publisher uint64 // of the event plane
	Sequence  uint64
	// End marks the end of a replay.
	End bool
	// Body is the input of [events.DecodeMessage].
	Body []byte
}

// planeVersion is the first byte of the event plane's last frame.
const planeVersion = 1

// SplitFrames decodes a ZMQ message: four frames of the event plane, or two to four frames of an
// engine, the last two of which are sequence and batch. On the event plane the frames' numbers
// must equal those of the envelope.
func SplitFrames(frames [][]byte) (Frames, error) {
	n := len(frames)
	if n == 4 && len(frames[1]) == 8 && len(frames[2]) == 8 && len(frames[3]) >= 5 && frames[3][0] == planeVersion {
		f := Frames{
			Topic: string(frames[0]), Plane: true, Body: frames[3][5:],
			Publisher: binary.BigEndian.Uint64(frames[1]), Sequence: binary.BigEndian.Uint64(frames[2]),
		}
		if size := binary.BigEndian.Uint32(frames[3][1:]); int64(size) != int64(len(f.Body)) {
			return f, fmt.Errorf("engines: split frames: %w: %d bytes, %d announced", msgpack.ErrShape, len(f.Body), size)
		}
		e, err := events.DecodeEnvelope(f.Body)
		if err != nil {
			return f, err
		}
		if e.PublisherID != f.Publisher || e.Sequence != f.Sequence {
			return f, fmt.Errorf("engines: split frames: %w: publisher %d, sequence %d; the envelope says %d, %d",
				msgpack.ErrShape, f.Publisher, f.Sequence, e.PublisherID, e.Sequence)
		}
		return f, nil
	}
	if n < 2 || n > 4 || len(frames[n-2]) != 8 {
		return Frames{}, fmt.Errorf("engines: split frames: %w: %d frames", events.ErrMessage, n)
	}
	f := Frames{Sequence: binary.BigEndian.Uint64(frames[n-2]), Body: frames[n-1], End: len(frames[n-1]) == 0}
	if n > 2 {
		f.Topic = string(frames[n-3])
	}
	return f, nil
}

// ReplayFrames returns the request for an engine's batches, starting at a sequence.
func ReplayFrames(from uint64) [2][]byte {
	return [2][]byte{{}, binary.BigEndian.AppendUint64(nil, from)}
}
