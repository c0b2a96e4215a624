{{- /* SPDX-License-Identifier: Apache-2.0 */ -}}
{{- /* The names of objects. A Service's name has at most 63 characters, begins with a letter and has no dots. */ -}}
{{- define "kvroute.name" -}}
{{- $name := .Release.Name | replace "." "-" }}
{{- if not (contains "kvroute" $name) }}{{ $name = printf "%s-kvroute" ($name | trunc 42 | trimSuffix "-") }}{{ end }}
{{- if not (regexMatch "^[a-z]" $name) }}{{ $name = printf "kvroute-%s" $name }}{{ end }}
{{- $name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "kvroute.selector" -}}
app.kubernetes.io/name: kvroute
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- /* The labels of a component: a list of the root and of router or envoy. */ -}}
{{- define "kvroute.component" -}}
{{ include "kvroute.selector" (first .) }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{- define "kvroute.labels" -}}
{{ include "kvroute.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | quote }}
{{- end }}

{{- define "kvroute.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "kvroute.name" .) }}
{{- end }}

{{- define "kvroute.image" -}}
image: {{ printf "%s:%s" .repository .tag | quote }}
imagePullPolicy: {{ .pullPolicy | quote }}
{{- end }}

{{- /* What the pods of all components have. A list of the root, the component, its values, and the user of its image. */ -}}
{{- define "kvroute.pod" -}}
{{- $root := index . 0 }}{{ $component := index . 1 }}{{ $values := index . 2 }}
serviceAccountName: {{ include "kvroute.serviceAccount" $root | quote }}
terminationGracePeriodSeconds: {{ $values.terminationGracePeriodSeconds }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 0 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  {{- with $values.runAsUser }}
  runAsUser: {{ . }}
  runAsGroup: {{ . }}
  fsGroup: {{ . }}
  {{- end }}
  seccompProfile: {type: RuntimeDefault}
topologySpreadConstraints:
- maxSkew: 1
  topologyKey: {{ $root.Values.topologySpreadKey | quote }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels: {{- include "kvroute.component" (list $root $component) | nindent 6 }}
{{- with $values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations: {{- toYaml . | nindent 0 }}
{{- end }}
{{- with $values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvroute.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{- /* A PodDisruptionBudget and a HorizontalPodAutoscaler. A list of the root, the component, its values and the name. */ -}}
{{- define "kvroute.availability" -}}
{{- $root := index . 0 }}{{ $component := index . 1 }}{{ $values := index . 2 }}{{ $name := index . 3 }}
{{- if $root.Values.podDisruptionBudget.enabled }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ $name | quote }}
  labels: {{- include "kvroute.labels" $root | nindent 4 }}
spec:
  maxUnavailable: {{ $root.Values.podDisruptionBudget.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow # a pod that is not ready must not block the drain of its node
  selector:
    matchLabels: {{- include "kvroute.component" (list $root $component) | nindent 6 }}
{{- end }}
{{- if $values.autoscaling.enabled }}
---
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ $name | quote }}
  labels: {{- include "kvroute.labels" $root | nindent 4 }}
spec:
  scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: {{ $name | quote }}}
  minReplicas: {{ $values.replicas }}
  maxReplicas: {{ max (int $values.replicas) (int $values.autoscaling.maxReplicas) }}
  metrics:
  - type: Resource
    resource: {name: cpu, target: {type: Utilization, averageUtilization: {{ $values.autoscaling.targetCPU }}}}
{{- end }}
{{- end }}

{{- /* The Secret with the API's tokens, empty without one. */ -}}
{{- define "kvroute.tokens" -}}
{{- if .Values.apiToken.existingSecret }}{{ .Values.apiToken.existingSecret }}{{ else if .Values.apiToken.value }}{{ include "kvroute.name" . }}-api{{ end }}
{{- end }}

{{- /* The scheme of the HTTP API. */ -}}
{{- define "kvroute.scheme" -}}
{{- if index .Values.config "http-tls-cert" }}https{{ else }}http{{ end }}
{{- end }}

{{- /* The settings of kvroute's configuration file, as YAML. */ -}}
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
{{- if .Values.envoyGateway.enabled }}{{ $_ := set $c "mode-override" true }}{{ $_ := set $c "second-choice" (index $c "second-choice" | default "list") }}{{ end }}
{{- if and .Values.envoy.enabled (not (hasKey $c "envoy-admin")) }}{{ $_ := set $c "envoy-admin" (printf "http://%s-envoy-status.%s.svc:%v" (include "kvroute.name" .) .Release.Namespace .Values.envoy.statusPort) }}{{ end }}
{{- with .Values.kubernetes.sources }}{{ $_ := set $c "kubernetes" $.Values.kubernetes }}{{ end }}
{{- with .Values.workers }}{{ $_ := set $c "workers" . }}{{ end }}
{{- $models := .Values.models }}
{{- range .Values.tokenizers.models }}{{ $models = append $models (dict "name" .name "tokenizer" (printf "/tokenizers/%s" (.repository | default .name))) }}{{ end }}
{{- with $models }}{{ $_ := set $c "models" . }}{{ end }}
{{- toYaml $c }}
{{- end }}
