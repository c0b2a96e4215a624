// SPDX-License-Identifier: Apache-2.0

// Command kubernetes tests deploy/helm with a real etcd, kube-apiserver and kube-controller-manager, and Helm.
//
// Stand-ins for the scheduler, the kubelet, kube-proxy and the cluster's DNS run in this process. They start kvroute,
// Envoy, Envoy Gateway and simulated engines as the processes of their pods: each pod has a network namespace of its
// own, with the address of its status, and a root with the volumes of its containers. Users, resources and network
// policies have no effect.
//
// All of it runs in a network namespace without a way out, so no example address can be reached. Requests run from
// the end of an installation until its removal begins. The command fails if one of them fails.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

// env is what the variants share.
type env struct {
	bin     string // folder with servers, helm and envoy-gateway
	kvroute string
	envoy   string
	tree    string // root of the repository
	dir     string // for state and logs
	verbose bool
	*cluster
}

const inside = "KVROUTE_KUBERNETES_INSIDE"

func main() {
	var e env
	var only, crds string
	flag.StringVar(&e.bin, "bin", "", "`folder` with the binaries servers, helm and envoy-gateway")
	flag.StringVar(&e.kvroute, "kvroute", "", "`path` of kvroute")
	flag.StringVar(&e.envoy, "envoy", "", "`path` of Envoy, without shared libraries besides the machine's")
	flag.StringVar(&e.tree, "tree", ".", "root `folder` of the repository")
	flag.StringVar(&crds, "crds", "", "comma-separated `files` of definitions of custom resources")
	flag.StringVar(&only, "only", "", "run only the variants whose `name` contains this")
	flag.BoolVar(&e.verbose, "v", false, "print each step")
	flag.Parse()
	for _, path := range []*string{&e.bin, &e.kvroute, &e.envoy, &e.tree} {
		*path, _ = filepath.Abs(*path)
	}
	if os.Getenv(inside) == "" {
		os.Exit(enter())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := e.run(ctx, only, strings.FieldsFunc(crds, func(r rune) bool { return r == ',' }))
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "test-kubernetes:", err)
		os.Exit(1)
	}
}

// enter runs this command again in a user, network and mount namespace of its own.
func enter() int {
	for _, tool := range []string{"ip", "nsenter", "mount", "unshare"} {
		if _, err := exec.LookPath(tool); err != nil {
			fmt.Fprintf(os.Stderr, "test-kubernetes: the command %s is missing: install iproute2 and util-linux\n", tool)
			return 1
		}
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr, cmd.Env = os.Stdin, os.Stdout, os.Stderr, append(os.Environ(), inside+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWNS | syscall.CLONE_NEWPID,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
		Pdeathsig:   syscall.SIGKILL,
	}
	signal.Ignore(os.Interrupt) // the child gets it too, and ends in order
	err := cmd.Run()
	if exit, ok := errors.AsType[*exec.ExitError](err); ok {
		return max(1, exit.ExitCode())
	}
	if err != nil {
		fmt.Fprintf(os.Stderr,
			"test-kubernetes: no network namespace can be made: %v: run it where `unshare -rn true` works "+
				"(as root, or with kernel.unprivileged_userns_clone=1 and without kernel.apparmor_restrict_unprivileged_userns)\n",
			err)
		return 1
	}
	return 0
}

// run starts the cluster and runs the variants. After an error the state and the logs stay.
func (e *env) run(ctx context.Context, only string, crds []string) (err error) {
	begun := time.Now()
	if e.dir, err = os.MkdirTemp("", "kvroute-kubernetes-"); err != nil {
		return err
	}
	if e.cluster, err = startCluster(ctx, e); err != nil {
		return fmt.Errorf("%w (logs: %s)", err, e.dir)
	}
	fmt.Printf("kube-apiserver %s is ready after %.1f s\n", e.version, time.Since(begun).Seconds())
	total := tally{}
	err = e.runVariants(ctx, only, crds, &total)
	e.cluster.stop()
	if err != nil {
		return fmt.Errorf("%w (logs: %s)", err, e.dir)
	}
	fmt.Println(total.text("all", begun))
	return os.RemoveAll(e.dir)
}

func (e *env) runVariants(ctx context.Context, only string, crds []string, total *tally) error {
	for _, file := range crds {
		if err := e.apply(ctx, file); err != nil {
			return err
		}
	}
	ran := 0
	for _, v := range variants {
		if !strings.Contains(v.name, only) {
			continue
		}
		begun, counts := time.Now(), tally{}
		err := v.run(e, ctx, &counts)
		total.add(&counts)
		if n := len(counts.failures); err == nil && n > 0 {
			err = fmt.Errorf("%d of %d requests failed: %s", n, counts.requests, strings.Join(counts.failures[:min(5, n)], "; "))
		}
		if err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		fmt.Printf("%s: %s\n", counts.text(v.name, begun), v.what)
		ran++
	}
	if ran == 0 {
		return fmt.Errorf("no variant has %q in its name", only)
	}
	return nil
}

// await calls f every 100 ms until it returns "", for two minutes. The error is the last text of f.
func await(ctx context.Context, f func() string) error {
	return awaitFor(ctx, 2*time.Minute, f)
}

func awaitFor(ctx context.Context, limit time.Duration, f func() string) error {
	for end := time.Now().Add(limit); ; {
		text := f()
		if text == "" {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("not in %v: %s", limit, text)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(100 * time.Millisecond):
		}
	}
}
