// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"net/netip"
	"strconv"
	"strings"
	"time"

	datav3 "github.com/envoyproxy/go-control-plane/envoy/data/accesslog/v3"
	accesslogv3 "github.com/envoyproxy/go-control-plane/envoy/service/accesslog/v3"

	"github.com/kvroute/kvroute/router"
)

// attemptLogLife limits the life of a stream of logged attempts, so that it does not keep an old connection open.
const attemptLogLife = 10 * time.Minute

// attemptLog receives, as entries of Envoy's access log, the attempts that workers answered with 429 or 503, of
// which the streams of requests show the last one only, and the responses that workers broke off, which these
// streams do not tell from those that clients left.
type attemptLog struct {
	accesslogv3.UnimplementedAccessLogServiceServer
	*Server
}

// StreamAccessLogs passes the attempts on until the stream ends, a drain begins, or attemptLogLife is over.
func (s attemptLog) StreamAccessLogs(g accesslogv3.AccessLogService_StreamAccessLogsServer) error {
	_, stop := ending(g.Context())
	defer stop()
	w := &wait{end: stop}
	if !s.waits.add(w, false) {
		return nil
	}
	defer s.waits.remove(w)
	defer time.AfterFunc(attemptLogLife, stop).Stop()
	for {
		m, err := g.Recv()
		if err != nil {
			return nil // also the end that kvroute wanted
		}
		for _, entry := range m.GetHttpLogs().GetLogEntry() {
			at := entry.GetCommonProperties().GetUpstreamRemoteAddress().GetSocketAddress()
			status := int(entry.GetResponse().GetResponseCode().GetValue())
			ip, err := netip.ParseAddr(at.GetAddress())
			f := entry.GetCommonProperties().GetResponseFlags()
			broken := f.GetUpstreamConnectionTermination() || f.GetUpstreamRemoteReset() || f.GetUpstreamProtocolError()
			switch {
			case err != nil: // Envoy is configured in another way
				continue
			case broken && status/100 == 2: // else the request's stream shows it
				s.metrics.attempts.Count("broken_off")
				s.router.BrokeOff(netip.AddrPortFrom(ip.Unmap(), uint16(at.GetPortValue())))
				continue
			case !router.MayBeRepeated(status) || isLocal(entry):
				continue
			}
			s.metrics.attempts.Count(strconv.Itoa(status))
			id := strings.TrimSuffix(entry.GetRequest().GetRequestHeaders()[headerRequestID], inferredMark)
			for _, avoided := range s.router.Attempted(id, router.Response{
				Address: netip.AddrPortFrom(ip.Unmap(), uint16(at.GetPortValue())), Host: entry.GetRequest().GetAuthority(), Status: status,
				RetryAfter: router.ReadRetryAfter(entry.GetResponse().GetResponseHeaders()["retry-after"], time.Now()),
			}) {
				s.logAvoided(avoided, status, false, "from the log of attempts")
			}
		}
	}
}

// isLocal reports whether Envoy made the response of an entry: no worker answered.
func isLocal(entry *datav3.HTTPAccessLogEntry) bool {
	f, details := entry.GetCommonProperties().GetResponseFlags(), entry.GetResponse().GetResponseCodeDetails()
	return details != "" && details != "via_upstream" ||
		f.GetUpstreamConnectionFailure() || f.GetUpstreamRequestTimeout() || f.GetUpstreamOverflow() ||
		f.GetNoHealthyUpstream() || f.GetNoRouteFound() || f.GetLocalReset() || f.GetUpstreamRetryLimitExceeded()
}
