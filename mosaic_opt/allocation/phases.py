"""The optimum of every training window at once, at a fixed cluster."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, Literal

from pydantic import ConfigDict

from mosaic_opt.allocation.curves import (
    Curve,
    Piece,
    Pieces,
    lower_envelope,
    pieces,
    survey,
    token_form,
)
from mosaic_opt.allocation.variants import node_counts, with_nodes
from mosaic_opt.backends.base import ProgressCallback
from mosaic_opt.envelope import MAX_WINDOW_DAYS, Envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.solver import provenance
from perfmodel.frozen import Frozen
from perfmodel.plan import Plan
from perfmodel.sources import Source


class _Finite(Frozen):
    model_config = ConfigDict(allow_inf_nan=False)


class Phase(_Finite):
    """Windows over which one architecture is the optimum.

    Attributes
    ----------
    days_from, days_to : float
        Where the phase begins and ends [day]; its neighbour is as good there, unless the phase
        begins because a candidate first meets the token rule.
    architecture : str
        Name of the candidate.
    n_active, n_total : int
        Parameters under the envelope's convention.
    sparsity : float
        S = 1 - N_act / N_tot, non-embedding [-].
    expert_split : float or None
        G [-].
    plan : Plan
        Its best layout, the same in every window.
    step_time_s, memory_bytes, mfu : float
        Of that layout; ``step_source`` says what the time rests on.
    goodput : float
        Share of the windows that trains [-]; ``goodput_source`` says what it rests on.
    tokens_from, tokens_to : float
        Tokens trained on at both ends.
    loss_from, loss_to : float
        Loss at both ends [nats/token]; ``loss_from`` is None where the phase begins at no window
        at all, where the loss has no bound.
    binding_from, binding_to : str
        What sets the tokens at both ends: "window", "max_tokens", "max_tokens_per_parameter" or
        "grid".
    capped_from_days : float or None
        From when a cap holds, and more days bring nothing [day].
    """

    days_from: float
    days_to: float
    architecture: str
    n_active: int
    n_total: int
    sparsity: float
    expert_split: float | None
    plan: Plan
    step_time_s: float
    step_source: Source
    memory_bytes: float
    mfu: float
    goodput: float
    goodput_source: Source
    tokens_from: float
    tokens_to: float
    loss_from: float | None
    loss_to: float
    binding_from: str
    binding_to: str
    capped_from_days: float | None


class Phases(_Finite):
    """The optimum of every window of an envelope's cluster.

    Attributes
    ----------
    name : str
        The envelope's.
    nodes, n_devices : int
        Cluster.
    days_from, days_to : float
        Windows asked for [day].
    candidates : int
        Architectures surveyed.
    with_layout : int
        Of them, those with a layout that is legal and fits.
    phases : tuple of Phase
        In order, without gaps from the first window that any candidate can use; empty if none can.
    loss_source : str
        What the losses rest on.
    provenance : dict
        Packs, law, versions, and the envelope; its window plays no part.
    """

    schema_version: Literal[1] = 1
    name: str
    nodes: int
    n_devices: int
    days_from: float
    days_to: float
    candidates: int
    with_layout: int
    phases: tuple[Phase, ...]
    loss_source: str
    provenance: dict[str, Any]


class PhasesByNodes(_Finite):
    """One `Phases` for each node count, as asked for."""

    schema_version: Literal[1] = 1
    clusters: tuple[Phases, ...]


def phases(
    envelope: Envelope,
    *,
    days_from: float = 0.0,
    days_to: float = MAX_WINDOW_DAYS,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> Phases:
    """Find the optimum of every window in one survey: the exact lower envelope of (27).

    Parameters
    ----------
    envelope : Envelope
        Its window plays no part.
    days_from, days_to : float
        Windows to report on [day]; all that an envelope may have unless given.
    workers : int, optional
        Threads; all cores unless given.
    progress : callable, optional
        Called after each candidate.

    Returns
    -------
    Phases

    Raises
    ------
    MosaicError
        The range is empty or beyond the longest window, or the law is not of the form
        ``A(Z) + B(Z) D^-beta``.
    """
    if not 0.0 <= days_from < days_to <= MAX_WINDOW_DAYS:
        raise MosaicError(
            f"The windows from {days_from:g} to {days_to:g} days must ascend, from 0 to "
            f"{MAX_WINDOW_DAYS:g} at most."
        )
    problem = Problem(envelope)
    curves = {c.candidate: c for c in survey(problem, workers=workers, progress=progress)}
    found = window_optima(problem, tuple(curves.values()))
    inside = tuple(
        p._replace(days_from=max(p.days_from, days_from), days_to=min(p.days_to, days_to))
        for p in found
        if p.days_from < days_to and p.days_to > days_from
    )
    groups = (tuple(group) for _, group in groupby(inside, key=lambda piece: piece.candidate))
    return Phases(
        name=envelope.name,
        nodes=envelope.cluster.nodes,
        n_devices=envelope.cluster.n_devices,
        days_from=days_from,
        days_to=days_to,
        candidates=len(problem.architectures),
        with_layout=len(curves),
        phases=tuple(_phase(problem, curves[group[0].candidate], group) for group in groups),
        loss_source=envelope.loss_source,
        provenance=provenance(problem, "enumerate"),
    )


def phases_by_nodes(
    envelope: Envelope,
    nodes: Sequence[int],
    *,
    days_from: float = 0.0,
    days_to: float = MAX_WINDOW_DAYS,
    workers: int | None = None,
    progress: ProgressCallback | None = None,
) -> PhasesByNodes:
    """Find the phases of an envelope at each of several node counts; see `phases`.

    Raises
    ------
    MosaicError
        As `phases`; no or impossible node counts.
    """
    clusters = [with_nodes(envelope, n) for n in node_counts(nodes)]
    return PhasesByNodes(
        clusters=tuple(
            phases(e, days_from=days_from, days_to=days_to, workers=workers, progress=progress)
            for e in clusters
        )
    )


def window_optima(problem: Problem, curves: Sequence[Curve]) -> Pieces:
    """Return the optimum of every window as pieces, in order and without gaps."""
    beta = token_form(problem.envelope.law).beta
    return lower_envelope([pieces(problem, curve, beta) for curve in curves], beta)


def _phase(problem: Problem, curve: Curve, group: Pieces) -> Phase:
    index, first, last = curve.candidate, group[0], group[-1]
    architecture = problem.architectures[index]
    plan = problem.table.plan(curve.row)
    step = problem.reprice(index, plan)
    goodput = problem.envelope.goodput_of(architecture)
    capped = next((p for p in group if p.binding.startswith("max_tokens")), None)
    return Phase(
        days_from=first.days_from,
        days_to=last.days_to,
        architecture=architecture.name,
        n_active=problem.n_active(index),
        n_total=problem.n_total(index),
        sparsity=architecture.sparsity,
        expert_split=architecture.expert_split,
        plan=plan,
        step_time_s=curve.step_s,
        step_source=step.sources["step_time_s"],
        memory_bytes=curve.memory_bytes,
        mfu=step.mfu,
        goodput=goodput.value or 0.0,
        goodput_source=goodput.source,
        tokens_from=_tokens(curve, first, first.days_from),
        tokens_to=_tokens(curve, last, last.days_to),
        loss_from=None if first.days_from == 0.0 else _loss(problem, curve, first, first.days_from),
        loss_to=_loss(problem, curve, last, last.days_to),
        binding_from=first.binding,
        binding_to=last.binding,
        capped_from_days=None if capped is None else capped.days_from,
    )


def _tokens(curve: Curve, piece: Piece, days: float) -> float:
    return curve.tokens_per_day * days if piece.tokens is None else piece.tokens


def _loss(problem: Problem, curve: Curve, piece: Piece, days: float) -> float:
    return problem.loss(curve.candidate, _tokens(curve, piece, days))
