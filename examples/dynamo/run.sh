#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"
envoy=$(find_program envoy envoy/bin/envoy "make envoy")
python=${DYNAMO:-$(find_program dynamo-python dynamo/bin/python "tools/dynamo.sh .cache/dynamo")}

# Mock workers need no weights: the model is a tokenizer and a small configuration.
model=$folder/model
mkdir "$model"
cp examples/vllm/config.json "$model/config.json"
cp tokenizer/testdata/golden/bytelevel-qwen2-nfc.json "$model/tokenizer.json"
echo '{}' >"$model/generation_config.json"
cat >"$model/tokenizer_config.json" <<'END'
{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"}
END

# Free ports replace the ports of kvroute.yaml.
free_ports extproc http frontend listen admin
sed "s|STORE|\"$folder/store\"|; s|MODEL|\"$model\"|; s/27902/$extproc/; s/27903/$http/; s/27001/$frontend/" \
	examples/dynamo/kvroute.yaml >"$folder/kvroute.yaml"

# Workers, frontend and kvroute find each other by a folder. All connections stay on this machine.
# With DYN_EVENT_PLANE=nats and NATS_SERVER they publish on NATS instead of sockets: give kvroute the same nats-url.
export DYN_DISCOVERY_BACKEND=file DYN_FILE_KV="$folder/store" DYN_NAMESPACE=dynamo HF_HUB_OFFLINE=1
export DYN_TCP_RPC_HOST=127.0.0.1 DYN_EVENT_PLANE_HOST=127.0.0.1 DYN_TCP_RESPONSE_STREAM_HOST=127.0.0.1
"$python" -m dynamo.mocker --model-path "$model" --model-name tiny --block-size 16 --num-workers 2 --speedup-ratio 10 >"$folder/mocker.log" 2>&1 &
"$python" -m dynamo.frontend --router-mode direct --http-host 127.0.0.1 --http-port "$frontend" >"$folder/frontend.log" 2>&1 &
echo "two mock workers and a frontend start: some ten seconds"
listed() { curl -fs "http://127.0.0.1:$frontend/v1/models" | grep -q '"tiny"'; }
tries=1800 wait_for "the frontend does not find the workers" listed

"$kvroute" serve --config "$folder/kvroute.yaml" >"$folder/kvroute.log" 2>&1 &
found() { [ "$(curl -fs "http://127.0.0.1:$http/v1/workers" | grep -o '"engine":"dynamo"' | wc -l)" = 2 ]; }
wait_for "kvroute does not find the workers" found
"$kvroute" config envoy --listen "127.0.0.1:$listen" --admin "127.0.0.1:$admin" --extproc "127.0.0.1:$extproc" --pool "127.0.0.1:$frontend" >"$folder/envoy.yaml"
"$envoy" -c "$folder/envoy.yaml" --disable-hot-restart --concurrency 1 --log-level error >"$folder/envoy.log" 2>&1 &
wait_for "Envoy does not start" curl -fs "http://127.0.0.1:$listen/v1/models"

ask() { # the answer's text is meaningless; the number of cached tokens counts
	curl -fsS -D "$folder/headers" "http://127.0.0.1:$listen/v1/chat/completions" -H 'content-type: application/json' -d '{
		"model": "tiny", "max_tokens": 4, "messages": [
			{"role": "system", "content": "Blocks of a cache are named by all that stands before them, so a prompt that begins like another one finds its blocks. Who knows which worker has them sends the prompt there."},
			{"role": "user", "content": "'"$1"'"}]}' >"$folder/answer"
	echo "$1"
	grep -iE '^x-dynamo-(overlap-blocks|reason|worker-instance-id)' "$folder/headers" | tr -d '\r' | sed 's/^/  foretold: /'
	echo "  found by the worker: $(grep -oE '"cached_tokens": ?[0-9]+' "$folder/answer")"
}
ask "Where does this go?"
known() { curl -fs "http://127.0.0.1:$http/v1/workers" | grep -qE '"(cached|guessed)_blocks":[1-9]'; }
wait_for "the worker's blocks are not known" known
ask "And where does this go?"
ask "And this?"
echo
"$kvroute" explain --url "http://127.0.0.1:$http" last
