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
	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// Severity says how serious a finding is.
type Severity string

const (
	different Severity = "different" // replicas do not agree
	fault     Severity = "fault"     // of one replica alone
	note      Severity = "note"      // allowed, but possibly unexpected
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
	if x.always(func(r *Reading) bool { return !r.Bus }) {
		d.report(fault, x, "bus", "NATS is away: it neither hears of workers nor of other replicas")
	}
	for _, check := range slices.Sorted(maps.Keys(last.Ready.Checks)) {
		if x.always(func(r *Reading) bool { return !r.Ready.Checks[check] }) && (check != "workers" || len(last.workers) > 0) {
			d.report(fault, x, "ready", "it is %s: the check %q fails", last.Ready.Status, check)
		}
	}
	if len(last.Pending) > 0 {
		d.report(note, x, "settings", "its configuration file has changes that need a restart: %s", strings.Join(last.Pending, ", "))
	}
	if last.Refused != "" {
		d.report(fault, x, "settings", "its configuration file has changed, and cannot be used; a start would fail: %s", last.Refused)
	}
	if last.Envoy != nil {
		for _, f := range last.Envoy.Faults {
			d.report(fault, x, "envoy", "%s", f.Text)
		}
	}
	if x.always(func(r *Reading) bool { return len(r.workers) == 0 }) {
		d.report(fault, x, "workers", "it knows no worker")
	}
	for _, m := range last.models {
		if len(m.BlockSizes) > 1 {
			d.report(note, x, "models", "model %s has workers with blocks of %v tokens, whose caches never meet", m.Model, m.BlockSizes)
		}
	}
}

// HowToProbe tells an operator what to do if an engine that serves answers the probes of its health with an error, or
// too late. It is empty for other causes.
func HowToProbe(cause string) string {
	if strings.Contains(cause, "with status") || strings.HasPrefix(cause, "timeout") {
		return "; if its health has another path, or takes longer, set health: {path: …, timeout: …}, or health: none"
	}
	return ""
}

// HowToPublish tells an operator what to do when no event of a worker was ever heard. It names the sockets
// that the worker's record has.
func HowToPublish(w *router.WorkerState) string {
	e := engine.Of(w.Engine)
	if e.HowToPublish == "" {
		e = engine.Of(engine.VLLM)
	}
	text := e.HowToPublish
	if w.Endpoint != "" {
		text = withSocket(text, `"endpoint":"`, w.Endpoint)
		text = withSocket(text, `,"replay_endpoint":"`, w.Replay)
	}
	if w.NeverHeard {
		transport := "zmq"
		if e.Polled {
			transport = "http_poll"
		}
		text += " and set events: {transport: " + transport + "} for the worker, or events: {transport: none} if it publishes none"
	} else if w.Endpoint != "" {
		text = fmt.Sprintf("kvroute reads %s; %s, or set events.endpoint of the worker to the engine's socket", w.Endpoint, text)
	}
	return text
}

// withSocket replaces the engine's address behind a key: it binds the port of the address that kvroute connects
// to. Without an address it removes the key.
func withSocket(text, key, address string) string {
	before, rest, has := strings.Cut(text, key)
	_, after, ends := strings.Cut(rest, `"`)
	switch {
	case !has || !ends:
		return text
	case address == "":
		return before + after
	}
	if port := strings.LastIndexByte(address, ':'); strings.HasPrefix(address, "tcp://") && port > len("tcp:") {
		address = "tcp://*" + address[port:]
	}
	return before + key + address + `"` + after
}

