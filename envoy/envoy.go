// SPDX-License-Identifier: Apache-2.0

// Package envoy writes the Envoy configuration that kvroute is built for, and finds out from an Envoy's
// counters whether it uses kvroute ([Watch]).
//
// [Render] writes a complete bootstrap: a listener that sends each request to kvroute, the
// cluster that connects to the address that kvroute named, and a pool of all workers for
// requests without an address. Every setting is checked, so no value can add YAML of its own.
// The configuration needs Envoy 1.38 or later; the tests use 1.40.
//
// Functions may be called by any number of goroutines.
package envoy

import (
	"bytes"
	"cmp"
	_ "embed"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"path"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"text/template"
	"time"

	"github.com/kvroute/kvroute/internal/openai"
	"github.com/kvroute/kvroute/internal/settings"
)

// Config is the settings of a bootstrap, with the tags of package settings. The zero value of
// each field means its default; ExtProc is required.
type Config struct {
	// Parts makes [Render] write the pieces that another Envoy configuration needs. The settings of the listener, of
	// Envoy's administration and of its limits then have no effect. Requests without a route of these pieces do not
	// reach kvroute.
	Parts         bool     `yaml:"parts" help:"print pieces to add to another Envoy configuration, instead of a bootstrap"`
	BodyMode      BodyMode `yaml:"body-mode" default:"buffered" help:"buffered, buffered-partial, streamed, streamed-ahead or full-duplex: how Envoy sends request bodies to kvroute"`
	ListenAddress string   `yaml:"listen" default:"127.0.0.1:8080" help:"<ip:port> that takes the clients' requests; with port 0 Envoy chooses a free port"`
	ListenCert    string   `yaml:"tls-cert" help:"<file> with the certificate for clients; listen then speaks HTTPS only, with HTTP/2 or HTTP/1.1 by ALPN"`
	ListenKey     string   `yaml:"tls-key" help:"<file> with the key of tls-cert"`
	AdminAddress  string   `yaml:"admin" default:"127.0.0.1:9901" help:"<ip:port> of Envoy's administration"`
	// StatusAddress may be open to others than the administration: clients can read there, and change nothing.
	StatusAddress string `yaml:"status" help:"<ip:port> that serves GET requests for /ready, /stats, /stats/prometheus and /config_dump of Envoy's administration, for probes, Prometheus and kvroute's --envoy-admin in a cluster; empty serves none"`

	ExtProc []string `yaml:"extproc" help:"<host:port> of a kvroute replica, or unix:/path; may be given several times (default 127.0.0.1:9002)"`
	// Pool are all workers. Without Pool and PoolFile, Envoy answers 503 to requests that kvroute
	// does not route. [Endpoints] writes the content of PoolFile, which must exist when Envoy starts.
	Pool     []string `yaml:"pool" help:"<host:port> of a worker, for requests that kvroute does not route; may be given several times"`
	PoolFile string   `yaml:"pool-file" help:"<file> with the workers instead of pool, which kvroute's --endpoint-file updates"`
	// PoolCluster is a cluster of that other configuration. It has all workers.
	PoolCluster string `yaml:"pool-cluster" help:"<name> of the cluster in your configuration that has all workers, with parts: instead of pool"`
	// AllowPaths are added to the paths that [Config.Paths] returns. Envoy answers 404 to any other path.
	AllowPaths []string `yaml:"allow-path" help:"<path> that clients may reach on workers beside the inference paths, or /path/* for all below it; may be given several times"`

	// SessionHeaders keep their headers, should their names begin as those of headers that steer workers do.
	SessionHeaders []string `yaml:"session-header" help:"<name> of a header in session-headers of kvroute serve that begins with x-dynamo- or another prefix of steering headers; may be given several times"`

	// CA, Cert and Key are absolute paths of PEM files. Without ServerName, Envoy accepts any
	// certificate signed by CA.
	CA         string `yaml:"extproc-ca" help:"<file> with the authority of kvroute's certificate; turns TLS to kvroute on"`
	Cert       string `yaml:"extproc-cert" help:"<file> with Envoy's own certificate for kvroute"`
	Key        string `yaml:"extproc-key" help:"<file> with the key of extproc-cert"`
	ServerName string `yaml:"extproc-name" help:"<name> in kvroute's certificate; empty accepts each certificate that extproc-ca signed"`

	Failover    Failover `yaml:"failover" default:"composite" help:"composite, list or none: how Envoy reaches the second worker if the first one refuses"`
	WorkerHTTP2 bool     `yaml:"worker-http2" help:"use HTTP/2 to the workers"`
	// WorkerCA and WorkerName are as CA and ServerName, for all workers.
	WorkerCA   string `yaml:"worker-tls-ca" help:"<file> with the authorities of the workers' certificates; turns TLS to workers on"`
	WorkerName string `yaml:"worker-tls-name" help:"<name> in the certificate of every worker; empty accepts all certificates that worker-tls-ca signed"`
	// Without the observer, kvroute needs --first-token=response-headers, unless BodyMode is [FullDuplex].
	NoObserver bool `yaml:"no-observer" help:"leave out the filter that reports the first token"`
	// OTLP makes Envoy trace requests. kvroute's spans are then below Envoy's.
	OTLP string `yaml:"otlp" help:"<host:port> of an OpenTelemetry collector that receives Envoy's traces as OTLP over gRPC without TLS"`

	MaxHeapBytes int64 `yaml:"max-heap-bytes" default:"2147483648" help:"<bytes> of memory that Envoy may use; near the limit new requests get 503"`
	// MaxConnections is also the limit of requests to workers.
	MaxConnections int `yaml:"max-connections" default:"40000" help:"<number> of client connections that Envoy accepts"`
	MaxBodyBytes   int `yaml:"max-body-bytes" default:"16777216" help:"largest request body in <bytes>"`

	MessageTimeout time.Duration `yaml:"message-timeout" default:"2s" help:"<time> for which Envoy waits for kvroute"`
	// QueueWait and PrefillTimeout are kvroute's settings: Envoy must wait as long as both together.
	QueueWait      time.Duration `yaml:"queue-wait" default:"9.5s" help:"<time> of kvroute's setting queue-wait"`
	PrefillTimeout time.Duration `yaml:"prefill-timeout" default:"30s" help:"<time> of kvroute's setting prefill-timeout"`
	// MaxMessageTimeout bounds a timeout that kvroute extends. Default 60 s, or half a second more than QueueWait and
	// PrefillTimeout together if that is longer.
	MaxMessageTimeout time.Duration
	// RequestTimeout by default suffices for 16 MiB at half a megabit a second. A tenth of it is for the headers, at
	// least a second.
	RequestTimeout time.Duration `yaml:"request-timeout" default:"5m" help:"<time> that a client may take to send a request"`
	IdleTimeout    time.Duration `yaml:"idle-timeout" default:"1h" help:"longest <time> without a byte of a response, as before its first token"`
	// SilenceTimeout counts from the last packet of the other end. It ends waiting requests of a machine that is lost.
	SilenceTimeout   time.Duration `yaml:"silence-timeout" default:"30s" help:"<time> after which Envoy closes a connection whose other machine is silent, as after a loss of power"`
	NoSilenceTimeout bool          `yaml:"no-silence-timeout" help:"leave out silence-timeout, which Envoy supports only on Linux"`
}

