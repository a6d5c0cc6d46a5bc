"""The allocation law at an envelope's optimum, beside what brute force finds."""

from __future__ import annotations

import sys
from functools import cache
from math import log
from typing import Any

import numpy as np
import pytest

from lawfit import JointLaw
from mosaic_opt.allocation.figure import path_figure
from mosaic_opt.allocation.regime import AllocationLaw, allocation_law
from mosaic_opt.envelope import Envelope, parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.solver import solve

from .strategies import tiny_envelope

# one layout for all, and memory for it: the regime is then as wide as the grid
SPEC: dict[str, Any] = {
    "name": "one layout",
    "cluster": {"hardware": "p6-b200", "nodes": 32, "memory_bytes": 1e13},
    "window_days": 20.0,
    "batch": {"global_batch": 1024, "seq_len": 2048},
    "candidates": {
        "kind": "ladder",
        "q": [6, 8, 10, 12, 14, 18, 24],
        "n_experts": [16, 32, 48, 64, 128],
        "top_k": [1, 2, 4, 8],
        "expert_split": [1, 2, 4, 8],
    },
    "plans": {
        "tp": [1],
        "cp": [1],
        "pp": [4],
        "ep": [8],
        "micro_batch": [2],
        "recompute": ["full"],
    },
}


@cache
def one_layout() -> AllocationLaw:
    return allocation_law(parse_envelope(SPEC))


def envelope_at(days: float, **changes: Any) -> Envelope:
    return parse_envelope(SPEC | {"window_days": days} | changes)


def test_the_optimum_is_that_of_solve() -> None:
    found, best = one_layout(), solve(parse_envelope(SPEC)).optimum
    assert best is not None
    assert found.architecture == best.step.architecture["name"]
    assert found.plan == best.plan
    assert found.optimum.loss == pytest.approx(best.loss, rel=1e-12)
    assert found.optimum.tokens == pytest.approx(best.tokens, rel=1e-12)
    assert found.budget_flop == parse_envelope(SPEC).peak_compute_flop


def test_the_path_has_the_exact_optimum_of_each_budget() -> None:
    found = one_layout()
    assert len(found.path) == 13
    assert found.path[-1].days / found.path[0].days == pytest.approx(1e3)
    assert found.path[6].days == pytest.approx(found.days)
    assert found.path[6].architecture == found.architecture
    for row in found.path[::4]:
        best = solve(envelope_at(row.days)).optimum
        assert best is not None
        assert best.loss == pytest.approx(row.exact.loss, rel=1e-12)
        assert best.step.architecture["name"] == row.architecture


def test_the_slopes_are_those_of_the_mfu_around_the_optimum() -> None:
    """Least squares on the candidates themselves, priced with the scalar model."""
    found = one_layout()
    assert found.slopes is not None
    problem = Problem(parse_envelope(SPEC))
    x, y = [], []
    for i, architecture in enumerate(problem.architectures):
        step = problem.reprice(i, found.plan)
        n, n_active = problem.n_total(i), problem.n_active(i)
        x.append([log(n), log(n_active / n), log(problem.expert_split(i))])
        y.append(log(n_active / step.step_time_s))
        if architecture.name == found.architecture:
            at = i
    points, values = np.array(x), np.array(y)
    moved = points - points[at]
    weights = np.exp(-np.sum(moved**2, axis=1) / (2.0 * found.slopes.bandwidth**2))
    kept = weights > 1e-6
    root = np.sqrt(weights[kept])
    design = np.column_stack([np.ones(kept.sum()), moved[kept]]) * root[:, None]
    expected = np.linalg.lstsq(design, values[kept] * root, rcond=None)[0]
    assert found.slopes.points == kept.sum()
    assert found.slopes.w_n == pytest.approx(expected[1], rel=1e-6)
    assert found.slopes.w_s == pytest.approx(expected[2], rel=1e-6)
    assert found.slopes.w_g == pytest.approx(-expected[3], rel=1e-6)
    assert found.slopes.rms < 0.2


