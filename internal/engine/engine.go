// SPDX-License-Identifier: Apache-2.0

// Package engine is the table of the inference engines that kvroute treats in their own ways. Other
// packages ask a row of the table what an engine does; they do not compare names. To add an engine,
// add a row.
//
// The formats of engines' events are in package engines, and the rules by which an engine makes a
// prompt of a chat are in package tokenizer/chat.
//
// The table never changes. Its functions may be called by any number of goroutines.
package engine

import (
	"maps"
	"slices"
	"strings"
)

// The names of engines, as records, decisions and settings have them.
const (
	VLLM   = "vllm"
	SGLang = "sglang"
	TRTLLM = "trtllm" // TensorRT-LLM
	Dynamo = "dynamo" // a frontend of NVIDIA Dynamo
)

// Engine is what kvroute knows of an engine. The zero value of each field is right for an engine that
// kvroute does not know.
type Engine struct {
	// Name is the canonical name, Spellings are others that records may have, in lower case.
	Name      string
	Spellings []string

	// Chat says that package tokenizer/chat has the rules by which the engine makes a prompt. Name is
	// then also a profile of models.
	Chat bool
	// Transformers4 says that the engine loads tokenizers with version 4 of transformers.
	Transformers4 bool

	// SetLike says that one removal removes all copies of a block, as in engines.EngineOptions.
	SetLike bool
	// Polled says that events are polled over HTTP. Other engines publish them on a ZMQ socket.
	Polled bool
	// HowToPublish tells an operator how to make the engine publish events.
	HowToPublish string
	// Gauges are the metrics that contain the engine's load, by name.
	Gauges map[string]Gauge

	// ReadsRank says that the engine reads the data-parallel rank of a request from a header, if its
	// ranks have one address.
	ReadsRank bool
	// AnyModel says that the engine takes requests with model names that it does not list.
	AnyModel bool
	// ListsAdapters says that the engine's list of models has its adapters.
	ListsAdapters bool
	// ReturnsTokenIDs says that a request may ask for the ids of the output tokens.
	ReturnsTokenIDs bool
	// Forwards says that the worker is a frontend. The frontend forwards a request to the worker that
	// the request's headers name, and sends the prefill request itself.
	Forwards bool

	// RefusesWhole says that a worker of role decode or both refuses requests without a prefill leg.
	RefusesWhole bool
	// Prefill describes the prefill leg.
	Prefill Prefill
	// Pull describes how a request names the worker from which its worker copies blocks.
	Pull Pull
}

// Pull names the fields of a request's body with the source of a pull: the member Member is an object, whose member
// Source is an object with the fields ID, Host and Port. The zero value means that the engine has no such fields.
type Pull struct {
	Member, Source string
	ID             string // unique for each transfer
	Host, Port     string // of the source's socket for pulls
}

// Known reports whether requests can name a source.
func (p *Pull) Known() bool { return p.Member != "" }

// Prefill describes the two requests of a split request: the prefill request, and the decode request
// with which another worker receives the computed blocks. There are two protocols:
//
//   - The prefill request has the member Member. Its answer has an object with parameters, which goes
//     into the decode request.
//   - Both requests are equal and run at once. The workers find each other by the address of the
//     prefill worker's bootstrap server.
//
// The zero value means that kvroute sends no prefill requests.
type Prefill struct {
	// Member is the name of the member with the parameters, in both requests.
	Member string
	// Value is its value in the prefill request, in JSON.
	Value string
	// Path leads to the parameters in the answer.
	Path []string
	// DecodeType, if not empty, is the member request_type of the parameters in the decode request, in
	// JSON.
	DecodeType string

	// BootstrapPort, if not empty, selects the second protocol. It is the port of the bootstrap server
	// if the worker registered none.
	BootstrapPort string
	// Lists says that one request may have several prompts.
	Lists bool
}

// Known reports whether the leg has a protocol.
func (p *Prefill) Known() bool { return p.Member != "" || p.AtOnce() }

// AtOnce reports whether both requests run at once: the second protocol.
func (p *Prefill) AtOnce() bool { return p.BootstrapPort != "" }

// Gauge is a value that kvroute reads from an engine's metrics.
type Gauge uint8

// The gauges.
const (
	Running    Gauge = iota // requests that are computed
	Waiting                 // requests in the engine's queue
	UsedShare               // used share of the cache, 0 to 1
	UsedBlocks              // used blocks of the cache
	UsedTokens              // tokens in the cache
	Blocks                  // blocks of the cache
	GaugeKinds              // the number of gauges
)

