// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"

	"github.com/kvroute/kvroute/internal/process"
)

// Envoy and kvroute authenticate each other by certificates, and continue when kvroute's files are
// replaced. An Envoy with a certificate of another authority is refused: its requests fail open.
func TestEnvoyAndKvrouteKnowEachOther(t *testing.T) {
	t.Parallel() // mostly waits
	authority := newAuthority(t)
	dir := t.TempDir()
	cert, key, ca := authority.write(dir, "kvroute.internal")
	d := newStack(t, 2, []string{"--speed", "20"})
	d.EnvoyConfig.Cert, d.EnvoyConfig.Key, d.EnvoyConfig.CA = authority.write(dir, "envoy.internal")
	d.EnvoyConfig.ServerName = "kvroute.internal"
	d.begin(t, "--extproc-tls-cert", cert, "--extproc-tls-key", key, "--extproc-tls-client-ca", ca)
	sendChat := func(d *demonstration) (decided bool) {
		t.Helper()
		resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil)
		if resp.StatusCode != 200 {
			t.Fatalf("status %d: %s", resp.StatusCode, body)
		}
		return resp.Header.Get("X-Dynamo-Reason") != ""
	}
	if !sendChat(d) {
		t.Error("kvroute did not decide")
	}

	stranger := *d
	stranger.EnvoyConfig.Cert, stranger.EnvoyConfig.Key, _ = newAuthority(t).write(t.TempDir(), "envoy.internal")
	if err := stranger.StartEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stranger.Envoy.Stop() })
	if sendChat(&stranger) {
		t.Error("kvroute decided for an Envoy that it does not know")
	}

	authority.write(dir, "kvroute.internal")
	d.restartEnvoy(t) // so that there is a new handshake
	eventually(t, "kvroute does not decide with new certificates", func() bool { return sendChat(d) })
}

// Invalid files leave the old ones in force.
func TestTLSFilesAreReadAgain(t *testing.T) {
	a := newAuthority(t)
	dir := t.TempDir()
	c := defaults()
	c.ExtprocTLSCert, c.ExtprocTLSKey, c.ExtprocTLSClientCA = a.write(dir, "one")
	var log strings.Builder
	f := &tlsFiles{of: "extproc-tls", protocol: "h2", cert: c.ExtprocTLSCert, key: c.ExtprocTLSKey, clientCA: c.ExtprocTLSClientCA, log: slog.New(slog.NewTextHandler(&log, nil))}
	certificate := func() string {
		t.Helper()
		got, err := f.current()
		if err != nil {
			t.Fatal(err)
		}
		return string(got.Certificates[0].Certificate[0])
	}
	first := certificate()
	if certificate() != first {
		t.Error("files that stay the same have another certificate")
	}
	if err := os.WriteFile(f.cert, []byte("no certificate"), 0o600); err != nil {
		t.Fatal(err)
	}
	if one, two := certificate(), certificate(); one != first || two != first || strings.Count(log.String(), "the old ones stay") != 1 {
		t.Errorf("a bad file is in force, or logged more than once:\n%s", &log)
	}
	a.write(dir, "one")
	if certificate() == first || !strings.Contains(log.String(), "can be read again") {
		t.Errorf("a good file is not in force:\n%s", &log)
	}

	for want, change := range map[string]func(*config){
		"need each other":  func(c *config) { c.ExtprocTLSKey = "" },
		"want a PEM file":  func(c *config) { c.ExtprocTLSClientCA = c.ExtprocTLSKey },
		"extproc-tls-cert": func(c *config) { c.ExtprocTLSCert = filepath.Join(dir, "none") },
	} {
		bad := c
		change(&bad)
		if _, err := bad.extprocTLS(slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
	c = defaults()
	if secured, err := c.extprocTLS(nil); secured != nil || err != nil {
		t.Errorf("without settings: %v, %v", secured, err)
	}
}

// A new authority in the file replaces the old one at once. A client with a certificate of the old
// authority is refused, even if it resumes a session.
func TestANewAuthorityShutsTheOldOneOut(t *testing.T) {
	old, fresh := newAuthority(t), newAuthority(t)
	dir := t.TempDir()
	c := defaults()
	c.ExtprocTLSCert, c.ExtprocTLSKey, c.ExtprocTLSClientCA = old.write(dir, "kvroute.internal")
	clientOf := func(a *certAuthority) *tls.Config {
		cert, key, _ := a.write(t.TempDir(), "envoy.internal")
		pair, err := tls.LoadX509KeyPair(cert, key)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Config{
			Certificates: []tls.Certificate{pair}, NextProtos: []string{"h2"}, ClientSessionCache: tls.NewLRUClientSessionCache(8), ServerName: "kvroute.internal",
			InsecureSkipVerify: true, //nolint:gosec // it is the server that is tested
		}
	}
	secured, err := c.extprocTLS(slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer(grpc.Creds(credentials.NewTLS(secured)))
	healthpb.RegisterHealthServer(server, health.NewServer())
	go func() { _ = server.Serve(l) }() // ends with Stop
	t.Cleanup(server.Stop)
	// connect opens a new connection, and reports whether it was accepted and resumed a session.
	connect := func(conf *tls.Config) (in, resumed bool) {
		t.Helper()
		conn, err := tls.Dial("tcp", l.Addr().String(), conf)
		if err != nil {
			return false, false
		}
		defer conn.Close()
		if err := conn.SetDeadline(time.Now().Add(process.Patience)); err != nil {
			t.Fatal(err)
		}
		// In TLS 1.3 the server refuses after the handshake; otherwise its settings arrive.
		_, err = io.ReadFull(conn, make([]byte, 9))
		return err == nil, conn.ConnectionState().DidResume
	}
	before := clientOf(old)
	if in, _ := connect(before); !in {
		t.Fatal("the old authority's client is not let in")
	}
	if in, _ := connect(before); !in {
		t.Fatal("the second time it is not let in")
	}
	other := t.TempDir()
	_, _, ca := fresh.write(other, "x")
	text, err := os.ReadFile(ca)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(c.ExtprocTLSClientCA, text, 0o600); err != nil {
		t.Fatal(err)
	}
	after := clientOf(fresh)
	eventually(t, "the new authority's client is not let in", func() bool { in, _ := connect(after); return in })
	if in, resumed := connect(before); in {
		t.Errorf("the old authority's client is let in, resumed: %v", resumed)
	}
	before.ClientSessionCache = nil
	if in, _ := connect(before); in {
		t.Error("the old authority's client is let in with a new session")
	}
}
