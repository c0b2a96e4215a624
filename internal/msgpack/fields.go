// SPDX-License-Identifier: Apache-2.0

package msgpack

import (
	"fmt"
	"math"
	"strings"

	"github.com/tinylib/msgp/msgp"
)

// Field is an entry of a map that [ReadFields] reads.
type Field struct {
	Key string
	// Value is where the value is stored: a pointer to int (from 0 to 2^31-1), uint32, uint64 (see
	// [UintRest]), bool, string, or []byte (which aliases the data), a []Field for a nested map, or a
	// function that reads any value, nil too, and returns the bytes after it.
	Value any
	// Found, if not nil, is set if Value was set or called.
	Found *bool
	// Required makes it an error if Value is not set or called. ReadFields clears it.
	Required bool
}

// ReadFields reads a map and returns the bytes after it. It ignores unknown keys. The Value of an
// absent or nil entry does not change, and a nil entry is not Found.
func ReadFields(data []byte, fields []Field) (rest []byte, err error) {
	rest, err = WalkFields(data, func(key, value []byte) (rest []byte, err error) {
		for i := range fields {
			if f := &fields[i]; string(key) == f.Key {
				return f.read(value)
			}
		}
		return msgp.Skip(value)
	})
	for i := range fields {
		if f := &fields[i]; f.Required && err == nil {
			err = fmt.Errorf("%w: no %s", ErrShape, strings.Clone(f.Key)) // a copy, so that fields need no heap
		}
	}
	return rest, err
}

func (f *Field) read(data []byte) (rest []byte, err error) {
	read, isFunction := f.Value.(func([]byte) ([]byte, error))
	if !isFunction && msgp.IsNil(data) {
		return msgp.Skip(data)
	}
	f.Required = false
	if f.Found != nil {
		*f.Found = true
	}
	if isFunction {
		return read(data)
	}
	switch v := f.Value.(type) {
	case *int:
		*v, rest, err = Count(data)
	case *uint32:
		*v, rest, err = msgp.ReadUint32Bytes(data)
	case *uint64:
		*v, rest, err = UintRest(data)
	case *bool:
		*v, rest, err = msgp.ReadBoolBytes(data)
	case *string:
		*v, rest, err = msgp.ReadStringBytes(data)
	case *[]byte:
		*v, rest, err = msgp.ReadBytesZC(data)
	case []Field:
		rest, err = ReadFields(data, v)
	default:
		panic("msgpack: the type of the value is unknown: " + f.Key)
	}
	return rest, err
}

// Count reads a number of tokens, blocks or parts: 0 to 2^31-1.
func Count(data []byte) (n int, rest []byte, err error) {
	v, rest, err := msgp.ReadUint64Bytes(data)
	if err == nil && v > math.MaxInt32 {
		err = fmt.Errorf("%w: the number %d", ErrShape, v)
	}
	return int(min(v, math.MaxInt32)), rest, err
}
