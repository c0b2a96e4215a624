// SPDX-License-Identifier: Apache-2.0

package openai

import "github.com/kvroute/kvroute/internal/jsonscan"

// Member is a member of a JSON object, for [Edit].
type Member struct {
	Name  string
	Value []byte // nil removes the member
}

// Edit returns a JSON object without the members that are named, and with those that have a value
// at its end. The result is in pieces, most of which alias the object: joined they are the new
// object. The object must be valid, as [Parse] requires of a body.
func Edit(object []byte, members ...Member) (pieces [][]byte) {
	s := jsonscan.Scanner{In: object}
	s.Peek()
	at := s.At + 1 // behind the brace, or the last member and its comma
	from := -1     // where the members begin that are kept since the last one that is not
	comma := ""
	keep := func(to int) {
		if from >= 0 {
			pieces = append(pieces, []byte(comma), object[from:to])
			from, comma = -1, ","
		}
	}
	pieces = append(pieces, []byte("{"))
	end := at
	_ = readObject(&s, func(name []byte, _ value) { // valid, so there is no error
		edited := false
		for i := range members {
			edited = edited || members[i].Name == string(name)
		}
		if edited {
			keep(end)
		} else if from < 0 {
			from = at
		}
		end = s.At
		next := jsonscan.Scanner{In: object, At: end}
		next.Peek()
		at = next.At + 1
	})
	keep(end)
	for _, m := range members {
		if m.Value != nil {
			pieces = append(pieces, []byte(comma+`"`+m.Name+`":`), m.Value)
			comma = ","
		}
	}
	return append(pieces, []byte("}"))
}

// Find returns the value at a path of names, where a list stands for its first element. It returns
// nil if there is no such value, if the value is null, or if the text is not valid JSON.
func Find(object []byte, path ...string) []byte {
	s := jsonscan.Scanner{In: object}
	v, err := readValue(&s)
	if err != nil || s.End() != nil {
		return nil
	}
	for _, name := range path {
		if v.kind() == '[' {
			v = v.first()
		}
		v = v.member(name)
	}
	return v
}
