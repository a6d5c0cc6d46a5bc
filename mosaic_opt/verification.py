"""A solution's document held against the model again: by anyone, on another machine.

The problem is rebuilt from the envelope that the document carries, and the claims from what it says
of each candidate. Candidates are searched again, each within the blocks of layouts that the
document says were priced: all of them, or a sample that always has the incumbent and its near-ties.
Then the checks of :mod:`mosaic_opt.certificate` are made anew, the whole document is put together
again from the claims, and every field of it must be what it was. What only names the past is not
compared: the versions of packages, and the name of the backend.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from math import inf, isclose, isnan, nan
from typing import Any, Literal

import numpy as np
from pydantic import ConfigDict, ValidationError

from lawfit import LawError
from mosaic_opt.backends.base import Report, Termination, check_workers
from mosaic_opt.bounds import BlockBounds
from mosaic_opt.certificate import RELATIVE_TOLERANCE, certify
from mosaic_opt.envelope import parse_envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.outcome import Counts, Discarded, Outcome, Settled
from mosaic_opt.problem import Problem
from mosaic_opt.result import LayoutCounts, Solution
from mosaic_opt.solver import assemble, provenance
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.threads import in_order

Count = Callable[[str, int, int], None]
"""Told what is counted, how much is done, and of how much."""

MOST_DIFFERENCES = 50

_AT_ONCE = 32
"""Candidates that a thread bounds in one call."""


class _Nothing:
    def __str__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


class Difference(Frozen):
    """One place where the document and the model say different things."""

    where: str
    claimed: str
    found: str


class Verification(Frozen):
    """What a verification found.

    Attributes
    ----------
    verified : bool
        The document claims a certificate, its checks pass again, and nothing in it differs.
    certified : bool
        All checks of the certificate pass, made again.
    mode : str
        "full": every candidate was searched again; "sample": some.
    candidates, checked : int
        How many there are, and how many were searched again.
    seed : int or None
        Of the sample.
    differences : tuple of Difference
        The first of them, at most `MOST_DIFFERENCES`.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    schema_version: Literal[1] = 1
    name: str
    verified: bool
    certified: bool
    mode: Literal["full", "sample"]
    candidates: int
    checked: int
    seed: int | None
    differences: tuple[Difference, ...]


def verify(
    solution: Solution,
    *,
    sample: int | None = None,
    seed: int = 0,
    workers: int | None = None,
    progress: Count | None = None,
) -> Verification:
    """Hold a solution against the model again.

    Parameters
    ----------
    solution : Solution
        As :meth:`Solution.from_json` reads it.
    sample : int, optional
        How many candidates to search again beside the incumbent and its near-ties; all unless
        given.
    seed : int
        Of the sample.
    workers : int, optional
        Threads; all cores unless given.
    progress : callable, optional
        Called as candidates are searched again.

    Raises
    ------
    MosaicError
        The envelope of the document cannot be read, or asks for a pack, stack or law that is not
        here; a sample below 0, or workers below 1.
    """
    if sample is not None and sample < 0:
        raise MosaicError(f"sample={sample} must be at least 0; nearest: 0.")
    check_workers(workers)
    problem = _problem(solution)
    found = [*_provenance(problem, solution)]
    checked: list[int] = []
    certified = False
    if not found:
        try:
            claims = claims_of(problem, solution)
            certificate = certify(problem, claims)
            again = assemble(problem, claims, certificate, solution.provenance["backend"])
        except (LawError, PerfmodelError, IndexError, ValidationError) as error:
            said = " ".join(str(error).split())
            found = [Difference(where="claims", claimed="an answer to the envelope", found=said)]
        else:
            certified = certificate.certified
            settled: dict[int, Settled] = {o.index: o for o in claims.outcomes}
            settled.update({d.index: d for d in claims.discarded})
            ties = [c.index for c in (*solution.near_ties, *solution.near_feasible)]
            checked = _chosen(sorted(settled), ties, sample, seed)
            found = _searched_again(problem, settled, checked, workers, progress)
            found += _documents(solution, again)
    return Verification(
        name=solution.name,
        verified=certified and not found,
        certified=certified,
        mode="full" if sample is None else "sample",
        candidates=len(problem.architectures),
        checked=len(checked),
        seed=None if sample is None else seed,
        differences=tuple(found[:MOST_DIFFERENCES]),
    )


