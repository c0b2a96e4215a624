// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/openai"
)

// The id of a stored response is a segment of the path, decoded once. The paths that Envoy lets through have one.
func TestHeldID(t *testing.T) {
	passes := regexp.MustCompile("^(" + openai.HeldPaths + ")$")
	for _, c := range []struct {
		target, id string
		passes     bool // if the target has no query
	}{
		{"/v1/responses/resp_1", "resp_1", true},
		{"/v1/responses/resp_1?stream=true&starting_after=3", "resp_1", false},
		{"/v1/responses/resp_1/cancel", "resp_1", true},
		{"/v1/responses/resp_1/input_items", "resp_1", true},
		{"/v1/responses/%72esp%5F1", "resp_1", true},
		{"/v1/responses/a%20b", "a b", true},
		{"/v1/responses/%C3%9F", "ß", true},
		{"/v1/responses/a.b~c=d:e", "a.b~c=d:e", true},
		{"//v1//responses/./resp_1", "resp_1", false},
		{"/v1/responses/cancel", "cancel", true},
		{"/v1/responses", "", false},
		{"/v1/responses/", "", false},
		{"/v1/responses/..", "", true}, // Envoy and kvroute resolve it
		{"/v1/responses//cancel", "cancel", false},
		{"/v1/responses/a/b", "", false},
		{"/v1/responses/a/cancel/b", "", false},
		{"/v1/responses/a%2Fcancel", "a", false},
		{"/v1/responses/a%2fb", "", false},
		{"/v1/responses/a%252Fb", "a%2Fb", false},
		{"/v1/responses/a%", "a%", false},
		{"/v1/chat/completions", "", false},
		{"/v1/models/responses/a", "", false},
		{"/v1/responses/" + strings.Repeat("x", 2000), strings.Repeat("x", 2000), true},
		{"/v1/responses/" + strings.Repeat("x", 1<<20), "", true},
	} {
		if id := openai.HeldID(c.target); id != c.id {
			t.Errorf("%.80s: id %.80q, want %.80q", c.target, id, c.id)
		}
		if got := passes.MatchString(c.target); got != c.passes {
			t.Errorf("%.80s passes: %v", c.target, got)
		}
	}
}

// What a request needs of a worker is named in the body.
func TestHeldInBodies(t *testing.T) {
	for _, c := range []struct {
		e          openai.Endpoint
		body, want string
	}{
		{openai.Responses, `{"model":"m","input":"a","previous_response_id":"resp_1"}`, "resp_1"},
		{openai.Responses, `{"model":"m","input":"a","previous_response_id":"resp\u005f1"}`, "resp_1"},
		{openai.Responses, `{"model":"m","input":"a","previous_response_id":"x","previous_response_id":"resp_1"}`, "resp_1"},
		{openai.Responses, `{"model":"m","input":"a","previous_response_id":null,"conversation":"conv_1"}`, "conv_1"},
		{openai.Responses, `{"model":"m","input":"a","conversation":{"id":"conv_1"}}`, "conv_1"},
		{openai.Responses, `{"model":"m","input":"a","conversation":{"id":7}}`, ""},
		{openai.Responses, `{"model":"m","input":"a","previous_response_id":7}`, ""},
		{openai.Responses, `{"model":"m","input":"a","metadata":{"previous_response_id":"resp_1"}}`, ""},
		{openai.Responses, `{"model":"m","input":[{"type":"message","role":"user","previous_response_id":"resp_1","content":"a"}]}`, ""},
		{openai.ChatCompletions, `{"model":"m","messages":[{"role":"user","content":"a"}],"previous_response_id":"resp_1"}`, ""},
		{openai.Generate, `{"text":"a","session_params":{"id":"s","rid":"r"}}`, "s"},
		{openai.Generate, `{"text":["a"],"session_params":[{"id":"s"},{"id":"t"}]}`, "s"},
		{openai.Generate, `{"text":"a","session_params":["s"]}`, ""},
		{openai.Generate, `{"text":"a","session_params":[]}`, ""},
		{openai.Generate, `{"text":"a","session_id":"s"}`, ""}, // chosen by the client, for SGLang's cache
		{openai.CloseSession, `{"session_id":"s"}`, "s"},
		{openai.OpenSession, `{"capacity_of_str_len":9,"session_id":"s"}`, ""},
	} {
		if b, err := openai.Parse(c.e, []byte(c.body)); err != nil || b.Held != c.want {
			t.Errorf("%s: %q, %v; want %q", c.body, b.Held, err, c.want)
		}
	}
	for body, want := range map[string]bool{`"store":false`: true, `"store":true`: false, `"store":null`: false, `"x":1`: false} {
		if b, err := openai.Parse(openai.Responses, fmt.Appendf(nil, `{"model":"m","input":"a",%s}`, body)); err != nil || b.Unkept != want {
			t.Errorf("%s: unkept %v, %v", body, b.Unkept, err)
		}
	}
}

