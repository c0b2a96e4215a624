// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

// kubelet is the scheduler and the kubelet of the only node. It binds each pod, and runs a goroutine for each of them.
type kubelet struct {
	env    *env
	client *kubernetes.Clientset

	mu sync.Mutex
	// mu guards the fields below.
	pods     map[types.UID]*pod
	number   int
	problems []string // containers that ended by themselves, and liveness probes that failed
}

func newKubelet(e *env, client *kubernetes.Clientset) *kubelet {
	return &kubelet{env: e, client: client, pods: map[types.UID]*pod{}}
}

func (k *kubelet) run(ctx context.Context) {
	var running sync.WaitGroup
	defer running.Wait()
	for ctx.Err() == nil {
		list, err := k.client.CoreV1().Pods("").List(ctx, meta.ListOptions{})
		if err != nil {
			pause(ctx, time.Second)
			continue
		}
		k.killAbsent(list.Items)
		for i := range list.Items {
			object := &list.Items[i]
			if object.Spec.NodeName == "" && object.DeletionTimestamp == nil {
				bind := &core.Binding{
					ObjectMeta: meta.ObjectMeta{Name: object.Name, Namespace: object.Namespace},
					Target:     core.ObjectReference{Kind: "Node", Name: nodeName},
				}
				_ = k.client.CoreV1().Pods(object.Namespace).Bind(ctx, bind, meta.CreateOptions{}) // again at the next step
				continue
			}
			k.mu.Lock()
			p := k.pods[object.UID]
			if p == nil {
				k.number++
				p = &pod{k: k, object: object, number: k.number, ip: fmt.Sprintf("%s.%d.%d", podPrefix, 1+k.number/250,
					1+k.number%250), deleted: make(chan struct{})}
				p.dir = filepath.Join(k.env.dir, "pods", fmt.Sprintf("%03d-%s", k.number, object.Name))
				k.pods[object.UID] = p
				running.Go(func() { p.run(ctx) })
			}
			k.mu.Unlock()
			if object.DeletionTimestamp != nil {
				p.remove(time.Duration(*object.DeletionGracePeriodSeconds) * time.Second)
			}
		}
		pause(ctx, 100*time.Millisecond)
	}
}

