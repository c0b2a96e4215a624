// SPDX-License-Identifier: Apache-2.0

// Package bindings is the event publisher for engines that are not written in Go. The C
// library in bindings/c and the Python package in bindings/python use it. It connects to
// NATS, registers the worker, sends its heartbeats, and publishes the events of its cache.
//
// # Concurrency
//
// The methods of a [Publisher] may be called by any number of goroutines. Events
// of a rank are published in the order of the calls.
package bindings

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/kvroute/kvroute/engines"
	"github.com/kvroute/kvroute/engines/publish"
	"github.com/kvroute/kvroute/events"
	"github.com/kvroute/kvroute/fleet"
	"github.com/kvroute/kvroute/indexer"
	"github.com/kvroute/kvroute/internal/bus"
	"github.com/kvroute/kvroute/internal/wire"
)

// Config configures a [Publisher]. Other languages pass it as JSON.
type Config struct {
	NATSURL string `json:"nats_url,omitempty"` // or file:PATH of a file that has it; default nats://127.0.0.1:4222
	// Access has the publisher's credentials for NATS.
	bus.Access
	// NATSReplicas is the number of servers of a NATS cluster that keep the streams and buckets
	// that this publisher creates. Default 1.
	NATSReplicas int `json:"nats_replicas,omitempty"`

	Namespace string `json:"namespace,omitempty"`
	Component string `json:"component,omitempty"`
	Endpoint  string `json:"endpoint,omitempty"`

	// BlockSize is the number of tokens in a block. Required.
	BlockSize int `json:"kv_block_size"`
	// EnableLocalIndexer answers routers that missed events. Durable publishes the events into
	// a stream.
	EnableLocalIndexer bool `json:"enable_local_indexer,omitempty"`
	Durable            bool `json:"durable,omitempty"`
	// SetLike means that one removal removes all copies of a block. Otherwise a block that was
	// stored twice stays until it is removed twice.
	SetLike bool `json:"set_like,omitempty"`
	// ImageTokenID is the model's token for an image, if it has one.
	ImageTokenID uint32 `json:"image_token_id,omitempty"`

	// Record describes the worker. Without an address the publisher does not register it. The
	// publisher sets the block size, the events and the start time itself.
	fleet.Record

	// LogLevel is "debug", "info", "warn" or "error" to log to standard error. Default: no log.
	LogLevel string `json:"log_level,omitempty"`
}

// ParseConfig reads a configuration. An unknown field is an error, so that a misspelled one
// is noticed.
func ParseConfig(data []byte) (Config, error) {
	var c Config
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return c, fmt.Errorf("bindings: read configuration: %w", err)
	}
	return c, nil
}

// Publisher publishes the cache events of one worker.
type Publisher struct {
	conf      Config
	nc        *nats.Conn
	publisher *publish.Publisher
	cancel    context.CancelFunc
	done      chan error                 // the error of run
	load      atomic.Pointer[fleet.Load] // of the heartbeats

	mu sync.Mutex
	// mu guards the fields below, and orders the events.
	engine *engines.Engine
	closed bool
}

// errClosed is the error of methods after [Publisher.Close].
var errClosed = errors.New("bindings: the publisher is closed")

// Open returns a publisher that runs until it is closed. It does not wait for NATS: while
// NATS is unavailable, a limited number of events waits.
func Open(conf Config) (*Publisher, error) {
	if conf.WorkerID == 0 && conf.Name != "" {
		conf.WorkerID = wire.WorkerID(conf.Name)
	}
	switch {
	case conf.WorkerID == 0:
		return nil, errors.New("bindings: worker_id is 0 and there is no name to make one of")
	case conf.BlockSize < 1 || conf.BlockSize > 1<<16:
		return nil, fmt.Errorf("bindings: kv_block_size is %d, want 1 to %d tokens", conf.BlockSize, 1<<16)
	case conf.NATSReplicas < 0 || conf.NATSReplicas > 5:
		return nil, fmt.Errorf("bindings: nats_replicas is %d, want 1 to 5, or 0 for 1", conf.NATSReplicas)
	}
	log := slog.New(slog.DiscardHandler)
	if conf.LogLevel != "" {
		var level slog.Level
		if err := level.UnmarshalText([]byte(conf.LogLevel)); err != nil {
			return nil, fmt.Errorf("bindings: log_level is %q, want debug, info, warn or error", conf.LogLevel)
		}
		log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	}
	url, err := bus.ReadURL(cmp.Or(conf.NATSURL, nats.DefaultURL))
	if err != nil {
		return nil, fmt.Errorf("bindings: %w", err)
	}
	nc, err := bus.Connect(url, "kvroute publisher "+conf.Name, &conf.Access, log)
	if err != nil {
		return nil, fmt.Errorf("bindings: %w", err)
	}
	scope := wire.Scope{Namespace: conf.Namespace, Component: conf.Component, Endpoint: conf.Endpoint}
	p := &Publisher{
		conf: conf, nc: nc, done: make(chan error, 1),
		publisher: publish.New(nc, publish.Config{
			Scope: scope, WorkerID: conf.WorkerID, LocalIndexer: conf.EnableLocalIndexer, Durable: conf.Durable,
			Replicas: conf.NATSReplicas, Log: log,
		}),
		engine: engines.NewEngine(engines.EngineOptions{
			BlockSize: conf.BlockSize, SetLike: conf.SetLike, Placeholder: conf.ImageTokenID,
		}),
	}
	p.SetLoad(fleet.Load{})
	var announcer *fleet.Announcer
	if conf.Address != "" {
		announcer, err = fleet.NewAnnouncer(nc, fleet.AnnouncerConfig{
			Scope: scope, Record: conf.record(p.publisher.ID()), Replicas: conf.NATSReplicas,
			Load: func() fleet.Load { return *p.load.Load() }, Log: log,
		})
		if err != nil {
			nc.Close()
			return nil, err
		}
	}
	var ctx context.Context
	ctx, p.cancel = context.WithCancel(context.Background())
	go func() { p.done <- p.run(ctx, announcer) }()
	return p, nil
}

