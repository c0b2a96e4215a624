// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"github.com/kvroute/kvroute/router"
	"github.com/kvroute/kvroute/scorer"
)

// optional makes a flag of a number that may be absent.
func optional[T float64 | int](fs *flag.FlagSet, to **T, name, usage string, parse func(string) (T, error)) {
	fs.Func(name, usage, func(s string) error {
		v, err := parse(s)
		if err != nil {
			return err
		}
		*to = &v
		return nil
	})
}

func parseFloat(s string) (float64, error) { return strconv.ParseFloat(s, 64) }

// routingFlags makes flags of the settings that say how a decision is made. Where
// NVIDIA Dynamo has a flag of the same meaning, the name is its own.
func (c *config) routingFlags(fs *flag.FlagSet) {
	fs.StringVar(&c.RouterMode, "router-mode", c.RouterMode, "kv, random, round-robin, direct, least-loaded, power-of-two or device-aware-weighted")
	fs.StringVar(&c.Cost, "cost", c.Cost, "tokens, dynamo, dynamo_newer, predicted_ttft or weighted: what a worker costs in mode kv (default tokens)")
	optional(fs, &c.Alpha, "alpha", "`share` of a prefill that each request beside it pays (default 0.1)", parseFloat)
	fs.StringVar(&c.Attention, "attention", c.Attention, "`weight` of attention against the linear part of a token, or auto: the model's own")
	fs.Float64Var(&c.RouterTemperature, "router-temperature", c.RouterTemperature, "above 0 draws the worker, the cheaper the likelier")
	optional(fs, &c.KVOverlapScoreWeight, "kv-overlap-score-weight", "`weight` of prefill against active blocks, selects the cost dynamo; 0 routes by load alone", parseFloat)
	optional(fs, &c.OverlapScoreCredit, "router-kv-overlap-score-credit", "prefill `blocks` forgiven for a cached one, selects the cost dynamo_newer; 0 routes by load alone", parseFloat)
	optional(fs, &c.OverlapScoreCreditDecay, "router-kv-overlap-score-credit-decay", "`rate` at which that credit shrinks with pending prefill, selects dynamo_newer", parseFloat)
	optional(fs, &c.PrefillLoadScale, "router-prefill-load-scale", "`weight` of prefill against active blocks, selects dynamo_newer", parseFloat)
	optional(fs, &c.DecodeActiveRequestWeight, "router-decode-active-request-weight", "`blocks` that each request counts by itself, selects dynamo_newer", parseFloat)
	optional(fs, &c.HostCacheHitWeight, "router-host-cache-hit-weight", "`blocks` that a cached one in host memory is worth, not for dynamo and weighted (default 0.75)", parseFloat)
	optional(fs, &c.DiskCacheHitWeight, "router-disk-cache-hit-weight", "the same on disk or farther (default 0.25)", parseFloat)
	optional(fs, &c.WeightedOverlap, "weighted-overlap", "`weight` of the cached share of a prompt, for the cost weighted (default 0.6)", parseFloat)
	optional(fs, &c.WeightedRequests, "weighted-requests", "`weight` of requests as a share of what the engine computes at a time, for the cost weighted (default 0.3)", parseFloat)
	optional(fs, &c.WeightedKVUse, "weighted-kv-use", "`weight` of the used share of the engine's cache, for the cost weighted (default 0.1)", parseFloat)
	fs.StringVar(&c.EnginePreset, "engine-preset", c.EnginePreset, "32b, 8b or 70b: the engine that times are estimated by")
	fs.Float64Var(&c.DeviceRatio, "device-ratio", c.DeviceRatio, "`CPUs` that do the work of one GPU, in mode device-aware-weighted")
	fs.BoolVar(&c.NoAssumeKVReuse, "no-assume-kv-reuse", c.NoAssumeKVReuse, "count the blocks of each request as its own")
	fs.BoolVar(&c.NoTrackActiveBlocks, "no-track-active-blocks", c.NoTrackActiveBlocks, "do not count the blocks of requests in flight")
	fs.BoolVar(&c.NoTrackPrefillTokens, "no-router-track-prefill-tokens", c.NoTrackPrefillTokens, "do not count the prefill tokens of requests in flight")
	fs.BoolVar(&c.NoTrackOutputBlocks, "no-router-track-output-blocks", c.NoTrackOutputBlocks, "do not estimate the blocks that outputs fill")
	fs.Float64Var(&c.OutputRate, "output-rate", c.OutputRate, "`tokens` a second that a request makes, for that; 0 takes what workers are known for, or the engine preset")
	optional(fs, &c.BusyThreshold, "busy-threshold", "`share` of a worker's blocks, 0 to 1, above which it gets no requests", parseFloat)
	optional(fs, &c.ActivePrefillTokensThreshold, "active-prefill-tokens-threshold", "pending prefill `tokens` above which a worker gets no requests", strconv.Atoi)
	optional(fs, &c.ActivePrefillTokensThresholdFrac, "active-prefill-tokens-threshold-frac", "the same in `batches` of the engine", parseFloat)
	optional(fs, &c.RouterQueueThreshold, "router-queue-threshold", "`batches` of pending prefill that each worker has when requests begin to wait; absent: nobody waits", parseFloat)
	fs.StringVar(&c.RouterQueuePolicy, "router-queue-policy", c.RouterQueuePolicy, "fcfs, lcfs or wspt: who waits first")
	fs.IntVar(&c.RouterQueueLimit, "router-queue-limit", c.RouterQueueLimit, "largest `number` of requests that wait, by pool")
	fs.DurationVar(&c.QueueWait, "queue-wait", c.QueueWait, "longest `time` that a request waits; less than Envoy's max_message_timeout")
	fs.IntVar(&c.OverloadStatus, "overload-status", c.OverloadStatus, "`status` of requests refused because all workers are busy: 429, 503 or 529")
	fs.IntVar(&c.SessionAffinityTTL, "session-affinity-ttl-secs", c.SessionAffinityTTL, "`seconds` without a request after which a session leaves its worker; 0: sessions do not matter")
	fs.StringVar(&c.SessionAffinityMode, "session-affinity-mode", c.SessionAffinityMode, "hard or soft: whether a session stays with a worker that cannot take it")
	fs.StringVar(&c.SessionHeaders, "session-headers", c.SessionHeaders, "`names` of the headers that name a session, comma-separated; the first one present counts")
	fs.BoolVar(&c.TrustOverrides, "trust-overrides", c.TrustOverrides, "heed the routing hints and overrides in headers of requests")
	fs.BoolVar(&c.AllowDirect, "allow-direct", c.AllowDirect, "heed the worker named in headers of requests")
}