// Failover is a way to reach the second choice if the first one refuses the connection, does not
// accept it, or answers 503.
type Failover = string

// The ways to reach the second choice.
const (
	// Composite uses the addresses in the headers x-dynamo-worker-fallback and x-dynamo-worker-fallback-2, inside or
	// outside the pool.
	// kvroute's --second-choice must be header.
	Composite Failover = "composite"
	// List uses the next addresses in the header x-dynamo-worker. Envoy ignores addresses
	// outside the pool. kvroute's --second-choice must be list.
	List Failover = "list"
	// NoFailover answers with an error.
	NoFailover Failover = "none"
)

// BodyMode is a way in which Envoy sends the request's body to kvroute.
type BodyMode = string

// The modes; docs/envoy.md describes them.
const (
	// Buffered delays the request until its body is complete.
	Buffered BodyMode = "buffered"
	// BufferedPartial is Buffered up to Envoy's limit; longer bodies are truncated.
	BufferedPartial BodyMode = "buffered-partial"
	// Streamed sends the body in chunks after the answer to the headers.
	Streamed BodyMode = "streamed"
	// StreamedAhead sends the body without waiting for that answer.
	StreamedAhead BodyMode = "streamed-ahead"
	// FullDuplex sends request and response in chunks and gets them back.
	FullDuplex BodyMode = "full-duplex"
)

