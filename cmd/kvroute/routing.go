// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/internal/settings"
	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
	"github.com/kvroute/kvroute/slots"
)

// Routing is the settings of decisions. Where NVIDIA Dynamo has a flag of the same meaning,
// the setting has its name. A new setting of the cost also needs a field of
// [scorer.Settings], its assignment in scoring, a row in withoutEffect, and its place in the
// settings that explain prints.
type Routing struct {
	// kv, random, round-robin, direct, least-loaded, power-of-two or device-aware-weighted
	//
	// In mode direct the request names its worker.
	RouterMode string `yaml:"router-mode" topic:"Choice of the worker" dynamo:"DYN_ROUTER_MODE" default:"kv" want:"kv, random, round-robin, direct, least-loaded, power-of-two or device-aware-weighted"`

	// tokens, dynamo, dynamo_newer, predicted_ttft or weighted: the cost of a worker in mode kv
	// (default tokens)
	Cost string `yaml:"cost"`

	// <share> of a prefill that each other request on the worker pays (default 0.1)
	Alpha *float64 `yaml:"alpha"`

	// <weight> of attention against the linear part of a token, or auto: the model's own
	//
	// auto means 4·layers·heads·head size/parameters by the model's config.json, or 6e-5.
	Attention string `yaml:"attention" default:"auto"`

	// <factor> on the delay by decoding requests; 0 ignores it (default 1)
	DecodeWeight *float64 `yaml:"decode-weight"`

	// treat all workers as equally fast: ignore their times to first tokens and their prefill_tps
	NoWorkerSpeeds bool `yaml:"no-worker-speeds"`

	// <number> above 0 to draw the worker at random, cheaper ones more often; 0 takes the cheapest
	RouterTemperature float64 `yaml:"router-temperature" dynamo:"DYN_ROUTER_TEMPERATURE"`

	// <weight> of prefill against active blocks, selects the cost dynamo; 0 routes by load alone
	KVOverlapScoreWeight *float64 `yaml:"kv-overlap-score-weight" dynamo:"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT" setting:"overlap_score_weight"`

	// prefill <blocks> forgiven for a cached one, selects the cost dynamo_newer; 0 routes by load
	// alone
	//
	// This setting and the next three belong to the cost dynamo_newer. Each selects it.
	OverlapScoreCredit *float64 `yaml:"router-kv-overlap-score-credit" dynamo:"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT" setting:"overlap_score_credit"`

	// <rate> at which the credit for cached blocks shrinks with pending prefill, selects dynamo_newer
	OverlapScoreCreditDecay float64 `yaml:"router-kv-overlap-score-credit-decay" dynamo:"DYN_ROUTER_KV_OVERLAP_SCORE_CREDIT_DECAY" setting:"overlap_score_credit_decay"`

	// <weight> of prefill against active blocks, selects dynamo_newer
	PrefillLoadScale *float64 `yaml:"router-prefill-load-scale" dynamo:"DYN_ROUTER_PREFILL_LOAD_SCALE" setting:"prefill_load_scale"`

	// <blocks> that each request adds to the load, selects dynamo_newer
	DecodeActiveRequestWeight float64 `yaml:"router-decode-active-request-weight" dynamo:"DYN_ROUTER_DECODE_ACTIVE_REQUEST_WEIGHT" setting:"active_request_weight"`

	// <blocks> on the device that a cached block in host memory is worth, not for dynamo and weighted
	HostCacheHitWeight float64 `yaml:"router-host-cache-hit-weight" dynamo:"DYN_ROUTER_HOST_CACHE_HIT_WEIGHT" default:"0.75" setting:"host_cache_weight"`

	// <blocks> on the device that a cached block on disk or farther is worth, not for dynamo and
	// weighted
	DiskCacheHitWeight float64 `yaml:"router-disk-cache-hit-weight" dynamo:"DYN_ROUTER_DISK_CACHE_HIT_WEIGHT" default:"0.25" setting:"disk_cache_weight"`

	// <weight> of the cached share of a prompt, for the cost weighted
	WeightedOverlap float64 `yaml:"weighted-overlap" default:"0.6" setting:"weighted_overlap"`

	// <weight> of requests as a share of what the engine computes at a time, for the cost weighted
	WeightedRequests float64 `yaml:"weighted-requests" default:"0.3" setting:"weighted_requests"`

	// <weight> of the used share of the engine's cache, for the cost weighted
	WeightedKVUse float64 `yaml:"weighted-kv-use" default:"0.1" setting:"weighted_kv_use"`

	// 32b, 8b or 70b: the engine by which times are estimated
	EnginePreset string `yaml:"engine-preset" default:"32b" want:"32b, 8b or 70b"`

	// <CPUs> that do the work of one GPU, in mode device-aware-weighted
	DeviceRatio float64 `yaml:"device-ratio" default:"8" want:"more than 0"`

	// count the blocks of each request as its own
	NoAssumeKVReuse bool `yaml:"no-assume-kv-reuse" dynamo:"!DYN_ROUTER_ASSUME_KV_REUSE"`

	// do not count the blocks of requests in flight
	NoTrackActiveBlocks bool `yaml:"no-track-active-blocks" dynamo:"!DYN_ROUTER_TRACK_ACTIVE_BLOCKS"`

	// do not count the prefill tokens of requests in flight
	NoTrackPrefillTokens bool `yaml:"no-router-track-prefill-tokens" dynamo:"!DYN_ROUTER_TRACK_PREFILL_TOKENS"`

	// do not estimate the blocks that outputs fill
	//
	// Envoy does not show the tokens of a response to kvroute: their number is estimated by
	// the time since the first one.
	NoTrackOutputBlocks bool `yaml:"no-router-track-output-blocks" dynamo:"!DYN_ROUTER_TRACK_OUTPUT_BLOCKS"`

	// <tokens> a second that a request is assumed to generate; 0 takes the measured rate of its
	// worker, or that of the engine preset
	OutputRate float64 `yaml:"output-rate" want:"0 or more"`

	// <share> of a worker's blocks, 0 to 1, above which it gets no requests; absent: no limit
	//
	// A worker above this threshold, or one of the next two, gets no requests, in any mode.
	// /busy_threshold of the API changes them.
	BusyThreshold *float64 `yaml:"busy-threshold" dynamo:"DYN_ACTIVE_DECODE_BLOCKS_THRESHOLD" setting:"active_decode_blocks_threshold"`

	// pending prefill <tokens> above which a worker gets no requests; absent: no limit
	ActivePrefillTokensThreshold *int `yaml:"active-prefill-tokens-threshold" dynamo:"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD" setting:"active_prefill_tokens_threshold"`

	// <batches> of the engine's size in pending prefill tokens above which a worker gets no requests;
	// absent: no limit
	ActivePrefillTokensThresholdFrac *float64 `yaml:"active-prefill-tokens-threshold-frac" dynamo:"DYN_ACTIVE_PREFILL_TOKENS_THRESHOLD_FRAC" setting:"active_prefill_tokens_threshold_frac"`

	// <batches> of pending prefill on every worker above which requests wait; absent: requests never
	// wait
	RouterQueueThreshold *float64 `yaml:"router-queue-threshold" dynamo:"DYN_ROUTER_QUEUE_THRESHOLD" want:"0 or more"`

	// fcfs, lcfs or wspt: which waiting request is next
	RouterQueuePolicy string `yaml:"router-queue-policy" dynamo:"DYN_ROUTER_QUEUE_POLICY" default:"fcfs" want:"fcfs, lcfs or wspt"`

	// <number> of requests that may wait, for each pool
	RouterQueueLimit int `yaml:"router-queue-limit" default:"10000" want:"more than 0"`

	// <time> that a request may wait; half a second more must not exceed Envoy's max_message_timeout
	QueueWait time.Duration `yaml:"queue-wait" default:"9.5s" want:"more than 0s"`

	// router or header: kvroute sends the prefill request itself, or only names the prefill worker in
	// headers
	//
	// This setting and the next five are for models with workers for prefill and workers for decode.
	PrefillLeg string `yaml:"prefill-leg" default:"router" want:"router or header"`

	// <time> that a prefill leg may take before the decode worker computes the prompt; with queue-wait
	// and half a second it must not exceed Envoy's max_message_timeout
	PrefillTimeout time.Duration `yaml:"prefill-timeout" default:"30s" want:"more than 0s"`

	// never, isl_bounding, prefill_load or isl_or_load: no prefill leg for requests with a short or
	// mostly cached prompt, for those that find all prefill workers busy, or for both
	ConditionalDisaggregation string `yaml:"conditional-disaggregation" default:"never" want:"never, isl_bounding, prefill_load or isl_or_load"`

	// <tokens> to compute from which a prompt is not short, for conditional-disaggregation
	DisaggregationTokens int `yaml:"disaggregation-tokens" default:"2048" want:"more than 0"`

	// <share> of tokens to compute from which a prompt is not mostly cached, for
	// conditional-disaggregation
	DisaggregationFraction float64 `yaml:"disaggregation-fraction" default:"0.7" want:"0 to 1"`

	// <blocks> that a cached block of a decode worker is worth in its choice; 0 chooses it by load
	// alone
	DecodeOverlapScoreCredit float64 `yaml:"decode-overlap-score-credit" want:"0 or more"`

	Pulls `yaml:",inline"`

	// 429, 503 or 529: <status> of requests that are refused because all workers are busy
	OverloadStatus int `yaml:"overload-status" default:"429" want:"429, 503 or 529"`

	// <seconds> without a request after which a session leaves its worker; 0 ignores sessions
	SessionAffinityTTL int `yaml:"session-affinity-ttl-secs" dynamo:"DYN_ROUTER_SESSION_AFFINITY_TTL_SECS" want:"0 to 31536000"`

	// hard or soft: refuse the request of a session whose worker cannot take it, or send it to another worker
	SessionAffinityMode string `yaml:"session-affinity-mode" dynamo:"DYN_ROUTER_SESSION_AFFINITY_MODE" default:"soft" want:"hard or soft"`

	// <names> of the headers that name a session, comma-separated; the first one present counts
	SessionHeaders string `yaml:"session-headers" default:"x-dynamo-session-id,x-session-id,session-id,x-claude-code-session-id"`

	// accept routing hints and overrides in headers of requests; only for listeners that trusted
	// clients reach
	TrustOverrides bool `yaml:"trust-overrides"`

	// accept headers of requests that name the worker; only for listeners that trusted clients reach
	AllowDirect bool `yaml:"allow-direct"`
}

