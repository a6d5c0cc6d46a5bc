"""Which runs to train next: those that tighten a coefficient, a prediction or a choice the most."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np

from lawfit._choice import for_choice
from lawfit._criteria import LogVariance, Regret, normals
from lawfit._information import Known, known, stated_noise
from lawfit._relaxed import relaxed
from lawfit._search import Purse, whole
from lawfit._values import FloatArray, LawError
from lawfit.base import ScalingLaw
from lawfit.candidates import Candidates, rounded_up
from lawfit.ensemble import LawEnsemble
from lawfit.goals import (
    ChoiceGoal,
    ChosenRun,
    CoefficientGoal,
    ExpectedError,
    Goal,
    NextRuns,
    PredictionGoal,
)
from lawfit.laws import PerSplitLaw
from lawfit.result import FitResult
from lawfit.runs import RUN_VARIABLES, Remark
from lawfit.validity import Interval, ValidRange

__all__ = ["next_runs"]

_SHOWN = 8192
"""Sample of the regrets that are reported."""

_LITTLE = 0.95
"""Ratio of errors after to before from which the runs are said to tell little."""


def next_runs(
    found: FitResult,
    budget: float,
    *,
    goal: Goal | None = None,
    candidates: Candidates | None = None,
    most_runs: int | None = None,
    noise: float | None = None,
    average_over: LawEnsemble | None = None,
    seed: int = 0,
) -> NextRuns:
    """Choose the runs that, within a budget, bring the most for a goal.

    The information of runs is Fisher's at the fitted law, so the choice is as good as the law is
    near (a locally optimal design; Chernoff, Ann. Math. Statist. 24:586, 1953); `average_over`
    takes the mean over laws that may be true (Chaloner and Verdinelli, Statist. Sci. 10:273,
    1995). Coefficients that are held or at a bound count as known. The new runs are to be fitted
    together with the old ones, by the same objective.

    Parameters
    ----------
    found : FitResult
        What is known so far.
    budget : float
        Of all runs, in the unit of the candidates' costs [FLOP].
    goal : CoefficientGoal, PredictionGoal, ChoiceGoal or None
        What the runs are for; None is all coefficients.
    candidates : Candidates, optional
        Runs to choose from, each as often as wanted; `Candidates.grid` of the runs of the fit
        where none are given.
    most_runs : int, optional
        How many runs at most.
    noise : float, optional
        Standard deviation of ``log L`` between seeds, of a run of weight 1 [-]; that of the
        residuals where none is given.
    average_over : LawEnsemble, optional
        Laws of the fitted kind over which to average the criterion, such as 20 of
        `FitResult.ensemble`.
    seed : int
        Of the sample that a choice is averaged over.

    Returns
    -------
    NextRuns
        The runs, the errors to expect before and after, and how near to the best they are.

    Raises
    ------
    LawError
        The budget buys no candidate, an argument is illegal, or the runs of the fit determine no
        law.
    """
    goal = CoefficientGoal() if goal is None else goal
    possible = Candidates.grid(found.train) if candidates is None else candidates
    purse = _purse(possible, budget, most_runs)
    size = stated_noise(found, noise)
    laws = _laws(found, average_over)
    points = _points(goal, found.law)
    here, *views = (known(found, law, size, possible, points) for law in (found.law, *laws))
    lead = goal.lead(found.law) if isinstance(goal, ChoiceGoal) else 0
    rows, names, criterion = _wanted(goal, here, lead)
    if criterion == "regret":
        answer = _Answer(for_choice(_regret(views, here, seed), purse), None, None)
    else:
        runs = np.array([view.candidates for view in views])
        answer = _of_variance(
            LogVariance(runs, np.array([_wanted(goal, view, lead)[0] for view in views])), purse
        )
    counts, none = answer.counts, np.zeros(len(possible))
    before, after = (_errors(here, rows, n) for n in (none, counts))
    errors = tuple(
        ExpectedError(name=name, before=old, after=new)
        for name, old, new in zip(names, before, after, strict=True)
    )
    regret = _regret(views, here, seed, _SHOWN) if isinstance(goal, ChoiceGoal) else None
    chosen = _chosen(found, possible, counts)
    return NextRuns(
        goal=goal,
        runs=chosen,
        cost=float(counts @ purse.cost),
        budget=budget,
        candidates=int(purse.fits(none).sum()),
        criterion=criterion,
        errors=errors,
        efficiency=answer.efficiency,
        gain_share=answer.gain_share,
        regret_before=None if regret is None else regret.value(none),
        regret_after=None if regret is None else regret.value(counts),
        noise=size,
        noise_basis="FITTED" if noise is None else "STATED",
        laws=len(laws),
        remarks=tuple(_remarks(found, goal, chosen, errors, purse, counts)),
    )


class _Answer(NamedTuple):
    """How often each candidate is run, and the bounds of `NextRuns` on it."""

    counts: FloatArray
    efficiency: float | None
    gain_share: float | None


def _of_variance(criterion: LogVariance, purse: Purse) -> _Answer:
    best = relaxed(criterion, purse)
    counts = whole(criterion, purse, [best.counts])
    before, after = criterion.value(np.zeros_like(counts)), criterion.value(counts)
    share = (before - after) / (before - best.bound) if before > best.bound else 1.0
    return _Answer(counts, min(1.0, math.exp(best.bound - after)), min(1.0, share))


def _regret(views: list[Known], here: Known, seed: int, points: int | None = None) -> Regret:
    loss = np.exp(here.log_loss)
    return Regret.of(
        runs=np.array([view.candidates for view in views]),
        spread=np.array([np.exp(view.log_loss)[:, None] * view.points for view in views]),
        mean=loss,
        sample=normals(len(loss), seed, *(() if points is None else (points,))),
    )


def _wanted(
    goal: Goal, at: Known, lead: int
) -> tuple[FloatArray, tuple[str, ...], Literal["D", "D_s", "c", "regret"]]:
    """Return what is to be known, a row each, with names, and the criterion for it.

    `lead` is the architecture that differences are taken to.
    """
    if isinstance(goal, CoefficientGoal):
        order = goal.among(at.names)
        kind: Literal["D", "D_s", "c"] = "D" if len(order) == len(at.names) else "D_s"
        return (
            at.raw[order],
            tuple(at.names[k] for k in order),
            "c" if len(order) == 1 else kind,
        )
    if isinstance(goal, PredictionGoal):
        return at.points, ("log L",), "c"
    loss = np.exp(at.log_loss)
    slopes = loss[:, None] * at.points
    rivals = [k for k in range(len(loss)) if k != lead]
    rows = slopes[rivals] - slopes[lead]
    if not (np.abs(rows) > 0.0).any():
        raise LawError(
            "the architectures of the choice are all the same to this law, so no run tells them "
            "apart."
        )
    return rows, goal.differences(lead), "c" if len(rows) == 1 else "regret"


def _errors(here: Known, rows: FloatArray, counts: FloatArray) -> list[float]:
    """Return the standard error of each row."""
    some = here.candidates * np.sqrt(counts)[:, None]
    information = np.eye(some.shape[1]) + some.T @ some
    return [float(x) for x in np.sqrt((rows.T * np.linalg.solve(information, rows.T)).sum(axis=0))]


def _purse(candidates: Candidates, budget: float, most_runs: int | None) -> Purse:
    cost = candidates.column("cost")
    if not (math.isfinite(budget) and budget >= cost.min()):
        raise LawError(
            f"budget is {budget:g}, but must be finite and buy the cheapest of {len(cost)} "
            f"candidates; the nearest legal value is {rounded_up(cost.min())}."
        )
    if most_runs is not None and most_runs < 1:
        raise LawError(f"most_runs is {most_runs}, but must be at least 1; the nearest is 1.")
    return Purse(cost, budget, most_runs)


def _laws(found: FitResult, ensemble: LawEnsemble | None) -> tuple[ScalingLaw, ...]:
    own = found.law
    if ensemble is None:
        return (own,)
    for law in ensemble.laws:
        split = [x.expert_split for x in (law, own) if isinstance(x, PerSplitLaw)]
        if type(law) is not type(own) or len(set(split)) > 1:
            raise LawError(
                f"average_over holds a {type(law).__name__} of another kind than the fit, which is "
                f"a {type(own).__name__}; give draws of the fit, as FitResult.ensemble does."
            )
    return ensemble.laws


def _points(goal: Goal, law: ScalingLaw) -> FloatArray:
    """Return the logarithms of the points that a goal asks of, shape (4, points)."""
    if isinstance(goal, CoefficientGoal):
        return np.zeros((4, 0))
    point = {name: np.atleast_1d(getattr(goal, name)).astype(float) for name in RUN_VARIABLES}
    law.loss(**point)  # refuses what is no run
    return np.asarray(np.log(np.array(list(point.values()))))


def _chosen(found: FitResult, possible: Candidates, counts: FloatArray) -> tuple[ChosenRun, ...]:
    """Return the runs of a design, dearest first."""
    bounds = _widened(found.law.valid_range)
    runs = []
    for at in np.flatnonzero(counts):
        point = {name: getattr(possible, name)[at] for name in RUN_VARIABLES}
        outside = bounds.flags(**point)
        runs.append(
            ChosenRun(
                **point,
                repeats=int(counts[at]),
                cost=float(counts[at]) * possible.cost[at],
                flags=found.law.valid_range.flags(**point) if outside else (),
            )
        )
    return tuple(sorted(runs, key=lambda run: -run.cost / run.repeats))


def _widened(bounds: ValidRange) -> ValidRange:
    """Return a range with ends that rounding does not pass."""

    def wide(ends: Interval | None) -> Interval | None:
        return None if ends is None else (ends[0] * (1 - 1e-9) - 1e-9, ends[1] * (1 + 1e-9) + 1e-9)

    return ValidRange(**{name: wide(getattr(bounds, name)) for name in ValidRange.model_fields})


def _remarks(
    found: FitResult,
    goal: Goal,
    chosen: tuple[ChosenRun, ...],
    errors: tuple[ExpectedError, ...],
    purse: Purse,
    counts: FloatArray,
) -> list[Remark]:
    remarks = []

    def say(reason: str, sentence: str) -> None:
        remarks.append(Remark(reason=reason, sentence=sentence))

    if not found.converged:
        say(
            "not_converged",
            "The fit is not known to be the optimum, and the runs are chosen at its law; fit with "
            "more starts first.",
        )
    held = [name for name, c in found.coefficients.items() if c.fixed or c.at_bound]
    if held:
        say(
            "held",
            f"{', '.join(held)} {'is' if len(held) == 1 else 'are'} held or at a bound and counted "
            "as known, so the errors leave out what they add.",
        )
    outside = sum(run.repeats for run in chosen if run.flags)
    if outside:
        say(
            "runs_outside",
            f"{outside} of {int(counts.sum())} runs lie outside the range of the fit, where the "
            "law is extrapolated: what they tell rests on its form.",
        )
    if isinstance(goal, PredictionGoal | ChoiceGoal):
        for point in np.exp(_points(goal, found.law)).T.tolist():
            flags = _widened(found.law.valid_range).flags(
                **dict(zip(RUN_VARIABLES, point, strict=True))
            )
            if flags:
                say(
                    "goal_outside",
                    "The goal lies outside the range of the fit, so the errors are those of the "
                    f"coefficients, and not of the form: {flags[0]}",
                )
                break
    spent = float(counts @ purse.cost)
    if spent < 0.9 * purse.budget:
        limit = purse.most_runs is not None and counts.sum() >= purse.most_runs
        why = "most_runs is reached" if limit else "no other candidate that fits gains"
        say("unspent", f"{1.0 - spent / purse.budget:.0%} of the budget is left: {why}.")
    if all(each.after > _LITTLE * each.before for each in errors):
        say(
            "little_gain",
            f"The runs narrow no error by more than {1.0 - _LITTLE:.0%}; another budget or other "
            "candidates would have to.",
        )
    return remarks
