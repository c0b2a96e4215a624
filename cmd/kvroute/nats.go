// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"

	"github.com/kvroute/kvroute/internal/bus"
)

// embeddedNATS is a NATS server with JetStream inside this process.
type embeddedNATS struct {
	server *natsserver.Server
	dir    string // that goes with it; "" if what it stores stays
}

// startNATS starts a server on an ip:port; port 0 picks a free one. What it stores
// stays in a folder, or, if that is "", goes with it.
func startNATS(listen, store string) (*embeddedNATS, error) {
	host, portText, err := net.SplitHostPort(listen)
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
		NoSigs:     true,
		NoLog:      true,
	})
	if err != nil {
		if dir != "" {
			err = errors.Join(err, os.RemoveAll(dir))
		}
		return nil, fmt.Errorf("make the NATS server: %w", err)
	}
	e := &embeddedNATS{server: s, dir: dir}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		e.stop()
		return nil, fmt.Errorf("start the NATS server on %s: it does not accept connections; is the port taken?", listen)
	}
	return e, nil
}

func (e *embeddedNATS) url() string { return e.server.ClientURL() }

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
