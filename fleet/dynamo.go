// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/internal/zmtp"
	"github.com/kvroute/kvroute/router"
)

// DynamoRules say what is made of the records of Dynamo's processes. The zero value makes
// no workers: the records do not say where a worker serves the OpenAI API, because it does
// not; Dynamo's frontends do.
type DynamoRules struct {
	// Namespace is the one whose workers are wanted. Empty wants all.
	Namespace string `yaml:"namespace,omitempty"`
	// Frontend is the ip:port of a Dynamo frontend in direct mode, behind which all
	// workers are: it sends each request to the one that kvroute names in a header.
	Frontend string `yaml:"frontend,omitempty"`
	// AddressMap gives the ip:port where a worker serves HTTP, by its id (decimal, or hex
	// as in its records' names) or by the host of its request plane. It wins over
	// Frontend. Without either a worker is left out.
	AddressMap map[string]string `yaml:"address-map,omitempty"`
}

// Check refuses addresses that nothing can be sent to.
func (r *DynamoRules) Check() error {
	var errs []error
	if r.Frontend != "" {
		if _, err := address(r.Frontend, Networks{}); err != nil {
			errs = append(errs, fmt.Errorf("frontend is %q, want %w", clip(r.Frontend), err))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(r.AddressMap)) {
		if _, err := address(r.AddressMap[key], Networks{}); err != nil {
			errs = append(errs, fmt.Errorf("address-map[%s] is %q, want %w", clip(key), clip(r.AddressMap[key]), err))
		}
	}
	return errors.Join(errs...)
}

// maxDynamoRecords bounds what a store can make us keep: ten of each of 6,000 workers.
const maxDynamoRecords = 1 << 16

// buckets of Dynamo's store that are read.
const (
	bucketInstances = "v1/instances"
	bucketModels    = "v1/mdc"
	bucketChannels  = "v1/event_channels"
	bucketSources   = "v1/event_sources"
)

// DynamoTable has the records of Dynamo's processes, in the form of Dynamo 1.6. It belongs to one goroutine at a time. The zero value is empty and
// ready.
//
// A worker is one that a model card names; what else is there of it (its endpoint, the
// channels of its events, where its local indexer is asked) completes it in whatever order
// it comes. [DynamoTable.View] depends on the records that are there and on nothing else:
// neither on their order, nor on those that were there.
type DynamoTable struct {
	instances map[string]dynamoInstance
	models    map[string]dynamoModel
	channels  map[string]dynamoChannel
	sources   map[string]dynamoSource
}

// DynamoView is what the records of a moment make.
type DynamoView struct {
	Workers []Record // by id
	Plane   engines.Plane
	// LeftOut says which workers there are that nothing can be sent to, and why.
	LeftOut []error
}

type dynamoTransport struct {
	TCP string `json:"tcp"`
}

// dynamoInstance is an endpoint of a process.
type dynamoInstance struct {
	Namespace string          `json:"namespace"`
	Component string          `json:"component"`
	Endpoint  string          `json:"endpoint"`
	ID        uint64          `json:"instance_id"`
	Transport dynamoTransport `json:"transport"`
}

// dynamoModel is a model card of a worker, or of an adapter that it has.
type dynamoModel struct {
	Namespace string  `json:"namespace"`
	Component string  `json:"component"`
	Endpoint  string  `json:"endpoint"`
	ID        uint64  `json:"instance_id"`
	Suffix    *string `json:"model_suffix"`
	Card      struct {
		Name       string `json:"display_name"`
		BlockSize  int    `json:"kv_cache_block_size"`
		WorkerType string `json:"worker_type"`
		Runtime    struct {
			TotalKVBlocks    *int     `json:"total_kv_blocks"`
			MaxNumSeqs       *int     `json:"max_num_seqs"`
			MaxBatchedTokens *int     `json:"max_num_batched_tokens"`
			DPStart          uint32   `json:"data_parallel_start_rank"`
			DPSize           uint32   `json:"data_parallel_size"`
			LocalIndexer     bool     `json:"enable_local_indexer"`
			Publishes        *bool    `json:"kv_event_publishing_enabled"` // nil = true
			Taints           []string `json:"taints"`
		} `json:"runtime_config"`
	} `json:"card_json"`
}

// adapter reports whether the card is an adapter's.
func (m *dynamoModel) adapter() bool { return m.Suffix != nil && *m.Suffix != "" }

func (m *dynamoModel) key() string { return dynamoKey(m.Namespace, m.Component, m.Endpoint, m.ID) }

// dynamoChannel is where a publisher is heard.
type dynamoChannel struct {
	Topic     string `json:"topic"`
	ID        uint64 `json:"instance_id"`
	Transport struct {
		Kind   string `json:"kind"`
		Config struct {
			Endpoint string `json:"endpoint"`
			Prefix   string `json:"subject_prefix"`
		} `json:"config"`
	} `json:"transport"`
}

// dynamoSource ties a publisher to a worker's rank.
type dynamoSource struct {
	Topic     string `json:"topic"`
	Publisher uint64 `json:"publisher_id"`
	Metadata  struct {
		Worker struct {
			ID   uint64 `json:"worker_id"`
			Rank uint32 `json:"dp_rank"`
		} `json:"worker"`
		Target *dynamoInstance `json:"recovery_target"`
	} `json:"metadata"`
}

// Put takes a record: key is its path below the store's root, with "/" for the parts, or
// with the name as files have it, where all else but letters and digits is %XX. Records of
// other buckets are not kept. After an error the record that was there stays.
func (t *DynamoTable) Put(key string, value []byte) error {
	bucket, name, err := splitDynamoKey(key)
	if err != nil {
		return err
	}
	if n := len(t.instances) + len(t.models) + len(t.channels) + len(t.sources); n >= maxDynamoRecords && !t.Has(key) {
		return fmt.Errorf("fleet: Dynamo's record %s is one above the limit of %d", clip(key), maxDynamoRecords)
	}
	switch bucket {
	case bucketInstances:
		err = putDynamo(&t.instances, key, name, value, func(i *dynamoInstance) uint64 { return i.ID })
	case bucketModels:
		if at := strings.Split(name, "/"); len(at) == 5 { // of an adapter
			name = strings.Join(at[:4], "/")
		}
		err = putDynamo(&t.models, key, name, value, func(m *dynamoModel) uint64 { return m.ID })
	case bucketChannels:
		err = putDynamo(&t.channels, key, name, value, func(c *dynamoChannel) uint64 { return c.ID })
	case bucketSources:
		err = putDynamo(&t.sources, key, name, value, func(s *dynamoSource) uint64 { return s.Publisher })
	}
	if err != nil {
		return fmt.Errorf("fleet: Dynamo's record %s: %w", clip(key), err)
	}
	return nil
}

// putDynamo reads a record into one of the maps. Its name must end in its id.
func putDynamo[T any](to *map[string]T, key, name string, value []byte, id func(*T) uint64) error {
	var v T
	if err := json.Unmarshal(value, &v); err != nil {
		return err
	}
	if want := strconv.FormatUint(id(&v), 16); name[strings.LastIndexByte(name, '/')+1:] != want {
		return fmt.Errorf("its id is %s", want)
	}
	if *to == nil {
		*to = make(map[string]T)
	}
	(*to)[key] = v
	return nil
}

// splitDynamoKey parts a key into its bucket and a name whose parts are joined by "/".
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

// Has reports whether a record is kept.
func (t *DynamoTable) Has(key string) bool {
	_, instance := t.instances[key]
	_, model := t.models[key]
	_, channel := t.channels[key]
	_, source := t.sources[key]
	return instance || model || channel || source
}

// Delete takes the news that a record is gone.
func (t *DynamoTable) Delete(key string) {
	delete(t.instances, key)
	delete(t.models, key)
	delete(t.channels, key)
	delete(t.sources, key)
}

// View makes workers of the records. Networks are those that addresses must lie in, of
// workers and of what else is dialled. The records are not the operator's: what they name
// must be an address that a worker may register.
func (t *DynamoTable) View(rules *DynamoRules, networks Networks) DynamoView {
	v := DynamoView{Plane: engines.Plane{Indexers: make(map[engines.WorkerRank]engines.Indexer)}}
	named := make(map[uint64]uint64) // publishers by worker; 0 for several
	wanted := make(map[uint64]bool)
	for _, key := range slices.Sorted(maps.Keys(t.models)) {
		m := t.models[key]
		if m.adapter() || rules.Namespace != "" && m.Namespace != rules.Namespace {
			continue
		}
		wanted[m.ID] = true
	}
	t.viewPlane(&v, networks, wanted, named)
	hosts, adapters := t.hosts(), t.adapters()
	indexed := make(map[uint64]bool)
	for rank := range v.Plane.Indexers {
		indexed[rank.WorkerID] = true
	}
	done := make(map[uint64]bool)
	for _, key := range slices.Sorted(maps.Keys(t.models)) {
		m := t.models[key]
		if !wanted[m.ID] || m.adapter() || done[m.ID] {
			continue
		}
		done[m.ID] = true
		r, err := dynamoRecord(&m, rules, named[m.ID], hosts[m.key()], adapters[m.ID])
		if err == nil {
			r.Events.LocalIndexer = r.Events.LocalIndexer && indexed[m.ID]
			_, err = r.Info(networks)
		}
		if err != nil {
			v.LeftOut = append(v.LeftOut, err)
			continue
		}
		v.Workers = append(v.Workers, r)
	}
	slices.SortFunc(v.Workers, func(a, b Record) int { return cmp.Compare(a.WorkerID, b.WorkerID) })
	v.forgetOthers()
	return v
}

// forgetOthers takes out of the plane what is only of workers that were left out: nobody
// wants their events.
func (v *DynamoView) forgetOthers() {
	kept := make(map[uint64]bool)
	for i := range v.Workers {
		kept[v.Workers[i].WorkerID] = true
	}
	maps.DeleteFunc(v.Plane.Indexers, func(r engines.WorkerRank, _ engines.Indexer) bool { return !kept[r.WorkerID] })
	v.Plane.Channels = slices.DeleteFunc(v.Plane.Channels, func(c engines.Channel) bool { return !kept[c.Worker] })
}

// dynamoRecord makes a worker's record of its card.
func dynamoRecord(m *dynamoModel, rules *DynamoRules, publisher uint64, host string, adapters []string) (Record, error) {
	run := &m.Card.Runtime
	r := Record{
		WorkerID: m.ID, Name: m.Namespace + "/" + m.Component + "/" + strconv.FormatUint(m.ID, 16),
		Models: []string{m.Card.Name}, LoRA: adapters, Role: router.Aggregated, BlockSize: m.Card.BlockSize,
		DPStart: run.DPStart, DPSize: run.DPSize, Taints: run.Taints, Engine: "dynamo",
		TotalKVBlocks: orZero(run.TotalKVBlocks), MaxNumSeqs: orZero(run.MaxNumSeqs), MaxBatchedTokens: orZero(run.MaxBatchedTokens),
		Events: Events{Transport: TransportDynamo, LocalIndexer: run.LocalIndexer, PublisherID: publisher},
	}
	switch m.Card.WorkerType {
	case "prefill":
		r.Role = router.Prefill
	case "decode":
		r.Role = router.Decode
	}
	if run.Publishes != nil && !*run.Publishes {
		r.Events = Events{Transport: "none"}
	}
	for _, key := range []string{strconv.FormatUint(m.ID, 10), strconv.FormatUint(m.ID, 16), host} {
		if a := rules.AddressMap[key]; a != "" && key != "" {
			r.Address = a
			return r, nil
		}
	}
	if r.Address = rules.Frontend; r.Address == "" {
		return r, fmt.Errorf("fleet: Dynamo's worker %s (%d) has no address: neither its id nor its host %q is in the address map, and there is no frontend", r.Name, m.ID, host)
	}
	return r, nil
}

func orZero(n *int) int {
	if n == nil {
		return 0
	}
	return *n
}

// adapters returns the names of the workers' adapters, which have cards of their own.
func (t *DynamoTable) adapters() map[uint64][]string {
	names := make(map[uint64][]string)
	for _, m := range t.models {
		if m.adapter() && m.Card.Name != "" {
			names[m.ID] = append(names[m.ID], m.Card.Name)
		}
	}
	for id := range names {
		slices.Sort(names[id])
		names[id] = slices.Compact(names[id])
	}
	return names
}

// hosts returns where the request planes of all endpoints are.
func (t *DynamoTable) hosts() map[string]string {
	all := make(map[string]string)
	for _, i := range t.instances {
		hostport, _, _ := strings.Cut(i.Transport.TCP, "/")
		host, _, _ := net.SplitHostPort(hostport) // none of another transport
		all[dynamoKey(i.Namespace, i.Component, i.Endpoint, i.ID)] = host
	}
	return all
}

func dynamoKey(namespace, component, endpoint string, id uint64) string {
	return strings.Join([]string{namespace, component, endpoint, strconv.FormatUint(id, 16)}, "/")
}

// viewPlane works out where the events of the workers wanted are, and whose publisher is
// who.
func (t *DynamoTable) viewPlane(v *DynamoView, networks Networks, wanted map[uint64]bool, named map[uint64]uint64) {
	refuse := func(key string, err error) {
		v.LeftOut = append(v.LeftOut, fmt.Errorf("fleet: Dynamo's record %s: %w", clip(key), err))
	}
	bound := make(map[uint64]engines.WorkerRank)
	for _, key := range slices.Sorted(maps.Keys(t.sources)) {
		s := t.sources[key]
		rank := engines.WorkerRank{WorkerID: s.Metadata.Worker.ID, DPRank: s.Metadata.Worker.Rank}
		if s.Topic != events.Topic || !wanted[rank.WorkerID] {
			continue
		}
		bound[s.Publisher] = rank
		if other, twice := named[rank.WorkerID]; twice && other != s.Publisher {
			named[rank.WorkerID] = 0 // a publisher for each rank
		} else {
			named[rank.WorkerID] = s.Publisher
		}
		if s.Metadata.Target != nil && s.Metadata.Target.Transport.TCP != "" {
			v.indexer(key, rank, s.Metadata.Target, s.Publisher, networks, refuse)
		}
	}
	t.viewChannels(v, bound, networks, refuse)
}

// viewChannels works out where the publishers are heard.
func (t *DynamoTable) viewChannels(v *DynamoView, bound map[uint64]engines.WorkerRank, networks Networks, refuse func(string, error)) {
	for _, key := range slices.Sorted(maps.Keys(t.channels)) {
		c := t.channels[key]
		rank, known := bound[c.ID]
		if c.Topic != events.Topic || !known {
			continue
		}
		channel := engines.Channel{Publisher: c.ID, Bound: true, Worker: rank.WorkerID, DPRank: rank.DPRank}
		switch kind := c.Transport.Kind; kind {
		case "Zmq":
			channel.Endpoint = c.Transport.Config.Endpoint
			at, err := zmtp.ParseEndpoint(channel.Endpoint, 0, 0)
			if err == nil && at.Path != "" {
				err = errors.New("want tcp://host:port")
			}
			if err == nil {
				err = dialable(at.Host, strconv.Itoa(at.Port), networks)
			}
			if err != nil {
				refuse(key, fmt.Errorf("endpoint %q: %w", clip(channel.Endpoint), err))
				continue
			}
		case "Nats":
			prefix := c.Transport.Config.Prefix
			if prefix == "" || len(prefix) > maxNameLen || strings.ContainsAny(prefix, "*> \t\r\n") {
				refuse(key, fmt.Errorf("subject_prefix is %q, want one without wildcards", clip(prefix)))
				continue
			}
			channel.Subject = prefix + "." + c.Topic
		default:
			refuse(key, fmt.Errorf("transport %q, want Zmq or Nats", clip(kind)))
			continue
		}
		v.Plane.Channels = append(v.Plane.Channels, channel)
	}
	slices.SortFunc(v.Plane.Channels, func(a, b engines.Channel) int { return cmp.Compare(a.Publisher, b.Publisher) })
}

// dialable refuses what a worker may not register. Names are refused, too: the records
// must not choose what we look up.
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

// indexer notes where a rank's local indexer is asked.
func (v *DynamoView) indexer(key string, rank engines.WorkerRank, at *dynamoInstance, publisher uint64, networks Networks, refuse func(string, error)) {
	hostport, _, _ := strings.Cut(at.Transport.TCP, "/")
	host, port, err := net.SplitHostPort(hostport)
	if err == nil {
		err = dialable(host, port, networks)
	}
	if err != nil {
		refuse(key, fmt.Errorf("transport %q: %w", clip(at.Transport.TCP), err))
		return
	}
	v.Plane.Indexers[rank] = engines.Indexer{Transport: at.Transport.TCP, Publisher: publisher}
}
