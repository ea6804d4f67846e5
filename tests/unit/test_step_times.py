"""What is learnt of the time between steps; the clock is the test's."""

from __future__ import annotations

import pytest

from adaptivespec_vllm.engine.v1 import step_times
from adaptivespec_vllm.engine.v1.step_times import ENOUGH, FORGOTTEN, LATER, SOON, STEPS, Residuals, StepTimes


class Clock:
    """A worker's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.times = StepTimes()
        monkeypatch.setattr(step_times.time, "perf_counter", lambda: self.now)

    def step(
        self, rows: int, beyond: float, requests: str = "ab", *, only_decodes: bool = True, drafted: bool | None = None
    ) -> Residuals | None:
        """A step that takes so many seconds more than it should."""
        answer = self.times.begin(requests)
        if only_decodes:
            self.times.end(len(requests), rows, 1.0, rows > len(requests) if drafted is None else drafted)
        self.now += 1.0 + beyond
        return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_medians_of_both_kinds_of_steps(clock: Clock) -> None:
    kinds = [(2, 0.5), (6, 1.5), (12, 3.0), (6, 1.5)]
    answers = [clock.step(rows, 9.0 if i % 10 == 9 else beyond) for i, (rows, beyond) in enumerate(16 * kinds)]
    assert answers == [None] * STEPS
    answer = clock.step(6, 0.5)
    assert dict(answer.plain) == pytest.approx({2: 0.5})
    assert dict(answer.drafting) == pytest.approx({6: 1.0, 12: 2.5})
    assert all(clock.step(6, 0.5) is None for _ in range(STEPS - 1))


def test_drafting_is_compared_with_plain_steps_of_as_many_requests(clock: Clock) -> None:
    for _ in range(ENOUGH + 1):
        clock.step(1, 1.0, "a")
        clock.step(1, 1.0, "a")
    for _ in range(ENOUGH + 1):
        clock.step(3, 5.0, "abc")
    (answer,) = filter(None, [clock.step(9, 4.0, "ab") for _ in range(STEPS)])
    assert dict(answer.plain) == pytest.approx({1: 1.0, 3: 5.0})
    assert dict(answer.drafting) == pytest.approx({9: 1.0})


def test_nothing_is_said_before_plain_steps_were_seen(clock: Clock) -> None:
    assert all(clock.step(6, 0.5) is None for _ in range(3 * STEPS))
    for _ in range(ENOUGH):
        clock.step(2, 0.25)
    assert clock.step(2, 0.25) is not None


def test_rare_numbers_of_rows_say_nothing(clock: Clock) -> None:
    answers = [clock.step(7 if i < 3 else 6 if i % 2 else 2, 0.5) for i in range(STEPS + 1)]
    assert [rows for rows, _ in answers[-1].drafting] == [6]


def test_it_follows_a_change(clock: Clock) -> None:
    for _ in range(STEPS + 1):
        clock.step(2, 0.5)
    answers = [clock.step(2, 1.5) for _ in range(STEPS)]
    assert dict(answers[-1].plain) == pytest.approx({2: 1.5})


def test_steps_with_drafts_are_forgotten_after_a_long_time_without(clock: Clock) -> None:
    for _ in range(STEPS):
        clock.step(2, 0.5)
        clock.step(6, 9.0)
    answers = [answer for answer in (clock.step(2, 0.5) for _ in range(FORGOTTEN + STEPS)) if answer]
    assert dict(answers[0].drafting) == pytest.approx({6: 8.5})
    assert answers[-1].drafting == []


def test_steps_with_prompts_do_not_count(clock: Clock) -> None:
    answers = [clock.step(2, 0.5 if i % 2 else 9.0, only_decodes=i % 2 == 1) for i in range(2 * STEPS + 2)]
    assert [dict(answer.plain) for answer in answers if answer] == [pytest.approx({2: 0.5})]


def test_steps_that_begin_to_draft_are_not_plain(clock: Clock) -> None:
    answers = [clock.step(2, 9.0 if i % 2 else 0.5, drafted=i % 2 == 1) for i in range(2 * STEPS + 2)]
    assert [dict(answer.plain) for answer in answers if answer] == [pytest.approx({2: 0.5})]


def test_the_time_until_other_requests_come_does_not_count(clock: Clock) -> None:
    assert all(clock.step(1, 50.0, requests=str(i % 10)) is None for i in range(3 * STEPS))


class TestLeavingOut:
    """Requests ``ab`` that draft whenever they may."""

    @staticmethod
    def run(clock: Clock, steps: int, requests: str = "ab") -> list[bool]:
        left_out = []
        rows = len(requests)
        for _ in range(steps):
            clock.times.begin(requests)
            left_out.append(clock.times.leaves_out(len(requests)))
            clock.times.end(len(requests), rows, 1.0, not left_out[-1])
            rows = len(requests) if left_out[-1] else len(requests) + 4
            clock.now += 1.5
        return left_out

    def test_a_few_steps_soon_and_later_again(self, clock: Clock) -> None:
        left_out = self.run(clock, SOON + LATER + 200)
        first = left_out.index(True)
        assert first == SOON
        again = left_out.index(True, first + 20)
        assert LATER <= again - first <= LATER + 20
        # One that still verifies what was drafted before, and one whose time is known as the next begins.
        assert sum(left_out) == 2 * (ENOUGH + 1)

    def test_each_size_of_batch_for_itself(self, clock: Clock) -> None:
        assert any(self.run(clock, SOON + 20))
        assert not any(self.run(clock, SOON, "abc"))  # two or three requests are one size
        assert any(self.run(clock, SOON + 20, "abcd"))

    def test_requests_that_never_draft_are_not_waited_for(self, clock: Clock) -> None:
        for _ in range(LATER):
            clock.times.begin("ab")
            assert not clock.times.leaves_out(2)
            clock.times.end(2, 2, 1.0, drafted=False)
            clock.now += 1.0

    def test_it_ends_where_no_step_can_be_timed(self, clock: Clock) -> None:
        left_out = []
        for i in range(LATER // 2):
            clock.times.begin(str(i))
            left_out.append(clock.times.leaves_out(1))
        assert 0 < sum(left_out) <= 2 * ENOUGH
