// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/natstest"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// watcher is a registry with the calls that it made.
type watcher struct {
	*fleet.Registry

	mu sync.Mutex
	changes
}

func watch(t *testing.T, s *server.Server) *watcher {
	t.Helper()
	w := &watcher{}
	var err error
	w.Registry, err = fleet.NewRegistry(natstest.Connect(t, s), fleet.RegistryConfig{
		Set: func(i router.WorkerInfo) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.set(i)
		},
		Remove: func(id uint64) {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.remove(id)
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	natstest.Run(t, w.Run)
	natstest.Eventually(t, w.Ready)
	return w
}

func (w *watcher) names() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	names := map[string]string{}
	for _, i := range w.workers {
		names[i.Name] = i.Health.String()
	}
	return fmt.Sprint(names)
}

func announce(t *testing.T, nc *nats.Conn, name string) (stop func()) {
	t.Helper()
	a, err := fleet.NewAnnouncer(nc, fleet.AnnouncerConfig{Record: record(name)})
	if err != nil {
		t.Fatal(err)
	}
	return natstest.Run(t, a.Run)
}

func TestWorkersRegisterAndLeave(t *testing.T) {
	s := natstest.Start(t, 0)
	early := watch(t, s)
	stopA := announce(t, natstest.Connect(t, s), "a")
	announce(t, natstest.Connect(t, s), "b")
	natstest.Eventually(t, func() bool { return early.names() == "map[a:healthy b:healthy]" })
	late := watch(t, s)
	natstest.Eventually(t, func() bool { return late.names() == early.names() })
	stopA()
	natstest.Eventually(t, func() bool { return early.names() == "map[b:healthy]" && late.names() == "map[b:healthy]" })
}

// A process that ends after its successor registered does not remove the worker.
func TestASuccessorStaysRegistered(t *testing.T) {
	s := natstest.Start(t, 0)
	w := watch(t, s)
	nc := natstest.Connect(t, s)
	register := func() (stop func()) {
		a, err := fleet.NewAnnouncer(nc, fleet.AnnouncerConfig{Record: record("a")})
		if err != nil {
			t.Fatal(err)
		}
		stop = natstest.Run(t, a.Run)
		<-a.Registered()
		return stop
	}
	first := register()
	second := register()
	first()
	bucket := records(t, nc)
	if _, err := bucket.Get(t.Context(), wire.WorkerKey(wire.WorkerID("a"))); err != nil {
		t.Errorf("the record of the process that continues: %v", err)
	}
	second()
	natstest.Eventually(t, func() bool { return w.names() == "map[]" })
}

func TestRegistryRefusesLies(t *testing.T) {
	s := natstest.Start(t, 0)
	w := watch(t, s)
	nc := natstest.Connect(t, s)
	bucket := records(t, nc)
	honest, err := json.Marshal(record("a"))
	if err != nil {
		t.Fatal(err)
	}
	for key, value := range map[string]string{
		"nonsense":                          string(honest),
		wire.WorkerKey(1):                   string(honest), // a record under another worker's key
		wire.WorkerKey(wire.WorkerID("x")):  `{"name":"x"`,
		wire.WorkerKey(wire.WorkerID("y")):  `{"name":"y","models":["m"],"address":"somewhere"}`,
		wire.WorkerKey(wire.WorkerID("a")):  string(honest),
		strings.Repeat("0", 15) + "G":       string(honest),
		wire.WorkerKey(wire.WorkerID("ok")): strings.Replace(string(honest), `"a"`, `"ok"`, 1),
	} {
		if _, err := bucket.PutString(t.Context(), key, value); err != nil {
			t.Fatal(err)
		}
	}
	natstest.Eventually(t, func() bool { return w.names() == "map[a:healthy ok:healthy]" })
	// Forged and invalid heartbeats have no effect.
	for _, data := range []string{"", "{", `{"worker_id":1}`} {
		if err := nc.Publish(wire.Scope{}.Own("heartbeat", wire.WorkerKey(2)), []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if got := w.names(); got != "map[a:healthy ok:healthy]" {
		t.Errorf("workers %s", got)
	}
}

// NATS restarts without its data. The workers stay known and register again, and new ones
// are seen.
func TestRegistrySurvivesNATS(t *testing.T) {
	s := natstest.Start(t, 0)
	port := s.Addr().(*net.TCPAddr).Port
	w := watch(t, s)
	nc := natstest.Connect(t, s)
	announce(t, nc, "a")
	natstest.Eventually(t, func() bool { return w.names() == "map[a:healthy]" })
	s.Shutdown()
	s.WaitForShutdown()
	natstest.Eventually(t, func() bool { return !w.Ready() })
	if got := w.names(); got != "map[a:healthy]" {
		t.Errorf("without NATS the workers are %s", got)
	}
	again := natstest.Start(t, port)
	natstest.Eventually(t, w.Ready)
	announce(t, natstest.Connect(t, again), "b")
	natstest.Eventually(t, func() bool { return w.names() == "map[a:healthy b:healthy]" })
	js, err := jetstream.New(natstest.Connect(t, again))
	if err != nil {
		t.Fatal(err)
	}
	natstest.Eventually(t, func() bool { // worker a is registered in the new NATS, too
		bucket, err := js.KeyValue(t.Context(), wire.Scope{}.Bucket("workers"))
		if err != nil {
			return false
		}
		_, err = bucket.Get(t.Context(), wire.WorkerKey(wire.WorkerID("a")))
		return err == nil
	})
}

// A record expires after 45 seconds unless its worker renews it. A registry that no
// longer receives messages is not ready.
func TestRecordsExpire(t *testing.T) {
	s := natstest.Start(t, 0)
	nc := natstest.Connect(t, s)
	r, err := fleet.NewRegistry(nc, fleet.RegistryConfig{Set: func(router.WorkerInfo) {}, Remove: func(uint64) {}})
	if err != nil {
		t.Fatal(err)
	}
	stop := natstest.Run(t, r.Run)
	natstest.Eventually(t, r.Ready)
	bucket := records(t, nc)
	if status, err := bucket.Status(t.Context()); err != nil || status.TTL() != 45*time.Second {
		t.Errorf("records live %v, %v; want 45 s", status.TTL(), err)
	}
	stop()
	if r.Ready() {
		t.Error("a registry that has ended is ready")
	}
}

func TestAnnouncerRefusesBadRecords(t *testing.T) {
	if _, err := fleet.NewAnnouncer(nil, fleet.AnnouncerConfig{Record: fleet.Record{Name: "a"}}); err == nil || !strings.Contains(err.Error(), "models") {
		t.Errorf("error %v, want one about models", err)
	}
	large := record("a")
	large.Engine = strings.Repeat("e", 64<<10)
	if _, err := fleet.NewAnnouncer(nil, fleet.AnnouncerConfig{Record: large}); err == nil || !strings.Contains(err.Error(), "want at most 65536") {
		t.Errorf("error %v, want one about its size", err)
	}
}

// Registry and announcer both report a NATS server without JetStream, and do not retry
// every second.
func TestNATSWithoutJetStream(t *testing.T) {
	t.Parallel()
	s, err := server.NewServer(&server.Options{Host: "127.0.0.1", Port: server.RANDOM_PORT, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	go s.Start()
	if !s.ReadyForConnections(10 * time.Second) {
		t.Fatal("NATS does not start")
	}
	t.Cleanup(func() { s.Shutdown(); s.WaitForShutdown() })
	for name, run := range map[string]func(log *slog.Logger) func(context.Context) error{
		"router": func(log *slog.Logger) func(context.Context) error {
			r, err := fleet.NewRegistry(natstest.Connect(t, s), fleet.RegistryConfig{Set: func(router.WorkerInfo) {}, Remove: func(uint64) {}, Log: log})
			if err != nil {
				t.Fatal(err)
			}
			return r.Run
		},
		"worker": func(log *slog.Logger) func(context.Context) error {
			a, err := fleet.NewAnnouncer(natstest.Connect(t, s), fleet.AnnouncerConfig{Record: fleet.Record{Name: "w", Address: "10.0.0.1:80", Models: []string{"m"}}, Log: log})
			if err != nil {
				t.Fatal(err)
			}
			return a.Run
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lines := make(chan string, 64)
			natstest.Run(t, run(slog.New(slog.NewTextHandler(lineWriter(lines), nil))))
			for _, in := range []string{"in=1s", "in=2s", "in=4s"} {
				select {
				case line := <-lines:
					if !strings.Contains(line, "JetStream is off") || !strings.Contains(line, in) {
						t.Errorf("the log line is %q, want JetStream is off, %s", line, in)
					}
				case <-time.After(30 * time.Second):
					t.Fatal("the log has no line")
				}
			}
		})
	}
}

// lineWriter receives the lines of a log.
type lineWriter chan string

func (w lineWriter) Write(p []byte) (int, error) {
	select {
	case w <- string(p):
	default:
	}
	return len(p), nil
}

// records returns the bucket of the workers' records.
func records(t *testing.T, nc *nats.Conn) jetstream.KeyValue {
	t.Helper()
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	bucket, err := js.KeyValue(t.Context(), wire.Scope{}.Bucket("workers"))
	if err != nil {
		t.Fatal(err)
	}
	return bucket
}
