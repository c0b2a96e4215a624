// SPDX-License-Identifier: Apache-2.0

package envoy

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/reach"
)

const (
	adminTime = 2 * time.Second // for one answer of Envoy
	maxDump   = 16 << 20        // bytes of Envoy's configuration

	headerWorker, headerFallback = "x-dynamo-worker", "x-dynamo-worker-fallback"
)

// Finding is something that an Envoy's configuration lacks.
type Finding struct {
	Note bool   // Envoy uses kvroute without it, but less well
	Text string // a sentence with what to change
}

// ReadDump returns the answer of an Envoy's admin endpoint to /config_dump.
func ReadDump(ctx context.Context, client *http.Client, admin string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, adminTime)
	defer cancel()
	text, err := reach.Get(ctx, client, "", strings.TrimRight(admin, "/")+"/config_dump", maxDump)
	if failure, ok := errors.AsType[*url.Error](err); ok {
		err = failure.Err // without the URL
	}
	return text, err
}

// Check finds out what an Envoy's configuration lacks to use kvroute. The dump is Envoy's answer to /config_dump. Check
// follows a request for /v1/chat/completions through each listener that has kvroute's filter: it does not see faults of
// other paths, and no faults of routes that match on headers other than kvroute's.
func Check(dump []byte) ([]Finding, error) {
	var all any
	if err := json.Unmarshal(dump, &all); err != nil {
		return nil, fmt.Errorf("/config_dump is no JSON: %w", err)
	}
	d := newDumped(all)
	asked := 0
	for _, m := range d.managers {
		filters := m.extProcs()
		asked += len(filters)
		if len(filters) > 0 {
			d.checkManager(m, filters)
		}
	}
	if asked == 0 {
		d.report("no listener has kvroute's filter (ext_proc): add http_filters of kvroute config envoy --parts")
	}
	return d.found, nil
}

// object is a message of Envoy as JSON. A nil object has no fields.
type object map[string]any

func (o object) text(field string) string { s, _ := o[field].(string); return s }

func (o object) list(field string) []any { l, _ := o[field].([]any); return l }

func (o object) at(path ...string) object {
	for _, field := range path {
		next, _ := o[field].(map[string]any)
		o = next
	}
	return o
}

func (o object) is(kind string) bool { return strings.HasSuffix(o.text("@type"), "."+kind) }

// objects returns the objects of a list.
func (o object) objects(field string) (all []object) {
	for _, v := range o.list(field) {
		one, _ := v.(map[string]any)
		all = append(all, one)
	}
	return all
}

// dumped is what a dump has, wherever it stands there, and what was found.
type dumped struct {
	managers []object
	routes   map[string]object // route configurations of the route discovery, by name
	clusters map[string]object
	found    []Finding
}

func newDumped(dump any) *dumped {
	d := &dumped{routes: map[string]object{}, clusters: map[string]object{}}
	d.walk(dump, "")
	return d
}

// walk reads a value and all values in it. The field is the one that has the value.
func (d *dumped) walk(v any, field string) {
	switch v := v.(type) {
	case []any:
		for _, one := range v {
			d.walk(one, field)
		}
	case map[string]any:
		o, name := object(v), object(v).text("name")
		switch {
		case o.is("HttpConnectionManager"):
			d.managers = append(d.managers, o)
		case o["virtual_hosts"] != nil:
			d.routes[name] = o
		case strings.HasPrefix(field, "cluster") && o["connect_timeout"] != nil, o.is("cluster.v3.Cluster"):
			d.clusters[name] = o
		}
		for field, one := range v {
			if field != "warming_state" && field != "draining_state" && field != "error_state" {
				d.walk(one, field)
			}
		}
	}
}

// report adds a finding once: static listeners and clusters are twice in a dump.
func (d *dumped) report(format string, values ...any) {
	d.add(Finding{Text: fmt.Sprintf(format, values...)})
}

func (d *dumped) note(format string, values ...any) {
	d.add(Finding{Note: true, Text: fmt.Sprintf(format, values...)})
}

func (d *dumped) add(f Finding) {
	if !slices.Contains(d.found, f) {
		d.found = append(d.found, f)
	}
}

// extProc is an ext_proc filter of a connection manager.
type extProc struct {
	name     string
	disabled bool // on routes that do not turn it on
	object
}

func (f *extProc) cluster() string { return f.at("grpc_service", "envoy_grpc").text("cluster_name") }

func (f *extProc) observes() bool { return f.object["observability_mode"] == true }

// extProcs returns the filters of a connection manager that ask kvroute: those whose names or clusters have "kvroute"
// in them, or all filters of external processors if no name has it.
func (o object) extProcs() (own []extProc) {
	var all []extProc
	for _, f := range o.objects("http_filters") {
		conf := f.at("typed_config")
		if inner := conf.at("extension_config", "typed_config"); inner != nil {
			conf = inner
		}
		if !conf.is("ext_proc.v3.ExternalProcessor") {
			continue
		}
		one := extProc{name: f.text("name"), disabled: f["disabled"] == true, object: conf}
		all = append(all, one)
		if strings.Contains(one.name+conf.text("stat_prefix")+one.cluster(), "kvroute") {
			own = append(own, one)
		}
	}
	if len(own) == 0 {
		return all
	}
	return own
}

// admissions are types of filters that may refuse a request.
var admissions = regexp.MustCompile(`\.(cors|local_ratelimit|ratelimit|rate_limit_quota|jwt_authn|ext_authz|rbac|basic_auth|api_key_auth|oauth2)\.`)

// behind returns the names of the filters behind another one that may refuse a request.
func (o object) behind(first string) (names []string) {
	found := false
	for _, f := range o.objects("http_filters") {
		if name := f.text("name"); found && admissions.MatchString(f.at("typed_config").text("@type")) {
			names = append(names, name)
		} else {
			found = found || name == first
		}
	}
	return names
}

