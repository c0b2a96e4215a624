// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"slices"
	"strings"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// shadow is observe for an observer stream without metadata: Envoy Gateway's shadowMode. req is its
// first message. With Config.ModeOverride the main stream has put the request's id into the
// response headers. The stream was counted as a main stream until now.
func (s *Server) shadow(
	g extprocv3.ExternalProcessor_ProcessServer, k *kind, w *wait, req *extprocv3.ProcessingRequest,
) string {
	s.open[mainStream].Add(-1)
	s.open[observerStream].Add(1)
	*k = observerStream
	return s.observe(header(req.GetResponseHeaders(), headerRequestID), w, func() (*extprocv3.ProcessingRequest, error) {
		if next := req; next != nil {
			req = nil
			return next, nil
		}
		return g.Recv()
	})
}

// observe watches a response, whose messages receive returns, for its first token, and returns
// the name of its end. The sooner it returns, the less Envoy copies. A drain ends w.
func (s *Server) observe(id string, w *wait, receive func() (*extprocv3.ProcessingRequest, error)) string {
	switch {
	case id == "" || id == "-": // Envoy writes "-" for a missing header
		return endUnrouted
	case !s.conf.Synced && !strings.HasPrefix(id, s.prefix):
		return endElsewhere
	}
	if !s.waits.add(w, false) {
		return endDraining
	}
	defer s.waits.remove(w)
	var events firstEvent
	var usage *openai.UsageReader // nil: the stream ends at the first token
	var given *givenReader        // nil: the response gives out no id
	defer func() { usage.Report(id, s.router.ReportUsage) }()
	defer s.settle(id, s.router.Free)
	for end := ""; ; {
		req, err := receive()
		headers, body := req.GetResponseHeaders(), req.GetResponseBody()
		if usage != nil && body != nil {
			usage.Read(body.GetBody(), body.GetEndOfStream())
		}
		if body != nil {
			given.read(body.GetBody(), body.GetEndOfStream())
		}
		switch {
		case err != nil && end != "":
			return end
		case err != nil && s.waits.remove(w) == drained:
			return endDraining
		case err != nil: // the client left, or the response broke off, before the first token
			s.settle(id, func(id string) bool { return s.router.Leave(id, true) })
			return endEnded
		case headers != nil:
			if s.audited(id) {
				usage = readsUsage(headers)
			}
			given = s.readsGiven(id, headers, responseAddress(req))
			if events.form = formOf(headers); events.form == noStream || headers.GetEndOfStream() {
				end = endNoEvents
			} else {
				s.watched.begin(id)
			}
		case end == "" && body != nil && events.in(body.GetBody()):
			s.router.FirstToken(id, router.SignObserver)
			end = endFirstToken
		case end == "" && body.GetEndOfStream():
			end = endNoEvents
		}
		if end != "" {
			s.settle(id, s.router.Free)
		}
		if end != "" && (usage == nil || usage.Ended) && given.ends() {
			return end
		}
	}
}

// settle notes that an observer stream looks for no first token any more. If the main stream has left the end of
// the request to it, settle calls end.
func (s *Server) settle(id string, end func(id string) bool) {
	if s.watched.remove(id) {
		end(id)
	}
}

// streamForm is how a response shows its first token.
type streamForm uint8

const (
	noStream      streamForm = iota // in no way that can be seen, as JSON
	eventStream                     // by the first event with data
	textStream                      // by the first byte that is no white space: lines of JSON, or plain text
	encodedStream                   // by its first bytes: the response has a content-encoding
)

// encodedHead is the number of bytes that an encoder may send before it has data: more than the header of gzip.
const encodedHead = 18

// formOf returns how a response shows its first token.
func formOf(h *extprocv3.HttpHeaders) streamForm {
	form := noStream
	switch media(h) {
	case "text/event-stream":
		form = eventStream
	case "text/plain": // a length is a whole text's
		if header(h, "content-length") == "" {
			form = textStream
		}
	case "application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines", "application/stream+json":
		form = textStream
	}
	switch encoding := header(h, "content-encoding"); {
	case status(h) != "200" || form == noStream:
		return noStream
	case encoding != "" && !strings.EqualFold(encoding, "identity"):
		return encodedStream
	}
	return form
}

// isWhole reports whether a worker had the whole response before it sent the headers: it is JSON,
// or its length is known.
func isWhole(h *extprocv3.HttpHeaders) bool {
	return h.GetEndOfStream() || media(h) == "application/json" || header(h, "content-length") != ""
}

// media returns the type of a response's content, in lower case and without parameters.
func media(h *extprocv3.HttpHeaders) string {
	t, _, _ := strings.Cut(header(h, "content-type"), ";")
	return strings.ToLower(strings.TrimSpace(t))
}

// firstEvent looks for the first data line with content in an event stream that comes in pieces
// of any size. Comments are no tokens: engines send them to keep the connection open while a
// prompt waits. Nor are the events with which a stream of /v1/responses begins, and pings. The first event
// of a chat, with only the role, counts: engines send it together with the first token's event. A stream of text
// has its first token with the first byte that is no white space, an encoded one with its first bytes.
type firstEvent struct {
	form  streamForm // of the response; eventStream if it is noStream
	size  int        // bytes of an encoded stream so far
	line  []byte     // the beginning of the current line, at most lineKept bytes
	early bool       // the current event comes before any token
	cr    bool       // the last byte was a carriage return
}

// lineKept is longer than each name in earlyEvents with its field.
const lineKept = 32

// earlyEvents are the names of events that come before any token.
//
//nolint:gochecknoglobals // a table
var earlyEvents = []string{"response.created", "response.in_progress", "response.queued", "ping"}

// in reads the next piece and reports whether it shows the first token.
func (e *firstEvent) in(piece []byte) bool {
	switch e.form {
	case textStream:
		return len(bytes.TrimSpace(piece)) > 0
	case encodedStream:
		e.size += len(piece)
		return e.size > encodedHead
	case noStream, eventStream:
	}
	return e.inEvents(piece)
}

// inEvents reads the next piece of an event stream and reports whether a data line with content has begun.
func (e *firstEvent) inEvents(piece []byte) bool {
	for len(piece) > 0 {
		if e.cr && piece[0] == '\n' { // both together end one line
			e.cr, piece = false, piece[1:]
			continue
		}
		end := bytes.IndexAny(piece, "\r\n")
		text := piece
		if end >= 0 {
			text = piece[:end]
		}
		n := min(len(text), lineKept-len(e.line))
		e.line = append(e.line, text[:n]...)
		if value, isData := bytes.CutPrefix(e.line, []byte("data:")); isData && !e.early {
			if len(bytes.TrimLeft(value, " ")) > 0 || len(bytes.TrimLeft(text[n:], " ")) > 0 {
				return true
			}
			e.line = e.line[:len("data:")] // without the spaces
		}
		if e.cr = false; end < 0 {
			return false
		}
		name, isName := bytes.CutPrefix(e.line, []byte("event:"))
		switch {
		case len(e.line) == 0: // the event is over
			e.early = false
		case isName:
			e.early = slices.Contains(earlyEvents, string(bytes.TrimSpace(name)))
		}
		e.line, e.cr, piece = e.line[:0], piece[end] == '\r', piece[end+1:]
	}
	return false
}
