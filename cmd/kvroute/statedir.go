// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
)

// lockFile is the file in --state-dir that one process at a time holds locked. It has the
// process's id. The kernel releases the lock when the process ends, in whatever way.
const lockFile = "lock"

// lockStateDir makes the folder of --state-dir and reserves it for this process.
func (s *server) lockStateDir() error {
	dir := s.conf.StateDir
	if dir == "" {
		return nil
	}
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		s.stateLock, err = os.OpenFile(filepath.Join(dir, lockFile), os.O_CREATE|os.O_RDWR, 0o600)
	}
	if err != nil {
		return fmt.Errorf("state-dir: %w", err)
	}
	f := s.stateLock
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		owner, _ := os.ReadFile(f.Name()) // the error says enough without it
		return fmt.Errorf("state-dir: another kvroute (process %s) uses %s; give each its own folder",
			strings.TrimSpace(string(owner)), dir)
	} else if err != nil {
		return fmt.Errorf("state-dir: lock %s: %w", f.Name(), err)
	}
	if err := f.Truncate(0); err != nil {
		return fmt.Errorf("state-dir: %w", err)
	}
	_, err = fmt.Fprintln(f, os.Getpid())
	return err
}
