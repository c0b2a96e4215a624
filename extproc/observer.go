// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"context"
	"mime"
	"slices"
	"strings"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/router"
)

// shadow is observe for a stream that only its messages show to be an observer, of which
// req is the first: Envoy Gateway's shadowMode. With Config.ModeOverride the main stream has
// put the request's id into the response headers.
func (s *Server) shadow(ctx context.Context, req *extprocv3.ProcessingRequest, in <-chan *extprocv3.ProcessingRequest) string {
	return s.observe(header(req.GetResponseHeaders(), headerRequestID), func() (*extprocv3.ProcessingRequest, error) {
		if next := req; next != nil {
			req = nil
			return next, nil
		}
		select {
		case next := <-in:
			return next, nil
		case <-s.drained.Done():
			return nil, errEnded
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	})
}

// observe watches a response, whose messages receive returns, for its first token and
// says in a word how that ended. The sooner it returns, the less Envoy copies.
func (s *Server) observe(id string, receive func() (*extprocv3.ProcessingRequest, error)) string {
	switch {
	case id == "" || id == "-": // Envoy's word for "no such header"
		return endUnrouted
	case !s.conf.Synced && !strings.HasPrefix(id, s.prefix):
		return endElsewhere
	}
	var events firstEvent
	for {
		req, err := receive()
		switch {
		case err != nil && s.draining():
			return endDraining
		case err != nil:
			return endEnded
		}
		if end := s.observeMessage(&events, id, req); end != "" {
			return end
		}
	}
}

// observeMessage returns how the stream ends with a message, "" if it goes on.
func (s *Server) observeMessage(events *firstEvent, id string, req *extprocv3.ProcessingRequest) string {
	switch r := req.GetRequest().(type) {
	case *extprocv3.ProcessingRequest_ResponseHeaders:
		if !isEventStream(r.ResponseHeaders) || r.ResponseHeaders.GetEndOfStream() {
			return endNoEvents
		}
	case *extprocv3.ProcessingRequest_ResponseBody:
		if events.in(r.ResponseBody.GetBody()) {
			s.router.FirstToken(id, router.SignObserver)
			return endFirstToken
		}
		if r.ResponseBody.GetEndOfStream() {
			return endNoEvents
		}
	}
	return ""
}

// isEventStream reports whether events will follow. A complete JSON answer comes
// at its end and has no first token to be seen.
func isEventStream(h *extprocv3.HttpHeaders) bool {
	return status(h) == "200" && media(h) == "text/event-stream"
}

// isWhole reports whether a response came into being before its headers: it is JSON, or
// its length is known.
func isWhole(h *extprocv3.HttpHeaders) bool {
	return h.GetEndOfStream() || media(h) == "application/json" || header(h, "content-length") != ""
}

// media returns the type of a response's content.
func media(h *extprocv3.HttpHeaders) string {
	t, _, err := mime.ParseMediaType(header(h, "content-type"))
	if err != nil {
		return ""
	}
	return t
}

// firstEvent looks for the first data line of an event stream that comes in pieces
// of any size. Comments and other fields are no tokens: engines send comments to
// keep the connection while a prompt waits. Nor are the events with which a stream
// of /v1/responses begins before anything is computed. What is carried over from
// piece to piece is a few bytes, however long a line is.
type firstEvent struct {
	line  [32]byte // beginning of the current line
	n     int      // bytes of it kept
	early bool     // the current event is one that comes before any token
	cr    bool     // the last byte was a carriage return
}

// early are the names of events that come before any token.
//
//nolint:gochecknoglobals // a table
var early = []string{"response.created", "response.in_progress", "response.queued"}

// in reads the next piece and reports whether a data line with content has begun.
func (e *firstEvent) in(piece []byte) bool {
	for len(piece) > 0 {
		c := piece[0]
		if c == '\n' || c == '\r' {
			if c != '\n' || !e.cr { // both together end one line
				e.endLine()
			}
			e.cr = c == '\r'
			piece = piece[1:]
			continue
		}
		e.cr = false
		value, isData := bytes.CutPrefix(e.line[:e.n], []byte("data:"))
		if isData && !e.early && (c != ' ' || len(bytes.TrimLeft(value, " ")) > 0) {
			return true
		}
		if e.n < len(e.line) {
			e.line[e.n] = c
			e.n++
			piece = piece[1:]
			continue
		}
		if isData && !e.early { // but spaces so far
			piece = piece[1:]
			continue
		}
		end := bytes.IndexAny(piece, "\r\n")
		if end < 0 {
			return false
		}
		piece = piece[end:]
	}
	return false
}

// endLine notes what a line said of the event that it belongs to.
func (e *firstEvent) endLine() {
	name, isName := bytes.CutPrefix(e.line[:e.n], []byte("event:"))
	switch {
	case e.n == 0: // the event is over
		e.early = false
	case isName:
		e.early = slices.Contains(early, string(bytes.TrimSpace(name)))
	}
	e.n = 0
}
