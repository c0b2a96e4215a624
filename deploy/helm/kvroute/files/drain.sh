#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Drains an Envoy before Kubernetes stops it: its readiness fails, it closes idle connections and each connection whose
# response ends, and the script returns when no request is left. It uses bash alone, because Envoy's image has no curl.
# usage: drain.sh ADMIN_PORT SECONDS
port=$1 answer=
# call METHOD PATH: sends a request to Envoy's administration. The response is in the variable answer.
call() {
	local line
	answer=
	exec 3<>"/dev/tcp/127.0.0.1/$port" || return
	printf '%s %s HTTP/1.1\r\nHost: admin\r\nContent-Length: 0\r\nConnection: close\r\n\r\n' "$1" "$2" >&3
	while IFS= read -r line <&3; do answer+=$line$'\n'; done
	exec 3>&-
}
pause() { read -rt 1 <> <(:) || true; }

call POST /healthcheck/fail
call POST '/drain_listeners?graceful&skip_exit'
for ((i = 0; i < $2; i++)); do
	pause
	call GET '/stats?filter=^http\..*downstream_rq_active$'
	[[ $answer == *downstream_rq_active* ]] || continue
	active=0
	while IFS= read -r line; do
		if [[ ${line%$'\r'} =~ ^http\.(.*)\.downstream_rq_active:\ ([0-9]+)$ && ${BASH_REMATCH[1]} != @(admin|status) ]]; then
			active=$((active + BASH_REMATCH[2]))
		fi
	done <<<"$answer"
	# In the first seconds clients still come, until each node knows that this pod leaves the Service.
	((active || i < 5)) || exit 0
done
