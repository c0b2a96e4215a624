// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"sync"
)

// samePrints is how many batches of each socket are compared with those of other sockets.
const samePrints = 32

// sameProof is how many equal batches prove that two sockets belong to one engine. A batch contains
// the time of its creation in microseconds. Two engines that store the same blocks at the same time
// could make one equal batch by chance, but not three without another one in between.
const sameProof = 3

// same finds sockets that two workers share. Two workers share a socket if their records name the
// same socket and rank, or if their sockets deliver the same batches. One of the two workers is muted:
// its events from that socket are not applied.
//
//   - If the records name one socket, the worker that started later counts. Otherwise the worker that
//     was known first counts.
//   - If the batches are equal, the worker that was known first counts. A start time proves nothing
//     here: another program could publish the batches of an engine again.
//
// Its methods may be called by any number of goroutines. They take no other lock.
type same struct {
	mu sync.Mutex
	// mu guards the fields below.
	sockets map[*rankSource]*sameSocket
	named   map[string][]*rankSource // by the name of the socket and the rank
	prints  map[batchPrint]*rankSource
}

// sameSocket is what is known of a rank's socket.
type sameSocket struct {
	name   string
	recent []recentPrint // the first delivery of each batch; at most samePrints
	next   int           // the place in recent that is replaced next
	like   *rankSource   // the source of the last equal batches
	equal  int           // equal batches since the last batch that like did not deliver
	alone  int           // batches that no other socket delivered, since the last equal one
	proven *rankSource   // its batches are those of this source
	by     *rankSource   // the source that counts instead; nil if this one counts
}

type recentPrint struct {
	batchPrint

	delivered bool // another socket delivered it, too
}

func newSame() *same {
	return &same{
		sockets: make(map[*rankSource]*sameSocket), named: make(map[string][]*rankSource),
		prints: make(map[batchPrint]*rankSource),
	}
}

// add adds a source. The methods that change something return the sources whose [same.by] changed.
func (s *same) add(r *rankSource) (changed []*rankSource) {
	s.mu.Lock()
	defer s.mu.Unlock()
	name := r.at.name()
	s.sockets[r] = &sameSocket{name: name}
	s.named[name] = append(s.named[name], r)
	return s.changedLocked()
}

// remove removes a source.
func (s *same) remove(r *rankSource) (changed []*rankSource) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.sockets[r]
	if at == nil {
		return nil
	}
	for _, p := range at.recent {
		delete(s.prints, p.batchPrint)
	}
	delete(s.sockets, r)
	if s.named[at.name] = slices.DeleteFunc(s.named[at.name], func(o *rankSource) bool { return o == r }); len(s.named[at.name]) == 0 {
		delete(s.named, at.name)
	}
	for _, other := range s.sockets {
		if other.like == r || other.proven == r {
			other.like, other.proven, other.equal = nil, nil, 0
		}
	}
	return s.changedLocked()
}

// take compares batches of a source with those of others.
func (s *same) take(r *rankSource, prints []batchPrint) (changed []*rankSource) {
	s.mu.Lock()
	defer s.mu.Unlock()
	at := s.sockets[r]
	if at == nil {
		return nil
	}
	news := false
	for _, p := range prints {
		switch first := s.prints[p]; {
		case first == nil:
			news = s.keepLocked(r, at, p) || news
		case first.worker.ID != r.worker.ID:
			news = s.equalLocked(r, first, p) || news
		}
	}
	if !news {
		return nil
	}
	return s.changedLocked()
}

// keepLocked keeps a batch that no other socket has delivered yet. It reports whether r is proven no
// more.
func (s *same) keepLocked(r *rankSource, at *sameSocket, p batchPrint) (news bool) {
	s.prints[p] = r
	if len(at.recent) < samePrints {
		at.recent = append(at.recent, recentPrint{batchPrint: p})
		return false
	}
	old := at.recent[at.next]
	delete(s.prints, old.batchPrint)
	at.recent[at.next] = recentPrint{batchPrint: p}
	at.next = (at.next + 1) % samePrints
	if old.delivered {
		return false
	}
	at.equal = 0
	at.alone++
	if news = at.proven != nil && at.alone >= samePrints; news {
		at.proven = nil
	}
	return news
}

// equalLocked notes that two sources delivered one batch. It reports whether that completes the proof.
func (s *same) equalLocked(r, first *rankSource, p batchPrint) (news bool) {
	earlier, later := r, first
	if later.worker.arrived < earlier.worker.arrived {
		earlier, later = later, earlier
	}
	if at := s.sockets[first]; first == later {
		if i := slices.IndexFunc(at.recent, func(o recentPrint) bool { return o.batchPrint == p }); i >= 0 {
			if at.recent[i].delivered {
				return false
			}
			at.recent[i].delivered = true
		}
	}
	at := s.sockets[later]
	if at.like != earlier {
		at.like, at.equal = earlier, 0
	}
	at.equal, at.alone = at.equal+1, 0
	if news = at.equal >= sameProof && at.proven != earlier; news {
		at.proven = earlier
	}
	return news
}

// changedLocked computes the sources that count, and returns those for which the result is another
// one.
func (s *same) changedLocked() (changed []*rankSource) {
	for r, at := range s.sockets {
		by := at.proven
		if by != nil && s.sockets[by].name == at.name {
			by = nil // the records decide
		}
		if counts := slices.MinFunc(s.named[at.name], compareNamed); counts.worker.ID != r.worker.ID {
			by = counts
		}
		if by != at.by {
			at.by = by
			changed = append(changed, r)
		}
	}
	return changed
}

// compareNamed orders sources of one socket: the first one counts.
func compareNamed(a, b *rankSource) int {
	if a.worker.Started > 0 && b.worker.Started > 0 && a.worker.Started != b.worker.Started {
		return cmp.Compare(b.worker.Started, a.worker.Started)
	}
	return cmp.Compare(a.worker.arrived, b.worker.arrived)
}

// by returns the source that counts instead of r, or nil.
func (s *same) by(r *rankSource) *rankSource {
	s.mu.Lock()
	defer s.mu.Unlock()
	if at := s.sockets[r]; at != nil {
		return at.by
	}
	return nil
}

// faults returns what is wrong with the sockets of a worker: a fault for each other worker that shares
// one of them.
func (s *same) faults(id uint64) (faults []Fault) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for r, at := range s.sockets {
		if at.by == nil || r.worker.ID != id && at.by.worker.ID != id {
			continue
		}
		ours, theirs := r, at.by
		if r.worker.ID != id {
			ours, theirs = theirs, ours
		}
		how := "deliver the same batches"
		if at.proven == nil {
			how = "are the same"
		}
		faults = append(faults, Fault{faultSameEvents, fmt.Sprintf(
			"its event socket %s (rank %d) and %s of worker %s %s: both workers are one engine; "+
				"the events of %s are not counted; remove one of the two workers, or correct its event socket",
			ours.at.where(), ours.at.rank, theirs.at.where(), theirs.worker.label(), how, r.worker.label())})
	}
	slices.SortFunc(faults, func(a, b Fault) int { return strings.Compare(a.Text, b.Text) })
	return faults
}
