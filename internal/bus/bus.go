// SPDX-License-Identifier: Apache-2.0

// Package bus connects to the NATS bus with this process's credentials, and explains the bus's
// errors.
package bus

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
)

// Access has the credentials of this process for the bus, and how it verifies the bus. Its tags are
// those of package settings.
type Access struct {
	NATSCreds string `json:"nats_creds,omitempty" yaml:"nats-creds" own:"yes" help:"<file> with credentials for NATS: a JWT and its key"`
	NATSNkey  string `json:"nats_nkey,omitempty" yaml:"nats-nkey" own:"yes" help:"<file> with the seed of an nkey for NATS"`
	// NATSCA is for TLS: the URL begins with tls://.
	NATSCA   string `json:"nats_ca,omitempty" yaml:"nats-ca" own:"yes" help:"PEM <file> with the authorities that may sign NATS's certificate; empty takes the system's"`
	NATSCert string `json:"nats_cert,omitempty" yaml:"nats-cert" own:"yes" help:"PEM <file> with this process's certificate for NATS"`
	NATSKey  string `json:"nats_key,omitempty" yaml:"nats-key" own:"yes" help:"PEM <file> with the key of nats-cert"`
	// NATSInboxPrefix differs for each kind of client, so that clients cannot read each other's
	// answers; see examples/nats.
	NATSInboxPrefix string `json:"nats_inbox_prefix,omitempty" yaml:"nats-inbox-prefix" own:"yes" help:"<subject> that begins the subjects of NATS's answers; empty takes _INBOX"`
}

