"""The answers to an envelope with several global batches, held against the model again."""

from __future__ import annotations

from typing import Literal

from mosaic_opt.allocation.variants import changed
from mosaic_opt.batch_choice import BatchChoice, assemble_batches
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.result import Status
from mosaic_opt.verification import Count, Difference, Verification, differences, verify
from perfmodel.frozen import Frozen


class BatchVerification(Frozen):
    """What a verification of a choice of the batch found.

    Attributes
    ----------
    verified : bool
        Each solution is verified, nothing differs in what is made of them, and every batch has a
        certified answer.
    solutions : tuple of Verification
        Of each batch, ascending.
    differences : tuple of Difference
        In what is made of the solutions.
    """

    schema_version: Literal[1] = 1
    name: str
    verified: bool
    solutions: tuple[Verification, ...]
    differences: tuple[Difference, ...]


def verify_batches(
    choice: BatchChoice,
    *,
    sample: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Count | None = None,
) -> BatchVerification:
    """Hold a choice of the global batch against the model again.

    Parameters
    ----------
    choice : BatchChoice
    sample, seed, workers, progress
        As for :func:`mosaic_opt.verification.verify`, of each solution.

    Raises
    ------
    MosaicError
        The document has no solution, or one whose envelope cannot be read.
    """
    if not choice.solutions:
        raise MosaicError("The document has no solution of any batch.")
    each = tuple(
        verify(one, sample=sample, seed=seed, workers=workers, progress=progress)
        for one in choice.solutions
    )
    found = _alike(choice)
    if not found:
        envelopes = [
            parse_envelope(one.provenance["envelope"], "The solution's envelope")
            for one in choice.solutions
        ]
        batches = [envelope.batch.global_batch for envelope in envelopes]
        first = envelopes[0]
        stated = changed(
            first,
            batch=first.batch.model_copy(update={"global_batch": choice.stated_batch}),
            global_batches=tuple(sorted({*batches, *choice.not_reached, choice.stated_batch})),
        )
        again = assemble_batches(stated, dict(zip(batches, choice.solutions, strict=True)))
        claimed, made = (
            document.model_dump(mode="json", exclude={"solutions"}) for document in (choice, again)
        )
        found = list(differences("", claimed, made))
    finished = choice.status in (Status.OPTIMAL, Status.INFEASIBLE)
    return BatchVerification(
        name=choice.name,
        verified=all(one.verified for one in each) and not found and finished,
        solutions=each,
        differences=tuple(found),
    )


def _alike(choice: BatchChoice) -> list[Difference]:
    """Compare the envelopes of the solutions, which differ in the batch alone."""
    found: list[Difference] = []
    first, *others = (dict(one.provenance["envelope"]) for one in choice.solutions)
    for place, envelope in enumerate(others, start=1):
        batch = {**envelope["batch"], "global_batch": first["batch"]["global_batch"]}
        where = f"solutions[{place}].provenance.envelope"
        found += differences(where, {**envelope, "batch": batch}, first)
    return found
