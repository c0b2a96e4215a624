// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/attention"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
)

// Severity says how serious a finding is.
type Severity string

const (
	different Severity = "different"               // replicas do not agree
	fault              = Severity(attention.Fault) // of one replica alone
	note               = Severity(attention.Note)  // allowed, but possibly unexpected
)

// Finding is a difference between replicas, or a fault of one.
type Finding struct {
	Level Severity `json:"level"`
	What  string   `json:"what"`
	// Of is the worker, model or setting that differs. Replica is the replica that has a
	// fault. Values are what each replica says, by its name.
	Of      string            `json:"of,omitempty"`
	Replica string            `json:"replica,omitempty"`
	Values  map[string]string `json:"values,omitempty"`
	Text    string            `json:"text"`
	// Advice says what to do, if the text does not. Docs is the link to the section of the documentation about it.
	Advice string `json:"advice,omitempty"`
	Docs   string `json:"docs,omitempty"`
}

// String is the finding in words.
func (f *Finding) String() string {
	if f.Replica != "" {
		return f.Replica + ": " + f.Text
	}
	return f.Text
}

// count returns how many findings have one of the levels.
func count(all []Finding, levels ...Severity) (n int) {
	for i := range all {
		if slices.Contains(levels, all[i].Level) {
			n++
		}
	}
	return n
}

// diagnosis collects findings.
type diagnosis struct {
	all   []*Replica        // the replicas that answered
	names map[uint64]string // of these replicas, by id
	found []Finding
}

// diagnose checks each replica and compares all of them. Every replica must have a name.
func diagnose(all []*Replica) []Finding {
	d := diagnosis{names: map[uint64]string{}}
	for _, x := range all {
		if x.Err != nil {
			d.report(fault, x, "answer", "it cannot be asked: %v", x.Err)
			continue
		}
		d.all = append(d.all, x)
		d.names[x.Last().RouterID] = x.Name
	}
	for _, x := range d.all {
		d.checkReplica(x)
		d.checkWorkers(x)
	}
	d.checkIdentities()
	d.compareFacts()
	d.checkPeers()
	return d.found
}

func (d *diagnosis) report(level Severity, x *Replica, what, format string, args ...any) {
	d.found = append(d.found, Finding{Level: level, What: what, Replica: x.Name, Text: fmt.Sprintf(format, args...)})
}

// add reports what needs attention at a replica.
func (d *diagnosis) add(x *Replica, items ...attention.Item) {
	for i := range items {
		item := &items[i]
		d.found = append(d.found, Finding{
			Level: Severity(item.Level), What: item.What, Replica: x.Name, Text: item.Text,
			Advice: item.Advice, Docs: attention.DocsOf(x.Last().Version) + attention.SectionOf(item.What),
		})
	}
}

// always reports whether a condition holds in every reading of a replica.
func (x *Replica) always(is func(*Reading) bool) bool {
	return !slices.ContainsFunc(x.readings, func(r Reading) bool { return !is(&r) })
}

// checkReplica reports what is wrong with a replica in all of its readings.
func (d *diagnosis) checkReplica(x *Replica) {
	last := x.Last()
	if !x.always(func(r *Reading) bool { return r.RouterID == last.RouterID }) {
		d.report(fault, x, "identity", "its answers come from several replicas, or it has just started again: is the URL that of a balancer?")
	}
	facts := attention.Replica{
		BusAway: x.always(func(r *Reading) bool { return !r.Bus }), Status: last.Ready.Status,
		Pending: last.Pending, Refused: last.Refused, Kubernetes: last.Kubernetes,
	}
	for _, check := range slices.Sorted(maps.Keys(last.Ready.Checks)) {
		if x.always(func(r *Reading) bool { return !r.Ready.Checks[check] }) && (check != "workers" || len(last.workers) > 0) {
			facts.Failed = append(facts.Failed, check)
		}
	}
	if last.Envoy != nil {
		facts.Envoy = last.Envoy.Faults
	}
	d.add(x, attention.JudgeReplica(&facts)...)
	if x.always(func(r *Reading) bool { return len(r.workers) == 0 }) {
		d.report(fault, x, "workers", "it knows no worker")
	}
	for _, m := range last.models {
		if len(m.BlockSizes) > 1 {
			d.report(note, x, "models", "model %s has workers with blocks of %v tokens, whose caches never meet", m.Model, m.BlockSizes)
		}
	}
}

