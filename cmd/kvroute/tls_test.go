// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/tls"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/internal/envoytest"
)

// Envoy and kvroute know each other by certificates, and go on when kvroute's are
// replaced. An Envoy with others' certificates is not served: its requests fail open.
func TestEnvoyAndKvrouteKnowEachOther(t *testing.T) {
	authority := envoytest.NewAuthority(t)
	dir := t.TempDir()
	cert, key, ca := authority.Write(dir, "kvroute.internal")
	d := newStack(t, 2, []string{"--speed", "20"})
	d.secure.Cert, d.secure.Key, d.secure.CA = authority.Write(dir, "envoy.internal")
	d.secure.ServerName = "kvroute.internal"
	d.begin(t, "--extproc-tls-cert", cert, "--extproc-tls-key", key, "--extproc-tls-client-ca", ca)
	ask := func(d *demonstration) (decided bool) {
		t.Helper()
		resp, body := reply(t, d, "POST", chatPath, chatBody("hello", 2, false), nil)
		if resp.StatusCode != 200 {
			t.Fatalf("status %d: %s", resp.StatusCode, body)
		}
		return resp.Header.Get("X-Dynamo-Reason") != ""
	}
	if !ask(d) {
		t.Error("kvroute did not decide")
	}

	stranger := *d
	stranger.secure.Cert, stranger.secure.Key, _ = envoytest.NewAuthority(t).Write(t.TempDir(), "envoy.internal")
	if err := stranger.startEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = stranger.envoy.Stop() })
	if ask(&stranger) {
		t.Error("kvroute decided for an Envoy that it does not know")
	}

	authority.Write(dir, "kvroute.internal")
	if err := d.envoy.Stop(); err != nil { // so that there is a new handshake
		t.Fatal(err)
	}
	if err := d.startEnvoy(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "kvroute does not decide with new certificates", func() bool { return ask(d) })
	eventually(t, "the change is not logged", func() bool { return strings.Contains(d.router.lastLines(), "the TLS files have changed") })
}

// Files that make no sense leave the old ones in force.
func TestTLSFilesAreReadAgain(t *testing.T) {
	a := envoytest.NewAuthority(t)
	dir := t.TempDir()
	c := defaults()
	c.ExtprocTLSCert, c.ExtprocTLSKey, c.ExtprocTLSClientCA = a.Write(dir, "one")
	var log strings.Builder
	f := &tlsFiles{cert: c.ExtprocTLSCert, key: c.ExtprocTLSKey, clientCA: c.ExtprocTLSClientCA, log: slog.New(slog.NewTextHandler(&log, nil))}
	now := time.Now()
	get := func() *tls.Config {
		t.Helper()
		now = now.Add(time.Minute)
		got, err := f.get(now)
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	later := func(path, text string) {
		t.Helper()
		if text != "" {
			if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Chtimes(path, now, now); err != nil {
			t.Fatal(err)
		}
	}
	first := get()
	if get() != first {
		t.Error("files that stay the same are read again")
	}
	good, err := os.ReadFile(f.cert)
	if err != nil {
		t.Fatal(err)
	}
	later(f.cert, "no certificate")
	if one, two := get(), get(); one != first || two != first || strings.Count(log.String(), "the old ones stay") != 1 {
		t.Errorf("a bad file is in force, or said more than once:\n%s", &log)
	}
	later(f.cert, string(good))
	if get() == first || !strings.Contains(log.String(), "have changed\"") {
		t.Errorf("a good file is not in force:\n%s", &log)
	}

	for want, change := range map[string]func(*config){
		"need each other":      func(c *config) { c.ExtprocTLSKey = "" },
		"holds no certificate": func(c *config) { c.ExtprocTLSClientCA = c.ExtprocTLSKey },
		"extproc-tls-cert":     func(c *config) { c.ExtprocTLSCert = filepath.Join(dir, "none") },
	} {
		bad := c
		change(&bad)
		if _, err := bad.tls(slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %q in it", err, want)
		}
	}
	c = defaults()
	if secured, err := c.tls(nil); secured != nil || err != nil {
		t.Errorf("without settings: %v, %v", secured, err)
	}
}
