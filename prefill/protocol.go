// SPDX-License-Identifier: Apache-2.0

package prefill

import (
	"bytes"
	"math/rand/v2"
	"net"
	"net/netip"
	"strconv"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/openai"
)

// prefillMembers returns the members that make the client's body a prefill request whose answer has
// parameters.
func prefillMembers(p *engine.Prefill) []openai.Member {
	members := []openai.Member{
		{Name: "stream", Value: []byte("false")},
		{Name: "max_tokens", Value: []byte("1")},
	}
	// One token is asked for. These would ask for more, or need a longer or streamed answer.
	for _, name := range [...]string{"max_completion_tokens", "min_tokens", "stream_options", "n", "best_of", "logprobs", "top_logprobs", "prompt_logprobs", "echo"} {
		members = append(members, openai.Member{Name: name})
	}
	return append(members, openai.Member{Name: p.Member, Value: []byte(p.Value)})
}

// decodeBody returns the body of the decode request: the client's, with the parameters of the
// prefill worker's answer. It is nil if the answer has none.
func decodeBody(p *engine.Prefill, body, answer []byte) []byte {
	m := openai.Member{Name: p.Member, Value: openai.Find(answer, p.Path...)}
	if len(m.Value) <= len("{}") || m.Value[0] != '{' {
		return nil
	}
	if p.DecodeType != "" {
		m.Value = bytes.Join(openai.Edit(m.Value, openai.Member{Name: "request_type", Value: []byte(p.DecodeType)}), nil)
	}
	return bytes.Join(openai.Edit(body, m), nil)
}

// bootstrapMembers returns the members that both requests have if the workers find each other by a
// bootstrap server, in lists if there are several prompts. bootstrap is the host:port that the prefill
// worker registered, at its address.
func bootstrapMembers(p *engine.Prefill, bootstrap string, at netip.AddrPort, prompts int) []openai.Member {
	host, port, err := net.SplitHostPort(bootstrap)
	if err != nil {
		host, port = at.Addr().String(), p.BootstrapPort
	}
	value := func(one func() string) []byte {
		if prompts <= 1 {
			return []byte(one())
		}
		list := []byte{'['}
		for range prompts {
			list = append(append(list, one()...), ',')
		}
		list[len(list)-1] = ']'
		return list
	}
	return []openai.Member{
		{Name: "bootstrap_host", Value: value(func() string { return strconv.Quote(host) })},
		{Name: "bootstrap_port", Value: value(func() string { return port })},
		// Nobody may guess it, and no two requests may have the same.
		{Name: "bootstrap_room", Value: value(func() string { return strconv.FormatUint(rand.Uint64()>>1, 10) })},
	}
}
