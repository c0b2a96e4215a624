// SPDX-License-Identifier: Apache-2.0

package openai_test

import (
	"encoding/json"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/kvroute/kvroute/internal/envoytest"
	"github.com/kvroute/kvroute/internal/openai"
)

const allFields = openai.FieldPins | openai.FieldHints

// steeringPaths are the fields that a client must not send, and an example of each.
var steeringPaths = strings.Fields(`
	kv_transfer_params.do_remote_prefill kv_transfer_params.remote_host kv_transfer_params.remote_port kv_transfer_params.remote_block_ids
	kv_transfer_params.remote_kv_source ec_transfer_params.peer priority request_id
	vllm_xargs.kv_transfer_params vllm_xargs.ec_transfer_params vllm_xargs.kv_cache_report_mode vllm_xargs.kv_hints
	sampling_params.extra_args.kv_transfer_params sampling_params.extra_args.ec_transfer_params
	sampling_params.extra_args.kv_cache_report_mode sampling_params.extra_args.kv_hints
	bootstrap_host bootstrap_port bootstrap_room bootstrap_pair_key data_parallel_rank routed_dp_rank disagg_prefill_dp_rank
	routing_key rid http_worker_ipc kv_hints kv_router_hint encoder_urls num_items_assigned need_wait_for_mm_inputs
	disaggregated_params.request_type kv_hint
	nvext.backend_instance_id nvext.decode_worker_id nvext.prefill_worker_id nvext.dp_rank nvext.decode_dp_rank nvext.prefill_dp_rank
	nvext.agent_hints.priority nvext.agent_hints.strict_priority nvext.agent_hints.latency_sensitivity
	nvext.routing_constraints.required_taints nvext.router.ttft_target nvext.router_config_override.temperature router_config_override.temperature`)

// nested returns a field with a value at a path, as a member of an object.
func nested(path, value string) string {
	name, rest, deeper := strings.Cut(path, ".")
	if deeper {
		value = "{" + nested(rest, value) + "}"
	}
	return `"` + name + `":` + value
}

// Each field that steers is found and removed, whatever the spelling of its names. Nothing else changes.
func TestSteeringFieldsAreRemoved(t *testing.T) {
	for _, path := range steeringPaths {
		member := nested(path, `"192.0.2.1"`)
		escaped := regexp.MustCompile(`"[a-z]`).ReplaceAllStringFunc(member, func(s string) string { return fmt.Sprintf(`"\u%04x`, s[1]) })
		for _, text := range []string{member, escaped, member + "," + member, strings.ReplaceAll(member, ":", " :\n")} {
			for _, form := range []string{`{%s,"model":"m","messages":[1]}`, "\n {%s,\"model\":\"m\",\"messages\":[1]}", `{"model":"m",%s,"messages":[1]}`, `{"messages":[1],"model":"m",%s}`} {
				body := fmt.Appendf(nil, form, text)
				got, bad := openai.Parse(openai.ChatCompletions, body)
				if bad != nil || got.Steering == 0 || openai.SteeringPath(body, allFields) == "" {
					t.Fatalf("%s: steering %v, path %q, error %v", body, got.Steering, openai.SteeringPath(body, allFields), bad)
				}
				if out := openai.RemoveSteering(body, allFields); strings.Contains(string(out), "192.0.2.1") || !json.Valid(out) || openai.SteeringPath(out, allFields) != "" {
					t.Errorf("of %s stays %s", body, out)
				}
				if kept := openai.RemoveSteering(body, allFields&^got.Steering); string(kept) != string(body) {
					t.Errorf("a listener that is trusted with it changes %s to %s", body, kept)
				}
			}
		}
	}
}

// A name steers only at its path, and these fields of the same objects stay.
func TestOtherFieldsStay(t *testing.T) {
	for _, body := range []string{
		`{"model":"m","messages":[{"role":"user","content":"kv_transfer_params","priority":1,"nvext":{"dp_rank":1}}]}`,
		`{"model":"m","messages":[1],"tools":[{"function":{"parameters":{"properties":{"priority":{"type":"number"},"bootstrap_host":{}}}}}]}`,
		`{"model":"m","messages":[1],"response_format":{"json_schema":{"schema":{"properties":{"kv_transfer_params":{},"priority":{}}}}}}`,
		`{"model":"m","messages":[1],"nvext":{"cache_salt":"s","extra_fields":["worker_id"],"token_data":[1,2],"agent_hints":{"osl":5}}}`,
		`{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[1,2]},"vllm_xargs":{"ngram_size":3},"metadata":{"priority":"high"}}`,
		`{"model":"m","messages":[1],"priority":null,"kv_transfer_params":null,"nvext":{"dp_rank":null}}`,
		`{"model":"m","messages":[1],"Priority":1,"priority ":2,"nvext":5,"vllm_xargs":"kv_hints"}`,
	} {
		got, bad := openai.Parse(openai.ChatCompletions, []byte(body))
		if bad != nil || got.Steering != 0 || openai.SteeringPath([]byte(body), allFields) != "" {
			t.Errorf("%s: steering %v, error %v", body, got.Steering, bad)
		}
	}
	const body = `{"priority":1,"model":"m","kv_transfer_params":{"remote_host":"h","prompt_token_ids":[1,2]},"messages":[1],"nvext":{"dp_rank":1,"cache_salt":"s"}}`
	const want = `{"model":"m","messages":[1],"kv_transfer_params":{"prompt_token_ids":[1,2]},"nvext":{"cache_salt":"s"}}`
	if got := openai.RemoveSteering([]byte(body), allFields); string(got) != want {
		t.Errorf("the body becomes %s, want %s", got, want)
	}
	if got := openai.RemoveSteering([]byte(body), openai.FieldPins); !strings.Contains(string(got), `"remote_host"`) || strings.Contains(string(got), "dp_rank") {
		t.Errorf("without pins the body becomes %s", got)
	}
}

