// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"

	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/tokenizer"
	"github.com/kvroute/kvroute/tokenizer/chat"
)

// idsPaths returns the paths at which workers may return the ids of a client's body, the best one first; none if
// kvroute does not have the whole body. vLLM renders the body of each API if it was started with --enable-scale-out.
// Its /tokenize, and SGLang's, read chats and completions, without some fields.
func idsPaths(p chat.Request, m *tokenizer.Model) []string {
	if !hasIDsPath(p) {
		return nil
	}
	paths := []string{apiPaths[p.Path] + "/render"}
	if (p.Path == chat.PathChat || p.Path == chat.PathCompletions) && m.AsksAlike(p) && string(p.ToolChoice) != `"none"` &&
		p.ReasoningEffort == nil && p.Documents == nil && p.TruncatePromptTokens == nil && !bytes.Contains(p.Messages, []byte(`"reasoning`)) {
		paths = append(paths, "/tokenize")
	}
	return paths
}

// hasIDsPath reports whether idsPaths returns a path.
func hasIDsPath(p chat.Request) bool {
	return apiPaths[p.Path] != "" && p.Body != nil && (p.Messages != nil || len(p.Prompt) > 0 && p.Prompt[0] == '"')
}

// apiPaths are the paths of the APIs whose bodies workers may render.
//
//nolint:gochecknoglobals // a table
var apiPaths = map[chat.Path]string{
	chat.PathChat: "/v1/chat/completions", chat.PathCompletions: "/v1/completions", chat.PathMessages: "/v1/messages", chat.PathResponses: "/v1/responses",
}

// askIDs requests the ids of a client's body from a worker, at the first of some paths that the worker has.
func askIDs(ctx context.Context, client *http.Client, host, url string, paths []string, body []byte) (ids []uint32, err error) {
	for _, path := range paths {
		ids, err = askIDsAt(ctx, client, host, url+path, body)
		if status, ok := errors.AsType[reach.StatusError](err); !ok || !slices.Contains(unavailable, status.Status) {
			break
		}
	}
	return ids, err
}

// unavailable are the statuses of workers that do not have a path: 403 is that of vLLM without --enable-scale-out.
//
//nolint:gochecknoglobals // a table
var unavailable = []int{http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusNotImplemented}

func askIDsAt(ctx context.Context, client *http.Client, host, url string, body []byte) ([]uint32, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		return nil, err
	}
	req.Host = host
	req.Header.Set("Content-Type", "application/json")
	text, err := reach.Read(client, req, maxAnswer)
	if err != nil {
		return nil, err
	}
	text = bytes.TrimSpace(text)
	if inside, isList := bytes.CutPrefix(text, []byte("[")); isList { // a completion has a list of one prompt
		text = bytes.TrimSuffix(inside, []byte("]"))
	}
	var answer struct {
		Tokens []uint32
		IDs    []uint32 `json:"token_ids"`
	}
	if err := json.Unmarshal(text, &answer); err != nil {
		return nil, fmt.Errorf("%s: %w", url, err)
	}
	if ids := slices.Concat(answer.Tokens, answer.IDs); len(ids) > 0 {
		return ids, nil
	}
	return nil, errors.New(url + ": the answer has no token ids")
}

// around returns some ids around a position, for people.
func around(ids []uint32, at int) []uint32 {
	return ids[min(max(at-4, 0), len(ids)):min(at+5, len(ids))]
}
