"""What new runs bring, by simulation: losses drawn, laws fitted again, and the spread counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._descent import Problem, descend
from lawfit._information import free_parameters, stated_noise
from lawfit._posynomial import Posynomial, posynomial
from lawfit._values import FloatArray, LawError
from lawfit.base import ScalingLaw
from lawfit.candidates import Candidates
from lawfit.goals import ChoiceGoal, CoefficientGoal, Goal, NextRuns, PredictionGoal, named
from lawfit.result import FitResult
from lawfit.runs import RUN_VARIABLES

__all__ = ["SimulatedError", "SimulatedRuns", "simulate_next_runs"]


class SimulatedError(BaseModel):
    """A standard error, simulated.

    Attributes
    ----------
    name : str
        As in `ExpectedError`.
    size : float
        Standard deviation over the sets.
    uncertainty : float
        Its own standard error, were the estimates normal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    size: float
    uncertainty: float


class SimulatedRuns(BaseModel):
    """What runs brought in a simulation.

    Attributes
    ----------
    errors : tuple of SimulatedError
        Of what the goal names.
    regret : float or None
        Of a choice: mean loss of the architecture chosen over that of the best [nats/token].
    regret_uncertainty : float or None
        Standard error of that mean.
    sets : int
        Sets of losses.
    not_converged : int
        Refits that were not; they count.
    noise : float
        Standard deviation of ``log L`` that was drawn [-].
    seed : int
        Of the generator.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[str] = "FITTED"

    errors: tuple[SimulatedError, ...]
    regret: float | None
    regret_uncertainty: float | None
    sets: int
    not_converged: int
    noise: float
    seed: int

    def error(self, name: str) -> SimulatedError:
        """Return the error of one name.

        Raises
        ------
        LawError
            The goal did not name it.
        """
        return named(self.errors, name)


def simulate_next_runs(
    found: FitResult,
    runs: NextRuns | Candidates | None,
    goal: Goal,
    *,
    sets: int = 400,
    noise: float | None = None,
    seed: int = 0,
) -> SimulatedRuns:
    """Simulate what runs would bring, with no linear approximation.

    For coefficients and predictions the fitted law is the truth: losses of the old and the new
    runs are drawn with normal noise, and the law is fitted to each set. For a choice the losses
    of the old runs stay, a truth is drawn by `FitResult.ensemble` for each set, and only the
    losses of the new runs are drawn from it. Equal seeds give the old runs equal noise, and
    equal truths, so that designs can be compared set by set.

    Parameters
    ----------
    found : FitResult
        What is known so far.
    runs : NextRuns, Candidates or None
        The new runs, a row of candidates for each; None is no new run.
    goal : CoefficientGoal, PredictionGoal or ChoiceGoal
        What they are for.
    sets : int
        How many sets of losses, at least 2.
    noise : float, optional
        As for `next_runs`.
    seed : int
        Of the generator.

    Raises
    ------
    LawError
        An argument is illegal, or a choice finds no ensemble to draw from.
    """
    if sets < 2:
        raise LawError(f"sets is {sets}, but must be at least 2; the nearest is 2.")
    size = stated_noise(found, noise)
    table = _joined(found, runs.table() if isinstance(runs, NextRuns) else runs)
    generator = np.random.default_rng(seed)
    old, new = len(found.train), len(table.weight) - len(found.train)
    error = np.concatenate(
        [generator.standard_normal((sets, rows)) for rows in (old, new)], axis=1
    ) * (size / np.sqrt(table.weight))
    truths: tuple[ScalingLaw, ...] = (found.law,)
    if isinstance(goal, ChoiceGoal):
        truths = found.ensemble(sets, seed).laws
    target = error + np.log([law.loss(**table.point) for law in truths])
    if isinstance(goal, ChoiceGoal):
        target[:, :old] = found.train.logs().loss
    delta = math.inf if found.delta is None else found.delta
    problem = Problem.of(table.form, target, table.weight, delta)
    start = table.form.point({name: c.value for name, c in found.coefficients.items()})
    ends = descend(problem, np.repeat(start[None], sets, axis=0))
    laws = [found.law.model_copy(update=table.form.raw(end)) for end in ends.points]
    free = tuple(free_parameters(found, table.form))
    names, miss = _misses(goal, free, found.law, laws, truths)
    spread = miss.std(axis=0, ddof=1)
    regret = _regrets(goal, laws, truths) if isinstance(goal, ChoiceGoal) else None
    return SimulatedRuns(
        errors=tuple(
            SimulatedError(name=name, size=x, uncertainty=x / math.sqrt(2.0 * (sets - 1)))
            for name, x in zip(names, spread.tolist(), strict=True)
        ),
        regret=None if regret is None else float(regret.mean()),
        regret_uncertainty=None if regret is None else float(regret.std() / math.sqrt(sets)),
        sets=sets,
        not_converged=int((~ends.converged).sum()),
        noise=size,
        seed=seed,
    )


class _Joined(NamedTuple):
    """Old runs, then new ones."""

    point: dict[str, FloatArray]
    weight: FloatArray
    form: Posynomial


def _joined(found: FitResult, new: Candidates | None) -> _Joined:
    train = found.train
    point = {
        name: np.concatenate([train.column(name), [] if new is None else new.column(name)])
        for name in RUN_VARIABLES
    }
    more = 0 if new is None else len(new)
    log_loss = np.log(np.asarray(found.law.loss(**point)))
    form = posynomial(found.law, np.log(np.array([*point.values()])), log_loss, found.fixed)
    return _Joined(point, np.concatenate([train.column("weight"), np.ones(more)]), form)


def _misses(
    goal: Goal,
    free: tuple[str, ...],
    fitted: ScalingLaw,
    laws: Sequence[ScalingLaw],
    truths: tuple[ScalingLaw, ...],
) -> tuple[tuple[str, ...], FloatArray]:
    """Return what the goal names, and estimate minus truth, shape (sets, names)."""
    if isinstance(goal, CoefficientGoal):
        names = tuple(free[k] for k in goal.among(free))
        found, true = (
            np.array([[_coefficient(law, name) for name in names] for law in some])
            for some in (laws, truths)
        )
        return names, found - true
    point = {name: np.atleast_1d(getattr(goal, name)).astype(float) for name in RUN_VARIABLES}
    found, true = (np.array([law.loss(**point) for law in some]) for some in (laws, truths))
    if isinstance(goal, PredictionGoal):
        return ("log L",), np.log(found) - np.log(true)
    lead = goal.lead(fitted)
    rivals = [k for k in range(found.shape[1]) if k != lead]
    miss = found - true
    return goal.differences(lead), miss[:, rivals] - miss[:, [lead]]


def _coefficient(law: ScalingLaw, name: str) -> float:
    value = float(getattr(law, name.removeprefix("log ")))
    return math.log(max(value, 1e-300)) if name.startswith("log ") else value


def _regrets(
    goal: ChoiceGoal, laws: Sequence[ScalingLaw], truths: tuple[ScalingLaw, ...]
) -> FloatArray:
    """Return the loss of what each law chooses over the least under its truth, shape (sets,)."""
    point = {name: np.array(getattr(goal, name), dtype=float) for name in RUN_VARIABLES}
    chosen = np.array([goal.lead(law) for law in laws])
    true = np.array([law.loss(**point) for law in truths])
    return np.asarray(true[np.arange(len(true)), chosen] - true.min(axis=1))
