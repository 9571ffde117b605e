{{- define "tmd.labels" -}}
app.kubernetes.io/name: tmd
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* For one part: what selects its pods. Called with a list of the root and the part. */}}
{{- define "tmd.selector" -}}
app.kubernetes.io/name: tmd
app.kubernetes.io/instance: {{ (index . 0).Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "tmd.name" -}}
{{- if contains "tmd" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- else }}{{ printf "%s-tmd" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "tmd.image" -}}
{{ required "image.repository: no image of tmd is published; build one with packaging/Containerfile, push it to a registry of yours and name it here" .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "tmd.secret" -}}
{{ .Values.secret.existing | default (include "tmd.name" .) }}
{{- end }}

{{/* A StatefulSet may have a name of 52 characters: its controller appends to it for a label. */}}
{{- define "tmd.redis.name" -}}
{{ include "tmd.name" . | trunc 46 | trimSuffix "-" }}-redis
{{- end }}

{{/* Names of the Redis pods, which Sentinels and clients know them by. */}}
{{- define "tmd.redis.hosts" -}}
{{- $name := include "tmd.redis.name" . -}}
{{- $hosts := list -}}
{{- range $number := until 3 -}}
{{- $hosts = append $hosts (printf "%s-%d.%s.%s.svc" $name $number $name $.Release.Namespace) -}}
{{- end -}}
{{- join " " $hosts -}}
{{- end }}

{{/* The address of Redis, with the password if it has one. Called with a list of the root and the password. */}}
{{- define "tmd.redis.url" -}}
{{- $root := index . 0 -}}
{{- if and $root.Values.redis.install $root.Values.redis.url -}}
{{- fail "redis.url and redis.install: set one of them" -}}
{{- else if $root.Values.redis.install -}}
{{- $places := list -}}
{{- range splitList " " (include "tmd.redis.hosts" $root) -}}{{- $places = append $places (printf "%s:26379" .) -}}{{- end -}}
redis+sentinel://:{{ index . 1 }}@{{ join "," $places }}/tmd/0?sentinel_password={{ index . 1 }}
{{- else -}}
{{ required "redis.url: name your Redis, such as redis://:PASSWORD@redis.example:6379/0, or set redis.install" $root.Values.redis.url }}
{{- end -}}
{{- end }}

{{/* Where Redis is, without passwords. */}}
{{- define "tmd.redis.place" -}}
{{ .Values.redis.install }} {{ regexReplaceAll "//.*@" (regexFind "^[^?]*" (.Values.redis.url | default "")) "//" }}
{{- end }}

{{/* Another value replaces the pods of daemons and operator, which read these only when they start. */}}
{{- define "tmd.checksums" -}}
checksum/config: {{ .Values.daemon.config | sha256sum }}
checksum/redis: {{ include "tmd.redis.place" . | sha256sum }}
{{- end }}

{{/* What daemons and operator know of the cluster. */}}
{{- define "tmd.environment" -}}
- name: TMD_CONFIG
  value: /etc/tmd/tmd.toml
- name: TMD_CLUSTER__NAME
  value: {{ .Values.cluster | quote }}
- name: TMD_CLUSTER__SECRET_FILE
  value: /etc/tmd-secret/secret
- name: TMD_REDIS__URL
  valueFrom: { secretKeyRef: { name: {{ include "tmd.secret" . }}, key: redis-url } }
- name: TMD_LOG__FORMAT
  value: json
{{- end }}

{{- define "tmd.volumes" -}}
- name: config
  # tmd refuses secrets, such as the address of a webhook, in a file that everybody can read.
  configMap: { name: {{ include "tmd.name" . }}, defaultMode: 0440 }
- name: secret
  secret:
    secretName: {{ include "tmd.secret" . }}
    # tmd refuses a secret that everybody can read; fsGroup gives it to the user of the container.
    defaultMode: 0440
    items: [{ key: secret, path: secret }]
{{- end }}

{{- define "tmd.locked" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: { drop: [ALL] }
{{- end }}

{{/* Users as text. A number is a float here, which would be written as 1.00066e+09. */}}
{{- define "tmd.users" -}}
{{- $users := list -}}
{{- range .Values.daemon.users -}}
{{- $users = append $users (ternary (toString .) (printf "%d" (int64 .)) (kindIs "string" .)) -}}
{{- end -}}
{{- toJson $users -}}
{{- end }}
