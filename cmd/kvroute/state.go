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

	"github.com/kvroute/kvroute/internal/records"
)

// Files in --state-dir: the snapshot of the workers whose events no stream stores, and the state
// of engines whose sockets kvroute reads. Their names begin with the scope.
const (
	eventFile  = "events"
	sourceFile = "sources"
)

// loadState opens or makes the folder of --state-dir and reads the files of an earlier process.
// kvroute also serves if a file is refused.
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
	if !s.router.WantsEvents() {
		return nil
	}
	if err := s.loadFile(sourceFile, s.conf.Scope.Bucket(sourceFile), s.direct.Sources().Load); err != nil {
		return err
	}
	return s.loadFile(eventFile, s.conf.Scope.Bucket(eventFile),
		func(r io.Reader) (int, error) { return s.events.Load(r, s.holdings) })
}

// loadFile reads a file of the folder if it exists. A damaged file, or one of another version
// of kvroute, is refused as a whole; the next save replaces it.
func (s *server) loadFile(what, name string, load func(io.Reader) (int, error)) error {
	f, err := s.state.Open(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	n := 0
	if err == nil {
		n, err = load(f)
		_ = f.Close() // only read
	}
	switch {
	case errors.Is(err, records.ErrBad):
		s.metered.files.Count(what, "refused")
		s.log.Warn("a state file is refused; what it says of the workers' caches is lost", "file", f.Name(), "err", err)
		return nil
	case err != nil:
		return fmt.Errorf("state-dir: %w", err)
	}
	s.metered.files.Count(what, "loaded")
	s.log.Info("a state file is read", "file", f.Name(), "ranks", n)
	return nil
}

// keepState saves the state periodically, and at the end.
func (s *server) keepState(ctx context.Context) error {
	tick := time.NewTicker(s.conf.StateInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return s.saveState()
		case <-tick.C:
			if err := s.saveState(); err != nil {
				s.log.Warn("the state is not saved; a restart would use an older one", "err", err)
			}
		}
	}
}

// saveWait is how long a save waits for a dump that a client reads.
const saveWait = 15 * time.Second

// saveState writes both files, even if one of them fails.
func (s *server) saveState() error {
	if !s.router.WantsEvents() {
		return nil
	}
	return errors.Join(
		s.saveFile(sourceFile, s.conf.Scope.Bucket(sourceFile), s.direct.Sources().Save),
		s.saveFile(eventFile, s.conf.Scope.Bucket(eventFile), s.saveEvents))
}

func (s *server) saveFile(what, name string, write func(io.Writer) error) error {
	err := records.WriteFile(s.state, name, write)
	if err != nil {
		s.metered.files.Count(what, "failed")
		return fmt.Errorf("state-dir: %s: %w", name, err)
	}
	s.metered.files.Count(what, "saved")
	return nil
}

// saveEvents writes the snapshot of the workers whose events no stream stores.
func (s *server) saveEvents(w io.Writer) error {
	ctx, cancel := context.WithTimeout(context.Background(), saveWait)
	defer cancel()
	return s.events.Save(ctx, w, s.holdings)
}