// bodyModes are the modes' names in Envoy's configuration.
//
//nolint:gochecknoglobals // a table
var bodyModes = map[BodyMode]string{
	Buffered: "BUFFERED", BufferedPartial: "BUFFERED_PARTIAL", Streamed: "STREAMED", StreamedAhead: "STREAMED", FullDuplex: "FULL_DUPLEX_STREAMED",
}

// bootstrap is a text/template. Render checks every value that the template prints.
//
//go:embed bootstrap.yaml.tmpl
var bootstrap string

// Render writes the bootstrap for c as YAML. The same settings give the same bytes. An error names
// the field and its value; in this case Render writes nothing.
func Render(w io.Writer, c Config) error {
	settings.SetDefaults(&c)
	c.MaxMessageTimeout = c.longestTimeout()
	if err := c.check(); err != nil {
		return err
	}
	t, err := template.New("bootstrap").Option("missingkey=error").Parse(bootstrap)
	if err != nil {
		return fmt.Errorf("envoy: %w", err)
	}
	var text bytes.Buffer
	if err := t.Execute(&text, c.values()); err != nil {
		return fmt.Errorf("envoy: %w", err)
	}
	all := text.String()
	if c.Parts {
		if all, err = writeParts(all); err != nil {
			return err
		}
	}
	_, err = io.WriteString(w, all)
	return err
}

// longestTimeout returns MaxMessageTimeout or its default. The other fields have their defaults.
func (c *Config) longestTimeout() time.Duration {
	return cmp.Or(c.MaxMessageTimeout, max(time.Minute, c.QueueWait+c.PrefillTimeout+500*time.Millisecond))
}

// values returns what the template prints. c is checked and has its defaults.
func (c Config) values() map[string]any {
	return map[string]any{
		"c":         c,
		"admin":     address(c.AdminAddress),
		"listen":    address(c.ListenAddress),
		"status":    address(c.StatusAddress),
		"otlp":      address(c.OTLP),
		"extproc":   addresses(c.ExtProc),
		"pool":      addresses(c.Pool),
		"directory": path.Dir(c.PoolFile),
		"discovery": map[string]string{"extproc": discovery(c.ExtProc), "pool": discovery(c.Pool)},
		"body_mode": bodyModes[c.BodyMode],
		"steering":  strings.Join(openai.SteeringPatterns(c.SessionHeaders), "|"),
		"hints":     openai.Hints,
		"settable":  openai.SettableHeaders(),
		"client_id": openai.ClientRequestID,
		"errors":    c.errors(),
		"fallbacks": map[string]string{"worker-second": "x-dynamo-worker-fallback", "worker-third": "x-dynamo-worker-fallback-2"},
		"silence": map[string]int64{
			"idle":     int64(max(time.Second, c.SilenceTimeout/3) / time.Second),
			"interval": int64(max(time.Second, c.SilenceTimeout/6) / time.Second),
			"end":      c.SilenceTimeout.Milliseconds(),
		},
		"seconds": map[string]string{
			"idle":        seconds(c.IdleTimeout),
			"message":     seconds(c.MessageTimeout),
			"max_message": seconds(c.MaxMessageTimeout),
			"request":     seconds(c.RequestTimeout),
			"headers":     seconds(max(time.Second, c.RequestTimeout/10)),
		},
	}
}

// errors returns Envoy's own errors that the client caused. Envoy's texts for them are not JSON. The messages have no
// quotes, backslashes or percent signs, which mean something to YAML or Envoy.
func (c *Config) errors() []openai.Error {
	return []openai.Error{
		{Status: http.StatusBadRequest, Message: "the request is not valid HTTP", Code: "bad_http"},
		{Status: http.StatusForbidden, Message: "the gateway does not allow the request", Code: "forbidden"},
		{Status: http.StatusNotFound, Message: "this gateway does not serve the path", Code: "unknown_path"},
		{Status: http.StatusRequestTimeout, Message: "the request took too long to arrive", Code: "request_timeout"},
		{Status: http.StatusRequestEntityTooLarge, Message: fmt.Sprintf("the request body is larger than %d bytes", c.MaxBodyBytes), Code: "body_too_large"},
		{Status: http.StatusUpgradeRequired, Message: "the gateway does not accept HTTP/1.0; use HTTP/1.1 or HTTP/2", Code: "http_version"},
		{Status: http.StatusRequestHeaderFieldsTooLarge, Message: "the request has too many headers, or too large ones", Code: "headers_too_large"},
		{Status: http.StatusNotImplemented, Message: "the gateway does not know the transfer encoding", Code: "transfer_encoding"},
	}
}

