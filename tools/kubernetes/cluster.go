// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	core "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/yaml"
	"k8s.io/client-go/discovery/cached/memory"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/restmapper"
)

const (
	apiPort   = "6443"
	token     = "the-token-of-this-test"
	nodeName  = "node"
	podPrefix = "10.213" // the bridge is podPrefix.0.1
	services  = "10.96.0.0/16"
)

// cluster is the control plane, and the stand-ins for the rest.
type cluster struct {
	version    string
	kubeconfig string
	config     *rest.Config
	client     *kubernetes.Clientset
	objects    *dynamic.DynamicClient
	kinds      *restmapper.DeferredDiscoveryRESTMapper
	view       *view
	kubelet    *kubelet
	stopTasks  context.CancelFunc
	tasks      sync.WaitGroup

	mu        sync.Mutex
	processes []*exec.Cmd // guarded by mu; stopped in reverse order
}

// startCluster starts everything, and returns when the API server is ready.
func startCluster(ctx context.Context, e *env) (c *cluster, err error) {
	c = &cluster{kubeconfig: filepath.Join(e.dir, "kubeconfig")}
	ctx, c.stopTasks = context.WithCancel(ctx)
	if err := setUpNetwork(); err != nil {
		return nil, err
	}
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		return nil, err
	}
	keyFile, certs := filepath.Join(e.dir, "sa.key"), filepath.Join(e.dir, "certs")
	text := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	tokens := filepath.Join(e.dir, "tokens.csv")
	config := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://%s.0.1:%s", certificate-authority: %s/apiserver.crt}}]
users: [{name: u, user: {token: %s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, podPrefix, apiPort, certs, token)
	for file, text := range map[string]string{
		keyFile: string(text), tokens: token + ",admin,admin,system:masters\n",
		c.kubeconfig: config,
	} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	servers := filepath.Join(e.bin, "servers")
	if err := c.start(e.dir, "etcd", servers, "etcd", "--data-dir", filepath.Join(e.dir, "etcd"), "--listen-client-urls",
		"http://127.0.0.1:2379",
		"--advertise-client-urls", "http://127.0.0.1:2379", "--unsafe-no-fsync", "--log-level", "warn"); err != nil {
		return nil, err
	}
	// The API server listens on all addresses: pods reach it at the bridge's.
	if err := c.start(e.dir, "kube-apiserver", servers, "kube-apiserver", "--etcd-servers", "http://127.0.0.1:2379",
		"--bind-address", "0.0.0.0",
		"--advertise-address", podPrefix+".0.1", "--secure-port", apiPort, "--cert-dir", certs, "--service-cluster-ip-range",
		services,
		"--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", keyFile,
		"--service-account-signing-key-file", keyFile,
		"--token-auth-file", tokens, "--authorization-mode", "RBAC", "--endpoint-reconciler-type", "none"); err != nil {
		return nil, err
	}
	c.config = &rest.Config{
		Host: "https://127.0.0.1:" + apiPort, BearerToken: token,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true}, QPS: 500, Burst: 500,
	}
	if c.client, err = kubernetes.NewForConfig(c.config); err != nil {
		return nil, err
	}
	c.kinds = restmapper.NewDeferredDiscoveryRESTMapper(memory.NewMemCacheClient(c.client.Discovery()))
	if c.objects, err = dynamic.NewForConfig(c.config); err != nil {
		return nil, err
	}
	if err := await(ctx, func() string {
		text, err := c.client.RESTClient().Get().AbsPath("/readyz").DoRaw(ctx)
		if err != nil {
			return fmt.Sprintf("kube-apiserver is not ready: %v %s", err, text)
		}
		return ""
	}); err != nil {
		return nil, err
	}
	info, err := c.client.Discovery().ServerVersion()
	if err != nil {
		return nil, err
	}
	c.version = info.GitVersion
	if err := c.start(e.dir, "kube-controller-manager", servers, "kube-controller-manager", "--kubeconfig", c.kubeconfig,
		"--authentication-kubeconfig", c.kubeconfig, "--authorization-kubeconfig", c.kubeconfig, "--leader-elect=false",
		"--bind-address", "127.0.0.1",
		"--service-account-private-key-file", keyFile, "--root-ca-file", filepath.Join(certs, "apiserver.crt"),
		"--controllers",
		"deployment-controller,replicaset-controller,endpointslice-controller,serviceaccount-controller,root-ca-certificate-publisher-controller,"+
			"disruption-controller,garbage-collector-controller,namespace-controller,horizontal-pod-autoscaler-controller"); err != nil {
		return nil, err
	}
	node := &core.Node{ObjectMeta: meta.ObjectMeta{
		Name:   nodeName,
		Labels: map[string]string{"kubernetes.io/hostname": nodeName},
	}}
	if _, err := c.client.CoreV1().Nodes().Create(ctx, node, meta.CreateOptions{}); err != nil {
		return nil, err
	}
	c.view = &view{client: c.client}
	c.kubelet = newKubelet(e, c.client)
	for _, task := range []func(context.Context){c.view.run, c.view.serveDNS, c.view.proxy, c.kubelet.run} {
		c.tasks.Go(func() { task(ctx) })
	}
	return c, nil
}

