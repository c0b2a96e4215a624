// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// The names of faults that package fleet finds; those of package engines are others.
const (
	faultModelNotServed = "model_not_served" // the engine does not serve a configured model name
	faultMaxModelLen    = "max_model_len"    // another worker of the model takes longer requests
	faultSameAddress    = "same_address"     // another worker has the same address and rank
)

// The sources of faults, as [router.Router.SetFaults] separates them.
const (
	faultsOfModels  = "models"
	faultsOfLength  = "length"
	faultsOfEngine  = "engine"
	faultsOfAddress = "address"
	faultsOfSockets = "sockets"
)

// ComparisonConfig configures a [Comparison]. All fields are required.
type ComparisonConfig struct {
	// Faults receives the faults that one source has found on a worker. It must not call back.
	Faults func(id uint64, source string, faults []router.Fault)
	// Workers get the names that engines list, and compare the settings of workers with engines.
	Workers *DirectWorkers
}

// Comparison compares the workers' records with each other and with what their engines report. A
// [Prober] asks the engines. Router groups and the workers of Dynamo's records are not compared: at
// their addresses other programs answer.
//
// Its methods may be called by any number of goroutines.
type Comparison struct {
	conf ComparisonConfig
	seed maphash.Seed // of the lists of models

	mu sync.Mutex
	// mu guards the fields below, and orders the calls of Faults.
	workers map[uint64]*comparedWorker
	// places and lengths find the workers that a change concerns: its cost must not grow with the fleet.
	places  map[netip.AddrPort][]*comparedWorker // by address, in the order of their ids
	lengths map[string]*modelLengths             // by model
}

// modelLengths has the workers of a model whose max_model_len is known.
type modelLengths struct {
	workers map[int]map[uint64]*comparedWorker // by max_model_len, and by id
	most    int                                // the largest max_model_len
	longest *comparedWorker                    // one of those with it; the faults of the others name this worker
}

// comparedWorker is a worker with what its engine reported.
type comparedWorker struct {
	record  Record
	info    router.WorkerInfo // with the latest health
	list    uint64            // hash of the engine's list of models that was taken last, since the record changed; 0 = none
	length  int               // the engine's max_model_len; 0 = unknown
	shorter bool              // it has the fault max_model_len
	shares  bool              // it has the fault same_address
}

// NewComparison returns a comparison without workers.
func NewComparison(conf ComparisonConfig) *Comparison {
	return &Comparison{
		conf: conf, seed: maphash.MakeSeed(), workers: make(map[uint64]*comparedWorker),
		places: make(map[netip.AddrPort][]*comparedWorker), lengths: make(map[string]*modelLengths),
	}
}

// isCompared reports whether an engine answers at the address of a record.
func isCompared(r *Record) bool {
	return r.Address != "" && r.Group == "" && r.Events.Transport != transportDynamo && !engine.Of(r.Engine).Forwards
}

// Set adds or changes a worker.
func (c *Comparison) Set(r Record, info router.WorkerInfo) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !isCompared(&r) {
		c.removeLocked(info.ID)
		return
	}
	w := c.workers[info.ID]
	if w == nil {
		w = &comparedWorker{info: info}
		c.workers[info.ID] = w
	}
	before, length := w.info, w.length
	if before.Models[0] != info.Models[0] {
		c.lengthLocked(w, 0)
	}
	c.leaveLocked(w)
	w.record, w.info, w.list = r, info, 0
	there := c.places[info.Address]
	at, _ := slices.BinarySearchFunc(there, info.ID, func(o *comparedWorker, id uint64) int {
		return cmp.Compare(o.info.ID, id)
	})
	c.places[info.Address] = slices.Insert(there, at, w)
	c.addressLocked(info.Address)
	if before.Address != info.Address {
		c.addressLocked(before.Address)
	}
	c.lengthLocked(w, length)
}

