// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"errors"
	"fmt"

	"github.com/kvroute/kvroute/fleet"
)

// dynamoConfig is the file's "dynamo": where the records of Dynamo's processes are, and
// how workers are made of them. The zero value reads none.
type dynamoConfig struct {
	// Dir is the root of Dynamo's file store: DYN_FILE_KV of its processes.
	Dir string `yaml:"dir,omitempty"`
	// Etcd is Dynamo's own default, DYN_DISCOVERY_BACKEND=etcd.
	Etcd fleet.DynamoEtcd `yaml:"etcd,omitempty"`
	// Kubernetes is DYN_DISCOVERY_BACKEND=kubernetes.
	Kubernetes *kubernetesAPI `yaml:"kubernetes,omitempty"`

	fleet.DynamoRules `yaml:",inline"`
}

func (c *dynamoConfig) on() bool {
	return c.Dir != "" || len(c.Etcd.Endpoints) > 0 || c.Kubernetes != nil
}

// check refuses settings that are insufficient to find workers.
func (c *dynamoConfig) check() error {
	stores := 0
	for _, is := range []bool{c.Dir != "", len(c.Etcd.Endpoints) > 0, c.Kubernetes != nil} {
		if is {
			stores++
		}
	}
	err := cmp.Or(c.DynamoRules.Check(), c.Etcd.Check())
	if err == nil && c.Kubernetes != nil {
		if err = c.Kubernetes.check(); err != nil {
			err = fmt.Errorf("kubernetes.%w", err)
		}
	}
	switch {
	case err != nil:
		return fmt.Errorf("dynamo.%w", err)
	case stores > 1:
		return errors.New("dynamo has more than one of dir, etcd and kubernetes, want one")
	case !c.on() && (c.Namespace != "" || c.Frontend != "" || len(c.AddressMap) > 0):
		return errors.New("dynamo has no dir, etcd or kubernetes: where the records are")
	case c.on() && c.Frontend == "" && len(c.AddressMap) == 0:
		return errors.New("dynamo has neither frontend nor address-map: its records do not say where workers serve HTTP")
	}
	return nil
}

// openDynamo reads the records of Dynamo's processes once if they are files, so that their workers are known
// at the start.
func (s *server) openDynamo() (err error) {
	c := &s.conf.Dynamo
	if !c.on() {
		return nil
	}
	conf := fleet.DynamoConfig{
		Dir: c.Dir, Etcd: c.Etcd, Rules: c.DynamoRules, Networks: s.networks, Changed: s.dynamoChanged,
		Log: s.log, Meter: s.metrics.Meter("fleet"),
	}
	if k := c.Kubernetes; k != nil {
		if conf.Kubernetes, err = k.client(s.log); err != nil {
			return fmt.Errorf("dynamo.kubernetes.%w", err)
		}
		conf.KubernetesNamespace = cmp.Or(k.Namespace, conf.Kubernetes.Namespace)
	}
	if s.dynamo, err = fleet.NewDynamo(conf); err != nil {
		return err
	}
	s.dynamo.Read()
	return nil
}

// dynamoChanged applies the workers of the records. The places of their events come first: the
// router requests the events of a new worker at once.
func (s *server) dynamoChanged(v fleet.DynamoView) {
	s.direct.Sources().Dynamo.Set(v.Plane)
	if err := s.static.replace(&s.static.found, v.Workers); err != nil {
		s.log.Error("the workers of Dynamo's records are refused; the old ones stay", "err", err)
	}
}
