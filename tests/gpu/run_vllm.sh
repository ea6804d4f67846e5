#!/usr/bin/env bash
# AdaptiveSpec in vLLM on a machine with models: exactness first, then `adaptivespec bench`. With a GPU, exactness is tried
# in float32 (tree rows by the Triton kernel), in the model's own dtype under CUDA graphs (by FlashAttention), and once
# with every hidden wait for the device an error. Without a GPU the first part and the bench run on the CPU, to try the
# script. A part that fails does not keep the others from running; a table of all ends the output.
#
#   tests/gpu/run_vllm.sh --model TARGET --head HEAD                   # everything
#   tests/gpu/run_vllm.sh --model TARGET --head HEAD --only bench --batch 1,8,32
#   tests/gpu/run_vllm.sh --model TARGET --head HEAD --limit 2 --tokens 24 --repeats 1     # small
set -uo pipefail

usage() {
    cat <<'TEXT'
usage: tests/gpu/run_vllm.sh --model TARGET --head HEAD [options]

  --model TARGET    a directory or a hub id
  --head HEAD       its EAGLE-3 head: a directory or a hub id
  --prompts FILE    JSON Lines with "id", "kind", "prompt" (tests/e2e/data/prompts.jsonl)
  --limit N         prompts of each kind, at most (16)
  --tokens N        tokens an answer, at most (128)
  --batch LIST      batches of the bench, e.g. 1,8,32 (1,8,32)
  --arms NAMES      arms of the bench ("plain stock:3 stock:5 tree:5,4,16 default default@0.2")
  --repeats N       turns of every arm in the bench (3)
  --only PART       one of float32, model-dtype, waits, bench
  --output DIR      results (gpu-results)
  PYTHON            the interpreter (python3)
TEXT
}

fail() {
    echo "run_vllm.sh: $1" >&2
    exit 2
}

number() {
    [[ $2 =~ ^[1-9][0-9]*$ ]] || fail "$1: got '$2'; allowed: an integer of at least 1"
}

here=$(cd "$(dirname "$0")/../.." && pwd)
model='' head='' prompts=$here/tests/e2e/data/prompts.jsonl limit=16 tokens=128 batch=1,8,32 repeats=3 only=''
arms='plain stock:3 stock:5 tree:5,4,16 default default@0.2' output=gpu-results
while (($#)); do
    case $1 in
    -h | --help) usage && exit 0 ;;
    --model | --head | --prompts | --limit | --tokens | --batch | --arms | --repeats | --only | --output)
        (($# > 1)) || fail "$1: needs a value"
        printf -v "${1#--}" %s "$2"
        shift 2
        ;;
    *) fail "$1: unknown; see --help" ;;
    esac
done
[[ $model ]] || fail "--model: missing"
[[ $head ]] || fail "--head: missing"
for name in limit tokens repeats; do number "--$name" "${!name}"; done
[[ -f $prompts ]] || fail "--prompts: no file '$prompts'"
case $only in '' | float32 | model-dtype | waits | bench) ;; *)
    fail "--only: got '$only'; allowed: float32, model-dtype, waits, bench" ;;
esac

python=${PYTHON:-python3}
"$python" -c 'import vllm, adaptivespec_vllm' 2>/dev/null || fail "$python cannot import vllm and adaptivespec_vllm"
gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
mkdir -p "$output" || exit 2
echo "machine: ${gpu:-no GPU}; results in $output"

parts=() states=()
part() {
    local name=$1
    shift
    [[ -z $only || $only == "$name" ]] || return 0
    echo "--- $name"
    "$@" 2>&1 | tee "$output/$name.log"
    local status=${PIPESTATUS[0]}
    parts+=("$name") states+=("$([[ $status == 0 ]] && echo ok || echo "failed ($status)")")
}

exactness() {
    local arms=$1 limit=$2 file=$3
    shift 3
    "$python" "$here/benchmarks/check_exactness.py" --model "$model" --head "$head" --prompts "$prompts" \
        --limit "$limit" --tokens "$tokens" --arms $arms --output "$output/$file.json" "$@"
}

trees='tree:3,4,3 tree:7,4,16 adaptive'
if [[ $gpu ]]; then
    part float32 exactness "$trees" "$limit" float32 --dtype float32 --tie 1e-3 --attention triton
    # Rounding to bfloat16 or float16 moves logits by far more than float32 does: texts part at near-ties.
    part model-dtype exactness "$trees default" "$limit" model-dtype --dtype auto --compiled --tie 0.25
    VLLM_GPU_SYNC_CHECK=error part waits exactness tree:7,4,16 1 waits --dtype auto --compiled --tie 0.25
else
    part float32 exactness "$trees" "$limit" float32 --dtype float32
fi
part bench "$python" -m adaptivespec_vllm.cli bench --model "$model" --head "$head" --arms "$arms" --batch "$batch" \
    --prompts "$prompts" --limit "$limit" --max-tokens "$tokens" --repeats "$repeats" --output "$output/bench"

echo "--- summary"
failed=0
for i in "${!parts[@]}"; do
    printf '%-12s %s\n' "${parts[i]}" "${states[i]}"
    [[ ${states[i]} == ok ]] || failed=1
done
exit $failed
