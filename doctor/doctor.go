// SPDX-License-Identifier: Apache-2.0

// Package doctor compares router replicas by what their APIs report, and finds faults of each one.
//
// Replicas change while the doctor reads them, and it cannot read all of them at one moment. So it
// reads each replica several times. Two replicas differ only if no reading of one agrees with a
// reading of the other: no text in common, or ranges of numbers that do not overlap. A change that
// is still on its way takes less time than lies between two readings, so it is not reported.
package doctor

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/kvroute/kvroute/api"
	"github.com/kvroute/kvroute/router"
)

const (
	maxReadings  = 25                     // of each replica
	readingEvery = 150 * time.Millisecond // pause between two readings
	readingTime  = 5 * time.Second        // that one may take
)

// Report is the result of a comparison.
type Report struct {
	Replicas []*Replica
	Findings []Finding
}

// Source is the API of a replica. Read decodes what the API answers at a path.
type Source struct {
	URL  string
	Read func(ctx context.Context, path string, into any) error
}

// Replica is a replica and its readings.
type Replica struct {
	Source

	Name string // for people: its own name, or its URL
	Err  error  // of the reading that failed; there are no more after it

	readings []Reading
}

// Examine reads replicas until two readings show no difference, at most maxReadings times.
func Examine(ctx context.Context, sources []Source) (*Report, error) {
	r := &Report{}
	for _, s := range sources {
		r.Replicas = append(r.Replicas, &Replica{Source: s})
	}
	for n := 1; ; n++ {
		var asked sync.WaitGroup
		for _, x := range r.Replicas {
			if x.Err == nil {
				asked.Go(func() { x.Err = x.take(ctx) })
			}
		}
		asked.Wait()
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if n >= 2 {
			r.nameAll()
			if r.Findings = diagnose(r.Replicas); n >= maxReadings || count(r.Findings, different) == 0 {
				return r, nil
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(readingEvery):
		}
	}
}

// Serious returns how many findings are not notes.
func (r *Report) Serious() int { return count(r.Findings, different, fault) }

// Summary returns the result as one line.
func (r *Report) Summary() string {
	bad, differ := r.Serious(), count(r.Findings, different)
	asked := 0
	var last *Reading
	for _, x := range r.Replicas {
		if x.Err == nil {
			asked++
			last = x.Last()
		}
	}
	switch {
	case last == nil:
		return "none of the replicas answers"
	case differ > 0:
		return fmt.Sprintf("different: %s, %s, among %s", Counted(differ, "difference"), Counted(bad-differ, "fault"), Counted(asked, "replica"))
	}
	workers, blocks, requests := last.Sums()
	verdict := "equal"
	switch {
	case len(r.Replicas) == 1 && bad == 0:
		verdict = "healthy"
	case len(r.Replicas) == 1:
		verdict = "unhealthy: " + Counted(bad, "fault")
	case bad > 0:
		verdict = "no difference, but " + Counted(bad, "fault")
	}
	return fmt.Sprintf("%s: %s, %s, %s, %s in flight", verdict, Counted(asked, "replica"), Counted(workers, "worker"), Counted(blocks, "cached block"), Counted(requests, "request"))
}

// Counted returns a number with its noun in the singular or plural.
func Counted(n int, what string) string {
	if n != 1 {
		what += "s"
	}
	return fmt.Sprint(n, " ", what)
}

// nameAll gives each replica a unique name.
func (r *Report) nameAll() {
	seen := map[string]int{}
	for _, x := range r.Replicas {
		x.Name = ""
		if len(x.readings) > 0 {
			x.Name = x.readings[0].Replica.Replica
		}
		x.Name = cmp.Or(x.Name, strings.TrimPrefix(x.URL, "http://"))
		seen[x.Name]++
	}
	for i, x := range r.Replicas {
		if seen[x.Name] > 1 {
			x.Name = fmt.Sprintf("%s#%d", x.Name, i+1)
		}
	}
}

// Reading is the data of a replica at one time.
type Reading struct {
	api.Replica
	workers    []api.Worker
	left       []api.LeftWorker
	models     []router.ModelState
	thresholds map[string]string // of models that have thresholds
}

// Last returns the last reading. There is one if Err is nil.
func (x *Replica) Last() *Reading { return &x.readings[len(x.readings)-1] }

// Sums returns the number of workers, and the cached blocks and the requests of all of them.
func (r *Reading) Sums() (workers, blocks, requests int) {
	for i := range r.workers {
		blocks += r.workers[i].CachedBlocks
		requests += r.workers[i].ActiveRequests
	}
	return len(r.workers), blocks, requests
}

// take adds a reading of a replica.
func (x *Replica) take(ctx context.Context) (err error) {
	ctx, cancel := context.WithTimeout(ctx, readingTime)
	defer cancel()
	var r Reading
	var answers struct {
		Workers    []api.Worker
		Left       []api.LeftWorker
		Models     []router.ModelState
		Thresholds []map[string]any
	}
	err = x.Read(ctx, "/v1/replica", &r.Replica)
	for _, path := range []string{"/v1/workers", "/v1/models", "/busy_threshold"} {
		if err == nil {
			err = x.Read(ctx, path, &answers)
		}
	}
	if err != nil {
		return err
	}
	r.workers, r.left, r.models, r.thresholds = answers.Workers, answers.Left, answers.Models, map[string]string{}
	for _, t := range answers.Thresholds {
		var set []string
		for _, name := range slices.Sorted(maps.Keys(t)) {
			if value := t[name]; value != nil && name != "model" {
				set = append(set, fmt.Sprint(name, " ", value))
			}
		}
		r.thresholds[fmt.Sprint(t["model"])] = strings.Join(set, ", ")
	}
	x.readings = append(x.readings, r)
	return nil
}
