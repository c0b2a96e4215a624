// SPDX-License-Identifier: Apache-2.0

package envoy

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
)

const (
	// WatchEvery is the time between two calls of [Watch.Read].
	WatchEvery = 10 * time.Second
	maxStats   = 1 << 20 // bytes of an answer
	minute     = 6       // steps of WatchEvery
)

//nolint:gochecknoglobals // a table
var faultNames = []string{"unanswered", "unused", "bypassed", "ignored", "settings"}

// counts are numbers by the names that docs/envoy.md lists.
type counts map[string]uint64

// step is what was counted between two readings.
type step struct {
	counts
	time time.Duration
}

func (s *step) seconds() int { return int(s.time.Seconds() + .5) }

func sum(steps []step) step {
	total := step{counts: counts{}}
	for _, s := range steps {
		total.time += s.time
		for name, n := range s.counts {
			total.counts[name] += n
		}
	}
	return total
}

// WatchConfig configures a [Watch]. All fields are required but Meter.
type WatchConfig struct {
	URL     string // of Envoy's admin endpoint
	ExtProc string // address at which kvroute listens for Envoy, for the text of faults
	// Counts returns how many requests Envoy has sent to this replica since its start, and for how
	// many of them the replica named a worker.
	Counts func() (requests, routed uint64)
	// Peers returns the number of other router replicas: Envoy may send all requests to them.
	Peers func() int
	// Settings are compared with Envoy's configuration once a minute.
	Settings Settings
	Client   *http.Client
	Now      func() time.Time
	Log      *slog.Logger
	Meter    metric.Meter // default none
}

// Watch compares an Envoy's statistics with what kvroute counted itself, and finds out whether Envoy
// uses kvroute. Any goroutine may call its methods, but only one at a time may call Read.
type Watch struct {
	conf WatchConfig

	mu sync.Mutex
	// mu guards the fields below.
	read  time.Time // the last answer
	last  counts    // as they were then
	total counts    // since the first reading
	// steps are the last minute and one step more, oldest first: a request may reach kvroute before
	// a reading, and a worker after it.
	steps  []step
	faults map[string]string // texts by fault; replaced at each reading

	// Read alone uses the fields below.
	reads   int
	differs string       // how Envoy's configuration differs from kvroute's settings
	to      destinations // by Envoy's configuration
}

// State is the result of a [Watch].
type State struct {
	URL  string    `json:"url"`
	Read time.Time `json:"read,omitzero"` // time of the last answer
	// Seconds is the time that Counts covers: the last minute. It is less after a start, and more if
	// Envoy did not answer.
	Seconds int               `json:"seconds"`
	Counts  map[string]uint64 `json:"counts"` // docs/envoy.md lists them
	Faults  []Fault           `json:"faults"`
}

// Fault is a reason why Envoy does not use kvroute as it should.
type Fault struct {
	What string `json:"what"` // "unanswered", "unused", "bypassed", "ignored" or "settings": see docs/envoy.md
	Text string `json:"text"` // a sentence with what to do
}

// NewWatch returns a Watch. The error is that of its metrics.
func NewWatch(c WatchConfig) (*Watch, error) {
	w := &Watch{conf: c, total: counts{}, to: destinations{[]string{"pool"}, []string{"workers"}}}
	m := meter.New(c.Meter)
	m.Total("kvroute.envoy.counters", "{event}", "Counters of Envoy, and kvroute's own ones to compare, since the first reading.", func(o meter.Observe) {
		w.mu.Lock()
		total := maps.Clone(w.total)
		w.mu.Unlock()
		for name, n := range total {
			o(float64(n), "counter", name)
		}
	})
	m.Gauge("kvroute.envoy.faults", "{fault}", "Faults in Envoy's use of kvroute: 1 while there is one.", func(o meter.Observe) {
		found := map[string]float64{}
		for _, f := range w.State().Faults {
			found[f.What] = 1
		}
		for _, name := range faultNames {
			o(found[name], "fault", name)
		}
	})
	return w, m.Err()
}

// Read reads Envoy's statistics, and once a minute its configuration, in 2 s each at most. Call it every [WatchEvery]. It logs each fault when it
// begins and when it ends.
func (w *Watch) Read(ctx context.Context) {
	at, peers := w.conf.Now(), w.conf.Peers()
	now, err := w.request(ctx)
	if ctx.Err() != nil {
		return // kvroute stops
	}
	if err == nil && w.compare(ctx) {
		now, err = w.request(ctx) // with the counters of the other clusters
	}
	ours, named := w.conf.Counts()
	w.mu.Lock()
	before, found := w.faults, map[string]string{}
	if w.faults = found; err != nil {
		found["unanswered"] = fmt.Sprintf("Envoy's admin endpoint does not answer at %s: %v; "+
			"start Envoy, or compare --envoy-admin of kvroute serve with --admin of kvroute config envoy", w.conf.URL, err)
	} else {
		now["requests"], now["routed"] = ours, named
		w.addLocked(at, now)
		w.judgeLocked(peers)
		if w.differs != "" {
			found["settings"] = "Envoy's configuration does not fit kvroute's settings: " + w.differs + ": give kvroute config envoy the same values as kvroute serve"
		}
	}
	w.mu.Unlock()
	for _, name := range faultNames {
		switch {
		case before[name] == "" && found[name] != "":
			w.conf.Log.Warn("Envoy does not use kvroute as it should", "fault", name, "text", found[name])
		case before[name] != "" && found[name] == "":
			w.conf.Log.Warn("a fault of Envoy is no longer seen", "fault", name)
		}
	}
}