// autoAttention is the attention weight of models without a config.json: that of a dense
// model of 32B on two H100.
const autoAttention = 6e-5

// scoring returns the settings of the cost.
func (c *config) scoring() (scorer.Settings, error) {
	s := scorer.Defaults()
	s.Attention = autoAttention
	if p, ok := presets[c.EnginePreset]; ok { // else the check of the settings refuses it
		s.Engine = p.engine()
	}
	s.KVRead = s.Engine.KVRead()
	s.Temperature = c.RouterTemperature
	s.AssumeKVReuse, s.TrackPrefill = !c.NoAssumeKVReuse, !c.NoTrackPrefillTokens

	o := scorer.Override{
		OverlapScoreWeight: c.KVOverlapScoreWeight, OverlapScoreCredit: c.OverlapScoreCredit,
		PrefillLoadScale: c.PrefillLoadScale, Alpha: c.Alpha, DecodeWeight: c.DecodeWeight,
	}
	if c.Cost != "" {
		o.Cost = new(scorer.Policy(c.Cost))
	}
	if attention, given, err := c.attention(); err != nil {
		return s, err
	} else if given {
		o.Attention = &attention
	}
	// [scorer.Settings.With] does not check these two: no request can override them.
	if c.OverlapScoreCreditDecay != 0 || c.DecodeActiveRequestWeight != 0 {
		if c.Cost != "" && scorer.Policy(c.Cost) != scorer.DynamoNewer {
			return s, fmt.Errorf("router-kv-overlap-score-credit-decay and router-decode-active-request-weight "+
				"belong to the cost %s, not to %s", scorer.DynamoNewer, c.Cost)
		}
		o.Cost = new(scorer.DynamoNewer)
	}
	s.HostWeight, s.DiskWeight = c.HostCacheHitWeight, c.DiskCacheHitWeight
	s.CreditDecay, s.RequestWeight = c.OverlapScoreCreditDecay, c.DecodeActiveRequestWeight
	s.WeightedOverlap, s.WeightedRequests, s.WeightedKVUse = c.WeightedOverlap, c.WeightedRequests, c.WeightedKVUse
	t, err := s.With(&o)
	if err != nil {
		return s, named(err)
	}
	return t, c.withoutEffect(&t)
}

