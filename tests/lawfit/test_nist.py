"""The certified values of NIST's 27 nonlinear regression problems, from both of its starts."""

from __future__ import annotations

import pytest

from .nist_models import agreement, fit_from, problems

DEMANDED = 6.0

ROUNDED = {"Lanczos1": (6.0, 2.0, 2.0)}
"""Digits of parameters, deviations and squares that doubles leave.

Its residuals are 1e-13 and its responses near 1, so a residual has three digits in doubles.
"""


@pytest.mark.parametrize("which", ["start_1", "start_2"])
@pytest.mark.parametrize("name", problems())
def test_certified_values_are_reached_from_a_start(name: str, which: str) -> None:
    found = fit_from(name, which)
    demanded = ROUNDED.get(name, (DEMANDED,) * 3)
    assert found.stationary
    assert all(a >= b for a, b in zip(agreement(name, found), demanded, strict=True))
    # one start is no agreement, and the fit says so
    assert not found.converged
    assert "few_starts_agree" in {remark.reason for remark in found.warnings}


@pytest.mark.parametrize("name", ["Misra1a", "ENSO", "MGH10", "Bennett5", "Rat43"])
def test_both_starts_together_converge(name: str) -> None:
    found = fit_from(name, "start_1", "start_2")
    assert found.converged
    assert found.starts_agreeing == 2


def test_all_problems_are_there() -> None:
    sizes = {name: len(problem["y"]) for name, problem in problems().items()}
    assert len(sizes) == 27
    assert sum(sizes.values()) == 2176