def test_exponents_follow_from_law_and_slopes() -> None:
    found = one_layout()
    law = parse_envelope(SPEC).law
    assert isinstance(law, JointLaw)
    assert found.slopes is not None
    e, s = found.exponents, found.slopes
    assert (e.p, e.rho) == (law.alpha / law.lambda_, law.alpha / law.beta)
    inverse = (1.0 - s.w_n) + (1.0 - s.w_s) * e.p + e.rho + s.w_g * e.g
    assert e.nu == pytest.approx(1.0 / inverse)


def test_residuals_say_by_how_much_28_misses() -> None:
    found = one_layout()
    law = parse_envelope(SPEC).law
    assert isinstance(law, JointLaw)
    assert found.slopes is not None
    assert found.residuals is not None
    o = found.optimum
    data = law.beta * law.b * o.tokens**-law.beta
    left = law.alpha * law.a * o.n_total**-law.alpha
    right = data * (1.0 - found.slopes.w_n - law.gamma * found.slopes.w_g / law.eta)
    assert found.residuals.n_total == pytest.approx((left - right) / data, rel=1e-9)


def test_the_path_starts_at_the_stationary_point_and_follows_30() -> None:
    found = allocation_law(envelope_at(1000.0))
    assert found.conditions is not None
    assert min(found.conditions.model_dump().values()) > 0.0
    assert found.no_path is None
    start = found.stationary_point
    assert start is not None
    assert found.path[6].predicted is not None
    assert found.path[6].predicted.loss == pytest.approx(start.loss, rel=1e-12)
    e, nu = found.exponents, found.exponents.nu
    assert nu is not None
    for row in found.path:
        ratio = row.budget_flop / found.budget_flop
        leaves = start.one_minus_s * ratio ** (e.p * nu) >= 1.0
        assert (row.predicted is None) == leaves
        if row.predicted is not None:
            assert row.predicted.n_total == pytest.approx(start.n_total * ratio**nu)
            assert row.predicted.tokens == pytest.approx(start.tokens * ratio ** (e.rho * nu))
            assert row.predicted.expert_split == pytest.approx(
                start.expert_split * ratio ** (e.g * nu)
            )


def test_a_stationary_point_that_no_model_can_have_is_no_path() -> None:
    found = one_layout()
    assert found.conditions is not None
    assert min(found.conditions.model_dump().values()) > 0.0
    assert found.stationary_point is None
    assert "no model activates more parameters than it has" in str(found.no_path)
    assert all(row.predicted is None for row in found.path)


def test_an_optimum_on_a_side_of_the_grid_says_which() -> None:
    """A window long enough for the largest model is spent on its experts' width."""
    found = allocation_law(envelope_at(30000.0))
    assert not found.inside
    assert found.violated == ("grid: least G",)
    assert found.architecture.endswith("G=1")
    assert found.regime_from is None
    assert found.regime_to is None


