// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// toolNamespace describes tools as harmony shows them to the model: as functions
// of a TypeScript namespace.
func toolNamespace(tools []jinja.Value) (string, error) {
	var b strings.Builder
	b.WriteString("# Tools\n\n## functions\n\nnamespace functions {\n\n")
	for _, t := range tools {
		f := at(t, "function")
		name, _ := at(f, "name").Text()
		description, _ := at(f, "description").Text()
		for _, line := range lines(description) {
			b.WriteString("// " + line + "\n")
		}
		if parameters := at(f, "parameters"); parameters.Dict() == nil {
			b.WriteString("type " + name + " = () => any;\n\n")
		} else {
			s := schemaText{}
			text := s.of(parameters, "", 0)
			if s.err != nil {
				return "", s.err
			}
			b.WriteString("type " + name + " = (_: " + text + ") => any;\n\n")
		}
	}
	b.WriteString("} // namespace functions")
	return b.String(), nil
}

// at returns what v has under a key, undefined if it is no object or has none.
func at(v jinja.Value, key string) jinja.Value {
	d := v.Dict()
	if d == nil {
		return jinja.Value{}
	}
	x, _ := d.Get(key)
	return x
}

// lines parts a text as Rust's str::lines does.
func lines(s string) []string {
	if s == "" {
		return nil
	}
	out := strings.Split(strings.TrimSuffix(s, "\n"), "\n")
	for i := range out {
		if i < len(out)-1 || strings.HasSuffix(s, "\n") {
			out[i] = strings.TrimSuffix(out[i], "\r")
		}
	}
	return out
}

// maxSchema is how deep a schema may be nested; the engine's own JSON reader stops
// at 128, of which the message around it takes some.
const maxSchema = 110

// schemaText writes JSON schemas as types. Of a schema that has more than one of
// the keys that say what it is, oneOf counts before type.
type schemaText struct{ err error }

func (s *schemaText) of(v jinja.Value, indent string, depth int) string {
	if depth > maxSchema {
		s.err = refused("a tool's parameters are nested too deep")
		return ""
	}
	if variants := at(v, "oneOf"); variants.IsList() {
		return s.oneOf(variants.Items(), indent, depth)
	}
	switch kind := at(v, "type"); {
	case kind.IsList():
		if text := unionOf(kind.Items(), false); text != "" {
			return text
		}
	default:
		switch name, _ := kind.Text(); name {
		case "object":
			return s.object(v, indent, depth)
		case "string":
			if text := unionOf(at(v, "enum").Items(), true); text != "" {
				return text
			}
			return "string"
		case "number", "integer":
			return "number"
		case "boolean":
			return "boolean"
		case "array":
			if items := at(v, "items"); !items.IsUndefined() {
				return s.of(items, indent, depth+1) + "[]"
			}
			return "Array<any>"
		}
	}
	return "any"
}

