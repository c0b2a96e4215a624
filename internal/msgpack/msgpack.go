// SPDX-License-Identifier: Apache-2.0

// Package msgpack reads MessagePack values from other processes. It checks each length against
// the data, and skips unknown fields.
package msgpack

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"

	"github.com/tinylib/msgp/msgp"
)

// ErrShape is wrapped by the errors about values of the wrong shape.
var ErrShape = errors.New("unexpected shape")

// WalkFields calls field for each key of a map, with the bytes after the key; field returns
// the bytes after its value.
func WalkFields(data []byte, field func(key, data []byte) (rest []byte, err error)) (rest []byte, err error) {
	n, rest, err := msgp.ReadMapHeaderBytes(data)
	if err != nil {
		return rest, err
	}
	for range n {
		var key []byte
		if len(rest) > 0 && rest[0]&0xe0 == 0xa0 && len(rest) > int(rest[0]&0x1f) { // a short text, as most keys
			key, rest = rest[1:1+rest[0]&0x1f], rest[1+rest[0]&0x1f:]
		} else if key, rest, err = msgp.ReadMapKeyZC(rest); err != nil {
			return rest, err
		}
		if rest, err = field(key, rest); err != nil {
			return rest, fmt.Errorf("%s: %w", key[:min(len(key), 32)], err)
		}
	}
	return rest, nil
}

// Cut splits off the first value.
func Cut(data []byte) (value, rest []byte, err error) {
	rest, err = msgp.Skip(data)
	return data[:len(data)-len(rest)], rest, err
}

// List reads an array whose elements take at least size bytes each. So a false header cannot
// make it allocate much more than the message has.
func List[T any](data []byte, size int, read func([]byte) (T, error)) ([]T, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil {
		return nil, err
	}
	list := make([]T, 0, min(int(n), len(rest)/size+1))
	for range n {
		element := rest
		if rest, err = msgp.Skip(rest); err != nil {
			return nil, err
		}
		v, err := read(element[:len(element)-len(rest)])
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	return list, nil
}

// Uint reads an integer of any width. A negative one keeps its bits: engines write hashes as
// signed integers.
func Uint(data []byte) (uint64, error) {
	v, _, err := UintRest(data)
	return v, err
}

// UintRest is Uint with the bytes after the value.
func UintRest(data []byte) (uint64, []byte, error) {
	if len(data) > 0 && (data[0] >= 0xe0 || 0xd0 <= data[0] && data[0] <= 0xd3) {
		v, rest, err := msgp.ReadInt64Bytes(data)
		return uint64(v), rest, err
	}
	return msgp.ReadUint64Bytes(data)
}

// AppendUint32s appends the elements of an array of numbers to dst, and returns the bytes after it. It
// reserves memory for at most one element a byte, whatever length the array claims.
func AppendUint32s(dst []uint32, data []byte) (list []uint32, rest []byte, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	if err != nil || int(n) > len(rest) {
		return dst, rest, cmp.Or(err, msgp.ErrShortBytes)
	}
	first := len(dst)
	dst = slices.Grow(dst, int(n))[:first+int(n)]
	for i := range dst[first:] {
		v := &dst[first+i]
		switch {
		case len(rest) >= 3 && rest[0] == 0xcd:
			*v, rest = uint32(rest[1])<<8|uint32(rest[2]), rest[3:]
		case len(rest) >= 1 && rest[0] < 0x80:
			*v, rest = uint32(rest[0]), rest[1:]
		case len(rest) >= 2 && rest[0] == 0xcc:
			*v, rest = uint32(rest[1]), rest[2:]
		case len(rest) >= 5 && rest[0] == 0xce:
			*v, rest = binary.BigEndian.Uint32(rest[1:]), rest[5:]
		default:
			if *v, rest, err = msgp.ReadUint32Bytes(rest); err != nil {
				return dst[:first], rest, err
			}
		}
	}
	return dst, rest, nil
}

// Rank reads a rank of a worker; nil is rank 0.
func Rank(data []byte) (uint32, error) {
	if msgp.IsNil(data) {
		return 0, nil
	}
	v, _, err := msgp.ReadUint32Bytes(data)
	return v, err
}
