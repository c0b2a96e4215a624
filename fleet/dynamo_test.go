// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"

	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/router"
)

// dynamoStore is a folder as Dynamo's processes write it, with its reader.
type dynamoStore struct {
	*testing.T
	dir  string
	now  time.Time
	d    *fleet.Dynamo
	view fleet.DynamoView
	news int
}

func newDynamoStore(t *testing.T, rules fleet.DynamoRules, networks ...fleet.Networks) *dynamoStore {
	t.Helper()
	s := &dynamoStore{T: t, dir: filepath.Join(t.TempDir(), "kv"), now: time.Now()}
	var err error
	s.d, err = fleet.NewDynamo(fleet.DynamoConfig{
		Dir: s.dir, Rules: rules, Networks: append(networks, fleet.Networks{})[0],
		Changed: func(v fleet.DynamoView) { s.view, s.news = v, s.news+1 },
		Now:     func() time.Time { return s.now },
	})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *dynamoStore) put(path, text string) {
	s.Helper()
	name := filepath.Join(s.dir, path)
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		s.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		s.Fatal(err)
	}
	s.touch(path)
}

// touch renews a file, as a live process does.
func (s *dynamoStore) touch(path string) {
	s.Helper()
	if err := os.Chtimes(filepath.Join(s.dir, path), s.now, s.now); err != nil {
		s.Fatal(err)
	}
}

func (s *dynamoStore) remove(path string) {
	s.Helper()
	if err := os.Remove(filepath.Join(s.dir, path)); err != nil {
		s.Fatal(err)
	}
}

func (s *dynamoStore) pass(d time.Duration) {
	s.now = s.now.Add(d)
	s.d.Read()
}

