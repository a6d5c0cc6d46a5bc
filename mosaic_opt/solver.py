"""Envelope -> problem -> search -> checks -> solution."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from math import isfinite, isnan
from typing import Literal

import numpy as np

from lawfit import peak_learning_rate
from lawfit.laws import kind_of
from lawfit.runs import NOT_STATED
from mosaic_opt.backends.base import Backend, Limits, ProgressCallback, Report, Termination
from mosaic_opt.backends.registry import resolve
from mosaic_opt.certificate import Certificate, certify
from mosaic_opt.envelope import Envelope
from mosaic_opt.outcome import Counts, Discarded, Outcome
from mosaic_opt.problem import Problem
from mosaic_opt.result import (
    Bounds,
    Candidate,
    Fastest,
    LayoutCounts,
    NearTieRule,
    Optimum,
    Rejected,
    RuledOut,
    Solution,
    Status,
    Tally,
)
from mosaic_opt.spaces import FamilySpace, UnionSpace, shape_of


def solve(
    envelope: Envelope,
    *,
    backend: Backend | str = "enumerate",
    limits: Limits | None = None,
    progress: ProgressCallback | None = None,
) -> Solution:
    """Find the architecture, token budget and layout with the least predicted loss.

    Parameters
    ----------
    envelope : Envelope
        What is fixed, and what may be chosen.
    backend : Backend or str
        How to search; a name takes the backend's default options.
    limits : Limits, optional
        When to stop; never unless given.
    progress : callable, optional
        Called after each candidate.

    Returns
    -------
    Solution
        With status OPTIMAL only if the search left nothing and every check passed.

    Raises
    ------
    MosaicError
        Unknown or unavailable backend.
    PerfmodelError
        A hardware pack or stack profile that cannot be read.
    """
    problem = Problem(envelope)
    searcher = resolve(backend)
    report = searcher.search(problem, limits or Limits(), progress=progress)
    return assemble(problem, report, certify(problem, report), searcher.name)


def assemble(problem: Problem, report: Report, certificate: Certificate, backend: str) -> Solution:
    """Put a report and its certificate together as a solution."""
    best = report.incumbent
    ranked = sorted((o for o in report.outcomes if o.feasible), key=lambda o: (o.loss, o.index))
    tolerance = None if best is None else problem.loss_tolerance(best)
    candidates = tuple(
        _candidate(problem, outcome, rank, ranked[0].loss)
        for rank, outcome in enumerate(ranked, start=1)
    )
    near = tuple(c for c in candidates if tolerance is not None and c.delta_loss <= tolerance)
    dual = report.dual_bound if abs(report.dual_bound) < float("inf") else None
    primal = best.loss if best is not None else None
    space = problem.envelope.candidates
    return Solution(
        name=problem.envelope.name,
        status=_status(report, certificate),
        termination=report.termination.value,
        optimum=None if best is None else _optimum(problem, best),
        bounds=Bounds(
            primal=primal,
            dual=dual,
            gap=None if primal is None or dual is None else primal - dual,
        ),
        near_ties=near,
        near_feasible=(
            ()
            if best is None or tolerance is None
            else _near_feasible(problem, report, best, tolerance)
        ),
        near_tie_rule=NearTieRule(mfu_error=problem.envelope.mfu_error, loss_tolerance=tolerance),
        candidates=candidates,
        rejected=tuple(_rejected(problem, o) for o in report.outcomes if not o.feasible),
        ruled_out=_ruled_out(problem, report.discarded),
        counts=_tally(problem, report),
        dropped_points=space.dropped if isinstance(space, FamilySpace | UnionSpace) else None,
        certificate=certificate,
        provenance=provenance(problem, backend),
    )


def _near_feasible(
    problem: Problem, report: Report, best: Outcome, tolerance: float
) -> tuple[Candidate, ...]:
    """Return the candidates that an MFU higher by the stated error would admit among the ties.

    They lack tokens by less than the error, so the model cannot say that they are infeasible.
    """
    admitted = []
    for outcome in report.outcomes:
        if outcome.feasible or outcome.nearest_row < 0:
            continue
        faster = outcome.step_s / (1.0 + problem.envelope.mfu_error)
        budget = problem.tokens(outcome.index, faster)
        if isnan(budget.tokens):
            continue
        loss = problem.loss(outcome.index, budget.tokens)
        if loss - best.loss <= tolerance:
            admitted.append(
                replace(
                    outcome,
                    row=outcome.nearest_row,
                    step_s=faster,
                    tokens=budget.tokens,
                    loss=loss,
                    binding=budget.binding,
                )
            )
    ranked = sorted(admitted, key=lambda o: (o.loss, o.index))
    return tuple(_candidate(problem, o, rank, best.loss) for rank, o in enumerate(ranked, start=1))


def _status(report: Report, certificate: Certificate) -> Status:
    if report.incumbent is None:
        finished = report.termination is Termination.EXHAUSTED and certificate.certified
        return Status.INFEASIBLE if finished else Status.UNKNOWN
    return Status.OPTIMAL if certificate.certified else Status.FEASIBLE


def _mfu(problem: Problem, outcome: Outcome) -> float:
    envelope = problem.envelope
    flops = problem.architectures[outcome.index].flops_per_token(
        envelope.mfu_convention, envelope.batch.seq_len
    )
    peak = envelope.cluster.n_devices * envelope.cluster.peak_flops
    return flops * envelope.batch.tokens / (outcome.step_s * peak)


def _candidate(problem: Problem, outcome: Outcome, rank: int, best_loss: float) -> Candidate:
    architecture = problem.architectures[outcome.index]
    n_active = problem.n_active(outcome.index)
    return Candidate(
        rank=rank,
        index=outcome.index,
        name=architecture.name,
        n_active=n_active,
        n_total=problem.n_total(outcome.index),
        sparsity=architecture.sparsity,
        expert_split=architecture.expert_split,
        plan=problem.table.plan(outcome.row),
        tokens=outcome.tokens,
        tokens_per_parameter=outcome.tokens / n_active,
        binding=outcome.binding,
        loss=outcome.loss,
        delta_loss=outcome.loss - best_loss,
        mfu=_mfu(problem, outcome),
        step_time_s=outcome.step_s,
        memory_bytes=outcome.memory_bytes,
        layouts=_layouts(outcome.counts, outcome.cutoff_s),
    )


def _layouts(counts: Counts, cutoff_s: float) -> LayoutCounts:
    fared = counts._asdict()
    del fared["plans"]
    return LayoutCounts(**fared, cutoff_s=_finite(cutoff_s))


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _rejected(problem: Problem, outcome: Outcome) -> Rejected:
    shortfall = _finite(outcome.shortfall)
    unit: Literal["B", "s"] = "B" if outcome.reason == "memory" else "s"
    fastest = None
    if outcome.nearest_row >= 0:
        fastest = Fastest(
            plan=problem.table.plan(outcome.nearest_row),
            step_time_s=outcome.step_s,
            memory_bytes=outcome.memory_bytes,
        )
    return Rejected(
        name=problem.architectures[outcome.index].name,
        index=outcome.index,
        reason=outcome.reason,
        detail=outcome.detail,
        shortfall=shortfall,
        unit=None if shortfall is None else unit,
        fastest=fastest,
        layouts=_layouts(outcome.counts, outcome.cutoff_s),
    )


def _ruled_out(problem: Problem, discarded: Sequence[Discarded]) -> tuple[RuledOut, ...]:
    indices = np.array([d.index for d in discarded], dtype=np.int64)
    bounds_s = np.array([d.bound_s for d in discarded])
    losses = problem.losses(indices, bounds_s).tolist()
    everything = problem.all_discarded
    whole = _layouts(everything, 0.0)
    return tuple(
        RuledOut(
            name=problem.architectures[d.index].name,
            index=d.index,
            step_bound_s=_finite(d.bound_s),
            loss_bound=_finite(loss),
            layouts=whole if d.counts is everything else _layouts(d.counts, d.cutoff_s),
        )
        for d, loss in zip(discarded, losses, strict=True)
    )


def _optimum(problem: Problem, best: Outcome) -> Optimum:
    envelope, plan = problem.envelope, problem.table.plan(best.row)
    step = problem.reprice(best.index, plan)
    n_active = problem.n_active(best.index)
    worth = problem.efficiency(best.index, best.tokens)
    law_flags = envelope.law.flags(
        n_total=float(problem.n_total(best.index)),
        n_active=float(n_active),
        tokens=best.tokens if worth is None else worth.tokens_effective,
        expert_split=problem.expert_split(best.index),
    )
    shape_flags = envelope.law.shape_range.flags(shape_of(problem.architectures[best.index]))
    goodput = envelope.goodput_of(problem.architectures[best.index])
    available = problem.tokens(best.index, best.step_s).available
    return Optimum(
        architecture=step.architecture,
        plan=plan,
        tokens=best.tokens,
        tokens_per_parameter=best.tokens / n_active,
        tokens_available=available,
        goodput=goodput.value or 0.0,
        goodput_source=goodput.source,
        binding=best.binding,
        loss=best.loss,
        loss_source=envelope.loss_source,
        token_efficiency=worth,
        mfu=step.mfu,
        mfu_convention=step.mfu_convention.value,
        step_time_s=step.step_time_s,
        memory_bytes=step.memory_bytes,
        learning_rate=peak_learning_rate(n_active=float(n_active), tokens=best.tokens),
        model_flop=6.0 * n_active * best.tokens,
        step=step,
        spend=envelope.budget
        and envelope.budget.spend(
            envelope.cluster.n_devices, envelope.window_days, best.tokens / available
        ),
        flags=(
            *(f"law: {flag}" for flag in (*convention_flags(envelope), *law_flags, *shape_flags)),
            *step.flags,
        ),
    )


def convention_flags(envelope: Envelope) -> tuple[str, ...]:
    """Return a sentence where the runs of the law count other parameters than the envelope.

    Parameters
    ----------
    envelope : Envelope

    Returns
    -------
    tuple of str
        Empty where the words are the same but for case, hyphens and underscores, or where the
        law says nothing, as the published ones.
    """
    said, assumed = envelope.law.convention, envelope.parameter_convention.value
    if said is None or _plain(said) == _plain(assumed):
        return ()
    if said == NOT_STATED:
        return (f"what N counts in its runs is not stated, and this envelope counts {assumed}.",)
    return (
        f"N counts {said!r} in its runs and {assumed} in this envelope (parameter_convention); "
        "if they differ, so do the losses.",
    )


def _plain(words: str) -> str:
    return " ".join(words.lower().replace("-", " ").replace("_", " ").split())


def _tally(problem: Problem, report: Report) -> Tally:
    of_all = [o.counts for o in report.outcomes] + [d.counts for d in report.discarded]
    total = {name: sum(getattr(c, name) for c in of_all) for name in Counts._fields}
    return Tally(
        architectures=len(problem.architectures),
        grid_points=problem.envelope.candidates.grid_size,
        layouts=len(problem.table),
        plans=problem.size,
        priced=total["priced"],
        discarded=total["discarded"],
        infeasible=total["infeasible"],
        unexamined=len(report.unexamined) * len(problem.table),
        over_memory=total["over_memory"],
        refused=total["refused"],
        feasible_architectures=sum(outcome.feasible for outcome in report.outcomes),
        ruled_out_architectures=len(report.discarded),
    )


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def own_version() -> str:
    """Return the version of this package, "unknown" where it is not installed."""
    try:
        return version("mosaic-opt")
    except PackageNotFoundError:
        return "unknown"


def provenance(problem: Problem, backend: str) -> dict[str, object]:
    """Return what an answer rests on: packs, law, versions, and the envelope itself."""
    envelope = problem.envelope
    pack = envelope.cluster.pack
    return {
        "hardware": {"name": pack.name, "sha256": pack.digest},
        "stack": {"name": problem.profile.name, "sha256": problem.profile.digest},
        "law": {
            "kind": kind_of(envelope.law),
            "source": envelope.law.source,
            "sha256": _digest(envelope.law.model_dump_json()),
        },
        "backend": backend,
        "versions": {
            "mosaic-opt": own_version(),
            **{package: version(package) for package in ("numpy", "numba", "pydantic")},
        },
        "envelope": envelope.model_dump(mode="json"),
        "envelope_sha256": _digest(envelope.model_dump_json()),
    }
