// SPDX-License-Identifier: Apache-2.0

package engines

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/kvroute/kvroute/internal/engine"
	"github.com/kvroute/kvroute/internal/msgpack"
	"github.com/kvroute/kvroute/internal/reach"
	"github.com/kvroute/kvroute/internal/zmtp"
)

// Found holds what an engine reports about itself over HTTP. A zero field was not reported.
type Found struct {
	Engine        string // of package engine
	BlockSize     int    // tokens
	TotalKVBlocks int
	DPStart       uint32
	DPSize        uint32
	Role          string // "aggregated", "prefill" or "decode"; only SGLang reports it
	BootstrapPort int    // of an SGLang worker for prefill
	Version       string // only SGLang reports it here
	// Flags change prompts; nil = the engine does not report them, or they cannot be read: then flagsError says why.
	// Only SGLang does.
	Flags      *engine.Flags
	flagsError error

	sockets []socket
}

// maxAnswer limits the size of an engine's HTTP answer.
const maxAnswer = 8 << 20

// engineTime limits the time of an engine's HTTP answer.
const engineTime = 5 * time.Second

func (s *Sources) get(ctx context.Context, host, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, engineTime)
	defer cancel()
	return reach.Get(ctx, s.conf.Client, host, url, maxAnswer)
}

// Discover queries an engine for its ranks, its event sockets and its block size: vLLM first, then
// SGLang.
func (s *Sources) Discover(ctx context.Context, w EngineWorker) (Found, error) {
	host, _, err := net.SplitHostPort(w.Address)
	if err != nil {
		return Found{}, fmt.Errorf("engines: discover: address %q is no ip:port", w.Address)
	}
	base := "http://" + w.Address
	var last, failed error // failed is that of a path that the engine has, but does not answer now
	for _, source := range []struct {
		path string
		read func(body []byte, host string, w EngineWorker) (Found, error)
		// cacheConfig says that only the engine's metrics have the size and number of blocks.
		cacheConfig bool
	}{
		{"/kv_event_sources", readVLLM, true},
		{"/server_info", readSGLang, false},
		{"/get_server_info", readSGLang, false},
	} {
		body, err := s.get(ctx, w.Host, base+source.path)
		if err != nil {
			last = err
			status, ok := errors.AsType[reach.StatusError](err)
			if !ok {
				break // no server
			}
			if isTransient(status) && failed == nil {
				failed = err
			}
			continue
		}
		f, err := source.read(body, host, w)
		if err != nil {
			return f, fmt.Errorf("engines: discover: %s%s: %w", base, source.path, err)
		}
		if source.cacheConfig {
			if metrics, err := s.get(ctx, w.Host, base+"/metrics"); err == nil {
				f.BlockSize, f.TotalKVBlocks = engine.CacheConfig(metrics)
			}
		}
		return f, nil
	}
	return Found{}, fmt.Errorf("engines: discover: %s answers neither /kv_event_sources nor /server_info: %w", base, cmp.Or(failed, last))
}

// isTransient reports whether a status says nothing about what an engine has.
func isTransient(s reach.StatusError) bool {
	return s.Status >= http.StatusInternalServerError && s.Status != http.StatusNotImplemented || s.Status == http.StatusTooManyRequests
}

