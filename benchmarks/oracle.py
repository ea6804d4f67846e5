"""How much the policies leave: recorded texts with every policy, and with trees that are the best in hindsight.

    python -m benchmarks.oracle --costs cpu-2core

Strict, one request at a time, in virtual time (``adaptivespec simulate``). Two oracles know the text before they draft:
one takes at each step whichever of 945 static shapes makes the whole text fastest, the other drafts nothing but tokens
that will be accepted, as many as make the whole text fastest. What the second one needs nobody can know.
"""

from __future__ import annotations

import argparse
import json

import numpy as np

from adaptivespec_vllm.bench.arms import Arm, parse
from adaptivespec_vllm.config import METHOD
from adaptivespec_vllm.policy.costs import Costs
from adaptivespec_vllm.simulate.cli import DEFAULT_RECORDING
from adaptivespec_vllm.simulate.figures import simulate
from adaptivespec_vllm.simulate.recording import NOT_TAKEN, Position, RecordedText, Recording
from adaptivespec_vllm.simulate.search import Beam, shapes
from adaptivespec_vllm.simulate.tables import SHIPPED, costs_of

ARMS = "plain stock:3 tree:3,4,3 tree:4,4,5 tree:5,4,8 tree:8,4,24 tree:8,8,48 paper adaptive sglang-adaptive default"
_RECORDED = {"depth": 7, "width": 8, "nodes": 60}
"""The largest tree of talon and ddd, whose own is wider than what was recorded."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--costs", nargs="+", default=list(SHIPPED))
    parser.add_argument("--arms", default=ARMS)
    args = parser.parse_args()
    recording = Recording.read(DEFAULT_RECORDING)
    tokens = sum(text.tokens for text in recording.texts)
    for name in args.costs:
        costs = costs_of(name)
        plain = costs.of_requests(1)(1)
        arms = [*parse(args.arms, "recorded"), _within("talon"), _within("ddd")]
        rows = {arm: kinds["all"].vs_plain for arm, kinds in simulate(recording, costs, 1, arms).arms.items()}
        rows["oracle: best of all shapes"] = tokens * plain / sum(best_shapes(recording, costs))
        rows["oracle: accepted tokens alone"] = tokens * plain / sum(best_chains(t, costs) for t in recording.texts)
        print(json.dumps({"costs": name, "times_plain": {arm: round(value, 3) for arm, value in rows.items()}}))


def _within(policy: str) -> Arm:
    """A policy with trees that were recorded."""
    return Arm(
        policy, "policy", {"method": METHOD, "model": "recorded", "tree": {"policy": policy, "shape": _RECORDED}}
    )


def best_shapes(recording: Recording, costs: Costs) -> list[float]:
    """Seconds of each text where every step has the shape that is best for the rest of it."""
    positions = [position for text in recording.texts for position in text.positions]
    step = costs.of_requests(1)
    accepted, seconds = [np.zeros(len(positions), dtype=np.int64)], [np.full(len(positions), step(1))]
    for width in sorted({shape.width for shape in shapes()}):
        beam = Beam.grow(positions, width)
        for shape in shapes():
            if shape.width == width:
                taken, nodes, rows = beam.of(shape)
                levels = np.where(rows > 0, costs.level(rows.astype(float)), 0.0).sum(0)
                accepted.append(taken)
                seconds.append(step(1.0 + nodes) + levels + costs.first(taken + 1.0))
    done, result = 0, []
    for text in recording.texts:
        own = slice(done, done + text.tokens)
        result.append(fastest(np.array([a[own] for a in accepted]), np.array([s[own] for s in seconds])))
        done += text.tokens
    return result


def best_chains(text: RecordedText, costs: Costs) -> float:
    """Seconds of a text where each step drafts accepted tokens alone."""
    step, most = costs.of_requests(1), max(map(run_of, text.positions))
    runs = np.array([run_of(position) for position in text.positions])
    accepted = np.minimum(np.arange(most + 1)[:, None], runs)
    chain = [step(1)] + [
        step(1 + k) + (k - 1) * costs.level(1) + costs.first(k + 1) for k in range(1, most + 1)
    ]  # the head's pass over what a step emits counts with that step
    return fastest(accepted, np.array(chain)[accepted])


def run_of(position: Position) -> int:
    """How many recorded nodes the text goes on with."""
    node, length = 0, 0
    while node >= 0 and (rank := int(position.taken[node])) != NOT_TAKEN:
        node, length = int(position.nodes[node, rank]), length + 1
    return length


def fastest(accepted: np.ndarray, seconds: np.ndarray) -> float:
    """Least seconds to the end of a text; ``[choices, positions]`` of what each choice accepts and takes there."""
    length = accepted.shape[1]
    rest = np.zeros(length + 1)
    for at in range(length - 1, -1, -1):
        rest[at] = (seconds[:, at] + rest[np.minimum(at + accepted[:, at] + 1, length)]).min()
    return float(rest[0])


if __name__ == "__main__":
    main()