// The id stands at the beginning of a response: no text of a client stands before it.
func TestGivenID(t *testing.T) {
	for text, want := range map[string]string{
		`{"id":"resp_1","object":"response","metadata":{"id":"x"}}`:                  "resp_1",
		`{"created_at":1,"metadata":{"id":"x"},"output":[{"id":"y"}],"id":"resp_1"}`: "resp_1",
		` "0123abcd" `:         "0123abcd",
		`{"id":"resp\u005f1"}`: "resp_1",
		`{"id":7}`:             "",
		`{"id":null,"x":1}`:    "",
		`{"error":{"id":"x"}}`: "",
		`[{"id":"x"}]`:         "",
		`{}`:                   "",
		`null`:                 "",
		`<html>`:               "",
		`{"id"="x"}`:           "",
	} {
		if id, err := openai.GivenID([]byte(text)); id != want || err != nil {
			t.Errorf("%s: %q, %v; want %q", text, id, err, want)
		}
		// However much of it is there, another id is never read.
		for n := range len(text) {
			if id, err := openai.GivenID([]byte(text[:n])); id != "" && id != want || err != nil && !errors.Is(err, openai.ErrUnfinished) {
				t.Errorf("%s: %q, %v", text[:n], id, err)
			}
		}
	}
}

// In the events of a stream only the id of a response counts.
func TestGivenIDInEvent(t *testing.T) {
	for data, want := range map[string]string{
		`{"type":"response.created","sequence_number":0,"response":{"id":"resp_1","object":"response"}}`: "resp_1",
		`{"id":"x","response":{"metadata":{"id":"x"},"response":{"id":"y"},"id":"resp_1"}}`:              "resp_1",
		`{"type":"ping","id":"x"}`:  "",
		`{"response":[{"id":"x"}]}`: "",
		`{"item":{"id":"x"}}`:       "",
		`"x"`:                       "",
		`[DONE]`:                    "",
	} {
		if id, err := openai.GivenIDInEvent([]byte(data)); id != want || err != nil {
			t.Errorf("%s: %q, %v; want %q", data, id, err, want)
		}
		for n := range len(data) {
			if id, err := openai.GivenIDInEvent([]byte(data[:n])); id != "" && id != want || err != nil && !errors.Is(err, openai.ErrUnfinished) {
				t.Errorf("%s: %q, %v", data[:n], id, err)
			}
		}
	}
}

// FuzzHeld: an id in a path is one segment, and an id in a response is found in each longer beginning, too.
func FuzzHeld(f *testing.F) {
	for _, seed := range []string{"/v1/responses/resp_1/cancel", "/v1/responses/%72esp%5F1?x", `{"response":{"id":"resp_1"}}`, `"s"`, `{"a":[1,{"id":2}],"id":"x"}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if id := openai.HeldID(text); strings.Contains(id, "/") {
			t.Errorf("the id in a path is %q", id)
		}
		for _, read := range []func([]byte) (string, error){openai.GivenID, openai.GivenIDInEvent} {
			found := ""
			for n := range min(len(text), 200) {
				id, err := read([]byte(text[:n]))
				if err != nil && id != "" || found != "" && id != found {
					t.Fatalf("%q: %q, %v; before %q", text[:n], id, err, found)
				}
				found = id
			}
		}
	})
}
