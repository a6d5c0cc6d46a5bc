"""What budgets and caps are worth: from multipliers, and from differences of the exact optimum.

The best step of a candidate depends on neither window nor token rule, so the exact optimum under
another window or cap is a matter of the closed form of the tokens; only another memory cap needs
the layouts again.

The exact optimum is one of finitely many candidates. Its loss has kinks where one candidate takes
over from another, and jumps where one becomes infeasible or, under a grid, reaches another ratio.
So a small step gives the slope of one candidate, a wider one an average; the relaxed optimum, which
is of a continuous program, has a slope between. Where they differ, a remark says why.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from math import inf, isfinite, log, log1p
from typing import Any, Literal, NamedTuple

import numpy as np

from mosaic_opt.problem import Problem
from mosaic_opt.relaxation import Array, token_caps
from mosaic_opt.relaxation_result import Elasticity, RelaxedPoint, Remark
from mosaic_opt.relaxation_steps import GB
from mosaic_opt.relaxation_summary import BINDS

STEP = 1e-4
"""Relative step of the differences."""

WIDE_STEP = 0.1
"""The same, for an average over kinks and jumps."""

_APART = 0.2
"""Relative difference of two slopes from which on a remark says why."""

Unit = Literal["day", "token", "token/parameter", "GB", "cost", "kWh"]

_SETS = {"compute": "the window", "window": "the window", "grid": "a listed ratio"}
_TOKEN_ROWS = ("compute", "max_tokens", "max_tokens_per_parameter", "min_tokens_per_parameter")


class Optimum(NamedTuple):
    """The exact optimum; the loss is inf, and the others say nothing, if none is feasible."""

    loss: float  # [nats/token]
    candidate: int
    held_by: str  # what sets its tokens, as `TokenRule.binding` has it


class _Budget(NamedTuple):
    """A budget, and how the envelope changes with it."""

    name: str
    value: float
    unit: Unit
    one: float  # what "one more" is
    row: str  # of the relaxation
    sign: float  # of its multiplier in the slope
    changes: Callable[[float], dict[str, Any]] | None  # None for what is no field


def exact_optimum(problem: Problem, step_s: Array, changes: Mapping[str, Any]) -> Optimum:
    """Return the optimum with best steps [s] under changed fields.

    ``changes`` may name ``window_days`` and fields of the token rule.
    """
    envelope, fields = problem.envelope, dict(changes)
    window = fields.pop("window_days", envelope.window_days)
    other = copy.copy(problem)  # the same candidates and layouts
    other.envelope = envelope.model_copy(
        update={"window_days": window, "tokens": envelope.tokens.model_copy(update=fields)}
    )
    sizes = problem.sizes
    other.sizes = sizes._replace(tokens=sizes.tokens * (window / envelope.window_days))
    losses = other.losses(np.arange(len(step_s)), step_s)
    best = int(np.argmin(losses))
    if not isfinite(losses[best]):
        return Optimum(inf, -1, "")
    held = other.tokens(best, float(step_s[best])).binding
    return Optimum(float(losses[best]), best, held)


def exact_loss(problem: Problem, step_s: Array, changes: Mapping[str, Any]) -> float:
    """Return the least loss of :func:`exact_optimum` [nats/token]; inf if none is feasible."""
    return exact_optimum(problem, step_s, changes).loss


def elasticities(
    problem: Problem,
    multipliers: Mapping[str, float],
    point: RelaxedPoint,
    steps: tuple[Array, Array, Array] | None,
) -> tuple[Elasticity, ...]:
    """Return what the window, a budget of money or energy, each cap and the memory are worth.

    Parameters
    ----------
    problem : Problem
    multipliers : mapping
        Of the relaxation's rows, summed by name [nats/token per unit of logarithm].
    point : RelaxedPoint
        The relaxed optimum.
    steps : tuple of ndarray, optional
        Exact best steps [s] of the candidates under the memory cap, one GB more and one GB less;
        without them there are no differences.
    """
    found = []
    for budget in _budgets(problem):
        relaxed = 0.0 + budget.sign * multipliers.get(budget.row, 0.0) / point.loss
        exact = None if steps is None else _Exact.of(problem, steps[0], budget)
        remarks: tuple[Remark, ...] = ()
        if exact is not None:
            remarks = _remarks(problem, budget, relaxed, exact, multipliers, point)
        elif steps is not None:
            words = "The cap stands for a listed ratio and is no field that could be moved."
            remarks = (Remark(reason="listed", words=words),)
        found.append(
            Elasticity(
                budget=budget.name,
                value=budget.value,
                unit=budget.unit,
                relaxed=relaxed,
                relaxed_per_unit=relaxed * point.loss / budget.value,
                exact=None if exact is None else exact.slope,
                exact_step=STEP,
                exact_wide=None if exact is None else exact.wide,
                wide_step=WIDE_STEP,
                one=budget.one,
                one_more=None if exact is None else _change(exact.now, exact.more),
                one_less=None if exact is None else _change(exact.now, exact.less),
                remarks=remarks,
            )
        )
    if steps is not None:
        found.append(_memory(problem, steps))
    return tuple(found)


def _budgets(problem: Problem) -> list[_Budget]:
    envelope = problem.envelope
    days, spent, devices = envelope.window_days, envelope.budget, envelope.cluster.n_devices
    found = [
        _Budget("window_days", days, "day", 1.0, "compute", -1.0, lambda v: {"window_days": v})
    ]
    if spent is not None:
        # days are proportional to either, so the elasticity is that of the window
        field, unit = ("cost", "cost") if spent.set_by == "cost" else ("energy_kwh", "kWh")
        value = spent.cost if spent.set_by == "cost" else spent.energy_kwh
        assert value is not None

        def bought(amount: float) -> dict[str, Any]:
            other = spent.model_copy(update={field: amount})
            return {"window_days": other.days(devices)}

        name = f"budget.{field}"
        found.append(_Budget(name, value, unit, 1000.0, "compute", -1.0, bought))  # type: ignore[arg-type]
    for name, value in token_caps(problem).items():
        field_of: Callable[[float], dict[str, Any]] | None = _setter(name)
        if envelope.tokens.kind == "grid" and name != "max_tokens":
            field_of = None
        unit = "token" if name == "max_tokens" else "token/parameter"
        sign = 1.0 if name == "min_tokens_per_parameter" else -1.0
        found.append(_Budget(name, value, unit, 0.01 * value, name, sign, field_of))  # type: ignore[arg-type]
    return found


def _setter(name: str) -> Callable[[float], dict[str, Any]]:
    return lambda value: {name: value}


class _Exact(NamedTuple):
    """Exact optima around a budget."""

    now: Optimum
    below: Optimum  # a small step
    above: Optimum
    less: Optimum  # one unit
    more: Optimum
    slope: float | None
    wide: float | None

    @classmethod
    def of(cls, problem: Problem, step_s: Array, budget: _Budget) -> _Exact | None:
        changes = budget.changes
        if changes is None:
            return None

        def at(value: float) -> Optimum:
            fields = changes(value) if value > 0.0 else None
            return _NONE if fields is None else exact_optimum(problem, step_s, fields)

        value = budget.value
        below, above = at(value * (1.0 - STEP)), at(value * (1.0 + STEP))
        narrower, wider = at(value * (1.0 - WIDE_STEP)), at(value * (1.0 + WIDE_STEP))
        return cls(
            now=exact_optimum(problem, step_s, {}),
            below=below,
            above=above,
            less=at(value - budget.one),
            more=at(value + budget.one),
            slope=_slope(below, above, STEP),
            wide=_slope(narrower, wider, WIDE_STEP),
        )


_NONE = Optimum(inf, -1, "")


def _slope(below: Optimum, above: Optimum, step: float) -> float | None:
    if not (isfinite(above.loss) and isfinite(below.loss)):
        return None
    return (log(above.loss) - log(below.loss)) / (log1p(step) - log1p(-step))


def _change(now: Optimum, then: Optimum) -> float | None:
    return then.loss - now.loss if isfinite(now.loss) and isfinite(then.loss) else None


# ---------------------------------------------------------------- remarks


def _remarks(
    problem: Problem,
    budget: _Budget,
    relaxed: float,
    exact: _Exact,
    multipliers: Mapping[str, float],
    point: RelaxedPoint,
) -> tuple[Remark, ...]:
    """Say why the two slopes of a budget differ, and where the exact optimum moves."""
    if exact.slope is None:
        words = f"With {STEP:.2%} more or less no candidate is feasible."
        return (Remark(reason="infeasible", words=words),)
    found = []
    now = exact.now.candidate
    if {exact.below.candidate, exact.above.candidate} != {now}:
        words = (
            f"A step of {STEP:.2%} makes another candidate the optimum, so exact is a difference "
            "across it and no derivative."
        )
        found.append(Remark(reason="candidate", words=words))
    elif abs(relaxed - exact.slope) > max(_APART * max(abs(relaxed), abs(exact.slope)), BINDS):
        found.append(_difference(problem, budget, exact.now, multipliers, point))
    names = [a.name for a in problem.architectures]
    moves = [
        f"one {word} {names[then.candidate]}"
        for word, then in (("more", exact.more), ("less", exact.less))
        if isfinite(then.loss) and then.candidate != now
    ]
    if moves:
        words = f"The optimum is {names[now]}; with {', with '.join(moves)}."
        found.append(Remark(reason="jump", words=words))
    return tuple(found)


def _difference(
    problem: Problem,
    budget: _Budget,
    now: Optimum,
    multipliers: Mapping[str, float],
    point: RelaxedPoint,
) -> Remark:
    rows = [name for name in _TOKEN_ROWS if multipliers.get(name, 0.0) > BINDS]
    relaxed = [_SETS.get(name, name) for name in rows]
    exact = _SETS.get(now.held_by, now.held_by)
    if budget.row == "min_tokens_per_parameter":
        return Remark(
            reason="filter",
            words="A least ratio rules candidates out: it binds the relaxed optimum, and moves the "
            "exact one by jumps alone.",
        )
    if now.held_by == "grid":
        return Remark(
            reason="grid",
            words="The tokens of the exact optimum are a listed ratio, which a small step does not "
            "move: its loss is a step function.",
        )
    if relaxed != [exact]:
        return Remark(
            reason="constraint",
            words=f"The tokens of the exact optimum are set by {exact}, those of the relaxed point "
            f"by {' and '.join(relaxed) or 'none of the budgets, but the range of candidates'}.",
        )
    return Remark(
        reason="point",
        words=f"The tokens of both are set by {exact}, and the relaxed point lies elsewhere: "
        f"{point.n_active:.3g} active parameters against {problem.n_active(now.candidate):.3g}.",
    )


def _memory(problem: Problem, steps: tuple[Array, Array, Array]) -> Elasticity:
    cap = problem.envelope.memory_cap_bytes
    now, more, less = (exact_optimum(problem, s, {}) for s in steps)
    both = isfinite(now.loss) and isfinite(more.loss)
    return Elasticity(
        budget="memory",
        value=cap / GB,
        unit="GB",
        relaxed=None,
        relaxed_per_unit=None,
        exact=(log(more.loss) - log(now.loss)) / log1p(GB / cap) if both else None,
        exact_step=GB / cap,
        exact_wide=None,
        wide_step=None,
        one=1.0,
        one_more=_change(now, more),
        one_less=_change(now, less),
        remarks=(),
    )
