"""From a target and prompts to a head: the stages in order, each going on where it stopped.

A working directory holds everything::

    recipe.json             what was asked for; a run with other settings is refused
    prompts.jsonl           the prompts, those that the target wrote itself included
    answers.jsonl           the target's answers
    features/*.safetensors  hidden states, by shard
    checkpoint.pt           network and optimiser
    curve.jsonl             agreement after each epoch
    head/                   what vLLM loads, written after each epoch
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from adaptivespec_vllm.config import ConfigError, shortened
from adaptivespec_vllm.training.answers import Answer, Sampling, generate, read_answers, write_prompts
from adaptivespec_vllm.training.prompts import Prompt, read_prompts

if TYPE_CHECKING:
    from adaptivespec_vllm.training.network import HeadShape

HELD_OUT = 50
"""One prompt in so many is kept from training, to measure agreement on."""

Report = Callable[[str, float, float, str], None]
"""Called with (stage, done, total, what there is to say)."""


@dataclass(frozen=True)
class Recipe:
    """What is asked for.

    Attributes:
        model: the target, a directory or a hub id.
        prompts: files of prompts.
        own_prompts: prompts that the target writes itself, beside those.
        sampling: how prompts are answered.
        draft_vocabulary: tokens that the head can propose.
        schedule: how the head is trained (``trainer.Schedule`` as a dict).
        dtype: of the target's weights while it answers and is read.
        max_length: longest prompt and answer together, in tokens.
        start_from: a head of the EAGLE layout whose weights and draft vocabulary training begins with.

    """

    model: str
    prompts: tuple[str, ...]
    own_prompts: int = 0
    sampling: Sampling = field(default_factory=Sampling)
    draft_vocabulary: int = 4096
    schedule: dict[str, Any] = field(default_factory=dict)
    dtype: str = "bfloat16"
    max_length: int = 1024
    start_from: str | None = None

    def save(self, directory: Path) -> None:
        """Write the recipe, or see that the directory's own is the same.

        Raises:
            ConfigError: the directory belongs to another recipe.

        """
        path, mine = directory / "recipe.json", json.loads(json.dumps(asdict(self)))
        if path.exists():
            theirs = json.loads(path.read_text(encoding="utf-8"))
            for key in {**theirs, **mine}:
                if theirs.get(key) != mine.get(key):
                    raise ConfigError(
                        f"{key}: got {_text(mine.get(key))}, but {directory} was begun with {_text(theirs.get(key))}; "
                        "allowed: the same, or another directory"
                    )
        directory.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(mine, indent=1) + "\n", encoding="utf-8")


def _text(value: Any) -> str:
    return shortened(json.dumps(value))


def held_out(answers: Sequence[Answer]) -> list[int]:
    """Indices of the answers that are for measuring only: those of one prompt in ``HELD_OUT``, at least of one.

    All answers to one prompt are on the same side, whichever other prompts there are.
    """
    ranks = {a.id: int.from_bytes(hashlib.sha256(a.id.encode()).digest()[:4], "big") for a in answers}
    first = min(ranks, key=lambda name: (ranks[name] % HELD_OUT, ranks[name]))
    return [i for i, a in enumerate(answers) if ranks[a.id] % HELD_OUT == 0 or a.id == first]


def check(recipe: Recipe) -> None:
    """See that what training begins with can be read, before hours are spent on answers."""
    if recipe.start_from is not None:
        from adaptivespec_vllm.training.start import StartingHead

        StartingHead.read(Path(recipe.start_from))


# --- stage 1: answers ---


def answer(recipe: Recipe, directory: Path, report: Report) -> None:
    """Generate the answers, in a process of its own so that the engine's memory is free afterwards."""
    prompts = [prompt for path in recipe.prompts for prompt in read_prompts(Path(path))]
    if not prompts and not recipe.own_prompts:
        raise ConfigError("--prompts: nothing was given; allowed: files of prompts, or --own-prompts above 0")
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(recipe, prompts, directory, sender))
    process.start()
    sender.close()
    try:
        while True:
            report(*receiver.recv())
    except EOFError:
        process.join()
    except KeyboardInterrupt:
        process.terminate()
        process.join()
        raise
    if process.exitcode:
        raise RuntimeError(f"generating answers ended with status {process.exitcode}")


def _answer(recipe: Recipe, prompts: list[Prompt], directory: Path, sender: Any) -> None:
    os.environ["VLLM_PLUGINS"] = ""  # plain decoding needs no plugin
    from vllm import LLM

    sender.send(("answers", 0, 1, "starting vLLM"))
    llm = LLM(
        model=recipe.model,
        dtype=recipe.dtype,
        max_model_len=recipe.max_length,
        seed=recipe.sampling.seed,
        enable_prefix_caching=False,  # prompts share next to nothing
        **_cache_size(),
    )
    path = directory / "prompts.jsonl"
    if not path.exists():
        sender.send(("answers", 0, 1, "the target writes prompts"))
        if recipe.own_prompts:
            prompts = prompts + write_prompts(llm, recipe.own_prompts)
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(asdict(p)) + "\n" for p in prompts), encoding="utf-8")
        partial.rename(path)
    generate(
        llm,
        read_prompts(path),
        recipe.sampling,
        directory / "answers.jsonl",
        lambda done, total, tokens: sender.send(("answers", done, total, f"{tokens} tokens")),
    )


