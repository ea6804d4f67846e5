"""Results of a run for people: a line while it runs, a table at the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def line(result: dict[str, Any]) -> str:
    """One part, as soon as it is done."""
    state = f"FAILED: {result['error']}" if result["error"] else result.get("skipped") or "ok"
    seconds = f"{result['seconds']:6.1f} s" if "seconds" in result else " " * 8
    return f"{seconds}  {result['kind']:<10} {result['name'][:26]:<26} {state}"


def table(results: list[dict[str, Any]], device: str) -> Iterator[str]:
    """The machine, the checks, the times against their floors."""
    of_kind = {kind: [r for r in results if r["kind"] == kind] for kind in {r["kind"] for r in results}}
    for machine in of_kind.get("machine", []):
        yield f"{machine.get('gpu', device)}, torch {machine.get('torch', '?')}, CUDA {machine.get('cuda', '?')}"
    yield ""
    yield f"{'check':<38}{'cases':>6}{'error / tolerance':>19}"
    for kind in ("op", "attention", "sanitizer"):
        for result in of_kind.get(kind, []):
            name = {"op": result["name"], "attention": f"attention: {result['name']}"}.get(kind, "compute-sanitizer")
            yield f"{name:<38}{result.get('cases', 0):>6}{_verdict(result):>19}"
    timings = [timing for result in of_kind.get("op", []) for timing in result.get("timings", [])]
    if timings:
        yield ""
        yield f"{'microseconds':<38}{'floor':>8}{'warm':>9}{'cold':>9}{'x floor':>9}{'torch':>10}"
    for each in timings:
        yield (
            f"{each['name']:<38}{each['floor']:>8.2f}{each['warm']:>9.1f}{each['cold']:>9.1f}"
            f"{each['ratio']:>9.1f}{each['torch_cold']:>10.1f}"
        )
    for result in results:
        if result["error"]:
            yield ""
            yield f"FAILED {result['kind']} {result['name']}: {result['error']}"


def _verdict(result: dict[str, Any]) -> str:
    if result["error"]:
        return "FAILED"
    return "not run here" if "skipped" in result else f"{result.get('worst', 0.0):.2f}"