// autoAttention is the attention weight of models that nobody knows more of: that
// of a dense model of 32B on two H100.
const autoAttention = 6e-5

// scoring is what the flags say of the cost.
func (c *config) scoring() (scorer.Settings, error) {
	s := scorer.Defaults()
	s.Attention = autoAttention
	switch c.EnginePreset {
	case "32b":
	case "8b":
		s.Engine = scorer.Dense8B()
	case "70b":
		s.Engine = scorer.Dense70B()
	default:
		return s, fmt.Errorf("config: engine-preset is %q, want 32b, 8b or 70b", c.EnginePreset)
	}
	s.Temperature = c.RouterTemperature
	s.AssumeKVReuse, s.TrackPrefill = !c.NoAssumeKVReuse, !c.NoTrackPrefillTokens

	o := scorer.Override{
		OverlapScoreWeight: c.KVOverlapScoreWeight, OverlapScoreCredit: c.OverlapScoreCredit,
		PrefillLoadScale: c.PrefillLoadScale, Alpha: c.Alpha,
	}
	if c.Cost != "" {
		o.Cost = new(scorer.Policy(c.Cost))
	}
	if attention, given, err := c.attention(); err != nil {
		return s, err
	} else if given {
		o.Attention = &attention
	}
	// Two settings that no request can override belong to the same policy.
	for name, v := range map[string]*float64{
		"router-kv-overlap-score-credit-decay": c.OverlapScoreCreditDecay,
		"router-decode-active-request-weight":  c.DecodeActiveRequestWeight,
	} {
		if v == nil {
			continue
		}
		if c.Cost != "" && scorer.Policy(c.Cost) != scorer.DynamoNewer {
			return s, fmt.Errorf("config: %s belongs to the cost %s, not to %s", name, scorer.DynamoNewer, c.Cost)
		}
		o.Cost = new(scorer.DynamoNewer)
	}
	s.HostWeight, s.DiskWeight = *cmp.Or(c.HostCacheHitWeight, &s.HostWeight), *cmp.Or(c.DiskCacheHitWeight, &s.DiskWeight)
	s.CreditDecay, s.RequestWeight = *cmp.Or(c.OverlapScoreCreditDecay, &s.CreditDecay), *cmp.Or(c.DecodeActiveRequestWeight, &s.RequestWeight)
	s.WeightedOverlap, s.WeightedRequests = *cmp.Or(c.WeightedOverlap, &s.WeightedOverlap), *cmp.Or(c.WeightedRequests, &s.WeightedRequests)
	s.WeightedKVUse = *cmp.Or(c.WeightedKVUse, &s.WeightedKVUse)
	t, err := s.With(&o)
	if err != nil {
		return s, named(err)
	}
	return t, c.pointless(&t)
}

