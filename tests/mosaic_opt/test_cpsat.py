"""CP-SAT posts the declared rules: the same plans, and the same best one, as enumeration."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from mosaic_opt.backends.base import Limits, Progress, Termination, dual_bound, rank
from mosaic_opt.backends.cpsat.posting import Poster
from mosaic_opt.backends.cpsat.rounding import Scale
from mosaic_opt.backends.cpsat.running import Ran, run
from mosaic_opt.backends.cpsat.search import DEGREES, CpSat, LayoutModel
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from perfmodel.constraints import (
    AnyOf,
    AtLeast,
    AtMost,
    Constraint,
    Divides,
    Implies,
    OneOf,
    ProductIs,
    Quotient,
    Table,
)
from perfmodel.rules import RULES

from .strategies import small_envelopes, tiny_problem

RANDOM = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


class _Every(cp_model.CpSolverSolutionCallback):
    def __init__(self, variables: list[Any]) -> None:
        super().__init__()
        self.variables, self.found = variables, []

    def on_solution_callback(self) -> None:
        self.found.append(tuple(self.value(v) for v in self.variables))


def every_solution(model: cp_model.CpModel, variables: list[Any]) -> set[tuple[int, ...]]:
    """Return the projections of all solutions on some variables."""
    solver = cp_model.CpSolver()
    solver.parameters.enumerate_all_solutions = True
    solver.parameters.catch_sigint_signal = False  # its handler leaves none behind
    seen = _Every(variables)
    assert solver.solve(model, seen) in (cp_model.OPTIMAL, cp_model.INFEASIBLE)
    return set(seen.found)


# ---------------------------------------------------------------- posting

DOMAINS = {"a": [1, 2, 3, 4], "b": [0, 1, 2, 6], "c": [1, 2, 5]}
CONSTANTS = {"n": 12, "one": 1}


def sides() -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(["a", "b", "c", "n", 2]), min_size=1, max_size=3).map(tuple)


def divisors_() -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(st.sampled_from(["a", "c", "n", 2]), min_size=1, max_size=3).map(tuple)


def relations() -> st.SearchStrategy[Constraint]:
    rows = st.lists(st.tuples(st.sampled_from([1, 2]), st.sampled_from([0, 2])), min_size=1)
    return st.one_of(
        st.builds(Divides, divisors_(), sides()),
        st.builds(ProductIs, sides(), sides()),
        st.builds(AtMost, sides(), sides()),
        st.builds(AtLeast, sides(), sides()),
        st.builds(
            OneOf, st.sampled_from("abc"), st.lists(st.integers(0, 4), min_size=1).map(tuple)
        ),
        st.builds(OneOf, st.just("n"), st.sampled_from([(12,), (5, 6)])),
        st.builds(Table, st.just(("a", "b")), rows.map(tuple)),
    )


def constraints() -> st.SearchStrategy[Constraint]:
    return st.recursive(
        relations(),
        lambda inner: st.one_of(
            st.builds(Implies, inner, inner),
            st.lists(inner, min_size=1, max_size=3).map(lambda many: AnyOf(tuple(many))),
        ),
        max_leaves=4,
    )


@settings(max_examples=150, deadline=None)
@given(posted=st.lists(constraints(), min_size=1, max_size=3))
def test_posted_constraints_mean_what_they_say(posted: list[Constraint]) -> None:
    poster = Poster(cp_model.CpModel(), DOMAINS, CONSTANTS)
    poster.require_all(posted)
    found = every_solution(poster.model, [poster.variable(name) for name in DOMAINS])
    true = {
        row
        for row in product(*DOMAINS.values())
        if all(c.holds({**CONSTANTS, **dict(zip(DOMAINS, row, strict=True))}) for c in posted)
    }
    assert found == true


def test_a_quotient_is_defined_where_it_is_exact() -> None:
    poster = Poster(cp_model.CpModel(), {"a": [1, 2, 3], "b": [2, 6]}, {"n": 12})
    poster.derive("q", Quotient(("n",), ("a", "b")))
    names = ("a", "b", "q")
    found = every_solution(poster.model, [poster.variable(name) for name in names])
    assert found == {(1, 2, 6), (2, 2, 3), (3, 2, 2), (1, 6, 2), (2, 6, 1)}


def test_a_kind_without_a_posting_is_an_error() -> None:
    class Odd(AtMost):  # the kinds are a closed set; this is what a new one would meet
        pass

    class Other(Constraint):
        variables = frozenset({"a"})
        holds = numbers = sentence = None

        def __hash__(self) -> int:
            return 0

    poster = Poster(cp_model.CpModel(), DOMAINS, CONSTANTS)
    poster.require(Odd(("a",), (2,)))
    with pytest.raises(TypeError, match="Other is a kind of constraint without a posting"):
        poster.require(Other())


def test_a_product_beyond_64_bits_is_said() -> None:
    """OR-Tools #4031: 2^40 * 2^40 makes a model invalid, and no exception says so."""
    poster = Poster(cp_model.CpModel(), {"a": [1, 2**40], "b": [1, 2**40]}, {})
    with pytest.raises(MosaicError, match=r"must be below 2\^62"):
        poster.require(AtMost(("a", "b"), (4,)))


