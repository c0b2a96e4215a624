// SPDX-License-Identifier: Apache-2.0

package enginesim_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/enginesim"
)

// response is a response of /v1/responses.
type response struct {
	ID, Status string
	Usage      struct {
		Input int `json:"input_tokens"`
	}
	Error struct {
		Message, Param string
	}
}

func ask(t *testing.T, method, url, body string) (int, response) {
	t.Helper()
	resp, text := send(t, method, url, body)
	var r response
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return resp.StatusCode, r
}

// The engine answers about stored responses as vLLM 0.33 does.
func TestStoredResponses(t *testing.T) {
	_, url := start(t, enginesim.Config{Speed: fast, StoreResponses: true})
	url += "/v1/responses"
	const plain = `{"model":"sim","instructions":"Be brief.","input":"hello","max_output_tokens":4%s}`
	status, first := ask(t, "POST", url, fmt.Sprintf(plain, ""))
	if status != 200 || len(first.ID) != len("resp_")+32 || first.Status != "completed" {
		t.Fatalf("%d %+v", status, first)
	}
	status, second := ask(t, "POST", url, fmt.Sprintf(plain, `,"previous_response_id":"`+first.ID+`"`))
	if status != 200 || second.Usage.Input <= first.Usage.Input {
		t.Errorf("the second turn has %d tokens after one of %d; status %d", second.Usage.Input, first.Usage.Input, status)
	}
	_, third := ask(t, "POST", url, fmt.Sprintf(plain, `,"previous_response_id":"`+second.ID+`"`))
	if third.Usage.Input <= second.Usage.Input {
		t.Errorf("the third turn has %d tokens after one of %d", third.Usage.Input, second.Usage.Input)
	}
	// Instructions do not carry over.
	const bare = `{"model":"sim","input":"hello","max_output_tokens":4%s}`
	_, alone := ask(t, "POST", url, fmt.Sprintf(bare, ""))
	_, after := ask(t, "POST", url, fmt.Sprintf(bare, `,"previous_response_id":"`+first.ID+`"`))
	if alone.Usage.Input >= first.Usage.Input || second.Usage.Input-after.Usage.Input != first.Usage.Input-alone.Usage.Input {
		t.Errorf("without instructions %d tokens instead of %d, and in the second turn %d instead of %d",
			alone.Usage.Input, first.Usage.Input, after.Usage.Input, second.Usage.Input)
	}
	if status, got := ask(t, "GET", url+"/"+second.ID, ""); status != 200 || got != second {
		t.Errorf("stored: %d %+v, want %+v", status, got, second)
	}
	_, chosen := ask(t, "POST", url, fmt.Sprintf(plain, `,"request_id":"mine"`))
	if status, got := ask(t, "GET", url+"/mine", ""); chosen.ID != "mine" || status != 200 || got.ID != "mine" {
		t.Errorf("an id of the client: %d %+v", status, got)
	}
	_, unkept := ask(t, "POST", url, fmt.Sprintf(plain, `,"store":false`))
	for _, c := range []struct {
		method, path, more, message string
		status                      int
	}{
		{"GET", "/" + unkept.ID, "", "Response with id '" + unkept.ID + "' not found.", 404},
		{"POST", "/x/cancel", "", "Response with id 'x' not found.", 404},
		{"POST", "", `,"previous_response_id":"x"`, "Response with id 'x' not found.", 404},
		{"POST", "/" + first.ID + "/cancel", "", "Cannot cancel a synchronous response.", 400},
		{"GET", "/" + first.ID + "?stream=true", "", "Unknown response_id: " + first.ID, 400},
		{"DELETE", "/" + first.ID, "", "Method Not Allowed", 405},
		{"POST", "", `,"background":true,"store":false`, "background can only be used when `store` is true", 400},
	} {
		if status, got := ask(t, c.method, url+c.path, fmt.Sprintf(plain, c.more)); status != c.status || got.Error.Message != c.message {
			t.Errorf("%s %s %s: %d %q, want %d %q", c.method, c.path, c.more, status, got.Error.Message, c.status, c.message)
		}
	}
	_, streamed := send(t, "POST", url, fmt.Sprintf(plain, `,"stream":true,"request_id":"streamed"`))
	if !strings.HasPrefix(streamed, "event: response.created\ndata: {\"response\":{") || !strings.Contains(streamed, `"id":"streamed"`) {
		t.Errorf("streamed: %s", streamed)
	}
	if status, got := ask(t, "GET", url+"/streamed", ""); status != 200 || got.Status != "completed" {
		t.Errorf("the stream's response: %d %+v", status, got)
	}
}

// By default nothing is stored, as in vLLM.
func TestResponsesAreNotStored(t *testing.T) {
	_, url := start(t, enginesim.Config{Speed: fast})
	url += "/v1/responses"
	_, r := ask(t, "POST", url, `{"model":"sim","input":"hello","max_output_tokens":1}`)
	if status, _ := ask(t, "GET", url+"/"+r.ID, ""); status != http.StatusNotFound {
		t.Errorf("status %d", status)
	}
	if status, got := ask(t, "POST", url, `{"model":"sim","input":"hello","background":true}`); status != 400 || got.Error.Param != "background" {
		t.Errorf("in the background: %d %+v", status, got)
	}
}

// A response in the background is there at once, ends later, and can be cancelled before.
func TestResponsesInTheBackground(t *testing.T) {
	e, url := start(t, enginesim.Config{Speed: 100, StoreResponses: true})
	url += "/v1/responses"
	until := func(what string, done func() bool) {
		t.Helper()
		for end := time.Now().Add(30 * time.Second); !done(); <-time.After(2 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}
	_, short := ask(t, "POST", url, `{"model":"sim","input":"hello","background":true,"max_output_tokens":2}`)
	if short.Status != "queued" {
		t.Errorf("%+v", short)
	}
	until("it does not end", func() bool { _, got := ask(t, "GET", url+"/"+short.ID, ""); return got.Status == "completed" })
	_, long := ask(t, "POST", url, `{"model":"sim","input":"hello","background":true,"max_output_tokens":8000}`)
	until("it does not run", func() bool { return e.Stats().Running == 1 })
	for range 2 {
		status, got := ask(t, "POST", url+"/"+long.ID+"/cancel", "")
		if status == 200 && got.Status != "cancelled" {
			t.Errorf("cancelled: %d %+v", status, got)
		}
	}
	until("it runs on", func() bool { return e.Stats().Running == 0 })
	if _, got := ask(t, "GET", url+"/"+long.ID, ""); got.Status != "cancelled" {
		t.Errorf("afterwards: %+v", got)
	}
}
