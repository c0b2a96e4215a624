// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"
	"go.opentelemetry.io/otel/metric"
	"google.golang.org/grpc"
	"google.golang.org/grpc/health"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/bench/replay"
	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/events/durable"
	"github.com/kvroute/kvroute/extproc"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/internal/beat"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/telemetry"
	"github.com/kvroute/kvroute/outcomes"
	"github.com/kvroute/kvroute/replicas"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/tokenizer"
)

// server is everything that `kvroute serve` consists of.
type server struct {
	conf     config
	given    config                         // conf before fitMemory changed it
	read     func() (config, string, error) // reads the flags and the file again
	file     string
	hup      <-chan os.Signal // SIGHUPs since before the file was read
	networks reach.Networks
	client   *http.Client // for all calls to workers
	log      *slog.Logger
	level    *slog.LevelVar // of log
	names    *workerNames   // used by log
	refused  atomic.Value   // why the last reload failed: a string, empty if it did not
	pending  atomic.Value   // the changed settings that need a restart: a []string

	metrics    *telemetry.Metrics
	metered    counters
	bus        *bus.Server // nil with --nats-url
	nc         *nats.Conn
	prompts    *tokenizer.Cache // of ids, for all models
	verifier   *verifier        // nil unless --verify-tokenizer
	tracer     *replay.Tracer   // nil unless --trace-out
	state      *os.Root         // the folder --state-dir; nil without the setting
	givenSaved uint64           // router.GivenChanges at the last save of the file of ids
	stateLock  *os.File         // nil without --state-dir
	id         uint64           // of this replica
	begun      time.Time
	shared     atomic.Value // a map[string]any: settings that all replicas should have in common
	router     *router.Router
	outcomes   *outcomes.Recorder
	traces     *telemetry.Traces // nil without traces
	registry   *fleet.Registry
	prober     *fleet.Prober
	compared   *fleet.Comparison
	faults     *workerFaults
	static     *static
	dynamo     *fleet.Dynamo            // nil unless the file has "dynamo"
	pods       *pods.Finder             // nil unless the file has "kubernetes"
	sync       *replicas.Sync           // nil without --router-replica-sync
	group      *replicas.GroupPublisher // nil without --group
	groups     *replicas.Groups         // nil unless the file has "groups"
	events     *events.Subscriber
	holdings   events.Holdings // of the router
	durable    *durable.Reader // nil unless --durable-kv-events
	expected   expected
	loads      fleet.Loads          // blocks in use
	requests   fleet.Loads          // running and waiting
	direct     *fleet.DirectWorkers // workers whose engines are read directly
	extproc    *extproc.Server
	grpc       *grpc.Server
	health     *health.Server
	started    atomic.Bool  // the workers are known, or warmUpLimit is over
	watch      *envoy.Watch // nil unless --envoy-admin
	readiness  func() (api.Readiness, int)
	observe    func()      // of the API: notes what needs attention
	tokens     *api.Tokens // nil unless --api-token-file
	http       *http.Server
	grpcAt     net.Listener
	httpAt     net.Listener
}

// counters are the metrics of this package.
type counters struct{ reloads, files, checks, spans meter.Counter }

func newCounters(from metric.Meter) (counters, error) {
	m := meter.New(from)
	m.Gauge("kvroute.build_info", "", "1, with the version of kvroute and of Go.", func(observe meter.Observe) {
		observe(1, "version", telemetry.Version(), "go_version", runtime.Version())
	})
	return counters{
		reloads: m.Counter("kvroute.config.reloads", "{reload}", "Reloads of the configuration, by outcome.", "outcome"),
		files: m.Counter("kvroute.state.files", "{file}", "Files in --state-dir, by file and by what became of them.",
			"file", "outcome"),
		checks: m.Counter("kvroute.tokenize.checks", "{check}",
			"Prompts compared with a worker's own token ids, by model and outcome.", "model", "outcome"),
		spans: m.Counter("kvroute.trace.spans", "{span}", "Spans for the OpenTelemetry collector, by outcome.", "outcome"),
	}, m.Err()
}

// every calls do once a period, at the moments of package beat, until ctx ends.
func every(ctx context.Context, period time.Duration, do func()) error {
	tick := time.NewTimer(beat.Wait(period))
	defer tick.Stop()
	for ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-tick.C:
			do()
			tick.Reset(beat.Wait(period))
		}
	}
	return nil
}
