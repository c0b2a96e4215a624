// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
)

// startSGLang starts a program that makes prompts with the classes of an SGLang release. It runs in the environment of the vLLM
// in o.vllm, which has the packages that these classes import. args are names of settings of SGLang and their values in JSON.
func startSGLang(o options, release, model string, args []string) (ask askEngine, stop func()) {
	vocabulary := filepath.Join(o.work, "harmony") // the package for gpt-oss reads it from there
	if b, err := readFile(filepath.Join(o.shared, "tokenizers/gpt-oss/o200k_base.tiktoken.gz")); err == nil {
		writeFolder(vocabulary, map[string][]byte{"o200k_base.tiktoken": b})
	}
	packages, _ := filepath.Glob(filepath.Join(filepath.Dir(release), "orjson-*"))
	cmd := exec.Command(filepath.Join(o.vllm, "bin/python"), "bench/conformance/sglang.py", release, model) //nolint:noctx // stop ends it
	cmd.Args = append(cmd.Args, args...)
	cmd.Env = append(os.Environ(), "PYTHONPATH="+strings.Join(packages, ":"), "PYTHONDONTWRITEBYTECODE=1", "HF_HUB_OFFLINE=1",
		"TRANSFORMERS_OFFLINE=1", "OMP_NUM_THREADS=1", "TIKTOKEN_ENCODINGS_BASE="+vocabulary)
	server := bench.Must(process.StartLines(cmd))
	return func(c engineCall) []uint32 {
		question := bench.Must(json.Marshal(map[string]any{"path": c.path, "body": json.RawMessage(c.body)}))
		var answer struct {
			IDs []uint32 `json:"ids"`
		}
		bench.NoError(server.Ask(string(question), &answer))
		return answer.IDs
	}, server.Stop
}
