// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/kube"
)

// pod has the fields of a Pod that decide about its workers.
type pod struct {
	kube.Object
	Status struct {
		Phase      string `json:"phase"`
		PodIP      string `json:"podIP"`
		Conditions []struct {
			Type    string `json:"type"`
			Status  string `json:"status"`
			Reason  string `json:"reason"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"status"`
}

// pool is an InferencePool of inference.networking.k8s.io/v1.
type pool struct {
	kube.Object
	Spec struct {
		Selector struct {
			MatchLabels map[string]string `json:"matchLabels"`
		} `json:"selector"`
		TargetPorts []struct {
			Number int `json:"number"`
		} `json:"targetPorts"`
	} `json:"spec"`
}

// slice is an EndpointSlice of discovery.k8s.io/v1.
type slice struct {
	kube.Object
	AddressType string `json:"addressType"`
	Endpoints   []struct {
		Addresses  []string `json:"addresses"`
		Conditions struct {
			Ready       *bool `json:"ready"`
			Serving     *bool `json:"serving"`
			Terminating *bool `json:"terminating"`
		} `json:"conditions"`
		Target *struct {
			Kind      string `json:"kind"`
			Namespace string `json:"namespace"`
			Name      string `json:"name"`
			UID       string `json:"uid"`
		} `json:"targetRef"`
	} `json:"endpoints"`
	Ports []struct {
		Port *int `json:"port"`
	} `json:"ports"`
}

// place is one serving place that a source found: a pod, or an endpoint of a Service.
type place struct {
	namespace, name string
	uid             string // of the pod; for an endpoint without a pod its address
	address         string // IP
	labels          func(string) string
	ports           []int // at which it serves, as far as the object says; nil = as the source says
	ready           bool
	notReady        string    // why it is not ready, in words
	deleted         bool      // it is being deleted
	deadline        time.Time // of the deletion; zero = unknown
	grace           time.Duration
	created         time.Time
	owner           string // uid of its controller
	isPod           bool
}

// keep returns a function that removes all labels and annotations of a pod but the named ones.
func keep(names []string) func(*pod) {
	drop := func(name, _ string) bool { return !slices.Contains(names, name) }
	return func(p *pod) {
		maps.DeleteFunc(p.Metadata.Labels, drop)
		maps.DeleteFunc(p.Metadata.Annotations, drop)
	}
}

// place returns where the pod serves; ok is false for a pod that has ended or has no address yet.
func (p *pod) place() (at place, ok bool) {
	m := &p.Metadata
	at = place{
		namespace: m.Namespace, name: m.Name, uid: m.UID, address: p.Status.PodIP, created: m.Created, isPod: true,
		labels: func(name string) string { return cmp.Or(m.Labels[name], m.Annotations[name]) },
	}
	for _, o := range m.Owners {
		if o.Controller {
			at.owner = o.UID
		}
	}
	if at.notReady = "its pod has no condition Ready"; m.Deleted != nil {
		at.deleted, at.deadline, at.grace = true, *m.Deleted, time.Duration(m.GraceSeconds)*time.Second
	}
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			at.ready = c.Status == "True"
			at.notReady = "its pod is not ready: " + clip(cmp.Or(c.Message, c.Reason, "no reason is given"))
		}
	}
	return at, at.address != "" && p.Status.Phase != "Succeeded" && p.Status.Phase != "Failed"
}

// places returns the endpoints of a slice.
func (s *slice) places() (list []place) {
	var ports []int
	for _, p := range s.Ports {
		if p.Port != nil {
			ports = append(ports, *p.Port)
		}
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		if len(e.Addresses) == 0 || s.AddressType == "FQDN" {
			continue
		}
		at := place{
			namespace: s.Metadata.Namespace, address: e.Addresses[0], uid: e.Addresses[0], ports: ports,
			labels: func(string) string { return "" }, notReady: "its endpoint is not ready",
			created: s.Metadata.Created, deleted: e.Conditions.Terminating != nil && *e.Conditions.Terminating,
		}
		// Without conditions an endpoint is ready: a slice that was made by hand may have none. While a pod is being
		// deleted, only "serving" says whether it was ready.
		is := e.Conditions.Ready
		if at.deleted {
			is = e.Conditions.Serving
		}
		at.ready = is == nil || *is
		if t := e.Target; t != nil && t.Kind == "Pod" && t.UID != "" {
			at.namespace, at.name, at.uid, at.isPod = cmp.Or(t.Namespace, at.namespace), t.Name, t.UID, true
		}
		list = append(list, at)
	}
	return list
}

// selector returns the label selector of a pool. It is empty for a pool that selects no pod.
func (p *pool) selector() string {
	var terms []string
	for _, name := range slices.Sorted(maps.Keys(p.Spec.Selector.MatchLabels)) {
		terms = append(terms, name+"="+p.Spec.Selector.MatchLabels[name])
	}
	return strings.Join(terms, ",")
}

func (p *pool) ports() (list []int) {
	for _, t := range p.Spec.TargetPorts {
		list = append(list, t.Number)
	}
	return list
}

// clip shortens a text for people.
func clip(s string) string { return s[:min(len(s), 256)] }
