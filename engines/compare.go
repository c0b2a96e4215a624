// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// Compare compares the settings of a worker with what its engine reports: the block size, and the event
// sockets if the settings name them. The error says that the engine did not answer. An engine that
// reports nothing about itself has no faults.
func (s *Sources) Compare(ctx context.Context, w EngineWorker) (f Found, faults []Fault, err error) {
	asked := w
	asked.Topic, asked.Replay = "", "" // they would replace the engine's
	f, err = s.Discover(ctx, asked)
	status, unsaid := errors.AsType[reach.StatusError](err)
	unsaid = unsaid && !isTransient(status)
	none := errors.Is(err, errNoEvents)
	if err != nil && !unsaid && !none {
		return f, nil, err
	}
	if f.flagsError != nil {
		faults = append(faults, Fault{faultEngineFlags, fmt.Sprintf(
			"its engine reports a --default-chat-template-kwargs that cannot be read (%v): set default-chat-template-kwargs for the model", f.flagsError)})
	}
	direct := w.Transport == TransportZMQ && w.Endpoint != ""
	switch {
	case err == nil && direct:
		faults = append(faults, s.compareSockets(ctx, &w, &f)...)
	case none && direct && s.State(w.ID) == indexer.StateNone:
		faults = append(faults, Fault{faultEventSockets, fmt.Sprintf("its engine reports no event sockets: %v; let the engine publish events, or remove the worker's events", err)})
	}
	if f.BlockSize == 0 {
		metrics, err := s.get(ctx, w.Host, "http://"+w.Address+"/metrics")
		if _, unsaid := errors.AsType[reach.StatusError](err); err != nil && !unsaid {
			return f, faults, err
		}
		f.BlockSize, _ = engine.CacheConfig(metrics)
	}
	if w.BlockSize > 0 && f.BlockSize > 0 && w.BlockSize != f.BlockSize {
		faults = append(faults, Fault{faultBlockSize, fmt.Sprintf("block_size is %d, and its engine has blocks of %d tokens: set block_size to %d",
			w.BlockSize, f.BlockSize, f.BlockSize)})
	}
	return f, faults, nil
}

// compareSockets compares the sockets that the settings of a worker name with those that the engine
// reports. Only ports and paths are compared, since a host has several names. If the ports of a
// container are mapped, the engine reports another port than the settings. So a socket to which
// kvroute is connected is wrong only if the reported one can be reached, too.
func (s *Sources) compareSockets(ctx context.Context, w *EngineWorker, f *Found) []Fault {
	ours, err := w.sockets()
	if err != nil {
		return nil
	}
	for _, at := range ours {
		i := slices.IndexFunc(f.sockets, func(o socket) bool { return o.rank == at.rank })
		if i < 0 {
			return []Fault{{faultEventSockets, fmt.Sprintf("the worker has rank %d, and its engine reports the ranks %d to %d: set dp_start and dp_size",
				at.rank, f.DPStart, f.DPStart+f.DPSize-1)}}
		}
		theirs := f.sockets[i]
		for _, c := range []struct {
			setting  string
			has      bool
			is, want zmtp.Endpoint
			role     zmtp.Role
		}{
			{"events.endpoint", true, at.events, theirs.events, zmtp.Sub},
			{"events.replay", at.replays && theirs.replays, at.replay, theirs.replay, zmtp.Dealer},
		} {
			if c.has && (c.is.Port != c.want.Port || c.is.Path != c.want.Path) && (s.State(w.ID) == indexer.StateNone || s.reaches(ctx, c.want, c.role)) {
				return []Fault{{faultEventSockets, fmt.Sprintf("%s is %s for rank %d, and its engine reports %s: correct %s, or remove it so that kvroute asks the engine",
					c.setting, c.is, at.rank, c.want, c.setting)}}
			}
		}
	}
	return nil
}

// reaches reports whether a socket accepts a connection.
func (s *Sources) reaches(ctx context.Context, e zmtp.Endpoint, role zmtp.Role) bool {
	c, err := zmtp.Dial(ctx, e, role, s.conf.dialer)
	if err != nil {
		return false
	}
	_ = c.Close() // nothing was sent
	return true
}
