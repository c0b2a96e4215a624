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

	"github.com/kvroute/kvroute/router"
)

// guessFile is the file in --state-dir with what the router believes untold.
const guessFile = "guesses"

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
	f, err := s.state.Open(guessFile)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("state-dir: %w", err)
	}
	defer func() { _ = f.Close() }() // only read
	blocks, err := s.router.LoadGuesses(f)
	switch {
	case errors.Is(err, router.ErrBadGuesses):
		s.log.Warn("what was believed of the workers' caches is lost", "file", f.Name(), "err", err)
	case err != nil:
		return fmt.Errorf("state-dir: %w", err)
	default:
		s.log.Info("what was believed of the workers' caches is back", "blocks", blocks)
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
	if err := writeWhole(s.state, guessFile, s.router.SaveGuesses); err != nil {
		return fmt.Errorf("state-dir: %w", err)
	}
	return nil
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
