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
// So each is asked several times, and two differ only if there is no reading of the one
// that agrees with one of the other: texts of which the one has seen none of the
// other's, numbers whose ranges do not meet. What is merely on its way does meet, for
// it takes less time than lies between two readings; what is wrong and at rest does not.

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
	// Of is the worker, model or setting that it is about, Replica the replica. Values
	// are what each replica says, by its name. Text says it in words, where values do
	// not.
	Of      string            `json:"of,omitempty"`
	Replica string            `json:"replica,omitempty"`
	Values  map[string]string `json:"values,omitempty"`
	Text    string            `json:"text,omitempty"`
}

// text says a finding in words.
func (f *finding) text() string {
	if f.Text != "" {
		if f.Replica != "" {
			return f.Replica + ": " + f.Text
		}
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
	case f.What == "setting" || f.What == "worker" || f.What == "model":
		subject += " " + f.Of
	default:
		subject += " of " + f.Of
	}
	return subject + ": " + strings.Join(parts, "; ")
}

// serious returns how many findings are no notes, differences how many say that
// replicas differ.
func serious(all []finding) (n int) {
	for i := range all {
		if all[i].Level != note {
			n++
		}
	}
	return n
}

func differences(all []finding) (n int) {
	for i := range all {
		if all[i].Level == different {
			n++
		}
	}
	return n
}

// tolerance is by how much replicas may differ.
type tolerance struct {
	requests, tokens, blocks int
	clock                    time.Duration
}

// nameAll gives each replica a name that no other one has.
func nameAll(all []*examined) {
	seen := map[string]int{}
	for _, x := range all {
		x.name = ""
		if len(x.readings) > 0 {
			x.name = x.readings[0].Replica.Replica
		}
		x.name = cmp.Or(x.name, strings.TrimPrefix(x.url, "http://"))
		seen[x.name]++
	}
	for i, x := range all {
		if seen[x.name] > 1 {
			x.name = fmt.Sprintf("%s#%d", x.name, i+1)
		}
	}
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
			d.fault(x, "answer", "it cannot be asked: "+x.err.Error())
			continue
		}
		d.all = append(d.all, x)
	}
	for _, x := range d.all {
		d.alone(x)
	}
	d.identities()
	d.settings()
	d.models()
	d.workers()
	d.peers()
	return d.found
}

func (d *diagnosis) fault(x *examined, what, text string) {
	d.found = append(d.found, finding{Level: fault, What: what, Replica: x.name, Text: text})
}

func (d *diagnosis) note(x *examined, what, text string) {
	d.found = append(d.found, finding{Level: note, What: what, Replica: x.name, Text: text})
}

// always reports whether all readings of a replica are so.
func always(x *examined, is func(*reading) bool) bool {
	for i := range x.readings {
		if !is(&x.readings[i]) {
			return false
		}
	}
	return true
}

// howToPublish tells an operator what to do when a worker sends no events.
const howToPublish = "start vLLM with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\",\"topic\":\"kv-events\"}' " +
	"and set events: {transport: zmq} for the worker, or events: {transport: none} if it publishes none"