def test_the_regime_ends_where_an_exact_optimum_leaves_it() -> None:
    inside = [row for row in one_layout().path if row.in_regime]
    assert inside, "no optimum of the path is inside the grid: the case says nothing"
    found = allocation_law(envelope_at(inside[len(inside) // 2].days))
    assert found.inside
    assert found.regime_from is not None
    assert found.regime_to is not None
    assert found.regime_from.days <= found.days <= found.regime_to.days
    assert {found.regime_from.cause, found.regime_to.cause} <= {"grid", "memory"}
    for row in found.path:
        if found.regime_from.days < row.days < found.regime_to.days:
            assert row.in_regime
    for end, beyond in ((found.regime_from, 1.0 - 1e-6), (found.regime_to, 1.0 + 1e-6)):
        past = allocation_law(envelope_at(end.days * beyond))
        assert not past.inside
        assert past.architecture in end.detail


def test_another_layout_ends_a_regime() -> None:
    plans = SPEC["plans"] | {"ep": [8, 16], "micro_batch": [1, 2, 4], "pp": [1, 4]}
    days = [row.days for row in one_layout().path if row.in_regime]
    laws = [allocation_law(envelope_at(d, plans=plans)) for d in days]
    assert any(law.inside for law in laws)
    ends = [e for law in laws for e in (law.regime_from, law.regime_to) if e is not None]
    by_layout = [end for end in ends if end.cause == "layout"]
    assert by_layout, "no regime of the case ends by its layout"
    plan = {law.plan for law in laws}
    assert len(plan) > 1
    for end in by_layout:
        assert "has its best layout at" in end.detail


def test_memory_that_forbids_a_faster_layout_is_said() -> None:
    cluster = SPEC["cluster"]
    plans = SPEC["plans"] | {"recompute": ["none", "full"]}
    wide = allocation_law(envelope_at(20.0, plans=plans))
    assert wide.plan.recompute.value == "none"
    problem = Problem(envelope_at(20.0, plans=plans))
    at = [a.name for a in problem.architectures].index(wide.architecture)
    rows = problem.legal_rows(at)
    _, memory = problem.price(at, rows)
    between = 0.5 * (memory.min() + memory.max()) / 0.92  # only full recomputation fits
    one = {"kind": "explicit", "models": [problem.architectures[at].model_dump()]}
    tight = envelope_at(
        20.0, plans=plans, cluster=cluster | {"memory_bytes": float(between)}, candidates=one
    )
    found = allocation_law(tight)
    assert found.plan.recompute.value == "full"
    assert "memory: a faster layout does not fit" in found.violated
    assert found.slopes is None  # one candidate
    assert found.exponents.nu is None
    assert found.path[0].memory_binds
    assert found.path[0].predicted is None
    assert found.no_path == "the candidates with this layout do not determine the slopes"


def test_models_that_do_not_fit_bound_the_optima_as_a_grid_does() -> None:
    problem = Problem(parse_envelope(SPEC))
    least = []
    for i in range(len(problem.architectures)):
        _, memory = problem.price(i, problem.legal_rows(i))
        least.append(float(memory.min()))
    cap = float(np.median(least)) / 0.92
    found = allocation_law(envelope_at(2000.0, cluster=SPEC["cluster"] | {"memory_bytes": cap}))
    row = found.path[6]
    assert row.no_layout_beyond
    assert not row.in_regime
    assert not found.inside
    assert any(reason.startswith("memory or rules: no layout beyond") for reason in found.violated)
    wide = allocation_law(envelope_at(2000.0))
    assert all(row.no_layout_beyond == () for row in wide.path)


def test_a_law_without_the_terms_is_one_sentence() -> None:
    with pytest.raises(MosaicError, match="law 'chinchilla' must be 'joint'"):
        allocation_law(tiny_envelope(law="chinchilla-epoch"))


def test_no_optimum_is_one_sentence() -> None:
    with pytest.raises(MosaicError, match="no mixture of experts among the candidates"):
        allocation_law(tiny_envelope(memory_fraction=0.001))


def test_a_bandwidth_must_be_above_zero() -> None:
    with pytest.raises(MosaicError, match="bandwidth=0 must be above 0"):
        allocation_law(tiny_envelope(), bandwidth=0.0)


def test_the_document_reads_back() -> None:
    found = one_layout()
    assert AllocationLaw.model_validate_json(found.model_dump_json()) == found


def test_the_figure_has_the_points_of_the_table() -> None:
    pytest.importorskip("plotly")
    found = one_layout()
    figure = path_figure(found)
    exact = [trace for trace in figure.data if trace.name == "exact optimum"]
    assert len(exact) == 4
    assert list(exact[0].x) == [row.budget_flop for row in found.path]
    assert list(exact[0].y) == [row.exact.n_total for row in found.path]
    assert list(exact[2].y) == [row.exact.tokens for row in found.path]


def test_without_plotly_the_figure_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MosaicError, match="A figure needs plotly"):
        path_figure(one_layout())
