// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

const responsesPath = "/v1/responses"

// createResponse sends a request with more fields, and returns the id of the response and the worker's name.
func createResponse(t *testing.T, d *demonstration, more string) (id, worker string) {
	t.Helper()
	resp, text := reply(t, d, http.MethodPost, responsesPath, `{"model":"sim","input":"a question","max_output_tokens":2`+more+`}`, nil)
	_, from, _ := strings.Cut(text, `"id":"`)
	id, _, _ = strings.Cut(from, `"`)
	if resp.StatusCode != http.StatusOK || !strings.HasPrefix(id, "resp_") {
		t.Fatalf("%d %s", resp.StatusCode, text)
	}
	return id, resp.Header.Get("X-Sim-Worker")
}

// Conversations by previous_response_id, and requests about a stored response, go to the worker that stores it.
func TestStoredResponsesStayOnTheirWorker(t *testing.T) {
	t.Parallel() // mostly waits
	for _, mode := range []envoy.BodyMode{envoy.Buffered, envoy.StreamedAhead, envoy.FullDuplex} {
		t.Run(mode, func(t *testing.T) {
			d := startStackIn(t, mode, 4, []string{"--speed", "50", "--store-responses"})
			used := map[string]bool{}
			for n := range 40 {
				more := []string{"", `,"stream":true`, `,"background":true`}[n%3]
				id, worker := createResponse(t, d, more)
				used[worker] = true
				next, same := createResponse(t, d, fmt.Sprintf(`%s,"previous_response_id":%q`, more, id))
				if same != worker {
					t.Fatalf("conversation %d, %q: the second turn is at %s, the first at %s", n, more, same, worker)
				}
				for _, about := range []string{id, next, "%72" + next[1:], next + "?x=1", next + "/input_items"} {
					if resp, text := reply(t, d, http.MethodGet, responsesPath+"/"+about, "", nil); resp.Header.Get("X-Sim-Worker") != worker ||
						(resp.StatusCode == http.StatusOK) == strings.HasSuffix(about, "items") { // which vLLM does not have
						t.Fatalf("conversation %d, %q: GET %s at %s: %d %s", n, more, about, resp.Header.Get("X-Sim-Worker"), resp.StatusCode, text)
					}
				}
				if resp, text := reply(t, d, http.MethodDelete, responsesPath+"/"+id, "", nil); resp.Header.Get("X-Sim-Worker") != worker {
					t.Fatalf("conversation %d: DELETE at %s: %d %s", n, resp.Header.Get("X-Sim-Worker"), resp.StatusCode, text)
				}
			}
			if len(used) < 2 {
				t.Errorf("all conversations are on one worker of four: %v", used)
			}
			id, worker := createResponse(t, d, `,"background":true,"max_output_tokens":8000`)
			resp, text := reply(t, d, http.MethodPost, responsesPath+"/"+id+"/cancel", "", nil)
			var got struct{ Status string }
			if err := json.Unmarshal([]byte(text), &got); err != nil || resp.StatusCode != http.StatusOK || got.Status != "cancelled" {
				t.Errorf("cancel at %s instead of %s: %d %s", resp.Header.Get("X-Sim-Worker"), worker, resp.StatusCode, text)
			}

			// An id that no worker knows, or only a dead one, gets the answer of an engine.
			unknown := func(id string) bool {
				resp, text := reply(t, d, http.MethodGet, responsesPath+"/"+id, "", nil)
				again, next := reply(t, d, http.MethodPost, responsesPath, fmt.Sprintf(`{"model":"sim","input":"b","previous_response_id":%q}`, id), nil)
				own := fmt.Sprintf("Response with id '%s' not found.", id)
				return resp.StatusCode == http.StatusNotFound && again.StatusCode == http.StatusNotFound && strings.Contains(text, own) && strings.Contains(next, own)
			}
			if !unknown("resp_0") || !unknown(strings.Repeat("x", 2000)) {
				t.Error("an unknown id does not get the engine's 404")
			}
			id, worker = createResponse(t, d, "")
			for i, e := range d.Engines {
				if e.Name == worker {
					d.Engines[i].Kill()
				}
			}
			eventually(t, "the id of a dead worker does not get the engine's 404", func() bool { return unknown(id) })
		})
	}
}

// Without the body kvroute does not see previous_response_id, but it reads the ids in responses and in paths.
func TestStoredResponsesInStreamedMode(t *testing.T) {
	t.Parallel() // mostly waits
	d := startStackIn(t, envoy.Streamed, 4, []string{"--speed", "50", "--store-responses"})
	for n := range 20 {
		id, worker := createResponse(t, d, []string{"", `,"stream":true`}[n%2])
		if resp, text := reply(t, d, http.MethodGet, responsesPath+"/"+id, "", nil); resp.StatusCode != http.StatusOK || resp.Header.Get("X-Sim-Worker") != worker {
			t.Fatalf("conversation %d: GET at %s: %d %s", n, resp.Header.Get("X-Sim-Worker"), resp.StatusCode, text)
		}
	}
}

// A router that was killed knows the ids of its earlier responses from --state-dir, and a damaged file only costs them.
func TestStoredResponsesOutliveARestart(t *testing.T) {
	t.Parallel() // mostly waits
	dir := t.TempDir()
	flags := []string{"--state-dir", dir, "--state-interval", "50ms"}
	d := startStack(t, 4, []string{"--speed", "50", "--store-responses"}, flags...)
	file := filepath.Join(dir, wire.Scope{}.Bucket(givenFile))
	ids := map[string]string{} // their workers
	for range 12 {
		id, worker := createResponse(t, d, "")
		ids[id] = worker
	}
	saved := func() (data []byte) {
		eventually(t, "the ids are not saved", func() bool {
			data, _ = os.ReadFile(file) // not there at first
			n := 0
			if in, _, err := records.NewReader(bytes.NewReader(data), givenMagic, givenVersion); err == nil {
				list, _ := io.ReadAll(in)
				n = len(list) / binary.Size(router.GivenBinding{})
			}
			return n == len(ids)
		})
		return data
	}
	data := saved()
	kill(t, d.Router)
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	eventually(t, "not every id is asked for at its worker", func() bool { // Envoy may pass by a kvroute that has just started
		for id, worker := range ids {
			if resp, _ := reply(t, d, http.MethodGet, responsesPath+"/"+id, "", nil); resp.StatusCode != http.StatusOK || resp.Header.Get("X-Sim-Worker") != worker {
				return false
			}
		}
		return true
	})
	kill(t, d.Router)
	data[len(data)/2]++
	if err := os.WriteFile(file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.StartRouter(t.Context(), flags...); err != nil {
		t.Fatal(err)
	}
	if createResponse(t, d, ""); !strings.Contains(d.Router.LastLines(), "a state file is refused") {
		t.Error("a damaged file is not reported")
	}
}