def _cache_size() -> dict[str, int]:
    """vLLM reserves nearly all memory, which suits a GPU but not a machine that does other things too."""
    import psutil
    import torch

    if torch.cuda.is_available():
        return {}
    return {"kv_cache_memory_bytes": min(4 << 30, psutil.virtual_memory().available // 2)}


# --- stages 2 and 3: features and training ---


def train(recipe: Recipe, directory: Path, report: Report) -> None:
    """Read the target's hidden states, then train and export the head."""
    import torch
    from transformers import AutoModelForCausalLM

    from adaptivespec_vllm.training.export import TrainedHead, export
    from adaptivespec_vllm.training.features import Extractor, Shards, default_layers, extract
    from adaptivespec_vllm.training.network import Eagle3Network
    from adaptivespec_vllm.training.start import StartingHead
    from adaptivespec_vllm.training.trainer import Schedule, TargetOutput, Trainer
    from adaptivespec_vllm.training.vocabulary import DraftVocabulary, choose_vocabulary

    device = "cuda" if torch.cuda.is_available() else "cpu"
    start = StartingHead.read(Path(recipe.start_from)) if recipe.start_from is not None else None
    report("features", 0, 1, "loading the target")
    target = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=getattr(torch, recipe.dtype)).to(device)
    config = target.config
    answers = ordered(read_answers(directory / "answers.jsonl"), recipe.max_length)
    if not answers:
        raise ConfigError(f"{directory}: has no answers long enough to train on")
    layers = default_layers(config.num_hidden_layers)
    extract(
        Extractor(target, layers), answers, directory / "features", lambda n, of: report("features", n, of, "shards")
    )

    measured = set(held_out(answers))
    texts = [a.answer_ids for i, a in enumerate(answers) if i not in measured]
    if start is None:
        size = min(recipe.draft_vocabulary, config.vocab_size)
        vocabulary = choose_vocabulary(texts, size, config.vocab_size, stop_ids(config))
    else:
        vocabulary = DraftVocabulary.of(start.ids, config.vocab_size, texts)
    shape = head_shape(config, len(vocabulary.ids))
    embedding = target.get_input_embeddings().weight.detach()
    output = target.get_output_embeddings().weight.detach()
    torch.manual_seed(recipe.sampling.seed)
    network = Eagle3Network(shape, embedding.float())
    if start is None:
        network.start_from(output[vocabulary.ids].float(), target.model.norm.weight.detach().float())
    else:
        start.load_into(network)
    schedule = Schedule(**recipe.schedule)
    trainer = Trainer(
        network.to(device),
        TargetOutput(output, vocabulary.ids.to(device)),
        Shards(directory / "features"),
        sorted(measured),
        schedule,
        directory,
    )
    del target

    def write() -> None:
        state = {name: value.cpu() for name, value in network.state_dict().items()}
        name = Path(recipe.model).name if Path(recipe.model).is_dir() else recipe.model
        head = TrainedHead(state, shape, vocabulary, layers, config.to_dict(), name, schedule.unrolled)
        export(head, directory / "head")
        export(head, directory / "head-speculators", "speculators")

    report("training", 0, 1, f"draft vocabulary of {len(vocabulary.ids)} covers {vocabulary.coverage:.1%} of the text")
    trainer.run(lambda step, total, facts: report("training", step, total, f"loss {facts['loss']:.3f}"), write)
    write()  # also where all epochs were done before


def ordered(answers: Any, max_length: int) -> list[Answer]:
    """Answers that can be trained on, in an order that does not depend on when each was finished."""
    kept = [a for a in answers if len(a.answer_ids) >= 3 and len(a.prompt_ids) + len(a.answer_ids) <= max_length]
    return sorted(kept, key=lambda a: hashlib.sha256(f"{a.id}@{a.temperature}".encode()).digest())


def stop_ids(config: Any) -> Sequence[int]:
    """Tokens that end a text: a head must be able to propose them."""
    eos = config.eos_token_id
    return [eos] if isinstance(eos, int) else list(eos or ())


def head_shape(config: Any, draft_vocabulary: int) -> HeadShape:
    """Sizes of the head: those of one layer of the target."""
    from adaptivespec_vllm.training.network import HeadShape

    heads = config.num_attention_heads
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return HeadShape(
        hidden=config.hidden_size,
        intermediate=config.intermediate_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        rope_theta=float(rope.get("rope_theta", getattr(config, "rope_theta", 10000.0))),
        norm_eps=config.rms_norm_eps,
        draft_vocabulary=draft_vocabulary,
    )
