// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"fmt"
	"hash/maphash"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.opentelemetry.io/otel/metric"

	"github.com/kvroute/kvroute/internal/kube"
	"github.com/kvroute/kvroute/internal/meter"
)

// Times and limits of Dynamo's store.
const (
	filesEvery = 500 * time.Millisecond // between two readings
	// deadAfter is how long a file counts after its last change. A Dynamo process touches
	// its files every 3.3 s.
	deadAfter        = 10 * time.Second
	unreadAfter      = 2 * time.Second // until an unreadable record is reported: it may be half-written
	maxDynamoRecord  = 1 << 20         // bytes; a model card has about 2 KB
	maxDynamoRecords = 1 << 16         // ten for each of 6,000 workers
)

// DynamoConfig configures a [Dynamo]. Changed and one of Dir, Etcd and Kubernetes are required; the zero value of each
// other field selects its default.
type DynamoConfig struct {
	// Dir is the root of a file store: the DYN_FILE_KV of Dynamo's processes.
	Dir string
	// Etcd is the store with DYN_DISCOVERY_BACKEND=etcd.
	Etcd DynamoEtcd
	// Kubernetes reads the API, for DYN_DISCOVERY_BACKEND=kubernetes, in KubernetesNamespace.
	Kubernetes          *kube.Client
	KubernetesNamespace string
	Rules               DynamoRules
	// Networks are the networks that addresses may be in. Default all.
	Networks Networks
	// Changed receives the new view after records have changed. It must not call back.
	Changed func(DynamoView)
	// Now is the clock. Default [time.Now].
	Now func() time.Time
	// Log receives a line for each record and worker that is left out. Default none.
	Log *slog.Logger
	// Meter makes the instruments listed in docs/metrics.md. Default none.
	Meter metric.Meter
}

// DynamoEtcd is an etcd with the records of Dynamo's processes. The zero value means that there is no etcd.
type DynamoEtcd struct {
	// Endpoints are host:port or URLs, as in ETCD_ENDPOINTS of Dynamo's processes.
	Endpoints []string `yaml:"endpoints,omitempty"`
	// User and the first line of PasswordFile authenticate kvroute.
	User         string `yaml:"user,omitempty"`
	PasswordFile string `yaml:"password-file,omitempty"`
	// CA is a file with the authorities of etcd's certificate; it turns TLS on. Cert and Key are kvroute's own.
	CA   string `yaml:"ca,omitempty"`
	Cert string `yaml:"cert,omitempty"`
	Key  string `yaml:"key,omitempty"`

	dial func(clientv3.Config) (*clientv3.Client, error) // for tests; nil = clientv3.New
}

func (e *DynamoEtcd) on() bool { return len(e.Endpoints) > 0 }

// Check returns an error for settings that need others.
func (e *DynamoEtcd) Check() error {
	switch {
	case !e.on() && (e.User != "" || e.PasswordFile != "" || e.CA != "" || e.Cert != "" || e.Key != ""):
		return errors.New("etcd.endpoints is missing: the addresses of etcd")
	case (e.User == "") != (e.PasswordFile == ""):
		return errors.New("etcd.user and etcd.password-file need each other")
	case (e.Cert == "") != (e.Key == ""):
		return errors.New("etcd.cert and etcd.key need each other")
	case e.CA == "" && e.Cert != "":
		return errors.New("etcd.cert needs etcd.ca")
	}
	for i, at := range e.Endpoints {
		if at == "" || strings.ContainsAny(at, " ,") {
			return fmt.Errorf("etcd.endpoints[%d] is %q, want host:port or a URL", i, at)
		}
	}
	return nil
}

// Dynamo follows the store of Dynamo's processes. It never writes to the store. While the store cannot be read, all
// records stay. An unreadable record is reported, and its former content counts.
//
// Of etcd and of Kubernetes' API, the table has exactly the readable records of the last answer. Of a file store:
// after each reading, the table has exactly the readable records of living processes: the file's time has changed
// within 10 s by kvroute's clock. The file's own time counts only at its first reading. An unreadable file may be
// half-written: its former content counts, and it is read again. If the store cannot be listed, all records stay. The
// table has at most 65,536 records; further ones are left out and reported.
//
// A Dynamo belongs to one goroutine at a time.
type Dynamo struct {
	conf    DynamoConfig
	news    meter.Counter
	table   DynamoTable
	seed    maphash.Seed
	records map[string]*storedRecord
	reading int                 // number of the current reading
	limit   int                 // of records
	over    int                 // records above the limit at the last reading
	leftOut map[string]struct{} // errors of the last view, which were logged
	away    bool                // the store cannot be listed; this was logged
}

