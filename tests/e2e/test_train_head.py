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
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.e2e import tiny
from tests.e2e.conftest import adaptivespec, generate, greedy

pytestmark = pytest.mark.engine

TOKENS = 24


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

    def train(self, *more: str) -> subprocess.CompletedProcess[str]:
        # Few different answers and many epochs: the head learns them by heart.
        options = f"""--model {self.target} --prompts {self.prompts} --temperatures 0 --dtype float32
            --max-answer {TOKENS} --max-length 128 --draft-vocabulary 512 --batch-tokens 512 --epochs 60
            --learning-rate 0.01 --unrolled 3"""
        command = [sys.executable, "-m", "adaptivespec_vllm.cli", "train-head", str(self.output)]
        return subprocess.run([*command, *options.split(), *more], capture_output=True, text=True, timeout=900)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    directory = tmp_path_factory.mktemp("train")
    place = Workplace(tiny.make_target(directory / "target"), directory / "prompts.jsonl", directory / "work")
    give_tokenizer(place.target)
    rows = ({"prompt": " ".join(f"w{5 + (i * 37 + j * 11) % 500}" for j in range(6))} for i in range(12))
    place.prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = place.train()
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
    assert trained.train().returncode == 0
    assert (trained.output / "checkpoint.pt").stat().st_mtime_ns == before


def test_another_recipe_in_the_same_directory_is_refused(trained: Workplace) -> None:
    done = trained.train("--seed", "5")
    assert done.returncode == 1
    assert "another directory" in done.stderr and "Traceback" not in done.stderr
