"""Around the head's network: prompts, answers, features, vocabulary, the loop, recipes, exported directories."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from adaptivespec_vllm.config import ConfigError
from adaptivespec_vllm.engine import head as heads
from adaptivespec_vllm.training.answers import Answer, Sampling, read_answers
from adaptivespec_vllm.training.export import TrainedHead, export
from adaptivespec_vllm.training.features import Extractor, Shards, default_layers, extract
from adaptivespec_vllm.training.network import Eagle3Network
from adaptivespec_vllm.training.prompts import own_prompts, read_prompts
from adaptivespec_vllm.training.recipe import Recipe, head_shape, held_out, ordered
from adaptivespec_vllm.training.trainer import Schedule, TargetOutput, Trainer, batches
from adaptivespec_vllm.training.vocabulary import choose_vocabulary

VOCABULARY, HIDDEN = 64, 32


@pytest.fixture(scope="module")
def target() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            eos_token_id=2,
        )
    ).eval()
    model.lm_head.weight.data.mul_(40)  # decided enough to be learned
    return model


@pytest.fixture(scope="module")
def answers() -> list[Answer]:
    generator = torch.Generator().manual_seed(1)

    def draw(count: int) -> list[int]:
        # Few different tokens, so that there is something to learn.
        return (torch.randint(8, (count,), generator=generator) * 3 + 5).tolist()

    return [Answer(f"p{i}", "text", 0.0, draw(3 + i % 5), draw(6 + i % 9)) for i in range(30)]


@pytest.fixture(scope="module")
def shards(target: LlamaForCausalLM, answers: list[Answer], tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("features")
    extract(Extractor(target, default_layers(8)), answers, directory, lambda done, total: None)
    return directory


# --- prompts and answers ---


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "allowed: a JSON object"),
        ('{"text": "x"}', "'prompt' with a text"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', "the last one the user's"),
        ('{"messages": []}', "'prompt' with a text"),
        ('{"id": "a", "prompt": "x"}\n{"id": "a", "prompt": "y"}', "appears twice"),
        ("", "is empty"),
    ],
)
def test_bad_prompts_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(line + "\n")
    with pytest.raises(ConfigError, match=message) as error:
        read_prompts(path)
    assert str(path) in str(error.value)


def test_missing_prompts_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--prompts: .*none\.jsonl"):
        read_prompts(tmp_path / "none.jsonl")


def test_prompts_of_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    path.write_text(json.dumps({"prompt": "hello", "kind": "chat"}) + "\n\n" + json.dumps({"messages": talk, "id": 7}))
    first, second = read_prompts(path)
    assert (first.kind, first.messages) == ("chat", ({"role": "user", "content": "hello"},))
    assert (second.id, second.messages) == ("7", tuple(talk))


def test_own_prompts_are_different_and_long_enough() -> None:
    drawn = own_prompts(["  What is a list?  ", "hm", "What is a list?", "How does a pump work?"])
    assert [p.messages[0]["content"] for p in drawn] == ["What is a list?", "How does a pump work?"]


def test_an_answer_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    line = json.dumps({"id": "a", "kind": "k", "temperature": 0.0, "prompt_ids": [1], "answer_ids": [2, 3]})
    path.write_text(line + "\n" + line[:20])
    assert [a.id for a in read_answers(path)] == ["a"]


def test_order_does_not_depend_on_when_an_answer_came(answers: list[Answer]) -> None:
    assert ordered(answers, 1000) == ordered(answers[::-1], 1000)
    assert all(len(a.prompt_ids) + len(a.answer_ids) <= 12 for a in ordered(answers, 12))


def test_one_prompt_in_fifty_is_held_out_with_all_its_answers() -> None:
    def made(names: range) -> list[Answer]:
        return [Answer(str(name), "text", t, [1], [1]) for name in names for t in (0.0, 0.7)]

    many = made(range(5000))
    measured = held_out(many)
    assert 0.015 < len(measured) / len(many) < 0.025
    assert measured == sorted({i for i in measured} | {i ^ 1 for i in measured})
    assert len(held_out(made(range(3)))) == 2


# --- features ---


def test_features_are_the_inputs_of_the_layers(target: LlamaForCausalLM, answers: list[Answer], shards: Path) -> None:
    seen: dict[str, torch.Tensor] = {}
    layers = default_layers(8)
    assert layers == (2, 4, 5)
    hook = target.model.layers[2].register_forward_pre_hook(lambda m, args: seen.update(at=args[0]))
    data = Shards(shards)
    for example, answer in zip((data[i] for i in range(len(data))), answers, strict=True):
        ids = answer.prompt_ids + answer.answer_ids
        with torch.no_grad():
            last = target.model(torch.tensor([ids])).last_hidden_state[0]
        assert example.tokens.tolist() == ids
        assert example.answer_start == len(answer.prompt_ids)
        torch.testing.assert_close(example.features[:, :HIDDEN].float(), seen["at"][0], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(example.hidden.float(), last, rtol=1e-2, atol=1e-2)
    hook.remove()


def test_layers_of_small_targets() -> None:
    assert [default_layers(count) for count in (4, 6, 7, 30)] == [(1, 2, 3), (1, 3, 5), (2, 3, 4), (2, 15, 27)]
    with pytest.raises(ConfigError, match="at least 4"):
        default_layers(3)


def test_shards_that_exist_are_not_computed_again(
    target: LlamaForCausalLM, answers: list[Answer], shards: Path
) -> None:
    def never(*_: object) -> None:
        raise AssertionError

    extract(never, answers, shards, lambda done, total: None)  # type: ignore[arg-type]


# --- vocabulary ---


def test_vocabulary_by_frequency() -> None:
    vocabulary = choose_vocabulary([[5, 5, 5, 9, 9, 7], [9, 9]], 3, 12, always=[2])
    assert vocabulary.ids.tolist() == [2, 5, 9]
    assert vocabulary.coverage == 7 / 8
    assert (torch.arange(3) + vocabulary.d2t).tolist() == [2, 5, 9]
    assert vocabulary.t2d.nonzero().flatten().tolist() == [2, 5, 9]


def test_unused_places_go_to_low_ids() -> None:
    assert choose_vocabulary([[9]], 4, 12).ids.tolist() == [0, 1, 2, 9]


# --- training ---


def make_trainer(target: LlamaForCausalLM, shards: Path, directory: Path, epochs: int = 3) -> Trainer:
    vocabulary = choose_vocabulary([], 48, VOCABULARY, [2])
    torch.manual_seed(0)
    network = Eagle3Network(head_shape(target.config, 48), target.model.embed_tokens.weight.detach())
    output = target.lm_head.weight.detach()
    network.start_from(output[vocabulary.ids], target.model.norm.weight.detach())
    directory.mkdir(exist_ok=True)
    schedule = Schedule(epochs=epochs, batch_tokens=64, learning_rate=3e-3, unrolled=3)
    return Trainer(network, TargetOutput(output, vocabulary.ids), Shards(shards), [0, 1, 2], schedule, directory)


def test_batches_hold_every_example_once(target: LlamaForCausalLM, shards: Path, tmp_path: Path) -> None:
    trainer = make_trainer(target, shards, tmp_path)
    epochs = [list(trainer._epoch_batches(e)) for e in (0, 0, 1)]
    assert epochs[0] == epochs[1] != epochs[2]
    for groups in epochs:
        assert sorted(i for group in groups for i in group) == trainer.training
        assert all(len(g) * max(map(trainer.data.length, g)) <= 64 for g in groups)
    alone = list(batches(trainer.data, [4, 5], 1, None))
    assert sorted(alone) == [[4], [5]]  # longer than a batch: a batch of its own


def test_training_lowers_the_loss_and_goes_on_where_it_stopped(
    target: LlamaForCausalLM, shards: Path, tmp_path: Path
) -> None:
    whole = make_trainer(target, shards, tmp_path / "whole")
    losses: list[float] = []
    whole.run(lambda step, total, facts: losses.append(facts["loss"]))
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    curve = [json.loads(line) for line in (tmp_path / "whole" / "curve.jsonl").read_text().splitlines()]
    assert [line["epoch"] for line in curve] == [1, 2, 3]

    class Stop(Exception):
        pass

    def stop_in_the_second_epoch(step: int, total: int, facts: dict) -> None:
        if step == total // 3 + 2:
            raise Stop

    first = make_trainer(target, shards, tmp_path / "parts")
    with pytest.raises(Stop):
        first.run(stop_in_the_second_epoch, checkpoint_seconds=0.0)
    second = make_trainer(target, shards, tmp_path / "parts")
    assert second.step == len(losses) // 3 + 1  # the checkpoint before the step that was interrupted
    second.run(lambda step, total, facts: None)
    for name, value in whole.network.state_dict().items():
        torch.testing.assert_close(value, second.network.state_dict()[name], rtol=1e-3, atol=1e-4)


def test_learning_rate_rises_and_falls() -> None:
    schedule = Schedule(learning_rate=1.0, warmup=0.1)
    rates = [schedule.rate(x / 100) for x in range(101)]
    assert rates[0] == 0 and max(rates) == rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True) and rates[-1] == pytest.approx(0.05)


# --- recipe and result ---


def test_a_directory_belongs_to_one_recipe(tmp_path: Path) -> None:
    Recipe("target", ("a.jsonl",)).save(tmp_path)
    Recipe("target", ("a.jsonl",)).save(tmp_path)
    with pytest.raises(ConfigError, match=r"sampling: got .*0\.5.*was begun with .*0\.7.*another directory"):
        Recipe("target", ("a.jsonl",), sampling=Sampling((0.0, 0.5))).save(tmp_path)


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_exported_heads_pass_the_check_of_heads(target: LlamaForCausalLM, tmp_path: Path, layout: str) -> None:
    vocabulary = choose_vocabulary([[60, 60]], 48, VOCABULARY, [2])
    shape = head_shape(target.config, 48)
    network = Eagle3Network(shape, target.model.embed_tokens.weight.detach())
    config = target.config.to_dict() | {"architectures": ["LlamaForCausalLM"]}
    head = TrainedHead(network.state_dict(), shape, vocabulary, (2, 4, 5), config, "a/target", 5)
    for _ in range(2):  # the second replaces the first
        export(head, tmp_path / "head", layout)  # type: ignore[arg-type]
    facts = heads.check(str(tmp_path / "head"), heads.TargetFacts(VOCABULARY, HIDDEN, 8))
    assert facts is not None
    assert (facts.layout, facts.draft_vocab_size, facts.vocab_map) == (layout, 48, "present")
    assert facts.aux_layers == (2, 4, 5)
    assert [p.name for p in tmp_path.iterdir()] == ["head"]
    stored = load_file(tmp_path / "head" / "model.safetensors")
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert torch.equal(stored["d2t"], vocabulary.d2t)
