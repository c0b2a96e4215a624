// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"context"
	"net/netip"
	"strings"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// givesMark ends the ids of requests whose response may give out an id, before auditMark. Envoy's configuration, too,
// matches it.
const givesMark = "-gives"

// What became of a response that may give out an id, and of a request with an id in its path.
const (
	givenBound   = "bound"
	givenKept    = "kept"    // another worker gave out the id before, or the id is too long
	givenNone    = "none"    // the response has none, or not at its beginning
	givenUnknown = "unknown" // it is not known which worker answered
	heldFound    = "found"
)

// maxGivenHead is the length of a response's beginning in which its id stands, in bytes.
const maxGivenHead = 4 << 10

// givenReader finds the id in the beginning of a response that comes in pieces of any size: JSON, or an event stream
// of JSON.
type givenReader struct {
	*Server
	by   router.Worker // that answers the request
	form streamForm
	head []byte
	done bool
}

// readsGiven returns a reader for the id that a response gives out, nil if the response can have none. at is the
// address of the worker that answered, invalid if that is unknown.
func (s *Server) readsGiven(id string, h *extprocv3.HttpHeaders, at netip.AddrPort) *givenReader {
	if status(h) != "200" || h.GetEndOfStream() || !strings.HasSuffix(strings.TrimSuffix(id, auditMark), givesMark) {
		return nil
	}
	g := &givenReader{Server: s, form: formOf(h)}
	if encoding := header(h, "content-encoding"); encoding != "" && !strings.EqualFold(encoding, "identity") {
		s.metrics.given.Count(givenNone)
		return nil
	}
	// Now, because the request may end before its id is read.
	var known bool
	if g.by, known = s.router.Giver(id, at); !known {
		s.metrics.given.Count(givenUnknown)
		return nil
	}
	return g
}

// read reads the next piece, and binds the id if the piece has its end.
func (g *givenReader) read(piece []byte, last bool) {
	if g == nil || g.done {
		return
	}
	g.head = append(g.head, piece[:min(len(piece), maxGivenHead-len(g.head))]...)
	id, err := g.find()
	if err != nil && !last && len(g.head) < maxGivenHead {
		return
	}
	g.done, g.head = true, nil
	switch {
	case id == "":
		g.metrics.given.Count(givenNone)
	case g.router.Gave(id, g.by):
		g.metrics.given.Count(givenBound)
	default:
		g.metrics.given.Count(givenKept)
	}
}

// find returns the id in the beginning of the response: in a stream, in the first event that has a response.
func (g *givenReader) find() (id string, err error) {
	if g.form != eventStream {
		return openai.GivenID(g.head)
	}
	var data []byte // of the current event
	for rest := g.head; len(rest) > 0; {
		line := rest
		end := bytes.IndexAny(rest, "\r\n")
		if rest = nil; end >= 0 {
			line, rest = line[:end], bytes.TrimPrefix(line[end:], []byte("\r"))
			rest = bytes.TrimPrefix(rest, []byte("\n"))
		}
		if more, isData := bytes.CutPrefix(line, []byte("data:")); isData {
			data = append(data, more...)
			if id, _ := openai.GivenIDInEvent(data); id != "" {
				return id, nil
			}
		}
		if len(line) == 0 {
			data = nil
		}
	}
	return "", openai.ErrUnfinished
}

// ends reports whether the reader needs no more of the response.
func (g *givenReader) ends() bool { return g == nil || g.done }

// responseAddress returns the address of the worker that answered, as Envoy reports it; invalid if it does not.
func responseAddress(req *extprocv3.ProcessingRequest) (a netip.AddrPort) {
	for _, filter := range req.GetAttributes() {
		a = address(filter.GetFields()["upstream.address"])
	}
	return a
}

// holder returns the answer to the headers of a request about what a worker keeps: the worker that gave out the id
// in the path. It returns nil if no worker is known to have given out the id.
func (s *stream) holder(ctx context.Context, m message) *extprocv3.ProcessingResponse {
	conf := &s.conf
	ctx, cancel := context.WithTimeout(ctx, conf.DecisionTimeout)
	defer cancel()
	d, known := s.router.Holder(ctx, s.held)
	if !known || !d.Address.IsValid() || !conf.mayServe(d.Address) || !router.Allows(s.allowed, d.Address) {
		s.metrics.held.Count(givenUnknown)
		return nil
	}
	s.metrics.held.Count(heldFound)
	s.routed.Add(1)
	c := &extprocv3.CommonResponse{
		HeaderMutation:  mutation(append(conf.destination(&d), s.rankHeaders(&d)...)),
		ClearRouteCache: true,
	}
	c.HeaderMutation.RemoveHeaders = s.stripHeaders
	answer := answerTo(m, c)
	if conf.EndpointPicker {
		answer.DynamicMetadata = conf.endpointMetadata(&d)
	}
	return answer
}
