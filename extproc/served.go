// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
	"time"

	filterv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/kvroute/kvroute/router"
)

// answerResponse answers the response headers.
func (s *stream) answerResponse(req *extprocv3.ProcessingRequest) *extprocv3.ProcessingResponse {
	h := req.GetResponseHeaders()
	s.headersSent.Store(true)
	s.served = strings.HasPrefix(status(h), "2")
	if !s.booked {
		return answerTo(responseHeaders, nil)
	}
	form := formOf(h)
	s.awaited = form != noStream && !isWhole(h) && s.conf.FirstToken != FirstTokenResponseHeaders
	s.note(req)
	if s.gives {
		s.router.Giver(s.id, netip.AddrPort{}) // the observer may come after the end of the request
	}
	if s.responseBody {
		s.usage = readsUsage(h)
		s.given = s.readsGiven(s.id, h, netip.AddrPort{})
	}
	switch {
	case status(h) != "200":
	case s.awaited:
		s.watching, s.events.form = s.responseBody, form
	case isWhole(h): // the prefill has ended
		s.router.FirstToken(s.id, router.SignEnd)
	case form == noStream: // kvroute finds no first token in another kind of stream
	default:
		s.router.FirstToken(s.id, router.SignHeaders)
	}
	var headers []string
	if s.conf.DecisionHeaders {
		d := &s.decision
		headers = append(headers,
			headerRequestID, s.id,
			"x-dynamo-worker-instance-id", fmt.Sprint(d.Worker.ID),
			"x-dynamo-overlap-blocks", strconv.Itoa(d.OverlapBlocks),
			"x-dynamo-reason", string(d.Reason))
	}
	if s.conf.ModeOverride && !s.conf.DecisionHeaders {
		headers = append(headers, headerRequestID, s.id)
	}
	if s.conformance {
		headers = append(headers, testHeaders(&s.decision, req)...)
	}
	if headers == nil {
		return answerTo(responseHeaders, nil)
	}
	return answerTo(responseHeaders, &extprocv3.CommonResponse{HeaderMutation: mutation(headers)})
}

// note reports to the router which worker answered the request, and how.
func (s *stream) note(req *extprocv3.ProcessingRequest) {
	r := router.Response{TokenAwaited: s.awaited}
	details := ""
	r.Status, _ = strconv.Atoi(status(req.GetResponseHeaders())) // 0 if there is none
	r.TokenUnseen = s.awaited && s.decision.Inferred
	if router.MayBeRepeated(r.Status) {
		r.RetryAfter = router.ReadRetryAfter(header(req.GetResponseHeaders(), "retry-after"), time.Now())
	}
	for _, filter := range req.GetAttributes() {
		f := filter.GetFields()
		// Envoy's own replies have the address of the last worker that it tried, too.
		r.Address = address(f["upstream.address"])
		r.Asked = int(min(f["upstream.request_attempt_count"].GetNumberValue(), maxAttempts))
		details = f["response.code_details"].GetStringValue()
		switch {
		case details == "" || details == "via_upstream": // not configured, or the worker's response
		case details == "no_healthy_upstream" && r.Address.IsValid():
			// Envoy tried a worker, which failed, and had no other to try.
			r.Local, r.Asked = true, max(0, r.Asked-1)
		case details == "no_healthy_upstream":
			s.unreached(&s.decision)
			r.Nowhere = true
		case strings.HasPrefix(details, "upstream_reset_") && !envoysOwn(details):
			r.Local = true // reset, refused, or the connection took too long
		case strings.HasPrefix(details, "upstream_") && !envoysOwn(details):
			r.Late = true // a timeout of the route
		default:
			r.Nowhere = true
		}
	}
	if r.Nowhere {
		s.router.Served(s.id, r)
		return
	}
	if !r.Address.IsValid() {
		r.Address = servedBy(req)
	} else if r.Asked == 1 && r.Address != s.decision.Address {
		s.unreached(&s.decision)
	}
	moved, avoided := s.router.Served(s.id, r)
	if moved {
		s.conf.Log.Debug("another worker served", "first", s.decision.Address, "served", r.Address)
	}
	for _, w := range avoided {
		if w.Worker == s.decision.Worker && r.Address.IsValid() && (r.Address != s.decision.Address || r.Asked > 1) {
			s.logAvoided(w, 0, true, "it gave no response, or one that Envoy answered by asking the second choice")
		} else {
			s.logAvoided(w, r.Status, r.Local, details)
		}
	}
}

// logAvoided logs a worker that is avoided because of a response, or of none (status 0).
func (s *Server) logAvoided(w router.Avoided, status int, local bool, details string) {
	if local && s.conf.NoResponse != nil {
		s.conf.NoResponse(w.ID)
	}
	args := []any{"worker", w.ID, "rank", w.DPRank}
	if status != 0 {
		args = append(args, "status", status, "count", w.Failed)
	}
	s.conf.Log.Warn("a worker failed and is avoided for a while", append(args, "local", local, "details", details)...)
}

// unreached notes that Envoy has no endpoint where the decision sends the request.
func (s *Server) unreached(d *router.Decision) {
	s.metrics.unreached.Count()
	if unlogged, ok := s.apart.allow(time.Now()); ok {
		s.conf.Log.Warn("Envoy has no endpoint at the address of the worker that was chosen",
			"worker", d.Worker.ID, "address", d.Address, "unlogged", unlogged)
	}
}

// maxAttempts limits the reported number of attempts. Retry policies have far fewer.
const maxAttempts = 1000

// envoysOwn reports whether the details of Envoy's own reply name a cause in Envoy for a request
// that did not reach a worker completely: a limit, or a reset by Envoy.
func envoysOwn(details string) bool {
	_, reason, _ := strings.Cut(details, "{")
	reason, _, _ = strings.Cut(strings.TrimSuffix(reason, "}"), "|")
	switch reason {
	case "overflow", "overload_manager_reset", "local_reset", "local_refused_stream_reset", "local_connection_failure":
		return true
	}
	return false
}

// address reads ip:port; it is invalid if v has none.
func address(v *structpb.Value) netip.AddrPort {
	a, _ := netip.ParseAddrPort(v.GetStringValue()) // invalid after an error
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// status returns the status of a response, "" if there is none.
func status(h *extprocv3.HttpHeaders) string { return header(h, ":status") }

// header returns the first header of a name, "" if there is none.
func header(h *extprocv3.HttpHeaders, name string) string {
	for _, v := range h.GetHeaders().GetHeaders() {
		if v.GetKey() == name {
			return value(v)
		}
	}
	return ""
}

// override returns the processing mode for Config.ModeOverride. It repeats the mode of the
// request's body, because an override replaces all modes.
func (h *head) override() *filterv3.ProcessingMode {
	body := filterv3.ProcessingMode_BUFFERED
	if h.partial {
		body = filterv3.ProcessingMode_BUFFERED_PARTIAL
	}
	return &filterv3.ProcessingMode{
		RequestHeaderMode: filterv3.ProcessingMode_SEND, RequestBodyMode: body,
		ResponseHeaderMode: filterv3.ProcessingMode_SEND, ResponseBodyMode: filterv3.ProcessingMode_NONE,
		ResponseTrailerMode: filterv3.ProcessingMode_SEND,
	}
}