// record returns the worker's record. A worker with several ranks may have a publisher for each
// rank, so its record names none.
func (c *Config) record(publisher uint64) fleet.Record {
	r := c.Record
	if r.DPSize > 1 {
		publisher = 0
	}
	transport := "nats"
	if c.Durable {
		transport = "jetstream"
	}
	r.BlockSize, r.StartedMS = c.BlockSize, time.Now().UnixMilli()
	r.Events = fleet.Events{Transport: transport, LocalIndexer: c.EnableLocalIndexer, PublisherID: publisher}
	return r
}

func (p *Publisher) run(ctx context.Context, announcer *fleet.Announcer) error {
	var wg sync.WaitGroup
	var left error
	if announcer != nil {
		wg.Go(func() { left = announcer.Run(ctx) })
	}
	err := p.publisher.Run(ctx)
	wg.Wait()
	return errors.Join(err, left)
}

// Close publishes the waiting events, removes the worker's record and ends the publisher.
// Later calls do nothing.
func (p *Publisher) Close() error {
	p.mu.Lock()
	closed := p.closed
	p.closed = true
	p.mu.Unlock()
	if closed {
		return nil
	}
	p.cancel()
	err := <-p.done
	p.nc.Close()
	return err
}

// SetLoad sets the load that the heartbeats contain.
func (p *Publisher) SetLoad(load fleet.Load) { p.load.Store(&load) }

// Stored are consecutive blocks of one sequence that an engine has stored.
type Stored struct {
	DPRank   uint32
	TokenIDs []uint32
	// NumBlockTokens is the number of tokens of each block. The first block of another size
	// than BlockSize, and all blocks after it, are left out.
	NumBlockTokens []int
	// BlockHashes are the engine's own hashes of the blocks. ParentHash is that of the block
	// before them, if HasParent.
	BlockHashes []uint64
	ParentHash  uint64
	HasParent   bool
	LoRAName    string
	CacheSalt   string
	// Objects are the hashes of the images and other media in each block.
	Objects [][]uint64
}

// PublishStored publishes that blocks were stored, and returns the number of published ones.
// Blocks after an unknown parent are not published, because their salt is unknown.
func (p *Publisher) PublishStored(s Stored) (published int, err error) {
	n := len(s.BlockHashes)
	if len(s.NumBlockTokens) != n {
		return 0, fmt.Errorf("bindings: num_block_tokens has %d elements, block_hashes %d", len(s.NumBlockTokens), n)
	}
	size, full, tokens := p.conf.BlockSize, 0, 0
	for full < n && s.NumBlockTokens[full] == size {
		full++
		tokens += size
	}
	if tokens > len(s.TokenIDs) {
		return 0, fmt.Errorf("bindings: %d token_ids for %d blocks of %d tokens, want %d or more", len(s.TokenIDs), full,
			size, tokens)
	}
	if full == 0 {
		return 0, nil
	}
	ev := engines.EngineEvent{
		Kind: engines.EngineStored, Rank: s.DPRank, HasRank: true,
		Hashes: s.BlockHashes[:full], Parent: s.ParentHash, HasParent: s.HasParent,
		Tokens: s.TokenIDs[:tokens], BlockSize: size,
		LoRA: s.LoRAName, Salt: s.CacheSalt, HasSalt: s.CacheSalt != "" || s.LoRAName != "" || !s.HasParent,
		Objects: s.Objects, Usable: full,
	}
	evs, err := p.apply(ev)
	for _, ev := range evs {
		published += len(ev.Event.Blocks)
	}
	return published, err
}

// PublishRemoved publishes that blocks were removed.
func (p *Publisher) PublishRemoved(dpRank uint32, hashes []uint64) error {
	_, err := p.apply(engines.EngineEvent{Kind: engines.EngineRemoved, Rank: dpRank, HasRank: true, Hashes: hashes})
	return err
}

// PublishCleared publishes that a rank's cache is empty.
func (p *Publisher) PublishCleared(dpRank uint32) error {
	_, err := p.apply(engines.EngineEvent{Kind: engines.EngineCleared, Rank: dpRank, HasRank: true})
	return err
}

func (p *Publisher) apply(ev engines.EngineEvent) ([]events.RouterEvent, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil, errClosed
	}
	evs, _ := p.engine.Apply(&engines.EngineBatch{Events: []engines.EngineEvent{ev}})
	for _, e := range evs {
		events.Parts(e.Event, func(part indexer.Event) { p.publisher.Publish(e.DPRank, part) })
	}
	return evs, nil
}
