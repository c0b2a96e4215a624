// SPDX-License-Identifier: Apache-2.0

package scorer

import (
	"cmp"
	"fmt"
	"reflect"
	"slices"
)

// Policy names a formula for the cost of a candidate.
type Policy string

// The policies. All are costs, in a unit of their own; lower wins.
const (
	// Tokens is the default: the tokens to wait for, and the delay that the prefill causes
	// to requests that decode on the worker; see [TokenCost].
	Tokens Policy = "tokens"
	// Dynamo is the cost of NVIDIA Dynamo's KV router in its classic form, in
	// blocks: OverlapWeight · prefill blocks + decode blocks. The prefill blocks
	// are all prompt tokens that the worker has to compute with the new request.
	// They may be fractional and are never negative. The decode blocks are the blocks
	// active on the worker with the new request.
	Dynamo Policy = "dynamo"
	// DynamoNewer is the newer form of that cost: cached blocks are subtracted from the
	// prefill, by tier, and each request may add to the load.
	DynamoNewer Policy = "dynamo_newer"
	// PredictedTTFT is the time to the first token in ms by a model of the
	// engine, plus the delay of other requests as in Tokens; see [Engine].
	PredictedTTFT Policy = "predicted_ttft"
	// Weighted is −(WeightedOverlap · cached share − WeightedRequests ·
	// requests / largest batch of the engine − WeightedKVUse · KV use). The first
	// of equal candidates wins.
	Weighted Policy = "weighted"
)

// Policies returns the names of all policies, the default first.
func Policies() []Policy {
	return []Policy{Tokens, Dynamo, DynamoNewer, PredictedTTFT, Weighted}
}

// Settings say how a decision is made. Begin with [Defaults]; use only settings that
// [Settings.Validate] accepts.
type Settings struct {
	Policy Policy `json:"cost"`
	// Temperature above 0 draws the worker by [Softmax]; 0 takes the lowest cost.
	Temperature float64 `json:"router_temperature"`

	// Dynamo: weight of prefill against decode. 0 routes by load alone.
	OverlapWeight float64 `json:"overlap_score_weight"`

	// DynamoNewer.
	OverlapCredit float64 `json:"overlap_score_credit"`       // prefill blocks forgiven for a block on the device; 0 routes by load alone
	CreditDecay   float64 `json:"overlap_score_credit_decay"` // shrinks that credit on workers with more pending prefill than the idlest
	PrefillScale  float64 `json:"prefill_load_scale"`         // weight of prefill against decode
	RequestWeight float64 `json:"active_request_weight"`      // blocks that a request on the worker counts by itself

	// The value of a block on a lower tier, in blocks on the device. Dynamo and Weighted
	// ignore lower tiers.
	HostWeight float64 `json:"host_cache_weight"`
	DiskWeight float64 `json:"disk_cache_weight"`

	// Tokens and PredictedTTFT: the share of a prefill that delays each other request on
	// the worker. Higher values give smoother output and a later first token.
	Alpha float64 `json:"alpha"`
	// Tokens: the cost of attention to one earlier token, in tokens.
	Attention float64 `json:"attention"`
	// Tokens, PredictedTTFT and Weighted: the weight of the delay by requests that decode on the
	// worker. 1 is the derived delay. 0 ignores it, and in Tokens what copies of a prefix cost or save
	// beyond their prefill; weights below 1 scale both.
	DecodeWeight float64 `json:"decode_weight"`
	// KVRead is the cost of reading the keys and values of one held token in a step, in tokens: the
	// ratio of [Engine.KVToken] and [Engine.Token] for the model.
	KVRead float64 `json:"kv_read"`

	Engine   Engine  `json:"engine"`              // PredictedTTFT, and estimates
	MaxBatch float64 `json:"max_batch" want:">0"` // Weighted: largest batch of a worker that does not report its own

	// Weighted: the weights of the cached share, the batch and the cache in use.
	WeightedOverlap  float64 `json:"weighted_overlap"`
	WeightedRequests float64 `json:"weighted_requests"`
	WeightedKVUse    float64 `json:"weighted_kv_use"`

	// How requests are booked; see Booking in package slots.
	AssumeKVReuse bool `json:"assume_kv_reuse"`
	TrackPrefill  bool `json:"track_prefill_tokens"`
}