def test_a_given_total_keeps_products_short() -> None:
    """Partial products that do not divide the total are never made, large as they would be."""
    wide = [2**k for k in range(21)]
    domains = dict.fromkeys("abcd", wide)
    poster = Poster(cp_model.CpModel(), domains, {"world": 2**20})
    poster.require_all([AtMost(("a", "b", "c"), (2**19,)), ProductIs((*"abcd",), ("world",))])
    ran = run(poster.model, {n: poster.variable(n) for n in "abcd"}, workers=1, seed=0)
    assert ran.values is not None
    assert math.prod(ran.values.values()) == 2**20


def test_an_invalid_model_is_an_error() -> None:
    model = cp_model.CpModel()
    x = model.new_int_var(0, 2**40, "x")
    y = model.new_int_var(0, 2**62, "y")
    model.add(2**30 * x + 2**10 * y <= 5)
    with pytest.raises(MosaicError, match="CP-SAT refuses the model"):
        run(model, {"x": x}, workers=1, seed=0)


def golomb(marks: int) -> tuple[cp_model.CpModel, dict[str, Any]]:
    """A ruler whose distances all differ, as short as can be: quick to find, slow to prove."""
    model = cp_model.CpModel()
    at = [model.new_int_var(0, marks**2, f"mark_{i}") for i in range(marks)]
    model.add(at[0] == 0)
    gaps = []
    for i in range(marks):
        for j in range(i):
            gap = model.new_int_var(1, marks**2, "")
            model.add(gap == at[i] - at[j])
            gaps.append(gap)
    model.add_all_different(gaps)
    model.minimize(at[-1])
    return model, {"length": at[-1]}


