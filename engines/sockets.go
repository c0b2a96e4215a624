// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// socket holds the addresses of a rank's events.
type socket struct {
	rank           uint32
	topic          string
	url            string // of TransportPoll
	events, replay zmtp.Endpoint
	replays        bool // replay is set
}

// feedOf returns the feed of a transport.
func feedOf(transport string) events.Feed {
	if transport == TransportPoll {
		return events.FeedPoll
	}
	return events.FeedZMQ
}

// setReplay sets the replay endpoint that the worker's record names, if it names one.
func (at *socket) setReplay(endpoint, host string) error {
	if endpoint == "" {
		return nil
	}
	replay, err := zmtp.ParseEndpoint(endpoint, baseReplayPort, int(at.rank))
	at.replay, at.replays = replay.At(host), true
	return err
}

// basePort and baseReplayPort are the ports of rank 0 for an endpoint whose port is "{rank}".
const (
	basePort       = 5557
	baseReplayPort = 5657
)

// sockets returns the addresses of a worker's events. It queries the engine for missing settings
// and fills them in.
func (s *Sources) sockets(ctx context.Context, w *EngineWorker) ([]socket, error) {
	switch w.Transport {
	case TransportPoll:
		w.Engine = cmp.Or(w.Engine, engine.TRTLLM)
		return []socket{{rank: w.DPStart, url: cmp.Or(w.Endpoint, "http://"+w.Address+"/kv_cache_events")}}, nil
	case TransportZMQ:
	default:
		return nil, fmt.Errorf("engines: transport is %q, want %s or %s", w.Transport, TransportZMQ, TransportPoll)
	}
	if w.Endpoint == "" {
		f, err := s.Discover(ctx, *w)
		if err != nil {
			return nil, err
		}
		w.Engine = cmp.Or(w.Engine, f.Engine)
		w.BlockSize = cmp.Or(w.BlockSize, f.BlockSize)
		w.DPStart, w.DPSize = f.DPStart, f.DPSize
		s.conf.Found(w.ID, f)
		return f.sockets, nil
	}
	if _, _, err := net.SplitHostPort(w.Address); err == nil && w.BlockSize == 0 {
		// Only the block size is missing, so an error is ignored.
		if f, err := s.Discover(ctx, *w); err == nil {
			w.Engine, w.BlockSize = cmp.Or(w.Engine, f.Engine), f.BlockSize
			f.DPStart, f.DPSize = w.DPStart, max(1, w.DPSize)
			s.conf.Found(w.ID, f)
		}
	}
	return w.sockets()
}

// sockets returns the addresses of the events of a worker with an Endpoint.
func (w *EngineWorker) sockets() (sockets []socket, err error) {
	if w.Transport == TransportPoll {
		return []socket{{rank: w.DPStart, url: w.Endpoint}}, nil
	}
	host, _, err := net.SplitHostPort(w.Address)
	if err != nil {
		host = "127.0.0.1"
	}
	for i := range max(1, w.DPSize) {
		at := socket{rank: w.DPStart + i, topic: w.Topic}
		if at.events, err = zmtp.ParseEndpoint(w.Endpoint, basePort, int(at.rank)); err != nil {
			return nil, err
		}
		at.events = at.events.At(host)
		if err = at.setReplay(w.Replay, host); err != nil {
			return nil, err
		}
		sockets = append(sockets, at)
	}
	return sockets, nil
}

// errNoEvents is wrapped by errors about engines that publish no events.
var errNoEvents = errors.New("it publishes no events")

// label names a worker for a person.
func (w *EngineWorker) label() string {
	if w.Name == "" {
		return fmt.Sprint(w.ID)
	}
	return fmt.Sprintf("%q", w.Name)
}

// where returns the address of the events, as the configuration would have it.
func (at *socket) where() string { return cmp.Or(at.url, at.events.String()) }

// name returns a text that is equal for equal sockets and ranks.
func (at *socket) name() string {
	e := at.events
	e.Host = strings.ToLower(strings.TrimSuffix(e.Host, "."))
	if a, err := netip.ParseAddr(e.Host); err == nil {
		e.Host = a.Unmap().String()
	}
	return fmt.Sprint(cmp.Or(at.url, e.String()), " ", at.topic, " rank ", at.rank)
}

// EventSockets returns the event sockets that the settings of a worker name, one for each rank: where
// has the addresses as people write them, names has texts that are equal if two workers name the same
// socket for the same rank. Both are empty if the engine is to be queried for its sockets, or if the
// settings are wrong.
func (w *EngineWorker) EventSockets() (where, names []string) {
	if w.Endpoint == "" {
		return nil, nil
	}
	sockets, err := w.sockets()
	if err != nil {
		return nil, nil
	}
	for i := range sockets {
		where, names = append(where, sockets[i].where()), append(names, sockets[i].name())
	}
	return where, names
}
