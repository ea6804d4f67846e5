"""Paired statistics, fidelity, what is kept of a run, and when there are too few questions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from adaptivespec_vllm.bench.arms import Arm
from adaptivespec_vllm.bench.errors import BadInput
from adaptivespec_vllm.eval import statistics
from adaptivespec_vllm.eval.answers import FILE, SETTINGS, Answer, Answers
from adaptivespec_vllm.eval.fidelity import divergence, fidelity, repetition
from adaptivespec_vllm.eval.result import figures, too_small
from adaptivespec_vllm.eval.tasks import Gsm8k, Prompts

PLAIN, LOSSY = Arm("plain", "plain", None), Arm("tree@0.2", "static", {}, lossless=False)


def answer(id: str, tokens: list[int], correct: bool | None = None, arm: str = "plain", **more) -> Answer:
    given = {"text": "", "losses": [], "finish": "stop", "seconds": 1.0} | more
    return Answer(arm=arm, task="gsm8k", id=id, tokens=tokens, correct=correct, **given)


class TestStatistics:
    @given(st.integers(0, 40), st.integers(0, 40))
    def test_mcnemar_is_the_binomial_test_of_the_pairs_that_differ(self, lost, gained):
        scipy_stats = pytest.importorskip("scipy.stats")
        expected = scipy_stats.binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
        assert statistics.mcnemar(lost, gained) == pytest.approx(expected)

    def test_recovery_is_the_ratio_of_accuracies(self):
        before = [True] * 80 + [False] * 20
        after = [True] * 70 + [False] * 30
        ratio, low, high = statistics.recovery(before, after)
        assert ratio == 70 / 80
        assert 0.78 < low < 0.83 and 0.93 < high < 0.96

    def test_recovery_of_the_same_answers_is_one(self):
        assert statistics.recovery([True, False, True], [True, False, True]) == (1.0, 1.0, 1.0)

    def test_there_is_nothing_to_recover_where_nothing_was_right(self):
        assert statistics.recovery([False, False], [True, False]) is None

    def test_the_interval_covers_the_truth_about_as_often_as_it_says(self):
        rng, covered = np.random.default_rng(1), 0
        for _ in range(60):
            before = rng.random(200) < 0.7
            after = np.where(rng.random(200) < 0.1, rng.random(200) < 0.4, before)
            truth = (0.9 * 0.7 + 0.1 * 0.4) / 0.7
            _, low, high = statistics.recovery(before.tolist(), after.tolist())
            covered += low <= truth <= high
        assert 50 <= covered <= 60

    def test_more_questions_tell_smaller_differences(self):
        assert statistics.resolution(0, 0, 60) == 0.05
        assert statistics.resolution(5, 5, 100) == pytest.approx(1.96 * (0.1 / 100) ** 0.5)
        assert statistics.resolution(50, 50, 1000) < statistics.resolution(5, 5, 100)


class TestFidelity:
    def test_where_texts_part(self):
        assert divergence([1, 2, 3], [1, 2, 3]) is None
        assert divergence([1, 2, 3], [1, 9, 3]) == 1
        assert divergence([1, 2], [1, 2, 3]) == 2
        assert divergence([], [1]) == 0

    def test_runs_that_were_there_before(self):
        assert repetition([1, 2, 3, 4, 5]) == 0.0
        assert repetition([1, 2, 3]) == 0.0  # no run of four
        assert repetition([7] * 8) == pytest.approx(0.8)
        assert repetition([1, 2, 3, 4, 1, 2, 3, 4]) == pytest.approx(0.2)

    def test_figures(self):
        plain = [answer("a", [1, 2, 3, 4]), answer("b", [5, 6, 7, 8], finish="length")]
        own = [
            answer("a", [1, 2, 3, 4]),
            answer("b", [5, 6, 9, 8, 1, 1], losses=[(2, 0.5), (4, 1.0)], finish="length"),
        ]
        got = fidelity(own, plain)
        assert (got.same, got.divergence) == (0.5, 2.0)
        assert (got.promoted, got.lost) == (0.2, pytest.approx(0.15))
        assert (got.unfinished, got.length) == (0.5, 1.25)

    def test_of_drawn_texts_nothing_was_given_up(self):
        got = fidelity([answer("a", [1], losses=None)], [answer("a", [2], losses=None)])
        assert (got.promoted, got.lost, got.same) == (None, None, 0.0)


class TestFigures:
    def task(self, tmp_path: Path) -> Gsm8k:
        path = tmp_path / "q.jsonl"
        path.write_text('{"question": "?", "answer": "1"}')
        return Gsm8k(path)

    def test_pairs(self, tmp_path: Path):
        plain = [answer(str(i), [1], correct=i < 60) for i in range(100)]
        own = [answer(str(i), [1], correct=i in range(5, 62), arm="tree@0.2") for i in range(100)]
        got = figures(LOSSY, self.task(tmp_path), own, plain)
        assert (got.n, got.accuracy, got.lossless) == (100, 0.57, False)
        assert (got.paired.lost, got.paired.gained) == (5, 2)
        assert got.paired.p == pytest.approx(0.453, abs=1e-3)
        assert got.paired.recovery[0] == pytest.approx(57 / 60)
        assert (got.tokens, got.seconds) == (100, 100.0)
        assert figures(PLAIN, self.task(tmp_path), plain, plain).paired is None

    def test_nothing_says_what_is_right(self, tmp_path: Path):
        path = tmp_path / "q.jsonl"
        path.write_text('{"prompt": "?"}')
        got = figures(LOSSY, Prompts(path), [answer("a", [1])], [answer("a", [2])])
        assert (got.accuracy, got.paired) == (None, None)
        assert list(too_small([got])) == []

    @pytest.mark.parametrize(
        ("questions", "right", "lost", "said"),
        [(20, 15, 2, ["20 questions"]), (400, 300, 4, []), (400, 3, 0, ["3 of 400 right"]), (50, 40, 0, ["6 points"])],
    )
    def test_it_says_when_there_are_too_few(self, tmp_path: Path, questions, right, lost, said):
        task = self.task(tmp_path)
        plain = [answer(str(i), [1], correct=i < right) for i in range(questions)]
        own = [answer(str(i), [1], correct=lost <= i < right, arm="tree@0.2") for i in range(questions)]
        rows = [figures(PLAIN, task, plain, plain), figures(LOSSY, task, own, plain)]
        warnings = list(too_small(rows))
        assert len(warnings) == len(said)
        for warning, part in zip(warnings, said, strict=True):
            assert part in warning


SETTINGS_OF_A_RUN = {"seed": 1, "arms": {"plain": None}, "max_tokens": 8}


class TestAnswers:
    def test_a_run_goes_on_where_it_was(self, tmp_path: Path):
        answers = Answers(tmp_path, SETTINGS_OF_A_RUN)
        for id in ("a", "b"):
            answers.add(answer(id, [1, 2], losses=[(1, 0.5)]))
        again = Answers(tmp_path, SETTINGS_OF_A_RUN)
        assert again.rows == answers.rows
        assert list(again.rows) == [("plain", "gsm8k", "a"), ("plain", "gsm8k", "b")]

    @pytest.mark.parametrize("rest", [b'{"arm": "plain", "ta', b'{"arm": "plain"}\n', b"\x00\x00\n{}\n", b"{}"])
    def test_a_line_that_was_cut_is_dropped(self, tmp_path: Path, rest: bytes):
        answers = Answers(tmp_path, SETTINGS_OF_A_RUN)
        answers.add(answer("a", [1]))
        answers.close()
        path = tmp_path / FILE
        whole = path.read_bytes()
        path.write_bytes(whole + rest)
        again = Answers(tmp_path, SETTINGS_OF_A_RUN)
        again.add(answer("b", [2]))
        again.close()
        lines = path.read_bytes().splitlines(keepends=True)
        assert (lines[0], len(lines)) == (whole, 2)
        assert json.loads(lines[1])["id"] == "b"

    def test_other_settings_are_another_run(self, tmp_path: Path):
        Answers(tmp_path, SETTINGS_OF_A_RUN)
        with pytest.raises(BadInput, match=r"--output: .*a run with the same seed; that one has 1"):
            Answers(tmp_path, SETTINGS_OF_A_RUN | {"seed": 2})
        with pytest.raises(BadInput, match="the same arms"):
            Answers(tmp_path, SETTINGS_OF_A_RUN | {"arms": {"plain": {"other": 1}}})

    def test_more_arms_may_come(self, tmp_path: Path):
        Answers(tmp_path, SETTINGS_OF_A_RUN)
        Answers(tmp_path, SETTINGS_OF_A_RUN | {"arms": {"plain": None, "tree": {"x": 1}}})
        kept = json.loads((tmp_path / SETTINGS).read_text())["arms"]
        assert kept == {"plain": None, "tree": {"x": 1}}
        Answers(tmp_path, SETTINGS_OF_A_RUN)  # fewer may come too, and nothing is forgotten
        with pytest.raises(BadInput, match="the same arms"):
            Answers(tmp_path, SETTINGS_OF_A_RUN | {"arms": {"tree": {"x": 2}}})
