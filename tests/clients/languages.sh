#!/usr/bin/env bash
# Runs OpenAI's Java, Node.js and Go clients and langchain4j against a Shoal of this checkout, each where its tools are
# installed; with CI=true a missing tool fails. The model repeats its input and fails at the word "poison": every
# client must report an error then.
set -euo pipefail
cd "$(dirname "$0")"
python=${PYTHON:-../../.venv/bin/python}
work=$(mktemp -d)
log=$work/shoal.log
"$python" -m shoal serve "echo=fake:poison=poison" --port 0 2>"$log" &
server=$!
trap 'kill "$server"; rm -rf "$work"' EXIT
url=""
for _ in $(seq 600); do
  url=$(sed -nE 's/.*listening on (http:[^ ",]*).*/\1/p' "$log" | head -n 1)
  [ -n "$url" ] && break
  kill -0 "$server" || { cat "$log"; exit 1; }
  sleep 0.1
done
failed=0
without() { # <tool> <clients>
  echo "skipped $2: $1 is not installed"
  [ "${CI:-}" != true ] || failed=1
}
if command -v mvn >/dev/null; then
  cp -r java "$work/java"
  (cd "$work/java" && mvn -q -B compile dependency:copy-dependencies -DoutputDirectory=lib)
  java -cp "$work/java/lib/*:$work/java/target/classes" Clients "$url/v1" echo || failed=1
else
  without mvn "openai-java and langchain4j"
fi
if command -v npm >/dev/null; then
  cp -r node "$work/node"
  (cd "$work/node" && npm install --silent --no-audit --no-fund)
  node "$work/node/clients.mjs" "$url/v1" echo || failed=1
else
  without npm openai-node
fi
if command -v go >/dev/null; then
  (cd go && go run . "$url/v1" echo) || failed=1
else
  without go openai-go
fi
exit "$failed"
