// SPDX-License-Identifier: Apache-2.0

package msgpack

import "github.com/tinylib/msgp/msgp"

// Writer appends the entries of maps to B. A map begins with [Writer.Map], or as the value of an entry
// with [Writer.Entries], and its entries follow.
type Writer struct{ B []byte }

// Map begins a map of so many entries.
func (w *Writer) Map(entries int) { w.B = msgp.AppendMapHeader(w.B, uint32(entries)) }

// Key begins an entry. Its value follows.
func (w *Writer) Key(key string) { w.B = msgp.AppendString(w.B, key) }

// Entries begins an entry whose value is a map.
func (w *Writer) Entries(key string, entries int) {
	w.Key(key)
	w.Map(entries)
}

// List begins an entry whose value is a list of so many elements.
func (w *Writer) List(key string, elements int) {
	w.Key(key)
	w.B = msgp.AppendArrayHeader(w.B, uint32(elements))
}

// Null appends an entry without a value.
func (w *Writer) Null(key string) {
	w.Key(key)
	w.B = msgp.AppendNil(w.B)
}

// Text appends an entry with a text.
func (w *Writer) Text(key, value string) {
	w.Key(key)
	w.B = msgp.AppendString(w.B, value)
}

// Flag appends an entry with true or false.
func (w *Writer) Flag(key string, value bool) {
	w.Key(key)
	w.B = msgp.AppendBool(w.B, value)
}

// Uint appends an entry with a number.
func (w *Writer) Uint(key string, value uint64) {
	w.Key(key)
	w.B = msgp.AppendUint64(w.B, value)
}

// Optional appends an entry with a number, or with nothing.
func (w *Writer) Optional(key string, has bool, value uint64) {
	if has {
		w.Uint(key, value)
	} else {
		w.Null(key)
	}
}

// Uints appends an entry with a list of numbers.
func (w *Writer) Uints(key string, values []uint64) {
	w.List(key, len(values))
	b := w.B
	for _, v := range values {
		b = msgp.AppendUint64(b, v)
	}
	w.B = b
}
