"""How fast the joint law is fitted, beside the plain SciPy script. Prints figures, asserts nothing.

Both fit the same simulated runs, the design of arXiv 2608.10605 at its noise, with a tenth held
out, Huber's function at 0.1 as there: 400 restarts, and then 500 refits of a wild bootstrap. The
plain script is what most public code does: log-sum-exp, L-BFGS-B, default tolerances, with slopes
by finite differences or analytic; and the same with tolerances that let it converge. It runs a
tenth of the fits, and its times are per fit.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable

import numpy as np
from scipy.optimize import minimize
from threadpoolctl import threadpool_limits

from lawfit import FitResult, bootstrap, fit, sample_runs

STARTS, REFITS, PART = 400, 500, 10
DELTA = 0.1

Array = np.ndarray


def terms(theta: Array, x: Array) -> Array:
    """Return the logarithms of the five terms; theta has five log prefactors, six exponents."""
    a, b, c, j, e, alpha, beta, lam, delta, gamma, eta = theta
    total, density, tokens, split = x
    return np.array(
        [
            a - alpha * total,
            b - beta * tokens,
            c - lam * density,
            j - delta * density - gamma * total - eta * split,
            np.full_like(total, e),
        ]
    )


def plain(theta: Array, x: Array, y: Array, scale: float) -> float:
    """Return the objective as a script has it."""
    logs = terms(theta, x)
    top = logs.max(axis=0)
    residual = top + np.log(np.exp(logs - top).sum(axis=0)) - y
    near = np.minimum(np.abs(residual), DELTA)
    return float(scale * (near * (np.abs(residual) - 0.5 * near)).sum())


def analytic(theta: Array, x: Array, y: Array, scale: float) -> tuple[float, Array]:
    """Return the objective and its slopes."""
    logs = terms(theta, x)
    top = logs.max(axis=0)
    each = np.exp(logs - top)
    total = each.sum(axis=0)
    residual = top + np.log(total) - y
    near = np.minimum(np.abs(residual), DELTA)
    pull = scale * np.clip(residual, -DELTA, DELTA) * each / total
    size, density, tokens, split = x
    slopes = [
        *pull.sum(axis=1),
        -(pull[0] * size).sum(),
        -(pull[1] * tokens).sum(),
        -(pull[2] * density).sum(),
        -(pull[3] * density).sum(),
        -(pull[3] * size).sum(),
        -(pull[3] * split).sum(),
    ]
    return scale * (near * (np.abs(residual) - 0.5 * near)).sum(), np.array(slopes)


def random_starts(number: int, seed: int) -> Array:
    """Return starts as scripts draw them: wide in the logarithms, 0.02 to 0.6 in the exponents."""
    draw = np.random.default_rng(seed)
    low = [0, 0, -6, -6, -6, 0.02, 0.02, 0.02, 0.02, 0.02, 0.02]
    high = [6, 8, 1, 4, 1, 0.6, 0.6, 0.6, 1, 0.6, 2]
    return draw.uniform(low, high, (number, 11))


def scipy_way(
    found: FitResult, function: Callable[..., object], scale: float, options: dict[str, float]
) -> tuple[float, float, float, float]:
    """Return ms a restart, ms a refit, the share at the optimum and the best excess."""
    logs = found.train.logs()
    x = np.array([logs.n_total, logs.n_active - logs.n_total, logs.tokens, logs.expert_split])
    jac = function is analytic
    bounds = [(-20, 40)] * 5 + [(0, 3)] * 5 + [(-1, 4)]

    def run(start: Array, y: Array) -> tuple[float, Array]:
        end = minimize(
            function, start, (x, y, scale), jac=jac, method="L-BFGS-B", bounds=bounds,
            options=options,
        )  # fmt: skip
        return float(end.fun) / scale, end.x

    starts = random_starts(STARTS // PART, 0)
    begun = time.perf_counter()
    ends = [run(start, logs.loss) for start in starts]
    restart = (time.perf_counter() - begun) / len(starts)
    values = np.array([value for value, _ in ends])
    best = ends[int(values.argmin())][1]
    fitted = np.asarray(logs.loss)
    residual = np.asarray(logs.loss - np.log(np.exp(terms(best, x)).sum(axis=0)))
    draw = np.random.default_rng(1)
    begun = time.perf_counter()
    for _ in range(REFITS // PART):
        sign = 2.0 * draw.integers(0, 2, len(fitted)) - 1.0
        run(best, fitted - residual + sign * residual)
    refit = (time.perf_counter() - begun) / (REFITS // PART)
    at = float(np.mean(values <= found.objective * (1.0 + 1e-6)))
    return 1e3 * restart, 1e3 * refit, at, float(values.min()) / found.objective - 1.0


def main() -> None:
    """Print every figure."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    print(f"{platform.machine()}, {cores} cores; joint law, 11 coefficients")
    runs = sample_runs()
    options = {"delta": DELTA, "holdout": "nact:0.1"}
    begun = time.perf_counter()
    fit("joint", runs, starts=2, **options)
    print(f"first call, with the compiled kernel from the cache or to be compiled: "
          f"{time.perf_counter() - begun:.1f} s")  # fmt: skip
    begun = time.perf_counter()
    found = fit("joint", runs, starts=STARTS, **options)
    middle = time.perf_counter()
    refits = bootstrap(found, draws=REFITS)
    ended = time.perf_counter()
    fitting, again = middle - begun, ended - middle
    print(
        f"lawfit: {STARTS} restarts {fitting:.2f} s, of which {found.starts_agreeing} agree; "
        f"{REFITS} refits and {found.n_train} for the jackknife {again:.2f} s, "
        f"{refits.not_converged} not converged; together {fitting + again:.2f} s"
    )
    tight = {"ftol": 1e-15, "gtol": 1e-10, "maxcor": 20, "maxiter": 20000, "maxfun": 50000}
    for name, function, scale, how in (
        ("default tolerances, finite differences", plain, 1.0, {}),
        ("default tolerances, analytic slopes", analytic, 1.0, {}),
        ("converging: objective x 1e4, tight, analytic", analytic, 1e4, tight),
    ):
        with threadpool_limits(1, "blas"):
            restart, refit, at, excess = scipy_way(found, function, scale, how)
        whole = 1e-3 * (STARTS * restart + REFITS * refit)
        print(
            f"SciPy, {name}: {restart:.0f} ms a restart, {refit:.0f} ms a refit, so "
            f"{whole:.0f} s for all, {whole / (fitting + again):.0f} times lawfit's; "
            f"{at:.0%} of the restarts within 1e-6 of the optimum, the best {excess:+.1%}"
        )
    restart, refit, _, _ = scipy_way(found, analytic, 1.0, {})
    print(
        f"the second of these with a threaded BLAS: {restart:.0f} ms a restart, "
        f"{refit:.0f} ms a refit"
    )


if __name__ == "__main__":
    main()