// leaveLocked removes a worker from those at its address.
func (c *Comparison) leaveLocked(w *comparedWorker) {
	at := w.info.Address
	c.places[at] = slices.DeleteFunc(c.places[at], func(o *comparedWorker) bool { return o == w })
	if len(c.places[at]) == 0 {
		delete(c.places, at)
	}
}

// SetHealth notes the health of a worker.
func (c *Comparison) SetHealth(id uint64, h router.Health) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if w := c.workers[id]; w != nil && w.info.Health != h {
		w.info.Health = h
		c.addressLocked(w.info.Address)
	}
}

// Remove removes a worker. The caller forgets the worker's faults.
func (c *Comparison) Remove(id uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.removeLocked(id)
}

func (c *Comparison) removeLocked(id uint64) {
	w := c.workers[id]
	if w == nil {
		return
	}
	delete(c.workers, id)
	c.leaveLocked(w)
	c.addressLocked(w.info.Address)
	w.shorter = false
	c.lengthLocked(w, 0)
}

// Models takes the list of models of a worker's engine. An error says that it cannot be read.
func (c *Comparison) Models(id uint64, body []byte) error {
	list := maphash.Bytes(c.seed, body)
	c.mu.Lock()
	same := c.workers[id] != nil && c.workers[id].list == list
	c.mu.Unlock()
	if same {
		return nil
	}
	models, err := readModels(body)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	w := c.workers[id]
	if w == nil {
		return nil
	}
	w.list = list
	var faults []router.Fault
	if missing := notServed(models, &w.record); len(missing) > 0 {
		var served []string
		for _, m := range models {
			served = append(served, m.ID)
		}
		faults = []router.Fault{{What: faultModelNotServed, Text: fmt.Sprintf(
			"its models include %s, and its engine serves %s: correct models, or start the engine with --served-model-name", some(missing), some(served))}}
	}
	c.conf.Faults(id, faultsOfModels, faults)
	c.conf.Workers.SetListed(id, models, &w.record)
	c.lengthLocked(w, longest(models, &w.record))
	return nil
}

// Engine compares a worker's settings with what its engine reports. The error says that the engine did
// not answer.
func (c *Comparison) Engine(ctx context.Context, id uint64) error {
	c.mu.Lock()
	w := c.workers[id]
	c.mu.Unlock()
	if w == nil {
		return nil
	}
	c.mu.Lock()
	asked := engineWorker(&w.record, &w.info)
	c.mu.Unlock()
	found, faults, err := c.conf.Workers.sources.Compare(ctx, asked)
	if err != nil {
		return err
	}
	c.conf.Faults(id, faultsOfEngine, routerFaults(faults))
	c.conf.Workers.SetReported(id, found.Version, found.Flags)
	return nil
}

func routerFaults(found []engines.Fault) (faults []router.Fault) {
	for _, f := range found {
		faults = append(faults, router.Fault{What: f.What, Text: f.Text})
	}
	return faults
}

// lengthLocked notes the longest request of a worker's engine, 0 = unknown, and compares it with those of the other
// workers of the model. It looks at all of them only if the longest of all, or the worker that has it, changes.
func (c *Comparison) lengthLocked(w *comparedWorker, length int) {
	if length == w.length {
		return
	}
	model := w.info.Models[0]
	of := c.lengths[model]
	if of == nil {
		of = &modelLengths{workers: make(map[int]map[uint64]*comparedWorker)}
		c.lengths[model] = of
	}
	differed := len(of.workers) > 1
	if delete(of.workers[w.length], w.info.ID); len(of.workers[w.length]) == 0 {
		delete(of.workers, w.length)
	}
	if w.length = length; length > 0 {
		if of.workers[length] == nil {
			of.workers[length] = make(map[uint64]*comparedWorker)
		}
		of.workers[length][w.info.ID] = w
	}
	changed := of.chooseLongest()
	c.shorterLocked(w, of.longest)
	if changed && (differed || len(of.workers) > 1) {
		for _, same := range of.workers {
			for _, other := range same {
				c.shorterLocked(other, of.longest)
			}
		}
	}
	if len(of.workers) == 0 {
		delete(c.lengths, model)
	}
}

