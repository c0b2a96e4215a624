// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"sync"
	"time"
)

// Limits of what a server may send.
const (
	pageSize   = 500     // objects in a page of a list
	maxObjects = 1 << 16 // of a set
	maxBytes   = 8 << 20 // of an object; an API server accepts at most 3 MB
)

// Waits between two attempts, and how long a watch is requested for. A server ends watches itself.
const (
	firstWait = 100 * time.Millisecond
	mostWait  = time.Second     // to connect again
	listWait  = 5 * time.Second // to list again, which costs the server much
	watchTime = 5 * time.Minute
)

// Object is the metadata of an object. Types of objects embed it.
type Object struct {
	Metadata Metadata `json:"metadata"`
}

// Metadata has the fields that all objects have.
type Metadata struct {
	Name            string            `json:"name"`
	Namespace       string            `json:"namespace"`
	UID             string            `json:"uid"`
	ResourceVersion string            `json:"resourceVersion"`
	Labels          map[string]string `json:"labels"`
	Annotations     map[string]string `json:"annotations"`
	Owners          []Owner           `json:"ownerReferences"`
	// Created is when the object was made.
	Created time.Time `json:"creationTimestamp"`
	// Deleted is when the object will be removed at the latest: in the future while its pod ends. Nil = it stays.
	Deleted *time.Time `json:"deletionTimestamp"`
	// GraceSeconds is the time from the deletion to Deleted.
	GraceSeconds int `json:"deletionGracePeriodSeconds"`
}

// Owner is an object that another one belongs to.
type Owner struct {
	Name       string `json:"name"`
	UID        string `json:"uid"`
	Controller bool   `json:"controller"`
}

func (o *Object) metadata() *Metadata { return &o.Metadata }

// SetConfig configures a [Set].
type SetConfig[T any] struct {
	// Changed is called after objects have changed, and when the state of the watch has. Run calls it; it must return
	// soon. Default: none.
	Changed func()
	// Trim removes what its reader does not need from a new object, such as labels. Default: nothing.
	Trim func(*T)
	// Count receives each event for a metric: "list", "change", "bookmark", "expired" or "failure". Default: none.
	Count func(event string)
}

// Set holds the objects of a resource.
type Set[T any] struct {
	client   *Client
	resource Resource
	conf     SetConfig[T]
	metadata func(*T) *Metadata
	first    time.Duration // firstWait, or less in tests

	mu sync.Mutex
	// mu guards the fields below.
	objects map[string]*T // by namespace/name
	listed  bool
	failing error
	since   time.Time // of failing

	// The fields below belong to Run.
	version  string // from which the next watch continues; empty = list first
	whole    bool   // list without pages
	lastList time.Time
}

// State is the state of a watch.
type State struct {
	Resource Resource
	// Objects is the number of objects. Listed says that the set was equal to the server's objects at least once.
	Objects int
	Listed  bool
	// Err is why the set is not kept up to date now, and Since the time of the first failure; nil = it is.
	Err   error
	Since time.Time
}

// NewSet returns an empty set. T embeds [Object].
func NewSet[T any, P interface {
	*T
	metadata() *Metadata
}](c *Client, r Resource, conf SetConfig[T]) *Set[T] {
	if conf.Changed == nil {
		conf.Changed = func() {}
	}
	if conf.Trim == nil {
		conf.Trim = func(*T) {}
	}
	if conf.Count == nil {
		conf.Count = func(string) {}
	}
	return &Set[T]{
		client: c, resource: r, conf: conf, first: firstWait, objects: make(map[string]*T),
		metadata: func(o *T) *Metadata { return P(o).metadata() },
	}
}

// All returns the objects by namespace/name, and whether they were equal to the server's objects at least once. The
// map belongs to the caller. The objects must not be changed.
func (s *Set[T]) All() (objects map[string]*T, listed bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return maps.Clone(s.objects), s.listed
}

// State returns the state of the watch.
func (s *Set[T]) State() State {
	s.mu.Lock()
	defer s.mu.Unlock()
	return State{Resource: s.resource, Objects: len(s.objects), Listed: s.listed, Err: s.failing, Since: s.since}
}

// errEnded means that the server ended a watch in the normal way.
var errEnded = errors.New("the server ended the watch")