// Defaults returns the settings that need no calibration.
func Defaults() Settings {
	engine := Dense32B()
	return Settings{
		Policy:        Tokens,
		OverlapWeight: 1,
		OverlapCredit: 1, PrefillScale: 1,
		HostWeight: .75, DiskWeight: .25,
		Alpha: .1, DecodeWeight: 1, KVRead: engine.KVRead(), Engine: engine, MaxBatch: 256,
		WeightedOverlap: .6, WeightedRequests: .3, WeightedKVUse: .1,
		AssumeKVReuse: true, TrackPrefill: true,
	}
}

// A SettingError names a setting with a wrong value, and what it should be.
type SettingError struct {
	Setting string // its name, as in the override's JSON
	Value   any
	Want    string
}

// Error implements error.
func (e *SettingError) Error() string {
	return fmt.Sprintf("scorer: %s is %v, want %s", e.Setting, e.Value, e.Want)
}

// Validate returns a *[SettingError] for the first setting that is out of range.
func (s *Settings) Validate() error {
	if !slices.Contains(Policies(), s.Policy) {
		return &SettingError{"cost", string(s.Policy), fmt.Sprintf("one of %v", Policies())}
	}
	return validate("", reflect.ValueOf(s).Elem())
}

// validate checks all numbers of a struct of settings.
func validate(prefix string, settings reflect.Value) error {
	for field, value := range settings.Fields() {
		name := prefix + field.Tag.Get("json")
		var err error
		switch value.Kind() {
		case reflect.Struct:
			err = validate(name+".", value)
		case reflect.Float64:
			err = check(name, value.Float(), field.Tag.Get("want") == ">0")
		default:
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// check refuses what is not finite, negative or, if above is set, 0.
func check(name string, value float64, above bool) error {
	switch {
	case above && (!finite(value) || value <= 0):
		return &SettingError{name, value, "a finite number above 0"}
	case !finite(value) || value < 0:
		return &SettingError{name, value, "a finite number, 0 or more"}
	}
	return nil
}

// UsesOverlap reports whether cached blocks can change a decision. If not, no index is
// needed.
func (s *Settings) UsesOverlap() bool {
	switch s.Policy {
	case Dynamo:
		return s.OverlapWeight > 0
	case DynamoNewer:
		return s.OverlapCredit > 0
	case Weighted:
		return s.WeightedOverlap > 0
	default:
		return true
	}
}

// UsesMemory reports whether costs read AdditionalBlocks or KVUse of an [Input], which take long to fill in. If
// not, callers may leave them 0. A new cost that reads one of them must be named here.
func (s *Settings) UsesMemory() bool {
	return s.Policy != Tokens && s.Policy != PredictedTTFT || !s.TrackPrefill
}

// Override changes settings for one request. nil leaves a setting unchanged.
type Override struct {
	Cost        *Policy  `json:"cost,omitempty"`
	Temperature *float64 `json:"router_temperature,omitempty"`

	OverlapScoreWeight    *float64 `json:"overlap_score_weight,omitempty"`
	OverlapScoreCredit    *float64 `json:"overlap_score_credit,omitempty"`
	PrefillLoadScale      *float64 `json:"prefill_load_scale,omitempty"`
	SharedCacheMultiplier *float64 `json:"shared_cache_multiplier,omitempty"`

	Alpha     *float64 `json:"alpha,omitempty"`
	Attention *float64 `json:"attention,omitempty"`

	DecodeWeight *float64 `json:"decode_weight,omitempty"`

	AssumeKVReuse      *bool `json:"assume_kv_reuse,omitempty"`
	TrackPrefillTokens *bool `json:"track_prefill_tokens,omitempty"`
}

// Compares reports whether the override changes how workers are compared, and not only how
// the request is booked.
func (o *Override) Compares() bool {
	booking := Override{AssumeKVReuse: o.AssumeKVReuse, TrackPrefillTokens: o.TrackPrefillTokens}
	return *o != booking
}

// With returns the settings for one request. Each field of the override has an effect: a
// field that the policy does not use selects a policy that uses it, as
// overlap_score_weight selects Dynamo. It is an error if cost names another policy. Errors
// are *[SettingError].
func (s Settings) With(o *Override) (Settings, error) {
	if o == nil {
		return s, nil
	}
	given := []knob{
		{"overlap_score_weight", o.OverlapScoreWeight, []Policy{Dynamo, DynamoNewer}, true},
		{"overlap_score_credit", o.OverlapScoreCredit, []Policy{DynamoNewer}, false},
		{"prefill_load_scale", o.PrefillLoadScale, []Policy{DynamoNewer}, true},
		{"shared_cache_multiplier", o.SharedCacheMultiplier, []Policy{DynamoNewer}, false},
		{"alpha", o.Alpha, []Policy{Tokens, PredictedTTFT}, true},
		{"attention", o.Attention, []Policy{Tokens}, true},
		{"decode_weight", o.DecodeWeight, []Policy{Tokens, PredictedTTFT, Weighted}, false},
	}
	if m := o.SharedCacheMultiplier; m != nil && *m != 0 {
		return s, &SettingError{"shared_cache_multiplier", *m, "0: the router does not know the contents of a shared cache"}
	}
	if o.OverlapScoreWeight != nil && o.PrefillLoadScale != nil {
		return s, &SettingError{"prefill_load_scale", *o.PrefillLoadScale, "no overlap score weight beside it, which sets the same"}
	}
	to, err := s.target(o, given)
	if err != nil {
		return s, err
	}

	t := s
	if s.Policy == Dynamo && to == DynamoNewer {
		t.setWeight(s.OverlapWeight)
	}
	t.Policy = to
	set(&t.Temperature, o.Temperature)
	if o.OverlapScoreWeight != nil {
		t.setWeight(*o.OverlapScoreWeight)
	}
	set(&t.OverlapCredit, o.OverlapScoreCredit)
	set(&t.PrefillScale, o.PrefillLoadScale)
	set(&t.Alpha, o.Alpha)
	set(&t.Attention, o.Attention)
	set(&t.DecodeWeight, o.DecodeWeight)
	set(&t.AssumeKVReuse, o.AssumeKVReuse)
	set(&t.TrackPrefill, o.TrackPrefillTokens)
	if err := cmp.Or(t.Validate(), t.idle(given)); err != nil {
		return s, err
	}
	if !s.UsesOverlap() && t.UsesOverlap() {
		return s, s.noIndex(o, given)
	}
	return t, nil
}

// knob is a number of an override.
type knob struct {
	name     string
	value    *float64
	policies []Policy // that use it
	prefill  bool     // it weighs prefill
}

// ignoredBy reports whether the policy does not use a given knob.
func (k *knob) ignoredBy(p Policy) bool { return k.value != nil && !slices.Contains(k.policies, p) }

// target returns the policy that an override selects: the named one, else the configured one if
// it uses all knobs, else the first one that does.
func (s *Settings) target(o *Override, given []knob) (Policy, error) {
	ignored := func(p Policy) int {
		return slices.IndexFunc(given, func(k knob) bool { return k.ignoredBy(p) })
	}
	if o.Cost != nil {
		if at := ignored(*o.Cost); at >= 0 && slices.Contains(Policies(), *o.Cost) {
			return "", &SettingError{given[at].name, *given[at].value, fmt.Sprintf("a cost that knows it, which %q does not", *o.Cost)}
		}
		return *o.Cost, nil
	}
	for _, p := range []Policy{s.Policy, Dynamo, DynamoNewer, Tokens} {
		if ignored(p) < 0 {
			return p, nil
		}
	}
	k := given[ignored(Tokens)]
	return "", &SettingError{k.name, *k.value, "no alpha or attention beside it, which belong to another cost"}
}

// idle refuses weights of prefill if prefill is not tracked: they would have no effect. A
// weight of 0 is accepted.
func (s *Settings) idle(given []knob) error {
	if s.TrackPrefill || s.Policy == PredictedTTFT {
		return nil
	}
	for _, k := range given {
		if k.prefill && k.value != nil && *k.value > 0 {
			return &SettingError{k.name, *k.value, "none where prefill is not tracked: it weighs nothing else"}
		}
	}
	return nil
}

// setWeight applies overlap_score_weight to both forms of Dynamo's cost.
func (s *Settings) setWeight(w float64) {
	s.OverlapWeight, s.PrefillScale = w, w
	if w == 0 {
		s.OverlapCredit = 0
	}
}

// noIndex returns the error of an override that needs an index if the router keeps no
// index.
func (s *Settings) noIndex(o *Override, given []knob) error {
	const want = "none: the router is set up to route by load alone and keeps no index"
	for _, k := range given {
		if k.value != nil && (o.Cost == nil || *k.value > 0) {
			return &SettingError{k.name, *k.value, want}
		}
	}
	return &SettingError{"cost", *o.Cost, want}
}

func set[T any](to *T, from *T) {
	if from != nil {
		*to = *from
	}
}
