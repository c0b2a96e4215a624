// SPDX-License-Identifier: Apache-2.0

package sidecar

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// waitForEngine waits until the engine answers, and completes the record with its answers.
func (s *Sidecar) waitForEngine(ctx context.Context) (err error) {
	level := slog.LevelInfo
	for {
		if s.first, err = s.ask(ctx); err == nil {
			break
		}
		if ctx.Err() == nil {
			s.log.Log(ctx, level, "waiting for the engine", "engine", s.engine.Address, "err", err)
			level = slog.LevelDebug
		}
		if !bus.Wait(ctx, time.Second) {
			return ctx.Err()
		}
	}
	f := &s.first.found
	s.healthy.Store(true)
	s.record.Models = s.first.models
	s.record.Engine = cmp.Or(s.record.Engine, f.Engine)
	s.record.Role = cmp.Or(s.record.Role, router.Role(f.Role))
	if host, _, err := net.SplitHostPort(s.record.Address); err == nil && f.BootstrapPort > 0 {
		s.record.Bootstrap = net.JoinHostPort(host, fmt.Sprint(f.BootstrapPort))
	}
	if s.conf.ZMQ == "" && f.DPSize > 0 {
		s.record.DPStart, s.record.DPSize = f.DPStart, f.DPSize
	}
	s.engine.Engine, s.engine.DPStart, s.engine.DPSize = s.record.Engine, s.record.DPStart, s.record.DPSize
	return nil
}

// fitBlocks sets the size of the record's blocks, and compares it with the engine's.
func (s *Sidecar) fitBlocks() error {
	own, theirs := s.first.found.BlockSize, s.record.BlockSize
	switch {
	case own == 0 && theirs == 0:
		return errors.New("block-size is 0, and the engine does not report its own")
	case theirs == 0:
		s.record.BlockSize = own
		if own < smallestBlock && smallestBlock%own == 0 {
			s.record.BlockSize = smallestBlock
		}
	case own > 0 && own%theirs != 0 && theirs%own != 0:
		s.mismatch = true
		s.record.KVEvents = indexer.StateMisfit
		s.log.Error("neither block size is a multiple of the other: no events are published, and routers estimate what the engine caches",
			"engine_block_size", own, "block_size", theirs)
	}
	if s.record.TotalKVBlocks == 0 {
		s.record.TotalKVBlocks = s.first.found.TotalKVBlocks
		if own > 0 {
			s.record.TotalKVBlocks = s.record.TotalKVBlocks * own / s.record.BlockSize
		}
	}
	s.engine.BlockSize = s.record.BlockSize
	return nil
}

// checkHealth checks whether the engine is healthy, and how busy it is. An engine that comes back
// must give the same answers as before.
func (s *Sidecar) checkHealth(ctx context.Context) error {
	was := s.healthy.Load()
	_, err := s.get(ctx, s.conf.HealthPath)
	if err == nil && !was {
		var now answers
		if now, err = s.ask(ctx); err == nil {
			if other := now.difference(&s.first); other != "" {
				return errors.New("another engine is at the address: " + other + "; start again to register it")
			}
		}
	}
	if err == nil {
		s.measure(ctx)
	}
	if s.healthy.Store(err == nil); was != (err == nil) && ctx.Err() == nil {
		s.log.Warn("the engine's health has changed", "alive", err == nil, "err", err)
	}
	return nil
}

