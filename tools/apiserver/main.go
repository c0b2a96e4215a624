// SPDX-License-Identifier: Apache-2.0

// Command apiserver is etcd, kube-apiserver and kube-controller-manager in one binary, for `make test-kubernetes`:
// the first argument names the program, and the other arguments are its own.
package main

import (
	"fmt"
	"os"

	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
)

func main() {
	if len(os.Args) < 2 {
		fmt.Fprintln(os.Stderr, "servers: name a program: etcd, kube-apiserver or kube-controller-manager")
		os.Exit(2)
	}
	program := os.Args[1]
	os.Args = os.Args[1:]
	switch program {
	case "etcd":
		etcdmain.Main(os.Args)
	case "kube-apiserver":
		os.Exit(cli.Run(apiserver.NewAPIServerCommand()))
	case "kube-controller-manager":
		os.Exit(cli.Run(controllers.NewControllerManagerCommand()))
	default:
		fmt.Fprintf(os.Stderr, "servers: unknown program %q: use etcd, kube-apiserver or kube-controller-manager\n", program)
		os.Exit(2)
	}
}
