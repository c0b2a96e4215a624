// SPDX-License-Identifier: Apache-2.0

package envoy

import (
	"cmp"
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// samplePath is the path of the request that [Check] follows.
const samplePath = "/v1/chat/completions"

// maxDestinations limits the clusters whose requests are counted.
const maxDestinations = 16

// checkRoutes follows two requests through each virtual host: one before kvroute's answer, and one that has the
// header of it.
func (d *dumped) checkRoutes(where string, conf object, filters []extProc) {
	served := false
	for _, host := range conf.objects("virtual_hosts") {
		named := "the virtual host " + host.text("name")
		before, after := matched(host, false), matched(host, true)
		if before == nil && after == nil || before.at("direct_response") != nil && after.at("direct_response") != nil {
			continue // it does not serve the path
		}
		served = true
		if before == nil {
			d.report("%s has no route for %s without the header %s, so kvroute is never asked: add the last route of "+
				"kvroute config envoy --parts", named, samplePath, headerWorker)
			continue
		}
		if reflect.DeepEqual(before, after) && d.checkOrder(named, before, host, conf, filters) {
			continue
		}
		d.checkSettings(named, before, host, filters)
		for i := range filters {
			if filters[i].off(before, host, conf) {
				d.report("%s turns the filter %q off for %s: add typed_per_filter_config of the last route of kvroute config envoy --parts",
					named, filters[i].name, samplePath)
			}
		}
		if to := targets(after); !slices.ContainsFunc(to, func(name string) bool { return d.reads(name, 2) }) {
			d.report("%s sends requests that have the header %s to %s, which does not read it: put kvroute's routes before the route %s, "+
				"or add its clusters", named, headerWorker, described(to), after.title())
		}
		for _, r := range []object{before, after} {
			if t, ok := duration(r.at("route"), "timeout"); (!ok || t > 0 && t < time.Minute) && r.at("route") != nil {
				if !ok {
					t = 15 * time.Second
				}
				d.report("%s ends responses of %s after %v: set timeout: 0s on that route", named, described(targets(r)), t)
			}
		}
	}
	if !served {
		d.report("%s has no route for %s: add the routes of kvroute config envoy --parts", where, samplePath)
	}
}

// checkOrder finds a route of the virtual host that stands before kvroute's routes.
func (d *dumped) checkOrder(named string, first, host, conf object, filters []extProc) (found bool) {
	if found = !asks(filters, first, host, conf) && hostAsks(filters, host, conf); found {
		d.report("%s sends all requests for %s by the route %s, and none asks kvroute: put kvroute's routes before it", named, samplePath, first.title())
	}
	return found
}

// checkSettings finds what another route of the virtual host sets for filters of the same path, and the route that asks
// kvroute does not.
func (d *dumped) checkSettings(named string, asking, host object, filters []extProc) {
	for _, r := range host.objects("routes") {
		if !matchesPath(r.at("match")) || r.at("match")["headers"] != nil {
			continue
		}
		for _, name := range slices.Sorted(maps.Keys(r.at("typed_per_filter_config"))) {
			ours := slices.ContainsFunc(filters, func(f extProc) bool { return f.name == name })
			if !ours && asking.at("typed_per_filter_config", name) == nil && host.at("typed_per_filter_config", name) == nil {
				d.note("%s sets %s on the route %s, and not on kvroute's routes of the same path: put typed_per_filter_config on the "+
					"virtual host, or on each of them", named, name, r.title())
			}
		}
	}
}

// title names a route for a sentence.
func (o object) title() string {
	if name := o.text("name"); name != "" {
		return strconv.Quote(name)
	}
	for _, by := range []string{"prefix", "path", "path_separated_prefix"} {
		if value := o.at("match").text(by); value != "" {
			return fmt.Sprintf("with the %s %s", strings.ReplaceAll(by, "_", " "), value)
		}
	}
	return "with the expression " + o.at("match", "safe_regex").text("regex")
}

// destinations are names of clusters in Envoy's statistics.
type destinations struct {
	pools   []string // serve requests that have no worker
	readers []string // take the worker from kvroute's header
}

// counted returns an expression of the statistics that are read: those of the filter and of the clusters. Gateways give
// the filter another prefix, or none.
func (d *destinations) counted() *regexp.Regexp {
	quoted := func(names []string) string {
		var all []string
		for _, name := range names {
			all = append(all, regexp.QuoteMeta(name))
		}
		return strings.Join(all, "|")
	}
	return regexp.MustCompile(`\.ext_proc\.(?:(.*)\.)?(streams_started|streams_failed|failure_mode_allowed|message_timeouts)$|` +
		`^cluster\.(?:(` + quoted(d.pools) + `)|(worker[^.]*|` + quoted(d.readers) + `))\.upstream_rq_total$`)
}

// destinations returns the names of clusters as Envoy's statistics have them, in virtual hosts with a route that turns a
// filter of kvroute on.
func (d *dumped) destinations() (to destinations) {
	for _, m := range d.managers {
		filters, conf := m.extProcs(), d.routesOf(m)
		for _, host := range conf.objects("virtual_hosts") {
			if !hostAsks(filters, host, conf) {
				continue
			}
			for _, name := range append(targets(matched(host, false)), targets(matched(host, true))...) {
				names := &to.pools
				if d.reads(name, 2) {
					names = &to.readers
				}
				for _, name := range append([]string{name}, d.inner(name)...) {
					counted := strings.ReplaceAll(cmp.Or(d.clusters[name].text("alt_stat_name"), name), ":", "_")
					if !slices.Contains(*names, counted) && len(*names) < maxDestinations {
						*names = append(*names, counted)
					}
				}
			}
		}
	}
	return to
}

// routesOf returns the routes of a connection manager.
func (d *dumped) routesOf(m object) object {
	if conf := m.at("route_config"); conf != nil {
		return conf
	}
	return d.routes[m.at("rds").text("route_config_name")]
}

// matched returns the first route of a virtual host that a request for samplePath takes, nil if there is none. Routes
// that match on other headers than kvroute's are left out.
func matched(host object, named bool) object {
	for _, r := range host.objects("routes") {
		if m := r.at("match"); matchesPath(m) && !slices.ContainsFunc(m.objects("headers"), func(h object) bool { return !matchesHeader(h, named) }) {
			return r
		}
	}
	return nil
}

func matchesPath(m object) bool {
	prefix := strings.TrimSuffix(m.text("path_separated_prefix"), "/")
	switch {
	case m.text("prefix") != "":
		return strings.HasPrefix(samplePath, m.text("prefix"))
	case m.text("path") != "":
		return m.text("path") == samplePath
	case prefix != "":
		return samplePath == prefix || strings.HasPrefix(samplePath, prefix+"/")
	}
	return fullMatch(m.at("safe_regex"), samplePath)
}

// sampleWorker is the only address in the header of the request that [Check] follows.
const sampleWorker = "10.0.0.7:8000"

// matchesHeader reports whether a request matches that has kvroute's header with one address, or not, and no other
// header of kvroute.
func matchesHeader(h object, named bool) bool {
	name, value := h.text("name"), h.at("string_match")
	if name == ":method" {
		return value.text("exact") == "" || value.text("exact") == "POST"
	}
	present := named && name == headerWorker
	if value != nil {
		text, at := value.text("contains"), value.at("safe_regex")
		return present && (text != "" && strings.Contains(sampleWorker, text) || at != nil && fullMatch(at, sampleWorker))
	}
	return strings.HasPrefix(name, "x-dynamo-") && h["present_match"] != nil && present != (h["invert_match"] == true)
}

// fullMatch reports whether Envoy's expression matches the whole text.
func fullMatch(expression object, text string) bool {
	re, err := regexp.Compile("^(?:" + expression.text("regex") + ")$")
	return expression != nil && err == nil && re.MatchString(text)
}

// targets returns the clusters of a route.
func targets(r object) (names []string) {
	if name := r.at("route").text("cluster"); name != "" {
		names = append(names, name)
	}
	for _, c := range r.at("route", "weighted_clusters").objects("clusters") {
		names = append(names, c.text("name"))
	}
	return names
}

// described returns names for a sentence.
func described(names []string) string {
	if all := strings.Join(names, ", "); all != "" {
		return all
	}
	return "(no name)"
}

// reads reports whether a cluster takes the worker's address from kvroute's header, itself or by one of the clusters
// that it is made of.
func (d *dumped) reads(name string, depth int) bool {
	c := d.clusters[name]
	header := func(h string) bool { return h == headerWorker || h == "x-gateway-destination-endpoint" }
	if conf := c.at("original_dst_lb_config"); conf["use_http_header"] == true && header(conf.text("http_header_name")) {
		return true
	}
	for _, p := range c.at("load_balancing_policy").objects("policies") {
		for _, source := range p.at("typed_extension_config", "typed_config").objects("override_host_sources") {
			if header(source.text("header")) {
				return true
			}
		}
	}
	return depth > 0 && slices.ContainsFunc(d.inner(name), func(one string) bool { return d.reads(one, depth-1) })
}

// inner returns the clusters that a cluster is made of.
func (d *dumped) inner(name string) (names []string) {
	for _, one := range d.clusters[name].at("cluster_type", "typed_config").objects("clusters") {
		names = append(names, one.text("name"))
	}
	return names
}

// asks reports whether one of the filters runs for requests of a route.
func asks(filters []extProc, route, host, conf object) bool {
	return slices.ContainsFunc(filters, func(f extProc) bool { return !f.off(route, host, conf) })
}

// hostAsks reports whether one of the filters runs for a route of a virtual host.
func hostAsks(filters []extProc, host, conf object) bool {
	return slices.ContainsFunc(host.objects("routes"), func(r object) bool { return asks(filters, r, host, conf) })
}

// off reports whether a filter does not run for requests of a route.
func (f *extProc) off(route, host, conf object) bool {
	for _, o := range []object{route, host, conf} {
		if own := o.at("typed_per_filter_config", f.name); own != nil {
			return own["disabled"] == true
		}
	}
	return f.disabled
}