// Options returns the options of a connection. An error names the wrong setting.
func (a *Access) Options() (opts []nats.Option, err error) {
	if a.NATSCreds != "" && a.NATSNkey != "" {
		return nil, errors.New("nats-creds and nats-nkey exclude each other")
	}
	if (a.NATSCert == "") != (a.NATSKey == "") {
		return nil, errors.New("nats-cert and nats-key belong together")
	}
	for name, file := range map[string]string{
		"nats-creds": a.NATSCreds, "nats-nkey": a.NATSNkey,
		"nats-ca": a.NATSCA, "nats-cert": a.NATSCert, "nats-key": a.NATSKey,
	} {
		if file != "" {
			if _, err := os.Stat(file); err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	if a.NATSCreds != "" {
		opts = append(opts, nats.UserCredentials(a.NATSCreds))
	}
	if a.NATSNkey != "" {
		nkey, err := nats.NkeyOptionFromSeed(a.NATSNkey)
		if err != nil {
			return nil, fmt.Errorf("nats-nkey: %w", err)
		}
		opts = append(opts, nkey)
	}
	if a.NATSCA != "" {
		opts = append(opts, nats.RootCAs(a.NATSCA))
	}
	if a.NATSCert != "" {
		opts = append(opts, nats.ClientCert(a.NATSCert, a.NATSKey))
	}
	if a.NATSInboxPrefix != "" {
		opts = append(opts, nats.CustomInboxPrefix(a.NATSInboxPrefix))
	}
	return opts, nil
}

// A connection to the bus ends when its other end has answered no ping for 30 s. With the library's defaults
// it would take six minutes until a lost machine is noticed.
const (
	pingInterval = 10 * time.Second
	pingsOut     = 2
)

// Connect connects to the bus. If the bus is not available or refuses this process, the connection
// retries until it is closed.
func Connect(url, name string, access *Access, log *slog.Logger, more ...nats.Option) (*nats.Conn, error) {
	opts, err := access.Options()
	if err == nil {
		err = CheckURL(url)
	}
	if err != nil {
		return nil, err
	}
	var r refusals
	nc, err := nats.Connect(url, append(
		append(opts, more...),
		nats.Name(name),
		nats.RetryOnFailedConnect(true),
		nats.MaxReconnects(-1),
		nats.ReconnectWait(250*time.Millisecond),
		nats.ReconnectJitter(250*time.Millisecond, time.Second),
		// By default the second refusal ends the connection, although the bus's account
		// service may only be late.
		nats.IgnoreAuthErrorAbort(),
		nats.PingInterval(pingInterval),
		nats.MaxPingsOutstanding(pingsOut),
		nats.ConnectHandler(func(nc *nats.Conn) { log.Info("connected to NATS", "url", nc.ConnectedUrlRedacted()) }),
		nats.DisconnectErrHandler(func(_ *nats.Conn, err error) {
			if err != nil { // nil: we closed it
				log.Warn("NATS is away", "err", err)
			}
		}),
		nats.ReconnectHandler(func(nc *nats.Conn) { log.Info("NATS is back", "url", nc.ConnectedUrlRedacted()) }),
		nats.ReconnectErrHandler(func(_ *nats.Conn, err error) {
			log.Log(context.Background(), r.level(err), "NATS cannot be reached; it is tried again", "url", Redact(url),
				"err", err)
		}),
		nats.ErrorHandler(func(_ *nats.Conn, _ *nats.Subscription, err error) {
			log.Log(context.Background(), r.level(err), "NATS refuses something", "err", err)
		}),
	)...)
	if err != nil {
		return nil, fmt.Errorf("connect to NATS: %w", err)
	}
	return nc, nil
}

// refusals keeps one error from filling the log: a repeated error is a warning every 30 s, and a
// debug message otherwise.
type refusals struct {
	mu   sync.Mutex
	last string
	at   time.Time
}

// level returns the level at which to log an error now.
func (r *refusals) level(err error) slog.Level {
	r.mu.Lock()
	defer r.mu.Unlock()
	if text := err.Error(); text != r.last || time.Since(r.at) >= slowest {
		r.last, r.at = text, time.Now()
		return slog.LevelWarn
	}
	return slog.LevelDebug
}

// ReadURL returns an address of the bus. file:PATH stands for the first line of a file, so
// that a password need not stand on a command line.
func ReadURL(text string) (string, error) {
	path, isFile := strings.CutPrefix(text, "file:")
	if !isFile {
		return text, nil
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return "", fmt.Errorf("nats-url: %w", err)
	}
	line, _, _ := strings.Cut(string(data), "\n")
	return strings.TrimSpace(line), nil
}

// Redact returns an address of the bus, or a list with commas of such, without the secrets
// in it: passwords, and user names that are tokens.
func Redact(list string) string {
	all := strings.Split(list, ",")
	for i, address := range all {
		all[i] = secret.ReplaceAllString(address, "${1}xxxxx@")
	}
	return strings.Join(all, ",")
}

// secret matches an address up to its host. Its group is the scheme and the user name.
var secret = regexp.MustCompile(`^((?:\w+://)?(?:[^:@]*:)?).*@`)

// CheckURL refuses an address of the bus, or a comma-separated list of addresses, to which no
// connection is possible: a client would retry forever.
func CheckURL(list string) error {
	schemes := []string{"nats", "tls", "ws", "wss"}
	secure := 0
	all := strings.Split(list, ",")
	for _, text := range all {
		text = strings.TrimSpace(text)
		if !strings.Contains(text, "://") {
			text = "nats://" + text
		}
		u, err := url.Parse(text)
		switch {
		case err != nil:
			return fmt.Errorf("nats-url: an address cannot be read: %w", errors.Unwrap(err)) // without the password in it
		case !slices.Contains(schemes, u.Scheme):
			return fmt.Errorf("nats-url: %q is no scheme of NATS, want %s", u.Scheme, strings.Join(schemes, ", "))
		case u.Hostname() == "":
			return fmt.Errorf("nats-url: an address without a host, want %s://host:port", u.Scheme)
		}
		if strings.HasPrefix(u.Scheme, "ws") {
			secure++
		}
	}
	if secure > 0 && secure < len(all) {
		return errors.New("nats-url: addresses with ws:// or wss:// cannot be mixed with others")
	}
	return nil
}

// ErrNoJetStream means that the bus answers, but without JetStream.
var ErrNoJetStream = errors.New("the NATS server answers, but JetStream is off there " +
	"(nats-server -js turns it on), or not for this account, or has no leader yet")

// Explain adds what an error of JetStream means where the error does not name it.
func Explain(err error) error {
	if errors.Is(err, nats.ErrNoResponders) || errors.Is(err, jetstream.ErrJetStreamNotEnabled) ||
		errors.Is(err, jetstream.ErrJetStreamNotEnabledForAccount) {
		return fmt.Errorf("%w: %w", ErrNoJetStream, err)
	}
	return err
}

// OpenOrCreate opens a stream or bucket that may be missing, and that another process may create
// meanwhile.
func OpenOrCreate[T, C any](
	ctx context.Context, open func(context.Context, string) (T, error),
	create func(context.Context, C) (T, error), name string, conf C,
) (T, error) {
	v, err := open(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) || errors.Is(err, jetstream.ErrBucketNotFound) {
		if v, err = create(ctx, conf); errors.Is(err, jetstream.ErrStreamNameAlreadyInUse) || errors.Is(err, jetstream.ErrBucketExists) {
			v, err = open(ctx, name)
		}
	}
	if err != nil {
		err = fmt.Errorf("open %s: %w", name, Explain(err))
	}
	return v, err
}

const (
	// soon is for errors that may end by themselves, such as a lost connection.
	soon = time.Second
	// slowest is for errors that an operator has to mend.
	slowest = 30 * time.Second
)

// Wait waits for a time, or until ctx ends. It returns false if ctx has ended.
func Wait(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
	return ctx.Err() == nil
}

// Retry computes the waits between retries. The zero value is ready for the first failure.
type Retry struct{ wait time.Duration }

// After returns the wait after a failure: a second; without JetStream twice the previous wait, up
// to 30 s.
func (r *Retry) After(err error) time.Duration {
	if !errors.Is(err, ErrNoJetStream) {
		r.wait = 0
		return soon
	}
	r.wait = min(max(soon, 2*r.wait), slowest)
	return r.wait
}
