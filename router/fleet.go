// SPDX-License-Identifier: Apache-2.0

package router

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/confirm"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/scorer"
)

// SetCards replaces the configuration of models. Decisions in progress keep the old cards.
// Of two cards with the same name the first counts.
func (r *Router) SetCards(cards []Card) {
	known := make(map[string]*Card, len(cards))
	for i := range cards {
		if known[cards[i].Name] == nil {
			known[cards[i].Name] = new(cards[i])
		}
	}
	r.fleet.Lock()
	defer r.fleet.Unlock()
	r.cards = known
	r.renameLocked()
}

// cardLocked returns the card of a model, or nil. name is the card's name that its workers
// registered.
func (r *Router) cardLocked(model, name string) *Card {
	return cmp.Or(r.cards[model], r.cards[name])
}

// chooseCardLocked returns the card's name of a pool's workers. If they name several, the first one that is known
// counts, in the order of the names: the order in which workers come must not matter. Without workers the last name
// stays.
func (r *Router) chooseCardLocked(p *pool) string {
	names := slices.Sorted(maps.Keys(p.cards))
	if len(names) == 0 {
		return p.card
	}
	return names[max(0, slices.IndexFunc(names, func(name string) bool { return r.cards[name] != nil }))]
}

// attentionLocked gives a pool the weights of its model, and the size of its chunks.
func (r *Router) attentionLocked(p *pool) {
	s, chunk := r.conf.Scoring, 0
	if c := r.cardLocked(p.model, p.card); c != nil {
		chunk = c.Chunk
		s.Attention, s.KVRead = *cmp.Or(c.Attention, &s.Attention), *cmp.Or(c.KVRead, &s.KVRead)
	}
	p.known.chunk.Store(int64(chunk))
	p.read(func(c *core) { c.settings = &s })
}

// ApplyEvent applies one event of a worker's cache. Events of one worker must
// come in the order in which they happened. It returns false, and does nothing,
// if the worker is not known.
func (r *Router) ApplyEvent(w Worker, ev indexer.Event) (known bool) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[w.ID]
	if p == nil {
		return false
	}
	if p.known.used && !r.conf.NoEvents {
		r.noteStored(w, &ev)
	}
	out, known := p.applyEvent(r.conf.Now(), w, ev)
	if known {
		r.metrics.applied(out)
	}
	return known
}

// Sides returns events that build the side groups of a worker's hybrid model, and their blocks, in another index; nil
// if the worker or its groups are not known.
func (r *Router) Sides(w Worker) []indexer.Event {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p, ord, known := r.owners[w.ID], 0, false
	if p != nil {
		p.read(func(c *core) { ord, known = c.find(w) })
	}
	if !known {
		return nil
	}
	return p.known.index().Sides(ord)
}

// poolOf returns the pool of a worker process, nil if it is not in the fleet.
func (r *Router) poolOf(id uint64) *pool {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	return r.owners[id]
}

// Knows reports whether a worker is registered, or known from a snapshot.
func (r *Router) Knows(id uint64) bool { return r.poolOf(id) != nil }

// ErrBadWorker is wrapped by the errors of [Router.SetWorker].
var ErrBadWorker = errors.New("worker refused")

// Check returns an error that names the first field that is out of range. [Router.SetWorker]
// refuses such a worker.
func (i *WorkerInfo) Check() error {
	bad := func(field string, value any, want string) error {
		return fmt.Errorf("router: %w: worker %d: %s is %v, want %s", ErrBadWorker, i.ID, field, value, want)
	}
	switch {
	case len(i.Models) == 0 || slices.Contains(i.Models, ""):
		return bad("models", fmt.Sprintf("%q", i.Models), "names")
	case !i.Address.IsValid() || i.Address.Port() == 0:
		return bad("address", fmt.Sprintf("%q", i.Address), "ip:port")
	case i.BlockSize < 0 || i.BlockSize > maxBlockSize:
		return bad("block_size", i.BlockSize, fmt.Sprintf("0 to %d", maxBlockSize))
	case i.DPSize > maxRanks || i.DPStart > math.MaxUint32-maxRanks:
		return bad("ranks", fmt.Sprintf("%d+%d", i.DPStart, i.DPSize), fmt.Sprintf("at most %d", maxRanks))
	case !(i.PrefillThroughput >= 0) || math.IsInf(i.PrefillThroughput, 0):
		return bad("prefill_tps", i.PrefillThroughput, "a finite number, 0 or more")
	case i.TotalKVBlocks < 0 || i.MaxNumSeqs < 0 || i.MaxBatchedTokens < 0:
		return bad("total_kv_blocks, max_num_seqs or max_num_batched_tokens", min(i.TotalKVBlocks, i.MaxNumSeqs, i.MaxBatchedTokens), "0 or more")
	case len(i.Taints) > maxTaints:
		return bad("taints", fmt.Sprintf("a list of %d", len(i.Taints)), fmt.Sprintf("at most %d", maxTaints))
	}
	return nil
}