// Run keeps the set equal to the server's objects until ctx ends. It returns nil then.
func (s *Set[T]) Run(ctx context.Context) error {
	wait := s.first
	for ctx.Err() == nil {
		began := time.Now()
		err := s.listAndWatch(ctx)
		status, hasStatus := errors.AsType[*statusError](err)
		expired, most := hasStatus && status.gone(), mostWait
		if hasStatus {
			s.version, most = "", listWait // the server refuses to continue, or to watch at all
		}
		if expired {
			s.conf.Count("expired")
		} else if !errors.Is(err, errEnded) && ctx.Err() == nil {
			s.conf.Count("failure")
			s.fails(err)
		}
		// After a watch that worked, continue at once. So it is after a version that is too old: changes were missed.
		if time.Since(began) > time.Second || expired && time.Since(s.lastList) > time.Second {
			wait = s.first
			if expired || errors.Is(err, errEnded) {
				continue
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait/2 + rand.N(wait)):
		}
		wait = min(2*wait, most)
	}
	return nil
}

// listAndWatch lists the objects if necessary, and then watches them until that ends.
func (s *Set[T]) listAndWatch(ctx context.Context) error {
	if s.version == "" {
		began := time.Now()
		objects, version, err := s.list(ctx)
		if err != nil {
			return err
		}
		s.lastList = time.Now()
		s.replace(objects)
		s.version, s.whole = version, false
		s.conf.Count("list")
		s.client.log.Debug("objects of Kubernetes are listed",
			"resource", s.resource.String(), "objects", len(objects), "took", time.Since(began))
	}
	return s.watch(ctx)
}

// fails notes and logs a failure. The log gets each text once.
func (s *Set[T]) fails(err error) {
	s.mu.Lock()
	before, objects := s.failing, len(s.objects)
	if s.failing = err; before == nil {
		s.since = time.Now()
	}
	s.mu.Unlock()
	if before == nil || before.Error() != err.Error() {
		s.client.log.Warn("Kubernetes cannot be read; what is known stays",
			"resource", s.resource.String(), "objects", objects, "err", err)
	}
	s.conf.Changed()
}

// works notes that the set is kept up to date.
func (s *Set[T]) works() {
	s.mu.Lock()
	before, since := s.failing, s.since
	s.failing, s.since = nil, time.Time{}
	s.mu.Unlock()
	if before != nil {
		s.client.log.Info("Kubernetes can be read again",
			"resource", s.resource.String(), "after", time.Since(since).Round(time.Millisecond))
		s.conf.Changed()
	}
}

// list reads all pages.
func (s *Set[T]) list(ctx context.Context) (objects map[string]*T, version string, err error) {
	objects = make(map[string]*T)
	query := url.Values{}
	if !s.whole {
		query.Set("limit", strconv.Itoa(pageSize))
	}
	for {
		page, err := s.page(ctx, query, objects)
		if status, ok := errors.AsType[*statusError](err); ok && status.gone() {
			s.whole = true // changes are so many that the pages expire
		}
		if err != nil {
			return nil, "", err
		}
		if page.Continue == "" {
			return objects, page.ResourceVersion, nil
		}
		query.Set("continue", page.Continue)
	}
}

// listMetadata is the metadata of a list.
type listMetadata struct {
	ResourceVersion string `json:"resourceVersion"`
	Continue        string `json:"continue"`
}

// page reads a page of a list, one object at a time: a page of pods has several megabytes.
func (s *Set[T]) page(ctx context.Context, query url.Values, objects map[string]*T) (meta listMetadata, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTime)
	defer cancel()
	body, err := s.client.get(ctx, s.resource, "list", query)
	if err != nil {
		return meta, err
	}
	defer body.Close()
	in := newDecoder(body)
	items := func() error {
		o := new(T)
		if err := in.decode(o); err != nil {
			return err
		}
		if len(objects) >= maxObjects {
			return fmt.Errorf("more than %d objects: select fewer", maxObjects)
		}
		if s.accept(o) {
			objects[s.key(o)] = o
		}
		return nil
	}
	if err = in.list(&meta, items); err == nil && meta.ResourceVersion == "" {
		err = errors.New("the answer is no list of objects")
	}
	if err != nil {
		return meta, fmt.Errorf("list %s: %w", s.resource, err)
	}
	return meta, nil
}

func (s *Set[T]) key(o *T) string {
	m := s.metadata(o)
	return m.Namespace + "/" + m.Name
}

// accept trims an object. It refuses one without a name, which no API server sends.
func (s *Set[T]) accept(o *T) bool {
	s.conf.Trim(o)
	return s.metadata(o).Name != ""
}

