// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kvroute/kvroute/internal/openai"
)

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		method, path string
		want         openai.Endpoint
		status       int
	}{
		{"POST", "/v1/chat/completions", openai.ChatCompletions, 0},
		{"POST", "/v1/completions", openai.Completions, 0},
		{"POST", "/v1/completions?api-version=1", openai.Completions, 0},
		{"POST", "/v1/chat/completions?a=/v1/models", openai.ChatCompletions, 0},
		{"GET", "/v1/chat/completions", openai.ChatCompletions, 405},
		{"DELETE", "/v1/completions?x", openai.Completions, 405},
		{"post", "/v1/completions", openai.Completions, 405}, // methods are case-sensitive
		{"", "/v1/completions", openai.Completions, 405},
		{"OPTIONS", "/v1/chat/completions", openai.Other, 0}, // a browser's preflight
		{"GET", "/v1/models", openai.Other, 0},
		{"GET", "/health", openai.Other, 0},
		{"POST", "/v1/responses", openai.Responses, 0},
		{"GET", "/v1/responses", openai.Responses, 405},
		{"GET", "/v1/responses/resp_1", openai.Other, 0}, // a response that a worker keeps
		{"DELETE", "/v1/responses/resp_1?x", openai.Other, 0},
		{"POST", "/v1/responses/resp_1/cancel", openai.Other, 0},
		{"GET", "/v1/responses/resp_1/input_items", openai.Other, 0},
		{"POST", "/v1/responses/resp_1", openai.Other, 404}, // no engine serves it, so its body would pass unchecked
		{"PUT", "/v1/responses/resp_1/cancel", openai.Other, 404},
		{"PATCH", "/v1/responses/%72esp_1", openai.Other, 404},
		{"POST", "/v1/responses/render", openai.Text, 0},
		{"POST", "/open_session", openai.OpenSession, 0},
		{"POST", "/close_session", openai.CloseSession, 0},
		{"GET", "/open_session", openai.OpenSession, 405}, // SGLang would read its body
		{"POST", "/v1/messages", openai.Messages, 0},
		{"POST", "/v1/messages/count_tokens", openai.Text, 0},
		{"POST", "/tokenize", openai.Text, 0},
		{"POST", "/detokenize", openai.Text, 0},
		{"POST", "/v1/chat/completions/render", openai.Text, 0},
		{"GET", "/tokenize", openai.Text, 405},
		{"POST", "/generate?x", openai.Generate, 0},
		{"PUT", "/generate", openai.Generate, 0}, // SGLang serves it as POST
		{"PUT", "/v1/rerank", openai.Load, 0},
		{"PATCH", "/generate", openai.Generate, 405},
		{"PUT", "/v1/chat/completions", openai.ChatCompletions, 405},
		{"OPTIONS", "/generate", openai.Other, 0},
		{"HEAD", "/v1/models", openai.Other, 0},
		{"OPTIONS", "/v1/models/x", openai.Other, 0},
		{"POST", "/v1/models", openai.Other, 405},
		{"POST", "/v1/models/a/b", openai.Other, 405},
		{"DELETE", "/v1/%6dodels/x?y", openai.Other, 405},
		{"POST", "/inference/v1/generate", openai.Ids, 0},
		{"GET", "/inference/v1/generate", openai.Ids, 405},
		{"POST", "/inference/v2/generate", openai.Other, 0},
		{"POST", "/v1/embeddings", openai.Load, 0},
		{"POST", "/v2/rerank?x", openai.Load, 0},
		{"POST", "/score", openai.Load, 0},
		{"POST", "/pooling", openai.Load, 0},
		{"POST", "/classify", openai.Load, 0},
		{"GET", "/v1/embeddings", openai.Load, 405},
		{"POST", "/v1/audio/transcriptions", openai.Other, 0}, // a form, not JSON
		{"POST", "/v1/chat/completions/", openai.Other, 0},
		{"POST", "/V1/completions", openai.Other, 0},
		// Other spellings that engines' servers, or Envoy's path options, read as the same path.
		{"POST", "/v1/chat/%63ompletions", openai.ChatCompletions, 0},
		{"POST", "/v1%2Fchat%2fcompletions?x=%zz", openai.ChatCompletions, 0},
		{"POST", "//v1///chat//completions", openai.ChatCompletions, 0},
		{"POST", "/v1/./chat/completions", openai.ChatCompletions, 0},
		{"POST", "/v1/models/../chat/completions", openai.ChatCompletions, 0},
		{"POST", "/x/%2e%2e/v1/completions#top", openai.Completions, 0},
		{"GET", "/v1/%63ompletions", openai.Completions, 405},
		{"POST", "/v1/chat/%2563ompletions", openai.Other, 0}, // decoded once
		{"POST", "/v1/chat/%completions", openai.Other, 0},
		{"POST", "", openai.Other, 0},
	} {
		got, err := openai.Classify(c.method, c.path)
		status := 0
		if err != nil {
			status = err.Status
		}
		if got != c.want || status != c.status {
			t.Errorf("%s %s: got %v, status %d, want %v, status %d", c.method, c.path, got, status, c.want, c.status)
		}
	}
}

func TestErrorIsWrittenInOpenAIsForm(t *testing.T) {
	for _, c := range []struct {
		err   openai.Error
		want  string
		allow string
	}{
		{
			openai.Error{Status: 400, Message: `no "model"`, Type: openai.InvalidRequest, Param: "model"},
			`{"error":{"message":"no \"model\"","type":"invalid_request_error","param":"model","code":null}}`, "",
		},
		{
			openai.Error{Status: 503, Message: "later", Type: openai.Unavailable, Code: "no_worker"},
			`{"error":{"message":"later","type":"service_unavailable","param":null,"code":"no_worker"}}`, "",
		},
		{
			openai.Error{Status: 405, Message: "\xff", Type: openai.InvalidRequest},
			`{"error":{"message":"\ufffd","type":"invalid_request_error","param":null,"code":null}}`, "POST",
		},
	} {
		w := httptest.NewRecorder()
		c.err.Write(w)
		if diff := cmp.Diff(c.want, w.Body.String()); diff != "" {
			t.Errorf("body (-want +got):\n%s", diff)
		}
		if !json.Valid(w.Body.Bytes()) {
			t.Errorf("not JSON: %s", w.Body)
		}
		want := http.Header{"Content-Type": {"application/json"}}
		if c.allow != "" {
			want.Set("Allow", c.allow)
		}
		if diff := cmp.Diff(want, w.Header()); diff != "" || w.Code != c.err.Status {
			t.Errorf("status %d, want %d; headers (-want +got):\n%s", w.Code, c.err.Status, diff)
		}
	}
}

// The method is text of the client and may have any length.
func TestClassifyBoundsWhatItRepeats(t *testing.T) {
	long := make([]byte, 1<<20)
	_, err := openai.Classify(string(long), "/v1/completions")
	if err == nil || len(err.Message) > 200 {
		t.Errorf("got a message of %d bytes, want at most 200", len(err.Message))
	}
}