// SetWorker adds or changes a worker process. A worker that changed its base model or its
// block size leaves its old pool. If [WorkerInfo.Check] fails, SetWorker changes nothing
// and returns that error.
func (r *Router) SetWorker(info WorkerInfo) error {
	if err := info.Check(); err != nil {
		return err
	}
	r.fleet.Lock()
	defer r.fleet.Unlock()
	changed, err := r.setWorkerLocked(&info)
	if changed {
		r.renameLocked()
	}
	return err
}

// setWorkerLocked is SetWorker for information that was checked. It reports whether the
// names of models, or the versions or flags of engines, changed: then the caller calls renameLocked.
func (r *Router) setWorkerLocked(info *WorkerInfo) (changed bool, err error) {
	info.Engine = engineName(info.Engine)
	key := poolKey{info.Models[0], r.blockSizeLocked(info)}
	p := r.pools[key]
	if p == nil {
		if len(r.pools) >= maxPools && !r.forgetOneLocked() {
			return false, errNoRoom(info, key)
		}
		p = newPool(&r.conf, key)
		p.onInferred = r.noteInferred
		p.setThresholds(r.conf.Now(), r.thresholdsLocked(key.model))
		r.pools[key] = p
		changed = true
	}
	now := r.conf.Now()
	p.empty = time.Time{}
	changed = p.countNames(info, 1) || changed
	before := new(WorkerInfo)
	if old := r.owners[info.ID]; old != nil {
		before = old.infoOf(info.ID)
		changed = old.countNames(before, -1) || changed
		if old != p {
			old.removeWorker(now, info.ID)
			r.forgetJudgedLocked(info.ID)
		}
	}
	changed = changed || !sameEngine(before, info)
	r.owners[info.ID] = p
	for _, w := range p.setWorker(now, info) {
		r.confirms.Interrupt(confirm.Worker{ID: w.ID, Rank: w.DPRank})
	}
	return changed, nil
}

// infoOf returns the information of a worker of the pool.
func (p *pool) infoOf(id uint64) (info *WorkerInfo) {
	p.read(func(c *core) { info = c.entries[c.ordinals(id)[0]].info })
	return info
}

// modelName is a name that requests may use, and the adapter that it stands for, if any.
type modelName struct {
	name, lora string
	listed     bool // only engines name it
}

// countNames counts a worker, its names and its card, or removes them from the count (by = -1). It
// reports whether the pool, a name or a card got its first worker or lost its last one. The
// fleet's lock is held.
func (p *pool) countNames(info *WorkerInfo, by int) (changed bool) {
	count := func(n modelName) {
		was := p.names[n]
		if p.names[n] = was + by; was+by == 0 {
			delete(p.names, n)
		}
		changed = changed || was == 0 || was+by == 0
	}
	for _, m := range info.Models {
		count(modelName{m, "", false})
	}
	for _, l := range info.LoRA {
		count(modelName{l, l, false})
	}
	if info.ModelCard != "" {
		was := p.cards[info.ModelCard]
		if p.cards[info.ModelCard] = was + by; was+by == 0 {
			delete(p.cards, info.ModelCard)
		}
		changed = changed || was == 0 || was+by == 0
	}
	for _, m := range info.ListedAliases {
		count(modelName{m, "", true})
	}
	for _, l := range info.ListedLoRA {
		count(modelName{l, l, true})
	}
	return changed
}

// blockSizeLocked returns the block size of the pool that a worker belongs to. A worker
// without a block size joins the other workers of its model.
func (r *Router) blockSizeLocked(info *WorkerInfo) int {
	card := cmp.Or(r.cardLocked(info.Models[0], info.ModelCard), new(Card))
	size := cmp.Or(info.BlockSize, card.BlockSize, r.conf.BlockSize)
	if size > 0 {
		return size
	}
	if p := r.owners[info.ID]; p != nil && p.model == info.Models[0] {
		return p.blockSize
	}
	for key := range r.pools {
		if key.model == info.Models[0] && (size == 0 || key.blockSize < size) {
			size = key.blockSize
		}
	}
	return cmp.Or(size, 16)
}

