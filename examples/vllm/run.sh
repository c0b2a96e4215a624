#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
envoy=$(find_program envoy envoy/bin/envoy "make envoy")
end() { # on a busy machine an engine may ignore SIGTERM
	# shellcheck disable=SC2046 # several words
	kill $(jobs -rp) 2>/dev/null || true
	for _ in $(seq 150); do
		[ -n "$(jobs -rp)" ] || break
		read -rt 0.1 <> <(:) || true
	done
	# shellcheck disable=SC2046
	kill -9 $(jobs -rp) 2>/dev/null || true
	wait
	rm -rf "$folder"
}
trap end EXIT
vllm=${VLLM:-$(find_program vllm vllm/bin/vllm "tools/vllm.sh .cache/vllm")}

# Free ports replace the ports of kvroute.yaml.
free_ports extproc http vllm_1 vllm_2 listen admin

# A model of two layers with dummy weights: its text is meaningless, its cache works as usual. To serve another model,
# set MODEL to the model's folder; --load-format dummy is then left out.
model=${MODEL:-$folder/model}
if [ -z "${MODEL:-}" ]; then
	mkdir "$model"
	cp examples/vllm/config.json "$model/config.json"
	cp tokenizer/testdata/golden/bytelevel-qwen2-nfc.json "$model/tokenizer.json"
	cat >"$model/tokenizer_config.json" <<-'END'
		{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"}
	END
	dummy="--load-format dummy"
fi

# Settings for small engines on CPUs that make no requests to the network. On GPUs they are not needed.
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1
cpu="--enforce-eager --block-size 32 --num-gpu-blocks-override 400 --max-model-len 8192 --max-num-seqs 8"
# cpu="--tensor-parallel-size 2"   # on GPUs; also set CUDA_VISIBLE_DEVICES for each engine

for i in 1 2; do
	port=vllm_$i
	# shellcheck disable=SC2086 # the flags are several words
	"$vllm" serve "$model" --host 127.0.0.1 --port "${!port}" --served-model-name tiny ${dummy:-} $cpu \
		--enable-prefix-caching --enable-prompt-tokens-details \
		--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "ipc://'"$folder"'/'$i'.events", "replay_endpoint": "ipc://'"$folder"'/'$i'.replay", "topic": "kv-events"}' \
		>"$folder/vllm-$i.log" 2>&1 &
done
# On several machines: "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657".
echo "two engines start: one to five minutes on CPUs"
for i in 1 2; do
	port=vllm_$i
	tries=3000 wait_for "engine $i does not start" curl -fs "http://127.0.0.1:${!port}/health"
done

sed "s|MODEL}|\"$model\"}|; s/26902/$extproc/; s/26903/$http/; s/26001/$vllm_1/; s/26002/$vllm_2/" \
	examples/vllm/kvroute.yaml >"$folder/kvroute.yaml"
"$kvroute" serve --config "$folder/kvroute.yaml" >"$folder/kvroute.log" 2>&1 &
wait_for "kvroute does not start" curl -fs "http://127.0.0.1:$http/healthz"
heard() { [ "$(curl -fs "http://127.0.0.1:$http/v1/workers" | grep -o '"kv_events":"ok"' | wc -l)" = 2 ]; }
wait_for "the engines are not heard" heard
"$kvroute" config envoy --listen "127.0.0.1:$listen" --admin "127.0.0.1:$admin" --extproc "127.0.0.1:$extproc" \
	--pool "127.0.0.1:$vllm_1" --pool "127.0.0.1:$vllm_2" >"$folder/envoy.yaml"
"$envoy" -c "$folder/envoy.yaml" --disable-hot-restart --concurrency 1 --log-level error >"$folder/envoy.log" 2>&1 &
wait_for "Envoy does not start" curl -fs "http://127.0.0.1:$listen/v1/models"

ask() { # the answer's text is meaningless; the number of cached tokens counts
	curl -fsS -D "$folder/headers" "http://127.0.0.1:$listen/v1/chat/completions" -H 'content-type: application/json' -d '{
		"model": "tiny", "max_tokens": 4, "messages": [
			{"role": "system", "content": "Blocks of a cache are named by all that stands before them, so a prompt that begins like another one finds its blocks. Who knows which engine has them sends the prompt there."},
			{"role": "user", "content": "'"$1"'"}]}' >"$folder/answer"
	echo "$1"
	grep -iE '^x-dynamo-(overlap-blocks|reason)' "$folder/headers" | tr -d '\r' | sed 's/^/  foretold: /'
	echo "  found by the engine: $(grep -oE '"cached_tokens": ?[0-9]+' "$folder/answer")"
}
ask "Where does this go?"
known() { curl -fs "http://127.0.0.1:$http/v1/workers" | grep -q '"cached_blocks":[1-9]'; }
wait_for "the engine's blocks are not known" known
ask "And where does this go?"
echo
"$kvroute" explain --url "http://127.0.0.1:$http" last
