// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/envoy"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/router"
)

// openWatch makes the reader of Envoy's statistics.
func (s *server) openWatch() (err error) {
	compared := envoy.Settings{
		DecisionTimeout: s.conf.DecisionTimeout, LongestWait: s.conf.longestWait(),
		MaxBodyBytes: s.conf.MaxBodyBytes, SecondChoice: s.conf.SecondChoice,
	}
	if s.conf.EnvoyAdmin == "" {
		compared.LongestWait = 0 // compared with envoy-max-message-timeout
		if s.conf.ModeOverride || s.conf.EndpointPicker {
			compared.SecondChoice = "" // the configuration is a gateway's
		}
		if text := compared.DiffersFromBootstrap(); text != "" {
			s.log.Warn("settings need flags of kvroute config envoy", "differs", text)
		}
		return nil
	}
	s.watch, err = envoy.NewWatch(envoy.WatchConfig{
		URL: s.conf.EnvoyAdmin, ExtProc: s.addresses().Extproc, Counts: s.extproc.Counts,
		Peers:    func() int { return s.replicas() - 1 },
		Settings: compared,
		Client:   reach.Networks{}.Client(), // Envoy is no worker
		Now:      time.Now, Log: s.log, Meter: s.metrics.Meter("envoy"),
	})
	return err
}

func (s *server) watchEnvoy(ctx context.Context) error {
	return every(ctx, envoy.WatchEvery, func() { s.watch.Read(ctx) })
}

// replicas returns the number of router replicas, this one included.
func (s *server) replicas() int {
	if s.sync == nil {
		return 1
	}
	_, peers := s.sync.Views()
	return 1 + len(peers)
}

// statusEvery is the time between two checks of the status, so that a fleet that changes all the time
// does not fill the log.
const statusEvery = 5 * time.Second

// logStatus logs the status after a second, when most workers are known, and after each change.
func (s *server) logStatus(ctx context.Context) error {
	check := onChange(s.log, s.status)
	select {
	case <-ctx.Done():
		return nil
	case <-time.After(time.Second):
		check()
	}
	return every(ctx, statusEvery, check)
}

// observeAttention notes once a second what needs attention.
func (s *server) observeAttention(ctx context.Context) error {
	return every(ctx, time.Second, s.observe)
}

// onChange returns a function that logs the status if it has changed. The function belongs to one
// goroutine.
func onChange(log *slog.Logger, status func() []any) func() {
	var last []any
	return func() {
		if now := status(); !slices.Equal(now, last) {
			last = now
			log.Info("status", now...)
		}
	}
}

// status returns what this replica consists of, as names and values for the log.
func (s *server) status() []any {
	listeners := []string{"extproc " + s.addresses().Extproc, "http " + s.addresses().HTTP}
	if s.conf.NATSListen != "" && s.bus != nil {
		listeners = append(listeners, "nats "+s.bus.Addr().String()) // its URL has the password
	}
	var models []string
	for _, m := range s.router.Models() {
		models = append(models, fmt.Sprint(m.Model, " ", m.TokenMode))
	}
	ready, _ := s.readiness()
	maps.DeleteFunc(ready.Checks, func(_ string, ok bool) bool { return ok })
	state := strings.TrimSuffix(ready.Status+": "+strings.Join(slices.Sorted(maps.Keys(ready.Checks)), ", "), ": ")
	known := s.router.Workers()
	attributes := []any{
		"state", state, "listeners", strings.Join(listeners, ", "), "workers", s.countWorkers(known),
		"models", listed(models),
	}
	if s.router.WantsEvents() {
		heard, unheard := feeds(known)
		attributes = append(attributes, "events_heard", listed(heard), "events_not_heard", listed(unheard))
	}
	return append(attributes, "replicas", s.replicas())
}

// countWorkers returns the number of workers by source and health; those that are drained count as draining.
func (s *server) countWorkers(known []router.WorkerState) string {
	sources, dynamo, count := s.registry.Sources(), s.static.foundIDs(), map[string]int{}
	for i := range known {
		w := &known[i]
		source := sources[w.ID]
		switch delete(sources, w.ID); { // count one of its ranks
		case source == "":
			continue
		case w.Group != "":
			source = "group"
		case w.Pod != nil:
			source = "Kubernetes"
		case dynamo[w.ID]:
			source = "Dynamo"
		}
		state := w.Health
		if w.Draining {
			state = "draining"
		}
		count[source+" "+state]++
	}
	var parts []string
	for _, what := range slices.Sorted(maps.Keys(count)) {
		parts = append(parts, fmt.Sprint(count[what], " ", what))
	}
	return listed(parts)
}

// feeds returns the names of the workers whose events were heard, and of those whose events were not.
// It omits workers that publish none, and workers that are unhealthy. A silent publisher on NATS counts as heard.
func feeds(known []router.WorkerState) (heard, unheard []string) {
	for i := range known {
		w := &known[i]
		name := w.Worker.Label(w.Name)
		switch {
		case w.Unheard():
			unheard = append(unheard, name)
		case w.Health == router.Unhealthy.String(), w.Health == router.Expired.String(), w.Health == router.NotReady.String():
		case w.Group == "" && w.Transport != "none" && w.BlockSize > 0:
			heard = append(heard, name)
		}
	}
	return heard, unheard
}

// listed returns names as one text: the first 8, and the number of the others.
func listed(names []string) string {
	const most = 8
	switch {
	case len(names) == 0:
		return "none"
	case len(names) > most:
		return fmt.Sprintf("%s and %d more", strings.Join(names[:most], ", "), len(names)-most)
	}
	return strings.Join(names, ", ")
}
