"""What the relaxation returns, and its JSON: ``schema_version`` 1, SI units."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict

from perfmodel.frozen import Frozen
from perfmodel.sources import Source


class _Finite(Frozen):
    model_config = ConfigDict(allow_inf_nan=False)


class RelaxationStatus(StrEnum):
    """What came of a relaxation."""

    BOUND = "bound"  # a bound that passed its check
    INFEASIBLE = "infeasible"  # no candidate is left to bound
    FAILED = "failed"  # no solver gave a point and multipliers to check; see their words


class SolverRun(_Finite):
    """One solver on one program.

    Attributes
    ----------
    program : str
        "monomial": the geometric program; "hull": the convex hull of the candidates.
    solver : str
        Name, as cvxpy has it.
    status : str
        The solver's own word, as cvxpy passes it on, or "error".
    words : str
        What it said where it failed; empty otherwise.
    value : float or None
        Loss that it reports [nats/token]: not checked, and no bound.
    bound : float or None
        Lower bound evaluated from its point and multipliers, with a margin [nats/token].
    """

    program: Literal["monomial", "hull"]
    solver: str
    status: str
    words: str
    value: float | None
    bound: float | None


class Agreement(_Finite):
    """Whether two solvers report the same optimum of a program.

    Attributes
    ----------
    program : {"monomial", "hull"}
    solvers : tuple of str
        The first one and its cross-check.
    difference : float or None
        Between the values that they report [nats/token]; None where one of them reports none.
    tolerance : float
        What it may be [nats/token].
    agree : bool or None
        None where there is nothing to compare.
    """

    program: Literal["monomial", "hull"]
    solvers: tuple[str, str]
    difference: float | None
    tolerance: float
    agree: bool | None


class RelaxedPoint(_Finite):
    """Where the relaxed loss is least; it is no architecture of the space.

    ``n_total``, ``n_active`` [parameter], ``sparsity`` S, ``expert_split`` G [-], ``tokens``
    [token], ``loss`` [nats/token], and ``mfu``, the MFU* eta_good that the monomial allows it [-].
    """

    n_total: float
    n_active: float
    sparsity: float
    expert_split: float
    tokens: float
    tokens_per_parameter: float
    mfu: float
    loss: float


class UsefulShare(_Finite):
    """``exp(log_coefficient) N_tot^n_total (1-S)^active_share G^expert_split >= MFU* eta_good``.

    Its inverse is tau. ``largest_excess`` is the largest logarithm by which it lies above a
    candidate, ``mean_excess`` the mean [-].
    """

    log_coefficient: float
    n_total: float
    active_share: float
    expert_split: float
    largest_excess: float
    mean_excess: float


class Remark(_Finite):
    """Why two numbers of a row differ, or are no derivatives; ``words`` is a sentence.

    ==============  ==============================================================================
    ``reason``
    ==============  ==============================================================================
    ``constraint``  other constraints hold the tokens of the exact optimum than the relaxed ones
    ``point``       the same ones hold both, and the relaxed point lies elsewhere
    ``grid``        the exact optimum has a listed ratio, which no small step moves
    ``filter``      a least ratio rules candidates out: in the exact optimum it binds by jumps alone
    ``candidate``   the small step of ``exact`` makes another candidate the optimum
    ``jump``        one unit more, or less, makes another candidate the optimum
    ``infeasible``  no candidate is feasible within the small step
    ``listed``      the cap stands for a listed ratio and is no field that could be moved
    ==============  ==============================================================================
    """

    reason: Literal[
        "constraint", "point", "grid", "filter", "candidate", "jump", "infeasible", "listed"
    ]
    words: str


class Elasticity(_Finite):
    """What one budget or cap is worth.

    Attributes
    ----------
    budget : str
        Its name in the envelope; "memory" is the memory of a device.
    value : float
        Its value, in ``unit``.
    unit : {"day", "token", "token/parameter", "GB", "cost", "kWh"}
        GB is 1e9 bytes; cost is in the currency of the budget's price.
    relaxed : float or None
        d log L / d log budget of the relaxation, from its multipliers [-]; None if it has no such
        row.
    relaxed_per_unit : float or None
        The same as d L / d budget [nats/token a unit].
    exact : float or None
        d log L* / d log budget of the exact optimum, by a central difference over
        ``exact_step`` (relative; for memory over 1 GB, forward) [-].
    exact_step : float
        Relative step of the difference.
    exact_wide, wide_step : float or None
        The same over a wider step, which averages over jumps and kinks; None for memory.
    one : float
        What "one more" is, in ``unit``: one day, 1 % of a cap on tokens, one GB, 1000 of cost or
        1000 kWh.
    one_more, one_less : float or None
        Change of the exact optimum's loss with that much more or less [nats/token]. None where
        nothing is then feasible, or MFU* is not exact.
    remarks : tuple of Remark
        Why ``relaxed`` and ``exact`` differ by more than a fifth, and what else there is to know.
    """

    budget: str
    value: float
    unit: Literal["day", "token", "token/parameter", "GB", "cost", "kWh"]
    relaxed: float | None
    relaxed_per_unit: float | None
    exact: float | None
    exact_step: float
    exact_wide: float | None
    wide_step: float | None
    one: float
    one_more: float | None
    one_less: float | None
    remarks: tuple[Remark, ...]
    source: Source = Source.FITTED


class GapSplit(_Finite):
    """The gap to the exact optimum in its two parts [nats/token].

    ``hull`` is the bound of the convex hull of the candidates, the tightest that is convex in these
    coordinates; ``integrality = exact - hull`` and ``envelope = hull - lower_bound``.
    """

    exact: float
    hull: float
    gap: float
    integrality: float
    envelope: float


class Relaxation(_Finite):
    """A lower bound of the loss of every candidate, and what the budgets are worth.

    Attributes
    ----------
    status : RelaxationStatus
    words : str
        One sentence for a reader.
    mfu : {"exact", "bound", "given"}
        Whether MFU* is that of the best layouts, a bound of the blocks of layouts, or was given.
        "partial" if that search was cut short, with the device's peak for the rest.
    candidates, points : int
        Candidates of the envelope, and those not known to be infeasible.
    lower_bound : float or None
        No candidate has a lower loss [nats/token]. It was evaluated from a point and multipliers
        without the solver, with a margin for rounding. It holds of the model.
    primal : float or None
        Loss of the relaxed point [nats/token]; the relaxed optimum lies between the two.
    point : RelaxedPoint or None
    useful_share : tuple of UsefulShare
        The pieces of the envelope; the least of them holds.
    binding : tuple of str
        Rows with a multiplier, the heaviest first.
    elasticities : tuple of Elasticity
    split : GapSplit or None
        None where MFU* is not exact, or nothing is feasible.
    solvers : tuple of SolverRun
    agreements : tuple of Agreement
        Of the two solvers on each program; empty without a second one.
    source : Source
        What the loss rests on.
    """

    schema_version: Literal[1] = 1
    name: str
    status: RelaxationStatus
    words: str
    mfu: Literal["exact", "partial", "bound", "given"]
    candidates: int
    points: int
    lower_bound: float | None
    primal: float | None
    point: RelaxedPoint | None
    useful_share: tuple[UsefulShare, ...]
    binding: tuple[str, ...]
    elasticities: tuple[Elasticity, ...]
    split: GapSplit | None
    solvers: tuple[SolverRun, ...]
    agreements: tuple[Agreement, ...]
    source: Source = Source.FITTED

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the JSON document."""
        return self.model_dump_json(indent=indent)

    def save(self, path: str | Path) -> None:
        """Write the JSON document to a file."""
        Path(path).write_text(self.to_json() + "\n", "utf-8")

    def __str__(self) -> str:
        """Return the report."""
        from mosaic_opt.report import as_text
        from mosaic_opt.report_relaxation import render_relaxation

        return as_text(render_relaxation(self))
