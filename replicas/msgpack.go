// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/internal/msgpack"
)

// packer appends entries of MessagePack maps.
type packer struct{ b []byte }

func (p *packer) header(entries int)     { p.b = msgp.AppendMapHeader(p.b, uint32(entries)) }
func (p *packer) key(key string)         { p.b = msgp.AppendString(p.b, key) }
func (p *packer) null(key string)        { p.b = msgp.AppendNil(msgp.AppendString(p.b, key)) }
func (p *packer) text(key, value string) { p.b = msgp.AppendString(msgp.AppendString(p.b, key), value) }

func (p *packer) flag(key string, v bool) { p.b = msgp.AppendBool(msgp.AppendString(p.b, key), v) }

func (p *packer) uint(key string, v uint64) { p.b = msgp.AppendUint64(msgp.AppendString(p.b, key), v) }
func (p *packer) count(key string, n int)   { p.uint(key, uint64(max(0, n))) }

// maxCount is the largest number of tokens, blocks or parts.
const maxCount = math.MaxInt32

// field is an entry of a MessagePack map: its key, and a pointer to its value. The value of
// a nested map is a []field.
type field struct {
	key   string
	value any
}

// readFields reads a map. Unknown keys are ignored. The value of an absent or nil field does
// not change.
func readFields(data []byte, fields []field) (rest []byte, err error) {
	return msgpack.WalkFields(data, func(key, value []byte) (rest []byte, err error) { return readField(key, value, fields) })
}

// readField reads the value of a key.
func readField(key, value []byte, fields []field) (rest []byte, err error) {
	for _, f := range fields {
		if string(key) != f.key || msgp.IsNil(value) {
			continue
		}
		switch v := f.value.(type) {
		case *int:
			*v, rest, err = readCount(value)
		case *uint32:
			*v, rest, err = msgp.ReadUint32Bytes(value)
		case *uint64:
			*v, rest, err = msgp.ReadUint64Bytes(value)
		case *bool:
			*v, rest, err = msgp.ReadBoolBytes(value)
		case *string:
			*v, rest, err = msgp.ReadStringBytes(value)
		case []field:
			rest, err = readFields(value, v)
		}
		return rest, err
	}
	return msgp.Skip(value)
}

// readCount reads a number of tokens, blocks or parts.
func readCount(data []byte) (int, []byte, error) {
	n, rest, err := msgp.ReadUint64Bytes(data)
	if err == nil && n > maxCount {
		err = fmt.Errorf("%w: the number %d", errShape, n)
	}
	return int(min(n, maxCount)), rest, err
}
