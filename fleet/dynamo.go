// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/zmtp"
	"github.com/kvroute/kvroute/router"
)

// DynamoRules select workers of Dynamo's records and give them addresses. The zero value
// selects no worker, because the records contain no address of an OpenAI API: Dynamo's
// frontends serve it, not the workers.
type DynamoRules struct {
	// Namespace selects the workers of one namespace. Empty selects all.
	Namespace string `yaml:"namespace,omitempty"`
	// Frontend is the ip:port of a Dynamo frontend in direct mode in front of all workers.
	// It sends each request to the worker that kvroute names in a header.
	Frontend string `yaml:"frontend,omitempty"`
	// AddressMap gives the ip:port where a worker serves HTTP, by its id (decimal or hex)
	// or by the host of its request plane. It has precedence over Frontend. Workers without
	// either are left out.
	AddressMap map[string]string `yaml:"address-map,omitempty"`
}

// Check returns an error for each address that is not an ip:port.
func (r *DynamoRules) Check() error {
	var errs []error
	if r.Frontend != "" {
		if _, err := address(r.Frontend, Networks{}); err != nil {
			errs = append(errs, fmt.Errorf("frontend is %q, want %w", clip(r.Frontend), err))
		}
	}
	for key, a := range sorted(r.AddressMap) {
		if _, err := address(a, Networks{}); err != nil {
			errs = append(errs, fmt.Errorf("address-map[%s] is %q, want %w", clip(key), clip(a), err))
		}
	}
	return errors.Join(errs...)
}

// DynamoView is the result of the records of one moment.
type DynamoView struct {
	Workers []Record // ordered by id
	Plane   dynamo.Plane
	// LeftOut has an error for each worker without an address, and for each socket of a
	// worker that kvroute may not connect to.
	LeftOut []error
}

// The buckets of Dynamo's store that kvroute reads.
const (
	bucketInstances = "v1/instances"
	bucketModels    = "v1/mdc"
	bucketChannels  = "v1/event_channels"
	bucketSources   = "v1/event_sources"
)

// DynamoTable holds records of Dynamo 1.6. It belongs to one goroutine at a time. The zero
// value is an empty table.
//
// Each worker has a model card; its other records may come before or after the card.
// [DynamoTable.View] depends only on the records that the table holds now, not on their
// order or on former records.
type DynamoTable struct {
	buckets map[string]map[string]*dynamoRecord // by bucket and key
}

// dynamoRecord has the fields of all kinds of records; each kind sets some of them.
type dynamoRecord struct {
	Namespace string          `json:"namespace"`
	Component string          `json:"component"`
	Endpoint  string          `json:"endpoint"`
	ID        uint64          `json:"instance_id"` // of a channel: the publisher
	Transport dynamoTransport `json:"transport"`

	// Of a model card. Suffix is set if the card is an adapter's.
	Suffix string     `json:"model_suffix"`
	Card   dynamoCard `json:"card_json"`

	// Of a channel, and of a source: the events of a rank.
	Topic     string `json:"topic"`
	Publisher uint64 `json:"publisher_id"`
	Metadata  struct {
		Worker struct {
			ID   uint64 `json:"worker_id"`
			Rank uint32 `json:"dp_rank"`
		} `json:"worker"`
		Indexer struct {
			Transport dynamoTransport `json:"transport"`
		} `json:"recovery_target"`
	} `json:"metadata"`
}

type dynamoTransport struct {
	TCP    string `json:"tcp"`  // of a request plane: host:port/path
	Kind   string `json:"kind"` // of a channel: Zmq or Nats
	Config struct {
		Endpoint string `json:"endpoint"`
		Prefix   string `json:"subject_prefix"`
	} `json:"config"`
}

type dynamoCard struct {
	Name       string `json:"display_name"`
	BlockSize  int    `json:"kv_cache_block_size"`
	WorkerType string `json:"worker_type"`
	Runtime    struct {
		TotalKVBlocks    int      `json:"total_kv_blocks"`
		MaxNumSeqs       int      `json:"max_num_seqs"`
		MaxBatchedTokens int      `json:"max_num_batched_tokens"`
		DPStart          uint32   `json:"data_parallel_start_rank"`
		DPSize           uint32   `json:"data_parallel_size"`
		LocalIndexer     bool     `json:"enable_local_indexer"`
		Publishes        *bool    `json:"kv_event_publishing_enabled"` // nil = true
		Taints           []string `json:"taints"`
	} `json:"runtime_config"`
}

