// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"strconv"
)

// LoadPaths are where engines say how busy they are, in the order in which to ask:
// TensorRT-LLM's text, then everybody else's, which may also be TensorRT-LLM's JSON.
//
//nolint:gochecknoglobals // a table
var LoadPaths = [...]string{"/prometheus/metrics", "/metrics"}

// ErrNoLoad means that an engine's metrics say nothing of its load.
var ErrNoLoad = errors.New("the metrics say nothing of the load")

// Capacity is what turns shares and tokens into blocks. A zero field is not known.
type Capacity struct {
	Blocks    int // of one rank's cache
	BlockSize int // tokens
}

// The gauges that count.
type gauge uint8

const (
	gaugeRunning gauge = iota
	gaugeWaiting
	gaugeUsage  // of the cache, 0 to 1
	gaugeUsed   // blocks
	gaugeTokens // in the cache
	gaugeBlocks // of the cache
	gaugeKinds
)

//nolint:gochecknoglobals // a table
var gauges = map[string]gauge{
	"vllm:num_requests_running":   gaugeRunning,
	"vllm:num_requests_waiting":   gaugeWaiting,
	"vllm:kv_cache_usage_perc":    gaugeUsage,
	"vllm:gpu_cache_usage_perc":   gaugeUsage, // before 0.10
	"sglang:num_running_reqs":     gaugeRunning,
	"sglang:num_queue_reqs":       gaugeWaiting,
	"sglang:token_usage":          gaugeUsage,
	"sglang:num_used_tokens":      gaugeTokens,
	"trtllm_num_requests_running": gaugeRunning,
	"trtllm_num_requests_waiting": gaugeWaiting,
	"trtllm_kv_cache_utilization": gaugeUsage,
	"trtllm_kv_cache_used_blocks": gaugeUsed,
	"trtllm_kv_cache_max_blocks":  gaugeBlocks,
}

// EngineLoad reads what an engine's metrics say of each rank's load: the text of vLLM,
// SGLang and TensorRT-LLM, or the JSON of TensorRT-LLM's statistics. Series of one rank
// count once, the largest. The error is [ErrNoLoad] if there is nothing of the kind;
// TensorRT-LLM says nothing when nothing has happened since it was asked last.
func EngineLoad(body []byte, c Capacity) (map[uint32]Load, error) {
	ranks := make(map[uint32]*[gaugeKinds]float64)
	said := func(rank uint32, g gauge, v float64) {
		if math.IsNaN(v) || v < 0 || v > 1e12 || len(ranks) >= maxRanks && ranks[rank] == nil {
			return
		}
		if ranks[rank] == nil {
			ranks[rank] = new([gaugeKinds]float64)
		}
		ranks[rank][g] = max(ranks[rank][g], v)
	}
	if text := bytes.TrimSpace(body); len(text) > 0 && text[0] == '[' {
		readStatistics(text, said)
	} else {
		readGauges(body, said)
	}
	if len(ranks) == 0 {
		return nil, ErrNoLoad
	}
	loads := make(map[uint32]Load, len(ranks))
	for rank, v := range ranks {
		blocks := max(float64(c.Blocks), v[gaugeBlocks])
		l := Load{Running: int(v[gaugeRunning]), Waiting: int(v[gaugeWaiting]), KVUtilization: min(1, v[gaugeUsage])}
		switch {
		case v[gaugeUsed] > 0:
			l.KVUsedBlocks = int(v[gaugeUsed])
		case v[gaugeTokens] > 0 && c.BlockSize > 0:
			l.KVUsedBlocks = int(math.Ceil(v[gaugeTokens] / float64(c.BlockSize)))
		default:
			l.KVUsedBlocks = int(math.Round(l.KVUtilization * blocks))
		}
		if l.KVUtilization == 0 && blocks > 0 {
			l.KVUtilization = min(1, float64(l.KVUsedBlocks)/blocks)
		}
		loads[rank] = l
	}
	return loads, nil
}

// AskLoad asks an engine for its metrics on one path after the other, by get, until one
// says something of the load, and returns that with the path. The error has what was
// wrong with each.
func AskLoad(paths []string, c Capacity, get func(path string) ([]byte, error)) (ranks map[uint32]Load, from string, err error) {
	var errs []error
	for _, path := range paths {
		body, err := get(path)
		if err == nil {
			ranks, err = EngineLoad(body, c)
		}
		if err == nil {
			return ranks, path, nil
		}
		errs = append(errs, err)
	}
	return nil, "", errors.Join(errs...)
}

// Total is the load of all ranks together.
func Total(ranks map[uint32]Load) (sum Load) {
	for _, l := range ranks {
		sum.Running += l.Running
		sum.Waiting += l.Waiting
		sum.KVUsedBlocks += l.KVUsedBlocks
		sum.KVUtilization += l.KVUtilization / float64(len(ranks))
	}
	return sum
}

// readGauges reads the text form: a line is a name, labels in braces, a value.
func readGauges(text []byte, said func(rank uint32, g gauge, v float64)) {
	for line := range bytes.Lines(text) {
		end := bytes.IndexAny(line, "{ ")
		if end <= 0 {
			continue
		}
		g, ok := gauges[string(line[:end])]
		if !ok {
			continue
		}
		labels, rest := []byte(nil), line[end:]
		if line[end] == '{' {
			last := bytes.LastIndexByte(line, '}')
			if last < 0 {
				continue
			}
			labels, rest = line[end+1:last], line[last+1:]
		}
		fields := bytes.Fields(rest) // the value, and perhaps a time
		if len(fields) == 0 {
			continue
		}
		if v, err := strconv.ParseFloat(string(fields[0]), 64); err == nil {
			said(rankOf(labels), g, v)
		}
	}
}

// rankOf finds the rank among labels; 0 if they name none.
func rankOf(labels []byte) uint32 {
	for _, name := range []string{`dp_rank="`, `engine="`} {
		for rest := labels; ; {
			i := bytes.Index(rest, []byte(name))
			if i < 0 {
				break
			}
			value := rest[i+len(name):]
			if i == 0 || rest[i-1] == ',' {
				if end := bytes.IndexByte(value, '"'); end > 0 {
					if n, err := strconv.ParseUint(string(value[:end]), 10, 32); err == nil {
						return uint32(n)
					}
				}
			}
			rest = value
		}
	}
	return 0
}

// readStatistics reads TensorRT-LLM's: one element for each step since it was asked
// last, of which the newest counts.
func readStatistics(text []byte, said func(rank uint32, g gauge, v float64)) {
	var steps []struct {
		Running *float64 `json:"numActiveRequests"`
		Waiting *float64 `json:"numQueuedRequests"`
		Rank    uint32   `json:"attentionDpRank"` // absent: 0
		Cache   struct {
			Used float64 `json:"usedNumBlocks"`
			Max  float64 `json:"maxNumBlocks"`
		} `json:"kvCacheStats"`
	}
	if json.Unmarshal(text, &steps) != nil {
		return
	}
	newest := make(map[uint32]int)
	for i := range steps {
		if steps[i].Running != nil {
			newest[steps[i].Rank] = i
		}
	}
	for rank, i := range newest {
		s := &steps[i]
		said(rank, gaugeRunning, *s.Running)
		if s.Waiting != nil {
			said(rank, gaugeWaiting, *s.Waiting)
		}
		said(rank, gaugeUsed, s.Cache.Used)
		said(rank, gaugeBlocks, s.Cache.Max)
	}
}