// start starts a process whose output goes to a file of its name.
func (c *cluster) start(dir, name string, args ...string) error {
	log, err := os.Create(filepath.Join(dir, name+".log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(args[0], args[1:]...)
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = log, log, &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		return err
	}
	c.mu.Lock()
	c.processes = append(c.processes, cmd)
	c.mu.Unlock()
	return nil
}

func (c *cluster) stop() {
	c.stopTasks()
	c.tasks.Wait()
	for i := len(c.processes) - 1; i >= 0; i-- {
		_ = c.processes[i].Process.Signal(syscall.SIGTERM)
		timer := time.AfterFunc(5*time.Second, func() { _ = c.processes[i].Process.Kill() })
		_ = c.processes[i].Wait()
		timer.Stop()
	}
}

// documents returns the objects of a YAML text.
func documents(text []byte) (all []*unstructured.Unstructured, err error) {
	decoder := yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096)
	for {
		u := &unstructured.Unstructured{}
		if err := decoder.Decode(u); err != nil {
			if err.Error() == "EOF" {
				return all, nil
			}
			return nil, err
		}
		if len(u.Object) > 0 {
			all = append(all, u)
		}
	}
}

// apply applies the objects of a file, which must have no field that the API server does not know.
func (c *cluster) apply(ctx context.Context, file string) error {
	text, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if err := c.applyText(ctx, string(text)); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

func (c *cluster) applyText(ctx context.Context, text string) error {
	all, err := documents([]byte(text))
	if err != nil {
		return err
	}
	for _, u := range all {
		// Definitions of resources take a moment to be served.
		err := awaitFor(ctx, 30*time.Second, func() string {
			if err := c.applyOne(ctx, u); err != nil {
				return fmt.Sprintf("%s %s: %v", u.GetKind(), u.GetName(), err)
			}
			return ""
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// remove removes the objects of a text.
func (c *cluster) remove(ctx context.Context, text string) error {
	all, err := documents([]byte(text))
	if err != nil {
		return err
	}
	for _, u := range all {
		resource, err := c.resource(u)
		if err != nil {
			return err
		}
		if err := resource.Delete(ctx, u.GetName(), meta.DeleteOptions{}); err != nil && !errors.IsNotFound(err) {
			return err
		}
	}
	return nil
}

func (c *cluster) applyOne(ctx context.Context, u *unstructured.Unstructured) error {
	resource, err := c.resource(u)
	if err != nil {
		return err
	}
	data, err := u.MarshalJSON()
	if err != nil {
		return err
	}
	force := true
	_, err = resource.Patch(ctx, u.GetName(), "application/apply-patch+yaml", data,
		meta.PatchOptions{FieldManager: "test", Force: &force, FieldValidation: "Strict"})
	return err
}

// resource returns the client of an object's kind and namespace.
func (c *cluster) resource(u *unstructured.Unstructured) (dynamic.ResourceInterface, error) {
	kind := u.GroupVersionKind()
	mapping, err := c.kinds.RESTMapping(schema.GroupKind{Group: kind.Group, Kind: kind.Kind}, kind.Version)
	if err != nil {
		c.kinds.Reset() // its definition may be new
		return nil, err
	}
	resource := c.objects.Resource(mapping.Resource)
	if mapping.Scope.Name() == "namespace" {
		namespace := u.GetNamespace()
		if namespace == "" {
			namespace = "default"
		}
		return resource.Namespace(namespace), nil
	}
	return resource, nil
}

// helm runs Helm.
func (e *env) helm(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, filepath.Join(e.bin, "helm"), append(args, "--kubeconfig", e.kubeconfig)...)
	cmd.Env = append(os.Environ(), "HELM_CACHE_HOME="+e.dir, "HELM_CONFIG_HOME="+e.dir, "HELM_DATA_HOME="+e.dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("helm %s: %w: %s", strings.Join(args[:min(2, len(args))], " "), err, out)
	}
	return string(out), nil
}

// get returns the body of a pod's response.
func get(ctx context.Context, client *http.Client, url string) (int, error) {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, err
	}
	response, err := client.Do(r)
	if err != nil {
		return 0, err
	}
	defer response.Body.Close()
	return response.StatusCode, nil
}
