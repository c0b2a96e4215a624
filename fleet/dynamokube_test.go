// SPDX-License-Identifier: Apache-2.0

package fleet_test

import (
	"context"
	"net/http"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/kube"
	"github.com/kvroute/kvroute/internal/kubetest"
)

const (
	metadataPath = "/apis/nvidia.com/v1alpha1/namespaces/default/dynamoworkermetadatas"
	slicesPath   = "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices"
)

// slice is an EndpointSlice with one pod.
func slice(ready string) string {
	return `{"metadata":{"name":"s","namespace":"default","labels":{"nvidia.com/dynamo-discovery-enabled":"true"}},` +
		`"endpoints":[{"addresses":["10.0.0.7"],"conditions":{` + ready + `},"targetRef":{"kind":"Pod","name":"vllm-0"}}]}`
}

// The object that a worker of Dynamo 1.6.1 writes, recorded from a mock worker, makes a worker while its pod is ready. The
// worker stays while the API server is away or refuses requests.
func TestDynamosObjectsInKubernetes(t *testing.T) {
	object, err := os.ReadFile("testdata/dynamoworkermetadata-1.6.1.json")
	if err != nil {
		t.Fatal(err)
	}
	api := kubetest.New(t)
	client, err := kube.New(kube.Config{Server: api.URL, CAFile: api.CAFile, TokenFile: api.TokenFile})
	if err != nil {
		t.Fatal(err)
	}
	views := make(chan fleet.DynamoView, 100)
	d, err := fleet.NewDynamo(fleet.DynamoConfig{
		Kubernetes: client, KubernetesNamespace: "default", Rules: fleet.DynamoRules{Frontend: frontend},
		Changed: func(v fleet.DynamoView) { views <- v },
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := d.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		stop()
		running.Wait()
	})
	var last fleet.DynamoView
	until := func(what string, workers int) {
		t.Helper()
		for late := time.After(time.Minute); ; {
			select {
			case last = <-views:
				if len(last.Workers) == workers {
					return
				}
			case <-late:
				t.Fatalf("%s: %d workers, want %d", what, len(last.Workers), workers)
			}
		}
	}
	api.Put(metadataPath, string(object))
	api.Put(slicesPath, slice(`"ready":false`))
	api.Put(slicesPath, slice(`"ready":true`))
	until("its pod is ready", 1)
	if w := last.Workers[0]; w.WorkerID != 1943803597606491 || w.Models[0] != "qwen3" || w.BlockSize != 16 || w.TotalKVBlocks != 80 || w.Address != frontend {
		t.Errorf("the worker is %+v", w)
	}
	api.Refuse(func(string, string) int { return http.StatusForbidden })
	api.Restart()
	api.Put(slicesPath, slice(`"ready":false`))
	select {
	case v := <-views:
		t.Errorf("while the API refuses requests there is a view with %d workers", len(v.Workers))
	case <-time.After(300 * time.Millisecond):
	}
	api.Refuse(nil)
	until("its pod is not ready", 0)
	api.Put(slicesPath, slice(``)) // without a condition it is ready
	until("its pod is ready again", 1)
	api.Delete(metadataPath, "vllm-0")
	until("its object is gone", 0)
}
