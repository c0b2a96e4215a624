// SPDX-License-Identifier: Apache-2.0

package events

import (
	"context"
	"fmt"
	"math"

	"github.com/nats-io/nats.go"
	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/internal/msgpack"
	"github.com/kvroute/kvroute/internal/wire"
)

// LoadTopic is the name of the event plane's topic for how full caches are.
const LoadTopic = "kv_metrics"

// AppendUsedBlocks appends the payload of a message of [LoadTopic] to dst: how many
// blocks of a rank's cache are used.
func AppendUsedBlocks(dst []byte, worker uint64, dpRank uint32, blocks uint64) []byte {
	w := msgpack.Writer{B: dst}
	w.Map(5)
	w.Uint("worker_id", worker)
	w.Uint("dp_rank", uint64(dpRank))
	w.Null("active_decode_blocks")
	w.Null("active_prefill_tokens")
	w.Uint("kv_used_blocks", blocks)
	return w.B
}

// UsedBlocks is the number of used blocks of a rank's cache, as its engine reports it.
type UsedBlocks struct {
	WorkerID  uint64
	DPRank    uint32
	Blocks    int
	Publisher uint64 // of the envelope; 0 without one
}

// ReadUsedBlocks reads the payload of a message of [LoadTopic]. present is false if the message
// has no number of used blocks.
func ReadUsedBlocks(payload []byte) (u UsedBlocks, present bool, err error) {
	var blocks uint64
	_, err = msgpack.ReadFields(payload, []msgpack.Field{
		{Key: "worker_id", Value: &u.WorkerID},
		{Key: "dp_rank", Value: &u.DPRank},
		{Key: "kv_used_blocks", Value: func(data []byte) (rest []byte, err error) {
			if present = !msgp.IsNil(data); !present {
				return msgp.Skip(data)
			}
			blocks, rest, err = msgp.ReadUint64Bytes(data) // a negative number is an error
			return rest, err
		}},
	})
	if err != nil {
		return UsedBlocks{}, false, fmt.Errorf("events: read a load: %w", err)
	}
	u.Blocks = int(min(blocks, math.MaxInt32))
	return u, present, nil
}

// FollowUsedBlocks calls report for each message of the engines of a scope with a number of used
// blocks, until ctx ends. It ignores other messages.
func FollowUsedBlocks(ctx context.Context, nc *nats.Conn, scope wire.Scope, report func(UsedBlocks)) error {
	sub, err := nc.Subscribe(scope.Topic(LoadTopic), func(m *nats.Msg) {
		e, err := DecodeEnvelope(m.Data)
		if err != nil {
			return
		}
		if u, present, err := ReadUsedBlocks(e.Payload); err == nil && present {
			u.Publisher = e.PublisherID
			report(u)
		}
	})
	if err != nil {
		return fmt.Errorf("events: subscribe to %s: %w", scope.Topic(LoadTopic), err)
	}
	<-ctx.Done()
	_ = sub.Unsubscribe() // fails if the connection is closed
	return nil
}
