"""Closed forms of the makespan against the longest path of the task graph."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from perfmodel.errors import PerfmodelError
from perfmodel.schedule import (
    activation_penalty,
    bubble_fraction,
    in_flight_microbatches,
    makespan_1f1b,
    makespan_1f1b_split,
    makespan_interleaved,
    warmup_forwards,
)
from perfmodel.schedule_graph import device_order, makespan_of_stages, simulate

# (first, mid, last) forward and backward times. Integers: sums are exact, and so is `==`.
PATTERNS = {
    "equal": ((1, 1, 1), (2, 2, 2)),
    "last slowest": ((3, 2, 5), (6, 4, 10)),
    "first slowest": ((9, 4, 3), (18, 8, 6)),
    "first slowest, last empty": ((6, 4, 0), (9, 6, 0)),
    "mid slowest": ((2, 7, 3), (4, 14, 6)),
    "mid slowest, last short": ((5, 6, 1), (15, 18, 3)),
    "falling": ((12, 11, 2), (12, 11, 2)),
    "forward and backward differ": ((21, 8, 8), (4, 21, 6)),
    "backward first": ((1, 3, 1), (3, 1, 1)),
}
SECONDS = st.integers(0, 30)
THREE = st.tuples(SECONDS, SECONDS, SECONDS)


def stages(times: tuple[float, ...], pp: int) -> list[float]:
    first, mid, last = times
    return [first, *[mid] * (pp - 2), last] if pp > 1 else [last]


def interleaved(pp: int, vpp: int, m: int, chunk: float, first: float, last: float) -> float:
    """Simulate chunks of 3 `chunk`; `first` and `last` are the extras at the model's ends."""
    forward = np.full((vpp, pp), chunk)
    forward[0, 0] += first
    forward[-1, -1] += last
    return simulate("interleaved", forward, 2 * forward, m)


def closed(pp: int, vpp: int, m: int, chunk: float, first: float, last: float) -> float:
    mid = 3 * vpp * chunk
    return makespan_interleaved(mid + 3 * first, mid, mid + 3 * last, pp, vpp, m)


@pytest.mark.parametrize("pp", range(1, 7))
@pytest.mark.parametrize("name", PATTERNS)
def test_1f1b_is_the_longest_path(name: str, pp: int) -> None:
    forward, backward = PATTERNS[name]
    for m in range(1, 11):
        path = simulate("1f1b", stages(forward, pp), stages(backward, pp), m)
        assert makespan_1f1b_split(*forward, *backward, pp, m) == path
        assert makespan_of_stages(stages(forward, pp), stages(backward, pp), m) == path


@given(THREE, THREE, st.integers(1, 8), st.integers(1, 12))
def test_1f1b_is_exact_for_any_times(
    forward: tuple[int, int, int], backward: tuple[int, int, int], pp: int, m: int
) -> None:
    path = simulate("1f1b", stages(forward, pp), stages(backward, pp), m)
    assert makespan_1f1b_split(*forward, *backward, pp, m) == path


@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6), st.integers(1, 10))
def test_stages_that_are_all_different(times: list[tuple[int, int]], m: int) -> None:
    forward, backward = zip(*times, strict=True)
    assert makespan_of_stages(forward, backward, m) == simulate("1f1b", forward, backward, m)


@given(THREE, st.integers(1, 6), st.integers(1, 10), st.integers(1, 9))
def test_equal_shares(tau: tuple[int, int, int], pp: int, m: int, tenths: int) -> None:
    share = tenths / 10
    forward = [share * t for t in stages(tau, pp)]
    backward = [(1 - share) * t for t in stages(tau, pp)]
    path = simulate("1f1b", forward, backward, m)
    assert makespan_1f1b(*tau, pp, m, share) == pytest.approx(path, rel=1e-12)
    # The textbook form is an upper bound while the shares are equal.
    assert path <= (sum(stages(tau, pp)) + (m - 1) * max(stages(tau, pp))) * (1 + 1e-12)


@given(THREE, st.integers(1, 8), st.integers(1, 12), st.integers(1, 9))
def test_last_stage_slowest(tau: tuple[int, int, int], pp: int, m: int, tenths: int) -> None:
    first, mid, last = tau[0], tau[1], max(tau)
    expected = sum(stages((first, mid, last), pp)[:-1]) + m * last
    assert makespan_1f1b(first, mid, last, pp, m, tenths / 10) == pytest.approx(expected)


def test_textbook_form_is_not_the_makespan() -> None:
    # sum(tau) + (m - 1) max(tau). Too high: a slow stage hides the stages behind it.
    assert makespan_1f1b(10, 1, 1, 2, 8) == pytest.approx(80)
    assert simulate("1f1b", [10, 1], [20, 2], 8) == 240 < 33 + 7 * 30
    # Too low where shares differ: forward passes wait for one stage, backward for another.
    assert simulate("1f1b", [0, 1, 0], [1, 0, 0], 6) == 8 > 2 + 5 * 1
    assert makespan_1f1b_split(0, 1, 0, 1, 0, 0, 3, 6) == 8


@pytest.mark.parametrize(("pp", "vpp"), list(product(range(1, 7), (2, 3, 4))))
def test_interleaved_equal_stages(pp: int, vpp: int) -> None:
    for groups in (1, 2, 3):
        m = groups * pp
        for forward, backward in ((1, 1), (1, 2), (3, 1)):
            ones = np.ones((vpp, pp))
            path = simulate("interleaved", forward * ones, backward * ones, m)
            tau = vpp * (forward + backward)
            assert path == (m * vpp + pp - 1) * (forward + backward)
            assert makespan_interleaved(tau, tau, tau, pp, vpp, m) == pytest.approx(path)