// checkManager checks a connection manager that has filters of kvroute.
func (d *dumped) checkManager(m object, filters []extProc) {
	where := "the listener with stat_prefix " + m.text("stat_prefix")
	observed := 0
	var main *extProc
	for i := range filters {
		f := &filters[i]
		d.checkFilter(f)
		if f.observes() {
			observed++
		} else {
			main = f
		}
	}
	if main == nil {
		d.report("%s has only the observer of kvroute: add the filter kvroute of kvroute config envoy --parts", where)
		return
	}
	if observed == 0 {
		d.note("%s has no observer (ext_proc with observability_mode), so kvroute learns of the first token only from "+
			"response headers: add the filter kvroute-observer, or start kvroute with --first-token=response-headers", where)
	}
	if !m.strips(headerWorker) {
		d.report("%s does not remove the header %s of clients before it chooses a route, so that a client can name any address: "+
			"add early_header_mutation_extensions of kvroute config envoy --parts", where, headerWorker)
	}
	if t, ok := duration(m, "stream_idle_timeout"); ok && t > 0 && t < 10*time.Minute || !ok {
		d.note("%s ends responses that are silent for %v (stream_idle_timeout), as before a first token; kvroute config envoy sets 1h",
			where, cmp.Or(t, 5*time.Minute))
	}
	for _, f := range m.behind(main.name) {
		d.note("%s has the filter %s behind kvroute's: kvroute also gets requests that it refuses; put kvroute's filters behind it", where, f)
	}
	d.checkRoutes(where, d.routesOf(m), filters)
}

// checkFilter checks an ext_proc filter, and its cluster.
func (d *dumped) checkFilter(f *extProc) {
	name, cluster := fmt.Sprintf("the filter %q", f.name), f.cluster()
	c := d.clusters[cluster]
	switch options := c.at("typed_extension_protocol_options", "envoy.extensions.upstreams.http.v3.HttpProtocolOptions"); {
	case c == nil:
		d.report("%s asks the cluster %q, which does not exist: add the cluster kvroute", name, cluster)
	case options.at("explicit_http_config", "http2_protocol_options") == nil && c.at("http2_protocol_options") == nil:
		d.report("the cluster %q of %s does not use HTTP/2, which gRPC needs: add typed_extension_protocol_options of the cluster kvroute",
			cluster, name)
	}
	if f.object["failure_mode_allow"] != true {
		d.report("%s ends all its responses if kvroute stops: set failure_mode_allow: true", name)
	}
	limit := 1024.0
	for _, t := range c.at("circuit_breakers").objects("thresholds") {
		if n, ok := number(t["max_requests"]); ok && t.text("priority") != "HIGH" {
			limit = float64(n)
		}
	}
	if c != nil && limit <= 1024 {
		d.note("at most %.0f requests at once reach kvroute (max_requests of the cluster %q): more of them go on without it", limit, cluster)
	}
	mode := f.at("processing_mode")
	if f.observes() {
		if b := mode.text("response_body_mode"); b != "STREAMED" {
			d.report("%s does not see the first token: set response_body_mode: STREAMED", name)
		}
		return
	}
	overrides := f.object["allow_mode_override"] == true // kvroute's --mode-override then sets the modes
	switch b := mode.text("request_body_mode"); {
	case mode.text("request_header_mode") == "SKIP":
		d.report("%s does not send request headers: set request_header_mode: SEND", name)
	case b == "" || b == "NONE":
		d.report("%s does not send request bodies, so that kvroute does not know the prompt: set request_body_mode: BUFFERED", name)
	case mode.text("response_trailer_mode") != "SEND" && !overrides:
		d.report("%s may end before the response does: set response_trailer_mode: SEND", name)
	}
	if mode.text("response_header_mode") == "SKIP" && !overrides {
		d.note("%s does not send response headers, so kvroute does not learn which worker answered: set response_header_mode: SEND", name)
	}
	if !f.maySet(headerWorker) {
		d.report("%s drops the header %s that kvroute sets: copy mutation_rules of kvroute config envoy --parts", name, headerWorker)
	}
	if !slices.Contains(f.list("response_attributes"), any("upstream.address")) {
		d.note("%s does not report which worker answered after a retry: set response_attributes: [upstream.address, "+
			"upstream.request_attempt_count, response.code_details]", name)
	}
}

// maySet reports whether the filter's rules let kvroute set a header.
func (f *extProc) maySet(header string) bool {
	rules := f.at("mutation_rules")
	return !fullMatch(rules.at("disallow_expression"), header) &&
		(rules["disallow_all"] != true || fullMatch(rules.at("allow_expression"), header))
}

// strips reports whether a connection manager removes a header before it chooses a route.
func (o object) strips(header string) bool {
	for _, e := range o.objects("early_header_mutation_extensions") {
		for _, change := range e.at("typed_config").objects("mutations") {
			match := change.at("remove_on_match", "key_matcher")
			if strings.EqualFold(change.text("remove"), header) || match.text("exact") == header ||
				match.text("prefix") != "" && strings.HasPrefix(header, match.text("prefix")) ||
				fullMatch(match.at("safe_regex"), header) {
				return true
			}
		}
	}
	return false
}

// duration reads a field such as "15s".
func duration(o object, field string) (time.Duration, bool) {
	d, err := time.ParseDuration(o.text(field))
	return d, err == nil
}

// number reads a number as Envoy writes it: 64-bit ones are texts.
func number(v any) (n int, ok bool) {
	switch v := v.(type) {
	case float64:
		return int(v), true
	case string:
		_, err := fmt.Sscan(v, &n)
		return n, err == nil
	}
	return 0, false
}
