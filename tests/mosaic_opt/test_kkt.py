"""Appendix D on a synthetic power-law MFU: exact optima of dense grids follow the law."""

from __future__ import annotations

from math import log

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lawfit import JointLaw, load_law
from mosaic_opt.allocation.kkt import (
    Edge,
    Geometry,
    Point,
    Slopes,
    along,
    best_at_budget,
    conditions,
    edges,
    exponents,
    fit_slopes,
    losses_at,
    residuals,
    stationary_point,
)

TABLE2 = load_law("mosaic-table2")
assert isinstance(TABLE2, JointLaw)
LAW: JointLaw = TABLE2
W_N, W_S, W_G = 0.05, 0.1, 0.3
N0, R0, G0, M0 = 3e11, 0.05, 4.0, 0.2


def mfu_of(n: np.ndarray, r: np.ndarray, g: np.ndarray) -> np.ndarray:
    return M0 * (n / N0) ** W_N * (r / R0) ** W_S * (g / G0) ** -W_G


def dense(centre: Point, step: float, half: int) -> Geometry:
    """A grid around a point, ``step`` apart in every logarithm."""
    offsets = step * np.arange(-half, half + 1) + 0.31 * step
    axes = (np.exp(log(x) + offsets) for x in centre[:3])
    n, r, g = (a.ravel() for a in np.meshgrid(*axes, indexing="ij"))
    return Geometry(n, r, g, mfu_of(n, r, g))


def true_slopes() -> Slopes:
    return Slopes(W_N, W_S, W_G, 0.0, 0.0, 0.0, log(M0), 0.0, 0)


def optimum(budget: float) -> Point:
    found = stationary_point(LAW, true_slopes(), Point(N0, R0, G0, 1.0, budget))
    assert found is not None
    return found


def loss_of(point: Point) -> float:
    n, r, g = (np.array([x]) for x in point[:3])
    return float(losses_at(LAW, Geometry(n, r, g, mfu_of(n, r, g)), point.budget)[0])


BUDGETS = [1e23, 1e24, 1e25, 1e26]


@pytest.mark.parametrize("budget", BUDGETS)
def test_the_stationary_point_meets_28_and_the_budget(budget: float) -> None:
    point = optimum(budget)
    assert residuals(LAW, true_slopes(), point) == pytest.approx((0.0, 0.0, 0.0), abs=1e-12)
    n, r, g, tokens, _ = point
    mfu = float(mfu_of(np.array([n]), np.array([r]), np.array([g]))[0])
    assert 6.0 * n * r * tokens == pytest.approx(budget * mfu, rel=1e-12)


@given(st.sampled_from(BUDGETS), st.tuples(*[st.floats(-1.0, 1.0)] * 3))
def test_no_point_at_the_same_budget_is_better(
    budget: float, move: tuple[float, float, float]
) -> None:
    point = optimum(budget)
    shift = np.exp(0.5 * np.array(move))
    other = point._replace(
        n_total=point.n_total * float(shift[0]),
        one_minus_s=point.one_minus_s * float(shift[1]),
        expert_split=point.expert_split * float(shift[2]),
    )
    assert loss_of(other) >= loss_of(point) * (1.0 - 1e-14)


@given(st.sampled_from(BUDGETS), st.tuples(*[st.floats(-0.5, 0.5)] * 3))
def test_residuals_are_the_derivatives_of_the_loss(
    budget: float, move: tuple[float, float, float]
) -> None:
    """(28) comes from the three derivatives by eliminating the interaction term."""
    at = optimum(budget)
    n, r, g = (float(x * np.exp(m)) for x, m in zip(at[:3], move, strict=True))
    mfu = float(mfu_of(np.array([n]), np.array([r]), np.array([g]))[0])
    point = Point(n, r, g, budget * mfu / (6.0 * n * r), budget)
    h = 1e-5

    def derivative(axis: int) -> float:
        def moved(sign: float) -> float:
            fields = list(point)
            fields[axis] *= float(np.exp(sign * h))
            return loss_of(Point(*fields))

        return (moved(1.0) - moved(-1.0)) / (2.0 * h)

    data = LAW.beta * LAW.b * point.tokens**-LAW.beta
    d_n, d_r, d_g = (derivative(axis) / data for axis in range(3))
    found = residuals(LAW, true_slopes(), point)
    assert found.expert_split == pytest.approx(-d_g, abs=1e-6)
    assert found.n_total == pytest.approx(-d_n + LAW.gamma / LAW.eta * d_g, abs=1e-6)
    assert found.one_minus_s == pytest.approx(-d_r + LAW.delta / LAW.eta * d_g, abs=1e-6)


@pytest.mark.parametrize("step", [0.1, 0.05])
def test_exact_optima_of_a_dense_grid_follow_the_path_to_its_resolution(step: float) -> None:
    start = optimum(1e24)
    law = exponents(LAW, true_slopes())
    for budget in np.geomspace(3e22, 3e25, 7):
        predicted = along(law, start, float(budget))
        row, exact = best_at_budget(LAW, dense(predicted, step, 20), float(budget))
        geometry = dense(predicted, step, 20)
        assert edges(geometry.logs, row) == ()  # the grid does not end there
        for found, expected in zip(exact[:3], predicted[:3], strict=True):
            assert abs(log(found / expected)) <= step
        assert log(exact.tokens / predicted.tokens) == pytest.approx(0.0, abs=2.5 * step)
        assert loss_of(predicted) <= loss_of(exact) <= loss_of(predicted) + 0.05 * step**2


