// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// What replicas say changes while they are asked, and they are not asked at one moment.
// So each is asked several times, and two replicas differ only if no reading of the one
// agrees with a reading of the other: texts of which the one has seen none of the other's,
// numbers whose ranges do not meet. A change that is on its way takes less time than lies
// between two readings, so it does meet; a lasting difference does not.

// severity says how serious a finding is.
type severity string

const (
	different severity = "different" // replicas do not agree
	fault     severity = "fault"     // of one replica by itself
	note      severity = "note"      // to know; replicas may be so
)

// finding is something that the doctor found.
type finding struct {
	Level severity `json:"level"`
	What  string   `json:"what"`
	// Of is the worker, model or setting that the finding is about, Replica the replica.
	// Values are what each replica says, by its name; Text is in words, where there are
	// no values.
	Of      string            `json:"of,omitempty"`
	Replica string            `json:"replica,omitempty"`
	Values  map[string]string `json:"values,omitempty"`
	Text    string            `json:"text,omitempty"`
}

// text puts a finding into words.
func (f *finding) text() string {
	switch {
	case f.Text != "" && f.Replica != "":
		return f.Replica + ": " + f.Text
	case f.Text != "":
		return f.Text
	}
	by := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(f.Values)) {
		by[f.Values[name]] = append(by[f.Values[name]], name)
	}
	var parts []string
	for _, value := range slices.Sorted(maps.Keys(by)) {
		parts = append(parts, value+" at "+strings.Join(by[value], ", "))
	}
	subject := f.What
	switch {
	case f.Of == "":
	case absent[f.What] != "":
		subject += " " + f.Of
	default:
		subject += " of " + f.Of
	}
	return subject + ": " + strings.Join(parts, "; ")
}

// count returns how many findings are of one of the levels.
func count(all []finding, levels ...severity) (n int) {
	for i := range all {
		if slices.Contains(levels, all[i].Level) {
			n++
		}
	}
	return n
}

// serious returns how many findings are no notes.
func serious(all []finding) int { return count(all, different, fault) }

// tolerance is by how much replicas may differ.
type tolerance struct {
	requests, tokens, blocks int
	clock                    time.Duration
}

// diagnosis collects findings.
type diagnosis struct {
	all       []*examined // that answered
	tolerance tolerance
	found     []finding
}

// diagnose compares replicas, which have names, and looks at each by itself.
func diagnose(all []*examined, t tolerance) []finding {
	d := diagnosis{tolerance: t}
	for _, x := range all {
		if x.err != nil {
			d.say(fault, x, "answer", "it cannot be asked: %v", x.err)
			continue
		}
		d.all = append(d.all, x)
	}
	for _, x := range d.all {
		d.alone(x)
	}
	d.identities()
	d.compare()
	d.contents()
	d.peers()
	return d.found
}

func (d *diagnosis) say(level severity, x *examined, what, format string, args ...any) {
	d.found = append(d.found, finding{Level: level, What: what, Replica: x.name, Text: fmt.Sprintf(format, args...)})
}

// howToPublish tells an operator what to do when a worker sends no events.
const howToPublish = "start vLLM with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\",\"topic\":\"kv-events\"}' " +
	"and set events: {transport: zmq} for the worker, or events: {transport: none} if it publishes none"

// alone looks at a replica by itself. A fault shows in all of its readings.
func (d *diagnosis) alone(x *examined) {
	last := x.last()
	always := func(is func(*reading) bool) bool {
		return !slices.ContainsFunc(x.readings, func(r reading) bool { return !is(&r) })
	}
	if !always(func(r *reading) bool { return r.RouterID == last.RouterID }) {
		d.say(fault, x, "identity", "its answers come from several replicas, or it has just started again: is the URL that of a balancer?")
	}
	if always(func(r *reading) bool { return !r.Bus }) {
		d.say(fault, x, "bus", "NATS is away: it neither hears of workers nor of other replicas")
	}
	for _, check := range slices.Sorted(maps.Keys(last.Ready.Checks)) {
		if always(func(r *reading) bool { return !r.Ready.Checks[check] }) && (check != "workers" || len(last.workers) > 0) {
			d.say(fault, x, "ready", "it is %s: the check %q fails", last.Ready.Status, check)
		}
	}
	if always(func(r *reading) bool { return len(r.workers) == 0 }) {
		d.say(fault, x, "workers", "it knows no worker")
	}
	for i := range last.workers {
		w := &last.workers[i]
		name := nameOf(w.Worker, w.Name)
		lasting := always(func(r *reading) bool {
			return slices.ContainsFunc(r.workers, func(s router.WorkerState) bool { return s.Worker == w.Worker && s.KVEvents == w.KVEvents })
		})
		direct := w.Transport == "zmq" || w.Transport == "http_poll"
		switch {
		case !lasting:
		case w.KVEvents == "suspect", w.KVEvents == "partial", w.KVEvents == "block_size_mismatch":
			d.say(fault, x, "events", "what worker %s caches is not known in full: its events are %s", name, w.KVEvents)
		case w.KVEvents == "none" && (direct || w.NeverHeard):
			d.say(fault, x, "events", "no cache events of worker %s have come: %s", name, howToPublish)
		}
		if w.Health != router.Healthy.String() {
			d.say(note, x, "health", "worker %s is %s", name, w.Health)
		}
		if w.Failing {
			d.say(note, x, "health", "worker %s is avoided, since it failed lately", name)
		}
	}
	for _, m := range last.models {
		if len(m.BlockSizes) > 1 {
			d.say(note, x, "models", "model %s has workers with blocks of %v tokens, whose caches never meet", m.Model, m.BlockSizes)
		}
	}
}

