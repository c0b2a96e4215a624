// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/dns/dnsmessage"
	core "k8s.io/api/core/v1"
	discovery "k8s.io/api/discovery/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
)

// sh runs a shell script as root of this namespace.
func sh(script string) error {
	out, err := exec.Command("sh", "-euc", script).CombinedOutput()
	if err != nil {
		return fmt.Errorf("%s: %w: %s", script, err, out)
	}
	return nil
}

// setUpNetwork makes the bridge of the pods, and gives this namespace the addresses of Services. /run is its own, for
// the names of the pods' namespaces.
func setUpNetwork() error {
	return sh(`mount --make-rprivate /
mount -t tmpfs run /run
mkdir -p /run/netns
mount -t proc proc /proc
ip link set lo up
ip link add br0 type bridge
ip addr add ` + podPrefix + `.0.1/16 dev br0
ip link set br0 up
ip route add local ` + services + ` dev lo`)
}

// view is what the API server says about Services. Its methods may be called by any goroutine.
type view struct {
	client *kubernetes.Clientset

	mu sync.Mutex
	// mu guards the fields below.
	services map[string]*core.Service // by NAME.NAMESPACE
	slices   map[string][]discovery.EndpointSlice
}

func (v *view) run(ctx context.Context) {
	for ctx.Err() == nil {
		services, err := v.client.CoreV1().Services("").List(ctx, meta.ListOptions{})
		if err == nil {
			var all *discovery.EndpointSliceList
			if all, err = v.client.DiscoveryV1().EndpointSlices("").List(ctx, meta.ListOptions{}); err == nil {
				v.mu.Lock()
				v.services, v.slices = map[string]*core.Service{}, map[string][]discovery.EndpointSlice{}
				for i := range services.Items {
					v.services[services.Items[i].Name+"."+services.Items[i].Namespace] = &services.Items[i]
				}
				for _, s := range all.Items {
					name := s.Labels[discovery.LabelServiceName] + "." + s.Namespace
					v.slices[name] = append(v.slices[name], s)
				}
				v.mu.Unlock()
			}
		}
		pause(ctx, 100*time.Millisecond)
	}
}

func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// endpoints returns the addresses of a Service's ready endpoints, and their port of a name. Services that publish
// addresses that are not ready are not used here.
func (v *view) endpoints(service, port string) (addresses []string, number int32) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, s := range v.slices[service] {
		for _, p := range s.Ports {
			if p.Name != nil && *p.Name == port && p.Port != nil {
				number = *p.Port
			}
		}
		for _, e := range s.Endpoints {
			if e.Conditions.Ready == nil || *e.Conditions.Ready {
				addresses = append(addresses, e.Addresses...)
			}
		}
	}
	slices.Sort(addresses)
	return slices.Compact(addresses), number
}

// lookup returns the addresses of a name of the cluster.
func (v *view) lookup(name string) (addresses []string, found bool) {
	labels := strings.Split(strings.TrimSuffix(strings.TrimSuffix(name, "."), ".cluster.local"), ".")
	if len(labels) != 3 || labels[2] != "svc" {
		return nil, false
	}
	service := labels[0] + "." + labels[1]
	v.mu.Lock()
	s := v.services[service]
	v.mu.Unlock()
	if s == nil {
		return nil, false
	}
	if s.Spec.ClusterIP != core.ClusterIPNone {
		return []string{s.Spec.ClusterIP}, true
	}
	addresses, _ = v.endpoints(service, "")
	return addresses, true
}

// serveDNS answers names of Services with records that live for a second.
func (v *view) serveDNS(ctx context.Context) {
	socket, err := net.ListenPacket("udp", podPrefix+".0.1:53")
	if err != nil {
		fmt.Fprintln(os.Stderr, "the stand-in for DNS:", err)
		return
	}
	go func() {
		<-ctx.Done()
		socket.Close()
	}()
	for buffer := make([]byte, 4096); ; {
		n, from, err := socket.ReadFrom(buffer)
		if err != nil {
			return
		}
		var m dnsmessage.Message
		if m.Unpack(buffer[:n]) != nil || len(m.Questions) != 1 {
			continue
		}
		q := m.Questions[0]
		answer := dnsmessage.Message{Header: dnsmessage.Header{
			ID: m.ID, Response: true, Authoritative: true,
			RecursionDesired: true, RecursionAvailable: true,
		}, Questions: m.Questions}
		addresses, found := v.lookup(q.Name.String())
		if !found {
			answer.RCode = dnsmessage.RCodeNameError
		} else if q.Type == dnsmessage.TypeA {
			for _, a := range addresses {
				answer.Answers = append(answer.Answers, dnsmessage.Resource{
					Header: dnsmessage.ResourceHeader{Name: q.Name, Class: dnsmessage.ClassINET, TTL: 1},
					Body:   &dnsmessage.AResource{A: netip.MustParseAddr(a).As4()},
				})
			}
		}
		if text, err := answer.Pack(); err == nil {
			_, _ = socket.WriteTo(text, from)
		}
	}
}

// proxy is kube-proxy: it opens the ports of Services with an address, and connects each client to a ready endpoint.
func (v *view) proxy(ctx context.Context) {
	open := map[string]net.Listener{}
	for ctx.Err() == nil {
		wanted := map[string]func() string{}
		v.mu.Lock()
		for name, s := range v.services {
			for _, p := range s.Spec.Ports {
				if address, err := netip.ParseAddr(s.Spec.ClusterIP); err == nil && p.Protocol == core.ProtocolTCP {
					wanted[net.JoinHostPort(address.String(), fmt.Sprint(p.Port))] = func() string {
						addresses, port := v.endpoints(name, p.Name)
						if len(addresses) == 0 {
							return ""
						}
						return net.JoinHostPort(addresses[rand.IntN(len(addresses))], fmt.Sprint(port))
					}
				}
			}
		}
		v.mu.Unlock()
		for at, choose := range wanted {
			if open[at] == nil {
				if l, err := net.Listen("tcp", at); err == nil {
					open[at] = l
					go forward(l, choose)
				}
			}
		}
		for at, l := range open {
			if wanted[at] == nil {
				l.Close()
				delete(open, at)
			}
		}
		pause(ctx, 100*time.Millisecond)
	}
	for _, l := range open {
		l.Close()
	}
}

// forward connects the clients of a port to the endpoints that choose returns.
func forward(l net.Listener, choose func() string) {
	for {
		client, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer client.Close()
			to := choose()
			if to == "" {
				return
			}
			server, err := net.DialTimeout("tcp", to, 5*time.Second)
			if err != nil {
				return
			}
			defer server.Close()
			go func() {
				_, _ = io.Copy(server, client)
				_ = server.(*net.TCPConn).CloseWrite()
			}()
			_, _ = io.Copy(client, server)
		}()
	}
}