//nolint:gochecknoglobals // a table
var table = [...]Engine{
	{
		Name: VLLM,
		Chat: true,
		HowToPublish: `start vLLM with --kv-events-config '{"enable_kv_cache_events":true,"publisher":"zmq",` +
			`"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","topic":"kv-events"}'`,
		Gauges: map[string]Gauge{
			"vllm:num_requests_running": Running,
			"vllm:num_requests_waiting": Waiting,
			"vllm:kv_cache_usage_perc":  UsedShare,
			"vllm:gpu_cache_usage_perc": UsedShare, // before 0.10
		},
		ReadsRank:       true,
		ListsAdapters:   true,
		ReturnsTokenIDs: true,
		Prefill: Prefill{
			Member: "kv_transfer_params",
			Value:  `{"do_remote_decode":true}`,
			Path:   []string{"kv_transfer_params"},
		},
		Pull: Pull{
			Member: "kv_transfer_params", Source: "remote_kv_source",
			ID: "kv_request_id", Host: "remote_host", Port: "remote_port",
		},
	},
	{
		Name:    SGLang,
		Chat:    true,
		SetLike: true,
		HowToPublish: `start SGLang with --kv-events-config ` +
			`'{"publisher":"zmq","endpoint":"tcp://*:5557","topic":"kv-events"}'`,
		Gauges: map[string]Gauge{
			"sglang:num_running_reqs": Running,
			"sglang:num_queue_reqs":   Waiting,
			"sglang:token_usage":      UsedShare,
			"sglang:num_used_tokens":  UsedTokens,
		},
		AnyModel:     true,
		RefusesWhole: true,
		Prefill:      Prefill{BootstrapPort: "8998", Lists: true},
	},
	{
		Name:          TRTLLM,
		Spellings:     []string{"tensorrt-llm", "tensorrt_llm", "tensorrtllm"},
		Chat:          true,
		Transformers4: true,
		SetLike:       true,
		Polled:        true,
		AnyModel:      true,
		HowToPublish: "start TensorRT-LLM with kv_cache_config: {event_buffer_max_size: 1024} " +
			"in the file of --extra_llm_api_options",
		Gauges: map[string]Gauge{
			"trtllm_num_requests_running": Running,
			"trtllm_num_requests_waiting": Waiting,
			"trtllm_kv_cache_utilization": UsedShare,
			"trtllm_kv_cache_used_blocks": UsedBlocks,
			"trtllm_kv_cache_max_blocks":  Blocks,
		},
		Prefill: Prefill{
			Member:     "disaggregated_params",
			Value:      `{"request_type":"context_only"}`,
			Path:       []string{"choices", "disaggregated_params"},
			DecodeType: `"generation_only"`,
		},
	},
	{
		Name:     Dynamo,
		Forwards: true,
	},
	{
		Name:            "kvroute-sim", // the simulated engine without --engine
		ReturnsTokenIDs: true,
	},
}

//nolint:gochecknoglobals // the row of engines that are not in the table
var unknown Engine

// Of returns the row of an engine by its name, in any spelling. An unknown engine has an empty row. The
// caller must not change the row. Of does not allocate if the name is in lower case.
func Of(name string) *Engine {
	if name == "" {
		return &unknown
	}
	for i := range table {
		if table[i].Name == name {
			return &table[i]
		}
	}
	lower := strings.ToLower(name)
	for i := range table {
		if table[i].Name == lower || slices.Contains(table[i].Spellings, lower) {
			return &table[i]
		}
	}
	return &unknown
}

// Canonical returns the name of an engine that is given in any spelling. The name of an unknown engine
// is put into lower case.
func Canonical(name string) string {
	if e := Of(name); e != &unknown {
		return e.Name
	}
	return strings.ToLower(name)
}

// Profiles returns the names of the engines with rules for chats, in the order of the table.
func Profiles() (names []string) {
	for i := range table {
		if table[i].Chat {
			names = append(names, table[i].Name)
		}
	}
	return names
}

// AllGauges returns the gauges of all engines by name.
func AllGauges() map[string]Gauge {
	all := make(map[string]Gauge)
	for i := range table {
		maps.Copy(all, table[i].Gauges)
	}
	return all
}
