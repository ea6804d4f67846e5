"""``adaptivespec train-head`` on a tiny random target: from prompts to a head whose drafts vLLM accepts."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy

pytestmark = pytest.mark.engine

TOKENS = 24
VOCABULARY = ("--draft-vocabulary", "512")


def give_tokenizer(target: Path) -> None:
    """A tokenizer of words with a chat format."""
    special = ["<pad>", "<s>", "</s>", "<user>", "<bot>"]
    words = special + [f"w{i}" for i in range(len(special), tiny.VOCABULARY)]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=special[3:],
    )
    turns = "{% for m in messages %}<user> {{ m['content'] }} </s> {% endfor %}"
    fast.chat_template = turns + "{% if add_generation_prompt %}<bot>{% endif %}"
    fast.save_pretrained(target)


@dataclass
class Workplace:
    """A target, prompts, and the directory that a head is trained in."""

    target: Path
    prompts: Path
    output: Path

    def train(self, *more: str, output: Path | None = None) -> subprocess.CompletedProcess[str]:
        # Few different answers and many epochs: the head learns them by heart.
        options = f"""--model {self.target} --prompts {self.prompts} --temperatures 0 --dtype float32
            --max-answer {TOKENS} --max-length 128 --batch-tokens 512 --epochs 60 --learning-rate 0.01 --unrolled 3"""
        command = [sys.executable, "-m", "adaptivespec_vllm.cli", "train-head", str(output or self.output)]
        return subprocess.run([*command, *options.split(), *more], capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    directory = tmp_path_factory.mktemp("train")
    place = Workplace(tiny.make_target(directory / "target"), directory / "prompts.jsonl", directory / "work")
    give_tokenizer(place.target)
    rows = ({"prompt": " ".join(f"w{5 + (i * 37 + j * 11) % 500}" for j in range(6))} for i in range(12))
    place.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = place.train(*VOCABULARY)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "first choice = the target's" in done.stdout
    assert (place.output / "curve.png").stat().st_size > 5000
    return place


@pytest.mark.parametrize("layout", ["head", "head-speculators"])
def test_vllm_accepts_what_the_head_drafts(trained: Workplace, make_llm: Callable[..., Any], layout: str) -> None:
    answers = [json.loads(line) for line in (trained.output / "answers.jsonl").read_text().splitlines()]
    prompts = [{"prompt_token_ids": answer["prompt_ids"]} for answer in answers]
    shape = {"depth": 3, "width": 1, "nodes": 3}
    config = adaptivespec(trained.output / layout, tree={"policy": "static", "shape": shape})
    llm = make_llm(target=trained.target, speculative_config=config)
    llm.collective_rpc("adaptivespec_stats")
    tokens = generate(llm, prompts, greedy(TOKENS, ignore_eos=False))
    assert tokens == [answer["answer_ids"] for answer in answers]
    stats = llm.collective_rpc("adaptivespec_stats")[0]
    # Most drafts of every answer but the one that is held out: the network that was trained is the one that vLLM runs.
    assert stats["emitted"] / stats["steps"] > 2.4


def test_the_same_command_again_has_nothing_to_do(trained: Workplace) -> None:
    before = (trained.output / "checkpoint.pt").stat().st_mtime_ns
    assert trained.train(*VOCABULARY).returncode == 0
    assert (trained.output / "checkpoint.pt").stat().st_mtime_ns == before


def test_another_recipe_in_the_same_directory_is_refused(trained: Workplace) -> None:
    done = trained.train(*VOCABULARY, "--seed", "5")
    assert done.returncode == 1
    assert "another directory" in done.stderr and "Traceback" not in done.stderr


def test_a_run_can_start_from_the_head_of_another(trained: Workplace, tmp_path: Path) -> None:
    head, output = trained.output / "head", tmp_path / "more"
    done = trained.train(
        "--start-from", str(head), "--epochs", "1", "--learning-rate", "0.000001", "--seed", "1", output=output
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # A step so small changes next to nothing; another seed alone would have begun with other weights.
    before, after = (load_file(path / "model.safetensors") for path in (head, output / "head"))
    assert before.keys() == after.keys()
    for name, weights in before.items():
        torch.testing.assert_close(
            after[name].float(), weights.float(), atol=1e-3, rtol=1e-2, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert torch.equal(before["t2d"], after["t2d"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--start-from", "{nothing}"], "--start-from: {nothing}: "),
        (["--start-from", "{head}", *VOCABULARY], "--draft-vocabulary: got 512, but a head given with --start-from"),
    ],
)
def test_what_a_run_cannot_start_from_is_named(
    trained: Workplace, tmp_path: Path, options: list[str], message: str
) -> None:
    places = {"nothing": str(tmp_path / "nothing"), "head": str(trained.output / "head")}
    done = trained.train(*(o.format(**places) for o in options), output=tmp_path / "more")
    assert done.returncode == 1
    assert message.format(**places) in done.stderr and "Traceback" not in done.stderr
