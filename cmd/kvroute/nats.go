// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/records"
)

// natsURLFile is the file in --state-dir with the URL of the bus in this process. It has
// the password, so only this user may read it.
const natsURLFile = "nats-url"

// openBus connects to the configured NATS server, or starts one in this process.
func (s *server) openBus() error {
	c := &s.conf
	address, err := bus.ReadURL(c.NATSURL)
	if err != nil {
		return err
	}
	if c.StateDir != "" && (address != "" || c.NATSListen == "") {
		// An earlier process may have left the file. Its URL leads nowhere now.
		if err := os.Remove(filepath.Join(c.StateDir, natsURLFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("state-dir: %w", err)
		}
	}
	var inProcess []nats.Option
	if address == "" {
		if s.bus, err = c.startBus(); err != nil {
			return err
		}
		address, inProcess = s.bus.URL(), []nats.Option{nats.InProcessServer(s.bus.Server)}
		s.log.Info("NATS runs in this process", "listens", cmp.Or(c.NATSListen, "nowhere"),
			"keeps", cmp.Or(c.StateDir, "nothing"))
	}
	s.nc, err = bus.Connect(address, "kvroute serve", &c.Access, s.log, inProcess...)
	return err
}

// startBus starts the NATS server of this process. With --state-dir its password stays the
// same after a restart.
func (c *config) startBus() (*bus.Server, error) {
	if c.StateDir == "" {
		return bus.StartServer(c.NATSListen, "", "")
	}
	dir, err := os.OpenRoot(c.StateDir)
	if err != nil {
		return nil, fmt.Errorf("state-dir: %w", err)
	}
	defer func() { _ = dir.Close() }() // only a handle
	password := ""
	if old, err := dir.ReadFile(natsURLFile); err == nil {
		if u, err := url.Parse(strings.TrimSpace(string(old))); err == nil {
			password, _ = u.User.Password()
		}
	}
	e, err := bus.StartServer(c.NATSListen, filepath.Join(c.StateDir, "nats"), password)
	if err != nil || c.NATSListen == "" {
		return e, err
	}
	if err := records.WriteFile(dir, natsURLFile, func(w io.Writer) error { _, err := fmt.Fprintln(w, e.URL()); return err }); err != nil {
		e.Stop()
		return nil, fmt.Errorf("state-dir: %w", err)
	}
	return e, nil
}
