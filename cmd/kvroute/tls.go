// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"google.golang.org/grpc/credentials"
)

// tlsFiles is a TLS configuration from files, which are read at each handshake: Envoy opens
// few connections, and keeps them. A handshake for which the files cannot be read gets the
// configuration of the last good ones.
type tlsFiles struct {
	cert, key string
	clientCA  string // of the clients that may connect; empty accepts all
	log       *slog.Logger

	mu sync.Mutex
	// mu guards the fields below.
	last   *tls.Config
	failed string // the last error that was logged
}

// tls returns the credentials for Envoy's connections, nil without the settings. It fails
// if some of the settings are missing, or the files cannot be read.
func (c *config) tls(log *slog.Logger) (credentials.TransportCredentials, error) {
	f := &tlsFiles{cert: c.ExtprocTLSCert, key: c.ExtprocTLSKey, clientCA: c.ExtprocTLSClientCA, log: log}
	switch {
	case f.cert == "" && f.key == "" && f.clientCA == "":
		return nil, nil //nolint:nilnil // without TLS there are no credentials
	case f.cert == "" || f.key == "":
		return nil, errors.New("extproc-tls-cert and extproc-tls-key need each other, and extproc-tls-client-ca needs both")
	}
	if _, err := f.current(); err != nil {
		return nil, err
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion:         tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return f.current() },
	}), nil
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
		return nil, fmt.Errorf("extproc-tls-cert %s, extproc-tls-key %s: %w", f.cert, f.key, err)
	}
	// Without tickets no session outlives the files by which its client was accepted.
	c := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"}, SessionTicketsDisabled: true}
	if f.clientCA != "" {
		pem, err := os.ReadFile(f.clientCA)
		if err != nil {
			return nil, fmt.Errorf("extproc-tls-client-ca: %w", err)
		}
		c.ClientCAs, c.ClientAuth = x509.NewCertPool(), tls.RequireAndVerifyClientCert
		if !c.ClientCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("extproc-tls-client-ca: %s holds no certificate", f.clientCA)
		}
	}
	return c, nil
}
