"""Results of `adaptivespec bench` made by hand."""

from __future__ import annotations

from typing import Any

from adaptivespec_vllm.bench.figures import summarise
from adaptivespec_vllm.bench.result import ArmInfo, Place, Result, Sample

PLACE = Place(batch=1, context=None)


def arm(name: str, family: str = "plain", **changes: Any) -> ArmInfo:
    fixed = {"lossless": True, "chain": None, "speculative": None, "start_seconds": 1.0, "resident_bytes": 0}
    return ArmInfo.model_validate({"name": name, "family": family} | fixed | changes)


def sample(arm: str, emitted: int, seconds: float = 1.0, **changes: Any) -> Sample:
    """A turn in which each step took 0.1 s."""
    fixed = {
        "place": PLACE,
        "kind": "math",
        "group": 0,
        "round": 0,
        "prompts": ["math/0"],
        "prompt_tokens": 20,
        "prefill_seconds": 0.5,
        "steps": round(seconds / 0.1),
        "engine_steps": round(seconds / 0.1),
        "reached": [],
        "drafted": {},
        "sections": {},
        "same_text": 1,
    }
    return Sample.model_validate({"arm": arm, "emitted": emitted, "seconds": seconds} | fixed | changes)


def result(samples: list[Sample], arms: list[ArmInfo], **changes: Any) -> Result:
    """With its figures made."""
    provenance = {
        "machine": {"cpu": "a processor", "load_average": [0.1]},
        "versions": {"torch": "2"},
        "command": ["adaptivespec", "bench"],
    }
    settings = {"model": "target 0123", "device": "cpu", "dtype": "float32", "mode": "eager", "threads": 2}
    values = {"complete": True, "provenance": provenance, "settings": settings} | changes
    made = Result(arms=arms, samples=samples, **values)
    summarise(made)
    return made


def two_kinds(faster: float = 1.0, **changes: Any) -> Result:
    """Plain, two chains, two trees and one of them with margin, on two prompts of two kinds; arms 1x to 3x plain."""
    arms = [
        arm("plain"),
        arm("stock:1", "stock", chain=1),
        arm("stock:2", "stock", chain=2),
        arm("tree:3,4,3", "static"),
        arm("tree:5,4,8", "static"),
        arm("tree:3,4,3@0.2", "static", lossless=False),
        arm("default", "policy"),
    ]
    speeds = {  # of plain decoding's 10 tokens a second, by kind
        "plain": (1.0, 1.0),
        "stock:1": (1.2, 1.1),
        "stock:2": (1.5, 0.9),
        "tree:3,4,3": (2.0, 1.2),
        "tree:5,4,8": (2.5, 0.8),
        "tree:3,4,3@0.2": (3.0, 1.2),
        "default": (2.25, 1.32),
    }
    samples = []
    for group, kind in enumerate(("math", "math", "code", "code")):
        for name, factors in speeds.items():
            factor = factors[kind == "code"] * (1 if name == "plain" else faster)
            own = next(one for one in arms if one.name == name)
            counted = own.family in ("static", "policy")
            samples.append(
                sample(
                    name,
                    round(1000 * factor),
                    100.0,
                    kind=kind,
                    group=group,
                    prompts=[f"{kind}/{group}"],
                    reached=[] if name == "plain" else [500, 100],
                    drafted={"nodes": 3000, "depth": 2000, "width": 1500, "steps": 1000} if counted else {},
                    promotions=(7 if "@" in name else 0) if counted else None,
                    same_text=0 if "@" in name else 1,
                    sections={"execute/target": 40.0, "execute/target/attention": 10.0, "commit": 5.0}
                    if counted
                    else {},
                )
            )
    return result(samples, arms, **changes)
