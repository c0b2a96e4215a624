// SPDX-License-Identifier: Apache-2.0

package pods_test

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/fleet/pods"
	"github.com/kvroute/kvroute/internal/fixtures"
	"github.com/kvroute/kvroute/internal/kube"
	"github.com/kvroute/kvroute/internal/kubetest"
)

// The paths of resources.
const (
	podsPath   = "/api/v1/namespaces/models/pods"
	poolsPath  = "/apis/inference.networking.k8s.io/v1/namespaces/models/inferencepools"
	slicesPath = "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices"
)

// cluster is a server, and a finder that follows it.
type cluster struct {
	*kubetest.Server

	t      *testing.T
	finder *pods.Finder
	wake   chan struct{}
	log    *fixtures.Log

	mu sync.Mutex
	// mu guards the fields below.
	records []fleet.Record
	now     time.Duration // ahead of the clock
	calls   int
}

// find runs a finder with sources. Workers without models get one.
func find(t *testing.T, s *kubetest.Server, sources ...pods.Source) *cluster {
	c := &cluster{Server: s, t: t, wake: make(chan struct{}, 1), log: &fixtures.Log{}}
	log := slog.New(slog.NewTextHandler(c.log, nil))
	client, err := kube.New(kube.Config{Server: s.URL, CAFile: s.CAFile, TokenFile: s.TokenFile, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	for i := range sources {
		if len(sources[i].Worker.Models) == 0 {
			sources[i].Worker.Models = []string{"m"}
		}
		if err := sources[i].Check(fleet.Networks{}); err != nil {
			t.Fatal(err)
		}
	}
	c.finder, err = pods.New(pods.Config{
		Client: client, Sources: sources, Namespace: "models", Pod: "kvroute-0", Log: log,
		Now: func() time.Time {
			c.mu.Lock()
			defer c.mu.Unlock()
			return time.Now().Add(c.now)
		},
		Changed: func(records []fleet.Record) error {
			c.mu.Lock()
			c.records = records
			c.calls++
			c.mu.Unlock()
			select {
			case c.wake <- struct{}{}:
			default:
			}
			return nil
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() {
		if err := c.finder.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return c
}

// workers returns the records as lines "name address state".
func (c *cluster) workers() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	var list []string
	for i := range c.records {
		r := &c.records[i]
		text := strings.TrimPrefix(r.Name, "models/") + " " + r.Address
		if r.NotReady != "" {
			text += " not ready"
		}
		if r.Draining {
			text += " draining"
		}
		list = append(list, text)
	}
	return strings.Join(list, ", ")
}

func (c *cluster) until(what string, is func() bool) {
	c.t.Helper()
	limit := time.After(30 * time.Second)
	for !is() {
		select {
		case <-c.wake:
		case <-time.After(10 * time.Millisecond):
		case <-limit:
			c.t.Fatalf("no %s after 30s; workers: %s; states: %+v\n%s", what, c.workers(), c.finder.States(), c.log)
		}
	}
}

// has waits until these are the workers.
func (c *cluster) has(want string) {
	c.t.Helper()
	c.until("workers "+want, func() bool { return c.workers() == want })
}

// says waits until the state of a source mentions a text.
func (c *cluster) says(source int, text string) {
	c.t.Helper()
	c.until("state "+text, func() bool { return strings.Contains(fmt.Sprintf("%+v", c.finder.States()[source]), text) })
}

// id returns the id of a worker.
func (c *cluster) id(name string) uint64 {
	c.t.Helper()
	r := c.record(name)
	return r.ID()
}

func (c *cluster) record(name string) fleet.Record {
	c.t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	at := slices.IndexFunc(c.records, func(r fleet.Record) bool { return strings.TrimPrefix(r.Name, "models/") == name })
	if at < 0 {
		c.t.Fatalf("there is no worker %s", name)
	}
	return c.records[at]
}

// advance moves the finder's clock.
func (c *cluster) advance(d time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now += d
}

// onePod is the JSON of a pod.
type onePod struct {
	name, uid, ip string
	labels        string // JSON object
	annotations   string
	ready         string // True, False, or empty for no condition
	phase         string
	created       string
	owner         string
	deleted       bool
}

func (p onePod) String() string {
	or := func(s, byDefault string) string {
		if s == "" {
			return byDefault
		}
		return s
	}
	text := fmt.Sprintf(`{"apiVersion":"v1","kind":"Pod","metadata":{"name":%q,"uid":%q,"labels":%s,"annotations":%s,"creationTimestamp":%q`,
		p.name, or(p.uid, "uid-"+p.name), or(p.labels, `{"app":"llm"}`), or(p.annotations, `{}`), or(p.created, "2026-11-27T10:00:00Z"))
	if p.deleted {
		text += `,"deletionTimestamp":"2026-11-27T10:05:30Z","deletionGracePeriodSeconds":30`
	}
	if p.owner != "" {
		text += fmt.Sprintf(`,"ownerReferences":[{"apiVersion":"apps/v1","kind":"ReplicaSet","name":"x","uid":%q,"controller":true}]`, p.owner)
	}
	text += fmt.Sprintf(`},"spec":{"containers":[{"name":"engine"}]},"status":{"phase":%q,"podIP":%q`, or(p.phase, "Running"), p.ip)
	if p.ready != "" {
		text += fmt.Sprintf(`,"conditions":[{"type":"Initialized","status":"True"},{"type":"Ready","status":%q,"reason":"ContainersNotReady","message":"containers with unready status: [engine]"}]`, p.ready)
	}
	return text + `}}`
}

// selected is a source that selects app=llm at port 8000.
func selected() pods.Source { return pods.Source{Selector: "app=llm", Ports: []int{8000}} }

// The life of a pod: it starts, becomes ready, not ready, ready again, and is deleted.
func TestTheLifeOfAPod(t *testing.T) {
	s := kubetest.New(t)
	c := find(t, s, selected())
	p := onePod{name: "a"}
	s.Put(podsPath, p.String()) // no address yet
	p.ip, p.ready = "10.0.0.1", "False"
	s.Put(podsPath, p.String())
	c.says(0, "NeverReady:1")
	c.has("")
	p.ready = "True"
	s.Put(podsPath, p.String())
	c.has("a 10.0.0.1:8000")
	id := c.id("a")
	p.ready = "False"
	s.Put(podsPath, p.String())
	c.has("a 10.0.0.1:8000 not ready")
	if got, want := c.record("a").NotReady, "its pod is not ready: containers with unready status: [engine]"; got != want {
		t.Errorf("the cause is %q, want %q", got, want)
	}
	p.ready = "True"
	s.Put(podsPath, p.String())
	c.has("a 10.0.0.1:8000")
	p.deleted = true
	s.Put(podsPath, p.String())
	c.has("a 10.0.0.1:8000 draining")
	if r := c.record("a"); r.Pod.Deadline.IsZero() || r.Pod.Name != "a" || r.Pod.Namespace != "models" || r.Pod.UID != "uid-a" {
		t.Errorf("its pod is %+v, want namespace, name, uid and deadline", r.Pod)
	}
	if c.id("a") != id {
		t.Error("the id of the worker has changed")
	}
	c.advance(29 * time.Second)
	s.Put(podsPath, onePod{name: "b", ip: "10.0.0.2", ready: "True"}.String())
	c.has("a 10.0.0.1:8000 draining, b 10.0.0.2:8000")
	c.advance(2 * time.Second)
	s.Put(podsPath, onePod{name: "b", ip: "10.0.0.3", ready: "True"}.String())
	c.has("b 10.0.0.3:8000") // the grace period of a is over
	s.Delete(podsPath, "a")
	s.Delete(podsPath, "b")
	c.has("")
	for _, want := range []string{`"the state of a pod" worker=models/a address=10.0.0.1:8000 state=ready new=true`, `worker=models/a address=10.0.0.1:8000 state="being deleted" new=false`} {
		if !strings.Contains(c.log.String(), want) {
			t.Errorf("the log does not have %s:\n%s", want, c.log)
		}
	}
}

// The same name or the same address with another uid is another worker, with an empty cache.
func TestTheUIDIsTheIdentity(t *testing.T) {
	s := kubetest.New(t)
	c := find(t, s, selected())
	s.Put(podsPath, onePod{name: "a-0", uid: "1", ip: "10.0.0.1", ready: "True"}.String())
	c.has("a-0 10.0.0.1:8000")
	first := c.id("a-0")
	s.Put(podsPath, onePod{name: "a-0", uid: "2", ip: "10.0.0.1", ready: "True"}.String())
	c.until("another id", func() bool { return c.workers() == "a-0 10.0.0.1:8000" && c.id("a-0") != first })
	// A pod that ended keeps its address, which another pod may have got.
	s.Put(podsPath, onePod{name: "b", ip: "10.0.0.1", ready: "True", created: "2026-11-27T11:00:00Z"}.String())
	c.has("b 10.0.0.1:8000")
	c.says(0, "pod models/a-0: its address 10.0.0.1:8000 is that of pod models/b")
	s.Put(podsPath, onePod{name: "b", ip: "10.0.0.1", ready: "True", phase: "Failed"}.String())
	c.has("a-0 10.0.0.1:8000")
}

func TestLabelsAndAnnotationsAreFieldsOfTheWorker(t *testing.T) {
	s := kubetest.New(t)
	source := selected()
	source.Ports = []int{8000, 8001, 8002}
	source.Labels = pods.Labels{Model: "model", Group: "team", BlockSize: "block-size", Events: "events"}
	source.Worker = fleet.Record{Models: []string{"base"}, BlockSize: 16, Taints: []string{"gpu"}}
	c := find(t, s, source)
	s.Put(podsPath, onePod{
		name: "a", ip: "fd00::1", ready: "True", labels: `{"app":"llm","llm-d.ai/role":"prefill-decode","team":"red","block-size":"32"}`,
		annotations: `{"model":"org/Model-1","events":"5557","llm-d.ai/active-ports":"8000, 8002,9000,x"}`,
	}.String())
	s.Put(podsPath, onePod{
		name: "b", ip: "10.0.0.2", ready: "True", labels: `{"app":"llm","llm-d.ai/role":"prefill","block-size":"large","events":"0"}`,
		annotations: `{"inference.networking.k8s.io/active-ports":"8001"}`,
	}.String())
	s.Put(podsPath, onePod{name: "c", ip: "10.0.0.3", ready: "True", labels: `{"app":"llm","llm-d.ai/role":"encode"}`}.String())
	c.has("a:8000 [fd00::1]:8000, a:8002 [fd00::1]:8002, b:8001 10.0.0.2:8001")
	var got strings.Builder
	for _, name := range []string{"a:8000", "a:8002", "b:8001"} {
		r := c.record(name)
		fmt.Fprintln(&got, name, r.Models, r.Role, r.BlockSize, r.Taints, r.Events.Transport, r.Events.Endpoint)
	}
	if want := `a:8000 [org/Model-1] both 32 [gpu group=red] zmq tcp://*:5557
a:8002 [org/Model-1] both 32 [gpu group=red] zmq tcp://*:5559
b:8001 [base] prefill 16 [gpu]  
`; got.String() != want {
		t.Errorf("got\n%swant\n%s", got.String(), want)
	}
	for _, want := range []string{
		`pod models/a: its annotation llm-d.ai/active-ports has "9000", which is none of the ports [8000 8001 8002]: it is ignored`,
		`pod models/a: its annotation llm-d.ai/active-ports has "x"`,
		`pod models/b: its label block-size is "large", want a number of tokens: 16 counts`,
		`pod models/b: its label events is "0", want a port: it is ignored`,
		`pod models/c: its label llm-d.ai/role is "encode", want prefill, decode`,
		"LeftOut:1",
	} {
		c.says(0, want)
	}
}

// The role values are those of llm-d's router at its commit 683100dc.
func TestRoles(t *testing.T) {
	s := kubetest.New(t)
	c := find(t, s, selected())
	want := map[string]string{
		"": "", "decode": "decode", "prefill": "prefill", "prefill-decode": "both", "encode-prefill": "prefill",
		"encode-prefill-decode": "both", "both": "both", "aggregated": "aggregated",
	}
	n, expected := 0, []string{}
	for role := range want {
		n++
		name := "p-" + role
		s.Put(podsPath, onePod{name: name, ip: fmt.Sprint("10.0.0.", n), ready: "True", labels: fmt.Sprintf(`{"app":"llm","llm-d.ai/role":%q}`, role)}.String())
		expected = append(expected, fmt.Sprintf("%s 10.0.0.%d:8000", name, n))
	}
	slices.Sort(expected)
	c.has(strings.Join(expected, ", "))
	for role, kind := range want {
		if got := string(c.record("p-" + role).Role); got != kind {
			t.Errorf("role %q is %q, want %q", role, got, kind)
		}
	}
}

func pool(selector string, ports ...int) string {
	var targets []string
	for _, port := range ports {
		targets = append(targets, fmt.Sprintf(`{"number":%d}`, port))
	}
	return fmt.Sprintf(`{"metadata":{"name":"llm"},"spec":{"selector":{"matchLabels":%s},"targetPorts":[%s],"endpointPickerRef":{"name":"kvroute"}}}`, selector, strings.Join(targets, ","))
}

func TestAPoolIsFollowed(t *testing.T) {
	s := kubetest.New(t)
	s.Put(podsPath, onePod{name: "a", ip: "10.0.0.1", ready: "True"}.String())
	s.Put(podsPath, onePod{name: "b", ip: "10.0.0.2", ready: "True", labels: `{"app":"web","tier":"x"}`}.String())
	c := find(t, s, pods.Source{InferencePool: "llm"})
	c.says(0, "inferencepools.inference.networking.k8s.io llm in namespace models: there is none")
	if !c.finder.Listed() || c.finder.Works() {
		t.Errorf("without a pool listed is %v and works is %v, want true and false", c.finder.Listed(), c.finder.Works())
	}
	s.Put(poolsPath, pool(`{"app":"llm"}`, 8000))
	c.has("a 10.0.0.1:8000")
	id := c.id("a")
	s.Put(poolsPath, pool(`{"app":"llm"}`, 8000, 8001))
	c.has("a:8000 10.0.0.1:8000, a:8001 10.0.0.1:8001")
	if c.id("a:8000") != id {
		t.Error("another port of the pod changed the identity of the first one")
	}
	s.Put(poolsPath, pool(`{"app":"web","tier":"x"}`, 8000))
	c.has("b 10.0.0.2:8000")
	s.Put(poolsPath, pool(`{"app":"llm"}`, 8000))
	c.has("a 10.0.0.1:8000")

	// A pool that is deleted and made again loses nothing.
	s.Delete(poolsPath, "llm")
	c.says(0, "there is none")
	c.has("a 10.0.0.1:8000")
	s.Put(poolsPath, pool(`{"app":"llm"}`, 8000))
	c.until("pool", c.finder.Works)
	c.has("a 10.0.0.1:8000")
	s.Delete(poolsPath, "llm")
	c.says(0, "there is none")
	c.advance(11 * time.Second)
	s.Put(podsPath, onePod{name: "c", ip: "10.0.0.3", ready: "True"}.String())
	c.has("")
}

const oneSlice = `{"metadata":{"name":%q,"labels":{"kubernetes.io/service-name":"llm"}},"addressType":"IPv4","ports":[{"name":"http","port":8000}],"endpoints":[%s]}`

func endpoint(ip, pod, conditions string) string {
	target := ""
	if pod != "" {
		target = fmt.Sprintf(`,"targetRef":{"kind":"Pod","namespace":"models","name":%q,"uid":"uid-%s"}`, pod, pod)
	}
	return fmt.Sprintf(`{"addresses":[%q],"conditions":%s%s}`, ip, conditions, target)
}

// Endpoints of a Service: one address may be in two slices, and slices made by hand have few conditions.
func TestAServiceIsFollowed(t *testing.T) {
	const ready, not = `{"ready":true,"serving":true,"terminating":false}`, `{"ready":false,"serving":false,"terminating":false}`
	s := kubetest.New(t)
	c := find(t, s, pods.Source{Service: "llm"})
	s.Put(slicesPath, fmt.Sprintf(oneSlice, "s1", endpoint("10.0.0.1", "a", ready)+","+endpoint("10.0.0.2", "b", not)))
	s.Put(slicesPath, fmt.Sprintf(oneSlice, "s2", endpoint("10.0.0.1", "a", ready)+","+endpoint("10.0.0.9", "", `{}`)))
	s.Put(slicesPath, strings.Replace(fmt.Sprintf(oneSlice, "other", endpoint("10.0.0.7", "z", ready)), `"llm"`, `"web"`, 1))
	c.has("10.0.0.9:8000 10.0.0.9:8000, a 10.0.0.1:8000")
	c.says(0, "NeverReady:1")
	s.Put(slicesPath, fmt.Sprintf(oneSlice, "s1", endpoint("10.0.0.2", "b", ready)))
	c.has("10.0.0.9:8000 10.0.0.9:8000, a 10.0.0.1:8000, b 10.0.0.2:8000")
	s.Put(slicesPath, fmt.Sprintf(oneSlice, "s2", endpoint("10.0.0.1", "a", `{"ready":false,"serving":true,"terminating":true}`)))
	s.Put(slicesPath, fmt.Sprintf(oneSlice, "s1", endpoint("10.0.0.2", "b", not)))
	c.has("a 10.0.0.1:8000 draining, b 10.0.0.2:8000 not ready")
	s.Delete(slicesPath, "s2")
	c.has("b 10.0.0.2:8000 not ready")
	s.Put(slicesPath, strings.Replace(fmt.Sprintf(oneSlice, "s1", endpoint("10.0.0.2", "b", ready)), `{"name":"http","port":8000}`, `{"port":1},{"port":2}`, 1))
	c.says(0, "pod models/b: it has 2 ports, want one, or the setting ports")
	c.has("")
}

// Two sources that select one pod: the first counts. A source that selects kvroute itself leaves its pods out.
func TestOverlapAndOneself(t *testing.T) {
	s := kubetest.New(t)
	s.Put(podsPath, onePod{name: "a", ip: "10.0.0.1", ready: "True", labels: `{"app":"llm","tier":"x"}`}.String())
	s.Put(podsPath, onePod{name: "kvroute-0", ip: "10.0.0.8", ready: "True", owner: "rs-1"}.String())
	s.Put(podsPath, onePod{name: "kvroute-1", ip: "10.0.0.9", ready: "True", owner: "rs-1"}.String())
	first, second := selected(), selected()
	first.Worker.Models, second.Worker.Models = []string{"one"}, []string{"two"}
	second.Selector = "tier=x"
	c := find(t, s, first, second)
	c.says(1, "pod models/a: pods models/app=llm selects it, too, and counts")
	c.says(0, "pod models/kvroute-0: it is a pod of kvroute itself, which the source should not select")
	c.says(0, "pod models/kvroute-1: it is a pod of kvroute itself")
	c.has("a 10.0.0.1:8000")
	if got := c.record("a").Models[0]; got != "one" {
		t.Errorf("the model is %s, want that of the first source", got)
	}
}

// While the API server is away, nothing is dropped, and afterwards all is right again.
func TestTheAPIMayBeAway(t *testing.T) {
	s := kubetest.New(t)
	s.Put(podsPath, onePod{name: "a", ip: "10.0.0.1", ready: "True"}.String())
	s.Put(podsPath, onePod{name: "b", ip: "10.0.0.2", ready: "True"}.String())
	c := find(t, s, selected())
	c.has("a 10.0.0.1:8000, b 10.0.0.2:8000")
	s.Refuse(func(string, string) int { return 403 })
	c.says(0, `needs a Role in namespace models with the rule {apiGroups: [""], resources: [pods], verbs: [list, watch]}`)
	s.Delete(podsPath, "b")
	if !c.finder.Listed() || c.finder.Works() {
		t.Errorf("listed is %v and works is %v, want true and false", c.finder.Listed(), c.finder.Works())
	}
	if got := c.workers(); got != "a 10.0.0.1:8000, b 10.0.0.2:8000" {
		t.Errorf("while the API is away, the workers are %s", got)
	}
	s.Restart()
	s.Refuse(nil)
	c.has("a 10.0.0.1:8000")
	c.until("working source", c.finder.Works)
}

// A pod with a thousand labels, or with wrong types, spoils nothing for others.
func TestOddPods(t *testing.T) {
	var labels []string
	for i := range 1000 {
		labels = append(labels, fmt.Sprintf(`"label-%d":"%s"`, i, strings.Repeat("v", 63)))
	}
	s := kubetest.New(t)
	c := find(t, s, selected())
	s.Put(podsPath, onePod{name: "a", ip: "10.0.0.1", ready: "True", labels: `{"app":"llm","llm-d.ai/role":"decode",` + strings.Join(labels, ",") + `}`}.String())
	s.Put(podsPath, onePod{name: "b", ip: "not-an-ip", ready: "True"}.String())
	s.Put(podsPath, onePod{name: "c", ip: "127.0.0.1", ready: "True"}.String())
	s.Put(podsPath, onePod{name: "d", ip: "0.0.0.0", ready: "True"}.String())
	s.Put(podsPath, onePod{name: "e", ip: "10.0.0.5", ready: "Unknown"}.String())
	s.Put(podsPath, onePod{name: "f", ip: "10.0.0.6"}.String())
	c.has("a 10.0.0.1:8000")
	if got := c.record("a").Role; got != "decode" {
		t.Errorf("the role is %q, want decode", got)
	}
	for _, want := range []string{`pod models/b: its address "not-an-ip" is no IP address`, "pod models/c: its address is 127.0.0.1:8000, want an address that is neither loopback", "pod models/d: ", "LeftOut:3", "NeverReady:2"} {
		c.says(0, want)
	}
}

// Ten thousand pods are found, and one that changes among them is known within a second.
func TestTenThousandPods(t *testing.T) {
	const n = 10_000
	s := kubetest.New(t)
	for i := range n {
		s.Put(podsPath, onePod{name: fmt.Sprintf("p-%05d", i), ip: fmt.Sprintf("10.1.%d.%d", i/250, i%250+1), ready: "True"}.String())
	}
	c := find(t, s, selected())
	c.until("10,000 workers", func() bool { return c.finder.States()[0].Ready == n })
	c.until("settled watch", c.finder.Works)
	began := time.Now()
	s.Put(podsPath, onePod{name: "p-00042", ip: "10.1.0.43", ready: "False"}.String())
	c.until("change", func() bool { return c.finder.States()[0].NotReady == 1 })
	t.Logf("known after %v", time.Since(began))
	s.Restart()
	s.Delete(podsPath, "p-00042")
	c.until("list after the restart", func() bool { st := c.finder.States()[0]; return st.Ready == n-1 && st.NotReady == 0 })
	if _, pages := s.Lists(); pages < 2*n/500 {
		t.Errorf("%d pages, want two lists in pages of 500", pages)
	}
}

func TestWrongSources(t *testing.T) {
	right := func(change func(*pods.Source)) pods.Source {
		s := selected()
		s.Worker.Models = []string{"m"}
		change(&s)
		return s
	}
	for want, s := range map[string]pods.Source{
		"selector: want exactly one of selector, inference-pool and service": right(func(s *pods.Source) { s.Service = "x" }),
		"selector: want exactly":                                              right(func(s *pods.Source) { s.Selector = "" }),
		"ports: want the ports at which the pods serve":                       right(func(s *pods.Source) { s.Ports = nil }),
		"ports[0] is 70000, want 1 to 65535":                                  right(func(s *pods.Source) { s.Ports = []int{70000} }),
		`service is "A B", want the name of an object`:                        right(func(s *pods.Source) { s.Selector, s.Service = "", "A B" }),
		"labels: endpoints of a Service have no labels of pods: use selector": right(func(s *pods.Source) { s.Selector, s.Service, s.Labels.Role = "", "x", "r" }),
		"worker.models: want the name of the model, or labels.model":          right(func(s *pods.Source) { s.Worker.Models = nil }),
		"worker.address: each pod has its own":                                right(func(s *pods.Source) { s.Worker.Address = "10.0.0.1:80" }),
		"worker.block_size is -1, want 0 or more tokens":                      right(func(s *pods.Source) { s.Worker.BlockSize = -1 }),
	} {
		if err := s.Check(fleet.Networks{}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	}
	s := right(func(s *pods.Source) { s.Worker.Models, s.Labels.Model = nil, "model" })
	if err := s.Check(fleet.Networks{}); err != nil {
		t.Error(err)
	}
}
