// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"context"
	"encoding/json"
	"sync"

	"github.com/kvroute/kvroute/internal/kube"
)

// dynamoReady is the label of the slices whose endpoints are Dynamo's pods.
const dynamoReady = "nvidia.com/dynamo-discovery-enabled=true"

// dynamoMetadata is an object DynamoWorkerMetadata: the records of one pod, by the names of the buckets and then by
// key.
type dynamoMetadata struct {
	kube.Object
	Spec struct {
		Data struct {
			Endpoints map[string]json.RawMessage `json:"endpoints"`
			Cards     map[string]json.RawMessage `json:"model_cards"`
			Channels  map[string]json.RawMessage `json:"event_channels"`
			Sources   map[string]json.RawMessage `json:"event_sources"`
		} `json:"data"`
	} `json:"spec"`
}

// pod is the name of the pod: that of the object, or with several containers of a pod that of its owner.
func (m *dynamoMetadata) pod() string {
	for _, owner := range m.Metadata.Owners {
		if owner.Controller {
			return owner.Name
		}
	}
	return m.Metadata.Name
}

// dynamoSlice is an EndpointSlice.
type dynamoSlice struct {
	kube.Object
	Endpoints []struct {
		Conditions struct {
			Ready *bool `json:"ready"` // nil = true
		} `json:"conditions"`
		Target struct {
			Name string `json:"name"`
		} `json:"targetRef"`
	} `json:"endpoints"`
}

// followKubernetes follows the objects of Dynamo's workers until ctx ends. As for Dynamo's own frontends, an object
// counts while a slice says that its pod is ready.
func (d *Dynamo) followKubernetes(ctx context.Context) error {
	changed := make(chan struct{}, 1)
	wake := func() {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	in := d.conf.KubernetesNamespace
	objects := kube.NewSet[dynamoMetadata](d.conf.Kubernetes, kube.Resource{
		Group: "nvidia.com", Version: "v1alpha1", Name: "dynamoworkermetadatas", Namespace: in,
	}, kube.SetConfig[dynamoMetadata]{Changed: wake})
	slices := kube.NewSet[dynamoSlice](d.conf.Kubernetes, kube.Resource{
		Group: "discovery.k8s.io", Version: "v1", Name: "endpointslices", Namespace: in, Selector: dynamoReady,
	}, kube.SetConfig[dynamoSlice]{Changed: wake})
	var sets sync.WaitGroup
	defer sets.Wait()
	sets.Go(func() { _ = objects.Run(ctx) }) // ends with ctx only
	sets.Go(func() { _ = slices.Run(ctx) })
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		records, listed := objects.All()
		ends, alsoListed := slices.All()
		if listed && alsoListed && d.replace(recordsOfPods(records, ends)) {
			d.view()
		}
	}
}

// recordsOfPods returns the records of the pods that are ready, by the keys that they would have in another store.
func recordsOfPods(objects map[string]*dynamoMetadata, slices map[string]*dynamoSlice) map[string][]byte {
	ready := make(map[string]bool)
	for _, s := range slices {
		for _, e := range s.Endpoints {
			if is := e.Conditions.Ready; is == nil || *is {
				ready[s.Metadata.Namespace+"/"+e.Target.Name] = true
			}
		}
	}
	all := make(map[string][]byte)
	for _, o := range objects {
		if !ready[o.Metadata.Namespace+"/"+o.pod()] {
			continue
		}
		data := &o.Spec.Data
		for bucket, records := range map[string]map[string]json.RawMessage{
			bucketInstances: data.Endpoints, bucketModels: data.Cards, bucketChannels: data.Channels, bucketSources: data.Sources,
		} {
			for key, record := range records {
				all[bucket+"/"+key] = record
			}
		}
	}
	return all
}