// check returns an error for the first wrong setting.
func (c *Config) check() (err error) {
	want := func(ok bool, format string, args ...any) {
		if !ok && err == nil {
			err = fmt.Errorf(format, args...)
		}
	}
	want(isAddress(c.ListenAddress), "listen is %q, want ip:port", c.ListenAddress)
	want(isAddress(c.AdminAddress), "admin is %q, want ip:port", c.AdminAddress)
	status, portless := c.StatusAddress != "", func(a string) bool { return strings.HasSuffix(a, ":0") }
	want(!status || isAddress(c.StatusAddress) && !portless(c.StatusAddress), "status is %q, want ip:port with a port",
		c.StatusAddress)
	want(!status || !portless(c.AdminAddress), "status needs a port in admin, which is %q", c.AdminAddress)
	want(len(c.ExtProc) > 0, "extproc is empty, want the addresses of kvroute's replicas")
	for i, a := range c.ExtProc {
		socket, isSocket := strings.CutPrefix(a, "unix:")
		want(isHostPort(a) || isSocket && len(c.ExtProc) == 1 && pathForm.MatchString(socket), "extproc[%d] is %q, want host:port, or a single unix:/path", i, a)
	}
	for i, a := range c.Pool {
		want(isHostPort(a), "pool[%d] is %q, want host:port", i, a)
	}
	type setting struct{ field, value string }
	for _, file := range []setting{{"extproc-ca", c.CA}, {"extproc-cert", c.Cert}, {"extproc-key", c.Key}, {"pool-file", c.PoolFile}, {"tls-cert", c.ListenCert}, {"tls-key", c.ListenKey}, {"worker-tls-ca", c.WorkerCA}} {
		want(file.value == "" || pathForm.MatchString(file.value), "%s is %q, want an absolute path of letters, digits, '.', '_' and '-'", file.field, file.value)
	}
	want((c.Cert == "") == (c.Key == ""), "extproc-cert and extproc-key need each other")
	want((c.ListenCert == "") == (c.ListenKey == ""), "tls-cert and tls-key need each other")
	want(c.CA != "" || c.Cert == "" && c.ServerName == "", "extproc-cert, extproc-key and extproc-name need extproc-ca")
	want(c.WorkerCA != "" || c.WorkerName == "", "worker-tls-name needs worker-tls-ca")
	for _, name := range []setting{{"extproc-name", c.ServerName}, {"worker-tls-name", c.WorkerName}} {
		want(name.value == "" || hostForm.MatchString(name.value), "%s is %q, want a host name", name.field, name.value)
	}
	want(c.OTLP == "" || isHostPort(c.OTLP), "otlp is %q, want host:port", c.OTLP)
	want(c.PoolFile == "" || len(c.Pool) == 0, "pool and pool-file are both given, want one")
	want(c.PoolCluster == "" || c.Parts, "pool-cluster needs parts")
	want(c.PoolCluster == "" || len(c.Pool) == 0 && c.PoolFile == "" && c.Failover != List, "pool-cluster excludes pool, pool-file and failover=list")
	want(c.PoolCluster == "" || clusterForm.MatchString(c.PoolCluster), "pool-cluster is %q, want a name of letters, digits and ._:/|-", c.PoolCluster)
	want(!c.Parts || c.OTLP == "", "otlp has no effect with parts: set up tracing in your own configuration")
	for i, p := range c.AllowPaths {
		want(allowForm.MatchString(p), "allow-path[%d] is %q, want a path such as /v1/audio/speech, or /v1/audio/* for all paths below it", i, p)
	}
	for i, name := range c.SessionHeaders {
		want(headerForm.MatchString(name), "session-header[%d] is %q, want a header's name in lower case", i, name)
		want(!addressForm.MatchString(name) && !slices.Contains(openai.Hints, name),
			"session-header[%d] is %q, which Envoy, kvroute or workers read as an address, an id or a hint; want another name", i, name)
	}
	want(slices.Contains([]Failover{Composite, List, NoFailover}, c.Failover), "failover is %q, want composite, list or none", c.Failover)
	want(c.Failover != List || len(c.Pool) > 0 || c.PoolFile != "", "failover is list, which needs pool or pool-file")
	want(bodyModes[c.BodyMode] != "", "body-mode is %q, want buffered, buffered-partial, streamed, streamed-ahead or full-duplex", c.BodyMode)
	want(c.MaxBodyBytes > 0 && int64(c.MaxBodyBytes) < 1<<32, "max-body-bytes is %d, want 1 to 4294967295", c.MaxBodyBytes)
	want(c.MaxHeapBytes > 0, "max-heap-bytes is %d, want a number of bytes", c.MaxHeapBytes)
	want(c.MaxConnections > 0, "max-connections is %d, want 1 or more", c.MaxConnections)
	want(c.QueueWait > 0 && c.QueueWait <= time.Hour, "queue-wait is %v, want more than 0, at most 1h", c.QueueWait)
	want(c.PrefillTimeout > 0 && c.PrefillTimeout <= time.Hour, "prefill-timeout is %v, want more than 0, at most 1h", c.PrefillTimeout)
	want(c.MessageTimeout > 0, "message-timeout is %v, want more than 0", c.MessageTimeout)
	want(c.MaxMessageTimeout >= c.MessageTimeout, "max-message-timeout is %v, want at least message-timeout, %v", c.MaxMessageTimeout, c.MessageTimeout)
	want(c.RequestTimeout >= time.Second, "request-timeout is %v, want a second or more", c.RequestTimeout)
	want(c.IdleTimeout >= time.Second, "idle-timeout is %v, want a second or more", c.IdleTimeout)
	want(c.SilenceTimeout >= time.Second && c.SilenceTimeout <= maxSilence, "silence-timeout is %v, want 1s to %v", c.SilenceTimeout, maxSilence)
	return err
}

