// SPDX-License-Identifier: Apache-2.0

// Package msgpack reads MessagePack values from other processes, and writes maps for them. It checks
// each length against the data, and skips unknown fields.
package msgpack

import (
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

// AppendList appends the elements of an array to dst, none of them after an error, and returns the
// bytes after it. The elements take at least size bytes each, so a false header cannot make it
// allocate much more than the message has.
func AppendList[T any](dst []T, data []byte, size int, read func([]byte) (T, []byte, error)) ([]T, []byte, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	list := slices.Grow(dst, min(int(n), len(rest)/size+1))
	for i := 0; i < int(n) && err == nil; i++ {
		var element T
		element, rest, err = read(rest)
		list = append(list, element)
	}
	if err != nil {
		return dst, rest, err
	}
	return list, rest, nil
}

// AppendIDs is AppendList for token ids. It calls other for each element that [readIDs] does not read.
func AppendIDs(dst []uint32, data []byte, other func([]byte) (uint32, []byte, error)) ([]uint32, []byte, error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	list := slices.Grow(dst, min(int(n), len(rest)))
	for end := len(dst) + int(n); len(list) < end && err == nil; {
		ids, size := readIDs(list[len(list):min(cap(list), end)], rest)
		list, rest = list[:len(list)+ids], rest[size:]
		if len(list) < end {
			var id uint32
			id, rest, err = other(rest)
			list = append(list, id)
		}
	}
	return list, rest, err
}

// readIDs fills list with the first numbers of data. It returns how many numbers it read, and their size in data. It
// stops before an element that is no unsigned number of at most 32 bits, and before the last four bytes of data, so
// that it need not check the length for each number.
func readIDs(list []uint32, data []byte) (n, size int) {
	for ; n < len(list) && size < len(data)-4; n++ {
		switch first := data[size]; {
		case first == 0xcd:
			list[n] = uint32(data[size+1])<<8 | uint32(data[size+2])
			size += 3
		case first < 0x80:
			list[n] = uint32(first)
			size++
		case first == 0xcc:
			list[n] = uint32(data[size+1])
			size += 2
		case first == 0xce:
			list[n] = binary.BigEndian.Uint32(data[size+1:])
			size += 5
		default:
			return n, size
		}
	}
	return n, size
}

// Each calls element for each element of an array, with the element and all that follows it. It
// returns what follows the array.
func Each(data []byte, element func(i int, data []byte) (rest []byte, err error)) (rest []byte, err error) {
	n, rest, err := msgp.ReadArrayHeaderBytes(data)
	for i := 0; i < int(n) && err == nil; i++ {
		rest, err = element(i, rest)
	}
	return rest, err
}

// UintRest reads an integer of any width. A negative one keeps its bits: engines write hashes as
// signed integers.
func UintRest(data []byte) (uint64, []byte, error) {
	if len(data) > 0 && (data[0] >= 0xe0 || 0xd0 <= data[0] && data[0] <= 0xd3) {
		v, rest, err := msgp.ReadInt64Bytes(data)
		return uint64(v), rest, err
	}
	return msgp.ReadUint64Bytes(data)
}

// IntRest is UintRest for an integer of at most most.
func IntRest(data []byte, most uint64) (n int, rest []byte, err error) {
	v, rest, err := UintRest(data)
	if err == nil && v > most {
		err = fmt.Errorf("%w: %d, want at most %d", ErrShape, v, most)
	}
	return int(v), rest, err
}

// Word reads a text. A value of another type becomes a word that nobody uses.
func Word(data []byte) (word, rest []byte, err error) {
	if msgp.NextType(data) == msgp.StrType {
		return msgp.ReadStringZC(data)
	}
	rest, err = msgp.Skip(data)
	return []byte("?"), rest, err
}

// Rank reads a rank of a worker; nil is rank 0.
func Rank(data []byte) (uint32, error) {
	if msgp.IsNil(data) {
		return 0, nil
	}
	v, _, err := msgp.ReadUint32Bytes(data)
	return v, err
}
