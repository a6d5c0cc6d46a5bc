"""What new runs are for, and the answer of which to train."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Protocol, TypeAlias, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lawfit._values import LawError
from lawfit.base import ScalingLaw
from lawfit.candidates import Candidates
from lawfit.runs import RUN_VARIABLES, Remark

__all__ = [
    "ChoiceGoal",
    "ChosenRun",
    "CoefficientGoal",
    "ExpectedError",
    "NextRuns",
    "PredictionGoal",
]


class CoefficientGoal(BaseModel):
    """Tighten coefficients: all (D-optimality), some (D_s), or one (c-optimality).

    Attributes
    ----------
    names : tuple of str or None
        Fields of the law, prefactors in their logarithm; None for all that are free.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["coefficients"] = "coefficients"
    names: tuple[str, ...] | None = None

    def among(self, free: tuple[str, ...]) -> list[int]:
        """Return where the named coefficients stand among those that a fit moves.

        Parameters
        ----------
        free : tuple of str
            "log a" of a prefactor, else the field.

        Raises
        ------
        LawError
            One is not there, or none is named.
        """
        fields = [name.removeprefix("log ") for name in free]
        wanted = fields if self.names is None else self.names
        if not wanted:
            raise LawError(f"names is empty, but must name some of {', '.join(fields)}.")
        for name in wanted:
            if name not in fields:
                raise LawError(
                    f"names holds {name!r}, but the coefficients that this fit moves are "
                    f"{', '.join(fields)}."
                )
        return sorted({fields.index(name) for name in wanted})


class PredictionGoal(BaseModel):
    """Tighten the predicted ``log L`` of one run: c-optimality.

    Attributes
    ----------
    n_total, n_active, tokens, expert_split : float
        As in `ScalingLaw.loss`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["prediction"] = "prediction"
    n_total: float
    n_active: float
    tokens: float
    expert_split: float


class ChoiceGoal(BaseModel):
    """Choose the architecture of least loss with the least expected regret.

    Attributes
    ----------
    n_total, n_active, tokens, expert_split : tuple of float
        Of each architecture, as in `ScalingLaw.loss`; at least two.
    name : tuple of str
        Of each; they are "1", "2", ... where none are given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["choice"] = "choice"
    n_total: tuple[float, ...]
    n_active: tuple[float, ...]
    tokens: tuple[float, ...]
    expert_split: tuple[float, ...]
    name: tuple[str, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> ChoiceGoal:
        rows = len(self.n_total)
        if rows < 2:
            raise ValueError(f"the choice has {rows} architectures, but must have at least 2")
        for column in (*RUN_VARIABLES[1:], *(("name",) if self.name else ())):
            if len(getattr(self, column)) != rows:
                raise ValueError(
                    f"{column} has {len(getattr(self, column))} rows and n_total {rows}, but all "
                    "columns must have one length"
                )
        return self

    def lead(self, law: ScalingLaw) -> int:
        """Return which architecture has the least loss under a law, the first of equals.

        Raises
        ------
        LawError
            As `ScalingLaw.loss`.
        """
        point = {name: np.array(getattr(self, name), dtype=float) for name in RUN_VARIABLES}
        return int(np.argmin(law.loss(**point)))

    def differences(self, lead: int) -> tuple[str, ...]:
        """Return the names of the differences of loss to one architecture, of all others."""
        names = self.name or tuple(str(k + 1) for k in range(len(self.n_total)))
        return tuple(f"L({name}) - L({names[lead]})" for k, name in enumerate(names) if k != lead)


Goal: TypeAlias = CoefficientGoal | PredictionGoal | ChoiceGoal
"""What the runs are for."""


class ChosenRun(BaseModel):
    """One of the runs to train, or several equal ones.

    Attributes
    ----------
    n_total, n_active : float
        [parameter].
    tokens : float
        [token].
    expert_split : float
        [-].
    repeats : int
        How often, each with a seed of its own.
    cost : float
        Of all repeats, in the unit of the budget.
    flags : tuple of str
        Variables outside the range of the runs of the fit; see `ValidRange.flags`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    n_total: float
    n_active: float
    tokens: float
    expert_split: float
    repeats: int = Field(ge=1)
    cost: float
    flags: tuple[str, ...]


class ExpectedError(BaseModel):
    """Standard error that a fit to all runs should have, at the fitted law.

    Attributes
    ----------
    name : str
        "log a" of a prefactor [-], an exponent [-], "log L" [-], or "L(x) - L(y)", a difference
        of losses [nats/token].
    before, after : float
        Without and with the chosen runs.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    before: float
    after: float


class NextRuns(BaseModel):
    """Runs to train next, and what they should bring.

    Attributes
    ----------
    goal : CoefficientGoal, PredictionGoal or ChoiceGoal
        What they are for.
    runs : tuple of ChosenRun
        Dearest first.
    cost, budget : float
        Of all of them, and what was allowed, in the unit of the candidates' costs.
    candidates : int
        How many were weighed, of those that the budget can buy.
    criterion : {"D", "D_s", "c", "regret"}
        What was minimised; "c" also for a choice between two, where it is the same.
    errors : tuple of ExpectedError
        Of what the goal names.
    efficiency : float or None
        No design in the budget, not even of fractions of runs, has a variance (for several
        coefficients the s-th root of the determinant of their covariance) below this share of the
        one here [-]. None for a regret, which is not convex.
    gain_share : float or None
        The same bound on what the runs bring: the fall of the logarithm of the variance, at
        least, over the largest fall possible [-]. The efficiency counts what was known before.
    regret_before, regret_after : float or None
        Of a choice: expected loss of the architecture chosen now, or after the runs, over that of
        the best one [nats/token].
    noise : float
        Standard deviation of ``log L`` between runs that it rests on [-].
    noise_basis : {"STATED", "FITTED"}
        Given, or the residuals of the fit.
    laws : int
        At how many laws the criterion was averaged.
    remarks : tuple of Remark
        What limits the answer.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    basis: ClassVar[Literal["FITTED"]] = "FITTED"

    goal: Annotated[Goal, Field(discriminator="kind")]
    runs: tuple[ChosenRun, ...]
    cost: float
    budget: float
    candidates: int
    criterion: Literal["D", "D_s", "c", "regret"]
    errors: tuple[ExpectedError, ...]
    efficiency: float | None
    gain_share: float | None
    regret_before: float | None
    regret_after: float | None
    noise: float
    noise_basis: Literal["STATED", "FITTED"]
    laws: int
    remarks: tuple[Remark, ...]

    def table(self) -> Candidates:
        """Return the runs as a table, a row for each repeat."""
        rows = [run for run in self.runs for _ in range(run.repeats)]
        return Candidates(
            **{name: tuple(getattr(run, name) for run in rows) for name in RUN_VARIABLES},
            cost=tuple(run.cost / run.repeats for run in rows),
        )

    def error(self, name: str) -> ExpectedError:
        """Return the expected error of one name.

        Raises
        ------
        LawError
            The goal did not name it.
        """
        return named(self.errors, name)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Error = TypeVar("Error", bound=_Named)


def named(errors: tuple[Error, ...], name: str) -> Error:
    """Return the error of one name.

    Raises
    ------
    LawError
        There is none.
    """
    for each in errors:
        if each.name == name:
            return each
    raise LawError(f"name is {name!r}, but the errors are of {', '.join(e.name for e in errors)}.")
