// SPDX-License-Identifier: Apache-2.0

package pods

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

// String names the place for people.
func (at *place) String() string {
	switch {
	case at.isPod:
		return "pod " + at.namespace + "/" + at.name
	default:
		return "endpoint " + at.address
	}
}

// roles are the values of the role label: those of llm-d's router (at its commit 683100dc), and kvroute's own. kvroute
// sends encoders no requests.
//
//nolint:gochecknoglobals // a table
var roles = map[string]router.Role{
	"": "", "aggregated": router.Aggregated,
	"prefill": router.Prefill, "encode-prefill": router.Prefill,
	"decode":         router.Decode,
	"prefill-decode": router.Both, "encode-prefill-decode": router.Both, "both": router.Both,
}

// maker makes the records of a source's workers.
type maker struct {
	source   *Source
	labels   Labels // with defaults
	ports    []int  // of the source, or of its pool
	networks fleet.Networks
}

// records returns a record for each port of a place, as for a worker that is ready. problems says what is wrong with
// the place; it may have records all the same.
func (m *maker) records(at *place) (list []fleet.Record, problems []string) {
	wrong := func(format string, values ...any) { problems = append(problems, fmt.Sprintf(format, values...)) }
	address, err := netip.ParseAddr(at.address)
	if err != nil {
		wrong("its address %q is no IP address", clip(at.address))
		return nil, problems
	}
	r := m.source.Worker
	r.Models, r.Taints = slices.Clone(r.Models), slices.Clone(r.Taints)
	if model := m.label(at, m.labels.Model); model != "" {
		r.Models = []string{model}
	}
	role, known := roles[m.label(at, m.labels.Role)]
	if !known {
		wrong("its label %s is %q, want prefill, decode, prefill-decode or another role of a worker", m.labels.Role, m.label(at, m.labels.Role))
		return nil, problems
	}
	r.Role = cmp.Or(role, r.Role)
	if group := m.label(at, m.labels.Group); group != "" {
		r.Taints = append(r.Taints, "group="+group)
	}
	if text := m.label(at, m.labels.BlockSize); text != "" {
		if size, err := strconv.Atoi(text); err == nil && size > 0 && size <= 1<<20 {
			r.BlockSize = size
		} else {
			wrong("its label %s is %q, want a number of tokens: %d counts", m.labels.BlockSize, clip(text), r.BlockSize)
		}
	}
	if text := m.label(at, m.labels.Events); text != "" {
		port, err := strconv.ParseUint(strings.TrimPrefix(text, "tcp://*:"), 10, 16)
		if err == nil && port > 0 {
			r.Events.Transport, r.Events.Endpoint = "zmq", fmt.Sprintf("tcp://*:%d", port)
		} else {
			wrong("its label %s is %q, want a port: it is ignored", m.labels.Events, clip(text))
		}
	}
	active := m.active(at, wrong)
	ports := m.ports
	if len(ports) == 0 {
		ports = at.ports
	}
	if len(ports) == 0 || len(m.ports) == 0 && len(ports) > 1 {
		wrong("it has %d ports, want one, or the setting ports", len(ports))
		return nil, problems
	}
	for i, port := range ports {
		if active != nil && !slices.Contains(active, port) {
			continue
		}
		one, err := m.record(r, at, netip.AddrPortFrom(address.Unmap(), uint16(port)), i, len(ports))
		if err != nil {
			wrong("%s", strings.TrimPrefix(err.Error(), "fleet: "))
			continue
		}
		list = append(list, one)
	}
	return list, problems
}

// record completes the record of a place for its port of a number.
func (m *maker) record(r fleet.Record, at *place, address netip.AddrPort, number, of int) (fleet.Record, error) {
	r.Address, r.Name = address.String(), at.namespace+"/"+cmp.Or(at.name, address.Addr().String())
	if of > 1 || !at.isPod {
		r.Name += ":" + strconv.Itoa(int(address.Port()))
	}
	r.WorkerID = wire.WorkerID(at.uid + ":" + strconv.Itoa(int(address.Port())))
	if at.isPod {
		r.Pod = &router.Pod{Namespace: at.namespace, Name: at.name, UID: at.uid}
	} else {
		r.Pod = &router.Pod{Namespace: at.namespace}
	}
	r.Events.Endpoint, r.Events.Replay = later(r.Events.Endpoint, number), later(r.Events.Replay, number)
	if _, err := r.Info(m.networks); err != nil {
		return r, err
	}
	if err := m.networks.CheckRegistered(address); err != nil {
		return r, fmt.Errorf("its address is %v, want %w", address, err)
	}
	return r, nil
}

// later adds a number to the port of a TCP socket: each server of a pod has its own.
func later(socket string, number int) string {
	at := strings.LastIndexByte(socket, ':')
	port, err := strconv.Atoi(socket[at+1:])
	if number == 0 || err != nil || !strings.HasPrefix(socket, "tcp://") {
		return socket
	}
	return socket[:at+1] + strconv.Itoa(port+number)
}

// label returns the value of a label; "" if it is not read.
func (m *maker) label(at *place, name string) string {
	if name == "" {
		return ""
	}
	return strings.TrimSpace(at.labels(name))
}

// active returns the ports that a pod declares as active; nil if it declares none. As in llm-d's router, ports that the
// source does not have are ignored.
func (m *maker) active(at *place, wrong func(string, ...any)) []int {
	name := m.labels.ActivePorts
	text := m.label(at, name)
	if text == "" && name == activePorts {
		name = formerActivePorts
		text = m.label(at, name)
	}
	if text == "" {
		return nil
	}
	ports := []int{}
	for item := range strings.SplitSeq(text, ",") {
		port, err := strconv.Atoi(strings.TrimSpace(item))
		if err != nil || len(m.ports) > 0 && !slices.Contains(m.ports, port) {
			wrong("its annotation %s has %q, which is none of the ports %v: it is ignored", name, clip(strings.TrimSpace(item)), m.ports)
			continue
		}
		ports = append(ports, port)
	}
	return ports
}