// identities looks for one replica behind two URLs, and at clocks.
func (d *diagnosis) identities() {
	by := map[uint64]*examined{}
	for _, x := range d.all {
		id := x.last().RouterID
		if other := by[id]; other != nil {
			d.say(fault, x, "identity", "it is the same process as %s", other.name)
		}
		by[id] = x
	}
	if len(d.all) == 0 {
		return
	}
	byClock := func(a, b *examined) int { return cmp.Compare(a.ahead, b.ahead) }
	slow, quick := slices.MinFunc(d.all, byClock), slices.MaxFunc(d.all, byClock)
	if apart := quick.ahead - slow.ahead; apart > d.tolerance.clock {
		d.say(note, quick, "clock", "its clock is %v before that of %s; that harms no decision", apart.Round(time.Millisecond), slow.name)
	}
}

// fact is something that every replica says: what it is, and of which worker, model or
// setting. Its value is a string or an int.
type fact struct {
	what, of string
	value    any
}

// absent is the value of facts that a replica does not say. Other facts are compared only
// among replicas that say them.
//
//nolint:gochecknoglobals // a table
var absent = map[string]string{"worker": "unknown", "model": "unknown", "setting": "unknown", "busy thresholds": ""}

// facts returns what a replica said at one time. The requests of workers are compared
// only where replicas exchange them.
func (r *reading) facts(synced bool) []fact {
	all := []fact{{"version", "", r.Version}, {"scope", "", r.Scope}, {"hash seed", "", strconv.Itoa(r.HashSeed)}}
	for _, name := range slices.Sorted(maps.Keys(r.Settings)) {
		value := ""
		if r.Settings[name] != nil {
			value = shown(r.Settings[name])
		}
		all = append(all, fact{"setting", name, value})
	}
	for _, m := range r.models {
		all = append(all, fact{"model", m.Model, fmt.Sprintf("%v, blocks of %v, tokens: %s", m.Names, m.BlockSizes, m.TokenMode)})
	}
	for _, model := range slices.Sorted(maps.Keys(r.thresholds)) { // the API may have changed them since the start
		all = append(all, fact{"busy thresholds", model, r.thresholds[model]})
	}
	for i := range r.workers {
		w := &r.workers[i]
		id := nameOf(w.Worker, "")
		all = append(all,
			fact{"worker", id, "known"},
			fact{"address", id, w.Address.String()},
			fact{"served model", id, fmt.Sprint(w.Model, " ", w.LoRA)},
			fact{"role", id, string(w.Role)},
			fact{"block size", id, strconv.Itoa(w.BlockSize)},
			fact{"health", id, w.Health},
			fact{"draining", id, strconv.FormatBool(w.Draining)},
			fact{"taints", id, fmt.Sprint(w.Taints)},
			fact{"events", id, w.KVEvents},
			fact{"cached blocks", id, w.CachedBlocks})
		if synced {
			all = append(all, fact{"active requests", id, w.ActiveRequests}, fact{"pending tokens", id, w.PendTokens})
		}
	}
	return all
}

// shown prints a value that came as JSON, numbers in full.
func shown(value any) string {
	if number, ok := value.(float64); ok {
		return strconv.FormatFloat(number, 'f', -1, 64)
	}
	return fmt.Sprint(value)
}

// compare compares the facts of all replicas.
func (d *diagnosis) compare() {
	synced := slices.ContainsFunc(d.all, func(x *examined) bool { return x.readings[0].Synced })
	if !synced && len(d.all) > 1 {
		d.found = append(d.found, finding{Level: note, What: "sync", Text: "the replicas do not exchange their requests (--router-replica-sync), so their loads are not compared"})
	}
	var order []fact // without values
	values := map[fact][][]any{}
	for i, x := range d.all {
		for j := range x.readings {
			for _, f := range x.readings[j].facts(synced) {
				value := f.value
				f.value = nil
				if values[f] == nil {
					order, values[f] = append(order, f), make([][]any, len(d.all))
				}
				values[f][i] = append(values[f][i], value)
			}
		}
	}
	names, tolerated := d.names(), map[string]int{"cached blocks": d.tolerance.blocks, "active requests": d.tolerance.requests, "pending tokens": d.tolerance.tokens}
	for _, f := range order {
		said, all := map[string]string{}, make([]span, len(d.all))
		for i, x := range d.all {
			if value, known := absent[f.what]; known && len(values[f][i]) < len(x.readings) {
				values[f][i] = append(values[f][i], value)
			}
			for _, v := range values[f][i] {
				all[i].add(v)
			}
			said[x.name] = all[i].String()
		}
		if farthest(all) > tolerated[f.what] {
			level := different
			if f.what == "version" {
				level = note
			}
			d.found = append(d.found, finding{Level: level, What: f.what, Of: cmp.Or(names[f.of], f.of), Values: said})
		}
	}
}

