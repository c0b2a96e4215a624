// SPDX-License-Identifier: Apache-2.0

package bus

import (
	"cmp"
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"os"
	"strconv"
	"strings"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
)

// serverUser is the user name of every client of a Server.
const serverUser = "kvroute"

// Server is a NATS server with JetStream inside this process.
type Server struct {
	*natsserver.Server
	password string
	temp     string // folder to remove at the end; "" to keep the stored data
}

// StartServer starts a server at ip:port. Port 0 means any free port, an empty address no listener,
// an empty password a random one, and an empty folder to store in a temporary one.
func StartServer(listen, store, password string) (*Server, error) {
	host, portText, err := net.SplitHostPort(cmp.Or(listen, "127.0.0.1:0"))
	if err != nil {
		return nil, fmt.Errorf("listen address of NATS: %w", err)
	}
	port, err := strconv.Atoi(portText)
	if err != nil {
		return nil, fmt.Errorf("listen address of NATS: port %q is no number", portText)
	}
	port = cmp.Or(port, natsserver.RANDOM_PORT)
	s := &Server{password: cmp.Or(password, rand.Text())}
	if store == "" {
		if s.temp, err = os.MkdirTemp("", "kvroute-nats-"); err != nil {
			return nil, fmt.Errorf("store of the NATS server: %w", err)
		}
		store = s.temp
	}
	if s.Server, err = natsserver.NewServer(&natsserver.Options{
		ServerName: "kvroute", Host: host, Port: port, DontListen: listen == "",
		JetStream: true, StoreDir: store, Username: serverUser, Password: s.password, NoSigs: true, NoLog: true,
		PingInterval: pingInterval, MaxPingsOut: pingsOut,
	}); err != nil {
		return nil, errors.Join(fmt.Errorf("make the NATS server: %w", err), os.RemoveAll(s.temp))
	}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		s.Stop()
		return nil, fmt.Errorf("start the NATS server on %s: the address is already in use? "+
			"Set --nats-url to use the server there, or --nats-listen to choose another port", listen)
	}
	return s, nil
}

// URL returns the server's address with the password.
func (s *Server) URL() string {
	at := "127.0.0.1:0" // the server has no listener
	if a := s.Addr(); a != nil {
		at = a.String()
	}
	return "nats://" + serverUser + ":" + s.password + "@" + at
}

// Stop ends the server and waits for its end.
func (s *Server) Stop() {
	s.Shutdown()
	s.WaitForShutdown()
	_ = os.RemoveAll(s.temp) // does nothing for ""; remaining files of a temporary folder do no harm
}

// PublicAddress returns the address at which other machines reach a listener: advertise, if given.
// For a listener on all addresses it is the address from which this machine reaches the bus.
func PublicAddress(advertise, listener, busURL string) (string, error) {
	if advertise != "" {
		if _, err := netip.ParseAddrPort(advertise); err != nil {
			return "", fmt.Errorf("advertise is %q, want ip:port", advertise)
		}
		return advertise, nil
	}
	own, err := netip.ParseAddrPort(listener)
	if err != nil || !own.Addr().IsUnspecified() {
		return own.String(), err
	}
	first, _, _ := strings.Cut(busURL, ",")
	u, err := url.Parse(first)
	if err != nil || u.Hostname() == "" {
		return "", fmt.Errorf("find the own address: set --advertise: %q has no host", first)
	}
	// Connecting a UDP socket sends nothing; it only selects the route.
	probe, err := net.Dial("udp", net.JoinHostPort(u.Hostname(), "9"))
	if err != nil {
		return "", fmt.Errorf("find the own address: set --advertise: %w", err)
	}
	defer probe.Close()
	from, err := netip.ParseAddrPort(probe.LocalAddr().String())
	if err != nil {
		return "", err
	}
	return netip.AddrPortFrom(from.Addr().Unmap(), own.Port()).String(), nil
}