// escaped returns a name as Dynamo's files have it.
func escaped(name string) string {
	var b strings.Builder
	for _, c := range []byte(name) {
		if '0' <= c && c <= '9' || 'A' <= c && c <= 'Z' || 'a' <= c && c <= 'z' {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// Records of one worker with the id 26 (hex 1a).
const (
	modelKey   = "v1/mdc/dynamo/backend/generate/1a"
	adapterKey = "v1/mdc/dynamo/backend/generate/1a/tuned"
	frontend   = "10.0.0.1:8000"
)

func dynamoRecords() map[string]string {
	model := func(more string) string {
		return `{"type":"Model","namespace":"dynamo","component":"backend","endpoint":"generate","instance_id":26,"card_json":{"display_name":"m","kv_cache_block_size":16,` +
			`"model_type":"Chat | Completions",` + more + `}}`
	}
	const endpoint = `{"type":"Endpoint","component":"backend","endpoint":"%s","namespace":"dynamo","instance_id":26,"transport":{"tcp":"10.0.0.7:4100/1a/%s"}%s}`
	all := map[string]string{
		modelKey:   model(`"worker_type":"aggregated","runtime_config":{"total_kv_blocks":64,"data_parallel_start_rank":4,"data_parallel_size":2,"enable_local_indexer":true,"kv_event_publishing_enabled":true}`),
		adapterKey: `{"type":"Model","namespace":"dynamo","component":"backend","endpoint":"generate","instance_id":26,"model_suffix":"tuned","card_json":{"display_name":"tuned"}}`,
		"v1/instances/dynamo/backend/generate/1a":                                                              fmt.Sprintf(endpoint, "generate", "dynamo/backend/generate", `,"request_plane_codec":"msgpack"`),
		"v1/event_channels/namespace/dynamo/component/backend/endpoint/generate/topic/forward-pass-metrics/ee": `{"type":"EventChannel","scope":{"kind":"endpoint","endpoint":{"namespace":"dynamo","component":"backend","name":"generate"}},"topic":"forward-pass-metrics","instance_id":238,"transport":{"kind":"Nats","config":{"subject_prefix":"namespace.dynamo.component.backend.endpoint.generate"}}}`,
	}
	for i, transport := range []string{`{"kind":"Zmq","config":{"endpoint":"tcp://10.0.0.7:4200"}}`, `{"kind":"Nats","config":{"subject_prefix":"namespace.dynamo.component.backend.endpoint.generate"}}`} {
		const scope = `"scope":{"kind":"endpoint","endpoint":{"namespace":"dynamo","component":"backend","name":"generate"}},"topic":"kv-events",`
		publisher, rank := 255+i, 4+i
		name := fmt.Sprintf("namespace/dynamo/component/backend/endpoint/generate/topic/kv-events/%x", publisher)
		all["v1/event_channels/"+name] = fmt.Sprintf(`{"type":"EventChannel",%s"instance_id":%d,"transport":%s}`, scope, publisher, transport)
		all["v1/event_sources/"+name] = fmt.Sprintf(`{"type":"EventSource",%s"publisher_id":%d,"metadata":{"worker":{"worker_id":26,"dp_rank":%d},"publisher_id":%d,"recovery_target":%s}}`, scope, publisher, rank, publisher,
			fmt.Sprintf(endpoint, "q", fmt.Sprint("dynamo/backend/q", rank), `,"request_plane_codec":"msgpack"`))
	}
	return all
}

// dynamoView returns the view that the records above result in.
func dynamoView() fleet.DynamoView {
	return fleet.DynamoView{
		Workers: []fleet.Record{{
			WorkerID: 26, Name: "dynamo/backend/1a", Address: frontend, Models: []string{"m"}, LoRA: []string{"tuned"}, Role: router.Aggregated, Engine: "dynamo",
			BlockSize: 16, DPStart: 4, DPSize: 2, TotalKVBlocks: 64, Events: fleet.Events{Transport: fleet.TransportDynamo, LocalIndexer: true},
		}},
		Plane: dynamo.Plane{
			Channels: []dynamo.Channel{
				{Publisher: 255, Endpoint: "tcp://10.0.0.7:4200", Worker: 26, DPRank: 4},
				{Publisher: 256, Subject: "namespace.dynamo.component.backend.endpoint.generate.kv-events", Worker: 26, DPRank: 5},
			},
			Indexers: map[events.RankName]dynamo.Indexer{
				{WorkerID: 26, DPRank: 4}: {Transport: "10.0.0.7:4100/1a/dynamo/backend/q4", Publisher: 255},
				{WorkerID: 26, DPRank: 5}: {Transport: "10.0.0.7:4100/1a/dynamo/backend/q5", Publisher: 256},
			},
		},
	}
}

func TestDynamosRecordsMakeWorkers(t *testing.T) {
	s := newDynamoStore(t, fleet.DynamoRules{Namespace: "dynamo", Frontend: frontend})
	for key, text := range dynamoRecords() {
		bucket, name := key[:strings.Index(key[3:], "/")+3], key[strings.Index(key[3:], "/")+4:]
		s.put(bucket+"/"+escaped(name), text)
	}
	s.pass(0)
	if diff := cmp.Diff(dynamoView(), s.view); diff != "" {
		t.Errorf("the records make something else (-want +got):\n%s", diff)
	}
}

// If a local indexer cannot be reached, no event waits for its answer.
func TestADynamoIndexerOutOfReachIsNone(t *testing.T) {
	var table fleet.DynamoTable
	for key, text := range dynamoRecords() {
		if err := table.Put(key, []byte(strings.ReplaceAll(text, `{"tcp":`, `{"nats_tcp":`))); err != nil {
			t.Fatal(err)
		}
	}
	v := table.View(&fleet.DynamoRules{Frontend: frontend}, fleet.Networks{})
	if len(v.Workers) != 1 || v.Workers[0].Events.LocalIndexer || len(v.Plane.Indexers) > 0 || len(v.LeftOut) > 0 {
		t.Errorf("%+v", v)
	}
}

// Only the rules determine a worker's address. A record without an address is reported.
func TestDynamosWorkersNeedAnAddress(t *testing.T) {
	for name, c := range map[string]struct {
		rules    fleet.DynamoRules
		networks fleet.Networks
		want     string // address
		left     string
	}{
		"frontend":            {rules: fleet.DynamoRules{Frontend: frontend}, want: frontend},
		"by id":               {rules: fleet.DynamoRules{Frontend: frontend, AddressMap: map[string]string{"26": "10.0.0.2:1"}}, want: "10.0.0.2:1"},
		"by id in hex":        {rules: fleet.DynamoRules{AddressMap: map[string]string{"1a": "10.0.0.2:1"}}, want: "10.0.0.2:1"},
		"by host":             {rules: fleet.DynamoRules{AddressMap: map[string]string{"10.0.0.7": "10.0.0.7:1"}}, want: "10.0.0.7:1"},
		"nowhere":             {rules: fleet.DynamoRules{AddressMap: map[string]string{"10.0.0.8": "10.0.0.7:1"}}, left: `neither its id nor its host "10.0.0.7" is in the address map`},
		"of another":          {rules: fleet.DynamoRules{Frontend: frontend, Namespace: "other"}},
		"networks":            {rules: fleet.DynamoRules{Frontend: frontend}, networks: mustParse(t, "10.0.0.0/30"), want: frontend, left: "10.0.0.7"},
		"outside of networks": {rules: fleet.DynamoRules{Frontend: frontend}, networks: mustParse(t, "10.0.0.7/32"), left: "worker networks"},
	} {
		s := newDynamoStore(t, c.rules, c.networks)
		for key, text := range dynamoRecords() {
			at := strings.Index(key[3:], "/") + 3
			s.put(key[:at]+"/"+escaped(key[at+1:]), text)
		}
		s.pass(0)
		got := ""
		if len(s.view.Workers) > 0 {
			got = s.view.Workers[0].Address
		}
		if got != c.want {
			t.Errorf("%s: the worker is at %q, want %q", name, got, c.want)
		}
		if p := s.view.Plane; got == "" && len(p.Channels)+len(p.Indexers) > 0 {
			t.Errorf("%s: no worker has an address, but kvroute listens to %+v", name, p)
		}
		if text := fmt.Sprint(s.view.LeftOut); c.left == "" && len(s.view.LeftOut) > 0 || !strings.Contains(text, c.left) {
			t.Errorf("%s: left out is %s, want %q", name, text, c.left)
		}
	}
	for _, bad := range []fleet.DynamoRules{{Frontend: "here"}, {AddressMap: map[string]string{"26": "10.0.0.2"}}} {
		if _, err := fleet.NewDynamo(fleet.DynamoConfig{Dir: "x", Rules: bad}); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

func TestBadRecordsOfDynamoAreRefused(t *testing.T) {
	good := dynamoRecords()[modelKey]
	for name, c := range map[string]struct{ key, text, want string }{
		"no bucket":   {"v1", good, "no bucket"},
		"no escape":   {"v1/mdc/%zz", good, "escape"},
		"half":        {modelKey, good[:len(good)/2], "unexpected end"},
		"empty":       {modelKey, "", "unexpected end"},
		"another id":  {"v1/mdc/dynamo/backend/generate/1b", good, "its id is 1a"},
		"wrong shape": {modelKey, `{"instance_id":"26"}`, "instance_id"},
		"negative":    {modelKey, `{"instance_id":-1}`, "instance_id"},
	} {
		var table fleet.DynamoTable
		if err := table.Put(c.key, []byte(c.text)); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", name, err, c.want)
		}
		if v := table.View(&fleet.DynamoRules{Frontend: frontend}, fleet.Networks{}); len(v.Workers) > 0 {
			t.Errorf("%s makes a worker", name)
		}
	}
	var table fleet.DynamoTable
	card := strings.Replace(good, `"m"`, `""`, 1)
	if err := table.Put(modelKey, []byte(card)); err != nil {
		t.Fatal(err)
	}
	if v := table.View(&fleet.DynamoRules{Frontend: frontend}, fleet.Networks{}); len(v.Workers) > 0 || len(v.LeftOut) != 1 {
		t.Errorf("a worker of no model: %+v", v)
	}
	for _, transport := range []string{
		`{"kind":"Nats","config":{"subject_prefix":"a.>"}}`, `{"kind":"Nats","config":{}}`, `{"kind":"Quic"}`,
		`{"kind":"Zmq","config":{"endpoint":"ipc:///tmp/x"}}`, `{"kind":"Zmq","config":{"endpoint":"tcp://host:1"}}`,
		`{"kind":"Zmq","config":{"endpoint":"tcp://127.0.0.1:9901"}}`, `{"kind":"Zmq","config":{"endpoint":"tcp://169.254.169.254:80"}}`,
	} {
		var table fleet.DynamoTable
		for key, text := range dynamoRecords() {
			text = strings.Replace(text, `{"kind":"Zmq","config":{"endpoint":"tcp://10.0.0.7:4200"}}`, transport, 1)
			if err := table.Put(key, []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		if v := table.View(&fleet.DynamoRules{Frontend: frontend}, fleet.Networks{}); len(v.Plane.Channels) != 1 || v.Plane.Channels[0].Publisher != 256 || len(v.LeftOut) != 1 || len(v.Workers) != 1 {
			t.Errorf("%s: %+v", transport, v)
		}
	}
}

// Random processes write, touch, partly write and delete their records, or die. After
// each reading the view equals the complete records of the live processes.
func TestDynamosFilesAreFollowed(t *testing.T) {
	const processes = 6
	for seed := range uint64(6) {
		rng := rand.New(rand.NewPCG(seed, 1))
		rules := fleet.DynamoRules{Frontend: frontend}
		s := newDynamoStore(t, rules)
		type file struct {
			whole string // last complete content that was read
			torn  bool
			at    time.Time // time of the last write or touch
		}
		files := map[string]*file{}
		key := func(n int) string { return "v1/mdc/" + escaped(fmt.Sprintf("dynamo/backend/generate/%x", n)) }
		text := func(n int) string {
			return fmt.Sprintf(`{"namespace":"dynamo","component":"backend","endpoint":"generate","instance_id":%d,"card_json":{"display_name":"m%d","worker_type":"aggregated"}}`, n, rng.IntN(3))
		}
		for step := range 200 {
			n := 1 + rng.IntN(processes)
			k := key(n)
			switch f := files[k]; rng.IntN(6) {
			case 0, 1:
				whole := text(n)
				s.put(k, whole)
				files[k] = &file{whole: whole, at: s.now.Add(time.Millisecond)}
			case 2:
				if f == nil {
					f = &file{}
					files[k] = f
				}
				if s.now.Sub(f.at) >= 10*time.Second {
					f.whole = "" // the earlier content was dropped
				}
				whole := text(n)
				s.put(k, whole[:rng.IntN(len(whole))])
				f.torn, f.at = true, s.now.Add(time.Millisecond)
			case 3:
				if f != nil {
					s.remove(k)
					delete(files, k)
				}
			default:
				for k, f := range files {
					if rng.IntN(3) > 0 {
						if s.now.Sub(f.at) >= 10*time.Second && f.torn {
							f.whole = ""
						}
						s.touch(k)
						f.at = s.now.Add(time.Millisecond)
					}
				}
			}
			s.pass(time.Millisecond) // so that each content has its own time
			s.pass(time.Duration(rng.IntN(3000)) * time.Millisecond)
			var want fleet.DynamoTable
			for k, f := range files {
				if f.torn && s.now.Sub(f.at) >= 10*time.Second {
					f.whole = ""
				}
				if f.whole == "" || s.now.Sub(f.at) >= 10*time.Second {
					continue
				}
				if err := want.Put(k, []byte(f.whole)); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff(want.View(&rules, fleet.Networks{}).Workers, s.view.Workers); diff != "" {
				t.Fatalf("seed %d, step %d (-want +got):\n%s", seed, step, diff)
			}
		}
	}
}

// A process's clock may be wrong: only a change of its file's time counts.
func TestClocksOfDynamosProcessesDoNotCount(t *testing.T) {
	for _, wrong := range []time.Duration{-5 * time.Minute, 5 * time.Minute} {
		s := newDynamoStore(t, fleet.DynamoRules{Frontend: frontend})
		path := "v1/mdc/" + escaped("dynamo/backend/generate/1a")
		touch := func() {
			at := s.now.Add(wrong)
			if err := os.Chtimes(filepath.Join(s.dir, path), at, at); err != nil {
				t.Fatal(err)
			}
		}
		s.put(path, dynamoRecords()[modelKey])
		touch()
		s.pass(0)
		for range 20 {
			s.pass(3 * time.Second)
			touch()
			s.pass(300 * time.Millisecond)
			if len(s.view.Workers) != 1 {
				t.Fatalf("a clock that is wrong by %v: the live worker is missing", wrong)
			}
		}
		s.pass(11 * time.Second)
		if len(s.view.Workers) != 0 {
			t.Errorf("a clock that is wrong by %v: the dead worker is present", wrong)
		}
	}
}

// Captured stores are replayed into a folder.
func TestCapturedStoresOfDynamo(t *testing.T) {
	for version, want := range map[string]struct{ runs, block, channels, indexers int }{
		"1.6.1": {2, 16, 2, 2},
	} {
		path := fixtures.Path(t, "vectors", "dynamo-"+version, "discovery.jsonl")
		if path == "" {
			continue
		}
		runs := map[string]*dynamoStore{}
		most := map[string]fleet.DynamoView{}
		for _, row := range discoveryRows(t, path) {
			s := runs[row.Run]
			if s == nil {
				// The processes of the records run on one machine.
				s = newDynamoStore(t, fleet.DynamoRules{Namespace: "dynamo", Frontend: frontend}, mustParse(t, "10.0.0.0/8,127.0.0.0/8"))
				runs[row.Run] = s
			}
			switch row.Op {
			case "put":
				text := row.Text
				if text == "" {
					text = string(row.JSON)
				}
				s.put(row.Path, text[:len(text)/2]) // is read again when complete
				s.d.Read()
				s.put(row.Path, text)
			case "delete":
				s.remove(row.Path)
			}
			s.d.Read()
			if len(s.view.Workers) >= len(most[row.Run].Workers) && len(s.view.Plane.Channels) >= len(most[row.Run].Plane.Channels) && len(s.view.Plane.Indexers) >= len(most[row.Run].Plane.Indexers) {
				most[row.Run] = s.view
			}
		}
		if len(runs) != want.runs {
			t.Errorf("%s: %d runs, want %d", version, len(runs), want.runs)
		}
		for run, s := range runs {
			at, v := version+" "+run, most[run]
			if len(v.Workers) != 2 || len(v.Plane.Channels) != want.channels || len(v.Plane.Indexers) != want.indexers || len(v.LeftOut) > 0 {
				t.Errorf("%s: %d workers, %d channels, %d indexers, left out %v", at, len(v.Workers), len(v.Plane.Channels), len(v.Plane.Indexers), v.LeftOut)
			}
			for _, w := range v.Workers {
				if w.BlockSize != want.block || w.TotalKVBlocks != 64 || w.DPSize != 1 || !w.Events.LocalIndexer {
					t.Errorf("%s: worker %+v", at, w)
				}
				if i, ok := v.Plane.Indexers[events.RankName{WorkerID: w.WorkerID}]; !ok || i.Publisher != w.Events.PublisherID {
					t.Errorf("%s: worker %d is asked at %+v", at, w.WorkerID, i)
				}
			}
			for _, c := range v.Plane.Channels {
				if !slices.ContainsFunc(v.Workers, func(r fleet.Record) bool { return r.WorkerID == c.Worker && r.Events.PublisherID == c.Publisher }) {
					t.Errorf("%s: channel %+v", at, c)
				}
				if (c.Endpoint == "") != (run == "nats") {
					t.Errorf("%s: a channel at %q, %q", at, c.Endpoint, c.Subject)
				}
			}
			if len(s.view.Workers)+len(s.view.Plane.Channels)+len(s.view.Plane.Indexers)+len(s.view.LeftOut) != 0 {
				t.Errorf("%s: at the end the view is %+v", at, s.view)
			}
		}
	}
}

type discoveryRow struct {
	Run, Op, Path, Text string
	JSON                json.RawMessage
}

func discoveryRows(t *testing.T, path string) (rows []discoveryRow) {
	t.Helper()
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var row discoveryRow
		if err := json.Unmarshal(lines.Bytes(), &row); err != nil {
			t.Fatal(err)
		}
		rows = append(rows, row)
	}
	if err := errors.Join(lines.Err()); err != nil || len(rows) == 0 {
		t.Fatalf("%d rows, %v", len(rows), err)
	}
	return rows
}

// Names are found escaped, as in files, and unescaped, as in buckets.
func TestDynamosKeysAreUnescaped(t *testing.T) {
	for _, name := range []string{"dynamo/backend/generate/1a", escaped("dynamo/backend/generate/1a"), url.PathEscape("dynamo/backend/generate/1a")} {
		var table fleet.DynamoTable
		if err := table.Put("v1/mdc/"+name, []byte(dynamoRecords()[modelKey])); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if v := table.View(&fleet.DynamoRules{Frontend: frontend}, fleet.Networks{}); len(v.Workers) != 1 {
			t.Errorf("%s: %+v", name, v)
		}
		table.Delete("v1/mdc/" + name)
		if v := table.View(&fleet.DynamoRules{Frontend: frontend}, fleet.Networks{}); len(v.Workers) != 0 {
			t.Errorf("%s: %+v", name, v)
		}
	}
}

// Above the limit, the earliest records are kept; the omitted ones are counted and
// reported. A record that is removed makes room. An entry too large for a record is
// ignored.
func TestTooManyRecordsOfDynamo(t *testing.T) {
	const most = 3
	card := func(n int) (key, text string) {
		return fmt.Sprintf("v1/mdc/%s", escaped(fmt.Sprintf("dynamo/backend/generate/%x", n))),
			fmt.Sprintf(`{"namespace":"dynamo","component":"backend","endpoint":"generate","instance_id":%d,"card_json":{"display_name":"m","worker_type":"aggregated"}}`, n)
	}
	reader, log, view := sdkmetric.NewManualReader(), strings.Builder{}, fleet.DynamoView{}
	s := &dynamoStore{T: t, dir: t.TempDir(), now: time.Now()}
	conf := fleet.DynamoConfig{
		Dir: s.dir, Now: func() time.Time { return s.now },
		Rules:   fleet.DynamoRules{Namespace: "dynamo", Frontend: frontend},
		Changed: func(v fleet.DynamoView) { view = v },
		Log:     slog.New(slog.NewTextHandler(&log, nil)), Meter: sdkmetric.NewMeterProvider(sdkmetric.WithReader(reader)).Meter("test"),
	}
	d, err := fleet.NewDynamo(conf)
	if err != nil {
		t.Fatal(err)
	}
	d.KeepAtMost(most)
	over := func() (n int64) {
		var all metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		for _, scope := range all.ScopeMetrics {
			for _, m := range scope.Metrics {
				sum, _ := m.Data.(metricdata.Sum[int64])
				for _, point := range sum.DataPoints {
					if kind, _ := point.Attributes.Value("kind"); m.Name == "kvroute.fleet.dynamo" && kind.AsString() == "over" {
						n += point.Value
					}
				}
			}
		}
		return n
	}
	is := func(what string, left int64, want ...uint64) {
		t.Helper()
		d.Read()
		d.Read() // nothing is counted twice, and the removed record has made room
		var ids []uint64
		for _, w := range view.Workers {
			ids = append(ids, w.WorkerID)
		}
		if !slices.Equal(ids, want) || over() != left {
			t.Errorf("%s: workers %d, %d left out so far, want %d and %d", what, ids, over(), want, left)
		}
	}
	for n := 11; n < 11+most; n++ {
		s.put(card(n))
	}
	is("as many as are kept", 0, 11, 12, 13)
	s.put(card(1))
	s.put(card(2))
	is("two more", 2, 11, 12, 13)
	if got := strings.Count(log.String(), "more records than are read"); got != 1 || !strings.Contains(log.String(), "left_out=2") {
		t.Errorf("said %d times: %s", got, log.String())
	}
	s.put(card(3))
	is("one more", 3, 11, 12, 13)
	first, _ := card(12)
	s.remove(first)
	more, _ := card(1)
	s.remove(more)
	is("two gone", 3, 2, 11, 13)
}
