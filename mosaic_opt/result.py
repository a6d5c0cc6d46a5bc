"""What `solve` returns, and its JSON: a public contract (``schema_version`` 1, SI units)."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError

from mosaic_opt.certificate import Certificate
from mosaic_opt.errors import MosaicError
from mosaic_opt.spending import Spend
from mosaic_opt.token_efficiency import TokenEfficiency
from perfmodel.frozen import Frozen, explain
from perfmodel.plan import Plan
from perfmodel.sources import Source
from perfmodel.step import StepEstimate

SCHEMA_VERSION = 1

Count = Annotated[int, Field(ge=0, le=10**18)]
Index = Annotated[int, Field(ge=0, le=10**9)]
Above0 = Annotated[float, Field(gt=0.0)]


class _Finite(Frozen):
    # NaN and infinities have no JSON; what is unknown is None.
    model_config = ConfigDict(allow_inf_nan=False)


class Status(StrEnum):
    """What is known of the answer."""

    OPTIMAL = "optimal"  # nothing in the space is better, and the checks passed
    FEASIBLE = "feasible"  # an answer; something better may remain
    INFEASIBLE = "infeasible"  # nothing in the space fits
    UNKNOWN = "unknown"  # stopped before anything feasible was found


class Bounds(_Finite):
    """Loss of the incumbent, a bound below every candidate, and their difference [nats/token]."""

    primal: float | None
    dual: float | None
    gap: float | None


class LayoutCounts(_Finite):
    """How the layouts of a candidate fared: ``priced + infeasible + discarded`` is all of them.

    ``over_memory`` and ``refused`` are among the priced. Layouts in blocks whose bound is above
    ``cutoff_s`` were not priced, None where all legal ones were: they have a longer step than the
    candidate's best, or, of a discarded candidate, than any that matters.
    """

    priced: Count
    infeasible: Count
    discarded: Count
    over_memory: Count
    refused: Count
    cutoff_s: Annotated[float, Field(ge=0.0)] | None


class Candidate(_Finite):
    """A candidate with its best layout.

    ``delta_loss`` is its loss over that of the optimum [nats/token]; ``binding`` says what sets
    its tokens: the window, or the cap that was reached first. ``index`` is its place in the
    envelope's candidates.
    """

    rank: Index
    index: Index
    name: str
    n_active: int
    n_total: int
    sparsity: float
    expert_split: float | None
    plan: Plan
    tokens: Above0
    tokens_per_parameter: float
    binding: str
    loss: Above0
    delta_loss: float
    mfu: float
    step_time_s: Above0
    memory_bytes: Above0
    layouts: LayoutCounts


class Fastest(_Finite):
    """The best layout of a candidate that only lacks tokens."""

    plan: Plan
    step_time_s: Above0
    memory_bytes: Above0


class Rejected(_Finite):
    """A candidate that has no layout or no token budget, and the smallest thing that would help.

    ``shortfall`` is what is missing, in ``unit``: "B" on every device for the reason "memory", "s"
    of window for "tokens"; both are None where no number says it.
    """

    name: str
    index: Index
    reason: str
    detail: str
    shortfall: float | None
    unit: Literal["B", "s"] | None
    fastest: Fastest | None
    layouts: LayoutCounts


class RuledOut(_Finite):
    """A candidate that bounds put behind every near-tie.

    None of its layouts has a shorter step than ``step_bound_s``, and so none a lower loss than
    ``loss_bound``. Both are None where nothing fits; ``loss_bound`` also where its tokens would be
    too few.
    """

    name: str
    index: Index
    step_bound_s: Above0 | None
    loss_bound: float | None
    layouts: LayoutCounts


class Optimum(_Finite):
    """The chosen architecture, token budget and layout.

    ``architecture``, ``plan``, ``mfu``, ``step_time_s`` and ``memory_bytes`` are those of
    ``step``, which has the breakdown and what each number rests on. ``goodput`` is the share of the
    window that trains [-]. ``token_efficiency`` is what the tokens are worth at the batch, and None
    where each is worth the same. ``spend`` is what the run takes of the envelope's budget, and None
    where days are given.
    """

    architecture: dict[str, Any]
    plan: Plan
    tokens: float
    tokens_per_parameter: float
    tokens_available: float
    goodput: float
    goodput_source: Source
    binding: str
    loss: float
    loss_source: str
    token_efficiency: TokenEfficiency | None = None
    mfu: float
    mfu_convention: str
    step_time_s: float
    memory_bytes: float
    learning_rate: float
    model_flop: float
    step: StepEstimate
    spend: Spend | None = None
    flags: tuple[str, ...]


class Tally(_Finite):
    """How many candidates and (architecture, layout) pairs the search went through.

    ``priced + infeasible + discarded + unexamined = plans``: a pair is priced, breaks a rule, is
    ruled out by a bound, or was not reached. ``over_memory`` and ``refused`` are among the priced.
    """

    architectures: Count
    grid_points: Count
    layouts: Count
    plans: Count
    priced: Count
    discarded: Count
    infeasible: Count
    unexamined: Count
    over_memory: Count
    refused: Count
    feasible_architectures: Count
    ruled_out_architectures: Count


class NearTieRule(_Finite):
    """How close a candidate must be to be indistinguishable from the optimum."""

    mfu_error: float
    loss_tolerance: float | None


class Solution(_Finite):
    """The answer to an envelope.

    Attributes
    ----------
    status : Status
    termination : str
        Why the search stopped.
    optimum : Optimum or None
    bounds : Bounds
    near_ties : tuple of Candidate
        Every candidate whose loss is within what the stated MFU error can move, the optimum
        first.
    near_feasible : tuple of Candidate
        Candidates that the token rule rejects by less than the stated MFU error, and that would be
        among the near-ties: with their MFU, step and tokens at an MFU higher by that error.
    near_tie_rule : NearTieRule
    candidates : tuple of Candidate
        All feasible candidates, best first.
    rejected : tuple of Rejected
        Those that are not.
    ruled_out : tuple of RuledOut
        Those that a bound put behind every near-tie, without the price of every layout.
    counts : Tally
    dropped_points : dict or None
        How many points of the grid are no candidate, by reason; None for a space that does not
        say (a ladder, or a list of models).
    certificate : Certificate
    provenance : dict
        Packs and their hashes, law, versions, and the envelope itself.
    """

    schema_version: Literal[1] = 1
    name: str
    status: Status
    termination: Literal["exhausted", "time_limit", "interrupted"]
    optimum: Optimum | None
    bounds: Bounds
    near_ties: tuple[Candidate, ...]
    near_feasible: tuple[Candidate, ...]
    near_tie_rule: NearTieRule
    candidates: tuple[Candidate, ...]
    rejected: tuple[Rejected, ...]
    ruled_out: tuple[RuledOut, ...]
    counts: Tally
    dropped_points: dict[str, int] | None = None
    certificate: Certificate
    provenance: dict[str, Any]

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the JSON document."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Solution:
        """Read a JSON document.

        Raises
        ------
        MosaicError
            The document is no solution; one sentence.
        """
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise MosaicError(f"Not a solution: {explain(error, cls)}.") from None

    def save(self, path: str | Path) -> None:
        """Write the JSON document to a file."""
        Path(path).write_text(self.to_json() + "\n", "utf-8")

    def __str__(self) -> str:
        """Return the report."""
        from mosaic_opt.report import render_text

        return render_text(self)
