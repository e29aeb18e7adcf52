#!/usr/bin/env bash
# Builds the client of Ollama's command line and runs it against a Shoal of this checkout. Its server and its runners,
# which need a C++ compiler, are left out; nothing of the client is changed. Needs Go.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
version=v0.17.4
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
go mod download "github.com/ollama/ollama@$version"
cp -r "$(go env GOMODCACHE)/github.com/ollama/ollama@$version" "$work/ollama"
chmod -R u+w "$work/ollama"
(
  cd "$work/ollama"
  rm server/*.go runner/*.go x/imagegen/server.go
  printf 'package server\n\nimport "net"\n\nfunc Serve(net.Listener) error { panic("the server is left out") }\n' >server/serve.go
  printf 'package runner\n\nfunc Execute([]string) error { panic("the runners are left out") }\n' >runner/runner.go
  CGO_ENABLED=0 go build -o "$work/client" .
)
"$python" -m tests.clients.ollama_cli "$work/client"
