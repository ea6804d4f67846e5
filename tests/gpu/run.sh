#!/usr/bin/env bash
# Checks and times the CUDA ops on a machine with an NVIDIA GPU, nvcc and PyTorch; nothing else, no network. Under 4 minutes.
#
#   tests/gpu/run.sh                     # builds the ops, checks each, times each, prints a table, writes gpu.json
#   tests/gpu/run.sh --device cpu        # the same walk with the CPU ops, to try the script itself
#   PYTHON=python3.12 tests/gpu/run.sh --json /tmp/h200.json --seeds 50
set -euo pipefail
cd "$(dirname "$0")/../.."
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" -m tests.gpu.run "$@"
