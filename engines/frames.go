// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"encoding/binary"
	"fmt"

	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/events"
)

// Frames is a decoded ZMQ message of an engine, live or replayed.
type Frames struct {
	Topic    string
	Sequence uint64
	// End marks the end of a replay.
	End  bool
	Body []byte // a batch: the input of [DecodeBatch]
}

// SplitFrames decodes a ZMQ message of an engine: two to four frames, the last two of which are
// sequence and batch.
func SplitFrames(frames [][]byte) (Frames, error) {
	n := len(frames)
	if n < 2 || n > 4 || len(frames[n-2]) != 8 || dynamo.IsPlane(frames) {
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
