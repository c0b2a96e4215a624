// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/kvroute/kvroute/fleet"
)

// etcd is an etcd in memory: keys with one revision for each change, and watches. It belongs to one bubble.
type etcd struct {
	clientv3.KV
	clientv3.Watcher

	mu sync.Mutex
	// mu guards the fields below.
	now      map[string]string
	log      []*clientv3.Event
	oldest   int // revisions before it are compacted
	fails    error
	hangs    bool
	watches  map[chan clientv3.WatchResponse]context.Context
	sessions int
}

func newOf[T any](*T) *T { return new(T) }

func (e *etcd) change(key, value string, deleted bool) {
	e.mu.Lock()
	event := &clientv3.Event{Type: clientv3.EventTypePut}
	if deleted {
		event.Type = clientv3.EventTypeDelete
	}
	event.Kv = newOf(event.Kv)
	event.Kv.Key, event.Kv.Value, event.Kv.ModRevision = []byte(key), []byte(value), int64(len(e.log)+1)
	e.log = append(e.log, event)
	if deleted {
		delete(e.now, key)
	} else {
		e.now[key] = value
	}
	for w, ctx := range e.watches {
		if ctx.Err() != nil { // its session has ended
			delete(e.watches, w)
			continue
		}
		w <- clientv3.WatchResponse{Events: []*clientv3.Event{event}}
	}
	e.mu.Unlock()
	synctest.Wait()
}

func (e *etcd) put(key, value string) { e.change(key, value, false) }

func (e *etcd) remove(key string) { e.change(key, "", true) }

// end ends all watches: with a compaction's answer, or without an answer.
func (e *etcd) end(answers ...clientv3.WatchResponse) {
	for w := range e.watches {
		for _, a := range answers {
			w <- a
		}
		close(w)
		delete(e.watches, w)
	}
}

func (e *etcd) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	e.mu.Lock()
	if e.hangs {
		e.mu.Unlock()
		<-ctx.Done()
		return nil, ctx.Err()
	}
	defer e.mu.Unlock()
	if e.fails != nil {
		return nil, e.fails
	}
	op := clientv3.OpGet(key, opts...)
	answer := &clientv3.GetResponse{}
	answer.Header = newOf(answer.Header)
	answer.Header.Revision = int64(len(e.log))
	for _, k := range slices.Sorted(maps.Keys(e.now)) {
		if k < key || k >= string(op.RangeBytes()) && len(op.RangeBytes()) > 0 || op.IsCountOnly() {
			continue
		}
		if limit := op.Limit(); limit > 0 && int64(len(answer.Kvs)) == limit {
			answer.More = true
			break
		}
		one := newElement(answer.Kvs)
		one.Key, one.Value = []byte(k), []byte(e.now[k])
		answer.Kvs = append(answer.Kvs, one)
	}
	return answer, nil
}

func newElement[T any]([]*T) *T { return new(T) }

func (e *etcd) Watch(ctx context.Context, key string, opts ...clientv3.OpOption) clientv3.WatchChan {
	e.mu.Lock()
	defer e.mu.Unlock()
	from := int(clientv3.OpGet(key, opts...).Rev())
	w := make(chan clientv3.WatchResponse, 1000)
	if from < e.oldest {
		w <- clientv3.WatchResponse{CompactRevision: int64(e.oldest), Canceled: true}
		close(w)
		return w
	}
	if len(e.log) >= from {
		w <- clientv3.WatchResponse{Events: e.log[from-1:]}
	}
	e.watches[w] = ctx //nolint:fatcontext // a map of contexts, none is made of another
	return w
}

func (e *etcd) Close() error { return nil }

// etcdStore is a Dynamo that follows an etcd, in a bubble.
type etcdStore struct {
	*etcd
	view fleet.DynamoView
	news int
}

func inEtcd(t *testing.T, play func(*etcdStore)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := &etcdStore{etcd: &etcd{now: map[string]string{}, watches: map[chan clientv3.WatchResponse]context.Context{}}}
		at := fleet.DynamoEtcd{Endpoints: []string{"etcd:2379"}}
		at.Dial(func(clientv3.Config) (*clientv3.Client, error) {
			s.sessions++
			c := clientv3.NewCtxClient(context.Background())
			c.KV, c.Watcher = s.etcd, s.etcd
			return c, nil
		})
		d, err := fleet.NewDynamo(fleet.DynamoConfig{
			Etcd: at, Rules: fleet.DynamoRules{Frontend: frontend},
			Changed: func(v fleet.DynamoView) { s.view, s.news = v, s.news+1 },
		})
		if err != nil {
			t.Fatal(err)
		}
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- d.Run(ctx) }()
		play(s)
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

func (s *etcdStore) pass(d time.Duration) {
	time.Sleep(d)
	synctest.Wait()
}

