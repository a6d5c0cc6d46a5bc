"""What budgets and caps are worth: from multipliers, and from differences of the exact optimum.

The best step of a candidate depends on neither window nor token rule, so the exact optimum under
another window or cap is a matter of the closed form of the tokens; only another memory cap needs
the layouts again.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from math import inf, isfinite, log, log1p
from typing import Any, Literal

from mosaic_opt.problem import Problem
from mosaic_opt.relaxation import Array, points_of, token_caps
from mosaic_opt.relaxation_result import Elasticity

STEP = 1e-4
"""Relative step of the differences."""

GB = 1e9

_UNITS: dict[str, Literal["day", "token", "token/parameter"]] = {
    "window_days": "day",
    "max_tokens": "token",
    "max_tokens_per_parameter": "token/parameter",
    "min_tokens_per_parameter": "token/parameter",
}


def exact_loss(problem: Problem, step_s: Array, changes: Mapping[str, Any]) -> float:
    """Return the least loss with best steps [s] under changed fields; inf if none is feasible.

    ``changes`` may name ``window_days`` and fields of the token rule.
    """
    envelope, fields = problem.envelope, dict(changes)
    window = fields.pop("window_days", envelope.window_days)
    rule = envelope.tokens.model_copy(update=fields)
    other = copy.copy(problem)  # the same candidates and layouts
    other.envelope = envelope.model_copy(update={"window_days": window, "tokens": rule})
    losses = points_of(other, step_s).loss
    return float(losses.min()) if len(losses) else inf


def elasticities(
    problem: Problem,
    multipliers: Mapping[str, float],
    primal: float,
    steps: tuple[Array, Array, Array] | None,
) -> tuple[Elasticity, ...]:
    """Return what the window, each cap and the memory are worth.

    Parameters
    ----------
    problem : Problem
    multipliers : mapping
        Of the relaxation's rows, summed by name [nats/token per unit of logarithm].
    primal : float
        Relaxed loss [nats/token].
    steps : tuple of ndarray, optional
        Exact best steps [s] of the candidates under the memory cap, one GB more and one GB less;
        without them there are no differences.
    """
    rule = problem.envelope.tokens
    budgets = {"window_days": problem.envelope.window_days, **token_caps(problem)}
    now = inf if steps is None else exact_loss(problem, steps[0], {})
    found = []
    for name, value in budgets.items():
        row = "compute" if name == "window_days" else name
        sign = 1.0 if name == "min_tokens_per_parameter" else -1.0
        relaxed = 0.0 + sign * multipliers.get(row, 0.0) / primal
        unit = _UNITS[name]
        # a cap that stands for listed ratios is no field that could be moved
        movable = name == "window_days" or getattr(rule, name) == value
        exact = one_more = one_less = None
        if steps is not None and movable:
            one = 1.0 if name == "window_days" else 0.01 * value
            exact = _slope(problem, steps[0], name, value)
            one_more = _change(problem, steps[0], now, name, value + one)
            one_less = _change(problem, steps[0], now, name, value - one)
        found.append(
            Elasticity(
                budget=name,
                value=value,
                unit=unit,
                relaxed=relaxed,
                relaxed_per_unit=relaxed * primal / value,
                exact=exact,
                exact_step=STEP,
                one_more=one_more,
                one_less=one_less,
            )
        )
    if steps is not None:
        found.append(_memory(problem, steps))
    return tuple(found)


def _slope(problem: Problem, step_s: Array, name: str, value: float) -> float | None:
    above = exact_loss(problem, step_s, {name: value * (1.0 + STEP)})
    below = exact_loss(problem, step_s, {name: value * (1.0 - STEP)})
    if not (isfinite(above) and isfinite(below)):
        return None
    return (log(above) - log(below)) / (log(1.0 + STEP) - log(1.0 - STEP))


def _change(problem: Problem, step_s: Array, now: float, name: str, value: float) -> float | None:
    if value <= 0.0:
        return None
    then = exact_loss(problem, step_s, {name: value})
    return then - now if isfinite(now) and isfinite(then) else None


def _memory(problem: Problem, steps: tuple[Array, Array, Array]) -> Elasticity:
    cap = problem.envelope.memory_cap_bytes
    now, more, less = (exact_loss(problem, s, {}) for s in steps)
    both = isfinite(now) and isfinite(more)
    return Elasticity(
        budget="memory",
        value=cap / GB,
        unit="GB",
        relaxed=None,
        relaxed_per_unit=None,
        exact=(log(more) - log(now)) / log1p(GB / cap) if both else None,
        exact_step=GB / cap,
        one_more=more - now if both else None,
        one_less=less - now if isfinite(now) and isfinite(less) else None,
    )