// maxSilence bounds silence-timeout: Linux accepts intervals of at most 32767 s.
const maxSilence = 24 * time.Hour

var (
	hostForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?$`)
	// allowForm is a path that has the same meaning as a regular expression, except for its dots.
	allowForm   = regexp.MustCompile(`^(/[A-Za-z0-9._-]+)+(/\*)?$|^/\*$`)
	clusterForm = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._:/|-]*$`)
	headerForm  = regexp.MustCompile(`^[a-z0-9-]+$`)
	// addressForm has the headers by which Envoy and workers find a worker or name a request: with one of them, a client
	// would choose the worker's address while kvroute is away.
	addressForm = regexp.MustCompile(`^x-(dynamo-(worker|rank|attempt|prefill|(client-)?request-id)|(gateway|llm-d)-destination|data-parallel-|prefill|kv-)`)
	pathForm    = regexp.MustCompile(`^(/[A-Za-z0-9._-]+)+$`)
)

func isAddress(s string) bool {
	a, err := netip.ParseAddrPort(s)
	return err == nil && a.Addr().Zone() == ""
}

func isHostPort(s string) bool {
	host, port, err := net.SplitHostPort(s)
	n, portErr := strconv.ParseUint(port, 10, 16)
	if err != nil || portErr != nil || n == 0 {
		return false
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Zone() == "" || err != nil && hostForm.MatchString(host)
}

// address writes a checked address in Envoy's form.
func address(s string) string {
	if path, ok := strings.CutPrefix(s, "unix:"); ok {
		return fmt.Sprintf("{pipe: {path: %q}}", path)
	}
	host, port, _ := net.SplitHostPort(s)
	return fmt.Sprintf("{socket_address: {address: %q, port_value: %s}}", host, port)
}

func addresses(list []string) (all []string) {
	for _, a := range list {
		all = append(all, address(a))
	}
	return all
}

// unescaped is the rest of a path without an escaped percent sign. Envoy decodes a path once; a worker must
// not find another path in what is left.
const unescaped = `([^%]|%[013-9A-Fa-f][0-9A-Fa-f]|%2[0-46-9A-Fa-f])+`

// Paths returns a regular expression of the paths that reach workers.
func (c Config) Paths() string {
	all := append(openai.Paths(), "/v1/models", "/v1/models/*")
	return strings.NewReplacer(".", `\.`, "*", unescaped).Replace(strings.Join(append(all, c.AllowPaths...), "|")) + "|" + openai.HeldPaths
}

// discovery returns STRICT_DNS if at least one address is a name, otherwise STATIC.
func discovery(addresses []string) string {
	isName := func(a string) bool {
		host, _, _ := net.SplitHostPort(a) // checked before
		_, err := netip.ParseAddr(host)
		return err != nil && !strings.HasPrefix(a, "unix:")
	}
	if slices.ContainsFunc(addresses, isName) {
		return "STRICT_DNS"
	}
	return "STATIC"
}

func seconds(d time.Duration) string { return strconv.FormatFloat(d.Seconds(), 'f', -1, 64) + "s" }