// replace makes the set equal to a list. Unchanged objects keep their pointers.
func (s *Set[T]) replace(objects map[string]*T) {
	s.mu.Lock()
	for key, o := range objects {
		before := s.objects[key]
		if before == nil {
			continue
		}
		if a, b := s.metadata(before), s.metadata(o); a.UID == b.UID && a.ResourceVersion == b.ResourceVersion {
			objects[key] = before
		}
	}
	s.objects, s.listed = objects, true
	s.mu.Unlock()
	s.conf.Changed()
}

// watch applies changes until the server ends the watch, or the connection fails.
func (s *Set[T]) watch(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // ends the stream
	// Replicas that started together do not come back together.
	seconds := int((watchTime + rand.N(watchTime)).Seconds())
	body, err := s.client.get(ctx, s.resource, "watch", url.Values{
		"watch": {"1"}, "allowWatchBookmarks": {"true"}, "resourceVersion": {s.version},
		"timeoutSeconds": {strconv.Itoa(seconds)},
	})
	if err != nil {
		return err
	}
	defer body.Close()
	s.works()
	for in := newDecoder(body); ; {
		var e struct {
			Type   string          `json:"type"`
			Object json.RawMessage `json:"object"`
		}
		switch err := in.decode(&e); {
		case errors.Is(err, io.EOF):
			return errEnded
		case err != nil:
			return fmt.Errorf("watch %s: %w", s.resource, err)
		case e.Type == "ERROR":
			return s.client.newStatus(http.StatusInternalServerError, e.Object, s.resource, "watch")
		}
		if err := s.apply(e.Type, e.Object); err != nil {
			s.version = "" // what the event said is lost
			return fmt.Errorf("watch %s: %w", s.resource, err)
		}
	}
}

// apply applies an event of a watch.
func (s *Set[T]) apply(kind string, text []byte) error {
	o := new(T)
	if err := json.Unmarshal(text, o); err != nil {
		return err
	}
	version := s.metadata(o).ResourceVersion
	if version == "" {
		return errors.New("an event has an object without resourceVersion")
	}
	s.version = version
	if kind != "ADDED" && kind != "MODIFIED" && kind != "DELETED" {
		s.conf.Count("bookmark") // or an event of a later API, which has a version only
		return nil
	}
	if !s.accept(o) {
		return nil
	}
	key := s.key(o)
	s.mu.Lock()
	_, known := s.objects[key]
	full := !known && len(s.objects) >= maxObjects
	if kind == "DELETED" {
		delete(s.objects, key)
	} else if !full {
		s.objects[key] = o
	}
	s.mu.Unlock()
	s.conf.Count("change")
	if kind != "DELETED" && full {
		return fmt.Errorf("more than %d objects: select fewer", maxObjects)
	}
	s.conf.Changed()
	return nil
}

// decoder reads JSON values of at most maxBytes each.
type decoder struct {
	*json.Decoder
	in *bounded
}

// bounded fails after a number of bytes.
type bounded struct {
	io.Reader
	left int
}

func (b *bounded) Read(p []byte) (int, error) {
	if b.left <= 0 {
		return 0, fmt.Errorf("an object has more than %d bytes", maxBytes)
	}
	n, err := b.Reader.Read(p[:min(len(p), b.left)])
	b.left -= n
	return n, err
}

func newDecoder(r io.Reader) *decoder {
	in := &bounded{r, maxBytes}
	return &decoder{json.NewDecoder(in), in}
}

func (d *decoder) decode(to any) error {
	d.in.left = maxBytes
	return d.Decode(to)
}

// list reads a list. It calls item for each element of "items", which must read it.
func (d *decoder) list(meta *listMetadata, item func() error) error {
	if err := d.expect(json.Delim('{')); err != nil {
		return err
	}
	for d.More() {
		name, err := d.Token()
		if err != nil {
			return err
		}
		switch name {
		case "metadata":
			err = d.decode(meta)
		case "items":
			err = d.items(item)
		default:
			err = d.decode(new(json.RawMessage))
		}
		if err != nil {
			return unfinished(err)
		}
	}
	return d.expect(json.Delim('}'))
}

// items reads an array, or null.
func (d *decoder) items(item func() error) error {
	open, err := d.Token()
	if err != nil || open == nil {
		return err
	}
	if open != json.Delim('[') {
		return errors.New("items is not an array")
	}
	for d.More() {
		if err := item(); err != nil {
			return err
		}
	}
	return d.expect(json.Delim(']'))
}

func (d *decoder) expect(want json.Delim) error {
	switch got, err := d.Token(); {
	case err != nil:
		return unfinished(err)
	case got != want:
		return fmt.Errorf("the answer is not JSON of the expected form: %v, want %v", got, want)
	}
	return nil
}

// unfinished is the error of an answer that ends too early.
func unfinished(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}
