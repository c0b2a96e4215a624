// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/saved"
	"github.com/kvroute/kvroute/internal/records"
	"github.com/kvroute/kvroute/router"
)

// Files in --state-dir: the snapshot of the workers whose events no stream stores, the state
// of engines whose sockets kvroute reads, and the ids that workers gave out. Their names begin with the scope.
const (
	eventFile  = "events"
	sourceFile = "sources"
	givenFile  = "given"
)

// The file of ids has the frame of [records]; its data is a list of router.GivenBinding, and the count at its end the
// length of the list.
const (
	givenMagic   = "KVRGIVN1"
	givenVersion = 1
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
	if err := s.loadFile(givenFile, s.conf.Scope.Bucket(givenFile), s.loadGiven); err != nil || !s.router.WantsEvents() {
		return err
	}
	if err := s.loadFile(sourceFile, s.conf.Scope.Bucket(sourceFile), s.direct.Sources().Load); err != nil {
		return err
	}
	return s.loadFile(eventFile, s.conf.Scope.Bucket(eventFile), func(r io.Reader) (int, error) {
		snapshot, whole, err := saved.Read(r, s.conf.Scope)
		if err != nil {
			return 0, err
		}
		return s.events.Load(snapshot, whole, s.holdings)
	})
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
		s.log.Warn("a state file is refused; what it says of the workers is lost", "file", f.Name(), "err", err)
		return nil
	case err != nil:
		return fmt.Errorf("state-dir: %w", err)
	}
	s.metered.files.Count(what, "loaded")
	unit := "ranks"
	if what == givenFile {
		unit = "ids"
	}
	s.log.Info("a state file is read", "file", f.Name(), unit, n)
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

// saveState writes all files, even if one of them fails.
func (s *server) saveState() error {
	given := s.saveGiven()
	if !s.router.WantsEvents() {
		return given
	}
	return errors.Join(
		given,
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
	return s.events.Save(ctx, s.holdings, func(snapshot *events.Snapshot) error {
		_, err := saved.Write(w, s.conf.Scope, snapshot)
		return err
	})
}

// saveGiven writes the ids that workers gave out, if there are new ones.
func (s *server) saveGiven() error {
	changes := s.router.GivenChanges()
	if changes == s.givenSaved {
		return nil
	}
	err := s.saveFile(givenFile, s.conf.Scope.Bucket(givenFile), func(w io.Writer) error {
		list := s.router.GivenBindings()
		out := records.NewWriter(w, records.Header{Magic: givenMagic, Version: givenVersion})
		if err := binary.Write(out, binary.LittleEndian, list); err != nil {
			return fmt.Errorf("save ids: %w", err)
		}
		return out.Close(uint64(len(list)))
	})
	if err == nil {
		s.givenSaved = changes
	}
	return err
}

// loadGiven reads the ids that workers gave out. Loading counts as a use of each.
func (s *server) loadGiven(r io.Reader) (ids int, err error) {
	file, _, err := records.NewReader(r, givenMagic, givenVersion)
	if err != nil {
		return 0, fmt.Errorf("load ids: %w", err)
	}
	size := binary.Size(router.GivenBinding{})
	data, err := io.ReadAll(file)
	if err != nil {
		return 0, fmt.Errorf("load ids: %w", err)
	}
	list := make([]router.GivenBinding, len(data)/size)
	if _, err := binary.Decode(data, binary.LittleEndian, list); err != nil || uint64(len(list)) != file.Count() {
		return 0, fmt.Errorf("load ids: %w: %d bytes", records.ErrBad, len(data))
	}
	for _, b := range list {
		s.router.PeerGave(b)
	}
	s.givenSaved = s.router.GivenChanges()
	return len(list), nil
}
