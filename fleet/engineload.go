// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"bytes"
	"encoding/json"
	"errors"
	"math"
	"regexp"
	"strconv"

	"github.com/kvroute/kvroute/internal/engine"
)

// LoadPaths are the paths of engines' metrics, in the order in which to try them:
// TensorRT-LLM's text, then all others, among them TensorRT-LLM's JSON.
//
//nolint:gochecknoglobals // a table
var LoadPaths = [...]string{"/prometheus/metrics", "/metrics"}

// errNoLoad means that an engine's metrics do not contain its load.
var errNoLoad = errors.New("the metrics say nothing of the load")

// Capacity converts shares and tokens into blocks. A zero field is unknown.
type Capacity struct {
	Blocks    int // of one rank's cache
	BlockSize int // tokens
}

//nolint:gochecknoglobals // a table
var gauges = engine.AllGauges()

// engineLoad reads each rank's load from an engine's metrics: the text of vLLM, SGLang and
// TensorRT-LLM, or the JSON of TensorRT-LLM's statistics. Of several series of one rank the
// largest counts. The error is [errNoLoad] if there is no load; TensorRT-LLM's statistics
// have none if nothing has happened since the last query.
func engineLoad(body []byte, c Capacity) (map[uint32]Load, error) {
	ranks := make(map[uint32]*[engine.GaugeKinds]float64)
	set := func(rank uint32, g engine.Gauge, v float64) {
		if math.IsNaN(v) || v < 0 || v > 1e12 || len(ranks) >= maxRanks && ranks[rank] == nil {
			return
		}
		if ranks[rank] == nil {
			ranks[rank] = new([engine.GaugeKinds]float64)
		}
		ranks[rank][g] = max(ranks[rank][g], v)
	}
	if text := bytes.TrimSpace(body); len(text) > 0 && text[0] == '[' {
		readStatistics(text, set)
	} else {
		readGauges(body, set)
	}
	if len(ranks) == 0 {
		return nil, errNoLoad
	}
	loads := make(map[uint32]Load, len(ranks))
	for rank, v := range ranks {
		blocks := max(float64(c.Blocks), v[engine.Blocks])
		l := Load{
			Running: int(v[engine.Running]), Waiting: int(v[engine.Waiting]),
			KVUtilization: min(1, v[engine.UsedShare]),
		}
		switch {
		case v[engine.UsedBlocks] > 0:
			l.KVUsedBlocks = int(v[engine.UsedBlocks])
		case v[engine.UsedTokens] > 0 && c.BlockSize > 0:
			l.KVUsedBlocks = int(math.Ceil(v[engine.UsedTokens] / float64(c.BlockSize)))
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

// AskLoad calls get with one path after the other until an answer contains the load. It
// returns the load and the path. The error joins those of all paths.
func AskLoad(paths []string, c Capacity, get func(path string) ([]byte, error)) (ranks map[uint32]Load, from string, err error) {
	var errs []error
	for _, path := range paths {
		body, err := get(path)
		if err == nil {
			ranks, err = engineLoad(body, c)
		}
		if err == nil {
			return ranks, path, nil
		}
		errs = append(errs, err)
	}
	return nil, "", errors.Join(errs...)
}

// Total returns the load of all ranks together.
func Total(ranks map[uint32]Load) (sum Load) {
	for _, l := range ranks {
		sum.Running += l.Running
		sum.Waiting += l.Waiting
		sum.KVUsedBlocks += l.KVUsedBlocks
		sum.KVUtilization += l.KVUtilization / float64(len(ranks))
	}
	return sum
}

// readGauges reads Prometheus' text form: a line has a name, labels in braces, and a value.
func readGauges(text []byte, set func(rank uint32, g engine.Gauge, v float64)) {
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
		fields := bytes.Fields(rest) // the value, and an optional time
		if len(fields) == 0 {
			continue
		}
		if v, err := strconv.ParseFloat(string(fields[0]), 64); err == nil {
			set(rankOf(labels), g, v)
		}
	}
}

// rankLabels are the labels that name a rank.
//
//nolint:gochecknoglobals // a table
var rankLabels = [...]*regexp.Regexp{regexp.MustCompile(`(?:^|,)dp_rank="([0-9]+)"`), regexp.MustCompile(`(?:^|,)engine="([0-9]+)"`)}

// rankOf returns the rank among labels; 0 if they contain none.
func rankOf(labels []byte) uint32 {
	for _, label := range rankLabels {
		if m := label.FindSubmatch(labels); m != nil {
			if n, err := strconv.ParseUint(string(m[1]), 10, 32); err == nil {
				return uint32(n)
			}
		}
	}
	return 0
}

// readStatistics reads TensorRT-LLM's JSON: one element for each step since the last query.
// The newest step counts.
func readStatistics(text []byte, set func(rank uint32, g engine.Gauge, v float64)) {
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
		set(rank, engine.Running, *s.Running)
		if s.Waiting != nil {
			set(rank, engine.Waiting, *s.Waiting)
		}
		set(rank, engine.UsedBlocks, s.Cache.Used)
		set(rank, engine.Blocks, s.Cache.Max)
	}
}
