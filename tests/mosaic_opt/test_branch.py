"""Branch and bound: the enumerator's answer, near-ties included, with most pairs not priced."""

from __future__ import annotations

import dataclasses
from math import inf
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mosaic_opt.backends.base import Limits, Progress, Report, Termination
from mosaic_opt.backends.branch import BranchAndBound
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.bounds import BlockBounds
from mosaic_opt.certificate import certify
from mosaic_opt.envelope import example, parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.outcome import Outcome
from mosaic_opt.problem import Problem
from mosaic_opt.solver import solve
from perfmodel.calibration.stacks import shipped_stacks

from .strategies import small_envelopes, solved_table3, tiny_problem

replace = dataclasses.replace


def searched(problem: Problem, workers: int = 1) -> Report:
    return BranchAndBound(workers=workers).search(problem, Limits())


def exhaustive(problem: Problem) -> Report:
    return Enumerate(workers=1).search(problem, Limits())


def as_enumerated(outcome: Outcome, other: Outcome) -> Outcome:
    """Take the counts and the cutoff of another: those depend on what was priced."""
    return replace(outcome, cutoff_s=other.cutoff_s, counts=other.counts)


@st.composite
def envelopes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw small envelopes under any stack, with an MFU error from none to much."""
    stack = draw(st.sampled_from(("megatron-eager", *shipped_stacks())))
    error = draw(st.sampled_from((0.0, 0.06, 0.5)))
    return draw(small_envelopes()) | {"stack": stack, "mfu_error": error}


@settings(max_examples=200)
@given(envelopes())
def test_same_answer_as_exhaustive_search(spec: dict[str, Any]) -> None:
    problem = Problem(parse_envelope(spec))
    pruned, every = searched(problem), exhaustive(problem)
    truth = {o.index: o for o in every.outcomes}
    assert (pruned.incumbent is None) == (every.incumbent is None)
    assert pruned.dual_bound == every.dual_bound
    assert not pruned.unexamined
    for outcome in pruned.outcomes:
        same = as_enumerated(outcome, truth[outcome.index])
        assert repr(same) == repr(truth[outcome.index])
    for discarded in pruned.discarded:
        assert not truth[discarded.index].step_s < discarded.bound_s
    if pruned.incumbent is not None and every.incumbent is not None:
        assert (pruned.incumbent.index, pruned.incumbent.row) == (
            every.incumbent.index,
            every.incumbent.row,
        )
        bar = pruned.incumbent.loss + problem.loss_tolerance(pruned.incumbent)
        assert not any(truth[d.index].loss <= bar for d in pruned.discarded)
    assert certify(problem, pruned).certified


@settings(max_examples=100)
@given(envelopes())
def test_solutions_differ_in_what_was_priced_alone(spec: dict[str, Any]) -> None:
    """Near-ties, and candidates that only the error of MFU keeps out, are the same."""
    envelope = parse_envelope(spec)
    pruned = solve(envelope, backend=BranchAndBound(workers=1))
    every = solve(envelope, backend=Enumerate(workers=1))
    assert pruned.status == every.status
    assert pruned.optimum == every.optimum
    assert pruned.bounds == every.bounds
    assert pruned.near_tie_rule == every.near_tie_rule
    for found, known in (
        (pruned.near_ties, every.near_ties),
        (pruned.near_feasible, every.near_feasible),
    ):
        assert len(found) == len(known)
        for one, other in zip(found, known, strict=True):
            assert one.model_copy(update={"layouts": other.layouts}) == other


@settings(max_examples=50)
@given(envelopes())
def test_every_count_is_the_same_with_any_number_of_workers(spec: dict[str, Any]) -> None:
    problem = Problem(parse_envelope(spec))
    assert repr(searched(problem, workers=3)) == repr(searched(problem, workers=1))


@settings(max_examples=100)
@given(envelopes(), st.integers(1, 6))
def test_what_an_interrupt_leaves_is_true(spec: dict[str, Any], n: int) -> None:
    problem = Problem(parse_envelope(spec))
    every = exhaustive(problem)

    def interrupt(state: Progress) -> None:
        if state.done >= n:
            raise KeyboardInterrupt

    report = BranchAndBound(workers=1).search(problem, Limits(), progress=interrupt)
    optimum = every.incumbent.loss if every.incumbent is not None else inf
    assert report.dual_bound <= optimum
    assert report.incumbent is None or report.incumbent.loss >= optimum
    assert certify(problem, report).certified == (not report.unexamined)
    if report.unexamined:
        assert report.termination is Termination.INTERRUPTED


RISING_BAR: dict[str, Any] = {
    "cluster": {"hardware": "p6-b200", "nodes": 4},
    "window_days": 2.0477602992053776,
    "batch": {"global_batch": 32, "seq_len": 1024},
    "candidates": {
        "kind": "ladder",
        "q": [1, 2, 3, 4],
        "n_experts": [4, 8, 16, 32, 64],
        "top_k": [1, 2, 4],
        "expert_split": [1, 2, 4],
    },
    "tokens": {"kind": "grid", "tokens_per_parameter": [8.827, 2224.6, 21.85, 80.0, 400.0]},
    "mfu_error": 0.5,
    "memory_fraction": 0.05,
    "plans": {"max_cp": 2, "micro_batch": [1, 2]},
}


@settings(max_examples=100)
@given(envelopes(), st.integers(0, 400), st.sampled_from((None, RISING_BAR)))
def test_a_stop_at_any_point_leaves_what_is_true(
    spec: dict[str, Any], after: int, other: dict[str, Any] | None
) -> None:
    """Between any two candidates, also where discarded ones are examined again."""
    problem = Problem(parse_envelope(other or spec))
    optimum = exhaustive(problem).incumbent
    calls = 0

    class Stopped(Problem):
        def price(self, *args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > after:
                raise KeyboardInterrupt
            return super().price(*args)

    report = searched(Stopped(problem.envelope))
    certificate = certify(problem, report)
    assert report.dual_bound <= (inf if optimum is None else optimum.loss)
    assert certificate.certified == (not report.unexamined), certificate
    assert all(c.passed for c in certificate.checks if c.name != "nothing_left")


# ---------------------------------------------------------------- bounds of a problem


@settings(max_examples=100)
@given(envelopes(), st.floats(0.5, 2.0))
def test_losses_are_those_of_single_candidates(spec: dict[str, Any], factor: float) -> None:
    problem = Problem(parse_envelope(spec))
    indices = np.arange(len(problem.architectures))
    if not len(indices):
        return
    steps = np.array([problem.peak_step_s(int(i)) for i in indices]) * factor
    found = problem.losses(indices, steps)
    for i, step_s, loss in zip(indices.tolist(), steps.tolist(), found.tolist(), strict=True):
        tokens = problem.tokens(i, step_s).tokens
        expected = inf if np.isnan(tokens) else problem.loss(i, tokens)
        assert loss == pytest.approx(expected, rel=1e-12)
    assert (problem.losses(indices, np.full(len(indices), inf)) == inf).all()


@settings(max_examples=100)
@given(envelopes(), st.floats(0.9, 1.1))
def test_cutoff_keeps_all_that_is_below_the_bar(spec: dict[str, Any], factor: float) -> None:
    problem = Problem(parse_envelope(spec))
    report, bounds = exhaustive(problem), BlockBounds(problem)
    if report.incumbent is None:
        return
    bar = factor * bounds.bar(report.incumbent)
    indices = np.array([o.index for o in report.outcomes if o.feasible])
    floors = bounds.floors(indices)
    for index, of_one, cutoff in zip(
        indices.tolist(), floors, bounds.cutoffs_s(indices, floors, bar), strict=True
    ):
        rows, legal = bounds.rows(index, of_one, cutoff)
        priced = problem.priced(index)
        assert legal == len(priced.rows)
        left = ~np.isin(priced.rows, rows) & problem.allowed(priced)
        if left.any():
            steps = priced.step_s[left]
            assert (problem.losses(np.full(len(steps), index), steps) > bar).all()


# ---------------------------------------------------------------- table3


def test_table3_with_a_hundredth_of_the_pairs() -> None:
    every = solved_table3()
    pruned = solve(example("table3"), backend=BranchAndBound(workers=2))
    assert pruned.status == "optimal"
    assert pruned.optimum == every.optimum
    assert [c.name for c in pruned.near_ties] == [c.name for c in every.near_ties]
    assert [c.name for c in pruned.near_feasible] == [c.name for c in every.near_feasible]
    assert pruned.counts.priced < 0.01 * every.counts.priced
    assert pruned.counts.ruled_out_architectures > 1000


# ---------------------------------------------------------------- limits and options


def test_a_time_limit_before_the_bounds_leaves_everything() -> None:
    problem = tiny_problem()
    report = BranchAndBound().search(problem, Limits(time_s=1e-9))
    assert report.termination is Termination.TIME_LIMIT
    assert report.incumbent is None
    assert 0.0 < report.dual_bound <= exhaustive(problem).dual_bound
    assert len(report.unexamined) == len(problem.architectures)


def test_zero_workers_are_refused() -> None:
    with pytest.raises(MosaicError, match="workers=0 must be at least 1; nearest: 1"):
        BranchAndBound(workers=0)
