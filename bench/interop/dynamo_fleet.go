// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	_ "embed"
	"encoding/hex"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/engines/dynamo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/process"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/zmtp"
)

//go:embed dynamo_tree.py
var dynamoTree string

const (
	// dynamoBlock and dynamoBlocks are the mock engines': a cache of 1,280 tokens a rank,
	// so that it evicts soon.
	dynamoBlock  = 16
	dynamoBlocks = 80
	dynamoStart  = 3 * time.Minute
)

// dynamoFleet is Dynamo's processes: two mock workers of two ranks each, and a frontend
// in direct mode, all on the loopback. They end with the check.
type dynamoFleet struct {
	e           *env
	name        string
	store       string // of discovery
	environment []string
	flags       []string // more ones of the mock workers
	nats        string   // URL of the server for events, "" for ZMQ
	mocker      *process.Process
	frontend    *process.Process
	address     string // of the frontend
	ledger      *ledger
	index       dynamoIndex
}

func (f *dynamoFleet) python() string { return filepath.Join(f.e.dynamo, "bin", "python") }

// newDynamo returns a fleet that is not started. The mock workers get the flags.
func (e *env) newDynamo(name string, flags ...string) *dynamoFleet {
	l := newLedger()
	l.mayStoreMore = true
	return &dynamoFleet{e: e, name: name, flags: flags, ledger: l, store: filepath.Join(e.dir, name+"-store"), address: fmt.Sprintf("127.0.0.1:%d", bench.Must(process.FreePorts(1)))}
}

// start starts the processes without waiting for them. Their event plane is zmq, or nats
// with the URL of a server.
func (f *dynamoFleet) start(plane, server string) {
	f.environment = []string{
		"DYN_FILE_KV=" + f.store, "DYN_DISCOVERY_BACKEND=file", "DYN_TCP_RPC_HOST=127.0.0.1", "DYN_EVENT_PLANE_HOST=127.0.0.1",
		"DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1", "HF_HUB_OFFLINE=1", "DYN_EVENT_PLANE=" + plane, "DYN_NAMESPACE=dynamo",
	}
	if f.nats = server; server != "" {
		at := bench.Must(url.Parse(server))
		// Dynamo ignores a name and a password in the URL.
		password, _ := at.User.Password()
		f.environment = append(f.environment, "NATS_SERVER=nats://"+at.Host, "NATS_AUTH_USERNAME="+at.User.Username(), "NATS_AUTH_PASSWORD="+password)
	}
	f.startMocker()
	_, port, _ := strings.Cut(f.address, ":")
	f.frontend = f.e.start(f.name+"-frontend", f.environment, f.python(), "-m", "dynamo.frontend", "--router-mode", "direct",
		"--http-host", "127.0.0.1", "--http-port", port)
	f.e.atEnd(f.frontend.Stop)
}

func (f *dynamoFleet) startMocker() {
	f.mocker = f.e.start(f.name+"-mocker", f.environment, f.python(), append([]string{
		"-m", "dynamo.mocker", "--model-path", f.e.dynamoModel(), "--model-name", modelName,
		"--block-size", fmt.Sprint(dynamoBlock), "--num-gpu-blocks-override", fmt.Sprint(dynamoBlocks), "--num-workers", "2", "--data-parallel-size", "2",
		"--speedup-ratio", "1000",
	}, f.flags...)...)
	f.e.atEnd(f.mocker.Stop)
}

// ready waits for the workers' records and the frontend's model, and subscribes to
// the workers' publishers before their first event.
func (f *dynamoFleet) ready(ctx context.Context) {
	await(ctx, f.mocker, dynamoStart, "the records of 2 workers and 4 publishers", func(ctx context.Context) string {
		v := f.records()
		workers, channels, indexers := len(v.Workers), len(v.Plane.Channels), len(v.Plane.Indexers)
		return missingUnless(workers == 2 && channels == 4 && indexers == 4, "%d workers, %d publishers, %d indexers", workers, channels, indexers)
	})
	f.index = f.startIndex()
	f.listen(ctx, f.records().Plane)
	await(ctx, f.frontend, dynamoStart, "its model", func(ctx context.Context) string {
		models := string(bench.Must(process.Get(ctx, "http://"+f.address+"/v1/models")))
		return missingUnless(strings.Contains(models, `"`+modelName+`"`), "it has %s", models)
	})
}

// records reads the store.
func (f *dynamoFleet) records() (v fleet.DynamoView) {
	d := bench.Must(fleet.NewDynamo(fleet.DynamoConfig{
		Dir: f.store, Rules: fleet.DynamoRules{Namespace: "dynamo", Frontend: f.address}, Networks: bench.Must(reach.Parse(workerNetworks)),
		Changed: func(now fleet.DynamoView) { v = now },
	}))
	d.Read()
	return v
}

