{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- define "kvroute.name" -}}
{{- if contains "kvroute" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-kvroute" (.Release.Name | trunc 42 | trimSuffix "-") }}{{ end }}
{{- end }}

{{- define "kvroute.selector" -}}
app.kubernetes.io/name: kvroute
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvroute.labels" -}}
{{ include "kvroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "kvroute.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "kvroute.name" .) }}
{{- end }}

{{- /* The Secret with the API's tokens, empty without one. */ -}}
{{- define "kvroute.tokens" -}}
{{- if .Values.apiToken.existingSecret }}{{ .Values.apiToken.existingSecret }}{{ else if .Values.apiToken.value }}{{ include "kvroute.name" . }}-api{{ end }}
{{- end }}

{{- /* The scheme of the HTTP API. */ -}}
{{- define "kvroute.scheme" -}}
{{- if index .Values.config "http-tls-cert" }}https{{ else }}http{{ end }}
{{- end }}

{{- /* kvroute's configuration file. */ -}}
{{- define "kvroute.config" -}}
{{- $c := deepCopy .Values.config }}
{{- $_ := set $c "version" 1 }}
{{- $_ := set $c "extproc-address" (printf "0.0.0.0:%v" .Values.service.extprocPort) }}
{{- $_ := set $c "http-address" (printf "0.0.0.0:%v" .Values.service.httpPort) }}
{{- if .Values.nats.existingSecret }}{{ $_ := set $c "nats-url" "file:/etc/kvroute/nats/url" }}{{ else if contains "@" .Values.nats.url }}{{ fail "nats.url has a user or a password, and a ConfigMap would show it: put the URL into a Secret with the key url, and name the Secret in nats.existingSecret" }}{{ else if .Values.nats.url }}{{ $_ := set $c "nats-url" .Values.nats.url }}{{ end }}
{{- if include "kvroute.tokens" . }}{{ $_ := set $c "api-token-file" "/etc/kvroute/api/tokens" }}{{ end }}
{{- if .Values.tls.existingSecret }}
{{- $_ := set $c "extproc-tls-cert" "/etc/kvroute/tls/tls.crt" }}
{{- $_ := set $c "extproc-tls-key" "/etc/kvroute/tls/tls.key" }}
{{- $_ := set $c "extproc-tls-client-ca" "/etc/kvroute/tls/ca.crt" }}
{{- end }}
{{- if not (and .Values.tls.existingSecret (include "kvroute.tokens" .)) }}{{ $_ := set $c "trusted-network" true }}{{ end }}
{{- if .Values.inferencePool.enabled }}{{ $_ := set $c "endpoint-picker" true }}{{ end }}
{{- if .Values.envoyGateway.enabled }}{{ $_ := set $c "mode-override" true }}{{ $_ := set $c "second-choice" "list" }}{{ end }}
{{- with .Values.workers }}{{ $_ := set $c "workers" . }}{{ end }}
{{- with .Values.models }}{{ $_ := set $c "models" . }}{{ end }}
{{- toYaml $c }}
{{- end }}
