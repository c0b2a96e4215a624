// SPDX-License-Identifier: Apache-2.0

package scorer

// Thresholds say when a worker is too busy to be a candidate. nil turns a threshold off.
type Thresholds struct {
	ActiveBlocks    *float64 `json:"active_decode_blocks_threshold,omitempty"`       // share of the worker's blocks, 0..1
	PrefillTokens   *int     `json:"active_prefill_tokens_threshold,omitempty"`      // pending prefill tokens
	PrefillFraction *float64 `json:"active_prefill_tokens_threshold_frac,omitempty"` // the same, in batches of the engine
}

// Validate returns a *[SettingError] for the first threshold that makes no sense.
func (t *Thresholds) Validate() error {
	if v := t.ActiveBlocks; v != nil && !(*v >= 0 && *v <= 1) {
		return &SettingError{"active_decode_blocks_threshold", *v, "a share from 0 to 1"}
	}
	if v := t.PrefillTokens; v != nil && *v < 0 {
		return &SettingError{"active_prefill_tokens_threshold", *v, "0 or more tokens"}
	}
	if v := t.PrefillFraction; v != nil {
		return check("active_prefill_tokens_threshold_frac", *v, false)
	}
	return nil
}

// Occupancy is the load that the thresholds are compared with.
type Occupancy struct {
	ActiveBlocks     int // by the slots
	PendTokens       int
	EngineBlocks     int // in use by the engine's own report; 0 = no recent report
	TotalBlocks      int // 0 = unknown
	MaxBatchedTokens int // 0 = unknown
}

// Busy reports whether a worker is above one of the thresholds. skipped is the number of
// thresholds that could not be applied because the worker's capacity is unknown.
func (t *Thresholds) Busy(o Occupancy) (busy bool, skipped int) {
	if t.ActiveBlocks != nil {
		if o.TotalBlocks <= 0 {
			skipped++
		} else if float64(max(o.ActiveBlocks, o.EngineBlocks)) > *t.ActiveBlocks*float64(o.TotalBlocks) {
			busy = true
		}
	}
	if t.PrefillTokens != nil && o.PendTokens > *t.PrefillTokens {
		busy = true
	}
	if t.PrefillFraction != nil {
		if o.MaxBatchedTokens <= 0 {
			skipped++
		} else if float64(o.PendTokens) > *t.PrefillFraction*float64(o.MaxBatchedTokens) {
			busy = true
		}
	}
	return busy, skipped
}

// OwnedTokens is PendTokens without LeftTokens.
func (in *Input) OwnedTokens() int { return max(0, in.PendTokens-in.LeftTokens) }

// MustWait reports whether all candidates have more pending prefill than threshold batches of
// the engine; false without candidates, and if the batch size of any of them is unknown.
func MustWait(in []Input, threshold float64) bool {
	for i := range in {
		batch := in[i].MaxBatchedTokens
		if batch <= 0 || in[i].mean(in[i].OwnedTokens()) <= threshold*float64(batch) {
			return false
		}
	}
	return len(in) > 0
}
