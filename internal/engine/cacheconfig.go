// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"regexp"
	"strconv"
)

var (
	cacheConfig = regexp.MustCompile(`(?m)^vllm:cache_config_info\{[^\n]*`)
	configLabel = regexp.MustCompile(`[{,](block_size|num_gpu_blocks)="([0-9]+)"`)
)

// CacheConfig finds the tokens in a block and the number of blocks among vLLM's metrics. Both are 0 if they are missing.
func CacheConfig(metrics []byte) (blockSize, blocks int) {
	for _, m := range configLabel.FindAllSubmatch(cacheConfig.Find(metrics), -1) {
		n, err := strconv.Atoi(string(m[2]))
		switch {
		case err != nil:
		case string(m[1]) == "block_size":
			blockSize = n
		default:
			blocks = n
		}
	}
	return blockSize, blocks
}
