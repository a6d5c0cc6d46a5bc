"""The solvers of the relaxation: any of them by name, none of them trusted."""

from __future__ import annotations

import json
from math import log
from typing import Any

import numpy as np
import pytest

from lawfit import CHINCHILLA_EPOCH
from mosaic_opt.backends import gp
from mosaic_opt.backends.base import Limits
from mosaic_opt.backends.gp import GeometricProgram, minimise
from mosaic_opt.errors import MosaicError
from mosaic_opt.relaxation import (
    Program,
    certified_bound,
    terms_of,
)
from mosaic_opt.relaxation_result import RelaxationStatus

from .relaxations import (
    relaxed_tiny,
)
from .strategies import tiny_problem


@pytest.mark.parametrize("solver", ["clarabel", "scs"])
def test_report_83_the_compute_optimum_of_a_dense_law_is_its_closed_form(solver: str) -> None:
    law, compute = CHINCHILLA_EPOCH, 5.76e23
    dense = [[0.0, 1.0, 0.0, 0.0], [0.0, -1.0, 0.0, 0.0]]  # 1 - S = 1
    program = Program(
        terms_of(law),
        ("compute", "dense", "dense"),
        np.array([[1.0, 1.0, 1.0, 0.0], *dense]),  # 6 N_act D <= C
        np.array([log(compute / 6.0), 0.0, 0.0]),
        np.array([log(1e8), 0.0, log(1e8), 0.0]),
        np.array([log(1e13), 0.0, log(1e15), 0.0]),
    )
    power = 1.0 / (law.alpha + law.beta)
    n = (law.alpha * law.a / (law.beta * law.b)) ** power * (compute / 6.0) ** (law.beta * power)
    loss = law.loss(n_total=n, n_active=n, tokens=compute / 6.0 / n, expert_split=1.0)
    assert n == pytest.approx(7.22487e10, rel=1e-5)
    answer = minimise(program, solver)
    # where the loss is flat the point has half of its digits; the value has all
    assert np.exp(answer.x[0] + answer.x[1]) == pytest.approx(n, rel=1e-4)
    assert answer.value == pytest.approx(loss, rel=1e-8)
    bound = certified_bound(program, answer.x, answer.multipliers)
    assert loss * (1.0 - 2e-6) < bound <= loss * (1.0 + 1e-12)
    slope = -answer.multipliers[0]  # d L / d log C, by the envelope theorem
    assert slope == pytest.approx(-law.beta * law.b * (compute / 6.0 / n) ** -law.beta, rel=1e-5)


def test_two_solvers_agree() -> None:
    runs = [run for run in relaxed_tiny().solvers if run.program == "monomial"]
    assert [run.solver for run in runs] == ["clarabel", "scs"]
    assert all(run.status == "optimal" for run in runs)
    assert runs[0].bound == pytest.approx(runs[1].bound, abs=1e-6)
    assert relaxed_tiny().lower_bound == max(run.bound for run in runs)


def test_any_installed_solver_by_name_in_any_case() -> None:
    found = GeometricProgram(workers=1, solver="SCS", check=None).relax(tiny_problem())
    assert found.lower_bound == pytest.approx(relaxed_tiny().lower_bound, abs=1e-6)
    assert {run.solver for run in found.solvers} == {"scs"}


def test_an_unknown_solver_lists_those_that_there_are() -> None:
    with pytest.raises(MosaicError, match=r"no solver 'simplex' here; cvxpy finds .*clarabel"):
        GeometricProgram(solver="simplex").relax(tiny_problem())


def test_a_solver_without_exponential_cones_is_a_status_with_its_words() -> None:
    problem = tiny_problem()
    found = GeometricProgram(workers=1, solver="osqp", check=None).relax(problem)
    assert found.status is RelaxationStatus.FAILED
    assert found.lower_bound is None
    assert "osqp: error" in found.words
    assert all(run.words for run in found.solvers)
    json.loads(found.to_json())
    report = GeometricProgram(workers=1, solver="osqp", check=None).search(problem, Limits())
    crude = min(problem.optimistic_loss(i) for i in range(len(problem.architectures)))
    assert report.dual_bound == pytest.approx(crude)


def test_the_second_solver_stands_in_for_one_that_failed() -> None:
    found = GeometricProgram(workers=1, solver="osqp", check="scs").relax(tiny_problem())
    assert found.status is RelaxationStatus.BOUND
    assert found.lower_bound == pytest.approx(relaxed_tiny().lower_bound, abs=1e-6)


def test_a_solver_that_lies_gives_no_better_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = minimise

    def liar(program: Any, solver: str) -> Any:
        answer = honest(program, solver)
        return answer._replace(value=9.9, multipliers=3.0 * answer.multipliers, x=answer.x + 0.5)

    monkeypatch.setattr(gp, "minimise", liar)
    found = GeometricProgram(workers=1).relax(tiny_problem())
    assert found.lower_bound is not None
    assert relaxed_tiny().lower_bound is not None
    assert found.lower_bound < relaxed_tiny().lower_bound


def test_solvers_that_agree_are_said_to() -> None:
    seen = relaxed_tiny().agreements
    assert [a.program for a in seen] == ["monomial", "hull"]
    assert all(a.agree and a.solvers == ("clarabel", "scs") for a in seen)
    assert "scs on the monomial program agree within 1e-06" in str(relaxed_tiny())
    alone = GeometricProgram(workers=1, check=None).relax(tiny_problem())
    assert alone.agreements == ()
    failed = GeometricProgram(workers=1, solver="osqp", check="scs").relax(tiny_problem())
    assert [a.agree for a in failed.agreements] == [None, None]
    assert "cannot be compared" in str(failed)


def test_a_second_solver_with_another_optimum_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = minimise

    def liar(program: Any, solver: str) -> Any:
        answer = honest(program, solver)
        return answer._replace(value=answer.value + 3e-6) if solver == "scs" else answer

    monkeypatch.setattr(gp, "minimise", liar)
    found = GeometricProgram(workers=1).relax(tiny_problem())
    first, hull = found.agreements
    assert first.agree is False
    assert hull.agree is True
    assert first.difference == pytest.approx(3e-6, abs=1e-7)
    assert first.tolerance < first.difference
    page = " ".join(str(found).split())
    assert "clarabel and scs on the monomial program DIFFER by 3.0" in page
    assert found.lower_bound == pytest.approx(relaxed_tiny().lower_bound, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"workers": 0}, "workers=0 must be at least 1"),
        ({"pieces": 0}, "pieces=0 must be at least 1"),
        ({"mfu": "guess"}, "mfu='guess' must be exact or bound"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(MosaicError, match=sentence):
        GeometricProgram(**options)
