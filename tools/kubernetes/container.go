// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	authentication "k8s.io/api/authentication/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// token returns a token of the pod's service account.
func (p *pod) token(ctx context.Context, want *core.ServiceAccountTokenProjection) (string, error) {
	request := &authentication.TokenRequest{Spec: authentication.TokenRequestSpec{
		ExpirationSeconds: want.ExpirationSeconds,
		BoundObjectRef: &authentication.BoundObjectReference{
			Kind: "Pod", APIVersion: "v1", Name: p.object.Name,
			UID: p.object.UID,
		},
	}}
	if want.Audience != "" {
		request.Spec.Audiences = []string{want.Audience}
	}
	made, err := p.k.client.CoreV1().ServiceAccounts(p.object.Namespace).CreateToken(ctx,
		p.object.Spec.ServiceAccountName, request, meta.CreateOptions{})
	if err != nil {
		return "", err
	}
	return made.Status.Token, nil
}

// field returns a field of the pod for its environment.
func (p *pod) field(path string) string {
	switch path {
	case "metadata.name":
		return p.object.Name
	case "metadata.namespace":
		return p.object.Namespace
	case "metadata.uid":
		return string(p.object.UID)
	case "status.podIP", "status.hostIP":
		return p.ip
	case "spec.nodeName":
		return nodeName
	}
	return ""
}

// setStatus writes the pod's address and readiness.
func (p *pod) setStatus(ctx context.Context, ready bool) error {
	state := core.ConditionFalse
	if ready {
		state = core.ConditionTrue
	}
	now, current := meta.Now(), p.object.DeepCopy()
	current.ResourceVersion = ""
	current.Status = core.PodStatus{
		Phase: core.PodRunning, PodIP: p.ip, PodIPs: []core.PodIP{{IP: p.ip}}, StartTime: &now,
		Conditions: []core.PodCondition{
			{Type: core.PodScheduled, Status: core.ConditionTrue, LastTransitionTime: now},
			{
				Type:   core.PodInitialized,
				Status: core.ConditionTrue, LastTransitionTime: now,
			},
			{Type: core.ContainersReady, Status: state, LastTransitionTime: now},
			{
				Type: core.PodReady, Status: state,
				LastTransitionTime: now,
			},
		},
	}
	_, err := p.k.client.CoreV1().Pods(p.object.Namespace).UpdateStatus(ctx, current, meta.UpdateOptions{})
	return err
}

// environment returns the variables of a container.
func (p *pod) environment(ctx context.Context, c *core.Container) []string {
	all := []string{
		"PATH=/opt/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOSTNAME=" + p.object.Name,
		"KUBERNETES_SERVICE_HOST=" + podPrefix + ".0.1", "KUBERNETES_SERVICE_PORT=" + apiPort,
	}
	for _, e := range c.Env {
		value := e.Value
		if from := e.ValueFrom; from != nil && from.FieldRef != nil {
			value = p.field(from.FieldRef.FieldPath)
		} else if from != nil && from.SecretKeyRef != nil {
			if s, err := p.k.client.CoreV1().Secrets(p.object.Namespace).Get(ctx, from.SecretKeyRef.Name,
				meta.GetOptions{}); err == nil {
				value = string(s.Data[from.SecretKeyRef.Key])
			}
		}
		all = append(all, e.Name+"="+value)
	}
	return all
}

// rootScript makes the root of a container in a mount namespace of its own, and runs the container's command there.
// The arguments are: root, kvroute, Envoy, folder of Envoy Gateway, resolv.conf, pairs of a volume's folder and its
// path up to "--", and the command.
const rootScript = `root=$1 kvroute=$2 envoy=$3 bin=$4 resolver=$5
shift 5
mkdir -p "$root/usr" "$root/proc" "$root/dev" "$root/etc/ssl" "$root/opt/bin" "$root/var" "$root/root"
mkdir -p -m 1777 "$root/tmp"
for link in bin sbin lib lib64; do [ -e "$root/$link" ] || ln -s "usr/$link" "$root/$link"; done
mount --rbind /usr "$root/usr"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --rbind /etc/ssl "$root/etc/ssl"
cp "$resolver" "$root/etc/resolv.conf"
echo "127.0.0.1 localhost" >"$root/etc/hosts"
echo "root:x:0:0:root:/root:/bin/sh" >"$root/etc/passwd"
for pair in "kvroute:$kvroute" "opt/bin/envoy:$envoy" "opt/bin/envoy-gateway:$bin/envoy-gateway"; do
	[ -e "${pair#*:}" ] || continue
	touch "$root/${pair%%:*}"
	mount --bind "${pair#*:}" "$root/${pair%%:*}"
done
while [ "$1" != -- ]; do
	if [ -d "$1" ]; then mkdir -p "$root/$2"; else mkdir -p "$(dirname "$root/$2")" && touch "$root/$2"; fi
	mount --bind "$1" "$root/$2"
	shift 2
done
shift
exec chroot "$root" "$@"
`