// named makes an error of package scorer say which flag is meant.
func named(err error) error {
	if bad, ok := errors.AsType[*scorer.SettingError](err); ok && flagOf(bad.Setting) != "" {
		return fmt.Errorf("config: %s: %w", flagOf(bad.Setting), err)
	}
	return fmt.Errorf("config: %w", err)
}

// pointless refuses settings beside others that keep them from ever changing
// anything: who set them expects something else. What the API or a request may turn
// on while kvroute runs is not among them.
func (c *config) pointless(s *scorer.Settings) error {
	d := defaults()
	kv := c.RouterMode == string(router.KV)
	mode := "router-mode " + c.RouterMode
	knowsTiers := s.Policy != scorer.Dynamo && s.Policy != scorer.Weighted
	for _, p := range []struct {
		setting string
		given   bool
		useful  bool
		beside  string
	}{
		{"cost", c.Cost != "", kv, mode},
		{"alpha", c.Alpha != nil, kv, mode},
		{"attention", c.Attention != d.Attention, kv, mode},
		{"router-temperature", c.RouterTemperature != 0, kv, mode},
		{"kv-overlap-score-weight", c.KVOverlapScoreWeight != nil, kv, mode},
		{"router-kv-overlap-score-credit", c.OverlapScoreCredit != nil, kv, mode},
		{"router-kv-overlap-score-credit-decay", c.OverlapScoreCreditDecay != nil, kv, mode},
		{"router-prefill-load-scale", c.PrefillLoadScale != nil, kv, mode},
		{"router-decode-active-request-weight", c.DecodeActiveRequestWeight != nil, kv, mode},
		{"router-host-cache-hit-weight", c.HostCacheHitWeight != nil, kv, mode},
		{"router-disk-cache-hit-weight", c.DiskCacheHitWeight != nil, kv, mode},
		{"device-ratio", c.DeviceRatio != d.DeviceRatio, c.RouterMode == string(router.DeviceAware), mode},

		{"router-kv-overlap-score-credit-decay", c.OverlapScoreCreditDecay != nil, s.TrackPrefill, "no-router-track-prefill-tokens"},
		{"router-kv-overlap-score-credit-decay", c.OverlapScoreCreditDecay != nil, s.OverlapCredit > 0, "router-kv-overlap-score-credit 0"},
		{"router-host-cache-hit-weight", c.HostCacheHitWeight != nil, knowsTiers, "cost " + string(s.Policy)},
		{"router-disk-cache-hit-weight", c.DiskCacheHitWeight != nil, knowsTiers, "cost " + string(s.Policy)},
		{"router-host-cache-hit-weight", c.HostCacheHitWeight != nil, s.UsesOverlap(), "router-kv-overlap-score-credit 0"},
		{"router-disk-cache-hit-weight", c.DiskCacheHitWeight != nil, s.UsesOverlap(), "router-kv-overlap-score-credit 0"},

		{"weighted-overlap", c.WeightedOverlap != nil, kv && s.Policy == scorer.Weighted, "cost " + string(s.Policy)},
		{"weighted-requests", c.WeightedRequests != nil, kv && s.Policy == scorer.Weighted, "cost " + string(s.Policy)},
		{"weighted-kv-use", c.WeightedKVUse != nil, kv && s.Policy == scorer.Weighted, "cost " + string(s.Policy)},

		{"router-ttl-secs", c.RouterTTLSecs != d.RouterTTLSecs, s.UsesOverlap(), "a weight of 0, which keeps no index"},
		{"router-predicted-ttl-secs", c.RouterPredictedTTLSecs != d.RouterPredictedTTLSecs, s.UsesOverlap() || c.RouterPredictedTTLSecs == 0, "a weight of 0, which keeps no index"},
		{"router-predicted-ttl-secs", c.RouterPredictedTTLSecs != d.RouterPredictedTTLSecs, !c.NoKVEvents || c.RouterPredictedTTLSecs == 0, "no-kv-events, where router-ttl-secs counts"},
		{"max-index-blocks", c.MaxIndexBlocks != d.MaxIndexBlocks, s.UsesOverlap(), "a weight of 0, which keeps no index"},
		{"max-index-blocks", c.MaxIndexBlocks != d.MaxIndexBlocks, !c.NoKVEvents, "no-kv-events"},

		{"output-rate", c.OutputRate != 0, !c.NoTrackOutputBlocks, "no-router-track-output-blocks"},
		{"router-queue-policy", c.RouterQueuePolicy != d.RouterQueuePolicy, c.RouterQueueThreshold != nil, "no router-queue-threshold"},
		{"router-queue-limit", c.RouterQueueLimit != d.RouterQueueLimit, c.RouterQueueThreshold != nil, "no router-queue-threshold"},
		{"queue-wait", c.QueueWait != d.QueueWait, c.RouterQueueThreshold != nil, "no router-queue-threshold"},
		{"session-affinity-mode", c.SessionAffinityMode != d.SessionAffinityMode, c.SessionAffinityTTL != 0, "session-affinity-ttl-secs 0"},
		{"session-headers", c.SessionHeaders != d.SessionHeaders, c.SessionAffinityTTL != 0, "session-affinity-ttl-secs 0"},
	} {
		if p.given && !p.useful {
			return fmt.Errorf("config: %s has no effect beside %s", p.setting, p.beside)
		}
	}
	return nil
}