// compare compares Envoy's configuration with kvroute's settings, at the first reading and then once a minute. It
// reports whether Envoy sends requests to other clusters than before: the history then begins again.
func (w *Watch) compare(ctx context.Context) (other bool) {
	w.reads++
	if w.reads%minute != 1 {
		return false
	}
	u := &used{}
	text, err := ReadDump(ctx, w.conf.Client, w.conf.URL)
	if err == nil {
		u, err = parseDump(text)
	}
	if err != nil {
		if ctx.Err() == nil {
			w.conf.Log.Warn("Envoy's configuration cannot be read, so it is not compared with kvroute's settings", "err", err)
		}
		return false
	}
	w.differs = u.differs(w.conf.Settings)
	if len(u.pools)+len(u.readers) == 0 || reflect.DeepEqual(u.destinations, w.to) {
		return false
	}
	w.to = u.destinations
	w.mu.Lock()
	defer w.mu.Unlock()
	w.read, w.steps = time.Time{}, nil
	return true
}

// request reads the counters as Envoy reports them.
func (w *Watch) request(ctx context.Context) (counts, error) {
	ctx, cancel := context.WithTimeout(ctx, adminTime)
	defer cancel()
	names := w.to.counted()
	text, err := reach.Get(ctx, w.conf.Client, "", strings.TrimRight(w.conf.URL, "/")+"/stats?filter="+url.QueryEscape(names.String()), maxStats)
	if failure, ok := errors.AsType[*url.Error](err); ok {
		return nil, failure.Err // without the long URL
	}
	return parseStats(string(text), names)
}

// parseStats adds up the counters in Envoy's text. If a filter has the prefix kvroute, only its
// counters count.
func parseStats(text string, names *regexp.Regexp) (counts, error) {
	ours, clusters, others := counts{}, counts{}, counts{}
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		m := names.FindStringSubmatch(name)
		n, err := strconv.ParseUint(value, 10, 64)
		switch {
		case m == nil || err != nil || strings.HasSuffix(m[1], "observer"):
		case m[3] != "":
			clusters["pool_requests"] += n
		case m[4] != "":
			clusters["workers_requests"] += n
		case m[1] == "kvroute":
			ours[m[2]] += n
		default:
			others[m[2]] += n
		}
	}
	if len(ours) == 0 {
		ours = others
	}
	if maps.Copy(clusters, ours); len(clusters) == 0 {
		return nil, errors.New("it has no counters of an ext_proc filter, or of the clusters workers and pool: is it the admin endpoint of the Envoy that uses kvroute?")
	}
	return clusters, nil
}

// addLocked adds a reading to the history.
func (w *Watch) addLocked(at time.Time, now counts) {
	if !w.read.IsZero() {
		s := step{counts: counts{}, time: at.Sub(w.read)}
		for name, n := range now {
			if n >= w.last[name] {
				n -= w.last[name]
			} // otherwise Envoy has restarted
			s.counts[name] = n
			w.total[name] += n
		}
		w.steps = append(w.steps[max(0, len(w.steps)-minute):], s)
	}
	w.read, w.last = at, now
}

// lastMinute returns the steps of the last minute.
func (w *Watch) lastMinute() []step { return w.steps[max(0, len(w.steps)-minute):] }

// judgeLocked adds the faults that the history shows.
func (w *Watch) judgeLocked(peers int) {
	last, check := sum(w.lastMinute()), ": check that --extproc in Envoy's configuration names kvroute, which listens at "+w.conf.ExtProc
	seconds := last.seconds()
	if n := last.counts["failure_mode_allowed"]; n > 0 {
		w.faults["bypassed"] = fmt.Sprintf("Envoy continued without kvroute %d times in the last %d s (failure_mode_allowed; %d message timeouts, %d failed streams)",
			n, seconds, last.counts["message_timeouts"], last.counts["streams_failed"]) + check + ", and that kvroute is not overloaded"
	}
	if len(w.steps) <= minute {
		return
	}
	// If two statistics count a request one after the other, a reading may lie between the two. So the
	// span of the one that must be 0 is longer, at the end at which the other one may be counted.
	whole, older := sum(w.steps).counts, sum(w.steps[:minute]).counts
	switch elsewhere := older["streams_started"] > older["streams_failed"]; {
	case whole["requests"] > 0:
		if whole["workers_requests"] == 0 && older["routed"] > 0 && whole["pool_requests"] >= older["routed"] {
			w.faults["ignored"] = fmt.Sprintf("kvroute named a worker for %d requests in %d s, but Envoy sent all requests to the pool: check that the route with the header x-dynamo-worker comes before the route of the pool", older["routed"], seconds)
		}
	case elsewhere && peers == 0:
		w.faults["unused"] = fmt.Sprintf("Envoy sent no request to kvroute for %d s while another processor got %d", seconds, older["streams_started"]) + check
	case !elsewhere && last.counts["pool_requests"] > 0:
		w.faults["unused"] = fmt.Sprintf("Envoy sent no request to kvroute for %d s while the pool served %d", seconds, last.counts["pool_requests"]) + check
	}
}

// State returns what the last readings showed.
func (w *Watch) State() State {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := sum(w.lastMinute())
	s := State{URL: w.conf.URL, Read: w.read, Seconds: last.seconds(), Counts: last.counts, Faults: []Fault{}}
	for _, name := range faultNames {
		if text := w.faults[name]; text != "" {
			s.Faults = append(s.Faults, Fault{name, text})
		}
	}
	return s
}