@pytest.mark.parametrize("which", ["on_solution", "on_bound"])
def test_what_a_callback_raises_comes_out(which: str) -> None:
    def stop(*_: object) -> None:
        raise LookupError

    model, variables = golomb(6)
    with pytest.raises(LookupError):
        run(model, variables, workers=1, seed=0, **{which: stop})


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def press_ctrl_c(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("stop", [interrupt, press_ctrl_c])
@pytest.mark.parametrize("time_s", [None, 3600.0])
def test_an_interrupt_is_told_and_keeps_the_incumbent(
    stop: Callable[..., None], time_s: float | None, workers: int
) -> None:
    """Raised by a callback or pressed, under a limit or not."""
    told: list[int] = []

    def found(values: object, length: int, bound: int) -> None:
        told.append(length)
        if len(told) == 1:
            stop()

    model, variables = golomb(13)
    ran = run(model, variables, workers=workers, seed=0, time_s=time_s, on_solution=found)
    assert ran.interrupted
    assert not ran.proved
    assert ran.values is not None
    assert ran.values["length"] == ran.objective
    assert ran.bound <= ran.values["length"] <= min(told)


def test_a_limit_is_no_interrupt() -> None:
    model, variables = golomb(13)
    ran = run(model, variables, workers=1, seed=0, time_s=1e-3)
    assert not ran.proved
    assert not ran.interrupted


def test_bounds_rise_to_the_optimum() -> None:
    bounds: list[int] = []
    model, variables = golomb(8)
    ran = run(model, variables, workers=1, seed=0, on_bound=bounds.append)
    assert ran.proved
    assert ran.objective == 34  # the optimal ruler of 8 marks
    assert len(bounds) > 1
    assert bounds == sorted(set(bounds))
    assert bounds[-1] <= 34


# ---------------------------------------------------------------- rounding


@given(number=st.floats(0.0, 1e13), largest=st.floats(1e-3, 1e13), bits=st.integers(8, 52))
def test_whole_units_never_exceed_the_number(number: float, largest: float, bits: int) -> None:
    assume(number <= largest)
    scale = Scale.of(largest, bits)
    assert math.frexp(scale.unit)[0] == 0.5  # a power of two
    assert scale.down(number) * scale.unit <= number < (scale.down(number) + 1) * scale.unit
    assert scale.down(largest) < 2**bits
    assert scale.unit <= largest * 2.0 ** (1 - bits)


# ---------------------------------------------------------------- the search


@RANDOM
@given(content=small_envelopes(), both=st.booleans())
def test_the_posted_rules_allow_the_legal_plans(content: dict[str, Any], both: bool) -> None:
    if both:
        content["plans"] |= {"layouts": ["equal", "balanced"]}
    problem = Problem(parse_envelope(content))
    assume(problem.architectures)
    index = len(problem.architectures) - 1
    poster = LayoutModel(problem).poster(index)
    found = every_solution(poster.model, [poster.variable(name) for name in DEGREES])
    rows = problem.legal_rows(index)
    rows = rows[problem.table.ep[rows] <= problem.largest_ep]
    columns = [problem.table.columns[name][rows].tolist() for name in DEGREES]
    assert found == set(zip(*columns, strict=True))


@RANDOM
@given(content=small_envelopes(), both=st.booleans())
def test_every_outcome_is_the_enumerators(content: dict[str, Any], both: bool) -> None:
    if both:
        content["plans"] |= {"layouts": ["equal", "balanced"]}
    problem = Problem(parse_envelope(content))
    mine = CpSat().search(problem, Limits())
    truth = Enumerate(workers=1).search(problem, Limits())
    assert repr(mine) == repr(truth)


@pytest.mark.parametrize("rule", [r.name for r in RULES])
def test_a_rule_left_out_would_be_noticed(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An illegal layout costs nothing in the tables: without its rule the search would take it."""
    binding = {"experts", "attention_heads"}
    problem = tiny_problem(
        plans={"micro_batch": [1], "recompute": ["none"], "max_cp": 2},
        candidates={
            "kind": "ladder",
            "q": [1],
            "n_experts": [4],
            "top_k": [1],
            "expert_split": [1],
        },
    )
    kept = tuple(r for r in RULES if r.name != rule)
    monkeypatch.setattr("mosaic_opt.backends.cpsat.search.RULES", kept)
    model = LayoutModel(problem)
    if rule in binding:
        with pytest.raises(AssertionError, match="illegal layout"):
            model.solve(0, CpSat(), None)
    else:
        outcome = model.solve(0, CpSat(), None)
        assert outcome is not None
        assert repr(outcome) == repr(problem.solve_candidate(0))


def test_the_bound_on_time_is_within_the_recorded_rounding() -> None:
    problem = tiny_problem()
    model = LayoutModel(problem)
    for index in range(4):
        priced = problem.priced(index)
        answer = model.answer(index, priced, CpSat())
        assert answer.proved
        assert answer.row is not None
        shortest = priced.step_s[np.searchsorted(priced.rows, answer.row)]
        assert answer.bound_s <= shortest <= answer.bound_s + answer.time_scale.unit
        assert answer.time_scale.unit < 1e-9 * priced.step_s.max()


def test_a_plan_over_the_cap_by_less_than_the_rounding_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With units so coarse that all plans seem to fit, the answer is still the enumerator's."""
    monkeypatch.setattr("mosaic_opt.backends.cpsat.search.MEMORY_BITS", 1)
    problem = tiny_problem(memory_fraction=0.02)
    for index in range(4):
        truth = problem.solve_candidate(index)
        assert truth.counts.over_memory
        assert repr(LayoutModel(problem).solve(index, CpSat(), None)) == repr(truth)


def test_better_layouts_are_streamed() -> None:
    seen: list[Progress] = []
    problem = tiny_problem()
    report = CpSat().search(problem, Limits(), progress=seen.append)
    assert len(seen) > len(problem.architectures)
    assert seen[-1].incumbent == report.incumbent


@pytest.mark.parametrize("changes", [{}, {"memory_fraction": 0.02}])
def test_the_bound_told_is_that_of_the_candidates_left(changes: dict[str, Any]) -> None:
    seen: list[Progress] = []
    problem = tiny_problem(**changes)
    report = CpSat().search(problem, Limits(), progress=seen.append)
    n = len(problem.architectures)
    assert {state.done for state in seen} >= {*range(1, n + 1)}
    for state in seen:
        proved = [o for o in report.outcomes[: state.done] if o.feasible]
        best = min(proved, key=rank, default=None)
        assert state.bound == dual_bound(problem, best, tuple(range(state.done, n)))
    assert seen[-1].bound == report.dual_bound
    assert math.isfinite(seen[0].bound)


LIMITS_S = [1e-9, 1e-6, 1e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.03, 0.06, 0.1, 0.2, 0.4]


@pytest.mark.parametrize("time_s", LIMITS_S)
def test_no_limit_ends_as_an_interrupt(time_s: float) -> None:
    report = CpSat().search(tiny_problem(), Limits(time_s=time_s))
    left = bool(report.unexamined)
    assert report.termination is (Termination.TIME_LIMIT if left else Termination.EXHAUSTED)


@pytest.mark.parametrize(
    ("limits", "interrupted", "said"),
    [
        (Limits(time_s=1e6), False, Termination.TIME_LIMIT),  # CP-SAT's clock is not ours
        (Limits(time_s=1e6), True, Termination.INTERRUPTED),
        (Limits(), True, Termination.INTERRUPTED),
    ],
)
def test_why_it_stopped_is_what_happened_whatever_the_clock_says(
    monkeypatch: pytest.MonkeyPatch, limits: Limits, interrupted: bool, said: Termination
) -> None:
    stopped = Ran(None, None, 0, proved=False, interrupted=interrupted)
    monkeypatch.setattr("mosaic_opt.backends.cpsat.search.run", lambda *_, **__: stopped)
    report = CpSat().search(tiny_problem(), limits)
    assert report.termination is said
    assert not report.outcomes


@pytest.mark.parametrize("time_s", [None, 3600.0])
@pytest.mark.parametrize("stop", [interrupt, press_ctrl_c])
def test_a_real_interrupt_is_told_and_keeps_what_was_done(
    stop: Callable[..., None], time_s: float | None
) -> None:
    stopped: list[Progress] = []

    def told(state: Progress) -> None:
        if state.done == 3 and not stopped:
            stopped.append(state)
            stop()

    report = CpSat().search(tiny_problem(), Limits(time_s=time_s), progress=told)
    assert report.termination is Termination.INTERRUPTED
    assert len(report.outcomes) >= 3
    assert report.unexamined


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"seed": -1}, "seed=-1 must be from 0"),
        ({"seed": 2**31}, "must be from 0"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, int], said: str) -> None:
    with pytest.raises(MosaicError, match=said):
        CpSat(**options)


def test_an_interrupt_behind_a_search_is_an_exception() -> None:
    """CP-SAT's own handler of SIGINT would leave none: the next Ctrl-C would end the process."""
    model = cp_model.CpModel()
    x = model.new_int_var(0, 3, "x")
    model.maximize(x)
    found = run(model, {"x": x}, workers=1, seed=0)
    assert found.values == {"x": 3}
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