// flagOf says which flag a setting comes from, where the name is another one.
func flagOf(setting string) string {
	switch setting {
	case "overlap_score_weight":
		return "kv-overlap-score-weight"
	case "overlap_score_credit":
		return "router-kv-overlap-score-credit"
	case "overlap_score_credit_decay":
		return "router-kv-overlap-score-credit-decay"
	case "prefill_load_scale":
		return "router-prefill-load-scale"
	case "active_request_weight":
		return "router-decode-active-request-weight"
	case "host_cache_weight":
		return "router-host-cache-hit-weight"
	case "disk_cache_weight":
		return "router-disk-cache-hit-weight"
	case "weighted_overlap", "weighted_requests", "weighted_kv_use":
		return strings.ReplaceAll(setting, "_", "-")
	case "active_decode_blocks_threshold":
		return "busy-threshold"
	case "active_prefill_tokens_threshold":
		return "active-prefill-tokens-threshold"
	case "active_prefill_tokens_threshold_frac":
		return "active-prefill-tokens-threshold-frac"
	}
	return ""
}

// attention returns the attention weight, if it is given for all models.
func (c *config) attention() (weight float64, given bool, err error) {
	if c.Attention == "auto" {
		return 0, false, nil
	}
	weight, err = parseFloat(c.Attention)
	if err != nil || math.IsNaN(weight) {
		return 0, false, fmt.Errorf("config: attention is %q, want a number or auto", c.Attention)
	}
	return weight, true, nil
}