// readVLLM reads an answer of /kv_event_sources.
func readVLLM(body []byte, host string, w EngineWorker) (Found, error) {
	f := Found{Engine: engine.VLLM}
	var answer map[uint32]struct { // by rank
		Enabled   *bool  `json:"enable_kv_cache_events"`
		Publisher string `json:"publisher"`
		Endpoint  string `json:"endpoint"`
		Replay    string `json:"replay_endpoint"`
		Topic     string `json:"topic"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return f, err
	}
	if len(answer) > maxEngineRanks {
		return f, fmt.Errorf("%w: %d ranks", msgpack.ErrShape, len(answer))
	}
	ranks := slices.Sorted(maps.Keys(answer))
	for i, rank := range ranks {
		if rank != ranks[0]+uint32(i) {
			return f, fmt.Errorf("%w: ranks %v", msgpack.ErrShape, ranks)
		}
		a := answer[rank]
		if a.Enabled != nil && !*a.Enabled || a.Publisher != "" && a.Publisher != "zmq" || a.Endpoint == "" {
			return f, fmt.Errorf("rank %d: %w", rank, errNoEvents)
		}
		if err := f.addSocket(socket{rank: rank, topic: a.Topic}, a.Endpoint, a.Replay, host, w); err != nil {
			return f, err
		}
	}
	if len(ranks) == 0 {
		return f, errNoEvents
	}
	f.DPStart, f.DPSize = ranks[0], uint32(len(ranks))
	return f, nil
}

// addSocket adds a rank's socket with the endpoints that the engine reports. The engine binds an
// endpoint without a host, or with its own host. It connects to any other, which is refused. Topic
// and replay endpoint of the worker's record come first.
func (f *Found) addSocket(at socket, endpoint, replay, host string, w EngineWorker) (err error) {
	if at.events, err = zmtp.ParseEndpoint(endpoint, basePort, 0); err == nil && !ofHost(at.events, host) {
		err = fmt.Errorf("%w: its socket connects to %s: give the engine an endpoint that it binds, such as tcp://*:5557",
			errNoEvents, at.events)
	}
	if err == nil && w.Replay == "" && replay != "" {
		// It may be bound to an address that only the engine's host can reach, such as 127.0.0.1.
		at.replay, err = zmtp.ParseEndpoint(replay, baseReplayPort, 0)
		at.replays = ofHost(at.replay, host)
		at.replay = at.replay.At(host)
	}
	if err == nil {
		err = at.setReplay(w.Replay, host)
	}
	if err != nil {
		return fmt.Errorf("rank %d: %w", at.rank, err)
	}
	at.events, at.topic = at.events.At(host), cmp.Or(w.Topic, at.topic)
	f.sockets = append(f.sockets, at)
	return nil
}

// ofHost reports whether an endpoint that the worker at host reports is on that host.
func ofHost(e zmtp.Endpoint, host string) bool {
	ip, other := net.ParseIP(host), net.ParseIP(e.Host)
	near := ip != nil && ip.IsLoopback()
	return e.Path != "" && near || e.Path == "" &&
		(e.Anywhere() || e.Host == host || near && other != nil && other.IsLoopback())
}

// clip limits a text of an engine's answer.
func clip(s string) string { return s[:min(len(s), 256)] }

// readSGLang reads an answer of /server_info.
func readSGLang(body []byte, host string, w EngineWorker) (Found, error) {
	f := Found{Engine: engine.SGLang}
	var answer struct {
		Mode      string `json:"disaggregation_mode"`
		Bootstrap int    `json:"disaggregation_bootstrap_port"`
		Version   string `json:"version"`
		// A missing field differs from null: earlier versions do not have it.
		Kwargs       json.RawMessage `json:"default_chat_template_kwargs"`
		Template     string          `json:"chat_template"`
		TemplateName string          `json:"hf_chat_template_name"`
		Events       *struct {
			Publisher string `json:"publisher"`
			Host      string `json:"endpoint_host"`
			Base      int    `json:"endpoint_port_base"`
			Topic     string `json:"topic"`
			BlockSize int    `json:"block_size"`
			DPSize    uint32 `json:"dp_size"`
		} `json:"kv_events"`
	}
	if err := json.Unmarshal(body, &answer); err != nil {
		return f, err
	}
	f.Role = map[string]string{"null": "aggregated", "prefill": "prefill", "decode": "decode"}[answer.Mode]
	if f.Role == "prefill" {
		if f.BootstrapPort = answer.Bootstrap; f.BootstrapPort < 0 || f.BootstrapPort > 65535 {
			return f, fmt.Errorf("%w: disaggregation_bootstrap_port %d", msgpack.ErrShape, f.BootstrapPort)
		}
	}
	f.Version = clip(answer.Version)
	if answer.Kwargs != nil {
		var kwargs string
		if kwargs, f.flagsError = engine.OrderedKwargs(answer.Kwargs); f.flagsError == nil {
			f.Flags = &engine.Flags{Kwargs: kwargs, Template: clip(answer.Template), TemplateName: clip(answer.TemplateName)}
		}
	}
	e := answer.Events
	if e == nil || e.Publisher != "" && e.Publisher != "zmq" {
		return f, errNoEvents
	}
	if e.BlockSize < 0 || e.DPSize > maxEngineRanks || e.Base < 1 || e.Base > 65535 {
		return f, fmt.Errorf("%w: block_size %d, dp_size %d, endpoint_port_base %d", msgpack.ErrShape, e.BlockSize,
			e.DPSize, e.Base)
	}
	f.BlockSize, f.DPStart, f.DPSize = e.BlockSize, w.DPStart, max(1, e.DPSize)
	for i := range f.DPSize {
		rank := f.DPStart + i
		endpoint := zmtp.Endpoint{Host: cmp.Or(e.Host, "*"), Port: e.Base + int(rank)}
		if err := f.addSocket(socket{rank: rank, topic: e.Topic}, endpoint.String(), "", host, w); err != nil {
			return f, err
		}
	}
	return f, nil
}
