// SPDX-License-Identifier: Apache-2.0

package pods_test

import (
	"strings"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/internal/kubetest"
)

// replayed is a finder that reads recorded answers of a kube-apiserver. The answer to a watch of a held path waits for
// next.
func replayed(t *testing.T, recording, held string, source pods.Source) (c *cluster, next func()) {
	t.Helper()
	steps := make(chan struct{})
	s := kubetest.New(t)
	s.Replay(recording, func(e *kubetest.Exchange) {
		if e.Query.Has("watch") && (e.Path == held || e.Path == podsPath) {
			if e.Path != held {
				<-t.Context().Done()
			}
			select {
			case <-steps:
			case <-t.Context().Done():
			}
		}
	})
	c = find(t, s, source)
	return c, func() {
		t.Helper()
		select {
		case steps <- struct{}{}:
		case <-time.After(time.Minute):
			t.Fatalf("no further watch after a minute; workers: %s; states: %+v\n%s", c.workers(), c.finder.States(), c.log)
		}
	}
}

// A real server answers with pages, changes, a version that is too old after its restart, a page that is too old after a
// compaction, and statuses for a missing verb and an expired token. The workers stay, and are right afterwards.
func TestRecordedPods(t *testing.T) {
	for _, recording := range []string{"kube-apiserver-1.34", "kube-apiserver-1.33"} {
		t.Run(recording, func(t *testing.T) {
			t.Parallel()
			c, next := replayed(t, recording, podsPath, selected())
			c.has("a 10.0.0.1:8000, b 10.0.0.2:8000")
			next() // the watch with changes: c comes, and gets another label
			const both = "a 10.0.0.1:8000 not ready, b 10.0.0.2:8000 draining"
			c.has(both)
			next() // 410 in a watch, then 410 for a page, then the whole list
			next() // 403 for the watch, 403 for a list, 401 for a list, then the list in pages
			c.says(0, "status 401")
			if c.workers() != both {
				t.Errorf("while the server refuses requests the workers are %s, want %s", c.workers(), both)
			}
			next() // the watch with the end of b
			c.has("a 10.0.0.1:8000 not ready")
			c.until("end of the error", func() bool { return c.finder.States()[0].Error == "" })
			for _, want := range []string{
				`watch pods in namespace models: status 403: pods is forbidden: User `,
				`list pods in namespace models: status 403`, `needs a Role in namespace models with the rule`,
				`list pods in namespace models: status 401: Unauthorized; the server does not accept the token in `,
				"Kubernetes can be read again",
			} {
				if !strings.Contains(c.log.String(), want) {
					t.Errorf("the log does not have %s:\n%s", want, c.log)
				}
			}
			if strings.Contains(c.log.String(), "status 410") {
				t.Errorf("an expired version counts as a failure:\n%s", c.log)
			}
		})
	}
}

func TestRecordedServiceAndPool(t *testing.T) {
	c, next := replayed(t, "kube-apiserver-1.34", slicesPath, pods.Source{Service: "vllm"})
	c.has("a 10.0.0.1:8000")
	next()
	c.has("a 10.0.0.1:8000 draining")

	// The definition of InferencePool is missing at first. Then the pool is there, and then it is deleted.
	c, next = replayed(t, "kube-apiserver-1.34", poolsPath, pods.Source{InferencePool: "llm"})
	c.has("a 10.0.0.1:8000, b 10.0.0.2:8000")
	if want := "install its CustomResourceDefinition"; !strings.Contains(c.log.String(), want) {
		t.Errorf("the log does not have %s:\n%s", want, c.log)
	}
	next()
	c.says(0, "there is none")
	c.has("a 10.0.0.1:8000, b 10.0.0.2:8000")
}