// names returns the names of workers by their ids in facts.
func (d *diagnosis) names() map[string]string {
	names := map[string]string{}
	for _, x := range d.all {
		for i := range x.readings {
			for _, w := range x.readings[i].workers {
				names[nameOf(w.Worker, "")] = nameOf(w.Worker, w.Name)
			}
		}
	}
	return names
}

// span is what a fact was in the readings of a replica.
type span struct {
	texts     []string
	low, high int // of numbers
	some      bool
}

func (s *span) add(value any) {
	switch v := value.(type) {
	case int:
		if !s.some {
			s.low, s.high = v, v
		}
		s.low, s.high = min(s.low, v), max(s.high, v)
	case string:
		if !slices.Contains(s.texts, v) {
			s.texts = append(s.texts, v)
		}
	}
	s.some = true
}

func (s *span) String() string {
	switch {
	case !s.some:
		return "unknown"
	case s.texts != nil:
		return cmp.Or(strings.Join(slices.Sorted(slices.Values(s.texts)), " or "), "none")
	case s.low == s.high:
		return strconv.Itoa(s.low)
	}
	return fmt.Sprintf("%d..%d", s.low, s.high)
}

// apart is how far two spans are from each other: 0 if they meet, or one has no value.
func apart(a, b *span) int {
	switch {
	case !a.some || !b.some:
		return 0
	case a.texts == nil:
		return max(0, a.low-b.high, b.low-a.high)
	case slices.ContainsFunc(a.texts, func(text string) bool { return slices.Contains(b.texts, text) }):
		return 0
	}
	return 1
}

// farthest is how far the farthest two spans are from each other.
func farthest(all []span) (far int) {
	for i := range all {
		for j := range i {
			far = max(far, apart(&all[i], &all[j]))
		}
	}
	return far
}

// contents compares which blocks each worker is known to hold, where that was read. Where
// the numbers moved between readings, it says nothing.
func (d *diagnosis) contents() {
	names := d.names()
	for _, id := range slices.Sorted(maps.Keys(names)) {
		values, digests, numbers := map[string]string{}, map[uint64]bool{}, map[int]bool{}
		for _, x := range d.all {
			for i := range x.readings {
				for _, w := range x.readings[i].workers {
					if x.contents != nil && nameOf(w.Worker, "") == id {
						numbers[w.CachedBlocks], digests[x.contents[w.Worker]] = true, true
						values[x.name] = fmt.Sprintf("%016x", x.contents[w.Worker])
					}
				}
			}
		}
		if len(digests) > 1 && len(numbers) == 1 && len(values) == len(d.all) {
			d.found = append(d.found, finding{Level: different, What: "contents", Of: names[id], Values: values})
		}
	}
}

// peers looks whether replicas hear each other, and hold of each other what each has.
func (d *diagnosis) peers() {
	unasked := map[uint64]string{}
	for _, x := range d.all {
		for _, p := range x.last().Peers {
			unasked[p.RouterID] = cmp.Or(p.Replica, strconv.FormatUint(p.RouterID, 10))
		}
	}
	for _, x := range d.all {
		last := x.last()
		delete(unasked, last.RouterID)
		for _, y := range d.all {
			if other := y.last(); last.Synced && other.Synced && other.RouterID != last.RouterID && other.Scope == last.Scope {
				d.pair(x, y, other.RouterID)
			}
		}
	}
	for _, id := range slices.Sorted(maps.Keys(unasked)) {
		d.found = append(d.found, finding{Level: note, What: "replica", Of: unasked[id], Text: fmt.Sprintf("replica %s (%d) is heard by others, but was not asked: give its --url, too", unasked[id], id)})
	}
}

// pair compares what x holds of y with what y says of itself.
func (d *diagnosis) pair(x, y *examined, id uint64) {
	var held, own span
	whole := false
	for i := range x.readings {
		at := slices.IndexFunc(x.readings[i].Peers, func(p replicas.PeerView) bool { return p.RouterID == id })
		if at >= 0 {
			p := x.readings[i].Peers[at]
			whole = whole || p.Whole
			held.add(p.ActiveRequests)
		}
	}
	for i := range y.readings {
		own.add(y.readings[i].ActiveRequests)
	}
	switch {
	case !held.some:
		d.say(different, x, "replica", "it does not hear %s", y.name)
	case apart(&held, &own) > d.tolerance.requests:
		d.say(different, x, "requests of", "it holds %v requests of %s, which has %v", &held, y.name, &own)
	case !whole:
		d.say(note, x, "replica", "it is not sure to hold all requests of %s, and asks for them", y.name)
	}
}
