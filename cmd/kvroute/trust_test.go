// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"log/slog"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	natsserver "github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/bindings"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/wire"
	routing "github.com/kvroute/kvroute/router"
)

// guardedNATS starts a server with the example's account file, which reads the passwords that
// TestMain sets, and returns a function that connects as one of its users.
func guardedNATS(t *testing.T) (url string, as func(user string) *guarded) {
	t.Helper()
	opts, err := natsserver.ProcessConfigFile("../../examples/nats/kvroute.conf")
	if err != nil {
		t.Fatal(err)
	}
	opts.Host, opts.Port, opts.StoreDir, opts.NoSigs, opts.NoLog = "127.0.0.1", natsserver.RANDOM_PORT, t.TempDir(), true, true
	s, err := natsserver.NewServer(opts)
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(process.Patience) {
		t.Fatal("NATS does not start")
	}
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	return s.ClientURL(), func(user string) *guarded {
		g := &guarded{user: user}
		password := "secret-of-" + strings.ReplaceAll(strings.ToUpper(user), "-", "_")
		g.nc, err = nats.Connect(s.ClientURL(), nats.UserInfo(user, password), nats.CustomInboxPrefix("_INBOX_"+strings.ReplaceAll(user, "-", "")),
			nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
				g.mu.Lock()
				defer g.mu.Unlock()
				g.errs = append(g.errs, err.Error())
			}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(g.nc.Close)
		return g
	}
}

// guarded is a connection with the refusals of its server.
type guarded struct {
	user string
	nc   *nats.Conn
	mu   sync.Mutex
	errs []string
}

// refused reports whether the server has refused an operation on a subject, and clears the list.
func (g *guarded) refused(subject string) bool {
	if g.nc.Flush() != nil {
		return false
	}
	for range 100 {
		g.mu.Lock()
		i := slices.IndexFunc(g.errs, func(e string) bool {
			return strings.Contains(strings.ToLower(e), "permissions violation") && strings.Contains(e, subject)
		})
		g.mu.Unlock()
		if i >= 0 {
			return true
		}
		<-time.After(2 * time.Millisecond)
	}
	return false
}

// The permissions of the example's account file are sufficient for all processes.
func TestTheGuardedBusServes(t *testing.T) {
	t.Parallel() // mostly waits
	if testing.Short() {
		t.Skip("starts processes")
	}
	url, _ := guardedNATS(t)
	with := func(user, password string) string {
		return strings.Replace(url, "nats://", "nats://"+user+":"+password+"@", 1)
	}
	var engines []*demo.Child
	for i, user := range []string{"worker-0", "worker"} {
		name := fmt.Sprint("worker-", i)
		e, err := demo.Start(t.Context(), t.TempDir(), name, "engine", "--name", name, "--listen", "127.0.0.1:0", "--speed", "50",
			"--nats-url", with(user, "secret-of-"+[]string{"WORKER_0", "WORKER"}[i]), "--nats-inbox-prefix", "_INBOX_"+strings.ReplaceAll(user, "-", ""))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			e.Stop()
			if log := e.LastLines(); strings.Contains(log, "NATS refuses") {
				t.Errorf("log of %s:\n%s", name, log)
			}
		})
		engines = append(engines, e)
	}
	bus := func(name string, more ...string) *demo.Child {
		c, err := demo.Start(t.Context(), t.TempDir(), name, append([]string{
			"serve", "--extproc-address", "127.0.0.1:0", "--http-address", "127.0.0.1:0", "--replica", name,
			"--nats-url", with("router", "secret-of-ROUTER"), "--nats-inbox-prefix", "_INBOX_router", "--router-snapshot-threshold", "3",
		}, more...)...)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			c.Stop()
			if log := c.LastLines(); strings.Contains(log, "NATS refuses") || strings.Contains(log, "failed") || t.Failed() {
				t.Errorf("log of %s:\n%s", name, log)
			}
		})
		return c
	}
	a := bus("a")
	agree := func(c *demo.Child) {
		t.Helper()
		eventually(t, c.Name+" does not know what the engines cache", func() bool {
			x := indexOf(t, c)
			return len(x) > 100 && len(x) == engineBlocks(t, engines)
		})
	}
	talk(t, engines, 0, 30)
	agree(a)
	a.Stop() // leaves a snapshot and shortens the stream
	if log := a.LastLines(); !strings.Contains(log, "a snapshot is written") {
		t.Errorf("no snapshot:\n%s", log)
	}
	b := bus("b")
	agree(b)
	if log := b.LastLines(); !strings.Contains(log, "a snapshot is restored") {
		t.Errorf("nothing is restored:\n%s", log)
	}
	c := bus("c", "--router-reset-states")
	eventually(t, "a reset is not possible", func() bool { return len(indexOf(t, c)) == 0 })
}

