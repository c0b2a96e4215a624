// SPDX-License-Identifier: Apache-2.0

package extproc

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"strconv"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/router"
)

// mayPull reports whether the request can name a source. A request with several prompts or outputs is several requests
// for the engine, and each transfer needs an id of its own. A trusted client's own parameters stay as they are.
func (s *stream) mayPull(m message, fields *openai.Body, truncated bool) bool {
	own := fields.Steering&openai.FieldHints&^s.conf.untrusted() != 0
	prompt := s.endpoint == openai.ChatCompletions || s.endpoint == openai.Completions
	return prompt && !own && !fields.Uncached && fields.Choices <= 1 && fields.Prompts <= 1 &&
		(s.conf.KVPull == pullByHeader || s.changeable(m, truncated))
}

// routePull is [stream.route] for a request whose body names the source of the decision.
func (s *stream) routePull(m message, body []byte) bool {
	if !s.reserved.add(len(body)) { // for the copy
		return s.route(m, nil)
	}
	return s.route(m, withSource(body, &engine.Of(s.decision.Engine).Pull, s.decision.Source))
}

// withSource returns a body that names a source. Other parameters of the transfer stay.
func withSource(body []byte, p *engine.Pull, source *router.Source) []byte {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	quoted := func(text string) []byte { return []byte(strconv.Quote(text)) }
	edited := func(object []byte, members ...openai.Member) []byte {
		return bytes.Join(openai.Edit(object, members...), nil)
	}
	value := edited([]byte("{}"),
		openai.Member{Name: p.ID, Value: quoted(hex.EncodeToString(id[:]))},
		openai.Member{Name: p.Host, Value: quoted(source.Pulls.Addr().String())},
		openai.Member{Name: p.Port, Value: strconv.AppendUint(nil, uint64(source.Pulls.Port()), 10)})
	params := openai.Find(body, p.Member)
	if len(params) == 0 || params[0] != '{' {
		params = []byte("{}")
	}
	return edited(body, openai.Member{Name: p.Member, Value: edited(params, openai.Member{Name: p.Source, Value: value})})
}
