"""Fits that stop early: SciPy's L-BFGS-B as most public scripts for scaling laws call it.

The objective is a sum of Huber's function of ``log L`` over the runs, about 1e-3 at the optimum,
and is not scaled; the parameters are logarithms of prefactors, not centred, and exponents. L-BFGS-B
ends where a step gains less than ``ftol = 2.2e-9`` of ``max(|f|, 1)``, which for such an objective
is an absolute rule that most steps meet, or where no slope exceeds ``gtol = 1e-5``. Nothing here
is for use but to compare with.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from lawfit._descent import Found, Problem, stationarity
from lawfit._refit import AtOptimum, at_optimum, at_point
from lawfit._values import FloatArray
from lawfit.fitting import starting_points
from lawfit.result import FitResult

Progress = Callable[[int, int], None]


def early_fit(found: FitResult, seed: int) -> AtOptimum:
    """Return the best of as many random starts as the fit had, each stopped early."""
    centred = at_optimum(found).form
    problem = at_optimum(found, centred.names[: centred.terms]).problem
    form, middle = problem.form, float(np.median(problem.log_loss))
    starts = starting_points(centred, middle, found.starts, np.random.default_rng(seed))
    starts[:, : form.terms] -= starts[:, form.terms :] @ (centred.centre - form.centre).T
    ends = early_stops(problem, starts, None)
    return at_point(problem, ends.points[int(np.argmin(ends.value))])


def early_stops(problem: Problem, starts: FloatArray, progress: Progress | None) -> Found:
    """Return where L-BFGS-B ends from each start with its default tolerances.

    Whether an end is an optimum is for the rules of `descend` to say, and not for the optimizer.
    """
    from scipy.optimize import minimize
    from threadpoolctl import threadpool_limits

    from lawfit._newton import derivatives, terms_of

    points = starts.copy()
    terms, size = terms_of(problem.form), starts.shape[1]
    hessian, vectors = np.empty((size, size)), np.empty((3, size))
    with threadpool_limits(1, "blas"):  # its small products are 20 times slower in threads
        for i, start in enumerate(starts):
            one = problem.at(slice(i, i + 1))

            def objective(point: FloatArray, one: Problem = one) -> tuple[float, FloatArray]:
                data = one.log_loss[0], one.weight[0], one.delta
                total = derivatives(terms, *data, 0.0, point, hessian, vectors)
                return total, vectors[0].copy()

            bounds = list(zip(one.lower[0], one.upper[0], strict=True))
            end = minimize(objective, start, jac=True, method="L-BFGS-B", bounds=bounds)
            points[i] = end.x
            if progress is not None:
                progress(i + 1, len(starts))
    return stationarity(problem, points)