// chooseLongest updates the largest length and the worker that has it. It reports whether one of them changed.
func (of *modelLengths) chooseLongest() (changed bool) {
	before := of.most
	of.most = 0
	for length := range of.workers {
		of.most = max(of.most, length)
	}
	named := of.longest
	if of.most == before && named != nil && of.workers[of.most][named.info.ID] == named {
		return false
	}
	of.longest = nil
	for _, of.longest = range of.workers[of.most] {
		break
	}
	return true
}

// shorterLocked compares the length of a worker with the longest one of its model, and passes on the fault.
func (c *Comparison) shorterLocked(w, longest *comparedWorker) {
	shorter := w.length > 0 && w.length < longest.length
	if !shorter && !w.shorter {
		return
	}
	var faults []router.Fault
	if shorter {
		faults = []router.Fault{{What: faultMaxModelLen, Text: fmt.Sprintf(
			"its engine takes at most %d tokens, and worker %s of the same model takes %d: it refuses requests that the other serves; start both with the same --max-model-len",
			w.length, label(longest.info.ID, longest.info.Name), longest.length)}}
	}
	w.shorter = shorter
	c.conf.Faults(w.info.ID, faultsOfLength, faults)
}

// addressLocked compares the workers at an address with each other. Workers that
// get no requests are left out: they may be the same process before a restart.
func (c *Comparison) addressLocked(at netip.AddrPort) {
	for _, w := range c.places[at] {
		other := c.sharesLocked(&w.info)
		if other == nil && !w.shares {
			continue
		}
		var faults []router.Fault
		if other != nil {
			faults = []router.Fault{{What: faultSameAddress, Text: fmt.Sprintf(
				"worker %s has the same address %s and rank: both workers are one process, and its load and blocks count twice; remove one of them",
				label(other.ID, other.Name), w.info.Place())}}
		}
		w.shares = other != nil
		c.conf.Faults(w.info.ID, faultsOfAddress, faults)
	}
}

// sharesLocked returns a worker with the same address, Host header and an equal rank, or nil.
func (c *Comparison) sharesLocked(info *router.WorkerInfo) *router.WorkerInfo {
	if info.Health > router.Degraded {
		return nil
	}
	for _, w := range c.places[info.Address] {
		o := &w.info
		if o.ID != info.ID && sameHost(o, info) && o.Health <= router.Degraded &&
			o.DPStart < info.DPStart+max(1, info.DPSize) && info.DPStart < o.DPStart+max(1, o.DPSize) {
			return o
		}
	}
	return nil
}

// sameHost reports whether an HTTP router at one address would take two workers for one. The Host of a DNS name
// does not tell its worker from one without a Host.
func sameHost(a, b *router.WorkerInfo) bool {
	return a.Host == b.Host || !a.OwnHost && !b.OwnHost && (a.Host == "" || b.Host == "")
}

// compares reports whether the probe is one of a [Comparison].
func (k probeKey) compares() bool { return k.kind == kindModels || k.kind == kindEngine }

// compare asks an engine about itself. An engine that refuses to list its models says nothing.
func (p *Prober) compare(ctx context.Context, key probeKey, host, base string) error {
	if key.kind == kindEngine {
		return p.conf.Compare.Engine(ctx, key.worker)
	}
	body, err := reach.Get(ctx, p.conf.Client, host, base+modelsPath, modelsBytes)
	status, _ := errors.AsType[reach.StatusError](err)
	switch status.Status {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed:
		return errNoModels
	}
	if err == nil {
		err = p.conf.Compare.Models(key.worker, body)
	}
	return err
}

// isAnswer reports whether an error is about an answer that the worker gave.
func isAnswer(err error) bool {
	_, failed := errors.AsType[*net.OpError](err)
	return err != nil && !failed && !errors.Is(err, io.EOF) && !errors.Is(err, context.Canceled) && !errors.Is(err, context.DeadlineExceeded)
}
