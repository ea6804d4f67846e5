"""Whole outputs (ids, text, log-probabilities, reasons) are those of plain decoding, with stops inside trees too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import adaptivespec, random_prompts
from tests.e2e.oracle import hiding

TOKENS = 40
BUDGETS = {"reasoning_start_str": "<a>", "reasoning_end_str": "</a>"}


@pytest.fixture(scope="module")
def make(make_llm: Callable[..., Any], tiny_speaker: Path) -> Callable[..., Any]:
    def make(**settings: Any) -> Any:
        from vllm.config import ReasoningConfig

        return make_llm(
            tiny_speaker, skip_tokenizer_init=False, reasoning_config=ReasoningConfig(**BUDGETS), **settings
        )

    return make


@pytest.fixture(scope="module")
def speaker(make: Callable[..., Any]) -> Any:
    return make()


@pytest.fixture(scope="module")
def tree_speaker(make: Callable[..., Any], tiny_head: Path) -> Any:
    return make(speculative_config=adaptivespec(tiny_head))


def parameters(**overrides: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0, "max_tokens": TOKENS} | overrides))


def facts(outputs: list[Any]) -> list[Any]:
    """Everything about the texts that a client can see, log-probabilities aside."""
    return [
        (list(output.prompt_token_ids), [(o.index, list(o.token_ids), o.text, o.finish_reason, o.stop_reason)])
        for output in outputs
        for o in output.outputs
    ]


def assert_close(ours: Any, theirs: Any) -> None:
    """Log-probabilities of positions within 1e-4; decoded tokens exactly, and ranks but for near-ties far down."""
    assert (ours is None) == (theirs is None)
    for a, b in zip(ours or [], theirs or [], strict=True):
        assert (a is None) == (b is None)
        if a is None:
            continue
        assert a.keys() == b.keys()
        for token in a:
            assert a[token].decoded_token == b[token].decoded_token
            assert a[token].rank == b[token].rank or min(a[token].rank, b[token].rank) > 20
            assert a[token].logprob == pytest.approx(b[token].logprob, abs=1e-4)


def compare(plain: Any, trees: Any, prompts: list[Any], params: Any, hidden: Any = None) -> list[Any]:
    """Decode plainly and on trees that hide the text, which goes on past its stop; the outputs of trees.

    Args:
        plain: the engine without speculation.
        trees: the engine with trees.
        prompts: one prompt a request.
        params: of all requests, or of each.
        hidden: parameters without stops that give the text to hide; those of ``params`` otherwise.

    """
    theirs = plain.generate(prompts, params, use_tqdm=False)
    longer = plain.generate(prompts, hidden, use_tqdm=False) if hidden is not None else theirs
    truth = {tuple(output.prompt_token_ids): [*output.outputs[0].token_ids, *[5] * TOKENS] for output in longer}
    with hiding(trees, truth) as stats:
        ours = trees.generate(prompts, params, use_tqdm=False)
    assert stats["accepted"] > 3, "nothing was accepted: vacuous"
    assert facts(ours) == facts(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert_close(a.prompt_logprobs, b.prompt_logprobs)
        for mine, other in zip(a.outputs, b.outputs, strict=True):
            assert_close(mine.logprobs, other.logprobs)
            if other.cumulative_logprob is not None:
                assert mine.cumulative_logprob == pytest.approx(other.cumulative_logprob, abs=1e-3)
    return ours


SAMPLING: dict[str, dict[str, Any]] = {
    "min_p": {"min_p": 0.2, "temperature": 1.3, "seed": 3},
    "min_p greedy": {"min_p": 0.9},
    "logit_bias": {"logit_bias": {70: 6.0, 71: -100.0, 300: 4.5}},
    "logit_bias seeded": {"logit_bias": {70: 3.0}, "temperature": 0.9, "seed": 4, "logprobs": 2},
    "frequency penalty, largest": {"frequency_penalty": 2.0, "logprobs": 1},
    "frequency penalty, least": {"frequency_penalty": -2.0, "logprobs": 1},
    "frequency penalty, seeded": {"frequency_penalty": -2.0, "temperature": 0.9, "seed": 6},
    "bad words": {"bad_words": ["ex", "of", "iw", "ij", "hyhr", "ex b", "hello"]},
    "bad words seeded": {"bad_words": ["ex", "of", "iw", "hyhr"], "temperature": 0.8, "seed": 5},
    "logprob_token_ids": {"logprob_token_ids": [5, 70, 300]},
    "logprobs 0": {"logprobs": 0},
    "prompt_logprobs": {"prompt_logprobs": 2, "logprobs": 1},
    "prompt_logprobs only": {"prompt_logprobs": 0},
    "repetition detection": {"repetition_detection": {"max_pattern_size": 3, "min_count": 2}},
    "special tokens": {"skip_special_tokens": False, "spaces_between_special_tokens": False, "ignore_eos": True},
    "min_tokens": {"min_tokens": 25, "stop_token_ids": list(range(60, 500, 5))},
    "no detokenizing": {"detokenize": False, "ignore_eos": True},
}


@pytest.mark.parametrize("name", SAMPLING)
def test_sampling_parameters(speaker: Any, tree_speaker: Any, name: str) -> None:
    from vllm.sampling_params import RepetitionDetectionParams

    given = dict(SAMPLING[name])
    if "repetition_detection" in given:
        given["repetition_detection"] = RepetitionDetectionParams(**given["repetition_detection"])
    compare(speaker, tree_speaker, random_prompts(4, seed=101), parameters(**given))


def test_all_at_once(speaker: Any, tree_speaker: Any) -> None:
    """One batch with min_p, bias, bad words, log-probabilities and plain requests side by side."""
    names = [name for name in SAMPLING if name not in ("repetition detection", "logprob_token_ids")]
    prompts = random_prompts(len(names), seed=102)
    compare(speaker, tree_speaker, prompts, [parameters(**SAMPLING[name]) for name in names])


def test_what_changes_logits_has_an_effect(speaker: Any, tree_speaker: Any) -> None:
    """Or the comparisons above would hold without them."""
    prompts = random_prompts(3, seed=103)
    plain = facts(compare(speaker, tree_speaker, prompts, parameters()))
    assert facts(compare(speaker, tree_speaker, prompts, parameters(logit_bias={70: 6.0}))) != plain
    warm = {"temperature": 1.3, "seed": 3}
    free = facts(compare(speaker, tree_speaker, prompts, parameters(**warm)))
    assert facts(compare(speaker, tree_speaker, prompts, parameters(min_p=0.2, **warm))) != free
    assert facts(compare(speaker, tree_speaker, prompts, parameters(bad_words=["ex", "of"]))) != plain
    kinds = []
    for penalty in (2.0, -2.0):
        outputs = compare(speaker, tree_speaker, prompts, parameters(frequency_penalty=penalty, ignore_eos=True))
        kinds.append([len(set(output.outputs[0].token_ids)) for output in outputs])
    assert all(many > 30 and few < 8 for many, few in zip(*kinds, strict=True))


def test_logprobs_of_promoted_tokens(make: Callable[..., Any], tiny_head: Path, speaker: Any) -> None:
    """They are the target's own for the token that was emitted, as it gives them when it reads the text."""
    llm = make(speculative_config=adaptivespec(tiny_head, margin={"kappa": 1e-6}))
    prompts = random_prompts(4, seed=113)
    llm.collective_rpc("adaptivespec_stats")
    answers = [o.outputs[0] for o in llm.generate(prompts, parameters(logprobs=1, ignore_eos=True), use_tqdm=False)]
    assert llm.collective_rpc("adaptivespec_stats")[0]["promotions"] > 20
    whole = [
        {"prompt_token_ids": [*p["prompt_token_ids"], *a.token_ids]} for p, a in zip(prompts, answers, strict=True)
    ]
    read = speaker.generate(whole, parameters(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    for answer, again in zip(answers, read, strict=True):
        theirs = again.prompt_logprobs[-len(answer.token_ids) :]
        for token, ours, other in zip(answer.token_ids, answer.logprobs, theirs, strict=True):
            assert ours[token].logprob == pytest.approx(other[token].logprob, abs=1e-3)


@pytest.mark.parametrize("flat", [False, True])
def test_flat_logprobs(speaker: Any, tree_speaker: Any, flat: bool) -> None:
    compare(speaker, tree_speaker, random_prompts(2, seed=104), parameters(logprobs=2, flat_logprobs=flat))


@pytest.mark.parametrize("length", [1, 2, 3])
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_inside_an_accepted_run(speaker: Any, tree_speaker: Any, length: int, include: bool) -> None:
    """The text, the ids and the log-probabilities end where plain decoding ends them."""
    prompts = random_prompts(4, seed=105)
    free = parameters(ignore_eos=True)
    texts = [output.outputs[0].text for output in speaker.generate(prompts, free, use_tqdm=False)]
    for at in (2, 7, 13, 14):
        params = [
            parameters(stop=[text[at : at + length]], include_stop_str_in_output=include, logprobs=2, ignore_eos=True)
            for text in texts
        ]
        outputs = compare(speaker, tree_speaker, prompts, params, hidden=free)
        assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}
        for output in outputs:
            (completion,) = output.outputs
            assert len(completion.logprobs) == len(completion.token_ids)
            assert completion.text.endswith(completion.stop_reason) == include or not include


def test_stop_ids_eos_and_length(speaker: Any, tree_speaker: Any) -> None:
    """Stop ids, EOS and max_tokens on every depth of a tree, with their reasons."""
    prompts = random_prompts(6, seed=106)
    free = parameters(ignore_eos=True)
    texts = [list(output.outputs[0].token_ids) for output in speaker.generate(prompts, free, use_tqdm=False)]
    for at in range(1, 12, 2):
        stops = [parameters(stop_token_ids=[ids[at]], logprobs=1, ignore_eos=True) for ids in texts]
        outputs = compare(speaker, tree_speaker, prompts, stops, hidden=free)
        assert [output.outputs[0].stop_reason for output in outputs] == [ids[at] for ids in texts]
        lengths = [parameters(max_tokens=at + i, logprobs=1, ignore_eos=True) for i in range(len(prompts))]
        outputs = compare(speaker, tree_speaker, prompts, lengths, hidden=free)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [at + i for i in range(len(prompts))]
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    # EOS, by a bias that lets it come soon, and with ignore_eos not at all
    soon = {"logit_bias": {2: 9.0}, "logprobs": 1}
    outputs = compare(speaker, tree_speaker, prompts, parameters(**soon))
    assert "stop" in {output.outputs[0].finish_reason for output in outputs}
    assert all(o.outputs[0].stop_reason is None for o in outputs)
    outputs = compare(speaker, tree_speaker, prompts, parameters(ignore_eos=True, **soon))
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
    compare(speaker, tree_speaker, prompts, parameters(min_tokens=9, **soon))


def test_several_texts_of_a_prompt(speaker: Any, tree_speaker: Any) -> None:
    compare(speaker, tree_speaker, random_prompts(2, seed=107), parameters(n=3, temperature=0.8, seed=6, logprobs=1))


@pytest.mark.parametrize("budget", [0, 1, 3, 4, 5, 6, 9, 20])
def test_thinking_budgets(speaker: Any, tree_speaker: Any, budget: int) -> None:
    """The end of thinking is forced at the same token, for prompts that begin to think and texts that do."""
    tokenizer = speaker.get_tokenizer()
    start, end = (tokenizer.encode(text) for text in BUDGETS.values())
    prompts = random_prompts(4, seed=108)
    for prompt in prompts[:2]:
        prompt["prompt_token_ids"] += start
    prompts[1]["prompt_token_ids"] += [80, 81]
    params = [parameters(thinking_token_budget=budget, ignore_eos=True) for _ in prompts]
    params[3] = parameters(ignore_eos=True, logprobs=1)
    outputs = compare(speaker, tree_speaker, prompts, params)
    ids = list(outputs[0].outputs[0].token_ids)
    assert any(ids[at : at + len(end)] == end for at in range(budget + 3))
    warm = [parameters(thinking_token_budget=budget, temperature=0.8, seed=i, repetition_penalty=1.2) for i in range(4)]
    compare(speaker, tree_speaker, prompts, warm)


def test_thinking_that_begins_in_the_text(speaker: Any, tree_speaker: Any) -> None:
    """A biased text that opens, and closes, its thinking by itself, again and again."""
    tokenizer = speaker.get_tokenizer()
    bias = dict.fromkeys({*tokenizer.encode("<a>"), *tokenizer.encode("</a>")}, 7.0)
    for budget in (2, 5):
        params = parameters(thinking_token_budget=budget, logit_bias=bias, temperature=1.0, seed=8, ignore_eos=True)
        compare(speaker, tree_speaker, random_prompts(6, seed=109), params)


def test_beam_search(speaker: Any, tree_speaker: Any) -> None:
    from vllm.sampling_params import BeamSearchParams

    prompts = random_prompts(2, seed=110)
    params = BeamSearchParams(beam_width=3, max_tokens=8)
    plain, trees = (
        [[(s.tokens, s.text) for s in output.sequences] for output in llm.beam_search(prompts, params)]
        for llm in (speaker, tree_speaker)
    )
    assert plain == trees
    assert len(plain[0]) == 3


def test_all_logprobs_of_the_vocabulary(make: Callable[..., Any], tiny_head: Path) -> None:
    plain, trees = make(max_logprobs=-1), make(max_logprobs=-1, speculative_config=adaptivespec(tiny_head))
    prompts = random_prompts(2, seed=111)
    outputs = compare(plain, trees, prompts, parameters(logprobs=-1, prompt_logprobs=-1, max_tokens=12))
    assert len(outputs[0].outputs[0].logprobs[3]) == 512


def test_the_end_of_a_context(speaker: Any, tree_speaker: Any) -> None:
    """``max_tokens`` beyond the model's length ends there, in the middle of a tree."""
    prompts = random_prompts(3, seed=112, shortest=225, longest=240)
    outputs = compare(speaker, tree_speaker, prompts, parameters(max_tokens=None, ignore_eos=True, logprobs=1))
    assert {output.outputs[0].finish_reason for output in outputs} == {"length"}
