// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"bytes"
	"encoding/json"
	"reflect"
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
)

func TestEdit(t *testing.T) {
	set := func(name, value string) openai.Member { return openai.Member{Name: name, Value: []byte(value)} }
	drop := func(name string) openai.Member { return openai.Member{Name: name} }
	for _, c := range []struct {
		object  string
		members []openai.Member
		want    string
	}{
		{`{}`, nil, `{}`},
		{`{}`, []openai.Member{set("a", "1")}, `{"a":1}`},
		{`{"a":1}`, []openai.Member{drop("a")}, `{}`},
		{`{"a":1}`, []openai.Member{set("a", "2"), drop("b")}, `{"a":2}`},
		{` { "a" : 1 , "b":[1,{"a":3}] , "c" : null } `, []openai.Member{drop("b")}, `{ "a" : 1, "c" : null}`},
		{`{"a":1,"b":2,"a":3,"d":4}`, []openai.Member{set("a", `{"x":1}`), set("e", "true")}, `{"b":2,"d":4,"a":{"x":1},"e":true}`},
		{`{"\u0061":1,"b":2}`, []openai.Member{set("a", "2")}, `{"b":2,"a":2}`},
		{`{"a":"x,\"a\":1","b":2}`, []openai.Member{drop("b")}, `{"a":"x,\"a\":1"}`},
	} {
		if got := string(bytes.Join(openai.Edit([]byte(c.object), c.members...), nil)); got != c.want {
			t.Errorf("%s, %v: %s, want %s", c.object, c.members, got, c.want)
		}
	}
}

func TestFind(t *testing.T) {
	for _, c := range []struct {
		path []string
		want string
	}{
		{[]string{"a"}, `{"b":[1]}`},
		{[]string{"a", "b"}, `[1]`},
		{[]string{"choices", "p"}, `{"x":1}`},
		{[]string{"none"}, ""},
		{[]string{"n"}, ""},
		{[]string{"a", "b", "c"}, ""},
		{[]string{"empty", "p"}, ""},
	} {
		if got := openai.Find([]byte(`{"a":{"b":[1]},"choices":[{"p":{"x":1}},{"p":2}],"n":null,"empty":[]}`), c.path...); string(got) != c.want {
			t.Errorf("%v: %s, want %s", c.path, got, c.want)
		}
	}
	for _, bad := range []string{"", "x", `{"a":1`, `{"a":1} x`, `[1]`, `"a"`} {
		if got := openai.Find([]byte(bad), "a"); got != nil {
			t.Errorf("%q: %s", bad, got)
		}
	}
}

func FuzzEdit(f *testing.F) {
	f.Add([]byte(`{"a":1, "b":[{"a":2}] ,"c":"\"}"}`))
	f.Fuzz(func(t *testing.T, object []byte) {
		var want map[string]any
		if json.Unmarshal(object, &want) != nil || want == nil || openai.Find(object) == nil {
			return
		}
		delete(want, "b")
		want["a"] = 7.
		edited := bytes.Join(openai.Edit(object, openai.Member{Name: "a", Value: []byte("7")}, openai.Member{Name: "b"}), nil)
		var got map[string]any
		if err := json.Unmarshal(edited, &got); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%q becomes %q: %v", object, edited, err)
		}
	})
}
