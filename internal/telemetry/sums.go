// SPDX-License-Identifier: Apache-2.0

package telemetry

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/attribute"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
)

// sums adds up counters of integers and histograms of floats. It reads them as differences: OpenTelemetry then
// forgets their series at each reading. OpenTelemetry's own sums keep all series for the life of the process.
// Other instruments pass through. sums implements [sdkmetric.Producer].
//
// Invariant: after a reading, the total of a series is the sum of its measurements since the series began or was
// forgotten.
type sums struct {
	reader *sdkmetric.ManualReader

	mu sync.Mutex
	// mu guards the fields below. A point in a map is replaced, never changed: readings refer to its buckets.
	totals  map[instrument]*total
	forgets int // calls of forget so far
	// The arguments of the last call of forget.
	keep  map[string]bool
	names []string
}

type instrument struct{ scope, name string }

// total has the series of a counter or of a histogram.
type total struct {
	metricdata.Metrics // without data

	counts     map[attribute.Distinct]metricdata.DataPoint[int64]
	histograms map[attribute.Distinct]metricdata.HistogramDataPoint[float64]
}

func newSums() *sums {
	differences := func(kind sdkmetric.InstrumentKind) metricdata.Temporality {
		if kind == sdkmetric.InstrumentKindCounter || kind == sdkmetric.InstrumentKindHistogram {
			return metricdata.DeltaTemporality
		}
		return metricdata.CumulativeTemporality
	}
	return &sums{
		reader: sdkmetric.NewManualReader(sdkmetric.WithTemporalitySelector(differences)),
		totals: make(map[instrument]*total),
	}
}

// Produce reads all instruments. Errors name instruments that cannot be added up; they are left out.
func (s *sums) Produce(ctx context.Context) ([]metricdata.ScopeMetrics, error) {
	scopes, err := s.read(ctx)
	s.mu.Lock()
	defer s.mu.Unlock()
	all := metricdata.ScopeMetrics{Metrics: make([]metricdata.Metrics, 0, len(s.totals))}
	for _, t := range s.totals {
		m := t.Metrics
		switch {
		case len(t.counts) > 0:
			m.Data = metricdata.Sum[int64]{
				DataPoints: slices.Collect(maps.Values(t.counts)), Temporality: metricdata.CumulativeTemporality, IsMonotonic: true,
			}
		case len(t.histograms) > 0:
			m.Data = metricdata.Histogram[float64]{
				DataPoints: slices.Collect(maps.Values(t.histograms)), Temporality: metricdata.CumulativeTemporality,
			}
		default:
			continue // all series are forgotten
		}
		all.Metrics = append(all.Metrics, m)
	}
	return append(scopes, all), err
}

// read adds the latest measurements to the totals, and returns the other instruments.
func (s *sums) read(ctx context.Context) (others []metricdata.ScopeMetrics, err error) {
	before := s.forgetsSoFar()
	var now metricdata.ResourceMetrics
	err = s.reader.Collect(ctx, &now) // calls functions that read gauges
	others, bad := s.add(&now, before)
	return others, errors.Join(err, bad)
}

func (s *sums) forgetsSoFar() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.forgets
}

// add adds measurements to the totals, and returns the other instruments. before is the number of calls of forget
// before the measurements were collected.
func (s *sums) add(now *metricdata.ResourceMetrics, before int) (others []metricdata.ScopeMetrics, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.forgets != before {
		defer s.forgetLocked() // they may be older than the last call
	}
	for _, scope := range now.ScopeMetrics {
		scope.Metrics = slices.DeleteFunc(scope.Metrics, func(m metricdata.Metrics) bool {
			switch d := m.Data.(type) {
			case metricdata.Sum[int64]:
				t := s.totalLocked(scope.Scope.Name, m)
				for _, p := range d.DataPoints {
					key := p.Attributes.Equivalent()
					if old, known := t.counts[key]; known {
						p.StartTime, p.Value = old.StartTime, old.Value+p.Value
					}
					p.Exemplars = nil
					t.counts[key] = p
				}
			case metricdata.Histogram[float64]:
				t := s.totalLocked(scope.Scope.Name, m)
				for _, p := range d.DataPoints {
					key := p.Attributes.Equivalent()
					if old, known := t.histograms[key]; known {
						p.StartTime, p.Count, p.Sum = old.StartTime, old.Count+p.Count, old.Sum+p.Sum
						for i, n := range old.BucketCounts {
							p.BucketCounts[i] += n
						}
					}
					p.Exemplars, p.Min, p.Max = nil, metricdata.Extrema[float64]{}, metricdata.Extrema[float64]{}
					t.histograms[key] = p
				}
			case metricdata.Gauge[float64], metricdata.Sum[float64]:
				return false // the functions of package meter
			default:
				err = fmt.Errorf("telemetry: metric %s has data of the type %T, want a counter of integers or a histogram of floats", m.Name, m.Data)
			}
			return true
		})
		others = append(others, scope)
	}
	return others, err
}

func (s *sums) totalLocked(scope string, m metricdata.Metrics) *total {
	key := instrument{scope, m.Name}
	t := s.totals[key]
	if t == nil {
		m.Data = nil
		t = &total{
			m, make(map[attribute.Distinct]metricdata.DataPoint[int64]), make(map[attribute.Distinct]metricdata.HistogramDataPoint[float64]),
		}
		s.totals[key] = t
	}
	return t
}

// forget removes the series with an attribute of one of these names whose value is not to be kept.
func (s *sums) forget(ctx context.Context, keep map[string]bool, names []string) error {
	_, err := s.read(ctx) // otherwise the next reading would bring their latest measurements back
	s.mu.Lock()
	defer s.mu.Unlock()
	s.forgets++
	s.keep, s.names = keep, names
	s.forgetLocked()
	return err
}

func (s *sums) forgetLocked() {
	forgotten := func(set *attribute.Set) bool {
		return slices.ContainsFunc(s.names, func(name string) bool {
			value, has := set.Value(attribute.Key(name))
			return has && !s.keep[value.AsString()]
		})
	}
	for _, t := range s.totals {
		maps.DeleteFunc(t.counts, func(_ attribute.Distinct, p metricdata.DataPoint[int64]) bool { return forgotten(&p.Attributes) })
		maps.DeleteFunc(t.histograms, func(_ attribute.Distinct, p metricdata.HistogramDataPoint[float64]) bool {
			return forgotten(&p.Attributes)
		})
	}
}