// checkWorkers reports each worker that has a fault, is not healthy, or has events that cannot be trusted.
func (d *diagnosis) checkWorkers(x *Replica) {
	last := x.Last()
	for i := range last.workers {
		w := &last.workers[i]
		name := w.Worker.Label(w.Name)
		lasting := x.always(func(r *Reading) bool {
			return slices.ContainsFunc(r.workers, func(s api.Worker) bool {
				return s.Worker == w.Worker && s.KVEvents == w.KVEvents
			})
		})
		if w.EventsLevel == "" { // version 0.1.0 sends only the state
			w.EventsLevel, w.EventsText = router.EventsState(&w.WorkerState, false)
		}
		has := func(what string) bool {
			return slices.ContainsFunc(w.Faults, func(f router.Fault) bool { return f.What == what })
		}
		switch {
		case !lasting || w.EventsLevel != router.EventsFault || has("event_socket_refused"):
		case w.Unheard():
			d.report(fault, x, "events", "events of %s: %s; %s", name, w.EventsText, HowToPublish(&w.WorkerState))
		default:
			d.report(fault, x, "events", "events of %s are %s: %s", name, w.KVEvents, w.EventsText)
		}
		for _, f := range w.Faults {
			d.report(fault, x, f.What, "worker %s has the fault %s: %s", name, f.What, f.Text)
		}
		switch dead := w.Health == router.Unhealthy.String() || w.Health == router.Expired.String(); {
		case dead && !has("silent"):
			d.report(fault, x, "health", "worker %s is %s: it gets no requests", name, w.Health)
		case !dead && w.Health != router.Healthy.String():
			cause := ""
			if w.HealthCause != "" {
				cause = ": " + w.HealthCause + HowToProbe(w.HealthCause)
			}
			d.report(note, x, "health", "worker %s is %s%s", name, w.Health, cause)
		}
		if w.Failing {
			d.report(note, x, "health", "worker %s is avoided until %s: %s", name, w.AvoidedUntil.UTC().Format("15:04:05 UTC"), w.AvoidedFor)
		}
	}
	for i := range last.left {
		if l := &last.left[i]; l.IsFault() {
			at := ""
			if l.Address.IsValid() {
				at = " at " + l.Address.String()
			}
			d.report(fault, x, string(l.State), "worker %s%s %s", router.Worker{ID: l.ID, DPRank: l.Rank}.Label(l.Name), at, l.Text)
		}
	}
	for _, m := range last.models {
		if m.Why != "" && m.TokenMode != tokenizer.None && m.TokenReason != tokenizer.NoTokenizer && m.TokenReason != tokenizer.Drifted {
			d.report(note, x, "tokens", "model %s: %s", m.Model, m.Why)
		}
		own := func(w api.Worker) bool { return w.Model == m.Model && w.Group == "" }
		if m.TokenReason == tokenizer.NoTokenizer && slices.ContainsFunc(last.workers, own) {
			d.report(note, x, "tokens", "model %s has no tokenizer, so kvroute finds cached prompts only by their text: %s; "+
				"name the folder of its tokenizer under models", m.Model, m.Why)
		}
		differs := false
		for i := range m.Classes {
			if c := &m.Classes[i]; c.Unconfirmed {
				differs = true
				d.report(fault, x, "tokens", "model %s: %s", m.Model, tokensDiffer(c))
			}
		}
		if differs {
			continue
		}
		if m.Checks == router.ChecksDrift || m.Checks == router.ChecksDiffers {
			d.report(fault, x, "tokens", "model %s: its workers make other token ids than kvroute (%s): compare tokenizer and chat template with the engine's; kvroute tokenize shows the ids", m.Model, m.Checks)
		}
	}
}

// tokensDiffer says where the tokens of a class differ.
func tokensDiffer(c *confirm.ClassState) string {
	text := fmt.Sprintf("its workers make other tokens than kvroute for requests of the class %s (%d unconfirmed, %d confirmed)",
		c.Class, c.Requests[confirm.Unmatched.String()], c.Requests[confirm.Confirmed.String()])
	switch {
	case c.Theirs != "":
		text += fmt.Sprintf(": at token %d the engine has %q, kvroute %q", c.Position, c.Theirs, c.Ours)
	case c.Position >= 0:
		text += fmt.Sprintf(": the first different token is number %d (--explain-drift shows the texts)", c.Position)
	default:
		text += fmt.Sprintf(": the first different token is in block %d", c.Block)
	}
	return text + "; such requests are routed by their text. Compare profile, chat template and engine version"
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
