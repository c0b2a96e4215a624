// SPDX-License-Identifier: Apache-2.0

// Package pods finds workers in Kubernetes: pods by labels or by an InferencePool, and the endpoints of a Service.
//
// A [Finder] follows the API server and passes on records of package fleet. Each port of a pod is a worker. The uid of
// the pod and the port are its identity: another pod at the same address is another worker, with an empty cache.
//
// # Which pods are workers
//
//   - A pod that was never ready is no worker.
//   - A pod that is ready is one. If it is no longer ready, the worker stays, and gets no requests.
//   - A pod that is being deleted takes no new requests. Its worker stays until the pod is gone, or its grace period is
//     over.
//   - A pod that the first source of the list selects is a worker of that source only.
//
// While the API server is away, all workers stay as they were.
//
// # Concurrency
//
// The methods of a [Finder] may be called by any number of goroutines. Run runs once.
package pods

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/kube"
)

// Config configures a [Finder]. Client, Sources and Changed are required.
type Config struct {
	Client  *kube.Client
	Sources []Source
	// Namespace is that of sources without one. Default: kvroute's own.
	Namespace string
	// Pod is the name of kvroute's own pod, which is no worker. Default: the variable POD_NAME, or else the host name.
	Pod string
	// Networks are the networks that workers may have addresses in. Default all.
	Networks fleet.Networks
	// Changed receives the records of all workers after a change. It must not call back.
	Changed func([]fleet.Record) error
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log receives a line when a pod becomes a worker, is ready or not ready, is deleted, or is left out. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// Source selects pods or endpoints. Exactly one of Selector, InferencePool and Service is set.
type Source struct {
	// Namespace of the pods. Empty takes that of the whole configuration, or else kvroute's own.
	Namespace string `yaml:"namespace,omitempty"`
	// Selector is a label selector, such as "app=llm" or "app=llm,tier in (a,b)".
	Selector string `yaml:"selector,omitempty"`
	// InferencePool is the name of an InferencePool of inference.networking.k8s.io/v1. Its selector and its target ports
	// count, and their changes.
	InferencePool string `yaml:"inference-pool,omitempty"`
	// Service is the name of a Service. The endpoints in its EndpointSlices are the workers. They have no labels.
	Service string `yaml:"service,omitempty"`
	// Ports at which the pods serve; each is a worker. Required with Selector. Empty takes the target ports of the pool,
	// or the only port of the Service.
	Ports []int `yaml:"ports,omitempty"`
	// Labels name the labels or annotations of pods that replace fields of Worker.
	Labels Labels `yaml:"labels,omitempty"`

	// Worker has the fields that all workers of the source have, without name and address.
	Worker fleet.Record `yaml:"-"`
}

// Labels are names of labels of a pod. If a pod has no label of a name, its annotation of that name counts. Empty
// selects the default, and "none" reads nothing.
type Labels struct {
	// Model is the name of the model. Default none.
	Model string `yaml:"model,omitempty"`
	// Role is the role of the worker, with the values of llm-d's router and of kvroute. Default llm-d.ai/role.
	Role string `yaml:"role,omitempty"`
	// Group is a word that divides the workers: VALUE becomes the taint group=VALUE. Default none.
	Group string `yaml:"group,omitempty"`
	// BlockSize is the number of tokens in a block. Default none.
	BlockSize string `yaml:"block-size,omitempty"`
	// Events is the port of the event socket of the first port's engine; the next port's has the next number. Default
	// none.
	Events string `yaml:"events,omitempty"`
	// ActivePorts lists which of the ports the pod serves. Default llm-d.ai/active-ports, and if a pod does not have
	// this one, inference.networking.k8s.io/active-ports.
	ActivePorts string `yaml:"active-ports,omitempty"`
}

// none is the name of a label that is not read.
const none = "none"

// The default labels are those of llm-d's router (read at its commit 683100dc).
const (
	roleLabel         = "llm-d.ai/role"
	activePorts       = "llm-d.ai/active-ports"
	formerActivePorts = "inference.networking.k8s.io/active-ports"
)

// withDefaults returns the labels to read; "" reads none.
func (l Labels) withDefaults() Labels {
	for _, f := range []struct {
		name      *string
		byDefault string
	}{
		{&l.Model, ""}, {&l.Role, roleLabel}, {&l.Group, ""}, {&l.BlockSize, ""}, {&l.Events, ""}, {&l.ActivePorts, activePorts},
	} {
		switch *f.name {
		case "":
			*f.name = f.byDefault
		case none:
			*f.name = ""
		}
	}
	return l
}

// names returns the labels that are read.
func (l *Labels) names() []string {
	names := []string{l.Model, l.Role, l.Group, l.BlockSize, l.Events, l.ActivePorts}
	if l.ActivePorts == activePorts {
		names = append(names, formerActivePorts)
	}
	return names
}

// objectName is the form of names of Kubernetes' objects.
var objectName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$`)

// Check returns an error for each wrong field of a source. It begins with the name of the field.
func (s *Source) Check(networks fleet.Networks) error {
	var errs []error
	refuse := func(wrong bool, format string, values ...any) {
		if wrong {
			errs = append(errs, fmt.Errorf(format, values...))
		}
	}
	kinds := 0
	for field, name := range map[string]string{"inference-pool": s.InferencePool, "service": s.Service, "namespace": s.Namespace} {
		if field != "namespace" && name != "" {
			kinds++
		}
		refuse(name != "" && !objectName.MatchString(name), "%s is %q, want the name of an object of Kubernetes", field, name)
	}
	if s.Selector != "" {
		kinds++
	}
	refuse(kinds != 1, "selector: want exactly one of selector, inference-pool and service")
	refuse(s.Selector != "" && len(s.Ports) == 0, "ports: want the ports at which the pods serve")
	for i, port := range s.Ports {
		refuse(port < 1 || port > 65535, "ports[%d] is %d, want 1 to 65535", i, port)
	}
	refuse(s.Service != "" && s.Labels != (Labels{}), "labels: endpoints of a Service have no labels of pods: use selector")
	labels := s.Labels.withDefaults()
	refuse(len(s.Worker.Models) == 0 && labels.Model == "", "worker.models: want the name of the model, or labels.model")
	w := &s.Worker
	for field, given := range map[string]bool{
		"name": w.Name != "", "worker_id": w.WorkerID != 0, "address": w.Address != "", "rank_addresses": len(w.RankAddresses) > 0,
		"draining": w.Draining, "started_ms": w.StartedMS != 0, "host": w.Host != "",
	} {
		refuse(given, "worker.%s: each pod has its own", field)
	}
	if len(errs) == 0 {
		example := s.example(networks)
		if _, err := example.Info(networks); err != nil {
			text := err.Error() // fleet: worker "x" (5): block_size is ...
			field, _, _ := strings.Cut(text, " is ")
			refuse(true, "worker.%s", text[strings.LastIndex(field, " ")+1:])
		}
	}
	return errors.Join(errs...)
}

// example returns the record of a pod that the source might find, for checks.
func (s *Source) example(networks fleet.Networks) fleet.Record {
	r := s.Worker
	r.Name, r.Address = "pod", "192.0.2.1:80"
	if a := networks.First(); a.IsValid() {
		r.Address = netip.AddrPortFrom(a, 80).String()
	}
	if len(r.Models) == 0 {
		r.Models = []string{"model"}
	}
	return r
}