// killAbsent stops the pods whose objects were removed without a grace period.
func (k *kubelet) killAbsent(items []core.Pod) {
	known := map[types.UID]bool{}
	for i := range items {
		known[items[i].UID] = true
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for uid, p := range k.pods {
		if !known[uid] {
			p.remove(0)
		}
	}
}

func (k *kubelet) problem(format string, args ...any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.problems = append(k.problems, fmt.Sprintf(format, args...))
}

// takeProblems returns the problems since the last call.
func (k *kubelet) takeProblems() []string {
	k.mu.Lock()
	defer k.mu.Unlock()
	all := k.problems
	k.problems = nil
	return all
}

// pod is one pod of the node.
type pod struct {
	k      *kubelet
	object *core.Pod
	number int
	ip     string
	dir    string

	once    sync.Once
	deleted chan struct{} // closed when the pod gets a deletionTimestamp
	grace   time.Duration // set before deleted is closed; 0 kills the containers
}

// remove has the pod's goroutine stop its containers. Later calls have no effect.
func (p *pod) remove(grace time.Duration) {
	p.once.Do(func() {
		p.grace = grace
		close(p.deleted)
	})
}

// run starts the pod's containers, follows their probes, and stops them when the pod is deleted.
func (p *pod) run(ctx context.Context) {
	defer func() {
		_ = sh(fmt.Sprintf("ip netns del p%d; ip link del v%d 2>/dev/null || true", p.number, p.number))
		zero := int64(0)
		_ = p.k.client.CoreV1().Pods(p.object.Namespace).Delete(context.WithoutCancel(ctx), p.object.Name,
			meta.DeleteOptions{GracePeriodSeconds: &zero})
	}()
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	var tasks sync.WaitGroup
	defer tasks.Wait()
	defer cancel()
	if err := p.prepare(ctx); err != nil && !p.removed() {
		p.k.problem("%s: %v", p.object.Name, err)
		return
	}
	tasks.Go(func() { p.refresh(inner) })
	for i := range p.object.Spec.InitContainers {
		if err := p.command(inner, &p.object.Spec.InitContainers[i]).Run(); err != nil {
			p.k.problem("%s: the init container %s: %v", p.object.Name, p.object.Spec.InitContainers[i].Name, err)
			return
		}
	}
	var all []*container
	for i := range p.object.Spec.Containers {
		c := &container{pod: p, spec: &p.object.Spec.Containers[i]}
		if err := c.start(inner); err != nil {
			p.k.problem("%s: the container %s: %v", p.object.Name, c.spec.Name, err)
			return
		}
		all = append(all, c)
	}
	stopped := false
	for last := ""; !stopped; {
		ready := true
		for _, c := range all {
			ready = c.probe(inner) && ready
		}
		if state := fmt.Sprint(ready); state != last {
			if p.setStatus(ctx, ready) == nil {
				last = state
			}
		}
		select {
		case <-p.deleted:
			stopped = true
		case <-ctx.Done():
			return
		case <-time.After(200 * time.Millisecond):
		}
	}
	var ending sync.WaitGroup
	for _, c := range all {
		ending.Go(func() { c.stop(inner, p.grace) })
	}
	ending.Wait()
}

// prepare makes the pod's network namespace and its volumes.
func (p *pod) prepare(ctx context.Context) error {
	if err := os.MkdirAll(p.dir, 0o755); err != nil {
		return err
	}
	resolver := "nameserver " + podPrefix + ".0.1\nsearch " + p.object.Namespace + ".svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5\n"
	if err := os.WriteFile(filepath.Join(p.dir, "resolv.conf"), []byte(resolver), 0o644); err != nil {
		return err
	}
	if err := await(ctx, func() string {
		if err := p.writeVolumes(ctx); err != nil {
			return err.Error()
		}
		return ""
	}); err != nil {
		return err
	}
	return sh(fmt.Sprintf(`ip netns add p%[1]d
ip link add v%[1]d type veth peer name eth0 netns p%[1]d
ip link set v%[1]d master br0 up
ip -n p%[1]d link set lo up
ip -n p%[1]d addr add %[2]s/16 dev eth0
ip -n p%[1]d link set eth0 up
ip -n p%[1]d route add default via %[3]s.0.1`, p.number, p.ip, podPrefix))
}

func (p *pod) removed() bool {
	select {
	case <-p.deleted:
		return true
	default:
		return false
	}
}

func (p *pod) volume(name string) string { return filepath.Join(p.dir, "volumes", name) }

// refresh writes changed ConfigMaps and Secrets again.
func (p *pod) refresh(ctx context.Context) {
	for ctx.Err() == nil {
		pause(ctx, time.Second)
		_ = p.writeVolumes(ctx) // the objects may be gone
	}
}

// writeVolumes writes the files of the pod's volumes.
func (p *pod) writeVolumes(ctx context.Context) error {
	for i := range p.object.Spec.Volumes {
		v := &p.object.Spec.Volumes[i]
		files, err := p.files(ctx, &v.VolumeSource)
		if err != nil {
			return fmt.Errorf("the volume %s: %w", v.Name, err)
		}
		if err := os.MkdirAll(p.volume(v.Name), 0o777); err != nil {
			return err
		}
		for name, text := range files {
			file := filepath.Join(p.volume(v.Name), name)
			if old, err := os.ReadFile(file); err == nil && string(old) == text {
				continue
			}
			if err := os.WriteFile(file+".new", []byte(text), 0o600); err != nil {
				return err
			}
			if err := os.Rename(file+".new", file); err != nil {
				return err
			}
		}
	}
	return nil
}

// files returns the files of a volume, none for an emptyDir.
func (p *pod) files(ctx context.Context, v *core.VolumeSource) (map[string]string, error) {
	all, namespace := map[string]string{}, p.object.Namespace
	add := func(data map[string]string, items []core.KeyToPath) {
		for _, item := range items {
			all[item.Path] = data[item.Key]
		}
		if len(items) == 0 {
			for k, text := range data {
				all[k] = text
			}
		}
	}
	configMap := func(name string, items []core.KeyToPath) error {
		m, err := p.k.client.CoreV1().ConfigMaps(namespace).Get(ctx, name, meta.GetOptions{})
		if err == nil {
			add(m.Data, items)
		}
		return err
	}
	switch {
	case v.ConfigMap != nil:
		return all, configMap(v.ConfigMap.Name, v.ConfigMap.Items)
	case v.Secret != nil:
		s, err := p.k.client.CoreV1().Secrets(namespace).Get(ctx, v.Secret.SecretName, meta.GetOptions{})
		if err != nil {
			return nil, err
		}
		data := map[string]string{}
		for k, b := range s.Data {
			data[k] = string(b)
		}
		add(data, v.Secret.Items)
	case v.Projected != nil:
		for _, source := range v.Projected.Sources {
			switch {
			case source.ConfigMap != nil:
				if err := configMap(source.ConfigMap.Name, source.ConfigMap.Items); err != nil {
					return nil, err
				}
			case source.ServiceAccountToken != nil:
				text, err := p.token(ctx, source.ServiceAccountToken)
				if err != nil {
					return nil, err
				}
				all[source.ServiceAccountToken.Path] = text
			case source.DownwardAPI != nil:
				for _, item := range source.DownwardAPI.Items {
					all[item.Path] = p.field(item.FieldRef.FieldPath)
				}
			}
		}
	}
	return all, nil
}
