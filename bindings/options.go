// SPDX-License-Identifier: Apache-2.0

package bindings

import (
	"log/slog"
	"time"

	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/internal/wire"
	"github.com/kvroute/kvroute/router"
)

func publisherConfig(c *Config, scope wire.Scope, id uint64, log *slog.Logger) events.PublisherConfig {
	return events.PublisherConfig{Scope: scope, WorkerID: id, LocalIndexer: c.EnableLocalIndexer, Durable: c.Durable, Quiet: true, Log: log}
}

func (c *Config) record(id uint64) fleet.Record {
	transport := "nats"
	if c.Durable {
		transport = "jetstream"
	}
	return fleet.Record{
		WorkerID: id, Name: c.Name, Address: c.Address, Models: c.Models, LoRA: c.LoRA, Role: router.Role(c.Role),
		BlockSize: c.BlockSize, DPStart: c.DPStart, DPSize: c.DPSize,
		TotalKVBlocks: c.TotalKVBlocks, MaxNumSeqs: c.MaxNumSeqs, MaxBatchedTokens: c.MaxBatchedTokens,
		ModelCard: c.ModelCard, Engine: c.Engine, StartedMS: time.Now().UnixMilli(),
		Events: fleet.Events{Transport: transport, LocalIndexer: c.EnableLocalIndexer},
	}
}