def test_one_grid_for_all_budgets_gives_nu_and_the_other_exponents() -> None:
    law = exponents(LAW, true_slopes())
    budgets = np.geomspace(1e23, 1e26, 13)
    ends = optimum(1e23), optimum(1e26)
    axes = []
    for a, b in zip(ends[0][:3], ends[1][:3], strict=True):
        low, high = sorted((log(a), log(b)))
        axes.append(np.exp(np.arange(low - 0.3, high + 0.3, 0.05)))
    n, r, g = (x.ravel() for x in np.meshgrid(*axes, indexing="ij"))
    geometry = Geometry(n, r, g, mfu_of(n, r, g))
    points = [best_at_budget(LAW, geometry, float(c))[1] for c in budgets]
    x = np.log(budgets)
    for column, expected in zip(
        range(4), (law.nu, law.p * law.nu, law.g * law.nu, law.rho * law.nu), strict=True
    ):
        y = np.log([point[column] for point in points])
        assert np.polyfit(x, y, 1)[0] == pytest.approx(expected, abs=0.05 / log(1e3) * 2.0)


def test_the_fit_finds_the_slopes_of_a_power_law() -> None:
    geometry = dense(Point(N0, R0, G0, 1.0, 1.0), 0.3, 2)
    found = fit_slopes(geometry, 40, log(2.0))
    assert found is not None
    assert (found.w_n, found.w_s, found.w_g) == pytest.approx((W_N, W_S, W_G), abs=1e-10)
    assert found.log_mfu == pytest.approx(log(geometry.mfu[40]), abs=1e-10)
    assert found.rms < 1e-10
    assert max(found.w_n_error, found.w_s_error, found.w_g_error) < 1e-9


def test_the_standard_errors_cover_the_slopes_of_a_noisy_power_law() -> None:
    rng = np.random.default_rng(7)
    clean = dense(Point(N0, R0, G0, 1.0, 1.0), 0.3, 2)
    deviations = []
    for _ in range(200):
        noisy = clean._replace(mfu=clean.mfu * np.exp(0.03 * rng.standard_normal(len(clean.mfu))))
        found = fit_slopes(noisy, 62, log(2.0))
        assert found is not None
        deviations.append(
            (
                (found.w_n - W_N) / found.w_n_error,
                (found.w_s - W_S) / found.w_s_error,
                (found.w_g - W_G) / found.w_g_error,
            )
        )
    spread = np.std(np.array(deviations), axis=0)
    assert np.all((spread > 0.8) & (spread < 1.25))


def test_too_few_candidates_or_a_plane_determine_no_slopes() -> None:
    geometry = dense(Point(N0, R0, G0, 1.0, 1.0), 0.3, 1)
    assert fit_slopes(Geometry(*(c[:4] for c in geometry)), 0, 1.0) is None
    flat = geometry._replace(expert_split=np.full_like(geometry.expert_split, 4.0))
    assert fit_slopes(flat, 13, 1.0) is None
    assert fit_slopes(geometry, 13, 1.0) is not None


def test_without_a_penalty_on_finer_experts_there_is_no_optimum_inside() -> None:
    free = true_slopes()._replace(w_g=0.0)
    assert not conditions(LAW, free).hold
    assert stationary_point(LAW, free, Point(N0, R0, G0, 1.0, 1e24)) is None
    steep = true_slopes()._replace(w_n=1.2)
    assert conditions(LAW, steep).n_total < 0.0
    assert stationary_point(LAW, steep, Point(N0, R0, G0, 1.0, 1e24)) is None


def test_exponents_of_table_2() -> None:
    found = exponents(LAW, true_slopes())
    assert found.p == pytest.approx(0.1048 / 0.1249)
    assert found.rho == pytest.approx(0.1048 / 0.2070)
    assert found.g == pytest.approx((0.1048 - 0.1702 - 0.1048 * 0.5567 / 0.1249) / 0.9513)
    expected = 1.0 / ((1 - W_N) + (1 - W_S) * found.p + found.rho + W_G * found.g)
    assert found.nu == pytest.approx(expected)


def test_edges_of_a_box_and_of_what_does_not_vary() -> None:
    axes = np.meshgrid([0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], indexing="ij")
    box = np.column_stack([a.ravel() for a in axes])
    assert edges(box, 13) == ()
    assert edges(box, 13 + 9) == (Edge("n_total", "largest"),)
    assert set(edges(box, 0)) == {
        Edge("n_total", "least"),
        Edge("one_minus_s", "least"),
        Edge("expert_split", "least"),
    }
    plane = box[box[:, 2] == 1.0]
    assert edges(plane, 4) == (Edge("expert_split", "fixed"),)
    line = np.column_stack([np.arange(3.0), np.zeros(3), np.zeros(3)])
    assert Edge("n_total", "largest") in edges(line, 2)
    assert len(edges(line, 1)) == 2
    assert len(edges(np.zeros((1, 3)), 0)) == 3
