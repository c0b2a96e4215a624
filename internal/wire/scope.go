// SPDX-License-Identifier: Apache-2.0

// Package wire names the subjects, streams and buckets of a scope on the bus. Two scopes share no
// names. All functions are pure.
package wire

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/zeebo/xxh3"
)

// Scope identifies workers of one kind on NATS. An empty field means its default: "kvroute",
// "workers", "generate". The tags are those of package settings.
type Scope struct {
	Namespace string `yaml:"namespace" default:"kvroute" help:"namespace of the workers' subjects"`
	Component string `yaml:"component" default:"workers" help:"component of the workers' subjects"`
	Endpoint  string `yaml:"endpoint" default:"generate" help:"endpoint of the workers' subjects"`
}

// WithDefaults returns the scope with no field empty.
func (s Scope) WithDefaults() Scope {
	return Scope{cmp.Or(s.Namespace, "kvroute"), cmp.Or(s.Component, "workers"), cmp.Or(s.Endpoint, "generate")}
}

// Topic returns the subject of a topic of the event plane, such as "kv-events".
func (s Scope) Topic(topic string) string {
	s = s.WithDefaults()
	return "namespace." + Segment(s.Namespace) + ".component." + Segment(s.Component) +
		".endpoint." + Segment(s.Endpoint) + "." + Segment(topic)
}

// Own returns a subject of kvroute's protocol, such as "heartbeat", or with further parts a
// subject of one worker. The part "*" is a wildcard for one part.
func (s Scope) Own(parts ...string) string {
	s = s.WithDefaults()
	var subject strings.Builder
	subject.WriteString("kvroute.v1." + Segment(s.Namespace) + "." + Segment(s.Component) + "." + Segment(s.Endpoint))
	for _, p := range parts {
		if p != "*" {
			p = Segment(p)
		}
		subject.WriteString("." + p)
	}
	return subject.String()
}

// Group returns a subject of a router group of the scope's namespace, such as "summary". It does
// not depend on the component: each group has its own, and the upper router another one. The group
// "*" is a wildcard for all groups.
func (s Scope) Group(group string, parts ...string) string {
	if group != "*" {
		group = Segment(group)
	}
	return "kvroute.v1." + Segment(s.WithDefaults().Namespace) + ".group." + group + "." + strings.Join(parts, ".")
}

// Bucket returns the name of the scope's bucket of a kind, such as "workers".
func (s Scope) Bucket(kind string) string {
	s = s.WithDefaults()
	return slugs(s.Namespace, s.Component, s.Endpoint) + "-" + kind
}

// Stream returns the name of the stream that keeps the events of the scope's
// component, whatever the endpoint: two streams may not take one subject.
func (s Scope) Stream() string {
	s = s.WithDefaults()
	return slugs(s.Namespace, s.Component)
}

// StreamSubjects returns the subjects of a topic that the stream stores, as one subject with a
// wildcard: those of all endpoints of the component.
func (s Scope) StreamSubjects(topic string) string {
	s = s.WithDefaults()
	return "namespace." + Segment(s.Namespace) + ".component." + Segment(s.Component) + ".endpoint.*." + Segment(topic)
}

// slugs makes a name for streams and buckets of a scope's names. Different names may have the same
// slug, so a digest of the names follows.
func slugs(names ...string) string {
	valid := strings.Map(func(r rune) rune {
		if 'a' <= r && r <= 'z' || '0' <= r && r <= '9' || r == '-' {
			return r
		}
		return '-'
	}, strings.ToLower(strings.Join(names, "-")))
	return fmt.Sprintf("kvr-%s-%08x", valid, uint32(xxh3.HashString(strings.Join(names, "\x00"))))
}

// Segment encodes a name as one part of a subject: each byte but letters, digits,
// "_" and "-" becomes "%" and two hex digits.
func Segment(s string) string {
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || c == '_' || c == '-' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// WorkerKey is a worker's id in keys and subjects: 16 hex digits.
func WorkerKey(id uint64) string { return fmt.Sprintf("%016x", id) }

// WorkerID returns the id of a worker with a name and no number. It fits into 53 bits, so that every
// JSON reader keeps it exactly.
func WorkerID(name string) uint64 { return xxh3.HashStringSeed(name, 0) & (1<<53 - 1) }
