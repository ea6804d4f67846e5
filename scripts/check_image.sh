#!/usr/bin/env bash
# Runs docker/Dockerfile.cpu without a container engine, and then what its image is for: the smoke test, a server with its
# health check, the demo. Needs root and debootstrap; IMAGE is a directory (6 GB), RUN the command run_dockerfile.py.
set -euo pipefail
base=$IMAGE/base
if [ ! -x "$base/usr/bin/python" ]; then
  mkdir -p "$IMAGE"
  debootstrap --variant=minbase --include=ca-certificates,python3,python3-dev,python3-pip,python3-venv bookworm "$base"
  rm -f "$base"/usr/lib/python3*/EXTERNALLY-MANAGED # the base image has none
  ln -s python3 "$base/usr/bin/python"
fi
$RUN build docker/Dockerfile.cpu --base "$base" --output "$IMAGE/cpu"

echo "--- smoke test"
$RUN run "$IMAGE/cpu" python /opt/adaptivespec/share/smoke_test.py

echo "--- server and health check"
$RUN health "$IMAGE/cpu" 2>/dev/null && { echo "something else answers on port 8000" >&2; exit 1; }
$RUN run "$IMAGE/cpu" python /opt/adaptivespec/share/serve.py --dtype float32 --max-model-len 1024 \
  --kv-cache-memory-bytes 268435456 &
server=$!
trap 'kill "$server" 2>/dev/null || true' EXIT
until $RUN health "$IMAGE/cpu" 2>/dev/null; do
  kill -0 "$server" || { echo "the server ended" >&2; exit 1; }
  sleep 3
done
echo "healthy"
kill "$server"
wait "$server" || true

echo "--- the image's own command"
$RUN run "$IMAGE/cpu"