// unionOf joins the strings among items: values in quotes, or names of types.
func unionOf(items []jinja.Value, values bool) string {
	var texts []string
	for _, it := range items {
		text, ok := it.Text()
		switch {
		case !ok:
		case values:
			texts = append(texts, `"`+text+`"`)
		case text == "integer":
			texts = append(texts, "number")
		default:
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, " | ")
}

// oneOf writes variants, each on a line of its own.
func (s *schemaText) oneOf(variants []jinja.Value, indent string, depth int) string {
	var b strings.Builder
	for _, v := range variants {
		b.WriteString("\n" + indent + " | " + s.nullable(v, indent+"   ", depth))
		var notes []string
		if text, ok := at(v, "description").Text(); ok {
			notes = append(notes, text)
		}
		if text := s.byDefault(v, true); text != "" {
			notes = append(notes, text)
		}
		if len(notes) > 0 {
			b.WriteString(" // " + strings.Join(notes, " "))
		}
	}
	return b.String()
}

// nullable is of, with null added where the schema says so.
func (s *schemaText) nullable(v jinja.Value, indent string, depth int) string {
	text := s.of(v, indent, depth+1)
	if string(s.json(at(v, "nullable"))) == "true" && !strings.Contains(text, "null") {
		text += " | null"
	}
	return text
}

// byDefault writes the note about a default value, "" if there is none. A string
// stands in quotes, but for those of an enum: these are bare or, with quoted, as
// JSON has them.
func (s *schemaText) byDefault(v jinja.Value, quoted bool) string {
	value := at(v, "default")
	if value.IsUndefined() {
		return ""
	}
	text, isText := value.Text()
	switch isEnum := len(at(v, "enum").Items()) > 0; {
	case isText && !isEnum:
		return `default: "` + text + `"`
	case isText && !quoted:
		return "default: " + text
	}
	return "default: " + string(s.json(value))
}

func (s *schemaText) object(v jinja.Value, indent string, depth int) string {
	var b strings.Builder
	if text, ok := at(v, "description").Text(); ok {
		b.WriteString(indent + "// " + text + "\n")
	}
	b.WriteString("{\n")
	required := map[string]bool{}
	for _, r := range at(v, "required").Items() {
		if text, ok := r.Text(); ok {
			required[text] = true
		}
	}
	if d := at(v, "properties").Dict(); d != nil {
		for key, p := range d.All() {
			if !required[key] {
				key += "?"
			}
			s.property(&b, key, p, indent, depth)
		}
	}
	b.WriteString(indent + "}")
	return b.String()
}

func (s *schemaText) property(b *strings.Builder, key string, p jinja.Value, indent string, depth int) {
	note := func(text string) { b.WriteString(indent + "// " + text + "\n") }
	if text, ok := at(p, "title").Text(); ok {
		note(text)
		b.WriteString(indent + "//\n")
	}
	description, described := at(p, "description").Text()
	variants := at(p, "oneOf")
	if described && variants.IsUndefined() {
		note(description)
	}
	if examples := at(p, "examples").Items(); len(examples) > 0 {
		note("Examples:")
		for _, e := range examples {
			if text, ok := e.Text(); ok {
				note(`- "` + text + `"`)
			}
		}
	}
	if variants.IsList() {
		s.propertyOneOf(b, key, p, variants.Items(), indent, depth)
		return
	}
	b.WriteString(indent + key + ": " + s.nullable(p, indent+"    ", depth) + ",")
	if text := s.byDefault(p, false); text != "" && variants.IsUndefined() {
		b.WriteString(" // " + text)
	}
	b.WriteString("\n")
}

// propertyOneOf writes a property that is one of several types: its description
// and default above it, unless the first variant says the same.
func (s *schemaText) propertyOneOf(b *strings.Builder, key string, p jinja.Value, variants []jinja.Value, indent string, depth int) {
	description, described := at(p, "description").Text()
	above := described
	if len(variants) > 0 {
		if text, ok := at(variants[0], "description").Text(); ok && text == description {
			above = false
		}
	}
	if above {
		b.WriteString(indent + "// " + description + "\n")
	}
	if text := s.byDefault(p, false); text != "" {
		b.WriteString(indent + "// " + text + "\n")
	}
	b.WriteString(indent + key + ":\n")
	for i, v := range variants {
		b.WriteString(indent + " | " + s.nullable(v, indent+"   ", depth))
		var notes []string
		text, ok := at(v, "description").Text()
		if ok && !(i == 0 && above) && !(described && text == description) {
			notes = append(notes, text)
		}
		if text := s.byDefault(v, false); text != "" {
			notes = append(notes, text)
		}
		if len(notes) > 0 {
			b.WriteString(" // " + strings.Join(notes, " "))
		}
		b.WriteString("\n")
	}
	b.WriteString(indent + ",\n")
}

// json writes a value as the engine's Rust does: without spaces, fractions and
// numbers of more than 64 bits in Rust's form.
func (s *schemaText) json(v jinja.Value) []byte {
	b, err := appendRustJSON(nil, v)
	if err != nil {
		s.err = refused("a default value in a tool's parameters: %v", err)
	}
	return b
}

func appendRustJSON(dst []byte, v jinja.Value) ([]byte, error) {
	var err error
	d := v.Dict()
	switch {
	case v.IsList():
		dst = append(dst, '[')
		for i, it := range v.Items() {
			if i > 0 {
				dst = append(dst, ',')
			}
			if dst, err = appendRustJSON(dst, it); err != nil {
				return dst, err
			}
		}
		return append(dst, ']'), nil
	case d != nil:
		dst = append(dst, '{')
		first := true
		for key, it := range d.All() {
			if !first {
				dst = append(dst, ',')
			}
			first = false
			if dst, err = jinja.AppendJSON(dst, jinja.String(key)); err != nil {
				return dst, err
			}
			if dst, err = appendRustJSON(append(dst, ':'), it); err != nil {
				return dst, err
			}
		}
		return append(dst, '}'), nil
	case v.IsUndefined():
		return dst, nil
	}
	start := len(dst)
	if dst, err = jinja.AppendJSON(dst, v); err != nil {
		return dst, err
	}
	switch text := string(dst[start:]); {
	case text[0] != '-' && (text[0] < '0' || text[0] > '9') && text[0] != 'N' && text[0] != 'I':
		return dst, nil // no number
	default:
		return appendRustNumber(dst[:start], text)
	}
}

// appendRustNumber appends a number, given as Python writes it.
func appendRustNumber(dst []byte, python string) ([]byte, error) {
	if _, err := strconv.ParseInt(python, 10, 64); err == nil {
		return append(dst, python...), nil
	}
	if _, err := strconv.ParseUint(python, 10, 64); err == nil {
		return append(dst, python...), nil
	}
	f, err := strconv.ParseFloat(python, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		return dst, fmt.Errorf("%.40s is no number", python)
	}
	return appendRustFloat(dst, f), nil
}

// appendRustFloat appends the shortest digits that read back as f, with an exponent
// below 1e-5 and from 1e16 on.
func appendRustFloat(dst []byte, f float64) []byte {
	a := max(f, -f)
	if a == 0 || 1e-5 <= a && a < 1e16 {
		start := len(dst)
		dst = strconv.AppendFloat(dst, f, 'f', -1, 64)
		if !strings.Contains(string(dst[start:]), ".") {
			dst = append(dst, ".0"...)
		}
		return dst
	}
	text := strconv.FormatFloat(f, 'e', -1, 64) // with two digits in the exponent
	mantissa, exponent, _ := strings.Cut(text, "e")
	dst = append(append(dst, mantissa...), 'e', exponent[0])
	return append(dst, strings.TrimLeft(exponent[1:], "0")...)
}