// sessionHeaders returns the names of the headers that name a session.
func (c *config) sessionHeaders() (names []string) {
	for name := range strings.SplitSeq(c.SessionHeaders, ",") {
		if name = strings.ToLower(strings.TrimSpace(name)); name != "" {
			names = append(names, name)
		}
	}
	return names
}

// checkedRouting is routing for settings that a router accepts.
func (c *config) checkedRouting() (router.Config, error) {
	rc, err := c.routing()
	if err == nil {
		_, err = router.New(rc)
	}
	return rc, err
}

// routing is everything that the flags say of decisions.
func (c *config) routing() (router.Config, error) {
	scoring, err := c.scoring()
	if err != nil {
		return router.Config{}, err
	}
	if c.RouterMode == string(router.Direct) && !c.AllowDirect {
		return router.Config{}, errors.New("config: router-mode direct needs allow-direct, or no request can name its worker")
	}
	if m := c.SessionAffinityMode; m != "hard" && m != "soft" {
		return router.Config{}, fmt.Errorf("config: session-affinity-mode is %q, want hard or soft", m)
	}
	thresholds := scorer.Thresholds{
		ActiveBlocks: c.BusyThreshold, PrefillTokens: c.ActivePrefillTokensThreshold, PrefillFraction: c.ActivePrefillTokensThresholdFrac,
	}
	if err := thresholds.Validate(); err != nil {
		return router.Config{}, named(err)
	}
	return router.Config{
		Mode:           router.Mode(c.RouterMode),
		Scoring:        scoring,
		DeviceRatio:    c.DeviceRatio,
		Thresholds:     thresholds,
		Queue:          router.QueueConfig{Threshold: c.RouterQueueThreshold, Policy: scorer.QueuePolicy(c.RouterQueuePolicy), Limit: c.RouterQueueLimit},
		Sessions:       router.SessionConfig{TTL: time.Duration(c.SessionAffinityTTL) * time.Second, Hard: c.SessionAffinityMode == "hard"},
		NoActiveBlocks: c.NoTrackActiveBlocks,
		EstimateOutput: !c.NoTrackOutputBlocks,
		OutputRate:     c.OutputRate,
		BlockSize:      c.BlockSize,
		MaxBlocks:      c.MaxIndexBlocks,
		NoEvents:       c.NoKVEvents,
		GuessTTL:       seconds(c.RouterTTLSecs),
		PredictTTL:     cmp.Or(seconds(c.RouterPredictedTTLSecs), -1),
		StrictModels:   c.StrictModels,
		AvoidFailing:   c.AvoidFailing,
		Seed:           c.Seed,
		KeepDecisions:  cmp.Or(c.KeepDecisions, -1),

		InferFirstTokens: true,
	}, nil
}

// modelShape is what a model's config.json says of its size.
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
	Text         *modelShape `json:"text_config"` // of a model that also sees
}

// attentionOf works out the attention weight of a model from its config.json:
//
//	4 · layers · heads · head size / parameters that compute a token
//
// It returns false if the file does not say enough.
func attentionOf(data []byte) (weight float64, ok bool) {
	var m modelShape
	if json.Unmarshal(data, &m) != nil {
		return 0, false
	}
	if m.Text != nil {
		m = *m.Text
	}
	m.KVHeads = cmp.Or(m.KVHeads, m.Heads)
	m.HeadDim = cmp.Or(m.HeadDim, m.Hidden/m.Heads)
	mlp := 3 * m.Hidden * m.Intermediate
	if m.Experts > 0 {
		mlp = 3 * m.Hidden * cmp.Or(m.ExpertSize, m.Intermediate) * m.Experts
	}
	embeddings := 2.
	if m.Tied {
		embeddings = 1
	}
	attention := m.Hidden * m.HeadDim * (2*m.Heads + 2*m.KVHeads) // queries, output, keys, values
	parameters := m.Layers*(attention+mlp) + embeddings*m.Vocabulary*m.Hidden
	weight = 4 * m.Layers * m.Heads * m.HeadDim / parameters
	return weight, weight > 0 && !math.IsInf(weight, 0)
}
