// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"bytes"
	"encoding/binary"
)

// A mark stands for a control token in the text of a prompt. It is a byte that no UTF-8 text
// contains, followed by the token's id.
const (
	markByte = 0xff
	markSize = 5
)

// NoID is the id in a mark that only separates two texts: each of them is tokenized as
// if the other did not exist.
const NoID = ^uint32(0)

// AppendMark appends a mark for the control token id, or for none (NoID).
func AppendMark(dst []byte, id uint32) []byte {
	return binary.LittleEndian.AppendUint32(append(dst, markByte), id)
}

// NextMark returns the start, the end and the id of the first mark in text[from:]. start is -1
// if there is none. An incomplete mark, which AppendMark never makes, extends to the end of text.
func NextMark(text []byte, from int) (start, end int, id uint32) {
	k := bytes.IndexByte(text[from:], markByte)
	if k < 0 {
		return -1, -1, NoID
	}
	start = from + k
	if len(text)-start < markSize {
		return start, len(text), NoID
	}
	end = start + markSize
	return start, end, binary.LittleEndian.Uint32(text[start+1 : end])
}

// marked builds a text with marks.
type marked struct {
	b    []byte
	ids  map[string]uint32 // of the control tokens
	text bool              // b ends in text
}

// control adds a control token.
func (m *marked) control(token string) {
	m.b = AppendMark(m.b, m.ids[token])
	m.text = false
}

// piece adds a text that is tokenized alone.
func (m *marked) piece(text string) {
	if text == "" {
		return
	}
	if m.text {
		m.b = AppendMark(m.b, NoID)
	}
	m.b = append(m.b, text...)
	m.text = true
}