// An engine in another language uses an account like kvroute's programs: it registers, and its
// events are received. Without sufficient permissions it still ends soon.
func TestTheGuardedBusServesBindings(t *testing.T) {
	t.Parallel() // mostly waits
	url, as := guardedNATS(t)
	router := as("router")
	registered := make(chan routing.WorkerInfo, 16)
	registry, err := fleet.NewRegistry(router.nc, fleet.RegistryConfig{Set: func(i routing.WorkerInfo) { registered <- i }, Remove: func(uint64) {}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- registry.Run(ctx) }()
	defer func() { cancel(); <-ended }()
	heard := make(chan *nats.Msg, 16)
	if _, err := router.nc.ChanSubscribe(wire.Scope{}.Topic("kv-events"), heard); err != nil {
		t.Fatal(err)
	}
	open := func(name, prefix string) *bindings.Publisher {
		c, err := bindings.ParseConfig(fmt.Appendf(nil, `{"nats_url":%q,"nats_inbox_prefix":%q,"name":%q,"nats_replicas":1,
			"kv_block_size":2,"address":"10.0.0.7:8000","models":["m"],"durable":true,"enable_local_indexer":true}`,
			strings.Replace(url, "nats://", "nats://worker:secret-of-WORKER@", 1), prefix, name))
		if err != nil {
			t.Fatal(err)
		}
		p, err := bindings.Open(c)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.PublishStored(bindings.Stored{TokenIDs: []uint32{1, 2}, NumBlockTokens: []int{2}, BlockHashes: []uint64{7}}); err != nil {
			t.Fatal(err)
		}
		return p
	}
	p := open("right", "_INBOX_worker")
	for what, c := range map[string]func() bool{
		"register": func() bool { i := <-registered; return i.Name == "right" && i.Events.PublisherID != 0 },
		"speak":    func() bool { <-heard; return true },
	} {
		ok := make(chan bool, 1)
		go func() { ok <- c() }()
		select {
		case right := <-ok:
			if !right {
				t.Errorf("the engine does not %s under its own name", what)
			}
		case <-time.After(process.Patience):
			t.Fatalf("the engine cannot %s", what)
		}
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	p = open("wrong", "_INBOX_other")
	for range 500 {
		if err := p.PublishRemoved(0, []uint64{7}); err != nil {
			t.Fatal(err)
		}
	}
	begin := time.Now()
	_ = p.Close() // its error is also logged
	if took := time.Since(begin); took > process.Patience {
		t.Errorf("to end took %v", took)
	}
}

// The permissions of the example's account file allow nothing more.
func TestTheGuardedBusRefuses(t *testing.T) {
	t.Parallel() // mostly waits
	url, as := guardedNATS(t)
	router, worker, worker0 := as("router"), as("worker"), as("worker-0")
	scope := wire.Scope{}
	events, registry := scope.Topic("kv-events"), "$KV."+scope.Bucket("workers")+"."
	own, other := wire.WorkerKey(wire.WorkerID("worker-0")), wire.WorkerKey(wire.WorkerID("worker-1"))
	for _, c := range []struct {
		who     *guarded
		publish bool // or subscribe
		subject string
		allowed bool
	}{
		{worker, true, events, true},
		{worker, true, scope.Own("heartbeat", other), true},
		{worker, true, registry + other, true},
		{worker, false, events, false}, // events of other workers
		{worker, false, "_INBOX_router.>", false},
		{worker, false, ">", false},
		{worker, false, "$KV.>", false},
		{worker, true, scope.Topic("active_sequences_events"), false},
		{worker, true, "$JS.API.STREAM.PURGE." + scope.Stream(), false},
		{worker, true, "$JS.API.STREAM.DELETE." + scope.Stream(), false},
		{worker, true, "$JS.API.STREAM.UPDATE." + scope.Stream(), false},
		{worker, true, "$JS.API.CONSUMER.CREATE." + scope.Stream() + ".spy", false},
		{worker, true, "$JS.API.CONSUMER.DELETE." + scope.Stream() + ".kvroute-a", false},
		{worker, true, "$KV." + scope.Bucket("state") + ".head", false},
		{worker, true, "$KV." + scope.Bucket("lock") + ".snapshot", false},
		{worker, true, "$O." + scope.Bucket("snap") + ".C.x", false},
		{worker0, true, registry + own, true},
		{worker0, true, registry + other, false}, // registration of another worker
		{worker0, true, scope.Own("heartbeat", own), true},
		{worker0, true, scope.Own("heartbeat", other), false},
		{worker, false, scope.Own("presence"), true},
		{worker, true, scope.Own("presence"), false}, // presence of a router that wants no events
		{worker0, false, scope.Own("query", own, "*"), true},
		{worker0, false, scope.Own("query", other, "*"), false}, // answers to queries for another worker
		{router, true, scope.Own("presence"), true},
		{router, false, events, true},
		{router, false, scope.Own("heartbeat", "*"), true},
		{router, true, scope.Topic("active_sequences_events"), true}, // messages between replicas
		{router, false, scope.Topic("active_sequences_events"), true},
		{router, true, scope.Topic("session_affinity_events"), true},
		{router, false, scope.Topic("session_affinity_events"), true},
		{worker, true, scope.Topic("session_affinity_events"), false},
		{worker, false, scope.Topic("session_affinity_events"), false},
		{router, true, scope.Own("sync", other), true},
		{router, true, scope.Own("dump", other), true},
		{router, false, scope.Own("sync", own), true},
		{router, false, scope.Own("dump", own), true},
		{worker, false, scope.Topic("active_sequences_events"), false},
		{worker, true, scope.Own("sync", own), false},
		{worker, true, scope.Own("dump", own), false},
		{worker, false, scope.Own("dump", own), false},
		{router, true, scope.Own("replica", "x"), false},
		{router, false, scope.Own("replica", "x"), false},
		{router, false, scope.Topic("kv_metrics"), true},
		{router, true, scope.Topic("kv_metrics"), false},
		{worker, true, scope.Topic("kv_metrics"), true},
		{router, true, "$JS.API.CONSUMER.PAUSE." + scope.Stream() + ".kvroute-a", false},
		{router, true, "$JS.API.STREAM.UPDATE." + scope.Stream(), false},
		{router, true, "$JS.FC.KV_other.x", false},
		{worker, true, "$JS.API.CONSUMER.CREATE.KV_" + scope.Bucket("workers") + ".x", false}, // other registrations
		{worker, true, "$JS.API.DIRECT.GET.KV_" + scope.Bucket("workers") + ".x", false},
		{router, true, events, false}, // events of workers
		{router, true, registry + own, false},
		{router, true, scope.Own("heartbeat", own), false},
		{router, true, "$JS.API.STREAM.DELETE." + scope.Stream(), false},
		{router, true, "$JS.API.STREAM.PURGE.KV_" + scope.Bucket("workers"), false},
		{router, false, "_INBOX_worker.>", false},
		{router, true, wire.Scope{Endpoint: "other"}.Topic("kv-events"), false},
	} {
		var err error
		if c.publish {
			err = c.who.nc.Publish(c.subject, []byte("{}"))
		} else {
			_, err = c.who.nc.SubscribeSync(c.subject)
		}
		if err != nil {
			t.Fatal(err)
		}
		if c.allowed {
			if err := c.who.nc.Flush(); err != nil {
				t.Fatal(err)
			}
		}
		if got := c.who.refused(`"` + c.subject + `"`); got == c.allowed {
			t.Errorf("%s, publishes %v, %s: refused %v", c.who.user, c.publish, c.subject, got)
		}
	}
	for _, url := range []string{url, strings.Replace(url, "nats://", "nats://router:wrong@", 1)} {
		if nc, err := nats.Connect(url); !errors.Is(err, nats.ErrAuthorization) {
			nc.Close()
			t.Errorf("without the right password: %v", err)
		}
	}
	// Refusals are logged in words.
	var log bytes.Buffer
	nc, err := bus.Connect(strings.Replace(url, "nats://", "nats://worker:secret-of-WORKER@", 1), "test", &bus.Access{NATSInboxPrefix: "_INBOX_worker"}, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := js.DeleteStream(t.Context(), scope.Stream()); err == nil {
		t.Error("a worker can delete the stream")
	}
	nc.Close()
	if want := "NATS refuses something"; !strings.Contains(log.String(), want) || !strings.Contains(log.String(), "STREAM.DELETE") {
		t.Errorf("the log is %q, want %q", log.String(), want)
	}
}

// Over TLS both sides show certificates; without valid ones a connection is refused.
func TestBusOverTLS(t *testing.T) {
	t.Parallel() // mostly waits
	dir := t.TempDir()
	ca, caKey := certificate(t, dir, "ca", nil, nil)
	server, serverKey := certificate(t, dir, "server", ca, caKey)
	certificate(t, dir, "client", ca, caKey)
	certificate(t, dir, "stranger-ca", nil, nil)
	pool := x509.NewCertPool()
	pool.AddCert(ca)
	s, err := natsserver.NewServer(&natsserver.Options{
		Host: "127.0.0.1", Port: natsserver.RANDOM_PORT, NoSigs: true, NoLog: true, TLS: true, TLSVerify: true, TLSTimeout: 5,
		TLSConfig: &tls.Config{
			MinVersion: tls.VersionTLS12, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool,
			Certificates: []tls.Certificate{{Certificate: [][]byte{server.Raw}, PrivateKey: serverKey}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(process.Patience) {
		t.Fatal("NATS does not start")
	}
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	at := func(name string) string { return filepath.Join(dir, name) }
	url := strings.Replace(s.ClientURL(), "nats://", "tls://", 1)
	for name, c := range map[string]struct {
		access bus.Access
		ok     bool
	}{
		"all right":                {bus.Access{NATSCA: at("ca.pem"), NATSCert: at("client.pem"), NATSKey: at("client.key")}, true},
		"no certificate to show":   {bus.Access{NATSCA: at("ca.pem")}, false},
		"an unknown authority":     {bus.Access{NATSCert: at("client.pem"), NATSKey: at("client.key")}, false},
		"another authority's bus":  {bus.Access{NATSCA: at("stranger-ca.pem"), NATSCert: at("client.pem"), NATSKey: at("client.key")}, false},
		"another one's credential": {bus.Access{NATSCA: at("ca.pem"), NATSCert: at("stranger-ca.pem"), NATSKey: at("stranger-ca.key")}, false},
	} {
		nc, err := bus.Connect(url, name, &c.access, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		connected := false
		for end := time.Now().Add(map[bool]time.Duration{true: process.Patience, false: time.Second}[c.ok]); time.Now().Before(end) && !connected; {
			connected = nc.IsConnected()
			<-time.After(5 * time.Millisecond)
		}
		if connected != c.ok {
			t.Errorf("%s: connected %v, %v", name, connected, nc.LastError())
		}
		nc.Close()
	}
}

func TestBusSettingsAreChecked(t *testing.T) {
	for want, flags := range map[string][]string{
		"exclude each other":        {"--nats-creds", "/dev/null", "--nats-nkey", "/dev/null"},
		"belong together":           {"--nats-cert", "/dev/null"},
		"no such file":              {"--nats-ca", "/no/such/file"},
		"nats-replicas":             {"--nats-replicas", "2"},
		"snapshot-threshold":        {"--router-snapshot-threshold", "0"},
		"kv-events-retention is":    {"--kv-events-retention", "1m"},
		"kv-events-retention needs": {"--kv-events-retention", "2h", "--durable-kv-events=false"},
	} {
		status, _, stderr := runs(t, append([]string{"config"}, flags...)...)
		if status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("%q: status %d, %q; want %q", flags, status, stderr, want)
		}
	}
}

// certificate writes NAME.pem and NAME.key, signed by ca or by itself.
func certificate(t *testing.T, dir, name string, ca *x509.Certificate, caKey *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{
		SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: ca == nil, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}
	if ca == nil {
		ca, caKey = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, ca, &key.PublicKey, caKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{".pem": {Type: "CERTIFICATE", Bytes: der}, ".key": {Type: "EC PRIVATE KEY", Bytes: keyDER}} {
		if err := os.WriteFile(filepath.Join(dir, name+file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return cert, key
}

// While the bus refuses this process, at the start or later, kvroute continues to reconnect, and the
// log says why the bus is unavailable.
func TestTheBusLetsNobodyInForAWhile(t *testing.T) {
	t.Parallel() // mostly waits
	opts := natsserver.Options{Host: "127.0.0.1", Port: fixtures.HoldPort(t), Username: "router", Password: "later", NoSigs: true, NoLog: true}
	start := func(password string) (stop func()) {
		t.Helper()
		o := opts
		o.Password = password
		s, err := natsserver.NewServer(&o)
		if err != nil {
			t.Fatal(err)
		}
		go s.Start()
		if !s.ReadyForConnections(process.Patience) {
			t.Fatal("NATS does not start")
		}
		return sync.OnceFunc(func() { s.Shutdown(); s.WaitForShutdown() })
	}
	stop := start("other")
	defer func() { stop() }()
	var log fixtures.Log
	nc, err := bus.Connect(fmt.Sprintf("nats://router:secret@127.0.0.1:%d", opts.Port), "test", &bus.Access{}, slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	refused := func() {
		t.Helper()
		before := nc.Stats().Reconnects
		// More attempts than a client makes by default.
		eventually(t, "it is not tried again", func() bool { return nc.Stats().Reconnects >= before+4 })
		if nc.IsConnected() || nc.IsClosed() {
			t.Fatalf("the connection is %v", nc.Status())
		}
		if !strings.Contains(log.String(), "Authorization Violation") {
			t.Errorf("the log does not say why:\n%s", log.String())
		}
	}
	refused()
	stop()
	stop = start("secret")
	eventually(t, "it does not connect", nc.IsConnected)
	stop()
	stop = start("other")
	refused()
	stop()
	stop = start("secret")
	eventually(t, "it does not connect again", nc.IsConnected)
	if n := strings.Count(log.String(), "level=WARN"); n > 12 {
		t.Errorf("the log has %d warnings:\n%s", n, log.String())
	}
}
