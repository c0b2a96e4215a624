// SPDX-License-Identifier: Apache-2.0

package bus_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/kvroute/kvroute/internal/bus"
)

func TestCheckURL(t *testing.T) {
	for list, want := range map[string]string{
		"nats://127.0.0.1:4222":       "",
		"tls://bus":                   "",
		"bus:4222":                    "",
		"127.0.0.1:4222":              "",
		"nats://a:1, nats://u:p@b:2":  "",
		"ws://bus:80,wss://bus":       "",
		"bogus://x":                   `"bogus"`,
		"nats://a:1,bogus://x":        `"bogus"`,
		"http://bus:4222":             `"http"`,
		"nats://":                     "without a host",
		"":                            "without a host",
		"nats://a:1,":                 "without a host",
		"nats://user:secret@bus:port": "cannot be read",
		"nats://a:1,ws://b:2":         "mixed",
	} {
		err := bus.CheckURL(list)
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", list, err, want)
		}
		if err != nil && strings.Contains(err.Error(), "secret") {
			t.Errorf("%q: the error tells the password: %v", list, err)
		}
	}
}

func TestOptions(t *testing.T) {
	there := filepath.Join(t.TempDir(), "there")
	if err := os.WriteFile(there, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		access bus.Access
		opts   int
		err    string
	}{
		"nothing":         {bus.Access{}, 0, ""},
		"both":            {bus.Access{NATSCreds: there, NATSNkey: there}, 0, "exclude"},
		"half":            {bus.Access{NATSKey: there}, 0, "belong together"},
		"not there":       {bus.Access{NATSCA: there + "x"}, 0, "nats-ca: "},
		"no nkey":         {bus.Access{NATSNkey: there}, 0, "nats-nkey"},
		"all that may be": {bus.Access{NATSCreds: there, NATSCA: there, NATSCert: there, NATSKey: there, NATSInboxPrefix: "_I"}, 4, ""},
	} {
		opts, err := c.access.Options()
		if len(opts) != c.opts || (c.err == "") != (err == nil) || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %d options, %v; want %d, %q", name, len(opts), err, c.opts, c.err)
		}
	}
}

func TestABusWithoutJetStreamIsTriedLessOften(t *testing.T) {
	for _, cause := range []error{nats.ErrNoResponders, jetstream.ErrJetStreamNotEnabled, jetstream.ErrJetStreamNotEnabledForAccount} {
		err := bus.Explain(fmt.Errorf("open: %w", cause))
		if !errors.Is(err, bus.ErrNoJetStream) || !errors.Is(err, cause) || !strings.Contains(err.Error(), "JetStream is off") {
			t.Errorf("%v becomes %v", cause, err)
		}
	}
	other := errors.New("something else")
	if err := bus.Explain(other); !errors.Is(err, other) || errors.Is(err, bus.ErrNoJetStream) || bus.Explain(nil) != nil {
		t.Errorf("another error becomes %v", err)
	}
	var r bus.Retry
	var waits []time.Duration
	for range 7 {
		waits = append(waits, r.After(bus.ErrNoJetStream)/time.Second)
	}
	if got, want := fmt.Sprint(waits), "[1ns 2ns 4ns 8ns 16ns 30ns 30ns]"; got != want {
		t.Errorf("waits %s, want %s", got, want)
	}
	if r.After(other) != time.Second || r.After(bus.ErrNoJetStream) != time.Second {
		t.Error("after another failure the waits do not start again")
	}
}

func TestSecretsAreRedacted(t *testing.T) {
	for address, want := range map[string]string{
		"":                                      "",
		"nats://nats:4222":                      "nats://nats:4222",
		"nats://router:secret@nats:4222":        "nats://router:xxxxx@nats:4222",
		"nats://token@nats:4222":                "nats://xxxxx@nats:4222",
		"router:secret@nats,tls://:p@a@b:1,c:2": "router:xxxxx@nats,tls://:xxxxx@b:1,c:2",
		"router:p%@nats":                        "router:xxxxx@nats",
		"file:/run/nats-url":                    "file:/run/nats-url",
		"http://a:b@10.0.0.7:80/kv":             "http://a:xxxxx@10.0.0.7:80/kv",
	} {
		if got := bus.Redact(address); got != want {
			t.Errorf("%q becomes %q, want %q", address, got, want)
		}
	}
}

// The log names the server that is tried, without the password.
func TestTheLogNamesTheServerThatIsTriedAgain(t *testing.T) {
	lines := make(lineLog, 16)
	nc, err := bus.Connect("nats://user:secret@127.0.0.1:1", "test", new(bus.Access), slog.New(slog.NewTextHandler(lines, nil)))
	if err != nil {
		t.Fatal(err)
	}
	defer nc.Close()
	select {
	case line := <-lines:
		if !strings.Contains(line, "url=nats://user:xxxxx@127.0.0.1:1") || strings.Contains(line, "secret") {
			t.Errorf("logged %s", line)
		}
	case <-time.After(time.Minute):
		t.Fatal("nothing is logged")
	}
}

// lineLog keeps log lines while it has room.
type lineLog chan string

func (l lineLog) Write(b []byte) (int, error) {
	select {
	case l <- string(b):
	default:
	}
	return len(b), nil
}

func TestPublicAddress(t *testing.T) {
	for _, c := range []struct{ advertise, listener, nats, want, err string }{
		{"10.0.0.1:80", "0.0.0.0:8000", "nats://x:4222", "10.0.0.1:80", ""},
		{"", "10.0.0.2:8000", "nats://x:4222", "10.0.0.2:8000", ""},
		{"", "[::]:8000", "nats://127.0.0.1:4222,nats://x:4222", "127.0.0.1:8000", ""},
		{"", "[::]:8000", "127.0.0.1:4222", "", "--advertise"},
		{"here", "[::]:8000", "nats://x:4222", "", `advertise is "here"`},
	} {
		got, err := bus.PublicAddress(c.advertise, c.listener, c.nats)
		if got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%+v: %q, %v", c, got, err)
		}
	}
}

// A wait ends after its time, and at once when the context ends.
func TestWait(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	if !bus.Wait(ctx, time.Millisecond) {
		t.Error("a wait says that its context has ended")
	}
	cancel()
	if bus.Wait(ctx, time.Hour) {
		t.Error("a wait says that its context has not ended")
	}
}
