// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// Replicas change while the doctor reads them, and it cannot read all of them at one
// moment. So it reads each replica several times. Two replicas differ only if no reading
// of one agrees with a reading of the other: no text in common, or ranges of numbers that
// do not overlap. A change that is still on its way takes less time than lies between two
// readings, so it is not reported.

// severity says how serious a finding is.
type severity string

const (
	different severity = "different" // replicas do not agree
	fault     severity = "fault"     // of one replica alone
	note      severity = "note"      // allowed, but possibly unexpected
)

// finding is a difference between replicas, or a fault of one.
type finding struct {
	Level severity `json:"level"`
	What  string   `json:"what"`
	// Of is the worker, model or setting that differs. Replica is the replica that has a
	// fault. Values are what each replica says, by its name.
	Of      string            `json:"of,omitempty"`
	Replica string            `json:"replica,omitempty"`
	Values  map[string]string `json:"values,omitempty"`
	Text    string            `json:"text"`
}

// text is the finding in words.
func (f *finding) text() string {
	if f.Replica != "" {
		return f.Replica + ": " + f.Text
	}
	return f.Text
}

// count returns how many findings have one of the levels.
func count(all []finding, levels ...severity) (n int) {
	for i := range all {
		if slices.Contains(levels, all[i].Level) {
			n++
		}
	}
	return n
}

// serious returns how many findings are not notes.
func serious(all []finding) int { return count(all, different, fault) }

// tolerance is by how much replicas may differ.
type tolerance struct {
	requests, tokens, blocks int
	clock                    time.Duration
}

// diagnosis collects findings.
type diagnosis struct {
	all       []*examined       // the replicas that answered
	names     map[uint64]string // of these replicas, by id
	tolerance tolerance
	found     []finding
}

// diagnose checks each replica and compares all of them. Every replica must have a name.
func diagnose(all []*examined, t tolerance) []finding {
	d := diagnosis{tolerance: t, names: map[uint64]string{}}
	for _, x := range all {
		if x.err != nil {
			d.report(fault, x, "answer", "it cannot be asked: %v", x.err)
			continue
		}
		d.all = append(d.all, x)
		d.names[x.last().RouterID] = x.name
	}
	for _, x := range d.all {
		d.checkReplica(x)
		d.checkWorkers(x)
	}
	d.checkIdentities()
	d.checkClocks()
	d.compareFacts()
	d.checkPeers()
	return d.found
}

func (d *diagnosis) report(level severity, x *examined, what, format string, args ...any) {
	d.found = append(d.found, finding{Level: level, What: what, Replica: x.name, Text: fmt.Sprintf(format, args...)})
}

// always reports whether a condition holds in every reading of a replica.
func (x *examined) always(is func(*reading) bool) bool {
	return !slices.ContainsFunc(x.readings, func(r reading) bool { return !is(&r) })
}

// checkReplica reports what is wrong with a replica in all of its readings.
func (d *diagnosis) checkReplica(x *examined) {
	last := x.last()
	if !x.always(func(r *reading) bool { return r.RouterID == last.RouterID }) {
		d.report(fault, x, "identity", "its answers come from several replicas, or it has just started again: is the URL that of a balancer?")
	}
	if x.always(func(r *reading) bool { return !r.Bus }) {
		d.report(fault, x, "bus", "NATS is away: it neither hears of workers nor of other replicas")
	}
	for _, check := range slices.Sorted(maps.Keys(last.Ready.Checks)) {
		if x.always(func(r *reading) bool { return !r.Ready.Checks[check] }) && (check != "workers" || len(last.workers) > 0) {
			d.report(fault, x, "ready", "it is %s: the check %q fails", last.Ready.Status, check)
		}
	}
	if x.always(func(r *reading) bool { return len(r.workers) == 0 }) {
		d.report(fault, x, "workers", "it knows no worker")
	}
	for _, m := range last.models {
		if len(m.BlockSizes) > 1 {
			d.report(note, x, "models", "model %s has workers with blocks of %v tokens, whose caches never meet", m.Model, m.BlockSizes)
		}
	}
}

// howToPublish tells an operator what to do when a worker sends no events.
const howToPublish = "start vLLM with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\",\"topic\":\"kv-events\"}' " +
	"and set events: {transport: zmq} for the worker, or events: {transport: none} if it publishes none"

