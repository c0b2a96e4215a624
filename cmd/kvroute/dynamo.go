// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"

	"github.com/kvroute/kvroute/fleet"
)

// dynamoConfig is the file's "dynamo": where the records of Dynamo's processes are, and
// how workers are made of them. The zero value reads none.
type dynamoConfig struct {
	// Dir is the root of Dynamo's file store: DYN_FILE_KV of its processes.
	Dir string `yaml:"dir,omitempty"`

	fleet.DynamoRules `yaml:",inline"`
}

func (c *dynamoConfig) on() bool { return c.Dir != "" }

// check refuses settings that are insufficient to find workers.
func (c *dynamoConfig) check() error {
	err := c.DynamoRules.Check()
	switch {
	case err != nil:
		return fmt.Errorf("dynamo.%w", err)
	case !c.on() && (c.Namespace != "" || c.Frontend != "" || len(c.AddressMap) > 0):
		return errors.New("dynamo has no dir: the folder of the records")
	case c.on() && c.Frontend == "" && len(c.AddressMap) == 0:
		return errors.New("dynamo has neither frontend nor address-map: its records do not say where workers serve HTTP")
	}
	return nil
}

// openDynamo reads the records of Dynamo's processes once, so that their workers are known
// at the start.
func (s *server) openDynamo() (err error) {
	c := &s.conf.Dynamo
	if !c.on() {
		return nil
	}
	if s.dynamo, err = fleet.NewDynamo(fleet.DynamoConfig{
		Dir: c.Dir, Rules: c.DynamoRules, Networks: s.networks, Changed: s.dynamoChanged,
		Log: s.log, Meter: s.metrics.Meter("fleet"),
	}); err != nil {
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
