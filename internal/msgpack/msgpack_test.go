// SPDX-License-Identifier: Apache-2.0

package msgpack_test

import (
	"errors"
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
	rest, err = msgpack.EachField(data, func(key, value []byte) (err error) {
		switch string(key) {
		case "a":
			a, err = msgpack.Uint(value)
		case "inner":
			_, err = msgpack.EachField(value, func(_, value []byte) (err error) {
				b, err = msgpack.Uint(value)
				return err
			})
		}
		return err
	})
	if err != nil || string(rest) != "rest" || a != 7 || b != 8 {
		t.Errorf("each: a %d, b %d, rest %q, %v", a, b, rest, err)
	}
}

// A truncated map is an error, and an error of a field names the field.
func TestBadFields(t *testing.T) {
	data := msgp.AppendString(msgp.AppendString(msgp.AppendMapHeader(nil, 2), "first"), "x")
	if _, err := msgpack.EachField(data, func(_, _ []byte) error { return nil }); err == nil {
		t.Error("a map without its second field was read")
	}
	_, err := msgpack.EachField(data, func(_, _ []byte) error { return msgpack.ErrShape })
	if !errors.Is(err, msgpack.ErrShape) || !strings.HasPrefix(err.Error(), "first: ") {
		t.Errorf("the error is %v", err)
	}
}
