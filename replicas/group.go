// SPDX-License-Identifier: Apache-2.0

package replicas

import (
	"fmt"
	"slices"

	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/wire"
)

// Group is a router group of the configuration: workers behind routers of their own. Requests
// go to the gateway of these routers.
type Group struct {
	Name    string `json:"name"`    // the --group of its routers
	Address string `json:"address"` // ip:port of its gateway
	// Models are base models that the group serves; its summaries may name more. BlockSize
	// is the number of tokens in a block, Members the number of its workers. All three are
	// optional, since summaries contain them.
	Models    []string `json:"models,omitempty"`
	BlockSize int      `json:"block_size,omitempty"`
	Members   int      `json:"members,omitempty"`
}

// candidate returns the worker that stands for the group and a base model in the router.
func (c *Group) candidate(model string, blockSize int) fleet.Record {
	return fleet.Record{
		WorkerID: groupWorkerID(c.Name, model), Name: c.Name, Group: c.Name, Members: c.Members,
		Address: c.Address, Models: []string{model}, BlockSize: blockSize,
		Events: fleet.Events{Transport: "none"}, Reorders: true,
	}
}

// groupWorkerID returns the id of the candidate for a group and a base model. Both names may
// contain slashes, so the length of the first one is part of the hashed text.
func groupWorkerID(group, model string) uint64 {
	return wire.WorkerID(fmt.Sprintf("%d/%s/%s", len(group), group, model))
}

// CheckGroups returns an error for the first wrong group.
func CheckGroups(groups []Group) error {
	if len(groups) > maxGroups {
		return fmt.Errorf("groups: there are %d, want at most %d", len(groups), maxGroups)
	}
	names := make(map[string]bool, len(groups))
	for i := range groups {
		c := &groups[i]
		switch {
		case c.Name == "" || len(c.Name) > maxGroupName:
			return fmt.Errorf("groups[%d].name has %d bytes, want 1 to %d", i, len(c.Name), maxGroupName)
		case names[c.Name]:
			return fmt.Errorf("groups[%d].name is %q, want each name once", i, clip(c.Name))
		case len(c.Models) > maxGroupModels || slices.Contains(c.Models, ""):
			return fmt.Errorf("groups[%d].models is a list of %d, want at most %d names", i, len(c.Models), maxGroupModels)
		case c.Members < 0:
			return fmt.Errorf("groups[%d].members is %d, want 0 or more", i, c.Members)
		}
		candidate := c.candidate("any", c.BlockSize)
		if _, err := candidate.Info(fleet.Networks{}); err != nil {
			return fmt.Errorf("groups[%d]: %w", i, err)
		}
		names[c.Name] = true
	}
	return nil
}
