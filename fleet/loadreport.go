// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"
	"go.opentelemetry.io/otel/metric/noop"
	"google.golang.org/protobuf/encoding/protowire"

	"github.com/kvroute/kvroute/router"
)

// LoadHeader is what the headers begin with in which an engine says how busy it is,
// in every response to a request that asks for it: ORCA's.
const LoadHeader = "endpoint-load-metrics"

// maxReport bounds a header; vLLM's has a hundred bytes.
const maxReport = 4 << 10

// reportUsage are the names of ORCA's named metrics for the used share of the cache:
// vLLM's, its older one, and that of Triton before TensorRT-LLM.
//
//nolint:gochecknoglobals // a table
var reportUsage = [...]string{"kv_cache_usage_perc", "gpu_cache_usage_perc", "kv_cache_utilization"}

// LoadReport reads the share of its cache, 0 to 1, that an engine says to use in a
// response's header: [LoadHeader] with TEXT, JSON or BIN and the report in that form,
// LoadHeader-json with JSON alone, or LoadHeader-bin with ORCA's message in base64. The
// error is [ErrNoLoad] if the report is well-formed and does not name the cache; other
// errors say what is wrong with it. No more than 4 KiB are read.
func LoadReport(header, value string) (usage float64, err error) {
	if len(value) > maxReport {
		return 0, fmt.Errorf("fleet: header %s has %d bytes, want %d at most", header, len(value), maxReport)
	}
	var form string
	text := value
	switch strings.TrimPrefix(header, LoadHeader) {
	case "":
		form, text, _ = strings.Cut(value, " ")
	case "-json":
		form = "JSON"
	case "-bin":
		form = "BIN"
	default:
		return 0, fmt.Errorf("fleet: header %s is not known, want %s, or that with -json or -bin", header, LoadHeader)
	}
	var named map[string]float64
	switch form {
	case "JSON":
		named, err = jsonReport(text)
	case "TEXT":
		named, err = textReport(text)
	case "BIN":
		named, err = binReport(text)
	default:
		err = fmt.Errorf("the form is %q, want JSON, TEXT or BIN", form[:min(len(form), 16)])
	}
	if err != nil {
		return 0, fmt.Errorf("fleet: header %s: %w", header, err)
	}
	for _, name := range reportUsage {
		v, ok := named[name]
		switch {
		case !ok:
		case math.IsNaN(v) || v < 0 || v > 1:
			return 0, fmt.Errorf("fleet: header %s: %s is %v, want 0 to 1", header, name, v)
		default:
			return v, nil
		}
	}
	return 0, ErrNoLoad
}

// jsonReport reads ORCA's message as JSON, by either name of the field.
func jsonReport(text string) (map[string]float64, error) {
	var r struct {
		Named  map[string]float64 `json:"named_metrics"`
		Camels map[string]float64 `json:"namedMetrics"`
	}
	if err := json.Unmarshal([]byte(text), &r); err != nil {
		return nil, err
	}
	if r.Named == nil {
		return r.Camels, nil
	}
	return r.Named, nil
}

// textReport reads name=value, separated by commas.
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

// fieldNamed is the number of named_metrics in xds.data.orca.v3.OrcaLoadReport.
const fieldNamed = 8

// binReport reads ORCA's message in base64, with or without padding.
func binReport(text string) (map[string]float64, error) {
	message, err := base64.RawStdEncoding.DecodeString(strings.TrimRight(strings.TrimSpace(text), "="))
	if err != nil {
		return nil, err
	}
	named := make(map[string]float64)
	err = eachField(message, func(number protowire.Number, entry []byte) error {
		if number != fieldNamed {
			return nil
		}
		// An entry of a map is a message: 1 is the name, 2 the number, 0 if absent.
		var name string
		var v float64
		err := eachField(entry, func(number protowire.Number, field []byte) error {
			if number == 1 {
				name = string(field)
			}
			if number == 2 {
				bits, n := protowire.ConsumeFixed64(field)
				if n < 0 {
					return errors.New("a named metric is no number")
				}
				v = math.Float64frombits(bits)
			}
			return nil
		})
		named[name] = v
		return err
	})
	return named, err
}

// eachField calls take with each field of a message: what a field of bytes contains,
// and of others what they are on the wire.
func eachField(message []byte, take func(number protowire.Number, value []byte) error) error {
	for len(message) > 0 {
		number, kind, n := protowire.ConsumeTag(message)
		if n < 0 {
			return protowire.ParseError(n)
		}
		message = message[n:]
		if n = protowire.ConsumeFieldValue(number, kind, message); n < 0 {
			return protowire.ParseError(n)
		}
		value := message[:n]
		if kind == protowire.BytesType {
			value, _ = protowire.ConsumeBytes(value)
		}
		if err := take(number, value); err != nil {
			return err
		}
		message = message[n:]
	}
	return nil
}

// Reports takes what engines say of themselves in the headers of responses. Its methods
// may be called by any number of goroutines.
type Reports struct {
	use     func(w router.Worker, usage float64) bool
	log     *slog.Logger
	reports metric.Int64Counter
	logged  atomic.Int64 // when a bad one was, in ns since 1970
}

// NewReports returns one that tells use which share of its cache a worker uses; use
// returns false if that cannot be used. Meter and log may be nil.
func NewReports(use func(w router.Worker, usage float64) bool, meter metric.Meter, log *slog.Logger) (*Reports, error) {
	meter = cmp.Or[metric.Meter](meter, noop.Meter{})
	log = cmp.Or(log, slog.New(slog.DiscardHandler))
	reports, err := meter.Int64Counter("kvroute.fleet.load_reports",
		metric.WithUnit("{header}"), metric.WithDescription("Headers of responses in which an engine says how busy it is, by outcome."))
	if err != nil {
		return nil, fmt.Errorf("fleet: make instruments: %w", err)
	}
	return &Reports{use: use, log: log, reports: reports}, nil
}

// Take takes a header of a response of w's. Of bad ones one a minute is logged.
func (r *Reports) Take(w router.Worker, header, value string) {
	usage, err := LoadReport(header, value)
	outcome := "taken"
	switch {
	case errors.Is(err, ErrNoLoad):
		outcome = "nothing said"
	case err != nil:
		outcome = "bad"
		if now, last := time.Now().UnixNano(), r.logged.Load(); now-last > int64(time.Minute) && r.logged.CompareAndSwap(last, now) {
			r.log.Warn("what an engine says of its load is not readable", "worker", w.ID, "rank", w.DPRank, "err", err)
		}
	case !r.use(w, usage):
		outcome = "unused"
	}
	r.reports.Add(context.Background(), 1, metric.WithAttributes(attribute.String("outcome", outcome)))
}