// alone looks at a replica by itself.
func (d *diagnosis) alone(x *examined) {
	last := &x.readings[len(x.readings)-1]
	if !always(x, func(r *reading) bool { return r.RouterID == last.RouterID }) {
		d.fault(x, "identity", "its answers come from several replicas, or it has just started again: is the URL that of a balancer?")
	}
	if always(x, func(r *reading) bool { return !r.Bus }) {
		d.fault(x, "bus", "NATS is away: it neither hears of workers nor of other replicas")
	}
	for _, check := range slices.Sorted(maps.Keys(last.Ready.Checks)) {
		if always(x, func(r *reading) bool { return !r.Ready.Checks[check] }) && (check != "workers" || len(last.workers) > 0) {
			d.fault(x, "ready", fmt.Sprintf("it is %s: the check %q fails", last.Ready.Status, check))
		}
	}
	if always(x, func(r *reading) bool { return len(r.workers) == 0 }) {
		d.fault(x, "workers", "it knows no worker")
	}
	for i := range last.workers {
		w := &last.workers[i]
		name := nameOf(w.Worker, w.Name)
		switch w.KVEvents {
		case "suspect", "partial", "block_size_mismatch":
			if always(x, func(r *reading) bool { s := r.worker(w.Worker); return s != nil && s.KVEvents == w.KVEvents }) {
				d.fault(x, "events", fmt.Sprintf("what worker %s caches is not known in full: its events are %s", name, w.KVEvents))
			}
		}
		if direct := w.Transport == "zmq" || w.Transport == "http_poll"; w.KVEvents == "none" && (direct || w.NeverHeard) &&
			always(x, func(r *reading) bool { s := r.worker(w.Worker); return s != nil && s.KVEvents == "none" }) {
			d.fault(x, "events", fmt.Sprintf("no cache events of worker %s have come: %s", name, howToPublish))
		}
		if w.Health != router.Healthy.String() {
			d.note(x, "health", fmt.Sprintf("worker %s is %s", name, w.Health))
		}
		if w.Failing {
			d.note(x, "health", fmt.Sprintf("worker %s is avoided, since it failed lately", name))
		}
	}
	for _, m := range last.models {
		if len(m.BlockSizes) > 1 {
			d.note(x, "models", fmt.Sprintf("model %s has workers with blocks of %v tokens, whose caches never meet", m.Model, m.BlockSizes))
		}
	}
}

// identities looks for one replica behind two URLs, and at clocks.
func (d *diagnosis) identities() {
	by := map[uint64]*examined{}
	for _, x := range d.all {
		id := x.readings[len(x.readings)-1].RouterID
		if other := by[id]; other != nil {
			d.fault(x, "identity", "it is the same process as "+other.name)
		}
		by[id] = x
	}
	if len(d.all) == 0 {
		return
	}
	byClock := func(a, b *examined) int { return cmp.Compare(a.ahead, b.ahead) }
	slow, quick := slices.MinFunc(d.all, byClock), slices.MaxFunc(d.all, byClock)
	if apart := quick.ahead - slow.ahead; apart > d.tolerance.clock {
		d.note(quick, "clock", fmt.Sprintf("its clock is %v before that of %s; that harms no decision", apart.Round(time.Millisecond), slow.name))
	}
}

// texts compares what replicas say in words, "" for what one does not say. It reports
// whether they differ.
func (d *diagnosis) texts(l severity, what, of string, say func(*reading) string) bool {
	seen := make([]map[string]bool, len(d.all))
	values := map[string]string{}
	for i, x := range d.all {
		seen[i] = map[string]bool{}
		for j := range x.readings {
			seen[i][say(&x.readings[j])] = true
		}
		values[x.name] = cmp.Or(strings.Join(slices.Sorted(maps.Keys(seen[i])), " or "), "none")
	}
	for i := range seen {
		for j := range i {
			if !meet(seen[i], seen[j]) {
				d.found = append(d.found, finding{Level: l, What: what, Of: of, Values: values})
				return true
			}
		}
	}
	return false
}

func meet(a, b map[string]bool) bool {
	for v := range a {
		if b[v] {
			return true
		}
	}
	return false
}

// span is what a number was in the readings of a replica.
type span struct {
	low, high int
	some      bool
}

func (s *span) add(n int) {
	if !s.some {
		*s = span{n, n, true}
	}
	s.low, s.high = min(s.low, n), max(s.high, n)
}

func (s span) String() string {
	switch {
	case !s.some:
		return "unknown"
	case s.low == s.high:
		return strconv.Itoa(s.low)
	default:
		return fmt.Sprintf("%d..%d", s.low, s.high)
	}
}

// apart is how far two spans are from each other.
func apart(a, b span) int {
	if !a.some || !b.some {
		return 0
	}
	return max(0, a.low-b.high, b.low-a.high)
}

