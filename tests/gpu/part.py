"""One part of a run in this process: its last line of output is JSON.

python -m tests.gpu.part KIND NAME DEVICE SEEDS
"""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any

import torch

from adaptivespec_vllm import ops
from tests.gpu.attention import IMPLEMENTATIONS, check_of
from tests.gpu.checks import CHECKS, Check
from tests.gpu.timing import time_op


def machine(device: torch.device) -> dict[str, Any]:
    """What is here, and which implementations of tree attention there are to check."""
    found: dict[str, Any] = {"torch": torch.__version__, "cuda": torch.version.cuda, "attention": list(IMPLEMENTATIONS)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name, "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
        }  # fmt: skip
    return found


def check(run: Check, device: torch.device, seeds: int) -> dict[str, Any]:
    """Random cases 0 .. seeds - 1; the first that fails ends it."""
    if device.type == "cuda" and not ops.cuda_ops_loaded():
        return {"error": f"the CUDA ops are not loaded: {ops.describe()['cuda']}"}
    worst = 0.0
    for seed in range(seeds):
        try:
            worst = max(worst, run(device, seed))
        except ModuleNotFoundError as error:
            return {"skipped": str(error)}
        except Exception as error:  # an op that fails is a result
            traceback.print_exc()
            return {"cases": seed, "error": f"seed {seed}: {type(error).__name__}: {error}"}
    return {"cases": seeds, "worst": worst}


def part(kind: str, name: str, device: torch.device, seeds: int) -> dict[str, Any]:
    """The result of one part."""
    if kind == "machine":
        return machine(device)
    if kind == "attention":
        return check(check_of(name), device, seeds)
    if kind == "sanitizer":  # the sanitizer around this process looks at memory
        results = [check(CHECKS[each], device, seeds) for each in name.split()]
        return next((result for result in results if "error" in result), {"cases": seeds * len(results)})
    result = check(CHECKS[name], device, seeds)
    try:
        return result | {"timings": [each._asdict() | {"ratio": each.ratio} for each in time_op(name, device)]}
    except Exception as error:
        traceback.print_exc()
        return {"error": f"timing: {type(error).__name__}: {error}"} | result


def main() -> int:
    kind, name, device, seeds = sys.argv[1:]
    try:
        result = part(kind, name, torch.device(device), int(seeds))
    except Exception as error:  # a missing driver, a broken extension: whatever it is, it is the result
        traceback.print_exc()
        result = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps({"error": None} | result))
    return int(result.get("error") is not None)


if __name__ == "__main__":
    sys.exit(main())
