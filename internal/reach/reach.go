// SPDX-License-Identifier: Apache-2.0

// Package reach limits the addresses at which kvroute calls workers, and makes the HTTP
// client for all those calls.
package reach

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kvroute/kvroute/internal/silence"
)

// Networks are the addresses that workers may have. The zero value allows all.
type Networks struct {
	list []network
	// Own reports whether kvroute itself listens at an address. No worker may register
	// there. Default: it listens nowhere.
	Own func(netip.AddrPort) bool

	authorities, name string // of workers that use TLS: see [Networks.Secure]
}

// network is a prefix with the ports allowed there.
type network struct {
	netip.Prefix
	first, last uint16
}

// String returns the network as [Parse] reads it.
func (n network) String() string {
	switch n.first {
	case 0:
		return n.Prefix.String()
	case n.last:
		return fmt.Sprintf("%v:%d", n.Prefix, n.first)
	}
	return fmt.Sprintf("%v:%d-%d", n.Prefix, n.first, n.last)
}

// Parse reads a list, comma-separated: CIDR, CIDR:port or CIDR:port-port.
func Parse(list string) (n Networks, err error) {
	for item := range strings.SplitSeq(list, ",") {
		if item = strings.TrimSpace(item); item == "" {
			continue
		}
		one, ok := parse(item)
		if !ok {
			return Networks{}, fmt.Errorf("%q is not a network, want CIDR, CIDR:port or CIDR:port-port, as in 10.0.0.0/8:8000-8099", item)
		}
		n.list = append(n.list, one)
	}
	return n, nil
}

func parse(item string) (n network, ok bool) {
	slash := strings.LastIndexByte(item, '/')
	bits, ports, limited := strings.Cut(item[slash+1:], ":")
	prefix, err := netip.ParsePrefix(item[:slash+1] + bits)
	if err != nil {
		return n, false
	}
	n.Prefix, n.last = prefix.Masked(), 65535
	if !limited {
		return n, true
	}
	from, to, ranged := strings.Cut(ports, "-")
	if !ranged {
		to = from
	}
	first, err1 := strconv.ParseUint(from, 10, 16)
	last, err2 := strconv.ParseUint(to, 10, 16)
	n.first, n.last = uint16(first), uint16(last)
	return n, err1 == nil && err2 == nil && first > 0 && first <= last
}

// First returns an address in the first network, for checks that need any address. It is never
// 0.0.0.0 or ::, which no worker may have. It is invalid without networks.
func (n Networks) First() netip.Addr {
	if len(n.list) == 0 {
		return netip.Addr{}
	}
	if a := n.list[0].Addr(); !a.IsUnspecified() {
		return a
	}
	return n.list[0].Addr().Next()
}

func (n Networks) contain(a netip.AddrPort, also func(network) bool) bool {
	return slices.ContainsFunc(n.list, func(w network) bool {
		return w.Contains(a.Addr().Unmap()) && (a.Port() == 0 || w.first <= a.Port() && a.Port() <= w.last) && also(w)
	})
}

// Check refuses an address outside the networks; port 0 stands for any. The error says
// what is wanted.
func (n Networks) Check(a netip.AddrPort) error {
	if len(n.list) == 0 || n.contain(a, func(network) bool { return true }) {
		return nil
	}
	return fmt.Errorf("an address in the worker networks %v", n.list)
}

// CheckRegistered also refuses loopback and link-local addresses, unless the operator allows them:
// other programs listen there without authentication, because only local processes reach them. A
// network such as 127.0.0.0/8 allows them; 0.0.0.0/0 does not.
func (n Networks) CheckRegistered(a netip.AddrPort) error {
	if err := n.Check(a); err != nil {
		return err
	}
	if n.Own != nil && n.Own(a) {
		return fmt.Errorf("an address at which kvroute itself does not listen")
	}
	if local(a.Addr()) && !n.contain(a, func(w network) bool { return local(w.Addr()) }) {
		return fmt.Errorf("an address that is neither loopback nor link-local, unless --worker-networks names such a network, as 127.0.0.0/8")
	}
	return nil
}

// local says whether an address is loopback or link-local, also as an IPv6 form of such an IPv4 address.
func local(a netip.Addr) bool {
	a = embedded(a.Unmap())
	return a.IsLoopback() || a.IsLinkLocalUnicast()
}

// embedded returns the IPv4 address to which gateways translate an IPv6 address: of 6to4 (2002::/16), of NAT64
// (64:ff9b::/96 and 64:ff9b:1::/48) and of the old IPv4-compatible form (::/96). Other addresses are returned unchanged.
func embedded(a netip.Addr) netip.Addr {
	if !a.Is6() || a == netip.IPv6Loopback() {
		return a
	}
	b := a.As16()
	switch {
	case b[0] == 0x20 && b[1] == 0x02:
		return netip.AddrFrom4([4]byte(b[2:6]))
	case [4]byte(b[:4]) == [4]byte{0, 0x64, 0xff, 0x9b}, [12]byte(b[:12]) == [12]byte{}:
		return netip.AddrFrom4([4]byte(b[12:]))
	}
	return a
}

// Control is the Control function of a [net.Dialer]. It refuses addresses outside the networks,
// after names were resolved.
func (n Networks) Control(kind, address string, _ syscall.RawConn) error {
	if !strings.HasPrefix(kind, "tcp") {
		return nil // a Unix socket, which only the operator's file names
	}
	a, err := netip.ParseAddrPort(address)
	if err == nil {
		err = n.Check(a)
	}
	if err != nil {
		return fmt.Errorf("address is %s, want %w", address, err)
	}
	return nil
}