// numbers compares what replicas count of a worker.
func (d *diagnosis) numbers(what string, w router.Worker, name string, tolerated int, count func(*router.WorkerState) int) {
	spans, values, far := make([]span, len(d.all)), map[string]string{}, 0
	for i, x := range d.all {
		for j := range x.readings {
			if s := x.readings[j].worker(w); s != nil {
				spans[i].add(count(s))
			}
		}
		values[x.name] = spans[i].String()
		for j := range i {
			far = max(far, apart(spans[i], spans[j]))
		}
	}
	if far > tolerated {
		d.found = append(d.found, finding{Level: different, What: what, Of: name, Values: values})
	}
}

// settings compares how replicas are set up.
func (d *diagnosis) settings() {
	d.texts(note, "version", "", func(r *reading) string { return r.Version })
	d.texts(different, "scope", "", func(r *reading) string { return r.Scope })
	d.texts(different, "hash seed", "", func(r *reading) string { return strconv.Itoa(r.HashSeed) })
	names := map[string]bool{}
	for _, x := range d.all {
		for name := range x.readings[0].Settings {
			names[name] = true
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		d.texts(different, "setting", name, func(r *reading) string {
			switch value, known := r.Settings[name]; {
			case !known:
				return "unknown" // to that version
			case value == nil:
				return "" // not given
			default:
				return shown(value)
			}
		})
	}
}

// shown prints a value that came as JSON, numbers in full.
func shown(value any) string {
	if number, ok := value.(float64); ok {
		return strconv.FormatFloat(number, 'f', -1, 64)
	}
	return fmt.Sprint(value)
}

// models compares what models replicas know, and how they read their prompts.
func (d *diagnosis) models() {
	names := map[string]bool{}
	for _, x := range d.all {
		for i := range x.readings {
			for _, m := range x.readings[i].models {
				names[m.Model] = true
			}
			for name := range x.readings[i].thresholds {
				names[name] = true
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		d.texts(different, "model", name, func(r *reading) string {
			for _, m := range r.models {
				if m.Model == name {
					return fmt.Sprintf("%v, blocks of %v, tokens: %s", m.Names, m.BlockSizes, m.TokenMode)
				}
			}
			return "unknown"
		})
		// The API may have changed them since the start.
		d.texts(different, "busy thresholds", name, func(r *reading) string { return r.thresholds[name] })
	}
}

// workers compares who the workers are, what they cache and what they do.
func (d *diagnosis) workers() {
	names := map[router.Worker]string{}
	for _, x := range d.all {
		for i := range x.readings {
			r := &x.readings[i]
			for j := range r.workers {
				names[r.workers[j].Worker] = nameOf(r.workers[j].Worker, r.workers[j].Name)
			}
		}
	}
	synced := slices.ContainsFunc(d.all, func(x *examined) bool { return x.readings[0].Synced })
	if !synced && len(d.all) > 1 {
		d.found = append(d.found, finding{Level: note, What: "sync", Text: "the replicas do not exchange their requests (--router-replica-sync), so their loads are not compared"})
	}
	for _, w := range slices.SortedFunc(maps.Keys(names), router.Worker.Compare) {
		name := names[w]
		fact := func(what string, say func(*router.WorkerState) string) bool {
			return d.texts(different, what, name, func(r *reading) string {
				if s := r.worker(w); s != nil {
					return say(s)
				}
				return "unknown"
			})
		}
		if fact("worker", func(*router.WorkerState) string { return "known" }) {
			continue
		}
		fact("address", func(s *router.WorkerState) string { return s.Address.String() })
		fact("model", func(s *router.WorkerState) string { return fmt.Sprint(s.Model, " ", s.LoRA) })
		fact("role", func(s *router.WorkerState) string { return string(s.Role) })
		fact("block size", func(s *router.WorkerState) string { return strconv.Itoa(s.BlockSize) })
		fact("health", func(s *router.WorkerState) string { return s.Health })
		fact("draining", func(s *router.WorkerState) string { return strconv.FormatBool(s.Draining) })
		fact("taints", func(s *router.WorkerState) string { return fmt.Sprint(s.Taints) })
		fact("events", func(s *router.WorkerState) string { return s.KVEvents })
		d.numbers("cached blocks", w, name, d.tolerance.blocks, func(s *router.WorkerState) int { return s.CachedBlocks })
		d.contents(w, name)
		if synced {
			d.numbers("active requests", w, name, d.tolerance.requests, func(s *router.WorkerState) int { return s.ActiveRequests })
			d.numbers("pending tokens", w, name, d.tolerance.tokens, func(s *router.WorkerState) int { return s.PendTokens })
		}
	}
}

// contents compares which blocks a worker is known to hold, where that was read. Where
// the numbers moved between readings, it says nothing.
func (d *diagnosis) contents(w router.Worker, name string) {
	values, digests := map[string]string{}, map[uint64]bool{}
	numbers := map[int]bool{}
	for _, x := range d.all {
		if x.contents == nil {
			return
		}
		digests[x.contents[w]] = true
		values[x.name] = fmt.Sprintf("%016x", x.contents[w])
		for i := range x.readings {
			if s := x.readings[i].worker(w); s != nil {
				numbers[s.CachedBlocks] = true
			}
		}
	}
	if len(digests) > 1 && len(numbers) == 1 {
		d.found = append(d.found, finding{Level: different, What: "contents", Of: name, Values: values})
	}
}

// peers looks whether replicas hear each other, and hold of each other what each has.
func (d *diagnosis) peers() {
	unasked := map[uint64]string{}
	for _, x := range d.all {
		for _, p := range x.readings[len(x.readings)-1].Peers {
			unasked[p.RouterID] = cmp.Or(p.Replica, strconv.FormatUint(p.RouterID, 10))
		}
	}
	for _, x := range d.all {
		last := &x.readings[len(x.readings)-1]
		delete(unasked, last.RouterID)
		if !last.Synced {
			continue
		}
		for _, y := range d.all {
			other := &y.readings[len(y.readings)-1]
			if other.RouterID == last.RouterID || !other.Synced || other.Scope != last.Scope {
				continue
			}
			d.pair(x, y, other.RouterID)
		}
	}
	for _, id := range slices.Sorted(maps.Keys(unasked)) {
		d.found = append(d.found, finding{Level: note, What: "replica", Of: unasked[id], Text: fmt.Sprintf("replica %s (%d) is heard by others, but was not asked: give its --url, too", unasked[id], id)})
	}
}

// pair compares what x holds of y with what y says of itself.
func (d *diagnosis) pair(x, y *examined, id uint64) {
	var held, own span
	heard, whole := false, false
	for i := range x.readings {
		at := slices.IndexFunc(x.readings[i].Peers, func(p replicas.PeerView) bool { return p.RouterID == id })
		if at >= 0 {
			p := x.readings[i].Peers[at]
			heard, whole = true, whole || p.Whole
			held.add(p.ActiveRequests)
		}
	}
	for i := range y.readings {
		own.add(y.readings[i].ActiveRequests)
	}
	switch {
	case !heard:
		d.found = append(d.found, finding{Level: different, What: "replica", Replica: x.name, Of: y.name, Text: fmt.Sprintf("it does not hear %s", y.name)})
	case apart(held, own) > d.tolerance.requests:
		d.found = append(d.found, finding{
			Level: different, What: "requests of", Of: y.name, Replica: x.name,
			Text: fmt.Sprintf("it holds %v requests of %s, which has %v", held, y.name, own),
		})
	case !whole:
		d.note(x, "replica", fmt.Sprintf("it is not sure to hold all requests of %s, and asks for them", y.name))
	}
}

// worker returns what was said of a worker; nil if it is not known.
func (r *reading) worker(w router.Worker) *router.WorkerState {
	// The API lists them in this order.
	at, ok := slices.BinarySearchFunc(r.workers, w, func(s router.WorkerState, w router.Worker) int { return s.Worker.Compare(w) })
	if !ok {
		return nil
	}
	return &r.workers[at]
}

func (r *reading) sums() (workers, blocks, requests int) {
	for i := range r.workers {
		blocks += r.workers[i].CachedBlocks
		requests += r.workers[i].ActiveRequests
	}
	return len(r.workers), blocks, requests
}
