// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/kvroute/kvroute/bench"
	"github.com/kvroute/kvroute/internal/process"
)

// startVLLM starts vLLM's render server, which makes prompts without an engine. The compiled code is that of the vLLM
// for the CPU in o.vllm, the Python code that of the release.
func startVLLM(o options, release, model string, args []string) (ask askEngine, stop func()) {
	vocabulary := filepath.Join(o.work, "harmony") // the package for gpt-oss reads it from there
	if b, err := readFile(filepath.Join(o.shared, "tokenizers/gpt-oss/o200k_base.tiktoken.gz")); err == nil {
		writeFolder(vocabulary, map[string][]byte{"o200k_base.tiktoken": b})
	}
	port := bench.Must(process.FreePorts(1))
	address := fmt.Sprintf("127.0.0.1:%d", port)
	//nolint:noctx // stop ends it
	cmd := exec.Command(filepath.Join(o.vllm, "bin/python"), "-m", "vllm.entrypoints.cli.main", "launch", "render", model,
		"--host", "127.0.0.1", "--port", fmt.Sprint(port), "--served-model-name", "model", "--max-model-len", "32768")
	if filepath.Base(model) != "gpt-oss" { // else requests with tools are refused; gpt-oss has its own parser
		cmd.Args = append(cmd.Args, "--enable-auto-tool-choice", "--tool-call-parser", "hermes")
	}
	cmd.Args = append(cmd.Args, args...)
	packages, _ := filepath.Glob(filepath.Join(filepath.Dir(release), "orjson-*"))
	path, _ := filepath.Abs(release)
	for _, p := range packages {
		p, _ = filepath.Abs(p)
		path += ":" + p
	}
	cmd.Env = append(os.Environ(), "PYTHONPATH="+path, "PYTHONDONTWRITEBYTECODE=1", "HF_HUB_OFFLINE=1", "TRANSFORMERS_OFFLINE=1",
		"VLLM_NO_USAGE_STATS=1", "DO_NOT_TRACK=1", "OMP_NUM_THREADS=1", "TIKTOKEN_ENCODINGS_BASE="+vocabulary)
	server, err := process.Start(o.work, "vllm-render", cmd)
	bench.NoError(err)
	ctx := context.Background()
	bench.NoError(server.Await(ctx, 5*time.Minute, "vLLM's render server", func(ctx context.Context) bool {
		_, err := process.Get(ctx, "http://"+address+"/health")
		return err == nil
	}))
	return func(c engineCall) []uint32 { return vllmIDs(post("http://"+address+c.path+"/render", c.body)) }, server.Stop
}

// vllmIDs returns the ids in an answer of the render server: of several prompts those of the longest, as kvroute.
func vllmIDs(answer []byte) (longest []uint32) {
	if answer == nil {
		return nil
	}
	type prompt struct {
		IDs []uint32 `json:"token_ids"`
	}
	var all []prompt
	if bytes.HasPrefix(answer, []byte{'['}) {
		bench.NoError(json.Unmarshal(answer, &all))
	} else {
		all = make([]prompt, 1)
		bench.NoError(json.Unmarshal(answer, &all[0]))
	}
	for _, p := range all {
		if longest == nil || len(p.IDs) > len(longest) {
			longest = p.IDs
		}
	}
	return longest
}
