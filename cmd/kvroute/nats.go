// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/records"
)

// embeddedNATS is a NATS server with JetStream inside this process.
type embeddedNATS struct {
	server   *natsserver.Server
	password string
	dir      string // that goes with it; "" if what it stores stays
}

// natsUser is the user name of every client of the embedded server.
const natsUser = "kvroute"

// natsURLFile is the file in --state-dir with the URL of the bus in this process. It has
// the password, so only this user may read it.
const natsURLFile = "nats-url"

// openBus connects to the configured NATS server, or starts the embedded one.
func (s *server) openBus() error {
	c := &s.conf
	address, err := bus.ReadURL(c.NATSURL)
	if err != nil {
		return err
	}
	var inProcess []nats.Option
	if address == "" {
		if s.bus, err = c.startBus(); err != nil {
			return err
		}
		address, inProcess = s.bus.url(), []nats.Option{nats.InProcessServer(s.bus.server)}
		s.log.Info("the bus is in this process", "listens", cmp.Or(c.NATSListen, "nowhere"), "keeps", cmp.Or(c.StateDir, "nothing"))
	}
	s.nc, err = bus.Connect(address, "kvroute serve", &c.Access, s.log, inProcess...)
	return err
}

// startBus starts the bus of this process. With --state-dir its password stays the same
// after a restart.
func (c *config) startBus() (*embeddedNATS, error) {
	if c.StateDir == "" {
		return startNATS(c.NATSListen, "")
	}
	if err := os.MkdirAll(c.StateDir, 0o700); err != nil {
		return nil, fmt.Errorf("state-dir: %w", err)
	}
	dir, err := os.OpenRoot(c.StateDir)
	if err != nil {
		return nil, fmt.Errorf("state-dir: %w", err)
	}
	defer func() { _ = dir.Close() }() // only a handle
	listen := c.NATSListen
	if old, err := dir.ReadFile(natsURLFile); err == nil {
		if u, err := url.Parse(strings.TrimSpace(string(old))); err == nil && u.User != nil {
			listen = u.User.String() + "@" + listen
		}
	}
	e, err := startNATS(listen, filepath.Join(c.StateDir, "nats"))
	if err != nil || c.NATSListen == "" {
		return e, err
	}
	if err := records.WriteFile(dir, natsURLFile, func(w io.Writer) error { _, err := fmt.Fprintln(w, e.url()); return err }); err != nil {
		e.stop()
		return nil, fmt.Errorf("state-dir: %w", err)
	}
	return e, nil
}

// startNATS starts a server on user:password@ip:port or ip:port, which makes a password.
// Port 0 picks a free one. Without ip:port the server listens nowhere. What it stores
// stays in a folder, or, if that is "", goes with it.
func startNATS(listen, store string) (*embeddedNATS, error) {
	password := rand.Text()
	if who, at, found := strings.Cut(listen, "@"); found {
		_, password, _ = strings.Cut(who, ":")
		listen = at
	}
	silent := listen == ""
	host, portText, err := net.SplitHostPort(cmp.Or(listen, "127.0.0.1:0"))
	if err != nil {
		return nil, fmt.Errorf("listen address of NATS: %w", err)
	}
	port, err := strconv.Atoi(portText)
	if err != nil {
		return nil, fmt.Errorf("listen address of NATS: port %q is no number", portText)
	}
	if port == 0 {
		port = natsserver.RANDOM_PORT
	}
	dir := ""
	if store == "" {
		if dir, err = os.MkdirTemp("", "kvroute-nats-"); err != nil {
			return nil, fmt.Errorf("store of the NATS server: %w", err)
		}
		store = dir
	}
	s, err := natsserver.NewServer(&natsserver.Options{
		ServerName: "kvroute",
		Host:       host,
		Port:       port,
		JetStream:  true,
		StoreDir:   store,
		Username:   natsUser,
		Password:   password,
		DontListen: silent,
		NoSigs:     true,
		NoLog:      true,
	})
	if err != nil {
		if dir != "" {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		return nil, fmt.Errorf("make the NATS server: %w", err)
	}
	e := &embeddedNATS{server: s, password: password, dir: dir}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		e.stop()
		return nil, fmt.Errorf("start the NATS server on %s: the address is already in use? Set --nats-url to use the server there, or --nats-listen to choose another port", listen)
	}
	return e, nil
}

// url is where to connect, with the password.
func (e *embeddedNATS) url() string {
	at := "127.0.0.1:0" // listens nowhere
	if a := e.server.Addr(); a != nil {
		at = a.String()
	}
	return "nats://" + natsUser + ":" + e.password + "@" + at
}

func (e *embeddedNATS) stop() {
	e.server.Shutdown()
	e.server.WaitForShutdown()
	if e.dir != "" {
		_ = os.RemoveAll(e.dir) // a temporary folder; what is left of it harms nobody
	}
}

// busFlags adds the settings of an access to the bus.
func busFlags(fs *flag.FlagSet, b *bus.Access) {
	fs.StringVar(&b.NATSCreds, "nats-creds", b.NATSCreds, "`file` with credentials for NATS: a JWT and its key")
	fs.StringVar(&b.NATSNkey, "nats-nkey", b.NATSNkey, "`file` with the seed of an nkey for NATS")
	fs.StringVar(&b.NATSCA, "nats-ca", b.NATSCA, "PEM `file` with the certificates that NATS is trusted by")
	fs.StringVar(&b.NATSCert, "nats-cert", b.NATSCert, "PEM `file` with the certificate to show to NATS")
	fs.StringVar(&b.NATSKey, "nats-key", b.NATSKey, "PEM `file` with its key")
	fs.StringVar(&b.NATSInboxPrefix, "nats-inbox-prefix", b.NATSInboxPrefix, "`subject` that answers of NATS come below; empty for _INBOX")
}