// named replaces the setting in an error of package scorer by the name of its flag. The flag has the
// setting as its tag or as its name.
func named(err error) error {
	bad, ok := errors.AsType[*scorer.SettingError](err)
	if !ok {
		return err
	}
	flag := strings.ReplaceAll(bad.Setting, "_", "-")
	for name, s := range settings.All(new(config)) {
		if s.Tag.Get("setting") == bad.Setting {
			flag = name
		}
	}
	return fmt.Errorf("%s is %v, want %s", flag, bad.Value, bad.Want)
}

// withoutEffect refuses settings that have no effect because of other settings: the operator expects
// an effect. Settings that the API or a request can turn on while kvroute runs are not refused.
func (c *config) withoutEffect(s *scorer.Settings) error {
	kv := c.RouterMode == string(router.KV)
	mode, cost := "router-mode "+c.RouterMode, "cost "+string(s.Policy)
	weighted := s.Policy == scorer.Weighted
	given := settings.Changed(c, new(defaults()))
	for _, row := range []struct {
		settings string
		effect   bool // the settings have an effect
		beside   string
	}{
		{
			"cost alpha attention decode-weight router-temperature kv-overlap-score-weight router-kv-overlap-score-credit " +
				"router-kv-overlap-score-credit-decay router-prefill-load-scale router-decode-active-request-weight " +
				"router-host-cache-hit-weight router-disk-cache-hit-weight",
			kv, mode,
		},
		{"no-worker-speeds", kv && (s.Policy == scorer.Tokens || s.Policy == scorer.PredictedTTFT), mode + " and " + cost},
		{"holdout-share", c.RouterMode != string(router.Direct), mode},
		{"device-ratio", c.RouterMode == string(router.DeviceAware), mode},
		{"router-kv-overlap-score-credit-decay", s.TrackPrefill, "no-router-track-prefill-tokens"},
		{"router-kv-overlap-score-credit-decay", s.OverlapCredit > 0, "router-kv-overlap-score-credit 0"},
		{"router-host-cache-hit-weight router-disk-cache-hit-weight", s.Policy != scorer.Dynamo && !weighted, cost},
		{"router-host-cache-hit-weight router-disk-cache-hit-weight", s.UsesOverlap(), "router-kv-overlap-score-credit 0"},
		{"weighted-overlap weighted-requests weighted-kv-use", kv && weighted, cost},
		{"router-ttl-secs max-index-blocks", s.UsesOverlap(), "a weight of 0, which keeps no index"},
		{
			"router-predicted-ttl-secs", s.UsesOverlap() || c.RouterPredictedTTLSecs == 0, "a weight of 0, which keeps no index",
		},
		{
			"router-predicted-ttl-secs", !c.NoKVEvents || c.RouterPredictedTTLSecs == 0,
			"no-kv-events, where router-ttl-secs counts",
		},
		{"max-index-blocks kv-events-retention", !c.NoKVEvents, "no-kv-events"},
		{"output-rate", !c.NoTrackOutputBlocks, "no-router-track-output-blocks"},
		{
			"router-queue-policy router-queue-limit queue-wait", c.RouterQueueThreshold != nil,
			"a missing router-queue-threshold",
		},
		{
			"disaggregation-tokens disaggregation-fraction", strings.HasPrefix(c.ConditionalDisaggregation, "isl_"),
			"conditional-disaggregation " + c.ConditionalDisaggregation,
		},
		{
			"kv-pull-delay kv-pull-token-time kv-pull-compute-time kv-pull-min-tokens kv-pull-limit",
			c.pulls().On, "kv-pull off",
		},
		{
			"kv-pull", s.UsesOverlap() && !c.NoKVEvents || !c.pulls().On,
			"no-kv-events, or a weight of 0, which keeps no index",
		},
		{"session-affinity-mode session-headers", c.SessionAffinityTTL != 0, "session-affinity-ttl-secs 0"},
	} {
		for name := range strings.FieldsSeq(row.settings) {
			if !row.effect && slices.Contains(given, name) {
				return fmt.Errorf("%s has no effect beside %s", name, row.beside)
			}
		}
	}
	return nil
}