// checkWorkers reports each worker that has a fault, is not healthy, or has events that cannot be trusted.
func (d *diagnosis) checkWorkers(x *Replica) {
	last := x.Last()
	for i := range last.workers {
		w := &last.workers[i]
		lasting := x.always(func(r *Reading) bool {
			return slices.ContainsFunc(r.workers, func(s api.Worker) bool {
				return s.Worker == w.Worker && s.KVEvents == w.KVEvents
			})
		})
		if w.EventsLevel == "" { // version 0.1.0 sends only the state
			w.EventsLevel, w.EventsText = router.EventsState(&w.WorkerState, false)
		}
		d.add(x, attention.JudgeWorker(w, lasting)...)
	}
	for i := range last.left {
		if item, found := attention.JudgeLeft(&last.left[i]); found {
			d.add(x, item)
		}
	}
	d.add(x, attention.JudgeModels(last.models, last.workers)...)
}

// checkIdentities reports URLs behind which the same replica answers.
func (d *diagnosis) checkIdentities() {
	byID := map[uint64]*Replica{}
	for _, x := range d.all {
		id := x.Last().RouterID
		if other := byID[id]; other != nil {
			d.report(fault, x, "identity", "it is the same process as %s", other.Name)
		}
		byID[id] = x
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
func (r *Reading) facts(synced bool, asked map[uint64]string) map[fact]any {
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
	for model, value := range r.thresholds { // the API may have changed them since the start
		all[fact{"busy thresholds", model}] = value
	}
	for i := range r.workers {
		w := &r.workers[i]
		name := w.Worker.Label(w.Name)
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
	synced := slices.ContainsFunc(d.all, func(x *Replica) bool { return x.readings[0].Synced })
	if !synced && len(d.all) > 1 {
		d.found = append(d.found, Finding{Level: note, What: "sync", Text: "the replicas do not exchange their requests (--router-replica-sync), so their loads are not compared"})
	}
	reported := map[fact][]values{} // by replica
	for i, x := range d.all {
		for j := range x.readings {
			for f, value := range x.readings[j].facts(synced, d.names) {
				if reported[f] == nil {
					reported[f] = make([]values, len(d.all))
				}
				reported[f][i] = append(reported[f][i], value)
			}
		}
	}
	inOrder := func(a, b fact) int { return cmp.Or(cmp.Compare(a.what, b.what), cmp.Compare(a.of, b.of)) }
	for _, f := range slices.SortedFunc(maps.Keys(reported), inOrder) {
		all, agree, texts := reported[f], true, map[string]string{}
		for i, x := range d.all {
			if value, compared := absent[f.what]; compared && len(all[i]) < len(x.readings) && (f.what != "requests of" || x.Last().Synced) {
				all[i] = append(all[i], value)
			}
			texts[x.Name] = all[i].String()
			for j := range i {
				agree = agree && all[i].agree(all[j])
			}
		}
		switch {
		case agree:
		case f.what == "version":
			d.found = append(d.found, difference(note, f, texts))
		default:
			d.found = append(d.found, difference(different, f, texts))
		}
	}
}

// difference is a finding that names each value with its replicas.
func difference(level Severity, f fact, said map[string]string) Finding {
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
	return Finding{Level: level, What: f.what, Of: f.of, Values: said, Text: subject + ": " + strings.Join(parts, "; ")}
}

// values are what a replica reports of a fact in its readings: strings or ints.
type values []any

// bounds returns the smallest and the largest int; ok is false if there is none.
func (v values) bounds() (low, high int, ok bool) {
	for _, value := range v {
		if n, isInt := value.(int); isInt && !ok {
			low, high, ok = n, n, true
		} else if isInt {
			low, high = min(low, n), max(high, n)
		}
	}
	return low, high, ok
}

func (v values) String() string {
	low, high, ok := v.bounds()
	switch {
	case len(v) == 0:
		return "unknown"
	case ok && low < high:
		return fmt.Sprintf("%d..%d", low, high)
	case ok:
		return strconv.Itoa(low)
	}
	var texts []string
	for _, value := range v {
		texts = append(texts, fmt.Sprint(value))
	}
	slices.Sort(texts)
	return cmp.Or(strings.Join(slices.Compact(texts), " or "), "none")
}

// agree reports whether a value of two replicas is the same, or the ranges of their numbers
// overlap. A replica without a value agrees with every other one.
func (v values) agree(other values) bool {
	low, high, ok := v.bounds()
	otherLow, otherHigh, otherOK := other.bounds()
	return len(v) == 0 || len(other) == 0 ||
		slices.ContainsFunc(v, func(value any) bool { return slices.Contains(other, value) }) ||
		ok && otherOK && low <= otherHigh && otherLow <= high
}

// checkPeers reports replicas that the doctor did not read, and replicas that miss requests of
// others.
func (d *diagnosis) checkPeers() {
	notAsked := map[uint64]string{}
	for _, x := range d.all {
		for _, p := range x.Last().Peers {
			name := d.names[p.RouterID]
			missesSome := x.always(func(r *Reading) bool {
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
		d.found = append(d.found, Finding{Level: note, What: "replica", Of: notAsked[id], Text: fmt.Sprintf("replica %s (%d) is heard by others, but was not asked: give its --url, too", notAsked[id], id)})
	}
}
