// SPDX-License-Identifier: Apache-2.0

package zmtp

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/internal/silence"
)

// Endpoint is where a socket binds or connects.
type Endpoint struct {
	// Path is the path of a Unix socket; empty means TCP. A leading "@" stands for the abstract
	// name space.
	Path string
	// Host is a name, an address, or "*" for every interface.
	Host string
	Port int
}

// ParseEndpoint reads tcp://host:port or ipc://path. A "{rank}" as the port is replaced by base +
// rank, elsewhere by the rank. Without "{rank}", the port of a rank is the port + rank, as in
// engines.
func ParseEndpoint(s string, base, rank int) (Endpoint, error) {
	marked := strings.Contains(s, "{rank}")
	text := s
	if before, ok := strings.CutSuffix(text, ":{rank}"); ok {
		text = before + ":" + strconv.Itoa(base+rank)
	}
	text = strings.ReplaceAll(text, "{rank}", strconv.Itoa(rank))
	if path, ok := strings.CutPrefix(text, "ipc://"); ok {
		if path == "" || len(path) > 100 { // the kernel accepts 107 bytes
			return Endpoint{}, fmt.Errorf("zmtp: endpoint %q: want ipc:// and a path of at most 100 bytes", clip(s))
		}
		if rank > 0 && !marked {
			return Endpoint{}, fmt.Errorf("zmtp: endpoint %q: more than one rank needs {rank} in the path", clip(s))
		}
		return Endpoint{Path: path}, nil
	}
	address, ok := strings.CutPrefix(text, "tcp://")
	host, portText, err := net.SplitHostPort(address)
	port, portErr := strconv.ParseUint(portText, 10, 16)
	if !ok || err != nil || portErr != nil || host == "" {
		return Endpoint{}, fmt.Errorf("zmtp: endpoint %q: want tcp://host:port or ipc://path", clip(s))
	}
	e := Endpoint{Host: host, Port: int(port)}
	if !marked && e.Port > 0 {
		e.Port += rank
	}
	if e.Port > 65535 {
		return Endpoint{}, fmt.Errorf("zmtp: endpoint %q: rank %d has no port", clip(s), rank)
	}
	return e, nil
}

func clip(s string) string { return s[:min(len(s), 128)] }

// Anywhere reports whether the endpoint names no host, so that it can only be bound.
func (e Endpoint) Anywhere() bool {
	ip := net.ParseIP(e.Host)
	return e.Path == "" && (e.Host == "*" || ip != nil && ip.IsUnspecified())
}

// At returns the endpoint as clients on other machines reach it. An endpoint that names no host
// gets the given host.
func (e Endpoint) At(host string) Endpoint {
	if e.Anywhere() {
		e.Host = host
	}
	return e
}

// String returns the endpoint as [ParseEndpoint] reads it.
func (e Endpoint) String() string {
	if e.Path != "" {
		return "ipc://" + e.Path
	}
	return "tcp://" + net.JoinHostPort(e.Host, strconv.Itoa(e.Port))
}

// Address returns the network and the address to dial or to bind.
func (e Endpoint) Address() (network, address string) {
	if e.Path != "" {
		return "unix", e.Path
	}
	host := e.Host
	if host == "*" {
		host = ""
	}
	return "tcp", net.JoinHostPort(host, strconv.Itoa(e.Port))
}

// Dial connects and shakes hands. Options may change how it connects.
func Dial(ctx context.Context, e Endpoint, own Role, options ...func(*net.Dialer)) (*Conn, error) {
	d := net.Dialer{Timeout: handshakeTime}
	for _, change := range options {
		change(&d)
	}
	silence.Limit(&d)
	network, address := e.Address()
	nc, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, fmt.Errorf("zmtp: connect to %s: %w", e, err)
	}
	stop := context.AfterFunc(ctx, func() { _ = nc.Close() }) // the handshake then ends
	defer stop()
	return NewConn(nc, own)
}