// command returns the command of a container, in the pod's network namespace.
func (p *pod) command(ctx context.Context, c *core.Container) *exec.Cmd {
	env := p.environment(ctx, c)
	expand := func(s string) string {
		for _, e := range env {
			name, value, _ := strings.Cut(e, "=")
			s = strings.ReplaceAll(s, "$("+name+")", value)
		}
		return s
	}
	args := []string{
		"--net=/run/netns/p" + fmt.Sprint(p.number), "unshare", "-m", "--propagation", "private", "sh",
		"-euc", rootScript, "pod",
		filepath.Join(p.dir, c.Name), p.k.env.kvroute, p.k.env.envoy, p.k.env.bin, filepath.Join(p.dir, "resolv.conf"),
	}
	mounts := slices.Clone(c.VolumeMounts)
	slices.SortFunc(mounts, func(a, b core.VolumeMount) int { return len(a.MountPath) - len(b.MountPath) })
	for _, m := range mounts {
		args = append(args, filepath.Join(p.volume(m.Name), m.SubPath), m.MountPath)
	}
	args = append(args, "--")
	command := c.Command
	if len(command) == 0 && strings.Contains(c.Image, "kvroute") {
		command = []string{"/kvroute"}
	}
	if len(command) == 0 && strings.Contains(c.Image, "gateway") {
		command = []string{"envoy-gateway"}
	}
	if len(command) == 0 && strings.Contains(c.Image, "envoy") {
		command = []string{"envoy"}
	}
	for _, a := range append(slices.Clone(command), c.Args...) {
		args = append(args, expand(a))
	}
	cmd := exec.Command("nsenter", args...)
	for _, e := range env {
		cmd.Env = append(cmd.Env, expand(e))
	}
	if log, err := os.OpenFile(filepath.Join(p.dir, c.Name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY,
		0o600); err == nil {
		cmd.Stdout, cmd.Stderr = log, log
	}
	return cmd
}

// container is a container that runs. One goroutine uses it.
type container struct {
	pod    *pod
	spec   *core.Container
	cmd    *exec.Cmd
	ended  chan struct{}
	ending atomic.Bool

	started, ready, reported bool
	failures                 int   // of the liveness probe, in sequence
	unready                  int32 // failures of the readiness probe, in sequence
	next, nextLive           time.Time
}

func (c *container) start(ctx context.Context) error {
	c.cmd, c.ended = c.pod.command(ctx, c.spec), make(chan struct{})
	if err := c.cmd.Start(); err != nil {
		return err
	}
	go func() {
		err := c.cmd.Wait()
		if !c.ending.Load() && ctx.Err() == nil {
			c.pod.k.problem("%s: the container %s ended: %v: %s", c.pod.object.Name, c.spec.Name, err, c.pod.tail(c.spec.Name))
		}
		close(c.ended)
	}()
	return nil
}

// tail returns the end of a container's output.
func (p *pod) tail(name string) string {
	text, _ := os.ReadFile(filepath.Join(p.dir, name+".log"))
	return string(bytes.TrimSpace(text[max(0, len(text)-600):]))
}

// probe runs the probes that are due, and returns whether the container is ready.
func (c *container) probe(ctx context.Context) bool {
	select {
	case <-c.ended:
		return false
	default:
	}
	now := time.Now()
	if now.Before(c.next) {
		return c.ready
	}
	period := 500 * time.Millisecond
	if !c.started {
		c.started = c.spec.StartupProbe == nil || c.ask(ctx, c.spec.StartupProbe.ProbeHandler, 2*time.Second) == nil
		c.next = now.Add(period)
		return false
	}
	if live := c.spec.LivenessProbe; live != nil && now.After(c.nextLive) {
		c.nextLive = now.Add(2 * time.Second)
		if err := c.ask(ctx, live.ProbeHandler, 5*time.Second); err == nil {
			c.failures = 0
		} else if c.failures++; c.failures == 3 && !c.reported && ctx.Err() == nil {
			c.reported = true
			c.pod.k.problem("%s: the liveness probe of %s failed 3 times: %v", c.pod.object.Name, c.spec.Name, err)
		}
	}
	if probe := c.spec.ReadinessProbe; probe == nil {
		c.ready = true
	} else if c.ask(ctx, probe.ProbeHandler, time.Duration(probe.TimeoutSeconds)*time.Second) == nil {
		c.ready, c.unready, period = true, 0, time.Duration(probe.PeriodSeconds)*time.Second
	} else if c.unready++; c.unready >= probe.FailureThreshold {
		c.ready = false
	}
	c.next = now.Add(period)
	return c.ready
}

//nolint:gochecknoglobals // probes do not check certificates
var probes = &http.Client{Transport: &http.Transport{
	DisableKeepAlives: true,
	TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
}}

// ask runs a probe or a hook.
func (c *container) ask(ctx context.Context, h core.ProbeHandler, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	switch {
	case h.HTTPGet != nil:
		scheme := strings.ToLower(string(h.HTTPGet.Scheme))
		if scheme == "" {
			scheme = "http"
		}
		status, err := get(ctx, probes, fmt.Sprintf("%s://%s:%d/%s", scheme, c.pod.ip, c.port(h.HTTPGet.Port),
			strings.TrimPrefix(h.HTTPGet.Path, "/")))
		if err == nil && status >= 400 {
			err = fmt.Errorf("status %d", status)
		}
		return err
	case h.TCPSocket != nil:
		connection, err := (&net.Dialer{}).DialContext(ctx, "tcp", fmt.Sprintf("%s:%d", c.pod.ip, c.port(h.TCPSocket.Port)))
		if err == nil {
			connection.Close()
		}
		return err
	case h.Exec != nil:
		args := append([]string{"-t", fmt.Sprint(c.cmd.Process.Pid), "-m", "-n", "-r", "-w"}, h.Exec.Command...)
		cmd := exec.CommandContext(ctx, "nsenter", args...)
		cmd.Env = c.cmd.Env
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
	}
	return nil
}

func (c *container) port(p intstr.IntOrString) int32 {
	for _, named := range c.spec.Ports {
		if named.Name == p.StrVal && p.Type == intstr.String {
			return named.ContainerPort
		}
	}
	return p.IntVal
}

// stop runs the preStop hook, ends the container with SIGTERM, and kills it when its time is over.
func (c *container) stop(ctx context.Context, grace time.Duration) {
	if grace == 0 {
		c.ending.Store(true)
		_ = c.cmd.Process.Kill()
		<-c.ended
		return
	}
	end := time.Now().Add(grace)
	if hook := c.spec.Lifecycle; hook != nil && hook.PreStop != nil {
		if err := c.ask(ctx, core.ProbeHandler{Exec: hook.PreStop.Exec, HTTPGet: hook.PreStop.HTTPGet}, grace); err != nil {
			c.pod.k.problem("%s: the preStop hook of %s: %v", c.pod.object.Name, c.spec.Name, err)
		}
		if hook.PreStop.Sleep != nil {
			pause(ctx, time.Duration(hook.PreStop.Sleep.Seconds)*time.Second)
		}
	}
	c.ending.Store(true)
	_ = c.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-c.ended:
	case <-time.After(max(0, time.Until(end))):
		c.pod.k.problem("%s: %s was killed after %v", c.pod.object.Name, c.spec.Name, grace)
		_ = c.cmd.Process.Kill()
		<-c.ended
	case <-ctx.Done():
		_ = c.cmd.Process.Kill()
		<-c.ended
	}
}