// attention returns the attention weight for all models, if there is one.
func (c *config) attention() (weight float64, given bool, err error) {
	if c.Attention == "auto" {
		return 0, false, nil
	}
	weight, err = strconv.ParseFloat(c.Attention, 64)
	if err != nil || math.IsNaN(weight) {
		return 0, false, fmt.Errorf("attention is %q, want a number or auto", c.Attention)
	}
	return weight, true, nil
}

// sessionHeaders returns the names of the headers with a session's name.
func (c *config) sessionHeaders() (names []string) {
	for name := range strings.SplitSeq(c.SessionHeaders, ",") {
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// routing returns the settings of the router.
func (c *config) routing() (router.Config, error) {
	scoring, err := c.scoring()
	if err != nil {
		return router.Config{}, err
	}
	if c.RouterMode == string(router.Direct) && !c.AllowDirect {
		return router.Config{}, errors.New("router-mode direct needs allow-direct, or no request can name its worker")
	}
	thresholds := scorer.Thresholds{
		ActiveBlocks: c.BusyThreshold, PrefillTokens: c.ActivePrefillTokensThreshold,
		PrefillFraction: c.ActivePrefillTokensThresholdFrac,
	}
	if err := thresholds.Validate(); err != nil {
		return router.Config{}, named(err)
	}
	return router.Config{
		Mode:        router.Mode(c.RouterMode),
		Scoring:     scoring,
		DeviceRatio: c.DeviceRatio,
		Thresholds:  thresholds,
		Queue:       router.QueueConfig{Threshold: c.RouterQueueThreshold, Policy: slots.QueuePolicy(c.RouterQueuePolicy), Limit: c.RouterQueueLimit},
		Sessions:    router.SessionConfig{TTL: time.Duration(c.SessionAffinityTTL) * time.Second, Hard: c.SessionAffinityMode == "hard"},
		Split: router.SplitConfig{
			Skip: router.SkipRule(c.ConditionalDisaggregation), SkipTokens: c.DisaggregationTokens,
			SkipFraction: c.DisaggregationFraction,
			DecodeCredit: c.DecodeOverlapScoreCredit, LegTimeout: c.PrefillTimeout,
		},
		Pull:           c.pulls(),
		NoActiveBlocks: c.NoTrackActiveBlocks,
		EstimateOutput: !c.NoTrackOutputBlocks,
		OutputRate:     c.OutputRate,
		BlockSize:      c.BlockSize,
		MaxBlocks:      c.MaxIndexBlocks,
		NoEvents:       c.NoKVEvents,
		GuessTTL:       time.Duration(c.RouterTTLSecs * float64(time.Second)),
		PredictTTL:     cmp.Or(time.Duration(c.RouterPredictedTTLSecs*float64(time.Second)), -1),
		StrictModels:   c.StrictModels,
		ExplainDrift:   c.ExplainDrift,
		AvoidFailing:   c.AvoidFailing,
		Seed:           c.Seed,
		KeepDecisions:  cmp.Or(c.KeepDecisions, -1),

		InferFirstTokens: true,
		InferTokens:      c.InferTokens,
		ObservePerMinute: c.ObservePerMinute,
		NoSpeeds:         c.NoWorkerSpeeds,
		HoldoutShare:     c.HoldoutShare,
	}, nil
}

// modelShape is the part of a model's config.json that says how large the model is.
type modelShape struct {
	Layers       float64     `json:"num_hidden_layers"`
	Hidden       float64     `json:"hidden_size"`
	Heads        float64     `json:"num_attention_heads"`
	KVHeads      float64     `json:"num_key_value_heads"`
	HeadDim      float64     `json:"head_dim"`
	Intermediate float64     `json:"intermediate_size"`
	Vocabulary   float64     `json:"vocab_size"`
	Tied         bool        `json:"tie_word_embeddings"`
	Experts      float64     `json:"num_experts_per_tok"`
	ExpertSize   float64     `json:"moe_intermediate_size"`
	Text         *modelShape `json:"text_config"` // of a model with images
	// Latent attention keeps one vector of these two sizes for all heads of a layer.
	LatentRank float64 `json:"kv_lora_rank"`
	LatentRope float64 `json:"qk_rope_head_dim"`
	// Of hybrid models only some layers read all earlier tokens: those listed as full_attention, or one of
	// so many.
	LayerTypes   []string `json:"layer_types"`
	FullInterval float64  `json:"full_attention_interval"`
	// Other words for it, which kvroute doesn't read.
	Pattern    string    `json:"hybrid_override_pattern"`
	Period     float64   `json:"attn_layer_period"`
	Types      []float64 `json:"attn_type_list"`
	Sliding    float64   `json:"sliding_window_pattern"`
	Window     float64   `json:"sliding_window"`
	UsesWindow *bool     `json:"use_sliding_window"`
	// Chunk is the size of a chunk of layers with chunked local attention, in tokens.
	Chunk int `json:"attention_chunk_size"`
}

// weightsOf computes two weights of a model from its config.json:
//
//	attention: 4 · layers · heads · head size / parameters that compute a token
//	kvRead:    the preset's, scaled by the numbers in a token's keys and values for each parameter that computes it
//
// A weight is 0 if the file does not say enough.
func weightsOf(data []byte, preset string) (attention, kvRead float64) {
	var m modelShape
	if json.Unmarshal(data, &m) != nil {
		return 0, 0
	}
	if m.Text != nil {
		m = *m.Text
	}
	m.KVHeads = cmp.Or(m.KVHeads, m.Heads)
	m.HeadDim = cmp.Or(m.HeadDim, m.Hidden/m.Heads)
	p := presets[preset]
	engine := p.engine()
	kvRead = engine.KVRead() * (m.kvNumbers() / m.parameters()) / (p.kvNumbers / p.parameters)
	return known(4 * m.Layers * m.Heads * m.HeadDim / m.parameters()), known(kvRead)
}

// known returns a weight, or 0 if it cannot be one.
func known(weight float64) float64 {
	if weight > 0 && !math.IsInf(weight, 0) {
		return weight
	}
	return 0
}

// parameters is the number of parameters that compute a token.
func (m *modelShape) parameters() float64 {
	mlp := 3 * m.Hidden * m.Intermediate
	if m.Experts > 0 {
		mlp = 3 * m.Hidden * cmp.Or(m.ExpertSize, m.Intermediate) * m.Experts
	}
	embeddings := 2.
	if m.Tied {
		embeddings = 1
	}
	attention := m.Hidden * m.HeadDim * (2*m.Heads + 2*m.KVHeads) // queries, output, keys, values
	return m.Layers*(attention+mlp) + embeddings*m.Vocabulary*m.Hidden
}

// kvNumbers is the number of numbers in a token's keys and values that a later token reads; 0 if kvroute
// can't read which layers keep them.
func (m *modelShape) kvNumbers() float64 {
	layers := m.Layers
	switch {
	case len(m.LayerTypes) > 0:
		layers = 0
		for _, t := range m.LayerTypes {
			if t == "full_attention" || t == "attention" {
				layers++
			}
		}
		if len(m.LayerTypes) != int(m.Layers) {
			return 0
		}
	case m.FullInterval > 0:
		layers /= m.FullInterval
	case m.Pattern != "", m.Period > 0, len(m.Types) > 0, m.Sliding > 0, m.Window > 0 && (m.UsesWindow == nil || *m.UsesWindow):
		return 0
	}
	if m.LatentRank > 0 {
		return layers * (m.LatentRank + m.LatentRope)
	}
	return layers * 2 * m.KVHeads * m.HeadDim
}

// A preset is an engine with its model: Llama 3.1 8B, Qwen3 32B, Llama 3.1 70B.
type preset struct {
	engine                func() scorer.Engine
	kvNumbers, parameters float64
}

//nolint:gochecknoglobals // a table
var presets = map[string]preset{
	"8b":  {scorer.Dense8B, 2 * 32 * 8 * 128, 8.03e9},
	"32b": {scorer.Dense32B, 2 * 64 * 8 * 128, 32.8e9},
	"70b": {scorer.Dense70B, 2 * 80 * 8 * 128, 70.6e9},
}
