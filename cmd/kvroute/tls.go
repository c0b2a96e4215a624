// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
)

// tlsFiles serves TLS from files that may be replaced while it does: what has
// changed is read at the next handshake. New files that make no sense leave the old
// ones in force, and a line in the log.
type tlsFiles struct {
	cert, key string
	clientCA  string // whose clients may connect; empty lets all
	log       *slog.Logger

	mu sync.Mutex
	// mu guards the fields below.
	current *tls.Config
	files   *watch // what current is made of
	looked  time.Time
	failed  string // the last complaint
}

// tlsLookEvery is how often a handshake looks whether the files have changed.
const tlsLookEvery = time.Second

// tls returns what Envoy's connections are secured with, nil without the settings.
// It fails if only some of them are given, or the files make no sense.
func (c *config) tls(log *slog.Logger) (credentials.TransportCredentials, error) {
	f := &tlsFiles{cert: c.ExtprocTLSCert, key: c.ExtprocTLSKey, clientCA: c.ExtprocTLSClientCA, log: log}
	switch {
	case f.cert == "" && f.key == "" && f.clientCA == "":
		return nil, nil //nolint:nilnil // nothing to be secured with
	case f.cert == "" || f.key == "":
		return nil, errors.New("extproc-tls-cert and extproc-tls-key need each other, and extproc-tls-client-ca needs both")
	}
	if _, err := f.get(time.Now()); err != nil {
		return nil, err
	}
	return credentials.NewTLS(&tls.Config{
		MinVersion: tls.VersionTLS12,
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			return f.get(time.Now())
		},
	}), nil
}

// get returns the configuration of the files as they are, or as they were when they
// last made sense.
func (f *tlsFiles) get(now time.Time) (*tls.Config, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.current != nil && now.Sub(f.looked) < tlsLookEvery {
		return f.current, nil
	}
	f.looked = now
	files := newWatch(now, f.cert, f.key, f.clientCA)
	if f.current != nil && slices.Equal(files.seen, f.files.seen) {
		return f.current, nil
	}
	fresh, err := f.read()
	switch {
	case err == nil:
		if f.current != nil {
			f.log.Info("the TLS files have changed", "cert", f.cert)
		}
		f.current, f.files, f.failed = fresh, files, ""
	case f.current == nil:
		return nil, err
	case err.Error() != f.failed:
		f.failed = err.Error()
		f.log.Error("the TLS files have changed and make no sense; the old ones stay", "err", err)
	}
	return f.current, nil
}

func (f *tlsFiles) read() (*tls.Config, error) {
	pair, err := tls.LoadX509KeyPair(f.cert, f.key)
	if err != nil {
		return nil, fmt.Errorf("extproc-tls-cert %s, extproc-tls-key %s: %w", f.cert, f.key, err)
	}
	c := &tls.Config{MinVersion: tls.VersionTLS12, Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"}}
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
