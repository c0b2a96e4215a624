// SPDX-License-Identifier: Apache-2.0

package chat

import (
	"math"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/tokenizer/jinja"
)

// toolNamespace returns the tools in the form of harmony: functions of a TypeScript namespace.
func toolNamespace(tools []jinja.Value) string {
	var b strings.Builder
	b.WriteString("# Tools\n\n## functions\n\nnamespace functions {\n\n")
	for _, t := range tools {
		f := t.Get("function")
		name := textAt(f, "name")
		description := textAt(f, "description")
		for line := range strings.Lines(description) { // as Rust's str::lines
			if text, found := strings.CutSuffix(line, "\n"); found {
				line = strings.TrimSuffix(text, "\r")
			}
			b.WriteString("// " + line + "\n")
		}
		argument := ""
		if parameters := f.Get("parameters"); parameters.Dict() != nil {
			argument = "_: " + schemaType(parameters, "", 0)
		}
		b.WriteString("type " + name + " = (" + argument + ") => any;\n\n")
	}
	b.WriteString("} // namespace functions")
	return b.String()
}

// maxSchema is how deep a schema may be nested; the engine's own JSON reader stops
// at 128, of which the message around it takes some.
const maxSchema = 110

// schemaType returns the type of a JSON schema. oneOf has priority over type.
func schemaType(v jinja.Value, indent string, depth int) string {
	if depth > maxSchema {
		refuse("a tool's parameters are nested too deep")
	}
	if variants := v.Get("oneOf"); variants.IsList() {
		var b strings.Builder
		for _, v := range variants.Items() {
			b.WriteString("\n" + indent + " | " + nullable(v, indent+"   ", depth))
			description, described := describe(v)
			b.WriteString(comment(description, described, defaultNote(v, true)))
		}
		return b.String()
	}
	kind := v.Get("type")
	name, _ := kind.Text()
	switch name {
	case "object":
		return objectType(v, indent, depth)
	case "string":
		if text := unionOf(v.Get("enum").Items(), true); text != "" {
			return text
		}
		return "string"
	case "number", "integer":
		return "number"
	case "boolean":
		return "boolean"
	case "array":
		if items := v.Get("items"); !items.IsUndefined() {
			return schemaType(items, indent, depth+1) + "[]"
		}
		return "Array<any>"
	}
	if text := unionOf(kind.Items(), false); text != "" {
		return text
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

// comment returns a comment at the end of a line: the description, if there is one,
// and the default value, if it is not empty.
func comment(description string, described bool, byDefault string) string {
	var notes []string
	if described {
		notes = append(notes, description)
	}
	if byDefault != "" {
		notes = append(notes, byDefault)
	}
	if notes == nil {
		return ""
	}
	return " // " + strings.Join(notes, " ")
}

// describe returns the description of a schema; ok is false if it has none.
func describe(v jinja.Value) (string, bool) { return v.Get("description").Text() }

// nullable is schemaType with null added if the schema is nullable.
func nullable(v jinja.Value, indent string, depth int) string {
	text := schemaType(v, indent, depth+1)
	if is := v.Get("nullable"); is.IsBool() && is.Truth() && !strings.Contains(text, "null") {
		text += " | null"
	}
	return text
}

// defaultNote describes the default value, "" if there is none. A string stands in
// quotes, but for those of an enum: these are bare or, with quoted, as in JSON.
func defaultNote(v jinja.Value, quoted bool) string {
	value := v.Get("default")
	if value.IsUndefined() {
		return ""
	}
	text, isText := value.Text()
	switch isEnum := len(v.Get("enum").Items()) > 0; {
	case isText && !isEnum:
		return `default: "` + text + `"`
	case isText && !quoted:
		return "default: " + text
	}
	return "default: " + string(appendRustJSON(nil, value))
}

func objectType(v jinja.Value, indent string, depth int) string {
	var b strings.Builder
	if text, ok := describe(v); ok {
		b.WriteString(indent + "// " + text + "\n")
	}
	b.WriteString("{\n")
	required := map[string]bool{}
	for _, r := range v.Get("required").Items() {
		if text, ok := r.Text(); ok {
			required[text] = true
		}
	}
	if d := v.Get("properties").Dict(); d != nil {
		for key, p := range d.All() {
			if !required[key] {
				key += "?"
			}
			writeProperty(&b, key, p, indent, depth)
		}
	}
	b.WriteString(indent + "}")
	return b.String()
}

func writeProperty(b *strings.Builder, key string, p jinja.Value, indent string, depth int) {
	note := func(text string) { b.WriteString(indent + "// " + text + "\n") }
	if text, ok := p.Get("title").Text(); ok {
		note(text)
		b.WriteString(indent + "//\n")
	}
	description, described := describe(p)
	variants := p.Get("oneOf")
	if described && variants.IsUndefined() {
		note(description)
	}
	if examples := p.Get("examples").Items(); len(examples) > 0 {
		note("Examples:")
		for _, e := range examples {
			if text, ok := e.Text(); ok {
				note(`- "` + text + `"`)
			}
		}
	}
	if !variants.IsList() {
		b.WriteString(indent + key + ": " + nullable(p, indent+"    ", depth) + ",")
		if variants.IsUndefined() {
			b.WriteString(comment("", false, defaultNote(p, false)))
		}
		b.WriteString("\n")
		return
	}
	// The description stands above, unless the first variant has the same.
	above := described
	if list := variants.Items(); len(list) > 0 {
		if text, ok := describe(list[0]); ok && text == description {
			above = false
		}
	}
	if above {
		note(description)
	}
	if text := defaultNote(p, false); text != "" {
		note(text)
	}
	b.WriteString(indent + key + ":\n")
	for i, v := range variants.Items() {
		text, ok := describe(v)
		ok = ok && !(i == 0 && above) && !(described && text == description)
		b.WriteString(indent + " | " + nullable(v, indent+"   ", depth) + comment(text, ok, defaultNote(v, false)) + "\n")
	}
	b.WriteString(indent + ",\n")
}

// appendRustJSON writes a value as the engine's Rust does: without spaces, fractions
// and numbers of more than 64 bits in Rust's form.
func appendRustJSON(dst []byte, v jinja.Value) []byte {
	d := v.Dict()
	switch {
	case v.IsList():
		dst = append(dst, '[')
		for i, it := range v.Items() {
			if i > 0 {
				dst = append(dst, ',')
			}
			dst = appendRustJSON(dst, it)
		}
		return append(dst, ']')
	case d != nil:
		dst = append(dst, '{')
		for key, it := range d.All() {
			if dst[len(dst)-1] != '{' {
				dst = append(dst, ',')
			}
			dst = append(append(dst, toJSON(jinja.String(key))...), ':')
			dst = appendRustJSON(dst, it)
		}
		return append(dst, '}')
	}
	text := string(toJSON(v)) // as Python writes it
	_, signed := strconv.ParseInt(text, 10, 64)
	_, unsigned := strconv.ParseUint(text, 10, 64)
	if strings.IndexByte("-0123456789NI", text[0]) < 0 || signed == nil || unsigned == nil {
		return append(dst, text...)
	}
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.IsNaN(f) || math.IsInf(f, 0) {
		refuse("a default value in a tool's parameters: %.40s is not a number", text)
	}
	// The fewest digits that give the same number, with an exponent below 1e-5 and from
	// 1e16 on.
	if a := math.Abs(f); a == 0 || 1e-5 <= a && a < 1e16 {
		text = strconv.FormatFloat(f, 'f', -1, 64)
		if !strings.Contains(text, ".") {
			text += ".0"
		}
		return append(dst, text...)
	}
	mantissa, exponent, _ := strings.Cut(strconv.FormatFloat(f, 'e', -1, 64), "e") // with two digits in the exponent
	dst = append(append(dst, mantissa...), 'e', exponent[0])
	return append(dst, strings.TrimLeft(exponent[1:], "0")...)
}
