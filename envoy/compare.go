// SPDX-License-Identifier: Apache-2.0

package envoy

import (
	"cmp"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/settings"
)

// Settings are the settings of kvroute that must fit those of Envoy. Zero values are not compared.
type Settings struct {
	DecisionTimeout time.Duration // Envoy's message_timeout must be longer
	LongestWait     time.Duration // with the queue and a prefill leg; Envoy's max_message_timeout must not be shorter
	MaxBodyBytes    int           // Envoy's request_body_buffer_limit, or the listener's buffer limit, must be equal
	SecondChoice    string        // "header", "list" or "none": which header Envoy reads must fit
}

const (
	// Envoy's defaults.
	messageTimeout = 200 * time.Millisecond
	listenerBuffer = 1 << 20
)

// used is what an Envoy's configuration says about kvroute. The zero value is that of an Envoy without kvroute.
type used struct {
	filters []filterTimes
	bodies  []int // limits of bodies of routes
	buffers []int // limits of listeners
	// Headers from which clusters take the address of a worker: the whole value, or a list of addresses.
	single, lists map[string]bool
	destinations
}

// filterTimes are the times of one ext_proc filter. Envoy writes durations as "2s".
type filterTimes struct {
	Prefix  string `json:"stat_prefix"`
	Message string `json:"message_timeout"`
	Longest string `json:"max_message_timeout"`
}

// parseDump finds the settings in Envoy's answer to /config_dump, wherever they stand: gateways have them in
// dynamic listeners and routes.
func parseDump(text []byte) (*used, error) {
	var dump any
	if err := json.Unmarshal(text, &dump); err != nil {
		return nil, fmt.Errorf("/config_dump is no JSON: %w", err)
	}
	u := &used{single: map[string]bool{}, lists: map[string]bool{}}
	u.walk(dump)
	u.destinations = newDumped(dump).destinations()
	var own []filterTimes
	for _, f := range u.filters {
		if f.Prefix == "kvroute" {
			own = append(own, f)
		}
	}
	if len(own) > 0 {
		u.filters = own
	}
	return u, nil
}

// walk reads a value and all values in it.
func (u *used) walk(v any) {
	switch v := v.(type) {
	case []any:
		for _, one := range v {
			u.walk(one)
		}
	case map[string]any:
		u.object(v)
		for _, one := range v {
			u.walk(one)
		}
	}
}

func (u *used) object(o map[string]any) {
	text := func(name string) string { s, _ := o[name].(string); return s }
	if strings.HasSuffix(text("@type"), ".ext_proc.v3.ExternalProcessor") && !strings.HasSuffix(text("stat_prefix"), "observer") {
		u.filters = append(u.filters, filterTimes{text("stat_prefix"), text("message_timeout"), text("max_message_timeout")})
	}
	if n, ok := number(o["request_body_buffer_limit"]); ok {
		u.bodies = append(u.bodies, n)
	}
	if _, isListener := o["filter_chains"]; isListener {
		n, ok := number(o["per_connection_buffer_limit_bytes"])
		if !ok {
			n = listenerBuffer
		}
		u.buffers = append(u.buffers, n)
	}
	if name := text("http_header_name"); name != "" {
		u.single[name] = true
	}
	sources, _ := o["override_host_sources"].([]any)
	for _, source := range sources {
		s, _ := source.(map[string]any)
		if name, _ := s["header"].(string); name != "" {
			u.lists[name] = true
		}
	}
}

// DiffersFromBootstrap returns a sentence with what does not fit the bootstrap that `kvroute config envoy` writes
// without flags, "" if all fits.
func (s Settings) DiffersFromBootstrap() string {
	var c Config
	settings.SetDefaults(&c)
	u := used{
		filters: []filterTimes{{Message: c.MessageTimeout.String(), Longest: c.longestTimeout().String()}},
		bodies:  []int{c.MaxBodyBytes},
		single:  map[string]bool{headerWorker: true, headerFallback: c.Failover == Composite},
	}
	return u.differs(s)
}

// differs returns a sentence with what does not fit, "" if all fits.
func (u *used) differs(s Settings) string {
	var all []string
	add := func(wrong bool, format string, values ...any) {
		if text := fmt.Sprintf(format, values...); wrong && !slices.Contains(all, text) {
			all = append(all, text)
		}
	}
	for _, f := range u.filters {
		message, _ := time.ParseDuration(f.Message) // Envoy's own text; empty is the default
		longest, _ := time.ParseDuration(f.Longest)
		message = cmp.Or(message, messageTimeout)
		add(message <= s.DecisionTimeout, "message_timeout is %v, but a decision may take %v (decision-timeout)", message, s.DecisionTimeout)
		add(max(longest, message) < s.LongestWait, "max_message_timeout is %v, but a request may wait %v (queue-wait of the queue, prefill-timeout, 0.5s)", longest, s.LongestWait)
	}
	bodies := u.bodies
	if len(bodies) == 0 && len(u.filters) > 0 {
		bodies = u.buffers
	}
	for _, n := range bodies {
		add(s.MaxBodyBytes > 0 && n != s.MaxBodyBytes, "the limit of request bodies is %d bytes, but that of max-body-bytes is %d", n, s.MaxBodyBytes)
	}
	add(s.SecondChoice == "header" && u.single[headerWorker] && !u.single[headerFallback],
		"no cluster reads the header %s, in which second-choice=header names the second worker", headerFallback)
	add(s.SecondChoice == "header" && u.lists[headerWorker] && len(u.single) == 0,
		"a cluster reads a list of workers from %s, but second-choice is header", headerWorker)
	add(s.SecondChoice == "list" && u.single[headerWorker],
		"a cluster reads one address from %s, but second-choice=list writes several", headerWorker)
	return strings.Join(all, "; ")
}
