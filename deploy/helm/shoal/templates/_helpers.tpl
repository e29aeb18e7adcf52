{{- define "shoal.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "shoal.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "shoal.labels" -}}
{{ include "shoal.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "shoal.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (ternary (include "shoal.fullname" .) "default" .Values.serviceAccount.create) -}}
{{- end -}}

{{- define "shoal.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{- printf "%s@%s" .repository .digest -}}
{{- else -}}
{{- printf "%s:%s" .repository (.tag | default $.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "shoal.claim" -}}
{{- .Values.home.persistence.existingClaim | default (printf "%s-home" (include "shoal.fullname" .)) -}}
{{- end -}}

{{- /* Shoal needs at most delay + timeout + 2 s; the rest is for the container runtime. */ -}}
{{- define "shoal.gracePeriod" -}}
{{- addf (float64 .Values.drain.delaySeconds) (float64 .Values.drain.timeoutSeconds) 5 | ceil | int -}}
{{- end -}}

{{- define "shoal.validate" -}}
{{- if not (or .Values.auth.insecure .Values.auth.apiKeys.existingSecret) -}}
{{- fail "auth: name a Secret with API keys in auth.apiKeys.existingSecret, or set auth.insecure=true to serve everyone" -}}
{{- end -}}
{{- if and (eq .Values.autoscaling.kind "keda") (not .Values.autoscaling.keda.serverAddress) -}}
{{- fail "autoscaling.keda.serverAddress: name the address of Prometheus, such as http://prometheus.monitoring:9090" -}}
{{- end -}}
{{- if gt (int .Values.autoscaling.minReplicas) (int .Values.autoscaling.maxReplicas) -}}
{{- fail "autoscaling.minReplicas must be at most autoscaling.maxReplicas" -}}
{{- end -}}
{{- if and .Values.serviceMonitor.enabled .Values.auth.apiKeys.existingSecret (not .Values.serviceMonitor.bearerTokenSecret) -}}
{{- fail "serviceMonitor.bearerTokenSecret: /metrics needs a key with auth.apiKeys: name a Secret that holds one, as {name, key}" -}}
{{- end -}}
{{- if and .Values.ingress.enabled (not .Values.ingress.hosts) -}}
{{- fail "ingress.hosts: name at least one host" -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.models -}}
{{- if has .name $names -}}{{- fail (printf "models: %s is there twice" .name) -}}{{- end -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if .Values.ray.enabled -}}{{- include "shoal.ray.validate" . -}}{{- end -}}
{{- end -}}

{{- /* A value as TOML on one line. Text, numbers and booleans are the same as in JSON. */ -}}
{{- define "shoal.toml" -}}
{{- if kindIs "map" . -}}
{{- $pairs := list -}}
{{- range $key, $value := . -}}
{{- if not (kindIs "invalid" $value) -}}
{{- $pairs = append $pairs (printf "%s = %s" (toJson $key) (include "shoal.toml" $value)) -}}
{{- end -}}
{{- end -}}
{{- printf "{%s}" (join ", " $pairs) -}}
{{- else if kindIs "slice" . -}}
{{- $items := list -}}
{{- range . -}}{{- $items = append $items (include "shoal.toml" .) -}}{{- end -}}
{{- printf "[%s]" (join ", " $items) -}}
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- /* Settings that do not depend on whether Ray Serve or `shoal serve` reads them, as JSON. */ -}}
{{- define "shoal.settings" -}}
{{- $settings := dict "home" .Values.home.path "drain_timeout_s" .Values.drain.timeoutSeconds -}}
{{- if .Values.as -}}{{- $_ := set $settings "as" .Values.as -}}{{- end -}}
{{- if .Values.gpu.enabled -}}{{- $_ := set $settings "engine" "torch" -}}{{- end -}}
{{- if .Values.auth.insecure -}}{{- $_ := set $settings "insecure" true -}}{{- end -}}
{{- with .Values.auth.apiKeys -}}
{{- if .existingSecret -}}{{- $_ := set $settings "api_key_file" (printf "/run/secrets/shoal/api/%s" .key) -}}{{- end -}}
{{- end -}}
{{- with .Values.auth.adminKeys -}}
{{- if .existingSecret -}}{{- $_ := set $settings "admin_key_file" (printf "/run/secrets/shoal/admin/%s" .key) -}}{{- end -}}
{{- end -}}
{{- toJson $settings -}}
{{- end -}}

{{- define "shoal.config" -}}
{{- $settings := include "shoal.settings" . | fromJson -}}
{{- $_ := set $settings "host" "0.0.0.0" -}}
{{- $_ := set $settings "port" 8080 -}}
{{- $_ := set $settings "workers" .Values.workers -}}
{{- $_ := set $settings "drain_delay_s" .Values.drain.delaySeconds -}}
{{- $_ := set $settings "drain_idle_s" .Values.drain.idleSeconds -}}
{{- if .Values.grpc.enabled -}}{{- $_ := set $settings "grpc_port" .Values.grpc.port -}}{{- end -}}
{{- range $name, $value := mergeOverwrite $settings (deepCopy .Values.settings) }}
{{- if not (kindIs "invalid" $value) }}
{{ $name }} = {{ include "shoal.toml" $value }}
{{- end }}
{{- end }}
{{- range .Values.models }}

[models.{{ toJson .name }}]
{{- range $key, $value := omit . "name" }}
{{- if not (kindIs "invalid" $value) }}
{{ $key }} = {{ include "shoal.toml" $value }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "shoal.volumeMounts" -}}
- {name: config, mountPath: /etc/shoal, readOnly: true}
- {name: home, mountPath: {{ .Values.home.path | quote }}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.auth.apiKeys.existingSecret }}
- {name: api-keys, mountPath: /run/secrets/shoal/api, readOnly: true}
{{- end }}
{{- if .Values.auth.adminKeys.existingSecret }}
- {name: admin-keys, mountPath: /run/secrets/shoal/admin, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "shoal.volumes" -}}
- name: config
  configMap: {name: {{ include "shoal.fullname" . }}}
- name: home
  {{- if .Values.home.persistence.enabled }}
  persistentVolumeClaim: {claimName: {{ include "shoal.claim" . }}}
  {{- else if .Values.home.sizeLimit }}
  emptyDir: {sizeLimit: {{ .Values.home.sizeLimit }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: tmp
  {{- if .Values.tmpSizeLimit }}
  emptyDir: {sizeLimit: {{ .Values.tmpSizeLimit }}}
  {{- else }}
  emptyDir: {}
  {{- end }}
{{- with .Values.auth.apiKeys }}
{{- if .existingSecret }}
- name: api-keys
  secret: {secretName: {{ .existingSecret }}, defaultMode: 0400, items: [{key: {{ .key }}, path: {{ .key }}}]}
{{- end }}
{{- end }}
{{- with .Values.auth.adminKeys }}
{{- if .existingSecret }}
- name: admin-keys
  secret: {secretName: {{ .existingSecret }}, defaultMode: 0400, items: [{key: {{ .key }}, path: {{ .key }}}]}
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}
