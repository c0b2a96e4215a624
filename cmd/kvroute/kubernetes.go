// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/goccy/go-yaml"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/internal/kube"
	"github.com/kvroute/kvroute/internal/reach"
)

// kubernetesAPI is the address of Kubernetes' API, and how kvroute proves who it is. The zero value takes both from
// kvroute's own pod.
type kubernetesAPI struct {
	// Server is the URL of the API server; empty takes the address that Kubernetes gives each pod.
	Server string `yaml:"server,omitempty"`
	// CAFile is a PEM file with the authorities of the server's certificate; empty takes that of the pod, and with
	// server the authorities of the system.
	CAFile string `yaml:"ca-file,omitempty"`
	// TokenFile is a file with a bearer token; empty takes that of the pod, and with server no token.
	TokenFile string `yaml:"token-file,omitempty"`
	// Namespace of the objects, unless a source names another one; empty takes that of kvroute's pod.
	Namespace string `yaml:"namespace,omitempty"`
}

// check refuses an address that is not that of a server.
func (a *kubernetesAPI) check() error {
	if a.Server == "" {
		return nil
	}
	return kube.CheckServer(a.Server)
}

// client makes the client of the API.
func (a *kubernetesAPI) client(log *slog.Logger) (*kube.Client, error) {
	return kube.New(kube.Config{Server: a.Server, CAFile: a.CAFile, TokenFile: a.TokenFile, Log: log})
}

// kubernetesConfig is the file's "kubernetes": how workers are found by the API of Kubernetes. The zero value finds
// none.
type kubernetesConfig struct {
	API kubernetesAPI `yaml:",inline"`

	Sources []kubernetesSource `yaml:"sources,omitempty"`
}

// kubernetesSource is an element of "sources".
type kubernetesSource struct {
	pods.Source `yaml:",inline"`

	// Worker has the fields of all workers of the source, as an element of workers has them.
	Worker workerFields `yaml:"worker,omitempty"`
}

// workerFields are fields of a worker in their JSON form.
type workerFields fleet.Record

// UnmarshalYAML reads the fields; unknown ones are refused.
func (w *workerFields) UnmarshalYAML(data []byte) error {
	text, err := yaml.YAMLToJSON(data)
	if err != nil {
		return err
	}
	return readElement("kubernetes.sources.worker", probesInFull(text), (*fleet.Record)(w))
}

func (c *kubernetesConfig) on() bool { return len(c.Sources) > 0 }

// sources returns the sources, each with its fields of workers.
func (c *kubernetesConfig) sources() []pods.Source {
	list := make([]pods.Source, len(c.Sources))
	for i := range c.Sources {
		list[i] = c.Sources[i].Source
		list[i].Worker = fleet.Record(c.Sources[i].Worker)
	}
	return list
}

// check refuses wrong settings.
func (c *kubernetesConfig) check(workerNetworks string) error {
	networks, err := reach.Parse(workerNetworks)
	if err != nil {
		return nil //nolint:nilerr // checkWorkers refuses the networks
	}
	var errs []error
	if err := c.API.check(); err != nil {
		errs = append(errs, fmt.Errorf("kubernetes.%w", err))
	}
	if !c.on() && c.API != (kubernetesAPI{}) {
		errs = append(errs, errors.New("kubernetes.sources: want at least one source of workers"))
	}
	for i, s := range c.sources() {
		if err := s.Check(networks); err != nil {
			for _, one := range unjoined(err) {
				errs = append(errs, fmt.Errorf("kubernetes.sources[%d].%w", i, one))
			}
		}
	}
	return errors.Join(errs...)
}

// unjoined returns the errors that were joined.
func unjoined(err error) []error {
	if many, ok := err.(interface{ Unwrap() []error }); ok {
		return many.Unwrap()
	}
	return []error{err}
}

// openKubernetes makes the finder of workers.
func (s *server) openKubernetes() (err error) {
	c := &s.conf.Kubernetes
	if !c.on() {
		return nil
	}
	client, err := c.API.client(s.log)
	if err != nil {
		return fmt.Errorf("kubernetes.%w", err)
	}
	s.pods, err = pods.New(pods.Config{
		Client: client, Sources: c.sources(), Namespace: c.API.Namespace, Networks: s.networks,
		Changed: func(records []fleet.Record) error {
			fleet.AddProbes(records)
			return s.static.replace(&s.static.pods, records)
		},
		Log: s.log, Meter: s.metrics.Meter("fleet"),
	})
	if err != nil {
		return fmt.Errorf("kubernetes.%w", err)
	}
	return nil
}

// podsKnown reports whether the workers in Kubernetes are known.
func (s *server) podsKnown() bool { return s.pods == nil || s.pods.Listed() }
