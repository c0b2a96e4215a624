// SPDX-License-Identifier: Apache-2.0

package api_test

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/goccy/go-yaml"
)

// spec is docs/openapi.yaml.
type spec struct{ root map[string]any }

func readSpec(t *testing.T) spec {
	t.Helper()
	text, err := os.ReadFile("../docs/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var s spec
	if err := yaml.Unmarshal(text, &s.root); err != nil {
		t.Fatalf("docs/openapi.yaml: %v", err)
	}
	return s
}

// at returns the object at a path of keys, nil if there is none.
func (s spec) at(keys ...string) map[string]any {
	node := s.root
	for _, k := range keys {
		node, _ = node[k].(map[string]any)
	}
	return s.resolve(node)
}

// resolve follows a reference.
func (s spec) resolve(node map[string]any) map[string]any {
	ref, ok := node["$ref"].(string)
	if !ok {
		return node
	}
	found := s.root
	for key := range strings.SplitSeq(strings.TrimPrefix(ref, "#/"), "/") {
		found, _ = found[key].(map[string]any)
	}
	if found == nil {
		panic("docs/openapi.yaml: there is no " + ref)
	}
	return s.resolve(found)
}

// keywords are the words of schemas that [spec.check] checks, or that need no check.
var keywords = map[string]bool{
	"$ref": true, "type": true, "enum": true, "properties": true, "required": true, "additionalProperties": true, "items": true,
	"oneOf": true, "format": true, "description": true, "default": true, "minimum": true, "maximum": true,
}

// check returns what is wrong with a JSON value: a sentence for each fault, with its place.
// Numbers are of type [json.Number].
func (s spec) check(schema map[string]any, value any, place string) (faults []string) {
	schema = s.resolve(schema)
	wrong := func(format string, args ...any) {
		faults = append(faults, place+" "+fmt.Sprintf(format, args...))
	}
	for word := range schema {
		if !keywords[word] {
			wrong("has a schema with the unknown word %q", word)
		}
	}
	if options, ok := schema["oneOf"].([]any); ok {
		fits := 0
		var all []string
		for _, o := range options {
			f := s.check(o.(map[string]any), value, place)
			if all = append(all, f...); len(f) == 0 {
				fits++
			}
		}
		if fits != 1 {
			wrong("fits %d of %d schemas, want 1: %v", fits, len(options), all)
		}
	}
	if types := list(schema["type"]); len(types) > 0 && !slices.Contains(types, kind(value)) && (kind(value) != "integer" || !slices.Contains(types, "number")) {
		wrong("is of type %s, want %v", kind(value), types)
		return faults
	}
	if options, ok := schema["enum"].([]any); ok && !slices.ContainsFunc(options, func(o any) bool { return fmt.Sprint(o) == fmt.Sprint(value) }) {
		wrong("is %v, want one of %v", value, options)
	}
	if text, ok := value.(string); ok && schema["format"] == "date-time" {
		if _, err := time.Parse(time.RFC3339, text); err != nil {
			wrong("is no time: %v", err)
		}
	}
	switch v := value.(type) {
	case []any:
		items, _ := schema["items"].(map[string]any)
		for i, item := range v {
			faults = append(faults, s.check(items, item, fmt.Sprintf("%s[%d]", place, i))...)
		}
	case map[string]any:
		properties, _ := schema["properties"].(map[string]any)
		for _, name := range list(schema["required"]) {
			if _, ok := v[name]; !ok {
				wrong("lacks the field %q", name)
			}
		}
		for _, name := range slices.Sorted(maps.Keys(v)) {
			of, known := properties[name].(map[string]any)
			more, open := schema["additionalProperties"].(map[string]any)
			if !known && open {
				of = more
			} else if !known && schema["additionalProperties"] == false {
				wrong("has the field %q, which the schema does not name", name)
			}
			faults = append(faults, s.check(of, v[name], place+"."+name)...)
		}
	}
	return faults
}

// list returns a word, or a list of words.
func list(v any) (words []string) {
	switch v := v.(type) {
	case string:
		return []string{v}
	case []any:
		for _, w := range v {
			words = append(words, w.(string))
		}
	}
	return words
}

// kind returns the name of a value's type in a schema.
func kind(value any) string {
	switch v := value.(type) {
	case nil:
		return "null"
	case bool:
		return "boolean"
	case string:
		return "string"
	case []any:
		return "array"
	case json.Number:
		if strings.ContainsAny(v.String(), ".eE") {
			return "number"
		}
		return "integer"
	}
	return "object"
}

// decode reads JSON. Numbers keep their digits.
func decode(t *testing.T, text string) any {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(text))
	d.UseNumber()
	var v any
	if err := d.Decode(&v); err != nil {
		t.Fatalf("%v: %.300s", err, text)
	}
	if d.More() {
		t.Fatalf("more than one JSON value: %.300s", text)
	}
	return v
}

// The check itself finds each kind of fault.
func TestSchemaCheckFindsFaults(t *testing.T) {
	var s spec
	if err := yaml.Unmarshal([]byte(`
components: {schemas: {Name: {type: string, enum: [a, b]}}}
body:
  type: object
  additionalProperties: false
  required: [id]
  properties:
    id: {type: integer}
    name: {$ref: '#/components/schemas/Name'}
    share: {type: [number, 'null']}
    at: {type: string, format: date-time}
    list: {type: array, items: {type: integer}}
    map: {type: object, additionalProperties: {type: boolean}}
    either: {oneOf: [{type: string}, {type: integer}]}
    odd: {type: string, pattern: x}
`), &s.root); err != nil {
		t.Fatal(err)
	}
	for text, want := range map[string]string{
		`{"id":18446744073709551615,"name":"a","share":null,"list":[1],"map":{"x":true},"either":1,"at":"2026-01-02T03:04:05Z"}`: "",
		`{"id":1,"share":2}`:            "",
		`{}`:                            `lacks the field "id"`,
		`{"id":1.5}`:                    "is of type number, want [integer]",
		`{"id":1,"name":"c"}`:           "is c, want one of [a b]",
		`{"id":1,"share":"x"}`:          "is of type string",
		`{"id":1,"at":"noon"}`:          "is no time",
		`{"id":1,"list":[1,"x"]}`:       ".list[1] is of type string",
		`{"id":1,"map":{"x":1}}`:        ".map.x is of type integer",
		`{"id":1,"either":true}`:        "fits 0 of 2 schemas",
		`{"id":1,"colour":"red"}`:       `has the field "colour"`,
		`{"id":1,"odd":"x"}`:            `unknown word "pattern"`,
		`[]`:                            "is of type array, want [object]",
		`{"id":1,"name":null,"list":0}`: "is of type null",
	} {
		got := strings.Join(s.check(s.at("body"), decode(t, text), "body"), "\n")
		if want == "" && got != "" || !strings.Contains(got, want) {
			t.Errorf("%s: %q, want %q", text, got, want)
		}
	}
}
