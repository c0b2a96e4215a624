// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kvroute/kvroute/bench/demo"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/enginesim"
)

func TestBadDynamoSettings(t *testing.T) {
	for text, want := range map[string]string{
		"{frontend: \"10.0.0.1:1\"}":                  "dynamo has no dir",
		"{dir: a}":                                    "neither frontend nor address-map",
		"{dir: a, frontend: here}":                    `dynamo.frontend is "here"`,
		"{dir: a, address-map: {7: \"10.0.0.1\"}}":    `dynamo.address-map[7] is "10.0.0.1"`,
		"{dir: a, frontend: \"10.0.0.1:1\", root: b}": "root",
	} {
		status, _, err := runs(t, "serve", "--config", writeFile(t, "version: 1\ndynamo: "+text+"\n"))
		if status == 0 || !strings.Contains(err, want) {
			t.Errorf("%s: status %d, %s, want %s", text, status, err, want)
		}
	}
}

// Workers of the store and of the file exist side by side, kvroute receives the events of their
// publishers, and they are removed with their records.
func TestWorkersOfDynamosStore(t *testing.T) {
	t.Parallel() // mostly waits
	const publisherID = 0x1a26
	publisher, err := enginesim.NewSockets(enginesim.SocketsConfig{Endpoint: "tcp://127.0.0.1:0"})
	if err != nil {
		t.Fatal(err)
	}
	endpoint, _ := publisher.Endpoints()
	store := t.TempDir()
	put := func(bucket, name, text string) {
		t.Helper()
		dir := filepath.Join(store, "v1", bucket)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, strings.ReplaceAll(name, "/", "%2F")), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	card := func(id int) {
		put("mdc", fmt.Sprintf("dynamo/backend/generate/%x", id), fmt.Sprintf(`{"namespace":"dynamo","component":"backend","endpoint":"generate","instance_id":%d,`+
			`"card_json":{"display_name":"m","kv_cache_block_size":16,"worker_type":"aggregated","runtime_config":{"data_parallel_size":1,"kv_event_publishing_enabled":true}}}`, id))
	}
	const scope = `"scope":{"kind":"endpoint","endpoint":{"namespace":"dynamo","component":"backend","name":"generate"}},"topic":"kv-events"`
	key := fmt.Sprintf("namespace/dynamo/component/backend/endpoint/generate/topic/kv%%2Devents/%x", publisherID)
	put("event_channels", key, fmt.Sprintf(`{%s,"instance_id":%d,"transport":{"kind":"Zmq","config":{"endpoint":%q}}}`, scope, publisherID, endpoint))
	put("event_sources", key, fmt.Sprintf(`{%s,"publisher_id":%d,"metadata":{"worker":{"worker_id":26,"dp_rank":0}}}`, scope, publisherID))
	card(26)

	file := writeFile(t, fmt.Sprintf("version: 1\ndynamo: {dir: %q, frontend: \"127.0.0.1:1\"}\nworkers:\n- {name: a, worker_id: 3, address: \"127.0.0.1:2\", models: [m]}\n", store))
	d := &demonstration{demo.Stack{Router: serveFile(t, file)}}
	running := make(chan error, 1)
	go func() { running <- publisher.Run(t.Context()) }()
	state := func() (all string) {
		for _, w := range workers(t, d) {
			all += fmt.Sprintf("%d %s %s, ", w.ID, w.Address, w.Engine)
		}
		return all
	}
	touch := func() {
		now := time.Now()
		err := filepath.WalkDir(store, func(path string, _ os.DirEntry, err error) error {
			if err != nil {
				return err
			}
			return os.Chtimes(path, now, now)
		})
		if err != nil {
			t.Error(err)
		}
	}
	is := func(want string) {
		t.Helper()
		eventually(t, "the workers are others", func() bool { touch(); return state() == want })
	}
	is("3 127.0.0.1:2 , 26 127.0.0.1:1 dynamo, ")
	n := uint64(0)
	eventually(t, "the publisher is not heard", func() bool {
		touch()
		n++
		frames := enginesim.PlaneFrames(events.Envelope{PublisherID: publisherID, Sequence: n, Topic: events.Topic, Payload: events.AppendEvents(nil, []events.RouterEvent{{
			WorkerID: 26, EventID: n, Event: indexer.Event{Kind: indexer.Stored, Blocks: []indexer.Block{{External: n, Local: n}}},
		}})})
		publisher.PublishFrames(frames[:]...)
		for _, w := range workers(t, d) {
			if w.ID == 26 && w.CachedBlocks > 0 {
				return true
			}
		}
		return false
	})
	card(27)
	is("3 127.0.0.1:2 , 26 127.0.0.1:1 dynamo, 27 127.0.0.1:1 dynamo, ")
	// The file's workers are reloaded and stay beside those of the store.
	text := fmt.Sprintf("version: 1\ndynamo: {dir: %q, frontend: \"127.0.0.1:1\"}\nworkers:\n- {name: b, worker_id: 4, address: \"127.0.0.1:3\", models: [m]}\n", store)
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Router.Cmd.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	is("4 127.0.0.1:3 , 26 127.0.0.1:1 dynamo, 27 127.0.0.1:1 dynamo, ")
	if err := os.Remove(filepath.Join(store, "v1", "mdc", "dynamo%2Fbackend%2Fgenerate%2F1a")); err != nil {
		t.Fatal(err)
	}
	is("4 127.0.0.1:3 , 27 127.0.0.1:1 dynamo, ")
	// No process updates the files any more.
	eventually(t, "the dead are there", func() bool { return state() == "4 127.0.0.1:3 , " })
}
