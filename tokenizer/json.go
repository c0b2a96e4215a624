// SPDX-License-Identifier: Apache-2.0

package tokenizer

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/internal/jsonscan"
)

// maxDepth bounds the nesting of a tokenizer file; real ones have less than ten levels.
const maxDepth = 64

// section is a value of an object, and where it stands in the file.
type section struct {
	b      []byte
	base   int
	fields sections // of the model of a file, else nil
}

// null reports whether the section is absent or null.
func (s section) null() bool { return len(s.b) == 0 || string(s.b) == "null" }

// unmarshal reads a small section. The error says where in the file it is.
func (s section) unmarshal(into any) error {
	if err := json.NewDecoder(bytes.NewReader(s.b)).Decode(into); err != nil {
		return fmt.Errorf("%w at byte %d", err, s.base)
	}
	return nil
}

// sections are the values of an object by their keys. Of two equal keys the later
// counts, as everywhere in JSON.
type sections map[string]section

func (s section) sections() (sections, error) {
	if s.fields != nil {
		return s.fields, nil
	}
	r := s.reader()
	all, err := r.sections()
	if err != nil {
		return nil, err
	}
	return all, r.End()
}

// steps returns the steps of a section: those that a Sequence has under the key list, or the section itself.
func (s section) steps(list string) (all []section, err error) {
	if s.null() {
		return nil, nil
	}
	fields, err := s.sections()
	if err != nil {
		return nil, err
	}
	if string(fields["type"].b) != `"Sequence"` {
		return []section{s}, nil
	}
	r := fields[list].reader()
	err = r.List(func() error {
		step, err := r.section()
		if err != nil {
			return err
		}
		more, err := step.steps(list)
		if all = append(all, more...); len(all) > maxDepth {
			return fmt.Errorf("more than %d steps", maxDepth)
		}
		return err
	})
	return all, err
}

// UnmarshalJSON lets encoding/json read an object as its sections.
func (m *sections) UnmarshalJSON(b []byte) (err error) {
	*m, err = section{b: slices.Clone(b)}.sections()
	return err
}

// compare orders keys as their values stand in the file.
func (m sections) compare(x, y string) int { return m[x].base - m[y].base }

func (s section) reader() reader {
	return reader{Scanner: jsonscan.Scanner{In: s.b, Base: s.base, Deepest: maxDepth}}
}

// reader reads a JSON text without building values: the vocabulary of a file has a million
// strings, of which only the bytes are needed.
type reader struct {
	jsonscan.Scanner
	buf []byte
}

// section reads a value.
func (r *reader) section() (section, error) {
	b, err := r.Value()
	return section{b: b, base: r.Base + r.At - len(b)}, err
}

// sections reads an object. It also reads the fields of the model, which is most of a file, so that nothing has to look
// for the ends of these fields again.
func (r *reader) sections() (sections, error) {
	all := sections{}
	err := r.Object(func(key []byte) error {
		text, err := r.unquoted(key)
		if err != nil {
			return err
		}
		name := string(text)
		if name == "model" && r.Peek() == '{' {
			at := r.At
			fields, err := r.sections()
			all[name] = section{r.In[at:r.At:r.At], r.Base + at, fields}
			if err != nil {
				return err
			}
		} else if all[name], err = r.section(); err != nil {
			return err
		}
		if len(all) > 1000 {
			return r.Fail("too many keys")
		}
		return nil
	})
	return all, err
}

// text reads a string. The result is valid until the next call.
func (r *reader) text() ([]byte, error) {
	quoted, err := r.String()
	if err != nil {
		return nil, err
	}
	return r.unquoted(quoted)
}

func (r *reader) unquoted(quoted []byte) ([]byte, error) {
	text, whole := jsonscan.Unquote(r.buf[:0], quoted)
	if len(text) != len(quoted)-2 {
		r.buf = text
	}
	if !whole {
		return nil, r.Fail("half a surrogate pair")
	}
	return text, nil
}

// id reads a token id: a whole number that is not negative, or a boolean, which engines read as 0 or 1.
func (r *reader) id() (uint32, error) {
	r.Peek()
	at := r.At
	id := uint32(0)
	for ; r.At < len(r.In) && r.At < at+9 && '0' <= r.In[r.At] && r.In[r.At] <= '9'; r.At++ {
		id = 10*id + uint32(r.In[r.At]-'0')
	}
	// A digit sequence that begins with 0, or that is not all of the number, is read below.
	if r.At > at && r.In[at] != '0' && r.At < len(r.In) && strings.IndexByte(",}] \t\n\r", r.In[r.At]) >= 0 {
		return id, nil
	}
	r.At = at
	text, err := r.Value()
	if err != nil {
		return 0, err
	}
	if n, err := strconv.ParseUint(string(text), 10, 32); err == nil {
		return uint32(n), nil
	}
	switch string(text) { // engines read these as numbers
	case "true":
		return 1, nil
	case "false":
		return 0, nil
	}
	if n, err := strconv.ParseFloat(string(text), 64); err == nil && n == math.Trunc(n) && 0 <= n && n <= math.MaxUint32 {
		return uint32(n), nil
	}
	r.At = at
	return 0, r.Fail("want a token id")
}

// pattern is a text or a regular expression, of which a file has one.
type pattern struct{ String, Regex string }