// Put stores a record. The key is its path below the store's root; the part behind the
// bucket may be percent-encoded, as in file names. Records of other buckets are ignored.
// After an error the former record with this key stays.
func (t *DynamoTable) Put(key string, value []byte) error {
	bucket, name, err := splitDynamoKey(key)
	if err != nil {
		return err
	}
	var r dynamoRecord
	id := &r.ID
	switch bucket {
	case bucketInstances, bucketChannels:
	case bucketModels:
		if parts := strings.Split(name, "/"); len(parts) == 5 { // an adapter's card
			name = strings.Join(parts[:4], "/")
		}
	case bucketSources:
		id = &r.Publisher
	default:
		return nil
	}
	if err := json.Unmarshal(value, &r); err != nil {
		return fmt.Errorf("fleet: Dynamo's record %s: %w", clip(key), err)
	}
	if want := strconv.FormatUint(*id, 16); name[strings.LastIndexByte(name, '/')+1:] != want {
		return fmt.Errorf("fleet: Dynamo's record %s: its id is %s", clip(key), want)
	}
	if t.buckets == nil {
		t.buckets = make(map[string]map[string]*dynamoRecord)
	}
	if t.buckets[bucket] == nil {
		t.buckets[bucket] = make(map[string]*dynamoRecord)
	}
	t.buckets[bucket][key] = &r
	return nil
}

// splitDynamoKey splits a key into its bucket and the decoded name.
func splitDynamoKey(key string) (bucket, name string, err error) {
	parts := strings.SplitN(key, "/", 3)
	if len(parts) < 3 || len(key) > 4096 {
		return "", "", fmt.Errorf("fleet: Dynamo's key %q has no bucket and name", clip(key))
	}
	name, err = url.PathUnescape(parts[2])
	if err != nil {
		return "", "", fmt.Errorf("fleet: Dynamo's key %q: %w", clip(key), err)
	}
	return parts[0] + "/" + parts[1], name, nil
}

// Delete removes a record.
func (t *DynamoTable) Delete(key string) {
	for _, bucket := range t.buckets {
		delete(bucket, key)
	}
}

// View returns the workers of the records, and the sockets and subjects of their events.
// All addresses must lie in the networks. Event sockets must be addresses that a worker may
// register, since the operator did not write the records.
func (t *DynamoTable) View(rules *DynamoRules, networks Networks) DynamoView {
	v := DynamoView{Plane: dynamo.Plane{Indexers: make(map[events.RankName]dynamo.Indexer)}}
	workers := t.workers(&v, rules, networks)
	publishers, indexed := t.sources(&v, workers, networks)
	t.channels(&v, publishers, networks)
	for id, r := range sorted(workers) {
		r.Events.LocalIndexer = r.Events.LocalIndexer && indexed[id]
		v.Workers = append(v.Workers, *r)
	}
	return v
}

// workers returns the workers that have a model card and an address.
func (t *DynamoTable) workers(v *DynamoView, rules *DynamoRules, networks Networks) map[uint64]*Record {
	hosts, adapters := make(map[string]string), make(map[uint64][]string)
	for _, i := range t.buckets[bucketInstances] {
		hosts[i.endpointName()], _, _ = i.Transport.split() // empty if the request plane is not TCP
	}
	for _, m := range t.buckets[bucketModels] {
		if m.Suffix != "" && m.Card.Name != "" && !slices.Contains(adapters[m.ID], m.Card.Name) {
			adapters[m.ID] = append(adapters[m.ID], m.Card.Name)
		}
	}
	workers := make(map[uint64]*Record)
	for _, m := range sorted(t.buckets[bucketModels]) {
		if m.Suffix != "" || workers[m.ID] != nil || rules.Namespace != "" && m.Namespace != rules.Namespace {
			continue
		}
		r, err := m.worker(rules, hosts[m.endpointName()], adapters[m.ID])
		if err == nil {
			_, err = r.Info(networks)
		}
		if err != nil {
			v.LeftOut = append(v.LeftOut, err)
			continue
		}
		workers[m.ID] = &r
	}
	return workers
}

func (r *dynamoRecord) endpointName() string {
	return strings.Join([]string{r.Namespace, r.Component, r.Endpoint, strconv.FormatUint(r.ID, 16)}, "/")
}

// worker returns the worker of a model card. The host is that of its request plane.
func (r *dynamoRecord) worker(rules *DynamoRules, host string, adapters []string) (Record, error) {
	run := &r.Card.Runtime
	slices.Sort(adapters)
	w := Record{
		WorkerID: r.ID, Name: r.Namespace + "/" + r.Component + "/" + strconv.FormatUint(r.ID, 16),
		Models: []string{r.Card.Name}, LoRA: adapters, Role: router.Aggregated, BlockSize: r.Card.BlockSize,
		DPStart: run.DPStart, DPSize: run.DPSize, Taints: run.Taints, Engine: engine.Dynamo,
		TotalKVBlocks: run.TotalKVBlocks, MaxNumSeqs: run.MaxNumSeqs, MaxBatchedTokens: run.MaxBatchedTokens,
		Events: Events{Transport: transportDynamo, LocalIndexer: run.LocalIndexer},
	}
	switch r.Card.WorkerType {
	case "prefill":
		w.Role = router.Prefill
	case "decode":
		w.Role = router.Decode
	}
	if run.Publishes != nil && !*run.Publishes {
		w.Events = Events{Transport: "none"}
	}
	decimal, hex := strconv.FormatUint(r.ID, 10), strconv.FormatUint(r.ID, 16)
	w.Address = cmp.Or(rules.AddressMap[decimal], rules.AddressMap[hex], rules.AddressMap[host], rules.Frontend)
	if w.Address == "" {
		return w, fmt.Errorf("fleet: Dynamo's worker %s (%d) has no address: neither its id nor its host %q is in the address map, and there is no frontend", w.Name, r.ID, host)
	}
	return w, nil
}