def claims_of(problem: Problem, solution: Solution) -> Report:
    """Read the claims of a search out of its solution.

    Raises
    ------
    PerfmodelError
        A layout is not in the problem's space.
    """
    table, plans = problem.table, len(problem.table)
    outcomes = []
    for c in solution.candidates:
        outcomes.append(
            Outcome(
                index=c.index,
                cutoff_s=_or(c.layouts.cutoff_s, inf),
                row=table.row(c.plan),
                step_s=c.step_time_s,
                memory_bytes=c.memory_bytes,
                tokens=c.tokens,
                loss=c.loss,
                binding=c.binding,
                reason="",
                detail="",
                shortfall=nan,
                counts=_counts(c.layouts, plans),
            )
        )
    for r in solution.rejected:
        fastest = r.fastest
        outcomes.append(
            Outcome(
                index=r.index,
                cutoff_s=_or(r.layouts.cutoff_s, inf),
                row=-1,
                step_s=nan if fastest is None else fastest.step_time_s,
                memory_bytes=nan if fastest is None else fastest.memory_bytes,
                tokens=nan,
                loss=nan,
                binding="",
                reason=r.reason,
                detail=r.detail,
                shortfall=_or(r.shortfall, nan),
                counts=_counts(r.layouts, plans),
                nearest_row=-1 if fastest is None else table.row(fastest.plan),
            )
        )
    discarded = [
        Discarded(
            r.index,
            _or(r.layouts.cutoff_s, inf),
            _or(r.step_bound_s, inf),
            _counts(r.layouts, plans),
        )
        for r in solution.ruled_out
    ]
    known = {o.index for o in outcomes} | {d.index for d in discarded}
    unexamined = tuple(i for i in range(len(problem.architectures)) if i not in known)
    feasible = [o for o in outcomes if o.feasible]
    best = min(feasible, key=lambda o: (o.loss, o.index), default=None)
    return Report(
        incumbent=best,
        dual_bound=_or(solution.bounds.dual, -inf if unexamined else inf),
        termination=Termination(solution.termination) if unexamined else Termination.EXHAUSTED,
        outcomes=tuple(sorted(outcomes, key=lambda o: o.index)),
        discarded=tuple(sorted(discarded, key=lambda d: d.index)),
        unexamined=unexamined,
    )


def _or(value: float | None, other: float) -> float:
    return other if value is None else value


def _counts(layouts: LayoutCounts, plans: int) -> Counts:
    fared = {name: value for name, value in layouts if name != "cutoff_s"}
    return Counts(plans=plans, **fared)


def _problem(solution: Solution) -> Problem:
    envelope = parse_envelope(solution.provenance.get("envelope"), "The solution's envelope")
    try:
        return Problem(envelope)
    except PerfmodelError as error:
        raise MosaicError(f"The solution's envelope: {error}") from None


def _provenance(problem: Problem, solution: Solution) -> Iterator[Difference]:
    """Compare packs, law and envelope: with others, nothing else can agree."""
    claimed = dict(solution.provenance)
    found: dict[str, Any] = dict(provenance(problem, str(claimed.get("backend"))))
    for of in (claimed, found):
        of.pop("versions", None)
    yield from differences("provenance", claimed, found)


def _chosen(everyone: list[int], ties: list[int], sample: int | None, seed: int) -> list[int]:
    """Choose the candidates to search again, in ascending order."""
    if sample is None or sample >= len(everyone):
        return everyone
    drawn = np.random.default_rng(seed).choice(everyone, size=sample, replace=False).tolist()
    return sorted({*drawn, *(index for index in ties if index in everyone)})


def _searched_again(
    problem: Problem,
    settled: dict[int, Settled],
    chosen: list[int],
    workers: int | None,
    progress: Count | None,
) -> list[Difference]:
    """Search some candidates again, within the blocks that were priced."""
    bounds = BlockBounds(problem)
    found: list[Difference] = []
    n = range(len(problem.architectures))

    def again(indices: list[int]) -> list[Settled]:
        floors = bounds.floors(np.array(indices))
        return [
            bounds.examine(index, of_one, settled[index].cutoff_s)
            for index, of_one in zip(indices, floors, strict=True)
        ]

    known = [index for index in chosen if index in n]
    chunks = [known[i : i + _AT_ONCE] for i in range(0, len(known), _AT_ONCE)]
    done = 0
    for results in in_order(again, chunks, workers):
        for result in results:
            where = f"candidate {result.index} ({problem.architectures[result.index].name})"
            found += differences(where, _fields(settled[result.index]), _fields(result))
        done += len(results)
        if progress is not None:
            progress("candidates", done, len(known))
    return found


def _fields(settled: Settled) -> dict[str, Any]:
    fields = {f.name: getattr(settled, f.name) for f in dataclasses.fields(settled)}
    return {"kind": type(settled).__name__, **fields, "counts": settled.counts._asdict()}


def _documents(solution: Solution, again: Solution) -> Iterator[Difference]:
    """Compare a document with the one that its claims make."""
    claimed, found = (s.model_dump(mode="json") for s in (solution, again))
    for document in (claimed, found):
        document["provenance"] = None  # compared before anything else
    yield from differences("", claimed, found)


def differences(where: str, claimed: Any, found: Any) -> Iterator[Difference]:
    """Compare two documents; numbers within the tolerance of the certificate."""
    if isinstance(claimed, dict) and isinstance(found, dict):
        for key in dict.fromkeys([*claimed, *found]):
            at = f"{where}.{key}" if where else str(key)
            yield from differences(at, claimed.get(key, _NOTHING), found.get(key, _NOTHING))
    elif isinstance(claimed, list | tuple) and isinstance(found, list | tuple):
        if len(claimed) != len(found):
            yield Difference(where=where, claimed=f"{len(claimed)} of", found=f"{len(found)} of")
            return
        for place, (one, other) in enumerate(zip(claimed, found, strict=True)):
            yield from differences(f"{where}[{place}]", one, other)
    elif not _same(claimed, found):
        yield Difference(where=where, claimed=str(claimed)[:200], found=str(found)[:200])


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        both_nan = isnan(one) and isnan(other)
        return both_nan or one == other or isclose(one, other, rel_tol=RELATIVE_TOLERANCE)
    return type(one) is type(other) and bool(one == other)
