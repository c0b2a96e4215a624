// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"strings"

	extprocv3 "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/kvroute/kvroute/internal/openai"
)

// auditMark ends the ids of a random share of the requests. Envoy's configuration, too, matches it.
const auditMark = "-audit"

// audited reports whether the usage in the response to a request is read although kvroute does not
// need the response otherwise.
func (s *Server) audited(id string) bool {
	return strings.HasPrefix(id, s.prefix) && strings.HasSuffix(id, auditMark)
}

// readsUsage returns a reader for the usage in a response, nil if the response can have none.
func readsUsage(h *extprocv3.HttpHeaders) *openai.UsageReader {
	if status(h) != "200" || h.GetEndOfStream() || header(h, "content-encoding") != "" {
		return nil
	}
	return new(openai.UsageReader)
}
