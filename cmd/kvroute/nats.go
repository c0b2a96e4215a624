// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
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

// BusAccess is how a process shows the bus who it is, and how it knows the bus.
type BusAccess struct {
	// NATSCreds is a credentials file, with a JWT and its key.
	NATSCreds string `yaml:"nats-creds"`
	// NATSNkey is a file with the seed of an nkey.
	NATSNkey string `yaml:"nats-nkey"`
	// NATSCA is a PEM file with the certificates that the bus's own must go back
	// to. Empty takes those of the system. For TLS, NATSURL begins with tls://.
	NATSCA string `yaml:"nats-ca"`
	// NATSCert and NATSKey are PEM files with the certificate that this process
	// shows to the bus, and its key.
	NATSCert string `yaml:"nats-cert"`
	NATSKey  string `yaml:"nats-key"`
	// NATSInboxPrefix begins the subjects on which answers come. One for each kind
	// of client keeps them from reading each other's; see examples/nats.
	NATSInboxPrefix string `yaml:"nats-inbox-prefix"`
}

func (b *BusAccess) flags(fs *flag.FlagSet) {
	fs.StringVar(&b.NATSCreds, "nats-creds", b.NATSCreds, "`file` with credentials for NATS: a JWT and its key")
	fs.StringVar(&b.NATSNkey, "nats-nkey", b.NATSNkey, "`file` with the seed of an nkey for NATS")
	fs.StringVar(&b.NATSCA, "nats-ca", b.NATSCA, "PEM `file` with the certificates that NATS is trusted by")
	fs.StringVar(&b.NATSCert, "nats-cert", b.NATSCert, "PEM `file` with the certificate to show to NATS")
	fs.StringVar(&b.NATSKey, "nats-key", b.NATSKey, "PEM `file` with its key")
	fs.StringVar(&b.NATSInboxPrefix, "nats-inbox-prefix", b.NATSInboxPrefix, "`subject` that answers of NATS come below; empty for _INBOX")
}

// options turns the settings into those of a connection.
func (b *BusAccess) options() (opts []nats.Option, err error) {
	if b.NATSCreds != "" && b.NATSNkey != "" {
		return nil, errors.New("nats-creds and nats-nkey exclude each other")
	}
	if (b.NATSCert == "") != (b.NATSKey == "") {
		return nil, errors.New("nats-cert and nats-key belong together")
	}
	for _, file := range []string{b.NATSCreds, b.NATSNkey, b.NATSCA, b.NATSCert, b.NATSKey} {
		if file != "" {
			if _, err := os.Stat(file); err != nil {
				return nil, fmt.Errorf("credentials for NATS: %w", err)
			}
		}
	}
	if b.NATSCreds != "" {
		opts = append(opts, nats.UserCredentials(b.NATSCreds))
	}
	if b.NATSNkey != "" {
		nkey, err := nats.NkeyOptionFromSeed(b.NATSNkey)
		if err != nil {
			return nil, fmt.Errorf("nats-nkey: %w", err)
		}
		opts = append(opts, nkey)
	}
	if b.NATSCA != "" {
		opts = append(opts, nats.RootCAs(b.NATSCA))
	}
	if b.NATSCert != "" {
		opts = append(opts, nats.ClientCert(b.NATSCert, b.NATSKey))
	}
	if b.NATSInboxPrefix != "" {
		opts = append(opts, nats.CustomInboxPrefix(b.NATSInboxPrefix))
	}
	return opts, nil
}

// connectNATS connects for good: a bus that is not there yet or goes away is
// waited for, and routing goes on meanwhile with what is known.
func connectNATS(url, name string, access *BusAccess, log *slog.Logger) (*nats.Conn, error) {
	opts, err := access.options()
	if err != nil {
		return nil, err
	}
	nc, err := nats.Connect(url, append(
		opts,
		nats.Name(name),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(250*time.Millisecond),
		nats.ReconnectJitter(250*time.Millisecond, time.Second),
		nats.ConnectHandler(func(nc *nats.Conn) { log.Info("connected to NATS", "url", nc.ConnectedUrlRedacted()) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil { // nil: we closed it
				log.Warn("NATS is away", "err", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("NATS is back", "url", nc.ConnectedUrlRedacted()) }),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) { log.Warn("NATS refuses something", "err", err) }),
	)...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	return nc, nil
}
