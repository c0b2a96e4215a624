// SPDX-License-Identifier: Apache-2.0

package openai

import (
	"bytes"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/kvroute/kvroute/internal/jsonscan"
)

// This file is the table of the inputs that steer routers, gateways, workers and the sidecars of workers.
// Some workers connect to an address in such an input. A client that is not trusted must not set any of
// them: the Envoy configurations, the external processor and the HTTP API read this table.

// ClientRequestID is the header in which Envoy passes the client's own request id to kvroute. The header
// x-request-id has an id that Envoy has made: some engines read addresses from it.
const ClientRequestID = "x-dynamo-client-request-id"

// steeringPrefixes are the beginnings of the names of headers that steer.
//
//nolint:gochecknoglobals // a table
var steeringPrefixes = []string{
	"x-data-parallel-", // vLLM's rank
	"x-decode",
	"x-dp-",
	"x-dynamo-",
	"x-encode", // llm-d
	"x-gateway-",
	"x-kv-",
	"x-llm-d-",
	"x-prefill",
	"x-smg-", // SGLang's gateway
	"x-worker-",
}

// clientHeaders have such a beginning, and clients may set them.
//
//nolint:gochecknoglobals // a table
var clientHeaders = []string{"x-dynamo-session-id", "x-dynamo-session-final", ClientRequestID}

// Hints are the headers that steer and that kvroute reads if the listener is trusted. Envoy passes them to
// kvroute, which removes them.
//
//nolint:gochecknoglobals // a table
var Hints = []string{
	"x-dynamo-worker-instance-id",
	"x-worker-instance-id",
	"x-dynamo-dp-rank",
	"x-dp-rank",
	"x-dynamo-prefill-instance-id",
	"x-prefill-instance-id",
	"x-dynamo-prefill-dp-rank",
	"x-prefill-dp-rank",
	"x-dynamo-router-group",
	"x-dynamo-routing-mode",
	"x-dynamo-request-priority",
	"x-dynamo-request-strict-priority",
	"x-dynamo-slo-ttft-ms",
	"x-dynamo-router-override",
	"x-dynamo-meta-policy-class",
	"x-gateway-inference-objective",
	"x-llm-d-inference-objective",
	"x-gateway-inference-fairness-id",
	"x-llm-d-inference-fairness-id",
}

// SteeringHeader reports whether a request header, in lower case, steers. keep are further names of headers
// that clients may set. An underscore counts as a dash, as for servers that make one name of both.
func SteeringHeader(name string, keep []string) bool {
	if len(name) < 2 || name[0] != 'x' || slices.Contains(clientHeaders, name) || slices.Contains(keep, name) {
		return false
	}
	if strings.Contains(name, "_") {
		name = strings.ReplaceAll(name, "_", "-")
	}
	return slices.ContainsFunc(steeringPrefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) })
}

// longestPattern is the largest size of a pattern of [SteeringPatterns], in bytes: the limit of Envoy Gateway.
const longestPattern = 1024

// SteeringPatterns returns regular expressions that together match the headers that steer, except for the [Hints].
// Envoy removes these headers from all requests before it selects a route. keep is as in [SteeringHeader].
func SteeringPatterns(keep []string) (patterns []string) {
	kept := slices.Concat(Hints, clientHeaders, keep)
	for _, prefix := range steeringPrefixes {
		var rest []string
		for _, name := range kept {
			if after, ok := strings.CutPrefix(name, prefix); ok && !slices.Contains(rest, after) {
				rest = append(rest, after)
			}
		}
		ways, whole := waysOtherThan(rest)
		if !whole {
			ways[0] = "(" + ways[0] + ")?"
		}
		for _, way := range ways {
			last := len(patterns) - 1
			if last >= 0 && len(patterns[last])+len("|")+len(prefix)+len(way) <= longestPattern {
				patterns[last] += "|" + prefix + way
				continue
			}
			patterns = append(patterns, prefix+way)
		}
	}
	return patterns
}

// SettableHeaders returns a regular expression of the headers that kvroute sets or removes.
func SettableHeaders() string {
	return "(" + strings.Join(steeringPrefixes, "|") + ").*|content-(type|length)|retry-after|allow"
}

