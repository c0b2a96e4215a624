// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"errors"
	"fmt"
	"math"

	"github.com/tinylib/msgp/msgp"
)

// maxCount bounds a number of tokens, blocks or parts.
const maxCount = math.MaxInt32

var errShape = errors.New("unexpected shape")

// field is an entry of a MessagePack map: its key, and where its value is. That is a
// pointer to a number, a text, a bool or bytes, or a []field for a map.
type field struct {
	key   string
	value any
}

// appendFields appends a map.
func appendFields(b []byte, fields []field) []byte {
	b = msgp.AppendMapHeader(b, uint32(len(fields)))
	for _, f := range fields {
		b = msgp.AppendString(b, f.key)
		switch v := f.value.(type) {
		case *int:
			b = msgp.AppendInt(b, *v)
		case *uint32:
			b = msgp.AppendUint32(b, *v)
		case *uint64:
			b = msgp.AppendUint64(b, *v)
		case *float64:
			b = msgp.AppendFloat64(b, *v)
		case *bool:
			b = msgp.AppendBool(b, *v)
		case *string:
			b = msgp.AppendString(b, *v)
		case *[]byte:
			b = msgp.AppendBytes(b, *v)
		case []field:
			b = appendFields(b, v)
		}
	}
	return b
}

// readFields reads a map into fields. Unknown keys are skipped; a value that is absent or
// nil leaves its field as it is. Bytes alias data.
func readFields(data []byte, fields []field) (rest []byte, err error) {
	return eachField(data, func(key, value []byte) (rest []byte, err error) { return readField(key, value, fields) })
}

// readField reads the value of a key.
func readField(key, value []byte, fields []field) (rest []byte, err error) {
	for _, f := range fields {
		if string(key) == f.key && !msgp.IsNil(value) {
			return readValue(value, f.value)
		}
	}
	return msgp.Skip(value)
}

func readValue(data []byte, to any) (rest []byte, err error) {
	switch v := to.(type) {
	case *int:
		*v, rest, err = readCount(data)
	case *uint32:
		*v, rest, err = msgp.ReadUint32Bytes(data)
	case *uint64:
		*v, rest, err = msgp.ReadUint64Bytes(data)
	case *float64:
		*v, rest, err = msgp.ReadFloat64Bytes(data)
	case *bool:
		*v, rest, err = msgp.ReadBoolBytes(data)
	case *string:
		*v, rest, err = msgp.ReadStringBytes(data)
	case *[]byte:
		*v, rest, err = msgp.ReadBytesZC(data)
	case []field:
		return readFields(data, v)
	}
	return rest, err
}

// readCount reads a number of tokens, blocks or parts.
func readCount(data []byte) (int, []byte, error) {
	n, rest, err := msgp.ReadUint64Bytes(data)
	if err == nil && n > maxCount {
		err = fmt.Errorf("%w: the number %d", errShape, n)
	}
	return int(min(n, maxCount)), rest, err
}

// eachField calls f for each field of a map with all that follows the key; f returns what
// follows the value.
func eachField(data []byte, f func(key, value []byte) (rest []byte, err error)) (rest []byte, err error) {
	n, rest, err := msgp.ReadMapHeaderBytes(data)
	if err != nil {
		return rest, err
	}
	for range n {
		var key []byte
		if key, rest, err = msgp.ReadStringZC(rest); err != nil {
			return rest, err
		}
		if rest, err = f(key, rest); err != nil {
			return rest, err
		}
	}
	return rest, nil
}
