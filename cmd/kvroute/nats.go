// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"strconv"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
)

// embeddedNATS is a NATS server with JetStream inside this process. What it stores
// lives in a temporary folder and goes with it.
type embeddedNATS struct {
	server *natsserver.Server
	dir    string
}

// startNATS starts a server on an ip:port; port 0 picks a free one.
func startNATS(listen string) (*embeddedNATS, error) {
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
	dir, err := os.MkdirTemp("", "kvroute-nats-")
	if err != nil {
		return nil, fmt.Errorf("store of the NATS server: %w", err)
	}
	s, err := natsserver.NewServer(&natsserver.Options{
		ServerName: "kvroute",
		Host:       host,
		Port:       port,
		JetStream:  true,
		StoreDir:   dir,
		NoSigs:     true,
		NoLog:      true,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make the NATS server: %w", err), os.RemoveAll(dir))
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
	_ = os.RemoveAll(e.dir) // a temporary folder; what is left of it harms nobody
}

// connectNATS connects for good: a bus that is not there yet or goes away is
// waited for, and routing goes on meanwhile with what is known.
func connectNATS(url, name string, log *slog.Logger) (*nats.Conn, error) {
	nc, err := nats.Connect(url,
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
	)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	return nc, nil
}
