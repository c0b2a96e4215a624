// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"fmt"
	"log/slog"
	"sync"

	"github.com/kvroute/kvroute/internal/reach"
)

// tlsFiles is a TLS configuration from files, which are read at each handshake: clients open few
// connections, and keep them. A handshake for which the files cannot be read gets the
// configuration of the last good ones.
type tlsFiles struct {
	of, protocol string // beginning of the settings' names; name of the application's protocol
	cert, key    string
	clientCA     string // of the clients that may connect; empty accepts all
	log          *slog.Logger

	mu sync.Mutex
	// mu guards the fields below.
	last   *tls.Config
	failed string // the last error that was logged
}

// extprocTLS returns the configuration for Envoy's connections, as [tlsFiles.open] does.
func (c *config) extprocTLS(log *slog.Logger) (*tls.Config, error) {
	return (&tlsFiles{
		of: "extproc-tls", protocol: "h2", cert: c.ExtprocTLSCert, key: c.ExtprocTLSKey,
		clientCA: c.ExtprocTLSClientCA, log: log,
	}).open()
}

// httpTLS returns the configuration for connections to the API, as [tlsFiles.open] does.
func (c *config) httpTLS(log *slog.Logger) (*tls.Config, error) {
	return (&tlsFiles{of: "http-tls", protocol: "http/1.1", cert: c.HTTPTLSCert, key: c.HTTPTLSKey, log: log}).open()
}

// open returns a configuration that follows the files, nil without the settings. It fails if some of
// the settings are missing, or the files cannot be read.
func (f *tlsFiles) open() (*tls.Config, error) {
	switch {
	case f.cert == "" && f.key == "" && f.clientCA == "":
		return nil, nil //nolint:nilnil // without TLS there is no configuration
	case f.cert == "" || f.key == "":
		return nil, fmt.Errorf("%[1]s-cert and %[1]s-key need each other, and every other %[1]s setting needs both", f.of)
	}
	if _, err := f.current(); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return f.current() },
	}, nil
}

// current returns the configuration of the current files, or of the last good ones.
func (f *tlsFiles) current() (*tls.Config, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, err := f.read()
	switch {
	case err == nil:
		if f.failed != "" {
			f.log.Info("the TLS files can be read again", "cert", f.cert)
		}
		f.last, f.failed = now, ""
	case f.last == nil:
		return nil, err
	case err.Error() != f.failed:
		f.failed = err.Error()
		f.log.Error("the TLS files cannot be read; the old ones stay", "err", err)
	}
	return f.last, nil
}

func (f *tlsFiles) read() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return nil, fmt.Errorf("%[1]s-cert %[2]s, %[1]s-key %[3]s: %[4]w", f.of, f.cert, f.key, err)
	}
	// Without tickets no session outlives the files by which its client was accepted.
	c := &tls.Config{
		MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{f.protocol},
		SessionTicketsDisabled: true,
	}
	if f.clientCA != "" {
		c.ClientAuth = tls.RequireAndVerifyClientCert
		c.ClientCAs, err = reach.Authorities(f.of+"-client-ca", f.clientCA)
	}
	return c, err
}
