"""Every backend on one envelope, side by side: what it found, what it proved, what it took."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from enum import StrEnum
from time import perf_counter
from typing import Any, Literal

from pydantic import ConfigDict, ValidationError

from lawfit import LawError
from mosaic_opt.agreement import Agreement, Claim, agreement
from mosaic_opt.backends.base import Backend, Limits, Progress, Report, Termination
from mosaic_opt.backends.registry import Listed, described, listing, made
from mosaic_opt.certificate import certify
from mosaic_opt.envelope import Envelope
from mosaic_opt.errors import MosaicError, said
from mosaic_opt.problem import Problem
from mosaic_opt.result import Solution, Status
from mosaic_opt.solver import assemble, provenance
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen, explain
from perfmodel.plan import Plan
from perfmodel.sources import Source

CompareProgress = Callable[[str, Progress], None]
"""Called with the name of the backend that is running and where it is."""


class _Finite(Frozen):
    model_config = ConfigDict(allow_inf_nan=False)


class State(StrEnum):
    """What became of a backend."""

    RAN = "ran"
    UNAVAILABLE = "unavailable"  # cannot run here, or cannot be loaded
    REFUSED = "refused"  # said in one sentence that this problem, or its options, are not for it
    FAILED = "failed"  # raised something else, or made a report that cannot be read
    NOT_RUN = "not run"  # the user interrupted before it was done


class Incumbent(_Finite):
    """The best candidate that a backend found.

    ``tokens`` follow from the step, so they rest on ``step_source``; ``loss`` [nats/token] on the
    `loss_source` of the comparison. These are the backend's claims; ``priced_again`` says whether
    the scalar formulas give the same.
    """

    name: str
    plan: Plan
    tokens: float
    loss: float
    step_time_s: float
    step_source: Source
    priced_again: bool


class Effort(_Finite):
    """What a search went through.

    ``candidates`` examined and ``ruled_out`` by bounds, and (architecture, layout) pairs:
    ``priced + infeasible + discarded + unexamined = plans`` of the comparison.
    """

    candidates: int
    ruled_out: int
    priced: int
    infeasible: int
    discarded: int
    unexamined: int


class Row(_Finite):
    """One backend.

    Attributes
    ----------
    backend : str
    origin : str
        Distribution that registers it; of a backend made by hand its ``module:Class``.
    options : str
        Values of its fields; empty where it was not made.
    provides : str or None
        "incumbent", "bound" or "exact", by its own word.
    state : State
    words : str
        Why it did not run, or how it failed; empty where it ran.
    note : str
        One sentence on who else registers its name; empty if nobody does.
    status : Status or None
        As granted after the checks; None, here and below, where it did not run.
    termination : str or None
        Why the search stopped.
    incumbent : Incumbent or None
    bound : float or None
        No candidate has a lower loss, by its claim [nats/token]; None also where it claims none.
    claims_infeasible : bool or None
        Whether its bound is infinite: it claims that no candidate is feasible.
    gap : float or None
        Loss of the incumbent less the bound [nats/token].
    effort : Effort or None
    failed_checks : tuple of str
        Checks that an honest report passes, and this one does not.
    search_s, checks_s : float or None
        Wall time of the search and of the checks [s].
    """

    backend: str
    origin: str
    options: str
    provides: str | None
    state: State
    words: str
    note: str
    status: Status | None
    termination: str | None
    incumbent: Incumbent | None
    bound: float | None
    claims_infeasible: bool | None
    gap: float | None
    effort: Effort | None
    failed_checks: tuple[str, ...]
    search_s: float | None
    checks_s: float | None


class Comparison(_Finite):
    """Several backends on one envelope.

    Attributes
    ----------
    name : str
        The envelope's.
    candidates, layouts, plans : int
        Size of the problem; ``plans`` is their product.
    time_limit_s : float or None
        Limit of each search [s].
    rows : tuple of Row
        In the order in which they were run.
    agreement : Agreement
    interrupted : bool
        The user stopped it: the rows before are whole.
    loss_source : str
        What the losses rest on.
    provenance : dict
        Packs, law, versions, and the envelope.
    """

    schema_version: Literal[1] = 1
    name: str
    candidates: int
    layouts: int
    plans: int
    time_limit_s: float | None
    rows: tuple[Row, ...]
    agreement: Agreement
    interrupted: bool
    loss_source: str
    provenance: dict[str, Any]


def compare(
    envelope: Envelope,
    *,
    backends: Sequence[Backend | str] | None = None,
    limits: Limits | None = None,
    progress: CompareProgress | None = None,
) -> Comparison:
    """Search one envelope with several backends, one after the other, and compare their claims.

    Each has a problem of its own, and its claims are checked against another one. The kernel is
    compiled beforehand, so that no backend's time has that in it. Times are the only part of the
    result that differs between two runs without a limit.

    Parameters
    ----------
    envelope : Envelope
    backends : sequence of Backend or str, optional
        All that are registered unless given; a name takes the backend's default options.
    limits : Limits, optional
        When each search stops; never unless given.
    progress : callable, optional
        Called with the name of a backend and its `Progress`.

    Returns
    -------
    Comparison
        With a row for every backend, also where it cannot run or fails. A keyboard interrupt ends
        the comparison and keeps the rows so far.

    Raises
    ------
    MosaicError
        An unknown name, one that is given twice, or none.
    PerfmodelError
        A hardware pack or stack profile that cannot be read.
    """
    chosen = _chosen(backends)
    limits = limits or Limits()
    problem = Problem(envelope)
    if problem.architectures:
        problem.solve_candidate(0)  # compiles
    rows: list[Row] = []
    claims: list[Claim] = []
    interrupted = False
    for listed, backend in chosen:
        row, claim = _blank(listed, State.NOT_RUN, "interrupted before it was done"), None
        if not interrupted:
            try:
                row, claim = _run(problem, listed, backend, limits, progress)
            except KeyboardInterrupt:
                interrupted = True
        rows.append(row)
        if claim is not None:
            claims.append(claim)
            interrupted |= claim.report.termination is Termination.INTERRUPTED
    return Comparison(
        name=envelope.name,
        candidates=len(problem.architectures),
        layouts=len(problem.table),
        plans=problem.size,
        time_limit_s=limits.time_s,
        rows=tuple(rows),
        agreement=agreement(
            problem, claims, {r.backend: r.words for r in rows if r.state is State.FAILED}
        ),
        interrupted=interrupted,
        loss_source=envelope.loss_source,
        provenance=provenance(problem, ", ".join(row.backend for row in rows)),
    )


def _chosen(
    backends: Sequence[Backend | str] | None,
) -> list[tuple[Listed, Backend | None]]:
    """Return what is known of each backend, and it where it was made by hand."""
    if backends is None:
        return [(each, None) for each in listing()]
    found: list[tuple[Listed, Backend | None]] = [
        (described(each), each) if isinstance(each, Backend) else (listing([each])[0], None)
        for each in backends
    ]
    names = [listed.name for listed, _ in found]
    if not names:
        raise MosaicError("No backend is named; name one or more, or leave them out for all.")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise MosaicError(f"Backend {twice} is named twice; name each once.")
    return found


def _run(
    problem: Problem,
    listed: Listed,
    backend: Backend | None,
    limits: Limits,
    progress: CompareProgress | None,
) -> tuple[Row, Claim | None]:
    """Search with one backend and check what it says."""
    if not listed.availability or listed.provides is None:
        return _blank(listed, State.UNAVAILABLE, listed.reason), None
    raised: list[BaseException] = []  # by the caller's own callback: not the backend's failure

    def told(state: Progress) -> None:
        if progress is None:
            return
        try:
            progress(listed.name, state)
        except BaseException as error:
            raised.append(error)
            raise

    options = ""
    start = perf_counter()
    try:
        searcher = backend if backend is not None else made(listed.name)
        options = _options(searcher)
        report = searcher.search(Problem(problem.envelope), limits, progress=told)
    except (MosaicError, PerfmodelError, LawError) as error:
        if error in raised:
            raise
        return _blank(listed, State.REFUSED, str(error).rstrip("."), options), None
    except (Exception, SystemExit) as error:  # a backend may raise anything: that is its row
        if error in raised:
            raise
        return _blank(listed, State.FAILED, _words(error), options), None
    searched = perf_counter()
    if not isinstance(report, Report):
        words = f"it returned a {type(report).__name__}, which is no Report"
        return _blank(listed, State.FAILED, words, options), None
    try:
        certificate = certify(problem, report)
        solution = assemble(problem, report, certificate, listed.name)
    except Exception as error:  # a report may hold anything, and certify trusts its types
        words = f"its report cannot be checked: {_words(error)}"
        return _blank(listed, State.FAILED, words, options), None
    claim = Claim(listed.name, listed.provides, report, certificate)
    checked = perf_counter()
    return _row(listed, options, claim, solution, searched - start, checked - searched), claim


def _blank(listed: Listed, state: State, words: str, options: str = "") -> Row:
    return Row(
        backend=listed.name,
        origin=listed.origin,
        options=options,
        provides=_provides(listed),
        state=state,
        words=words,
        note=listed.note,
        status=None,
        termination=None,
        incumbent=None,
        bound=None,
        claims_infeasible=None,
        gap=None,
        effort=None,
        failed_checks=(),
        search_s=None,
        checks_s=None,
    )


def _row(
    listed: Listed,
    options: str,
    claim: Claim,
    solution: Solution,
    search_s: float,
    checks_s: float,
) -> Row:
    best, counts = solution.optimum, solution.counts
    return Row(
        backend=listed.name,
        origin=listed.origin,
        options=options,
        provides=_provides(listed),
        state=State.RAN,
        words="",
        note=listed.note,
        status=solution.status,
        termination=solution.termination,
        incumbent=None
        if best is None
        else Incumbent(
            name=best.architecture["name"],
            plan=best.plan,
            tokens=best.tokens,
            loss=best.loss,
            step_time_s=best.step_time_s,
            step_source=best.step.sources["step_time_s"],
            priced_again=claim.priced_again is not None,
        ),
        bound=solution.bounds.dual,
        claims_infeasible=claim.report.dual_bound == float("inf"),
        gap=solution.bounds.gap,
        effort=Effort(
            candidates=len(claim.report.outcomes),
            ruled_out=counts.ruled_out_architectures,
            priced=counts.priced,
            infeasible=counts.infeasible,
            discarded=counts.discarded,
            unexamined=counts.unexamined,
        ),
        failed_checks=claim.failed_checks,
        search_s=search_s,
        checks_s=checks_s,
    )


def _provides(listed: Listed) -> str | None:
    return None if listed.provides is None else str(listed.provides.name).lower()


def _options(backend: Backend) -> str:
    """Write the fields of a backend, which are its options."""
    if not dataclasses.is_dataclass(backend):
        return ""
    fields = dataclasses.fields(backend)
    return ", ".join(f"{field.name}={getattr(backend, field.name)!r}" for field in fields)


def _words(error: BaseException) -> str:
    return explain(error) if isinstance(error, ValidationError) else said(error)