// otherThan returns a regular expression of all texts except for some. RE2 has no negation.
func otherThan(texts []string) string {
	ways, whole := waysOtherThan(texts)
	if len(ways) == 1 { // one without a text, or with the empty one only
		return ways[0]
	}
	all := "(" + strings.Join(ways, "|") + ")"
	if whole {
		return all
	}
	return all + "?"
}

// waysOtherThan returns regular expressions that together match all texts except for some. The empty text is
// matched by none of them, unless texts is empty; whole says that no way may match it.
func waysOtherThan(texts []string) (ways []string, whole bool) {
	if len(texts) == 0 {
		return []string{".*"}, true
	}
	after := map[byte][]string{}
	for _, text := range texts {
		if text == "" {
			whole = true
			continue
		}
		after[text[0]] = append(after[text[0]], text[1:])
	}
	first := slices.Sorted(maps.Keys(after))
	if len(first) == 0 {
		return []string{".+"}, whole
	}
	ways = []string{"[^" + string(first) + "].*"} // a dash is the first of the bytes, so it is no range
	for _, c := range first {
		ways = append(ways, regexp.QuoteMeta(string(c))+otherThan(after[c]))
	}
	return ways, whole
}

// SteeringFields are kinds of fields of a body that steer.
type SteeringFields uint8

// The kinds, as a set.
const (
	FieldPins  SteeringFields = 1 << iota // name the worker or its rank to routers
	FieldHints                            // all others: peers, ranks and priorities of engines, hints for routers
)

// bodySteering are the fields of a body that steer, by their path. The fields of a name are steering only at
// these paths, never in messages, tools or schemas.
//
//nolint:gochecknoglobals // a table
var bodySteering = []struct {
	path string
	kind SteeringFields
	keep string // the member of the object that clients may set; "" for none
}{
	// vLLM: the peer of a transfer of blocks, the order of requests, and what the engine reports.
	{"kv_transfer_params", FieldHints, "prompt_token_ids"},
	{"ec_transfer_params", FieldHints, ""},
	{"priority", FieldHints, ""}, // SGLang's, too
	{"request_id", FieldHints, ""},
	{"vllm_xargs.kv_transfer_params", FieldHints, ""},
	{"vllm_xargs.ec_transfer_params", FieldHints, ""},
	{"vllm_xargs.kv_cache_report_mode", FieldHints, ""},
	{"vllm_xargs.kv_hints", FieldHints, ""},
	{"sampling_params.extra_args.kv_transfer_params", FieldHints, ""},
	{"sampling_params.extra_args.ec_transfer_params", FieldHints, ""},
	{"sampling_params.extra_args.kv_cache_report_mode", FieldHints, ""},
	{"sampling_params.extra_args.kv_hints", FieldHints, ""},
	// SGLang.
	{"bootstrap_host", FieldHints, ""},
	{"bootstrap_port", FieldHints, ""},
	{"bootstrap_room", FieldHints, ""},
	{"bootstrap_pair_key", FieldHints, ""},
	{"data_parallel_rank", FieldHints, ""},
	{"routed_dp_rank", FieldHints, ""},
	{"disagg_prefill_dp_rank", FieldHints, ""},
	{"routing_key", FieldHints, ""},
	{"rid", FieldHints, ""},
	{"http_worker_ipc", FieldHints, ""},
	{"kv_hints", FieldHints, ""},
	{"kv_router_hint", FieldHints, ""}, // has the address of an engine
	{"encoder_urls", FieldHints, ""},   // the scheduler sends requests to them, also without an image in the prompt
	{"num_items_assigned", FieldHints, ""},
	{"need_wait_for_mm_inputs", FieldHints, ""},
	// TensorRT-LLM.
	{"disaggregated_params", FieldHints, ""},
	{"kv_hint", FieldHints, ""},
	// Dynamo, and kvroute itself.
	{"nvext.backend_instance_id", FieldPins, ""},
	{"nvext.decode_worker_id", FieldPins, ""},
	{"nvext.prefill_worker_id", FieldPins, ""},
	{"nvext.dp_rank", FieldPins, ""},
	{"nvext.decode_dp_rank", FieldPins, ""},
	{"nvext.prefill_dp_rank", FieldPins, ""},
	{"nvext.agent_hints.priority", FieldHints, ""},
	{"nvext.agent_hints.strict_priority", FieldHints, ""},
	{"nvext.agent_hints.latency_sensitivity", FieldHints, ""},
	{"nvext.routing_constraints", FieldHints, ""},
	{"nvext.session_control", FieldHints, ""}, // opens a session, which takes memory of a worker, and binds requests to it
	{"nvext.router", FieldHints, ""},
	{"nvext.router_config_override", FieldHints, ""},
	{"router_config_override", FieldHints, ""},
}

