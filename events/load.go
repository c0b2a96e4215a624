// SPDX-License-Identifier: Apache-2.0

package events

import "github.com/tinylib/msgp/msgp"

// LoadTopic is the name of the event plane's topic for how full caches are.
const LoadTopic = "kv_metrics"

// AppendUsedBlocks appends the payload of a message of [LoadTopic] to dst: how many
// blocks of a rank's cache are used. What Dynamo's routers once told each other there is
// not said.
func AppendUsedBlocks(dst []byte, worker uint64, dpRank uint32, blocks uint64) []byte {
	dst = msgp.AppendMapHeader(dst, 5)
	dst = msgp.AppendUint64(msgp.AppendString(dst, "worker_id"), worker)
	dst = msgp.AppendUint32(msgp.AppendString(dst, "dp_rank"), dpRank)
	dst = msgp.AppendNil(msgp.AppendString(dst, "active_decode_blocks"))
	dst = msgp.AppendNil(msgp.AppendString(dst, "active_prefill_tokens"))
	return msgp.AppendUint64(msgp.AppendString(dst, "kv_used_blocks"), blocks)
}
