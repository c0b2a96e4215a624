// SPDX-License-Identifier: Apache-2.0

package msgpack_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/tinylib/msgp/msgp"

	"github.com/kvroute/kvroute/internal/msgpack"
)

// Both forms of reading a map's fields return the bytes after the map. A map may be a field's value.
func TestFields(t *testing.T) {
	data := msgp.AppendMapHeader(nil, 3)
	data = msgp.AppendUint64(msgp.AppendString(data, "a"), 7)
	data = msgp.AppendUint64(msgp.AppendString(msgp.AppendMapHeader(msgp.AppendString(data, "inner"), 1), "b"), 8)
	data = msgp.AppendString(msgp.AppendString(data, "unknown"), "x")
	data = append(data, "rest"...)

	var a, b uint64
	rest, err := msgpack.WalkFields(data, func(key, data []byte) (rest []byte, err error) {
		switch string(key) {
		case "a":
			a, rest, err = msgpack.UintRest(data)
			return rest, err
		case "inner":
			return msgpack.WalkFields(data, func(_, data []byte) (rest []byte, err error) {
				b, rest, err = msgpack.UintRest(data)
				return rest, err
			})
		}
		return msgp.Skip(data)
	})
	if err != nil || string(rest) != "rest" || a != 7 || b != 8 {
		t.Errorf("walked: a %d, b %d, rest %q, %v", a, b, rest, err)
	}

	a, b = 0, 0
	found, absent, text := false, false, ""
	data = append(msgp.AppendNil(msgp.AppendString(msgp.AppendMapHeader(nil, 4), "text")), data[1:]...)
	rest, err = msgpack.ReadFields(data, []msgpack.Field{
		{Key: "a", Value: &a},
		{Key: "inner", Value: []msgpack.Field{{Key: "b", Value: &b}}, Found: &found},
		{Key: "text", Value: &text, Found: &absent},
	})
	if err != nil || string(rest) != "rest" || a != 7 || b != 8 || !found || absent || text != "" {
		t.Errorf("read: a %d, b %d, text %q, found %v, %v, rest %q, %v", a, b, text, found, absent, rest, err)
	}
}

// Each type of a field takes its value, and refuses a value of another type or out of range.
func TestTypesOfFields(t *testing.T) {
	var count int
	var rank uint32
	var hash uint64
	var flag bool
	var text string
	var raw []byte
	for _, test := range []struct {
		value any
		good  []byte
		got   func() bool
		bad   []byte
	}{
		{&count, msgp.AppendInt(nil, 7), func() bool { return count == 7 }, msgp.AppendUint64(nil, 1<<31)},
		{&rank, msgp.AppendInt(nil, 8), func() bool { return rank == 8 }, msgp.AppendUint64(nil, 1<<32)},
		{&hash, msgp.AppendInt64(nil, -1), func() bool { return hash == 1<<64-1 }, msgp.AppendString(nil, "x")},
		{&flag, msgp.AppendBool(nil, true), func() bool { return flag }, msgp.AppendInt(nil, 1)},
		{&text, msgp.AppendString(nil, "word"), func() bool { return text == "word" }, msgp.AppendInt(nil, 1)},
		{&raw, msgp.AppendBytes(nil, []byte("raw")), func() bool { return string(raw) == "raw" }, msgp.AppendInt(nil, 1)},
	} {
		fields, begin := []msgpack.Field{{Key: "k", Value: test.value}}, msgp.AppendString(msgp.AppendMapHeader(nil, 1), "k")
		if _, err := msgpack.ReadFields(append(slices.Clone(begin), test.good...), fields); err != nil || !test.got() {
			t.Errorf("%T: the value was not read: %v", test.value, err)
		}
		if _, err := msgpack.ReadFields(append(slices.Clone(begin), test.bad...), fields); err == nil {
			t.Errorf("%T: % x was read", test.value, test.bad)
		}
	}
}

// A truncated map is an error, and an error of a field names the field.
func TestBadFields(t *testing.T) {
	data := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "first"), "x")
	if _, err := msgpack.ReadFields(data, nil); err == nil {
		t.Error("a map without its second field was read")
	}
	_, err := msgpack.WalkFields(data, func(_, _ []byte) ([]byte, error) { return nil, msgpack.ErrShape })
	if !errors.Is(err, msgpack.ErrShape) || !strings.HasPrefix(err.Error(), "first: ") {
		t.Errorf("the error is %v", err)
	}
}

// AppendIDs reads numbers of each encoded size wherever they stand, and nothing behind the end of the data.
func TestIDs(t *testing.T) {
	ids := []uint32{0, 1 << 16, 127, 128, 255, 256, 1<<16 - 1, 1<<32 - 1, 5, 300}
	for first := range ids {
		want := append(slices.Clone(ids[first:]), ids[:first]...)
		data := msgp.AppendArrayHeader(nil, uint32(len(want)))
		for _, id := range want {
			data = msgp.AppendUint32(data, id)
		}
		got, rest, err := msgpack.AppendIDs([]uint32{9}, append(slices.Clip(data), "and the rest"...), msgp.ReadUint32Bytes)
		if err != nil || string(rest) != "and the rest" || !slices.Equal(got[1:], want) || got[0] != 9 {
			t.Errorf("%v, rest %q, %v; want %v", got, rest, err, want)
		}
		for n := range data {
			if _, _, err := msgpack.AppendIDs(nil, data[:n:n], msgp.ReadUint32Bytes); err == nil {
				t.Errorf("%d of %d bytes are an array", n, len(data))
			}
		}
	}
}
