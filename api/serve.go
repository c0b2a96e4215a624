// SPDX-License-Identifier: Apache-2.0

package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
)

// get serves the answers of f as JSON.
func get(f func(*http.Request) (any, *openai.Error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		answer, bad := f(r)
		reply(w, http.StatusOK, answer, bad)
	}
}

// post serves the answers of f to a body as JSON, with a status.
func post[Q any](status int, f func(r *http.Request, body *Q) (any, *openai.Error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var body Q
		var answer any
		bad := read(r, &body)
		if bad == nil {
			answer, bad = f(r, &body)
		}
		reply(w, status, answer, bad)
	}
}

const (
	// maxPrompt limits the size of a body with a prompt: a million token ids take 8 MB.
	maxPrompt = 64 << 20
	// maxBody limits the size of other bodies.
	maxBody = 1 << 20
)

// errNoRoom is the error of a body for which there is no room.
var errNoRoom = errors.New("the bodies of other requests take the memory of --max-held-bytes; try again later")

// bounded limits the size of each body, and the memory of all bodies together. A body counts while it arrives and
// until its request is answered.
func (c *Config) bounded(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		limit := int64(maxBody)
		switch r.URL.Path {
		case "/v1/best_worker", "/v1/potential_loads", "/v1/generate":
			limit = maxPrompt
		}
		own := r.WithContext(r.Context()) // r itself is net/http's
		own.Body = http.MaxBytesReader(w, r.Body, limit)
		if c.HoldBody != nil {
			held := &heldBody{ReadCloser: own.Body, hold: c.HoldBody}
			own.Body = held
			defer func() { c.ReleaseBody(held.bytes) }()
		}
		h.ServeHTTP(w, own)
	})
}

// heldBody is a body that reserves memory as it arrives.
type heldBody struct {
	io.ReadCloser
	hold  func(n int) bool
	bytes int // reserved
}

func (b *heldBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	size := 2 * n // the decoder's buffer has up to twice the bytes
	if size > 0 && !b.hold(size) {
		return 0, errNoRoom
	}
	b.bytes += size
	return n, err
}

// read reads a body, which must be one JSON value with known fields.
func read(r *http.Request, into any) *openai.Error {
	err := openai.Decode(r.Body, into)
	if err == nil {
		return nil
	}
	status := http.StatusBadRequest
	if _, large := errors.AsType[*http.MaxBytesError](err); large {
		status = http.StatusRequestEntityTooLarge
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		status = http.StatusRequestTimeout
	}
	if errors.Is(err, errNoRoom) {
		return failure(http.StatusServiceUnavailable, openai.Unavailable, "", err.Error())
	}
	return failure(status, openai.InvalidRequest, "", "the body cannot be read: "+err.Error())
}

func failure(status int, kind, param, message string) *openai.Error {
	return &openai.Error{Status: status, Message: message, Type: kind, Param: param}
}

// invalid returns the error for a wrong parameter.
func invalid(param, message string) *openai.Error {
	return failure(http.StatusBadRequest, openai.InvalidRequest, param, message)
}

func reply(w http.ResponseWriter, status int, answer any, bad *openai.Error) {
	if bad != nil {
		bad.Write(w)
		return
	}
	write(w, status, answer)
}

// write sends v as JSON. It ignores an error of the connection: the client has left.
func write(w http.ResponseWriter, status int, v any) {
	text, err := encode(v)
	if err != nil {
		failure(http.StatusInternalServerError, openai.Unavailable, "", "the answer cannot be written: "+err.Error()).Write(w)
		return
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(text)
}

// encode returns v as one line of JSON, with a newline.
func encode(v any) ([]byte, error) {
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return text.Bytes(), err
}

// restTime is how long the unread rest of a body may take to arrive: net/http reads some of it
// before it answers, so that the connection can be used again.
const restTime = time.Second

// timely limits the time in which bodies arrive, read or not. The http.Server's ReadTimeout is
// not set: it would also limit handlers.
func timely(limit time.Duration, h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		conn := http.NewResponseController(w)
		if r.ContentLength == 0 || conn.SetReadDeadline(time.Now().Add(limit)) != nil {
			h.ServeHTTP(w, r) // no body; or no connection, as in tests of a handler
			return
		}
		t := &timed{ReadCloser: r.Body, conn: conn}
		own := r.WithContext(r.Context()) // r itself is net/http's
		own.Body = t
		h.ServeHTTP(w, own)
		if !t.over {
			_ = conn.SetReadDeadline(time.Now().Add(restTime)) // an error: the connection is closed
		}
	})
}

// timed is a body that removes its deadline at its end.
type timed struct {
	io.ReadCloser
	conn *http.ResponseController
	over bool
}

func (t *timed) Read(p []byte) (int, error) {
	n, err := t.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) && !t.over {
		t.over = true
		_ = t.conn.SetReadDeadline(time.Time{}) // an error: the connection is closed
	}
	return n, err
}