// measure reads the engine's load from its metrics, keeps it for the heartbeats, and
// publishes how many blocks of its cache each rank uses.
func (s *Sidecar) measure(ctx context.Context) {
	paths := fleet.LoadPaths[:]
	if s.conf.MetricsPath != "" {
		paths = []string{s.conf.MetricsPath}
	}
	ranks, _, err := fleet.AskLoad(paths, fleet.Capacity{Blocks: s.record.TotalKVBlocks, BlockSize: s.record.BlockSize},
		func(path string) ([]byte, error) { return s.get(ctx, path) })
	if err != nil {
		if ctx.Err() == nil {
			s.load.unknown.Do(func() { s.log.Info("the engine does not report its load, so heartbeats have none", "err", err) })
		}
		return
	}
	s.load.last.Store(&loadReport{ranks, time.Now()})
	for rank, l := range ranks {
		e := events.Envelope{
			PublisherID: s.load.publisher, Sequence: s.load.sequence, PublishedAt: uint64(time.Now().UnixMilli()),
			Topic:   events.LoadTopic,
			Payload: events.AppendUsedBlocks(nil, s.engine.ID, rank, uint64(l.KVUsedBlocks)),
		}
		s.load.sequence++
		// The next message replaces a lost one.
		_ = s.nc.Publish(s.conf.Scope.Topic(events.LoadTopic), events.AppendEnvelope(nil, e))
	}
}

// engineLoad is the load that an engine last reported.
type engineLoad struct {
	publisher uint64 // id that signs the messages of used blocks; not the id of events
	sequence  uint64 // of these messages
	unknown   sync.Once
	last      atomic.Pointer[loadReport]
}

// loadReport is the load of the ranks at a time.
type loadReport struct {
	ranks map[uint32]fleet.Load
	at    time.Time
}

// recent is the load for heartbeats: the zero load if the last report is too old.
func (l *engineLoad) recent() fleet.Load {
	last := l.last.Load()
	if last == nil || time.Since(last.at) > loadGood {
		return fleet.Load{}
	}
	return fleet.Total(last.ranks)
}

// answers is what an engine reports about itself, for values that the flags do not set. Zero values
// are unknown.
type answers struct {
	models []string
	found  engines.Found
}

// ask checks whether the engine is healthy, and requests the values that the flags do not set.
func (s *Sidecar) ask(ctx context.Context) (a answers, err error) {
	if _, err := s.get(ctx, s.conf.HealthPath); err != nil {
		return a, err
	}
	if a.models = commaList(s.conf.Model); a.models == nil {
		var answer struct{ Data []struct{ ID string } }
		body, err := s.get(ctx, "/v1/models")
		if err == nil {
			err = json.Unmarshal(body, &answer)
		}
		if err != nil {
			return a, err
		}
		for _, m := range answer.Data {
			a.models = append(a.models, m.ID)
		}
	}
	if s.engine.Transport != engines.TransportZMQ {
		return a, nil
	}
	if a.found, err = s.sources.Discover(ctx, s.conf.engineWorker()); s.conf.ZMQ != "" {
		err = nil // the flags have all necessary values
	}
	return a, err
}

// difference names the first answer in which an engine differs from the earlier one. Unknown answers
// equal any answer.
func (a *answers) difference(before *answers) string {
	f, old := &a.found, &before.found
	for _, d := range []struct {
		what     string
		now, was any
		known    bool
	}{
		{"models", a.models, before.models, true},
		{"engine", f.Engine, old.Engine, f.Engine != "" && old.Engine != ""},
		{"role", f.Role, old.Role, f.Role != "" && old.Role != ""},
		{"tokens in a block", f.BlockSize, old.BlockSize, f.BlockSize > 0 && old.BlockSize > 0},
		{"ranks from", [2]uint32{f.DPStart, f.DPSize}, [2]uint32{old.DPStart, old.DPSize}, f.DPSize > 0 && old.DPSize > 0},
	} {
		if now, was := fmt.Sprint(d.now), fmt.Sprint(d.was); d.known && now != was {
			return fmt.Sprintf("%s %s, before %s", d.what, now, was)
		}
	}
	return ""
}

// maxAnswer limits an answer of the engine, in bytes.
const maxAnswer = 64 << 20

// get returns the body of an engine's answer.
func (s *Sidecar) get(ctx context.Context, path string) ([]byte, error) {
	return reach.Get(ctx, s.client, "", "http://"+s.engine.Address+path, maxAnswer)
}
