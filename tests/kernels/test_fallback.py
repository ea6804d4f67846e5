"""Without the compiled module the package works on the reference, and says so once."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from adaptivespec_vllm import ops

PROGRAM = """
import logging, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name == "adaptivespec_vllm._C":
            raise ImportError("not built")
        assert name.split(".")[0] != "vllm", "ops must not import vllm"

sys.meta_path.insert(0, Refuse())
records = []
handler = logging.Handler()
handler.emit = records.append
logging.getLogger("vllm.adaptivespec").addHandler(handler)

import torch
from adaptivespec_vllm import ops
from adaptivespec_vllm.ops import topk_logprobs  # a second import says nothing

assert not ops.native_ops_loaded()
assert ops.describe()["cpu"] == "reference"
tree = ops.build_tree(
    torch.tensor([0, 4, 5], dtype=torch.int32), torch.tensor([-1, 0, 1], dtype=torch.int32),
    torch.tensor([0, 3], dtype=torch.int32), torch.tensor([10]),
)
assert tree.positions.tolist() == [10, 11, 12]
logits = torch.zeros(3, 8)
logits[0, 4] = logits[1, 6] = 1.0
result = ops.walk_trees(logits, tree)
assert (result.paths.tolist(), result.next_tokens.tolist()) == ([[1, -1]], [6])
assert ops.topk_logprobs(logits, 2)[1][0].tolist() == [4, 0]
out = torch.empty(3, 2, 4)
key = torch.zeros(3, 1, 4)
ops.tree_attention(
    torch.zeros(3, 2, 4), key, key + 3, torch.zeros(1, 1, 16, 4), torch.zeros(1, 1, 16, 4),
    torch.zeros(1, 1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32), tree.start, tree.start, tree.ancestors,
    1.0, out,
)
assert torch.equal(out, torch.full_like(out, 3.0))
identity = ops.PackedLinear.pack(torch.eye(5))
assert torch.equal(ops.linear(torch.arange(10.0).view(2, 5), identity), torch.arange(10.0).view(2, 5))
try:
    ops.build_tree(tree.tokens, torch.zeros(3, dtype=torch.int32), tree.start, torch.tensor([0]))
except ops.InvalidTreeError as error:
    assert error.request == 0
else:
    raise AssertionError
warnings = [r for r in records if r.levelno >= logging.WARNING]
assert len(warnings) == 1 and "native ops" in warnings[0].getMessage(), warnings
"""

ISA_PROGRAM = """
from adaptivespec_vllm import ops
print(ops.describe()["cpu"])
"""


def run(program: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_reference_takes_over_with_one_warning():
    run(PROGRAM)


@pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")
def test_a_lesser_instruction_set_can_be_asked_for():
    assert run(ISA_PROGRAM, VLLM_ADAPTIVESPEC_ISA="portable") == "native (portable)"


@pytest.mark.skipif(not ops.native_ops_loaded(), reason="native ops are not built")
@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_a_level_on_lesser_instruction_sets(isa):
    files = [str(Path(__file__).with_name(f"test_{name}.py")) for name in ("linear", "draft_layer")]
    program = f"import sys, pytest; sys.exit(pytest.main(['-q', *{files}, '-k', 'equals or awkward']))"
    run(program, VLLM_ADAPTIVESPEC_ISA=isa)
