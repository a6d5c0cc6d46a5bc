"""The global batch as a decision: one whole problem for each batch, and the best of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from pydantic import ConfigDict, ValidationError

from mosaic_opt.allocation.variants import changed
from mosaic_opt.backends.base import Backend, Limits, ProgressCallback, Termination
from mosaic_opt.envelope import Envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.result import Solution, Status
from mosaic_opt.solver import solve
from mosaic_opt.token_efficiency import TokenEfficiency
from perfmodel.frozen import Frozen, explain
from perfmodel.plan import Plan


class _Finite(Frozen):
    model_config = ConfigDict(allow_inf_nan=False)


class BatchRow(_Finite):
    """The answer at one global batch; what there is none of is None.

    Attributes
    ----------
    global_batch, batch_tokens : int
        Sequences and tokens of a step [-].
    status : Status
        Of the solution at this batch.
    architecture : str
        Name of the optimum.
    plan : Plan
        Its layout.
    step_time_s, mfu : float
        Of the layout [s], [-].
    efficiency : TokenEfficiency
        Tokens trained on, what they count as, and the critical batch.
    loss, delta_loss : float
        Loss, and its distance from the best batch's [nats/token].
    near_tie : bool
        Whether the distance is within what the stated error of MFU moves.
    """

    global_batch: int
    batch_tokens: int
    status: Status
    architecture: str | None
    plan: Plan | None
    step_time_s: float | None
    mfu: float | None
    efficiency: TokenEfficiency | None
    loss: float | None
    delta_loss: float | None
    near_tie: bool


class BatchChoice(_Finite):
    """The answers to an envelope at each of its global batches.

    Attributes
    ----------
    name : str
        The envelope's.
    status : Status
        OPTIMAL if every batch has a certified answer, an optimum or none.
    stated_batch : int
        ``batch.global_batch`` of the envelope [sequence].
    best_batch : int or None
        The batch of least loss, of equals the smallest; None if no batch has an answer.
    gain : float or None
        Loss at the stated batch less that at the best [nats/token]; None where one is unknown.
    rows : tuple of BatchRow
        Ascending in the batch.
    not_reached : tuple of int
        Batches that an interrupt left out.
    solutions : tuple of Solution
        Of the rows, each with its own certificate.
    """

    schema_version: Literal[1] = 1
    name: str
    status: Status
    stated_batch: int
    best_batch: int | None
    gain: float | None
    rows: tuple[BatchRow, ...]
    not_reached: tuple[int, ...]
    solutions: tuple[Solution, ...]

    @property
    def best(self) -> Solution | None:
        """The solution at the best batch."""
        pairs = zip(self.rows, self.solutions, strict=True)
        return next((s for row, s in pairs if row.global_batch == self.best_batch), None)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the JSON document."""
        return self.model_dump_json(indent=indent)

    @classmethod
    def from_json(cls, text: str) -> BatchChoice:
        """Read a JSON document.

        Raises
        ------
        MosaicError
            The document is no choice of a batch; one sentence.
        """
        try:
            return cls.model_validate_json(text, strict=True)
        except ValidationError as error:
            raise MosaicError(f"Not a choice of a batch: {explain(error, cls)}.") from None


def at_batch(envelope: Envelope, global_batch: int) -> Envelope:
    """Return the envelope with one global batch and no choice of others."""
    batch = envelope.batch.model_copy(update={"global_batch": global_batch})
    return changed(envelope, batch=batch, global_batches=None)


def solve_batches(
    envelope: Envelope,
    *,
    backend: Backend | str = "enumerate",
    limits: Limits | None = None,
    progress: ProgressCallback | None = None,
    started: Callable[[int], None] | None = None,
) -> BatchChoice:
    """Solve an envelope at each of its global batches, and take the one with the least loss.

    A larger batch has longer steps of more tokens, with less idle time and other layouts, and each
    of its tokens is worth less (:mod:`mosaic_opt.token_efficiency`). Each batch is a problem of its
    own, solved and certified by `solve`.

    Parameters
    ----------
    envelope : Envelope
        With ``global_batches`` and ``critical_batch``.
    backend, progress
        As for `solve`.
    limits : Limits, optional
        For each batch.
    started : callable, optional
        Called with each batch before its search.

    Returns
    -------
    BatchChoice
        After an interrupt, with the batches that were done.

    Raises
    ------
    MosaicError
        The envelope lists no global batches; or as `solve`.
    """
    if envelope.global_batches is None:
        raise MosaicError("global_batches is missing: list the batches to choose from, or solve.")
    batches = sorted(set(envelope.global_batches))
    solutions: dict[int, Solution] = {}
    try:
        for batch in batches:
            if started is not None:
                started(batch)
            solution = solve(
                at_batch(envelope, batch), backend=backend, limits=limits, progress=progress
            )
            solutions[batch] = solution
            if solution.termination == Termination.INTERRUPTED.value:
                break
    except KeyboardInterrupt:
        if not solutions:
            raise
    return assemble_batches(envelope, solutions)


def assemble_batches(envelope: Envelope, solutions: dict[int, Solution]) -> BatchChoice:
    """Put the solutions of batches together as a choice among them."""
    losses = {b: s.optimum.loss for b, s in solutions.items() if s.optimum is not None}
    best = min(losses, key=lambda b: (losses[b], b), default=None)
    tolerance = 0.0
    if best is not None:
        tolerance = solutions[best].near_tie_rule.loss_tolerance or 0.0
    stated = envelope.batch.global_batch
    not_reached = tuple(b for b in sorted(set(envelope.global_batches or ())) if b not in solutions)
    return BatchChoice(
        name=envelope.name,
        status=_status(tuple(solutions.values()), bool(not_reached)),
        stated_batch=stated,
        best_batch=best,
        gain=None if best is None or stated not in losses else losses[stated] - losses[best],
        rows=tuple(
            _row(envelope, b, solutions[b], None if best is None else losses[best], tolerance)
            for b in sorted(solutions)
        ),
        not_reached=not_reached,
        solutions=tuple(solutions[b] for b in sorted(solutions)),
    )


def _status(solutions: tuple[Solution, ...], unfinished: bool) -> Status:
    found = {solution.status for solution in solutions}
    if not unfinished and found == {Status.INFEASIBLE}:
        return Status.INFEASIBLE
    if all(solution.optimum is None for solution in solutions):
        return Status.UNKNOWN
    proved = found <= {Status.OPTIMAL, Status.INFEASIBLE} and not unfinished
    return Status.OPTIMAL if proved else Status.FEASIBLE


def _row(
    envelope: Envelope, batch: int, solution: Solution, least: float | None, tolerance: float
) -> BatchRow:
    best = solution.optimum
    delta = None if best is None or least is None else best.loss - least
    return BatchRow(
        global_batch=batch,
        batch_tokens=batch * envelope.batch.seq_len,
        status=solution.status,
        architecture=None if best is None else best.step.architecture["name"],
        plan=None if best is None else best.plan,
        step_time_s=None if best is None else best.step_time_s,
        mfu=None if best is None else best.mfu,
        efficiency=None if best is None else best.token_efficiency,
        loss=None if best is None else best.loss,
        delta_loss=delta,
        near_tie=delta is not None and delta <= tolerance,
    )