// Records in etcd make the same workers as files do, whether they were there before or come later, and leave with them.
func TestDynamosRecordsInEtcd(t *testing.T) {
	for _, before := range []bool{true, false} {
		inEtcd(t, func(s *etcdStore) {
			if !before {
				s.pass(0)
			}
			for key, text := range dynamoRecords() {
				s.put(key, text)
			}
			s.put("v1/other/x/1", "not JSON")
			s.put("another/prefix", "x")
			s.pass(time.Second)
			if diff := cmp.Diff(dynamoView(), s.view); diff != "" {
				t.Errorf("before=%v: %s", before, diff)
			}
			if s.news > 2 {
				t.Errorf("before=%v: a worker that starts causes %d views", before, s.news)
			}
			s.put(modelKey, "half")
			s.pass(time.Second)
			if diff := cmp.Diff(dynamoView(), s.view); diff != "" {
				t.Errorf("an unreadable record replaces the former one: %s", diff)
			}
			for key := range dynamoRecords() {
				s.remove(key)
			}
			s.pass(time.Second)
			if len(s.view.Workers) != 0 {
				t.Errorf("%d workers after their records are gone", len(s.view.Workers))
			}
		})
	}
}

// While etcd is away, hangs, or has dropped changes, the workers stay; afterwards kvroute knows all that has changed.
func TestFaultsOfEtcd(t *testing.T) {
	faults := map[string]struct{ begin, end func(*etcdStore) }{
		"it refuses":                           {func(s *etcdStore) { s.fails = errors.New("refused"); s.end() }, func(s *etcdStore) { s.fails = nil }},
		"it hangs, and the watch says nothing": {func(s *etcdStore) { s.hangs = true; clear(s.watches) }, func(s *etcdStore) { s.hangs = false }},
		"the changes are compacted": {func(s *etcdStore) {
			s.end(clientv3.WatchResponse{CompactRevision: 9, Canceled: true})
			s.oldest = len(s.log) + 3
		}, func(s *etcdStore) { s.oldest = 0 }},
	}
	for name, f := range faults {
		inEtcd(t, func(s *etcdStore) {
			for key, text := range dynamoRecords() {
				s.put(key, text)
			}
			s.pass(time.Second)
			s.mu.Lock()
			f.begin(s)
			s.mu.Unlock()
			s.pass(time.Minute)
			if len(s.view.Workers) != 1 || len(s.view.Plane.Channels) != 2 {
				t.Errorf("%s: %d workers during the fault, want 1", name, len(s.view.Workers))
			}
			s.remove(modelKey)
			s.put(strings.ReplaceAll(modelKey, "1a", "2b"), strings.ReplaceAll(dynamoRecords()[modelKey], `"instance_id":26`, `"instance_id":43`))
			s.pass(time.Minute)
			s.mu.Lock()
			f.end(s)
			s.mu.Unlock()
			s.pass(20 * time.Second)
			if len(s.view.Workers) != 1 || s.view.Workers[0].WorkerID != 43 {
				t.Errorf("%s: afterwards the workers are %+v, want 43", name, s.view.Workers)
			}
			if s.sessions > 200 {
				t.Errorf("%s: %d sessions in two minutes", name, s.sessions)
			}
		})
	}
}

// All pages of a large etcd are read.
func TestManyRecordsInEtcd(t *testing.T) {
	inEtcd(t, func(s *etcdStore) {
		s.pass(time.Second) // a watch is open
		s.mu.Lock()
		for id := range 2500 {
			s.now[fmt.Sprintf("v1/mdc/dynamo/backend/generate/%x", id+1)] = fmt.Sprintf(`{"type":"Model","namespace":"dynamo","component":"backend",`+
				`"endpoint":"generate","instance_id":%d,"card_json":{"display_name":"m","kv_cache_block_size":16,"worker_type":"aggregated"}}`, id+1)
		}
		s.end() // so all records are read again
		s.mu.Unlock()
		s.pass(10 * time.Second)
		if len(s.view.Workers) != 2500 {
			t.Errorf("%d workers, want 2500", len(s.view.Workers))
		}
	})
}

// Settings of etcd that need others are named.
func TestSettingsOfEtcd(t *testing.T) {
	for want, e := range map[string]fleet.DynamoEtcd{
		"etcd.endpoints is missing":    {User: "x"},
		"etcd.endpoints[1] is \"a b\"": {Endpoints: []string{"a:1", "a b"}},
		"etcd.user and etcd.password-": {Endpoints: []string{"a:1"}, User: "x"},
		"etcd.cert and etcd.key need":  {Endpoints: []string{"a:1"}, CA: "ca", Cert: "c"},
		"etcd.cert needs etcd.ca":      {Endpoints: []string{"a:1"}, Cert: "c", Key: "k"},
		"<nil>":                        {Endpoints: []string{"https://a:1"}, CA: "ca", Cert: "c", Key: "k", User: "u", PasswordFile: "p"},
	} {
		if got := fmt.Sprint(e.Check()); !strings.HasPrefix(got, want) {
			t.Errorf("%+v: %s, want %s", e, got, want)
		}
	}
}
