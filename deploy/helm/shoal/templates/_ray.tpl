{{- /* Labels of the pods, by which policies select them. KubeRay's head Service needs its own app.kubernetes.io/name. */ -}}
{{- define "shoal.ray.selector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: ray
{{- end -}}

{{- define "shoal.ray.validate" -}}
{{- $ray := .Values.ray -}}
{{- if not $ray.authSecret -}}
{{- fail "ray.authSecret: name a Secret whose key auth_token has the token of the Ray cluster" -}}
{{- end -}}
{{- $name := include "shoal.fullname" . -}}
{{- if not (and (le (len $name) 47) (regexMatch "^[a-z][a-z0-9-]*$" $name)) -}}
{{- fail (printf "ray: KubeRay takes names of at most 47 letters, digits and -, which begin with a letter (got %s): set fullnameOverride" $name) -}}
{{- end -}}
{{- $served := 0 -}}
{{- range .Values.models -}}{{- if .backends -}}{{- $served = add1 $served -}}{{- end -}}{{- end -}}
{{- if not $served -}}
{{- fail "ray: name at least one model with backends in models" -}}
{{- end -}}
{{- if ne .Values.autoscaling.kind "none" -}}
{{- fail "autoscaling.kind must be none with ray.enabled: set autoscaling_config in ray.deployment, and ray.autoscaler" -}}
{{- end -}}
{{- if .Values.grpc.enabled -}}
{{- fail "grpc.enabled does not work with ray.enabled: Ray Serve answers HTTP only" -}}
{{- end -}}
{{- if .Values.extraArgs -}}
{{- fail "extraArgs are flags of `shoal serve`, which does not run with ray.enabled: use settings" -}}
{{- end -}}
{{- if .Values.serviceMonitor.enabled -}}
{{- fail "serviceMonitor.enabled does not work with ray.enabled: the Service divides scrapes among fronts. Scrape the pods' port metrics" -}}
{{- end -}}
{{- $groups := list -}}
{{- $gpus := 0 -}}
{{- range $ray.workerGroups -}}
{{- if has .name $groups -}}{{- fail (printf "ray.workerGroups: %s is there twice" .name) -}}{{- end -}}
{{- $groups = append $groups .name -}}
{{- $gpus = add $gpus (.gpus | default 0 | int) -}}
{{- $replicas := .replicas | default 0 | int -}}
{{- if or (gt (int (.minReplicas | default 0)) $replicas) (and (hasKey . "maxReplicas") (lt (int .maxReplicas) $replicas)) -}}
{{- fail (printf "ray.workerGroups: replicas of %s must be between its minReplicas and its maxReplicas" .name) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.gpu.enabled (not $gpus) -}}
{{- fail "ray.workerGroups: gpu.enabled needs a group with gpus" -}}
{{- end -}}
{{- end -}}

{{- /* The tables of shoal.toml. Models and settings are arguments of the application, so that Serve updates replicas in
     place; a change of a table replaces the cluster. */ -}}
{{- define "shoal.tables" -}}
{{- range .Values.models }}
{{- $name := .name }}
{{- $keys := list }}
{{- range $key, $value := omit . "name" "backends" "ray" }}
{{- if not (kindIs "invalid" $value) }}
{{- $keys = append $keys (printf "%s = %s" $key (include "shoal.toml" $value)) }}
{{- end }}
{{- end }}
{{- if $keys }}

[models.{{ toJson $name }}]
{{ join "\n" $keys }}
{{- end }}
{{- end }}
{{- end -}}

{{- /* Options of one deployment: defaults, and its own. A fixed number of replicas excludes scaling. */ -}}
{{- define "shoal.ray.deployment" -}}
{{- $own := deepCopy .own -}}
{{- $options := deepCopy .defaults -}}
{{- if hasKey $own "num_replicas" -}}{{- $options = omit $options "autoscaling_config" -}}{{- end -}}
{{- if hasKey $own "autoscaling_config" -}}{{- $options = omit $options "num_replicas" -}}{{- end -}}
{{- $options = mergeOverwrite $options $own (dict "name" .name) -}}
{{- with .policy -}}
{{- with $options.autoscaling_config -}}
{{- if not .policy -}}{{- $_ := set . "policy" (dict "policy_function" $.policy) -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $options -}}
{{- end -}}

{{- define "shoal.ray.serveConfig" -}}
{{- $settings := mergeOverwrite (include "shoal.settings" . | fromJson) (deepCopy .Values.settings) -}}
{{- $drain := addf (float64 .Values.drain.timeoutSeconds) 5 -}}
{{- $defaults := dict "graceful_shutdown_timeout_s" $drain -}}
{{- $own := .Values.ray.front -}}
{{- if hasKey $own "autoscaling_config" -}}{{- $own = omit $own "num_replicas" -}}{{- end -}}
{{- $front := dict "defaults" $defaults "own" $own "name" "front" "policy" "" -}}
{{- $deployments := list (include "shoal.ray.deployment" $front | fromJson) -}}
{{- $defaults = mergeOverwrite (deepCopy $defaults) (deepCopy .Values.ray.deployment) -}}
{{- if hasKey $defaults "num_replicas" -}}{{- $defaults = omit $defaults "autoscaling_config" -}}{{- end -}}
{{- if .Values.gpu.enabled -}}
{{- $defaults = merge $defaults (dict "ray_actor_options" (dict "num_gpus" 1)) -}}
{{- end -}}
{{- $models := dict -}}
{{- range .Values.models -}}
{{- if .backends -}}
{{- $_ := set $models .name (join "," .backends) -}}
{{- $model := dict "defaults" $defaults "own" (.ray | default dict) "name" (replace "/" "~" .name) "policy" "shoal.ray.scaling:QueuePolicy" -}}
{{- $deployments = append $deployments (include "shoal.ray.deployment" $model | fromJson) -}}
{{- end -}}
{{- end -}}
proxy_location: EveryNode
http_options: {host: 0.0.0.0, port: 8000, request_timeout_s: null, keep_alive_timeout_s: 90}
applications:
  - name: shoal
    route_prefix: /
    import_path: shoal.ray:build
    args:
      file: /etc/shoal/shoal.toml
      models:
        {{- toYaml $models | nindent 8 }}
      settings:
        {{- toYaml $settings | nindent 8 }}
    deployments:
      {{- toYaml $deployments | nindent 6 }}
{{- end -}}

{{- /* The pod of the head, or of a group of workers. */ -}}
{{- define "shoal.ray.template" -}}
{{- $group := .group -}}
{{- $head := .head -}}
{{- with .root -}}
metadata:
  labels:
    {{- include "shoal.ray.selector" . | nindent 4 }}
    {{- with .Values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/config: {{ include "shoal.tables" . | sha256sum }}
    {{- with .Values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  {{- if not (and $head .Values.ray.autoscaler.enabled) }}
  serviceAccountName: {{ include "shoal.serviceAccount" . }}
  automountServiceAccountToken: false
  {{- end }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "shoal.gracePeriod" . }}
  {{- with .Values.imagePullSecrets }}
  imagePullSecrets:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.priorityClassName }}
  priorityClassName: {{ . }}
  {{- end }}
  {{- if and $group.gpus .Values.gpu.runtimeClassName }}
  runtimeClassName: {{ .Values.gpu.runtimeClassName }}
  {{- end }}
  securityContext:
    {{- toYaml .Values.podSecurityContext | nindent 4 }}
  containers:
    - name: {{ ternary "ray-head" "ray-worker" $head }}
      image: {{ include "shoal.image" . | quote }}
      imagePullPolicy: {{ .Values.image.pullPolicy }}
      env:
        - {name: HOME, value: /tmp}
        - {name: RAY_SERVE_ENABLE_HA_PROXY, value: "1"}
        - {name: RAY_SERVE_THROUGHPUT_OPTIMIZED, value: "1"}
        {{- /* Seconds between two reports of a replica to the policy: a part of look_back_period_s. */}}
        - {name: RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S, value: "2"}
        {{- /* A new configuration of HAProxy ends old connections after this time. */}}
        - {name: RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S, value: {{ max 120 (ceil .Values.drain.timeoutSeconds | int) | quote }}}
        - {name: RAY_AUTH_MODE, value: token}
        - {name: RAY_AUTH_TOKEN, valueFrom: {secretKeyRef: {name: {{ .Values.ray.authSecret }}, key: auth_token}}}
        {{- with .Values.env }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with .Values.envFrom }}
      envFrom:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      ports:
        {{- if $head }}
        - {name: gcs-server, containerPort: 6379}
        - {name: dashboard, containerPort: 8265}
        {{- end }}
        - {name: metrics, containerPort: 8080}
        - {name: serve, containerPort: 8000}
      {{- if not $head }}
      readinessProbe:
        httpGet: {path: /-/healthz, port: serve}
        {{- toYaml .Values.probes.readiness | nindent 8 }}
      {{- end }}
      {{- $resources := deepCopy $group.resources }}
      {{- if $group.gpus }}
      {{- $resources = mergeOverwrite $resources (dict "limits" (dict .Values.gpu.resource ($group.gpus | int))) }}
      {{- end }}
      resources:
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- toYaml .Values.securityContext | nindent 8 }}
      volumeMounts:
        {{- include "shoal.volumeMounts" . | nindent 8 }}
  volumes:
    {{- include "shoal.volumes" . | nindent 4 }}
  {{- with $group.nodeSelector | default .Values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- $tolerations := $group.tolerations | default .Values.tolerations }}
  {{- if and $group.gpus .Values.gpu.tolerate }}
  {{- $tolerations = append $tolerations (dict "key" .Values.gpu.resource "operator" "Exists" "effect" "NoSchedule") }}
  {{- end }}
  {{- with $tolerations }}
  tolerations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.affinity }}
  affinity:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .Values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}
