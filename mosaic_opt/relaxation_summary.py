"""What is made of a solver's answer: pure functions from programs and answers to parts of a result.

They need no solver; :mod:`mosaic_opt.backends.gp` is what talks to one.
"""

from __future__ import annotations

from math import exp, inf, isfinite, log
from typing import Literal, NamedTuple

import numpy as np

from mosaic_opt.problem import Problem
from mosaic_opt.relaxation import Array, D, G, N, Points, Program, U, delivered_share
from mosaic_opt.relaxation_result import Agreement, GapSplit, RelaxedPoint, SolverRun, UsefulShare

AGREEMENT = 1e-6
"""By how much the optima of two solvers may differ [nats/token]."""

_NOISE = 1e-8
"""A multiplier up to this is the solver's way of writing 0 [nats/token]."""

BINDS = 1e-6
"""A constraint binds if its multipliers add up to more [nats/token]."""


class Answer(NamedTuple):
    """What a solver proposed; x and multipliers are NaN where it proposed nothing."""

    solver: str
    status: str
    words: str
    value: float
    x: Array  # (4,)
    multipliers: Array  # (rows,)


def run_of(program: Literal["monomial", "hull"], answer: Answer, bound: float) -> SolverRun:
    """Return a solver's run with the bound that was evaluated from its answer [nats/token]."""
    return SolverRun(
        program=program,
        solver=answer.solver.lower(),
        status=answer.status,
        words=answer.words,
        value=answer.value if isfinite(answer.value) else None,
        bound=bound if isfinite(bound) else None,
    )


def agreements(runs: tuple[SolverRun, ...]) -> tuple[Agreement, ...]:
    """Compare the optima that two solvers report of the same program, for each program."""
    found = []
    for program in dict.fromkeys(run.program for run in runs):
        pair = [run for run in runs if run.program == program]
        if len(pair) != 2:
            continue
        first, second = pair
        apart = (
            None if first.value is None or second.value is None else abs(first.value - second.value)
        )
        found.append(
            Agreement(
                program=program,
                solvers=(first.solver, second.solver),
                difference=apart,
                tolerance=AGREEMENT,
                agree=None if apart is None else apart <= AGREEMENT,
            )
        )
    return tuple(found)


def best_bound(runs: tuple[SolverRun, ...]) -> int:
    """Return the place of the run with the best checked bound; the first where there is none."""
    bounds = [-inf if run.bound is None else run.bound for run in runs]
    return bounds.index(max(bounds))


def weights_of(program: Program, multipliers: Array) -> dict[str, float]:
    """Add up the multipliers of each constraint [nats/token]."""
    weights: dict[str, float] = {}
    for name, y in zip(program.names, multipliers, strict=True):
        weights[name] = weights.get(name, 0.0) + (float(y) if y > _NOISE else 0.0)
    return weights


def binding(weights: dict[str, float]) -> tuple[str, ...]:
    """Name the constraints that bind, the heaviest first."""
    heavy = (name for name in weights if weights[name] > BINDS)
    return tuple(sorted(heavy, key=lambda name: -weights[name]))


def _compute_pieces(problem: Problem, program: Program) -> list[tuple[Array, float]]:
    """Return the monomials above MFU* eta_good: exponents (N_tot, 1-S, G) and log coefficient."""
    pieces = []
    base = np.array([1.0, 1.0, 1.0, 0.0])
    for name, row, limit in zip(program.names, program.rows, program.limits, strict=True):
        if name == "compute":
            constant = float(limit) - log(problem.envelope.peak_compute_flop / 6.0)
            pieces.append(((base - row)[[N, U, G]], constant))
    return pieces


def useful_shares(problem: Problem, points: Points, program: Program) -> tuple[UsefulShare, ...]:
    """Return the pieces of the envelope of MFU, and how far they lie above the candidates."""
    data, features = delivered_share(problem, points), points.x[:, [N, U, G]]
    found = []
    for powers, constant in _compute_pieces(problem, program):
        excess = constant + features @ powers - data
        found.append(
            UsefulShare(
                log_coefficient=constant,
                n_total=float(powers[0]),
                active_share=float(powers[1]),
                expert_split=float(powers[2]),
                largest_excess=float(excess.max()),
                mean_excess=float(excess.mean()),
            )
        )
    return tuple(found)


def relaxed_point(problem: Problem, program: Program, x: Array, loss: float) -> RelaxedPoint:
    """Return a point of the program in SI units."""
    share = min(c + x[[N, U, G]] @ powers for powers, c in _compute_pieces(problem, program))
    active, tokens = exp(x[N] + x[U]), exp(x[D])
    return RelaxedPoint(
        n_total=exp(x[N]),
        n_active=active,
        sparsity=1.0 - exp(x[U]),
        expert_split=exp(x[G]),
        tokens=tokens,
        tokens_per_parameter=tokens / active,
        mfu=exp(share),
        loss=loss,
    )


def gap_split(exact: float, hull: float, lower: float) -> GapSplit:
    """Split the gap between the exact optimum and a bound at that of the hull [nats/token]."""
    return GapSplit(
        exact=exact, hull=hull, gap=exact - lower, integrality=exact - hull, envelope=hull - lower
    )