// RemoveWorker removes a worker process with all its blocks, slots and sessions.
func (r *Router) RemoveWorker(id uint64) {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	r.removeWorkerLocked(id)
}

func (r *Router) removeWorkerLocked(id uint64) {
	p := r.owners[id]
	if p == nil {
		return
	}
	delete(r.owners, id)
	delete(r.faults, id)
	info := p.infoOf(id)
	changed := p.countNames(info, -1) || !sameEngine(info, new(WorkerInfo))
	p.removeWorker(r.conf.Now(), id)
	r.forgetJudgedLocked(id)
	if changed {
		r.renameLocked()
	}
}

// SetEngineLoad takes how many blocks of its cache a worker reports to use, measured at a
// time. The report counts for 10 s: for thresholds, and in costs as far as it is
// [Foreign]. It returns false if the worker is unknown.
func (r *Router) SetEngineLoad(w Worker, usedBlocks int, at time.Time) (known bool) {
	return r.reported(w, func(c *core, now time.Time, ord int) bool {
		c.entries[ord].report.takeCache(now, c.slots.Peak(now, ord), usedBlocks, 0, at)
		return true
	})
}

// SetEngineUsage is [Router.SetEngineLoad] for the share of its cache that a worker
// reports to use, 0 to 1, at its address. Where the worker's capacity is unknown only
// the cost weighted counts the share. SetEngineUsage returns false, too, if several ranks
// of the worker have that address: the share may be that of any rank.
func (r *Router) SetEngineUsage(w Worker, share float64, at time.Time) (known bool) {
	return r.reported(w, func(c *core, now time.Time, ord int) bool {
		e := &c.entries[ord]
		info := e.info
		if _, own := info.RankAddresses[w.DPRank]; info.DPSize > 1 && !own {
			return false
		}
		blocks := int(math.Round(share * float64(info.TotalKVBlocks)))
		e.report.takeCache(now, c.slots.Peak(now, ord), blocks, share, at)
		return true
	})
}

// SetEngineRequests takes how many requests a worker reports to compute and to have in
// its queue, measured at a time. The [Foreign] part of them counts in costs for 10 s. It
// returns false if the worker is unknown.
func (r *Router) SetEngineRequests(w Worker, running, waiting int, at time.Time) (known bool) {
	return r.reported(w, func(c *core, now time.Time, ord int) bool {
		c.entries[ord].report.takeRequests(now, c.slots.Peak(now, ord), running, waiting, at)
		return true
	})
}

// reported gives a worker's report to its pool. The report may admit requests that wait.
func (r *Router) reported(w Worker, apply func(c *core, now time.Time, ord int) (counts bool)) (counts bool) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	p := r.owners[w.ID]
	if p == nil {
		return false
	}
	now := r.conf.Now()
	p.update(now, func(c *core) {
		ord, known := c.find(w)
		counts = known && apply(c, now, ord)
	})
	return counts
}

// ModelThresholds are the thresholds of one base model.
type ModelThresholds struct {
	Model string
	scorer.Thresholds
}

// Thresholds returns the thresholds of all models, by name.
func (r *Router) Thresholds() (all []ModelThresholds) {
	r.fleet.RLock()
	defer r.fleet.RUnlock()
	for _, key := range slices.SortedFunc(maps.Keys(r.pools), poolKey.compare) {
		if len(all) == 0 || all[len(all)-1].Model != key.model {
			all = append(all, ModelThresholds{key.model, r.thresholdsLocked(key.model)})
		}
	}
	return all
}

func (r *Router) thresholdsLocked(model string) scorer.Thresholds {
	return *cmp.Or(r.busy[model], &r.conf.Thresholds)
}

// SetThresholds changes the thresholds of the model with this name, from the next decision
// on: change gets the present thresholds and returns the new ones. It returns the
// thresholds in force. It fails if the model is not known or a threshold is out of range.
func (r *Router) SetThresholds(model string, change func(scorer.Thresholds) scorer.Thresholds) (ModelThresholds, error) {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	t, known := (*r.names.Load())[model]
	if !known {
		return ModelThresholds{}, fmt.Errorf("router: model %q: %w", bounded(model), ErrUnknownModel)
	}
	base := t.pools[0].model
	set := change(r.thresholdsLocked(base))
	if err := set.Validate(); err != nil {
		return ModelThresholds{base, r.thresholdsLocked(base)}, fmt.Errorf("router: %w", err)
	}
	r.busy[base] = &set
	for _, p := range t.pools {
		p.setThresholds(r.conf.Now(), set)
	}
	return ModelThresholds{base, set}, nil
}