@pytest.mark.parametrize(("pp", "vpp"), list(product(range(2, 7), (2, 3))))
def test_interleaved_is_exact_if_the_last_device_is_slowest(pp: int, vpp: int) -> None:
    for groups, first, last in product((1, 2, 4), (-9, 0, 2, 7), (0, 1, 7, 40)):
        if last >= first:
            path = interleaved(pp, vpp, groups * pp, 10, first, last)
            form = closed(pp, vpp, groups * pp, 10, first, last)
            assert form == pytest.approx(path, rel=1e-12)


EXTRA = st.integers(-10, 40)


@given(st.integers(2, 5), st.integers(2, 3), st.integers(1, 4), EXTRA, EXTRA)
def test_interleaved_is_a_lower_bound(
    pp: int, vpp: int, groups: int, first: int, last: int
) -> None:
    path = interleaved(pp, vpp, groups * pp, 10, first, last)
    form = closed(pp, vpp, groups * pp, 10, first, last)
    assert form <= path * (1 + 1e-12)
    if max(first, last) >= 0:  # the error that the document states
        assert form >= 0.87 * path


def test_interleaved_is_not_exact_if_the_first_device_is_slowest() -> None:
    assert closed(4, 2, 24, 10, 5, 1) < 0.99 * interleaved(4, 2, 24, 10, 5, 1)


@given(THREE, st.integers(1, 6), st.integers(1, 10))
def test_one_chunk_is_1f1b(tau: tuple[int, int, int], pp: int, m: int) -> None:
    assert makespan_interleaved(*tau, pp, 1, m) == makespan_1f1b(*tau, pp, m)
    assert makespan_interleaved(*tau, pp, 1, m, 0.25) == makespan_1f1b(*tau, pp, m, 0.25)


def test_transfers_lie_on_the_path() -> None:
    # One microbatch passes every boundary twice.
    assert simulate("1f1b", [1, 1, 1], [2, 2, 2], 1, p2p_s=0.5) == 9 + 4 * 0.5
    ones = np.ones((2, 3))
    slow = simulate("interleaved", ones, ones, 3, p2p_s=0.5)
    assert slow > simulate("interleaved", ones, ones, 3)
    assert simulate("1f1b", [1], [2], 5, p2p_s=0.5) == 15


def test_bubble_fraction() -> None:
    bubble = bubble_fraction(16, 2, 64)
    assert bubble.of_compute == pytest.approx(0.1172, abs=5e-5)
    assert bubble.of_total == pytest.approx(0.1049, abs=5e-5)
    makespan = makespan_interleaved(1, 1, 1, 16, 2, 64)
    assert makespan / 64 - 1 == pytest.approx(bubble.of_compute)
    assert 1 - 64 / makespan == pytest.approx(bubble.of_total)


def test_warmup_of_the_first_device() -> None:
    assert warmup_forwards(0, 4, 2, 8) == 10
    assert warmup_forwards(0, 8, 4, 64) == 38
    assert warmup_forwards(0, 4, 1, 8) == 3
    assert warmup_forwards(0, 4, 1, 2) == 2


@pytest.mark.parametrize(("pp", "vpp"), list(product(range(1, 7), (1, 2, 3))))
def test_in_flight_is_the_peak_of_the_order(pp: int, vpp: int) -> None:
    schedule = "1f1b" if vpp == 1 else "interleaved"
    for m in (1, 2, 3, 5, 9) if vpp == 1 else (pp, 2 * pp, 3 * pp):
        for rank in range(pp):
            order = device_order(schedule, rank, pp, vpp, m)
            assert len(set(order)) == len(order) == 2 * m * vpp
            steps = [1 if task.phase == "F" else -1 for task in order]
            peak = int(np.cumsum(steps).max())
            assert in_flight_microbatches(rank, pp, vpp, m) == peak / vpp


def test_activation_penalty() -> None:
    assert activation_penalty(16, 2) == pytest.approx(1.46875)
    assert activation_penalty(8, 4) == pytest.approx(1.21875)
    assert activation_penalty(8, 1) == 1
    for pp, vpp in product((2, 4, 8, 16), (1, 2, 4)):
        ratio = in_flight_microbatches(0, pp, vpp, 64) / in_flight_microbatches(0, pp, 1, 64)
        assert ratio == pytest.approx(activation_penalty(pp, vpp))


def test_formulas_compile() -> None:
    @njit
    def kernel(tau: float, pp: float, vpp: float, m: float) -> float:
        bubble = bubble_fraction(pp, vpp, m)
        total = makespan_interleaved(1.5 * tau, tau, 2 * tau, pp, vpp, m) + bubble.of_total
        return total + in_flight_microbatches(0.0, pp, vpp, m) + activation_penalty(pp, vpp)

    for vpp in (1.0, 2.0):
        assert kernel(3.0, 4.0, vpp, 8.0) == kernel.py_func(3.0, 4.0, vpp, 8.0)


def test_graphs_are_imported_on_demand() -> None:
    code = "import sys, perfmodel.schedule_graph; sys.exit('networkx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("schedule", "shape", "m", "message"),
    [
        ("1f1b", (2, 3), 3, "one chunk"),
        ("1f1b", (1, 3), 0, "at least one"),
        ("interleaved", (1, 3), 3, "nothing to interleave"),
        ("interleaved", (2, 3), 4, "not a multiple"),
        ("gpipe", (1, 3), 4, "No schedule"),
    ],
)
def test_schedules_that_cannot_be(
    schedule: str, shape: tuple[int, int], m: int, message: str
) -> None:
    with pytest.raises(PerfmodelError, match=message):
        simulate(schedule, np.ones(shape), np.ones(shape), m)


def test_shapes_must_agree() -> None:
    with pytest.raises(PerfmodelError, match="one shape"):
        simulate("1f1b", [1, 1], [1, 1, 1], 4)
