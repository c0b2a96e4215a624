// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/kvroute/kvroute/bench"
)

// texts makes prompts of a part of Go's standard library: code, with prose in its comments.
type texts struct {
	rng *rand.Rand
	all string
}

func newTexts(rng *rand.Rand) *texts {
	root := strings.TrimSpace(string(bench.Must(exec.Command("go", "env", "GOROOT").Output())))
	var all strings.Builder
	for _, name := range bench.Must(filepath.Glob(root + "/src/net/*/*.go")) {
		all.Write(bench.Must(os.ReadFile(name)))
	}
	return &texts{rng, all.String()}
}

// body is a chat request of about size bytes; seven tenths of it are the same in all.
func (t *texts) body(size, tokens int) []byte {
	shared, own := size*7/10, size*3/10
	at := t.rng.IntN(len(t.all) - own)
	quote := func(text string) []byte { return bench.Must(json.Marshal(text)) }
	return fmt.Appendf(nil, bodyBegin+`"stream":%v,"messages":[{"role":"system","content":%s},{"role":"user","content":%s}]}`,
		tokens, tokens > 0, quote(t.all[:shared]), quote(t.all[at:at+own]))
}

// bodyBegin is the beginning of a request. It tells the worker how many events to send.
const bodyBegin = `{"model":"sim","max_tokens":%d,`

// answer is a worker that answers at once: a JSON document, or as many events as the
// request has max_tokens, a millisecond apart.
func answer(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return // the client is gone
	}
	var events int
	if n, _ := fmt.Sscanf(string(body[:min(len(body), 64)]), bodyBegin, &events); n != 1 || events == 0 {
		document(w)
		return
	}
	stream(w, events, time.Millisecond)
}

// document answers with a JSON document.
func document(w http.ResponseWriter) {
	w.Header().Set("Content-Type", "application/json")
	_, _ = io.WriteString(w, `{"choices":[{"index":0,"message":{"role":"assistant","content":"yes"},"finish_reason":"stop"}]}`)
}

// stream answers with events and a pause after each.
func stream(w http.ResponseWriter, events int, pause time.Duration) {
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	for i := range events {
		_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":\"token %d\"}}]}\n\n", i)
		if out.Flush() != nil {
			return
		}
		<-time.After(pause)
	}
	_, _ = io.WriteString(w, "data: [DONE]\n\n")
}