// checkWorkers reports workers whose events or health are not as they should be.
func (d *diagnosis) checkWorkers(x *examined) {
	last := x.last()
	for i := range last.workers {
		w := &last.workers[i]
		name := nameOf(w.Worker, w.Name)
		lasting := x.always(func(r *reading) bool {
			return slices.ContainsFunc(r.workers, func(s router.WorkerState) bool { return s.Worker == w.Worker && s.KVEvents == w.KVEvents })
		})
		fromEngine := w.Transport == "zmq" || w.Transport == "http_poll"
		switch {
		case !lasting:
		case w.KVEvents == "suspect", w.KVEvents == "partial", w.KVEvents == "block_size_mismatch":
			d.report(fault, x, "events", "what worker %s caches is not known in full: its events are %s", name, w.KVEvents)
		case w.KVEvents == "none" && (fromEngine || w.NeverHeard):
			d.report(fault, x, "events", "no cache events of worker %s have come: %s", name, howToPublish)
		}
		if w.Health != router.Healthy.String() {
			d.report(note, x, "health", "worker %s is %s", name, w.Health)
		}
		if w.Failing {
			d.report(note, x, "health", "worker %s is avoided, since it failed lately", name)
		}
	}
}

// checkIdentities reports URLs behind which the same replica answers.
func (d *diagnosis) checkIdentities() {
	byID := map[uint64]*examined{}
	for _, x := range d.all {
		id := x.last().RouterID
		if other := byID[id]; other != nil {
			d.report(fault, x, "identity", "it is the same process as %s", other.name)
		}
		byID[id] = x
	}
}

func (d *diagnosis) checkClocks() {
	if len(d.all) == 0 {
		return
	}
	byClock := func(a, b *examined) int { return cmp.Compare(a.ahead, b.ahead) }
	slow, fast := slices.MinFunc(d.all, byClock), slices.MaxFunc(d.all, byClock)
	if apart := fast.ahead - slow.ahead; apart > d.tolerance.clock {
		d.report(note, fast, "clock", "its clock is %v before that of %s; that harms no decision", apart.Round(time.Millisecond), slow.name)
	}
}

// fact names a value that every replica reports. Of is the worker, model or setting.
type fact struct{ what, of string }

// absent is the value of a fact that a replica does not report. Facts that are not in this map are
// compared only among the replicas that report them.
//
//nolint:gochecknoglobals // a table
var absent = map[string]string{"worker": "unknown", "model": "unknown", "setting": "unknown", "busy thresholds": "", "requests of": "not heard"}

// facts returns what a replica reports in one reading: strings and ints. Requests are compared only
// where replicas exchange them; asked are the names of all replicas.
func (r *reading) facts(synced bool, asked map[uint64]string) map[fact]any {
	all := map[fact]any{{"version", ""}: r.Version, {"scope", ""}: r.Scope, {"hash seed", ""}: strconv.Itoa(r.HashSeed)}
	for name, value := range r.Settings {
		all[fact{"setting", name}] = ""
		if value != nil {
			all[fact{"setting", name}] = fmt.Sprint(value)
		}
	}
	for _, m := range r.models {
		all[fact{"model", m.Model}] = fmt.Sprintf("%v, blocks of %v, tokens: %s", m.Names, m.BlockSizes, m.TokenMode)
	}
	if r.Synced {
		all[fact{"requests of", asked[r.RouterID]}] = r.ActiveRequests
		for _, p := range r.Peers {
			all[fact{"requests of", asked[p.RouterID]}] = p.ActiveRequests
		}
		delete(all, fact{"requests of", ""})
	}
	if r.contents != "" {
		all[fact{"contents", ""}] = r.contents
	}
	for model, value := range r.thresholds { // the API may have changed them since the start
		all[fact{"busy thresholds", model}] = value
	}
	for i := range r.workers {
		w := &r.workers[i]
		name := nameOf(w.Worker, w.Name)
		for what, value := range map[string]any{
			"worker": "known", "address": w.Address.String(), "served model": fmt.Sprint(w.Model, " ", w.LoRA), "role": string(w.Role),
			"block size": strconv.Itoa(w.BlockSize), "health": w.Health, "draining": strconv.FormatBool(w.Draining),
			"taints": fmt.Sprint(w.Taints), "events": w.KVEvents, "cached blocks": w.CachedBlocks,
		} {
			all[fact{what, name}] = value
		}
		if synced {
			all[fact{"active requests", name}], all[fact{"pending tokens", name}] = w.ActiveRequests, w.PendTokens
		}
	}
	return all
}

