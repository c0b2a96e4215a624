// SPDX-License-Identifier: Apache-2.0

package wire_test

import (
	"encoding/json"
	"testing"

	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/wire"
)

// names are the names of a scope in NATS.
type names struct {
	Topic, Own, Worker, Everybody, Group, Groups, Bucket, Stream, StreamSubjects, WorkerKey string
	WorkerID                                                                                uint64
}

func namesOf(s wire.Scope) names {
	return names{
		Topic: s.Topic("kv-events"), Own: s.Own("presence"), Worker: s.Own("heartbeat", wire.WorkerKey(7)), Everybody: s.Own("heartbeat", "*"),
		Group: s.Group("eu west", "summary", "get"), Groups: s.Group("*", "summary"), Bucket: s.Bucket("workers"),
		Stream: s.Stream(), StreamSubjects: s.StreamSubjects("kv-events"), WorkerKey: wire.WorkerKey(1<<53 - 1), WorkerID: wire.WorkerID("gpu-1"),
	}
}

// Processes of all later versions find those of version 0.1.0: subjects, streams, buckets and keys keep their names.
func TestGoldenNames(t *testing.T) {
	for file, s := range map[string]wire.Scope{
		"names-default.json": {},
		"names-other.json":   {Namespace: "prod.eu", Component: "Llama 3", Endpoint: "chat_1"},
	} {
		data, err := json.MarshalIndent(namesOf(s), "", " ")
		if err != nil {
			t.Fatal(err)
		}
		read := func(data []byte) (n names, err error) {
			err = json.Unmarshal(data, &n)
			return n, err
		}
		fixtures.Golden(t, "0.1.0/"+file, data, read, namesOf(s))
	}
}
