"""What `robust` returns, and its JSON: a public contract (``schema_version`` 1, SI units)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from mosaic_opt.errors import MosaicError
from perfmodel.frozen import Frozen, explain
from perfmodel.plan import Plan
from perfmodel.sources import Source

NEAR_SHARE = 0.05
"""Share of the draws in which a candidate must be near the optimum to count as one of them."""

HELD_SHARE = 0.9
"""Share of the draws whose optimum `Robust.likely_optima` holds."""


class _Finite(Frozen):
    # NaN and infinities have no JSON; what is unknown or without end is None.
    model_config = ConfigDict(allow_inf_nan=False)


class Quantiles(_Finite):
    """The 5%, 50% and 95% points of draws; None where that many draws have no finite value."""

    low: float | None
    median: float | None
    high: float | None


class RobustCandidate(_Finite):
    """A candidate over the draws.

    Attributes
    ----------
    name : str
    n_active, n_total : int
        Parameters under the envelope's convention.
    plan : Plan or None
        Its best layout under the stated constants; None if it has none.
    point_loss : float or None
        Its loss there [nats/token]; None if it is infeasible.
    near_tie : bool
        Whether `solve` lists it among the near-ties.
    probability : float
        Share of the draws in which it is the optimum.
    probability_error : float
        Standard error of that share, ``sqrt(p (1 - p) / draws)``, from the number of draws alone.
    probability_near : float
        Share of the draws in which it is the optimum or within the tolerance of it.
    feasible : float
        Share of the draws in which it has a layout and a token budget.
    expected_regret : float or None
        Mean of its loss over that of the draw's optimum, over the draws in which it is feasible
        [nats/token]; None if it is in none. With ``feasible`` below 1 it says nothing of the
        others, and no choice rests on it.
    max_regret : float or None
        The largest over all draws that have an optimum; None, without end, if it is infeasible in
        one of them.
    loss : Quantiles
        Of its loss over the draws in which it is feasible [nats/token].
    days : Quantiles
        Of the days until it has the loss that the point solution promises, without window and token
        rule; None where the draw's law never lets it get there.
    same_layout : float or None
        Share of the draws in which ``plan`` is its best layout; None if it has no plan.
    """

    name: str
    n_active: int
    n_total: int
    plan: Plan | None
    point_loss: float | None
    near_tie: bool
    probability: float
    probability_error: float
    probability_near: float
    feasible: float
    expected_regret: float | None
    max_regret: float | None
    loss: Quantiles
    days: Quantiles
    same_layout: float | None


class RestsOn(_Finite):
    """What was drawn, and how.

    A source is None where that part was held as stated.

    Attributes
    ----------
    law, stack, residual : Source or None
        What the spread of each rests on.
    law_method : str
        How the laws were drawn, or that they were not.
    constants : tuple of str
        Constants of the stack that were drawn.
    residual_errors : tuple of str
        Which left-out errors of the stack profile are in use.
    residual_shares : dict of str to float
        Shares of the residual's variance: ``common``, ``layout``, ``own`` [-].
    seed : int
    """

    law: Source | None
    law_method: str
    stack: Source | None
    constants: tuple[str, ...]
    residual: Source | None
    residual_errors: tuple[str, ...]
    residual_shares: dict[str, float]
    seed: int


class Robust(_Finite):
    """The choice under uncertainty.

    Attributes
    ----------
    draws, draws_asked : int
        Draws that were solved; fewer than asked for after an interrupt.
    draws_without_optimum : int
        Draws in which no candidate is feasible.
    point_optimum : str or None
        The optimum of the stated constants, as `solve` returns it, and
    promised_loss : float or None
        its loss [nats/token].
    candidates : tuple of RobustCandidate
        Every candidate that is the optimum of a draw, a near-tie or a choice, the most probable
        first.
    most_probable : str or None
        The candidate that is the optimum of most draws.
    least_expected_regret, minimax_regret : str or None
        The candidates with the least mean and the least largest regret, of those that are feasible
        in every draw that has an optimum; None if there are none.
    near_ties : tuple of str
        Those of `solve`, and
    near_ties_hold : float
        the share of draws whose optimum is one of them.
    tolerance : float or None
        What the envelope's MFU error moves the point optimum's loss by [nats/token], as in `solve`.
    indistinguishable : tuple of str
        Candidates that are the optimum or within the tolerance of it in at least 5% of the draws.
    likely_optima : tuple of str
        The fewest candidates, most probable first, one of which is the optimum in at least 90% of
        the draws; all there are, if draws without an optimum keep them from it.
    counts : dict
        ``candidates``, ``feasible`` (in some draw), ``optimum`` (of some draw).
    rests_on : RestsOn
    provenance : dict
        As of a solution.
    """

    schema_version: Literal[1] = 1
    name: str
    draws: int
    draws_asked: int
    draws_without_optimum: int
    point_optimum: str | None
    promised_loss: float | None
    candidates: tuple[RobustCandidate, ...]
    most_probable: str | None
    least_expected_regret: str | None
    minimax_regret: str | None
    near_ties: tuple[str, ...]
    near_ties_hold: float
    tolerance: float | None
    indistinguishable: tuple[str, ...]
    likely_optima: tuple[str, ...]
    counts: dict[str, int]
    rests_on: RestsOn
    provenance: dict[str, Any]

    def candidate(self, name: str) -> RobustCandidate:
        """Return one of the candidates.

        Raises
        ------
        MosaicError
            None has that name.
        """
        for candidate in self.candidates:
            if candidate.name == name:
                return candidate
        raise MosaicError(f"{name!r} is none of the {len(self.candidates)} candidates listed.")

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the JSON document."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Robust:
        """Read a JSON document.

        Raises
        ------
        MosaicError
            The document is no such answer; one sentence.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise MosaicError(f"Not an answer of robust: {explain(error, cls)}.") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON document to a file."""
        Path(path).write_text(self.to_json() + "\n", "utf-8")

    def __str__(self) -> str:
        """Return the report."""
        from mosaic_opt.report import as_text
        from mosaic_opt.report_robust import render_robust

        return as_text(render_robust(self), width=120)