// SetDefaultThresholds changes the thresholds of the models that have none of their own by
// SetThresholds. They must be valid.
func (r *Router) SetDefaultThresholds(t scorer.Thresholds) {
	r.fleet.Lock()
	defer r.fleet.Unlock()
	r.conf.Thresholds = t
	for key, p := range r.pools {
		p.setThresholds(r.conf.Now(), r.thresholdsLocked(key.model))
	}
}

func (p *pool) setThresholds(now time.Time, t scorer.Thresholds) {
	p.update(now, func(c *core) {
		c.thresholds = &t
		p.updateView(c)
	})
}

// renameLocked sets the pools of each model name. A pool without workers keeps its name: its
// model is unavailable, not unknown. It is removed if its model has a pool with workers. A request without a
// name means the only model with workers, or, if none has workers, the only model. If
// two models have the same name, the name of a base model comes first, and a name that only an engine
// lists comes last.
func (r *Router) renameLocked() {
	full := make(map[string]bool)
	for key, p := range r.pools {
		full[key.model] = full[key.model] || len(p.names) > 0
	}
	maps.DeleteFunc(r.pools, func(key poolKey, p *pool) bool { return full[key.model] && len(p.names) == 0 })
	models := make(map[string]target)
	ofCard := make(map[*Card][]*pool) // those with prompts
	for _, key := range slices.SortedFunc(maps.Keys(r.pools), poolKey.compare) {
		p, t := r.pools[key], models[key.model]
		p.card = r.chooseCardLocked(p)
		r.attentionLocked(p)
		t.pools = append(t.pools, p)
		if t.card == nil {
			t.card = r.cardLocked(p.model, p.card)
			t.judged = r.judgedLocked(p.model, t.card)
		}
		models[key.model] = t
		if t.card != nil && t.card.Prompts != nil {
			ofCard[t.card] = append(ofCard[t.card], p)
		}
	}
	for card, pools := range ofCard {
		r.engineLocked(card, pools)
	}
	maps.DeleteFunc(r.judged, func(model string, _ *judged) bool { return models[model].pools == nil })
	names := maps.Clone(models)
	for _, model := range slices.Sorted(maps.Keys(models)) {
		t := models[model]
		add := func(name, lora, adapter string) { t.add(names, name, lora, adapter) }
		for _, p := range t.pools {
			for _, n := range p.sortedNames(false) {
				add(n.name, n.lora, n.lora)
			}
		}
		if t.card == nil {
			continue
		}
		for _, name := range t.card.Aliases {
			add(name, "", "")
		}
		for _, name := range t.card.LoRA {
			add(name, name, "")
		}
	}
	for _, model := range slices.Sorted(maps.Keys(models)) {
		for _, p := range models[model].pools {
			for _, n := range p.sortedNames(true) {
				models[model].add(names, n.name, n.lora, n.name)
			}
		}
	}
	serving := maps.Clone(models)
	maps.DeleteFunc(serving, func(model string, _ target) bool { return !full[model] })
	if len(serving) == 0 {
		serving = models
	}
	if len(serving) == 1 {
		for _, t := range serving { // see Request.Unread
			names[""] = t
		}
	}
	r.names.Store(&names)
}

// add adds a name of a model unless the name is taken.
func (t target) add(names map[string]target, name, lora, adapter string) {
	if _, taken := names[name]; !taken {
		names[name] = target{pools: t.pools, lora: lora, adapter: adapter, card: t.card}
	}
}

// sortedNames returns the names of a pool that only engines list, or the others, in order.
func (p *pool) sortedNames(listed bool) []modelName {
	names := slices.SortedFunc(maps.Keys(p.names), func(a, b modelName) int {
		return cmp.Or(cmp.Compare(a.name, b.name), cmp.Compare(a.lora, b.lora))
	})
	return slices.DeleteFunc(names, func(n modelName) bool { return n.listed != listed })
}

// bounded shortens a name that came from a client for log lines and errors.
func bounded(s string) string { return s[:min(len(s), 128)] }