// steeringNode is a field on a path of bodySteering: one that steers if it has a kind, else an object of fields.
type steeringNode struct {
	kind    SteeringFields
	keep    string
	members map[string]*steeringNode
}

//nolint:gochecknoglobals // the same table as a tree
var steeringTree = func() *steeringNode {
	root := new(steeringNode)
	for _, field := range bodySteering {
		at := root
		for name := range strings.SplitSeq(field.path, ".") {
			if at.members == nil {
				at.members = map[string]*steeringNode{}
			}
			if at.members[name] == nil {
				at.members[name] = new(steeringNode)
			}
			at = at.members[name]
		}
		at.kind, at.keep = field.kind, field.keep
	}
	return root
}()

// in returns the kinds of steering fields that the value of the field has.
func (n *steeringNode) in(v value) (kinds SteeringFields) {
	switch {
	case v == nil: // null is as good as absent
	case n.kind == 0:
		v.members(func(name []byte, v value) {
			if child := n.members[string(name)]; child != nil {
				kinds |= child.in(v)
			}
		})
	case n.keep == "" || v.kind() != '{':
		return n.kind
	default:
		v.members(func(name []byte, _ value) {
			if string(name) != n.keep {
				kinds = n.kind
			}
		})
	}
	return kinds
}

// RemoveSteering returns a body without its steering fields of some kinds. The body must be a valid JSON
// object. Escaped and repeated names are found; of a repeated object the last one stays, as engines read it.
func RemoveSteering(body []byte, kinds SteeringFields) []byte {
	object := trimmed(body)
	if steeringTree.in(object)&kinds == 0 {
		return body
	}
	return steeringTree.without(object, kinds)
}

func (n *steeringNode) without(in value, kinds SteeringFields) value {
	var edits []Member
	_ = readObject(&jsonscan.Scanner{In: in}, func(name []byte, v value) { // valid, so there is no error
		child := n.members[string(name)]
		if child == nil || child.kind != 0 && child.kind&kinds == 0 {
			return
		}
		m := Member{Name: string(name)}
		switch {
		case child.kind == 0:
			if m.Value = v; v.kind() == '{' {
				m.Value = child.without(v, kinds)
			}
		case child.keep != "":
			if kept := v.member(child.keep); kept != nil {
				m.Value = object(field{child.keep, kept})
			}
		}
		if i := slices.IndexFunc(edits, func(e Member) bool { return e.Name == m.Name }); i >= 0 {
			edits[i] = m
			return
		}
		edits = append(edits, m)
	})
	if edits == nil {
		return in
	}
	out := make(value, 0, len(in))
	for _, piece := range Edit(in, edits...) {
		out = append(out, piece...)
	}
	return out
}

// SteeringPath returns the path of a steering field of some kinds in a body, "" if there is none. The body
// must be a valid JSON object.
func SteeringPath(body []byte, kinds SteeringFields) string {
	return strings.TrimPrefix(steeringTree.path(trimmed(body), kinds), ".")
}

// trimmed returns a body without the white space in front of it, which [value] does not have.
func trimmed(body []byte) []byte { return bytes.TrimLeft(body, " \t\r\n") }

func (n *steeringNode) path(in value, kinds SteeringFields) (path string) {
	in.members(func(name []byte, v value) {
		child := n.members[string(name)]
		switch {
		case path != "" || child == nil || child.in(v)&kinds == 0:
		case child.kind != 0:
			path = "." + string(name)
		default:
			path = "." + string(name) + child.path(v, kinds)
		}
	})
	return path
}