// config is kvroute's, for workers in a store behind the frontend.
func (f *dynamoFleet) config(store string) string {
	return fmt.Sprintf("version: 1\ndynamo: {dir: %q, namespace: dynamo, frontend: %q}\nmodels: [{name: %s, tokenizer: %q}]\n", store, f.address, modelName, f.e.dynamoModel())
}

// dynamoModel returns the folder of the model of Dynamo's workers, and writes it if it is missing. Its
// tokenizer is that of the simulated engine.
func (e *env) dynamoModel() string {
	dir := filepath.Join(e.dir, "dynamo-model")
	if _, err := os.Stat(dir); err != nil { // no check before made it
		writeModel(dir, "", nil)
	}
	return dir
}

// dynamoIndex is Dynamo's own index, in a process. Any number of goroutines may use it.
type dynamoIndex struct{ *process.Lines }

func (f *dynamoFleet) startIndex() dynamoIndex {
	x := dynamoIndex{bench.Must(process.StartLines(exec.Command(f.python(), "-c", dynamoTree)))}
	f.e.atEnd(x.Stop)
	x.dump() // it has started
	return x
}

func (x dynamoIndex) dump() []blockAt {
	var evs []routerEvent
	bench.NoError(x.Ask("", &evs))
	return appendBlocks(nil, evs...)
}

// listen subscribes to all publishers beside kvroute, and forwards their messages to Dynamo's
// index. It returns before the first event, and ends with the check.
func (f *dynamoFleet) listen(ctx context.Context, plane dynamo.Plane) {
	receive := func(envelope []byte) {
		bench.NoError(f.index.Ask(hex.EncodeToString(envelope), nil))
		f.ledger.addMessage(envelope)
	}
	if f.nats != "" {
		nc := bench.Must(nats.Connect(f.nats))
		f.e.atEnd(nc.Close)
		subjects := make(map[string]bool)
		for _, c := range plane.Channels {
			subjects[c.Subject] = true
		}
		for subject := range subjects {
			bench.Must(nc.Subscribe(subject, func(m *nats.Msg) { f.ledger.try(func() { receive(m.Data) }) }))
		}
		bench.NoError(nc.FlushWithContext(ctx))
		return
	}
	for _, c := range plane.Channels {
		f.e.atEnd(f.ledger.follow(subscribe(ctx, bench.Must(zmtp.ParseEndpoint(c.Endpoint, 0, 0)), events.Topic), func(m engines.Frames) {
			if m.Topic == events.Topic {
				receive(m.Body)
			}
		}))
	}
	<-time.After(500 * time.Millisecond) // the publishers do not confirm a subscription
}

// mirror keeps a copy of the store until the check ends. In the copy the publishers'
// sockets are valves that lead to the real ones.
func (f *dynamoFleet) mirror(store string) (valves []*valve) {
	var replace []string
	for _, ch := range f.records().Plane.Channels {
		v := bench.Must(openValve("tcp", "127.0.0.1:0", strings.TrimPrefix(ch.Endpoint, "tcp://")))
		f.e.atEnd(v.stop)
		valves = append(valves, v)
		replace = append(replace, ch.Endpoint+`"`, "tcp://"+v.l.Addr().String()+`"`)
	}
	copyAll := func() { copyStore(f.store, store, strings.NewReplacer(replace...)) }
	copyAll()
	ctx, stop := context.WithCancel(context.Background())
	var copier sync.WaitGroup
	copier.Go(func() {
		for ctx.Err() == nil {
			select {
			case <-ctx.Done():
			case <-time.After(2 * time.Second): // Dynamo removes records that are not renewed for 10 s
				_ = bench.Try(copyAll) // a file may be removed meanwhile; the next copy is right
			}
		}
	})
	f.e.atEnd(func() {
		stop()
		copier.Wait()
	})
	return valves
}

// copyStore copies a folder with replacements in its files. Each file is there as a whole,
// as Dynamo writes it.
func copyStore(from, to string, replace *strings.Replacer) {
	bench.NoError(filepath.WalkDir(from, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() || strings.HasPrefix(d.Name(), ".") {
			return err
		}
		target := filepath.Join(to, strings.TrimPrefix(path, from))
		half := filepath.Join(filepath.Dir(target), ".tmp_"+filepath.Base(target))
		data := bench.Must(os.ReadFile(path))
		bench.NoError(os.MkdirAll(filepath.Dir(target), 0o755))
		bench.NoError(os.WriteFile(half, []byte(replace.Replace(string(data))), 0o644))
		return os.Rename(half, target)
	}))
}
