// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/router"
)

// Files in --state-dir: what the router believes untold, what the workers' events
// told, and what engines that are heard directly did. The names of the latter two have
// the scope before them.
const (
	guessFile  = "guesses"
	eventFile  = "events"
	sourceFile = "sources"
)

// loadState opens the folder of --state-dir, making it if need be, and reads what
// an earlier process left there. A damaged file is no reason not to serve.
func (s *server) loadState() (err error) {
	if s.conf.StateDir == "" {
		return nil
	}
	if err = os.MkdirAll(s.conf.StateDir, 0o700); err == nil {
		s.state, err = os.OpenRoot(s.conf.StateDir)
	}
	if err != nil {
		return fmt.Errorf("state-dir: %w", err)
	}
	if err := s.loadFile(guessFile, func(f *os.File) error {
		blocks, err := s.router.LoadGuesses(f)
		switch {
		case errors.Is(err, router.ErrBadGuesses):
			s.log.Warn("what was believed of the workers' caches is lost", "file", f.Name(), "err", err)
			return nil
		case err == nil:
			s.log.Info("what was believed of the workers' caches is back", "blocks", blocks)
		}
		return err
	}); err != nil || !s.router.WantsEvents() {
		return err
	}
	if err := s.loadFile(s.scope.Bucket(sourceFile), func(f *os.File) error {
		ranks, err := s.direct.sources.Load(f)
		switch {
		case errors.Is(err, events.ErrBadState):
			s.log.Warn("what was known of engines is lost; they are asked", "file", f.Name(), "err", err)
			return nil
		case err == nil:
			s.log.Info("what was known of engines is back", "ranks", ranks)
		}
		return err
	}); err != nil {
		return err
	}
	return s.loadFile(s.eventFile(), func(f *os.File) error {
		ranks, err := s.events.Load(f)
		switch {
		case errors.Is(err, events.ErrBadState):
			s.log.Warn("what was told of the workers' caches is lost; they are asked", "file", f.Name(), "err", err)
			return nil
		case err == nil:
			s.log.Info("what was told of the workers' caches is back", "ranks", ranks)
		}
		return err
	})
}

func (s *server) eventFile() string { return s.scope.Bucket(eventFile) }

// loadFile reads a file of the folder if it is there.
func (s *server) loadFile(name string, load func(*os.File) error) error {
	f, err := s.state.Open(name)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err == nil:
		err = load(f)
		_ = f.Close() // only read
	}
	if err != nil {
		return fmt.Errorf("state-dir: %w", err)
	}
	return nil
}

// keepState saves again and again, and at the end.
func (s *server) keepState(ctx context.Context) error {
	tick := time.NewTicker(s.conf.StateInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return s.saveState()
		case <-tick.C:
			if err := s.saveState(); err != nil {
				s.log.Warn("state is not saved; a restart would fall back on older", "err", err)
			}
		}
	}
}

func (s *server) saveState() error {
	err := writeWhole(s.state, guessFile, s.router.SaveGuesses)
	if s.router.WantsEvents() {
		err = errors.Join(err, writeWhole(s.state, s.scope.Bucket(sourceFile), s.direct.sources.Save))
		err = errors.Join(err, s.router.DumpIndexes(func(begin func() []router.IndexDump) error {
			return writeWhole(s.state, s.eventFile(), func(w io.Writer) error {
				return s.events.Save(w, func() []events.Held { return held(begin()) })
			})
		}))
	}
	if err != nil {
		return fmt.Errorf("state-dir: %w", err)
	}
	return nil
}

// held is what the router's indexes hold.
func held(dumps []router.IndexDump) (held []events.Held) {
	for _, d := range dumps {
		h := events.Held{Runs: d.Runs}
		for _, w := range d.Workers {
			h.Ranks = append(h.Ranks, events.RankName{WorkerID: w.ID, DPRank: w.DPRank})
		}
		held = append(held, h)
	}
	return held
}

// writeWhole writes a file that is there whole or not at all, also after a crash of
// the machine.
func writeWhole(dir *os.Root, name string, write func(io.Writer) error) error {
	f, err := dir.OpenFile(name+".tmp", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	return dir.Rename(name+".tmp", name)
}