// Secure makes the clients made afterwards use TLS for all calls, also to http URLs: whether workers
// use TLS is one setting, not a part of each address. A worker's certificate must be signed by one of
// the authorities in a PEM file, which is read for each connection, and be for the name. An empty name
// stands for the worker's IP address. Without a file Secure changes nothing. Errors begin with a
// setting's name.
func (n *Networks) Secure(authorities, name string) (err error) {
	n.authorities, n.name = authorities, name
	if authorities == "" && name != "" {
		return errors.New("worker-tls-name needs worker-tls-ca")
	} else if authorities != "" {
		_, err = Authorities("worker-tls-ca", authorities)
	}
	return err
}

// Authorities reads certificates from a PEM file, which a setting names.
func Authorities(setting, file string) (*x509.CertPool, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", setting, err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(text) {
		return nil, fmt.Errorf("%s is %q, want a PEM file with certificates", setting, file)
	}
	return pool, nil
}

// Client returns an HTTP client for calls to workers. It connects to addresses in the
// networks only, does not follow redirects, and ignores proxies of the environment.
func (n Networks) Client() *http.Client {
	return &http.Client{
		Transport:     &transport{fresh: n.transport, current: n.transport()},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

// transport replaces its [http.Transport] after maxFailures failed requests: that keeps about 450 bytes for each
// address that it could not connect to, until it sends a request to that address again.
type transport struct {
	fresh func() *http.Transport

	mu sync.Mutex
	// mu guards the fields below.
	current  *http.Transport
	failures int
}

const maxFailures = 10_000

func (t *transport) RoundTrip(req *http.Request) (*http.Response, error) {
	t.mu.Lock()
	current := t.current
	t.mu.Unlock()
	resp, err := current.RoundTrip(req)
	if err != nil && t.fails(current) {
		current.CloseIdleConnections() // others end with their requests
	}
	return resp, err
}

// fails counts a failed request, and reports whether its transport was replaced.
func (t *transport) fails(by *http.Transport) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.current != by {
		return false
	}
	if t.failures++; t.failures < maxFailures {
		return false
	}
	t.current, t.failures = t.fresh(), 0
	return true
}

// CloseIdleConnections is what [http.Client.CloseIdleConnections] calls.
func (t *transport) CloseIdleConnections() {
	t.mu.Lock()
	current := t.current
	t.mu.Unlock()
	current.CloseIdleConnections()
}

func (n Networks) transport() *http.Transport {
	// A worker whose machine is down does not answer.
	dialer := &net.Dialer{Timeout: 5 * time.Second, Control: n.Control}
	silence.Limit(dialer)
	transport := &http.Transport{DialContext: dialer.DialContext, MaxIdleConnsPerHost: 64, IdleConnTimeout: time.Minute, WriteBufferSize: 1 << 10}
	if n.authorities != "" {
		transport.DialContext = func(ctx context.Context, network, address string) (net.Conn, error) {
			roots, err := Authorities("worker-tls-ca", n.authorities)
			if err != nil {
				return nil, err
			}
			secured := tls.Dialer{
				NetDialer: dialer, Config: &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: roots, ServerName: n.name},
			}
			conn, err := secured.DialContext(ctx, network, address)
			if _, untrusted := errors.AsType[*tls.CertificateVerificationError](err); untrusted {
				return nil, fmt.Errorf("worker-tls-ca is %s, worker-tls-name is %q: %w", n.authorities, n.name, err)
			}
			return conn, err
		}
		transport.DialTLSContext = transport.DialContext
	}
	return transport
}

// ErrLong is wrapped by the error of an answer with more bytes than allowed.
var ErrLong = errors.New("the answer is too long")

// StatusError is the error of an answer with another status than 2xx.
type StatusError struct {
	Status int
	Text   string // the beginning of the answer
}

func (e StatusError) Error() string { return fmt.Sprintf("status %d: %s", e.Status, e.Text) }

// Get requests a URL with a Host header, by default the URL's host, and returns the answer as [Read] does.
func Get(ctx context.Context, client *http.Client, host, address string, most int) ([]byte, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return nil, err
	}
	req.Host = host
	return Read(client, req, most)
}

// buffers has buffers for answers of unknown length. One that has grown above keptBuffer bytes is not kept.
//
//nolint:gochecknoglobals // a pool serves the whole process
var buffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

const keptBuffer = 64 << 10

// readAll is [io.ReadAll] without the garbage of a buffer that grows: a fleet's metrics are many.
func readAll(r io.Reader) ([]byte, error) {
	buf, _ := buffers.Get().(*bytes.Buffer)
	defer func() {
		if buf.Cap() <= keptBuffer {
			buf.Reset()
			buffers.Put(buf)
		}
	}()
	_, err := buf.ReadFrom(r)
	return bytes.Clone(buf.Bytes()), err
}

// Read sends a request and returns the answer. An answer of more than most bytes, or with a [StatusError],
// is an error. Errors are of the type [url.Error], as those of the client.
func Read(client *http.Client, req *http.Request, most int) ([]byte, error) {
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := readAll(io.LimitReader(resp.Body, int64(most)+1))
	if resp.StatusCode/100 != 2 {
		err = StatusError{resp.StatusCode, strings.TrimSpace(string(body[:min(len(body), 4096)]))}
	} else if err == nil && len(body) > most {
		err = fmt.Errorf("%w: more than %d bytes", ErrLong, most)
	}
	if err != nil {
		return nil, &url.Error{Op: req.Method, URL: req.URL.String(), Err: err}
	}
	return body, nil
}
