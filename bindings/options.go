// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"log/slog"
	"time"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

func publisherConfig(c *Config, scope wire.Scope, id uint64, log *slog.Logger) engines.PublisherConfig {
	return engines.PublisherConfig{Scope: scope, WorkerID: id, LocalIndexer: c.EnableLocalIndexer, Durable: c.Durable, Replicas: c.NATSReplicas, Log: log}
}

// record returns the worker's record. A worker with several ranks may have a publisher for
// each rank, so its record names none.
func (c *Config) record(id, publisher uint64) fleet.Record {
	if c.DPSize > 1 {
		publisher = 0
	}
	transport := "nats"
	if c.Durable {
		transport = "jetstream"
	}
	return fleet.Record{
		WorkerID: id, Name: c.Name, Address: c.Address, Models: c.Models, LoRA: c.LoRA, Role: router.Role(c.Role),
		BlockSize: c.BlockSize, DPStart: c.DPStart, DPSize: c.DPSize,
		TotalKVBlocks: c.TotalKVBlocks, MaxNumSeqs: c.MaxNumSeqs, MaxBatchedTokens: c.MaxBatchedTokens,
		ModelCard: c.ModelCard, Engine: c.Engine, StartedMS: time.Now().UnixMilli(),
		Events: fleet.Events{Transport: transport, LocalIndexer: c.EnableLocalIndexer, PublisherID: publisher},
	}
}