// sources reads which publisher sends the events of which rank, and the address of the
// rank's local indexer. It sets PublisherID of the workers that have one publisher only.
func (t *DynamoTable) sources(v *DynamoView, workers map[uint64]*Record, networks Networks) (publishers map[uint64]events.RankName, indexed map[uint64]bool) {
	publishers, indexed = make(map[uint64]events.RankName), make(map[uint64]bool)
	several := make(map[uint64]bool) // workers with more than one publisher
	for key, s := range sorted(t.buckets[bucketSources]) {
		rank := events.RankName{WorkerID: s.Metadata.Worker.ID, DPRank: s.Metadata.Worker.Rank}
		w := workers[rank.WorkerID]
		if s.Topic != events.Topic || w == nil {
			continue
		}
		publishers[s.Publisher] = rank
		if w.Events.Transport == transportDynamo {
			if other := w.Events.PublisherID; other != 0 && other != s.Publisher {
				several[w.WorkerID] = true
			}
			if w.Events.PublisherID = s.Publisher; several[w.WorkerID] {
				w.Events.PublisherID = 0
			}
		}
		at := s.Metadata.Indexer.Transport
		if at.TCP == "" {
			continue
		}
		host, port, err := at.split()
		if err == nil {
			err = dialable(host, port, networks)
		}
		if err != nil {
			v.leaveOut(key, fmt.Errorf("transport %q: %w", clip(at.TCP), err))
			continue
		}
		v.Plane.Indexers[rank] = dynamo.Indexer{Transport: at.TCP, Publisher: s.Publisher}
		indexed[w.WorkerID] = true
	}
	return publishers, indexed
}

// channels reads the socket or subject of each publisher.
func (t *DynamoTable) channels(v *DynamoView, publishers map[uint64]events.RankName, networks Networks) {
	for key, c := range sorted(t.buckets[bucketChannels]) {
		rank, known := publishers[c.ID]
		if c.Topic != events.Topic || !known {
			continue
		}
		channel := dynamo.Channel{Publisher: c.ID, Worker: rank.WorkerID, DPRank: rank.DPRank}
		var err error
		switch conf := &c.Transport.Config; c.Transport.Kind {
		case "Zmq":
			channel.Endpoint = conf.Endpoint
			err = dialableSocket(conf.Endpoint, networks)
		case "Nats":
			channel.Subject = conf.Prefix + "." + c.Topic
			if conf.Prefix == "" || len(conf.Prefix) > maxNameLen || strings.ContainsAny(conf.Prefix, "*> \t\r\n") {
				err = fmt.Errorf("subject_prefix is %q, want one without wildcards", clip(conf.Prefix))
			}
		default:
			err = fmt.Errorf("transport %q, want Zmq or Nats", clip(c.Transport.Kind))
		}
		if err != nil {
			v.leaveOut(key, err)
			continue
		}
		v.Plane.Channels = append(v.Plane.Channels, channel)
	}
	slices.SortFunc(v.Plane.Channels, func(a, b dynamo.Channel) int { return cmp.Compare(a.Publisher, b.Publisher) })
}

func (v *DynamoView) leaveOut(key string, err error) {
	v.LeftOut = append(v.LeftOut, fmt.Errorf("fleet: Dynamo's record %s: %w", clip(key), err))
}

// split returns the host and port of a request plane.
func (t *dynamoTransport) split() (host, port string, err error) {
	hostport, _, _ := strings.Cut(t.TCP, "/")
	return net.SplitHostPort(hostport)
}

func dialableSocket(endpoint string, networks Networks) error {
	at, err := zmtp.ParseEndpoint(endpoint, 0, 0)
	if err == nil && at.Path != "" {
		err = errors.New("want tcp://host:port")
	}
	if err == nil {
		err = dialable(at.Host, strconv.Itoa(at.Port), networks)
	}
	if err != nil {
		return fmt.Errorf("endpoint %q: %w", clip(endpoint), err)
	}
	return nil
}

// dialable returns an error for an address that a worker may not register. It refuses
// host names, too: a record must not choose which names kvroute looks up.
func dialable(host, port string, networks Networks) error {
	a, err := netip.ParseAddrPort(net.JoinHostPort(host, port))
	if err != nil {
		return errors.New("want an ip and a port")
	}
	if err := networks.CheckRegistered(a); err != nil {
		return fmt.Errorf("want %w", err)
	}
	return nil
}

// sorted iterates over a map in the order of its keys.
func sorted[K cmp.Ordered, V any](m map[K]V) iter.Seq2[K, V] {
	return func(yield func(K, V) bool) {
		for _, k := range slices.Sorted(maps.Keys(m)) {
			if !yield(k, m[k]) {
				return
			}
		}
	}
}
