"""What is learnt of the time between steps; the clock is the test's."""

from __future__ import annotations

import pytest

from adaptivespec_vllm.engine.v1 import step_times
from adaptivespec_vllm.engine.v1.step_times import STEPS, Residuals, StepTimes


class Clock:
    """A worker's steps."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.times = StepTimes()
        monkeypatch.setattr(step_times.time, "perf_counter", lambda: self.now)

    def step(self, rows: int, seconds: float, requests: str = "ab", *, only_decodes: bool = True) -> Residuals | None:
        """A step that takes a second more than it should if it takes two."""
        answer = self.times.begin(requests)
        if only_decodes:
            self.times.end(rows, 1.0)
        self.now += seconds
        return answer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_median_by_rows(clock: Clock) -> None:
    answers = [clock.step(6 if i % 4 else 12, 9.0 if i % 10 == 0 else 1.5 if i % 4 else 3.0) for i in range(STEPS + 1)]
    assert answers[:STEPS] == [None] * STEPS
    assert dict(answers[STEPS]) == pytest.approx({6: 0.5, 12: 2.0})
    assert all(clock.step(6, 1.5) is None for _ in range(STEPS - 1))


def test_rare_numbers_of_rows_say_nothing(clock: Clock) -> None:
    answers = [clock.step(7 if i < 3 else 6, 1.5) for i in range(STEPS + 1)]
    assert dict(answers[-1]) == pytest.approx({6: 0.5})


def test_it_follows_a_change(clock: Clock) -> None:
    for _ in range(STEPS + 1):
        clock.step(6, 1.5)
    answers = [clock.step(6, 2.5) for _ in range(STEPS)]
    assert dict(answers[-1]) == pytest.approx({6: 1.5})


def test_steps_with_prompts_do_not_count(clock: Clock) -> None:
    answers = [clock.step(6, 1.5 if i % 2 else 9.0, only_decodes=i % 2 == 1) for i in range(2 * STEPS + 2)]
    assert [dict(answer) for answer in answers if answer] == [pytest.approx({6: 0.5})]


def test_the_time_until_other_requests_come_does_not_count(clock: Clock) -> None:
    assert all(clock.step(6, 50.0, requests=str(i)) is None for i in range(3 * STEPS))
