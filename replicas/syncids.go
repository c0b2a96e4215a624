// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/msgpack"
	"github.com/kvroute/kvroute/router"
)

// The ids that workers gave out. Each binding is published once; a replica that begins requests those of the others.

// encodeGiven encodes the binding of an id that a worker gave out. Routers of Dynamo and older replicas read it as a
// session, which no request has.
func encodeGiven(b router.GivenBinding, from uint64) []byte {
	var w msgpack.Writer
	w.Map(5)
	w.Text("session_id", fmt.Sprintf("given:%016x", uint64(b.Key)))
	w.Uint("worker_id", b.Worker.ID)
	w.Uint("dp_rank", uint64(b.Worker.DPRank))
	w.Uint("router_id", from)
	w.Uint("given", uint64(b.Key))
	return w.B
}

// readGiven reads the binding of an id. It returns false for any other binding.
func readGiven(data []byte) (b router.GivenBinding, from uint64, isGiven bool) {
	var key uint64
	_, err := msgpack.ReadFields(data, []msgpack.Field{
		{Key: "worker_id", Value: &b.Worker.ID},
		{Key: "dp_rank", Value: &b.Worker.DPRank},
		{Key: "router_id", Value: &from},
		{Key: "given", Value: &key},
	})
	b.Key = router.GivenKey(key)
	return b, from, err == nil && key != 0 && b.Worker.ID != 0 && from != 0
}

// askIDs is the content of a request for the ids that workers gave out; a request for a list is empty.
const askIDs = "ids"

// maxBindingSize is the largest size of a binding in a list, in bytes.
const maxBindingSize = 3 * 9

// encodeIDs encodes a part of a list of bindings: each is a key, a worker and a rank.
func encodeIDs(list []router.GivenBinding, p syncPayload) []byte {
	numbers := make([]uint64, 0, 3*len(list))
	for _, b := range list {
		numbers = append(numbers, uint64(b.Key), b.Worker.ID, uint64(b.Worker.DPRank))
	}
	var w msgpack.Writer
	w.Map(3)
	w.Uint("part", number(p.part))
	w.Uint("parts", number(p.parts))
	w.Uints("ids", numbers)
	return w.B
}

// readIDs reads a part of a list of bindings. It returns false for another payload.
func readIDs(data []byte) (list []router.GivenBinding, p syncPayload, isList bool) {
	var numbers []uint64
	_, err := msgpack.ReadFields(data, []msgpack.Field{
		{Key: "part", Value: &p.part},
		{Key: "parts", Value: &p.parts},
		{Key: "ids", Found: &isList, Value: func(data []byte) (rest []byte, err error) {
			numbers, rest, err = msgpack.AppendList(nil, data, 1, msgpack.UintRest)
			return rest, err
		}},
	})
	for n := range slices.Chunk(numbers, 3) {
		if len(n) == 3 && n[0] != 0 && n[1] != 0 && n[2] <= math.MaxUint32 {
			w := router.Worker{ID: n[1], DPRank: uint32(n[2])}
			list = append(list, router.GivenBinding{Key: router.GivenKey(n[0]), Worker: w})
		}
	}
	return list, p, isList && err == nil && p.part < p.parts
}

// sendIDs sends the bindings of all ids that workers gave out, in parts of at most 512 KiB.
func (s *sender) sendIDs(to []string) {
	if len(to) == 0 || s.conf.Given == nil {
		return
	}
	list := s.conf.Given()
	size := min(512<<10, s.room()) / maxBindingSize
	parts := max(1, (len(list)+size-1)/size)
	for i := range parts {
		payload := encodeIDs(list[i*size:min(len(list), (i+1)*size)], syncPayload{i, parts})
		for _, subject := range to {
			s.post(subject, sessionTopic, s.next, payload)
		}
	}
	s.metrics.news.Count("answered_ids")
}

// requestIDs has one of the next ticks request the ids that workers gave out.
func (r *receiver) requestIDs(now time.Time, from *peer) {
	if r.conf.BindGiven != nil {
		from.askIDs, from.idsTries = now.Add(r.upTo(r.times.jitter)), 0
	}
}

// askIDsOf requests a peer's ids if it is time. A peer of an earlier version does not answer.
func (r *receiver) askIDsOf(now time.Time, from *peer) {
	if from.askIDs.IsZero() || now.Before(from.askIDs) {
		return
	}
	if from.idsTries++; from.idsTries > 5 {
		from.askIDs = time.Time{}
		return
	}
	from.askIDs = now.Add(r.times.ask*time.Duration(from.idsTries) + r.upTo(r.times.jitter))
	if r.link.send(r.listRequests(from.id), r.lists, []byte(askIDs)) == nil {
		r.metrics.news.Count("asked_ids")
	}
}

// ids handles a part of a peer's list of the ids that workers gave out.
func (r *receiver) ids(env *events.Envelope) {
	list, p, isList := readIDs(env.Payload)
	from := r.peers[env.PublisherID]
	switch {
	case !isList:
		r.metrics.news.Count("bad")
		return
	case from == nil || from.askIDs.IsZero(): // no list was requested
		return
	case p.part == p.parts-1:
		from.askIDs = time.Time{}
	}
	r.metrics.news.Count("received")
	for _, b := range list {
		if r.conf.BindGiven(b) {
			r.metrics.news.Count("given")
		}
	}
}