// Envoy's expression matches the headers that steer, except for hints, and no other header.
func TestSteeringHeaders(t *testing.T) {
	keep := []string{"x-dynamo-talk", "x-talk"}
	envoys := regexp.MustCompile("^(" + strings.Join(openai.SteeringPatterns(keep), "|") + ")$")
	for _, pattern := range openai.SteeringPatterns(keep) {
		if len(pattern) > 1024 {
			t.Errorf("Envoy Gateway refuses a pattern of %d bytes", len(pattern))
		}
	}
	settable := regexp.MustCompile("^(" + openai.SettableHeaders() + ")$")
	for _, name := range envoytest.SteeringHeaders {
		if !openai.SteeringHeader(name, keep) || !openai.SteeringHeader(strings.ReplaceAll(name, "-", "_"), keep) || !settable.MatchString(name) {
			t.Errorf("%s does not steer, or kvroute may not remove it", name)
		}
		if hint := slices.Contains(openai.Hints, name); envoys.MatchString(name) == hint {
			t.Errorf("Envoy removes %s: %v, want %v", name, hint, !hint)
		}
	}
	for _, hint := range openai.Hints {
		// A name that is longer, shorter or otherwise different is no hint.
		for i := len("x-worker-"); i < len(hint); i++ {
			for _, name := range []string{hint[:i], hint[:i] + "~" + hint[i+1:], hint + hint[i:]} {
				if openai.SteeringHeader(name, nil) && !envoys.MatchString(name) && !slices.Contains(openai.Hints, name) {
					t.Errorf("Envoy does not remove %s", name)
				}
			}
		}
	}
	for _, name := range append(keep, "x-dynamo-session-id", "x-dynamo-session-final", "x-session-id", "x-request-id", "x-tenant-id", "x-stainless-arch", "x-api-key", "x", "") {
		if openai.SteeringHeader(name, keep) || envoys.MatchString(name) {
			t.Errorf("%s steers", name)
		}
	}
}

// FuzzSteeringFields removes the steering fields of any body: none is left, and nothing else changes.
func FuzzSteeringFields(f *testing.F) {
	for _, path := range steeringPaths {
		f.Add([]byte(`{"model":"m","messages":[1],` + nested(path, `[7]`) + `,` + nested(path, `null`) + `}`))
	}
	f.Add([]byte(`{"nvext":{"dp_rank":1},"nvext":{"cache_salt":"s"},"messages":[{"priority":1}],"\u0070riority":2}`))
	f.Fuzz(func(t *testing.T, body []byte) {
		fields, bad := openai.Parse(openai.Text, body)
		if bad != nil {
			return
		}
		if (fields.Steering != 0) != (openai.SteeringPath(body, allFields) != "") {
			t.Fatalf("steering %v, path %q", fields.Steering, openai.SteeringPath(body, allFields))
		}
		out := openai.RemoveSteering(body, allFields)
		var before, after map[string]any
		if json.Unmarshal(body, &before) != nil {
			return // deeper than encoding/json reads, or a number that is out of range
		}
		if err := json.Unmarshal(out, &after); err != nil {
			t.Fatalf("%s is no JSON: %v", out, err)
		}
		if again, bad := openai.Parse(openai.Text, out); bad != nil || again.Steering != 0 {
			t.Fatalf("of %s stays %s, error %v", body, out, bad)
		}
		touched := map[string]bool{}
		for _, path := range steeringPaths {
			name, _, _ := strings.Cut(path, ".")
			touched[name] = true
		}
		for name, value := range before {
			if !touched[name] && !reflect.DeepEqual(value, after[name]) {
				t.Errorf("%s was %v, is %v", name, value, after[name])
			}
		}
		for name := range after {
			if _, was := before[name]; !was {
				t.Errorf("%s is new", name)
			}
		}
	})
}