// storedRecord is the state of a record in the store.
type storedRecord struct {
	size    int64     // in bytes
	time    time.Time // of the last write
	changed time.Time // when kvroute saw another size or time
	reading int       // the last reading that found it

	known    bool      // the table has a content of it
	sum      uint64    // hash of that content
	unread   time.Time // since when it is unreadable; zero = it is readable
	reported bool      // that it is unreadable was logged
}

// report reports that the store cannot be listed, or can be again, and that it has more
// records than before above the limit.
func (d *Dynamo) report(before int, err error) {
	switch {
	case err != nil && !d.away:
		d.away = true
		d.news.Count("away")
		d.conf.Log.Warn("the store of Dynamo's discovery cannot be read; what is known stays", "err", err)
	case err == nil && d.away:
		d.away = false
		d.conf.Log.Info("the store of Dynamo's discovery can be read again")
	}
	if err != nil {
		d.over = before // the reading was not complete
	}
	if d.over > before {
		d.news.Add(d.over-before, "over")
		if before == 0 {
			d.conf.Log.Warn("the store of Dynamo's discovery has more records than are read; the others are left out", "limit", d.limit, "left_out", d.over)
		}
	}
}

// view passes on the view of the records.
func (d *Dynamo) view() {
	v := d.table.View(&d.conf.Rules, d.conf.Networks)
	d.news.Count("changed")
	leftOut := make(map[string]struct{}, len(v.LeftOut))
	for _, err := range v.LeftOut {
		if _, before := d.leftOut[err.Error()]; !before {
			d.news.Count("left_out")
			d.conf.Log.Warn("a record of Dynamo's discovery is left out", "err", err)
		}
		leftOut[err.Error()] = struct{}{}
	}
	d.leftOut = leftOut
	d.conf.Log.Info("Dynamo's discovery has changed", "workers", len(v.Workers), "publishers", len(v.Plane.Channels), "indexers", len(v.Plane.Indexers), "left_out", len(v.LeftOut))
	d.conf.Changed(v)
}

// replace makes the table equal to all records of a store, by key, and reports whether it has changed.
func (d *Dynamo) replace(all map[string][]byte) (changed bool) {
	before := d.over
	for key, r := range d.records {
		if _, is := all[key]; !is {
			changed = d.drop(key, r) || changed
		}
	}
	d.over = 0
	for _, key := range slices.Sorted(maps.Keys(all)) { // the same records are left out each time
		changed = d.put(key, all[key]) || changed
	}
	d.report(before, nil)
	return changed
}

// put stores a record that is not a file, and reports whether the table has changed.
func (d *Dynamo) put(key string, data []byte) (changed bool) {
	r := d.records[key]
	sum := maphash.Bytes(d.seed, data)
	switch {
	case r == nil && len(d.records) >= d.limit:
		d.over++
		return false
	case r == nil:
		r = &storedRecord{}
		d.records[key] = r
	case r.sum == sum:
		return false
	}
	r.sum = sum
	if err := d.table.Put(key, data); err != nil {
		d.news.Count("refused")
		d.conf.Log.Warn("a record of Dynamo's discovery cannot be read", "err", err)
		return false
	}
	r.known = true
	return true
}

// drop removes a record, and reports whether the table has changed.
func (d *Dynamo) drop(key string, r *storedRecord) (changed bool) {
	delete(d.records, key)
	if r.known {
		d.table.Delete(key)
	}
	return r.known
}

// NewDynamo returns a Dynamo that has read nothing yet.
func NewDynamo(conf DynamoConfig) (*Dynamo, error) {
	if conf.Now == nil {
		conf.Now = time.Now
	}
	conf.Log = meter.Log(conf.Log)
	if err := conf.Rules.Check(); err != nil {
		return nil, fmt.Errorf("fleet: Dynamo's %w", err)
	}
	m := meter.New(conf.Meter)
	news := m.Counter("kvroute.fleet.dynamo", "{event}", "What the records of Dynamo's discovery tell, by kind.", "kind")
	return &Dynamo{conf: conf, news: news, seed: maphash.MakeSeed(), records: make(map[string]*storedRecord), limit: maxDynamoRecords}, m.Err()
}
