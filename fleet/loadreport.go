// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/meter"
	"github.com/kvroute/kvroute/router"
)

// loadHeader is the beginning of the names of the ORCA headers: load reports of an engine
// in the responses to requests that ask for them.
const loadHeader = "endpoint-load-metrics"

const maxReport = 4 << 10 // bytes of a header; vLLM's have about a hundred

// reportUsage are the names that engines give to the used share of the cache: vLLM, vLLM
// before 0.10, and Triton with TensorRT-LLM.
//
//nolint:gochecknoglobals // a table
var reportUsage = [...]string{"kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_utilization"}

// loadReport reads the used share of an engine's cache, 0 to 1, from a response header:
// [loadHeader] with TEXT or JSON and the report in that form, or loadHeader-json with JSON alone. The
// error is [errNoLoad] if the report is well-formed and does not contain the share.
func loadReport(header, value string) (usage float64, err error) {
	if len(value) > maxReport {
		return 0, fmt.Errorf("fleet: header %s has %d bytes, want %d at most", header, len(value), maxReport)
	}
	var form string
	text := value
	switch strings.TrimPrefix(header, loadHeader) {
	case "":
		form, text, _ = strings.Cut(value, " ")
	case "-json":
		form = "JSON"
	default:
		return 0, fmt.Errorf("fleet: header %s is not known, want %s, or that with -json", header, loadHeader)
	}
	var named map[string]float64
	switch form {
	case "JSON":
		var report struct {
			Snake map[string]float64 `json:"named_metrics"`
			Camel map[string]float64 `json:"namedMetrics"`
		}
		err = json.Unmarshal([]byte(text), &report)
		if named = report.Snake; named == nil {
			named = report.Camel
		}
	case "TEXT":
		named, err = textReport(text)
	default:
		err = fmt.Errorf("the form is %q, want JSON or TEXT", form[:min(len(form), 16)])
	}
	if err != nil {
		return 0, fmt.Errorf("fleet: header %s: %w", header, err)
	}
	for _, name := range reportUsage {
		if v, ok := named[name]; ok {
			if math.IsNaN(v) || v < 0 || v > 1 {
				return 0, fmt.Errorf("fleet: header %s: %s is %v, want 0 to 1", header, name, v)
			}
			return v, nil
		}
	}
	return 0, errNoLoad
}

// textReport reads the named metrics of name=value pairs separated by commas.
func textReport(text string) (map[string]float64, error) {
	named := make(map[string]float64)
	for pair := range strings.SplitSeq(text, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(pair), "=")
		if !ok {
			return nil, fmt.Errorf("%q is no name=value", pair[:min(len(pair), 64)])
		}
		v, err := strconv.ParseFloat(strings.TrimSpace(value), 64)
		if err != nil {
			return nil, fmt.Errorf("%s is %q, want a number", name[:min(len(name), 64)], value[:min(len(value), 64)])
		}
		if name, ok := strings.CutPrefix(strings.TrimSpace(name), "named_metrics."); ok {
			named[name] = v
		}
	}
	return named, nil
}

// Reports passes on the load reports in response headers. Its methods may be called by any
// number of goroutines.
type Reports struct {
	use     func(w router.Worker, usage float64) bool
	log     *slog.Logger
	reports meter.Counter
	logged  atomic.Int64 // when the last bad report was logged, in ns since 1970
}

// NewReports returns Reports that call use with the used share of a worker's cache. use
// returns false if the worker is unknown. The meter and log may be nil.
func NewReports(use func(w router.Worker, usage float64) bool, from metric.Meter, log *slog.Logger) (*Reports, error) {
	m := meter.New(from)
	reports := m.Counter("kvroute.fleet.load_reports", "{header}", "Headers of responses in which an engine says how busy it is, by outcome.", "outcome")
	return &Reports{use: use, log: cmp.Or(log, slog.New(slog.DiscardHandler)), reports: reports}, m.Err()
}

// Take reads a header of a response of w. It logs at most one bad report a minute.
func (r *Reports) Take(w router.Worker, header, value string) {
	usage, err := loadReport(header, value)
	outcome := "taken"
	switch {
	case errors.Is(err, errNoLoad):
		outcome = "nothing said"
	case err != nil:
		outcome = "bad"
		if now, last := time.Now().UnixNano(), r.logged.Load(); now-last > int64(time.Minute) && r.logged.CompareAndSwap(last, now) {
			r.log.Warn("the load report of an engine cannot be read", "worker", w.ID, "rank", w.DPRank, "err", err)
		}
	case !r.use(w, usage):
		outcome = "unused"
	}
	r.reports.Count(outcome)
}