// compareFacts reports the facts in which replicas differ.
func (d *diagnosis) compareFacts() {
	synced := slices.ContainsFunc(d.all, func(x *examined) bool { return x.readings[0].Synced })
	if !synced && len(d.all) > 1 {
		d.found = append(d.found, finding{Level: note, What: "sync", Text: "the replicas do not exchange their requests (--router-replica-sync), so their loads are not compared"})
	}
	values := map[fact][]span{} // by replica
	var blocks span
	for i, x := range d.all {
		for j := range x.readings {
			_, cached, _ := x.readings[j].sums()
			blocks.add(cached)
			for f, value := range x.readings[j].facts(synced, d.names) {
				if values[f] == nil {
					values[f] = make([]span, len(d.all))
				}
				values[f][i].add(value)
			}
		}
	}
	tolerated := map[string]int{"cached blocks": d.tolerance.blocks, "active requests": d.tolerance.requests, "requests of": d.tolerance.requests, "pending tokens": d.tolerance.tokens}
	inOrder := func(a, b fact) int { return cmp.Or(cmp.Compare(a.what, b.what), cmp.Compare(a.of, b.of)) }
	for _, f := range slices.SortedFunc(maps.Keys(values), inOrder) {
		spans, said := values[f], map[string]string{}
		for i, x := range d.all {
			if value, compared := absent[f.what]; compared && spans[i].readings < len(x.readings) && (f.what != "requests of" || x.last().Synced) {
				spans[i].add(value)
			}
			said[x.name] = spans[i].String()
		}
		if farthest(spans) <= tolerated[f.what] || f.what == "contents" && blocks.low < blocks.high { // changing contents are not compared
			continue
		}
		level := different
		if f.what == "version" {
			level = note
		}
		d.found = append(d.found, difference(level, f, said))
	}
}

// difference is a finding that names each value with its replicas.
func difference(level severity, f fact, said map[string]string) finding {
	replicasOf := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(said)) {
		replicasOf[said[name]] = append(replicasOf[said[name]], name)
	}
	var parts []string
	for _, value := range slices.Sorted(maps.Keys(replicasOf)) {
		parts = append(parts, value+" at "+strings.Join(replicasOf[value], ", "))
	}
	subject := strings.TrimSpace(f.what + " " + f.of)
	if absent[f.what] == "" && f.of != "" {
		subject = f.what + " of " + f.of
	}
	return finding{Level: level, What: f.what, Of: f.of, Values: said, Text: subject + ": " + strings.Join(parts, "; ")}
}

// span holds the values of a fact in a replica's readings: texts, a range of numbers, or both if
// some readings lack the fact.
type span struct {
	texts     []string
	numbers   bool
	low, high int
	readings  int
}

func (s *span) add(value any) {
	switch v := value.(type) {
	case int:
		if !s.numbers {
			s.numbers, s.low, s.high = true, v, v
		}
		s.low, s.high = min(s.low, v), max(s.high, v)
	case string:
		if !slices.Contains(s.texts, v) {
			s.texts = append(s.texts, v)
		}
	}
	s.readings++
}

func (s *span) String() string {
	switch {
	case s.readings == 0:
		return "unknown"
	case !s.numbers:
		return cmp.Or(strings.Join(slices.Sorted(slices.Values(s.texts)), " or "), "none")
	case s.low == s.high:
		return strconv.Itoa(s.low)
	}
	return fmt.Sprintf("%d..%d", s.low, s.high)
}

// apart is the distance of two spans: 0 if they overlap, or one has no value.
func apart(a, b *span) int {
	switch {
	case a.readings == 0 || b.readings == 0:
		return 0
	case a.numbers && b.numbers:
		return max(0, a.low-b.high, b.low-a.high)
	case slices.ContainsFunc(a.texts, func(text string) bool { return slices.Contains(b.texts, text) }):
		return 0
	}
	return math.MaxInt
}

// farthest is the largest distance of two spans.
func farthest(all []span) (far int) {
	for i := range all {
		for j := range i {
			far = max(far, apart(&all[i], &all[j]))
		}
	}
	return far
}

// checkPeers reports replicas that the doctor did not read, and replicas that miss requests of
// others.
func (d *diagnosis) checkPeers() {
	notAsked := map[uint64]string{}
	for _, x := range d.all {
		for _, p := range x.last().Peers {
			name := d.names[p.RouterID]
			missesSome := x.always(func(r *reading) bool {
				return slices.ContainsFunc(r.Peers, func(q replicas.PeerView) bool { return q.RouterID == p.RouterID && !q.Whole })
			})
			switch {
			case name == "":
				notAsked[p.RouterID] = cmp.Or(p.Replica, strconv.FormatUint(p.RouterID, 10))
			case missesSome:
				d.report(note, x, "replica", "it is not sure to hold all requests of %s, and asks for them", name)
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(notAsked)) {
		d.found = append(d.found, finding{Level: note, What: "replica", Of: notAsked[id], Text: fmt.Sprintf("replica %s (%d) is heard by others, but was not asked: give its --url, too", notAsked[id], id)})
	}
}
