"""Microbenchmarks: what is timed, and what is set aside."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

pytest.importorskip("torch")

from moe_ref.microbench import clocks
from moe_ref.microbench.clocks import Call, CpuClock, Sample
from moe_ref.microbench.timing import Timer, Timing


class FakeClock:
    """Plays back samples, the last one again and again."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = list(samples)
        self.batches: list[int] = []

    def time(self, calls: Sequence[Call]) -> list[Sample]:
        for call in calls:
            call()
        self.batches.append(len(calls))
        return [self.samples.pop(0) if self.samples[1:] else self.samples[0] for _ in calls]

    def wait(self) -> None:
        pass


def steady(seconds: float, n: int = 1) -> list[Sample]:
    return [Sample(seconds, 0.0, 0)] * n


def test_warm_up_counts_for_nothing() -> None:
    clock = FakeClock([*steady(9e-3, 3), *steady(1e-3)])
    timing = Timer(clock, limit_s=1.0, warmup=3).time([lambda: None])
    assert timing == Timing(1e-3, 1e-3, 1e-3, 5)


def test_a_steady_call_is_repeated_least_often() -> None:
    assert Timer(FakeClock(steady(1e-3))).time([lambda: None]).repeats == 5


def test_an_unsteady_call_is_repeated_until_time_is_up() -> None:
    ragged = [Sample(s, 0.0, 0) for s in (1e-3, 3e-3) * 60]
    timing = Timer(FakeClock(ragged), limit_s=0.1, warmup=0).time([lambda: None])
    assert 45 <= timing.repeats <= 60
    assert (timing.p10_s, timing.p90_s) == (1e-3, 3e-3)
    assert Timer(FakeClock(ragged), limit_s=9.0, most=30).time([lambda: None]).repeats == 30


def test_repeats_that_were_disturbed_more_often_are_set_aside() -> None:
    samples = [*steady(1e-3, 6), *[Sample(5e-3, 1e-3, 2)] * 4, *steady(1e-3)]
    timing = Timer(FakeClock(samples), steady=-1.0, most=12, warmup=0).time([lambda: None])
    assert timing == Timing(1e-3, 1e-3, 1e-3, 8, set_aside=4)


def test_where_all_were_disturbed_the_calmest_count() -> None:
    samples = [Sample(1e-3, 1e-3, 3), Sample(2e-3, 0.0, 1)] * 10
    timing = Timer(FakeClock(samples), steady=-1.0, most=10, warmup=0).time([lambda: None])
    assert (timing.median_s, timing.repeats, timing.set_aside) == (2e-3, 5, 5)
    assert timing.waited == 0.0
    timing = Timer(FakeClock(samples), steady=-1.0, most=8, warmup=0).time([lambda: None])
    assert timing.repeats == 8
    assert timing.waited == pytest.approx(4e-3 / (12e-3 + 4e-3))


def test_operands_come_in_turn() -> None:
    seen: list[int] = []
    calls = [lambda i=i: seen.append(i) for i in range(3)]
    Timer(FakeClock(steady(1e-3)), warmup=0).time(calls)
    assert seen == [0, 1, 2, 0, 1]


def test_the_clock_of_a_cpu_counts_no_less_than_nothing() -> None:
    for n in (1, 3):
        samples = CpuClock().time([lambda: sum(range(1000))] * n)
        assert len(samples) == n
        assert all(min(sample) >= 0 for sample in samples)


@pytest.mark.parametrize(
    ("waited_s", "taken_off"), [(0.0, 0.0), (0.3, 0.3), (0.89, 0.89), (0.95, 0.0), (5.0, 0.0)]
)
def test_a_wait_that_was_not_within_the_call_is_not_taken_off(
    monkeypatch: pytest.MonkeyPatch, waited_s: float, taken_off: float
) -> None:
    ready = iter([{"1": 7.0}, {"1": 7.0 + waited_s, "2": 0.0}])
    ticks = iter([10.0, 11.0])
    monkeypatch.setattr(clocks, "ready_s", lambda: next(ready))
    monkeypatch.setattr(clocks, "perf_counter", lambda: next(ticks))
    (sample,) = CpuClock().time([lambda: None])
    assert sample.seconds == pytest.approx(1.0 - taken_off)
    assert sample.waited == pytest.approx(taken_off)
    assert sample.disturbed >= (taken_off != waited_s)


def test_short_calls_are_looked_after_together() -> None:
    clock = FakeClock(steady(1e-4))
    Timer(clock, steady=-1.0, most=24, warmup=1).time([lambda: None])
    assert clock.batches == [1, 10, 10, 4]
    clock = FakeClock(steady(2e-3))
    assert Timer(clock).time([lambda: None]).repeats == 5
    assert set(clock.batches) == {1}
