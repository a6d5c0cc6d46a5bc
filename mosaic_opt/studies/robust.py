"""How sure the choice of an envelope is: its optimum under draws of all that it rests on."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lawfit import LawEnsemble
from mosaic_opt.backends.base import Limits, Termination, check_workers
from mosaic_opt.backends.enumerate import Enumerate
from mosaic_opt.envelope import Envelope
from mosaic_opt.errors import MosaicError
from mosaic_opt.problem import Problem
from mosaic_opt.result import Solution
from mosaic_opt.solver import provenance, solve
from mosaic_opt.studies.draws import (
    PARTS,
    Count,
    Floats,
    LowerLevel,
    Part,
    Shares,
    Worlds,
    days_for,
    draw,
    errors_of,
    worlds,
)
from mosaic_opt.studies.robust_result import (
    HELD_SHARE,
    NEAR_SHARE,
    Quantiles,
    RestsOn,
    Robust,
    RobustCandidate,
)
from perfmodel.sources import Source, weakest
from perfmodel.threads import in_order

MAX_DRAWS = 100_000

MAX_CELLS = 30_000_000
"""Most draws times candidates, of which some ten numbers are held at once."""


class _Choice(NamedTuple):
    """What the draws say of the choice; arrays over all candidates of the problem."""

    probability: Floats
    near: Floats
    feasible: Floats
    expected: Floats  # over the draws in which a candidate is feasible; NaN if in none
    largest: Floats  # inf if infeasible in a draw that has an optimum
    winners: NDArray[np.int64]  # of each draw; -1 if it has none


def robust(
    envelope: Envelope,
    *,
    draws: int = 500,
    seed: int = 0,
    ensemble: LawEnsemble | None = None,
    uncertain: Sequence[Part] = PARTS,
    shares: Shares | None = None,
    workers: int | None = None,
    progress: Count | None = None,
) -> Robust:
    """Solve an envelope under draws of its law, its stack's constants and the model's error.

    Parameters
    ----------
    envelope : Envelope
    draws : int
        How many.
    seed : int
        Of all generators, at least 0; the same seed gives the same answer, whatever ``workers``.
    ensemble : LawEnsemble, optional
        Draws of the law, at least ``draws`` of them; those of `lawfit.published_ensemble` for the
        joint law with Table 2 of arXiv 2608.10605, if none are given.
    uncertain : sequence of {"law", "stack", "residual"}
        What is drawn; the rest stays as stated.
    shares : Shares, optional
        How much of the residual the candidates of a draw have in common; as measured unless given.
    workers : int, optional
        Threads; all cores unless given.
    progress : callable, optional
        Called with (what, done, of).

    Returns
    -------
    Robust
        After an interrupt, of the draws that were done.

    Raises
    ------
    MosaicError
        An option is out of range, or no draws of the law are known.
    PerfmodelError
        A hardware pack or stack profile that cannot be read.
    """
    parts = _checked(draws, seed, uncertain, workers)
    split = shares or Shares()
    problem = Problem(envelope)
    n = len(problem.architectures)
    if draws * n > MAX_CELLS:
        raise MosaicError(
            f"draws={draws} of {n} candidates are {draws * n:,} losses, which must be at most "
            f"{MAX_CELLS:,}; nearest: {MAX_CELLS // n}."
        )
    point = solve(envelope, backend=Enumerate(workers=workers), limits=Limits())
    if point.termination == Termination.INTERRUPTED.value:
        raise KeyboardInterrupt
    lower, stated = LowerLevel(problem), (problem.profile.stack(),)
    rows, step_s = np.full(n, -1, dtype=np.int64), np.full(n, np.inf)
    for i, (least, row) in enumerate(in_order(lambda i: lower.least(i, stated), range(n), workers)):
        rows[i], step_s[i] = row[0], least[0]
    errors, names = errors_of(problem, rows)
    drawn = draw(
        problem,
        draws,
        seed,
        uncertain=parts,
        errors=errors,
        rows=rows,
        ensemble=ensemble,
        shares=split,
        progress=progress,
    )
    solved = worlds(lower, drawn, likely=rows, workers=workers, progress=progress)
    laws = drawn.laws.first(len(solved.losses))
    rests_on = RestsOn(
        law=Source(laws.basis) if "law" in parts else None,
        law_method=laws.method,
        stack=_stack_source(problem) if "stack" in parts else None,
        constants=tuple(problem.profile.constants) if "stack" in parts else (),
        residual=Source.ASSUMED if "residual" in parts else None,
        residual_errors=names if "residual" in parts else (),
        residual_shares=split.model_dump() if "residual" in parts else {},
        seed=seed,
    )
    return _assemble(problem, point, solved, laws, rows, step_s, draws, rests_on)


def _checked(
    draws: int, seed: int, uncertain: Sequence[Part], workers: int | None
) -> tuple[Part, ...]:
    if not 1 <= draws <= MAX_DRAWS:
        near = min(max(draws, 1), MAX_DRAWS)
        raise MosaicError(f"draws={draws} must be from 1 to {MAX_DRAWS}; nearest: {near}.")
    if seed < 0:
        raise MosaicError(f"seed={seed} must be at least 0; nearest: 0.")
    check_workers(workers)
    unknown = [part for part in uncertain if part not in PARTS]
    if unknown or isinstance(uncertain, str) or not uncertain:
        said = repr(uncertain) if isinstance(uncertain, str) else repr(tuple(uncertain))
        raise MosaicError(f"uncertain={said} must list some of {', '.join(PARTS)}.")
    return tuple(part for part in PARTS if part in uncertain)


def _stack_source(problem: Problem) -> Source:
    constants = problem.profile.constants.values()
    return weakest([Source.FITTED, *(c.source for c in constants)])


# ---------------------------------------------------------------- what the draws say


def choice_of(losses: Floats, tolerance: float) -> _Choice:
    """Summarise losses of shape (draws, candidates), inf where infeasible [nats/token]."""
    best = losses.min(axis=1, initial=np.inf)
    answered = np.isfinite(best)
    least = losses.argmin(axis=1) if losses.shape[1] else 0  # the first of equals
    winners = np.where(answered, least, -1)
    feasible = np.isfinite(losses)
    regret = losses[answered] - best[answered, None]
    count = feasible.sum(axis=0)
    finite = np.where(np.isfinite(regret), regret, 0.0)
    return _Choice(
        probability=(winners[:, None] == np.arange(losses.shape[1])).mean(axis=0),
        near=(regret <= tolerance).sum(axis=0) / len(losses),
        feasible=feasible.mean(axis=0),
        expected=np.where(count > 0, finite.sum(axis=0) / np.maximum(count, 1), np.nan),
        largest=regret.max(axis=0, initial=0.0),
        winners=winners.astype(np.int64),
    )


def _least(values: Floats, among: NDArray[np.bool_]) -> int | None:
    """Return the place of the least value; of equals the first."""
    return int(np.argmin(np.where(among, values, np.inf))) if among.any() else None


def _quantiles(values: Floats) -> Quantiles:
    """Return quantiles that are values themselves, so that an infinite one stays infinite."""
    if not len(values):
        return Quantiles(low=None, median=None, high=None)
    points = np.quantile(values, (0.05, 0.5, 0.95), method="inverted_cdf")
    low, median, high = (float(x) if np.isfinite(x) else None for x in points)
    return Quantiles(low=low, median=median, high=high)


def _assemble(
    problem: Problem,
    point: Solution,
    solved: Worlds,
    laws: LawEnsemble,
    rows: NDArray[np.int64],
    step_s: Floats,
    asked: int,
    rests_on: RestsOn,
) -> Robust:
    tolerance = point.near_tie_rule.loss_tolerance
    choice = choice_of(solved.losses, tolerance or 0.0)
    done = len(solved.losses)
    names = [a.name for a in problem.architectures]
    answered = choice.winners >= 0
    always = np.isfinite(choice.largest) & bool(answered.any())
    probable = int(np.argmax(choice.probability)) if answered.any() else None
    expected, minimax = (_least(v, always) for v in (choice.expected, choice.largest))
    ranked = sorted(
        range(len(names)),
        key=lambda i: (
            -choice.probability[i],
            -choice.near[i],
            np.nan_to_num(choice.expected[i]),
            i,
        ),
    )
    ties = {c.index for c in point.near_ties}
    tied = [i for i in ranked if i in ties]
    near = [i for i in ranked if choice.near[i] >= NEAR_SHARE]
    chosen = {i for i in (probable, expected, minimax) if i is not None}
    listed = [
        i
        for i in ranked
        if choice.probability[i] > 0.0 or i in chosen or i in ties or i in set(near)
    ]
    held = np.cumsum([choice.probability[i] for i in ranked])
    enough = int(np.searchsorted(held, HELD_SHARE - 1e-12)) + 1
    optimum = point.optimum
    some = np.array(listed, dtype=np.int64)
    days = (
        np.full((done, len(listed)), np.inf)
        if optimum is None
        else days_for(problem, laws, solved.step_s, optimum.loss, some)
    )
    budgets = [problem.tokens(i, float(step_s[i])).tokens for i in listed]  # NaN without a layout
    return Robust(
        name=problem.envelope.name,
        draws=done,
        draws_asked=asked,
        draws_without_optimum=int(np.count_nonzero(~answered)),
        point_optimum=None if optimum is None else str(optimum.architecture["name"]),
        promised_loss=None if optimum is None else optimum.loss,
        candidates=tuple(
            RobustCandidate(
                name=names[i],
                n_active=problem.n_active(i),
                n_total=problem.n_total(i),
                plan=None if rows[i] < 0 else problem.table.plan(int(rows[i])),
                point_loss=None if np.isnan(budgets[k]) else problem.loss(i, budgets[k]),
                near_tie=i in ties,
                probability=float(choice.probability[i]),
                probability_error=sqrt(
                    float(choice.probability[i] * (1.0 - choice.probability[i])) / done
                ),
                probability_near=float(choice.near[i]),
                feasible=float(choice.feasible[i]),
                expected_regret=_finite(choice.expected[i]),
                max_regret=_finite(choice.largest[i]) if answered.any() else None,
                loss=_quantiles(solved.losses[np.isfinite(solved.losses[:, i]), i]),
                days=_quantiles(days[:, k]),
                same_layout=None if rows[i] < 0 else float((solved.rows[:, i] == rows[i]).mean()),
            )
            for k, i in enumerate(listed)
        ),
        most_probable=_named(names, probable),
        least_expected_regret=_named(names, expected),
        minimax_regret=_named(names, minimax),
        near_ties=tuple(names[i] for i in tied),
        near_ties_hold=float(np.isin(choice.winners, tied).mean()),
        tolerance=tolerance,
        indistinguishable=tuple(names[i] for i in near),
        likely_optima=tuple(names[i] for i in ranked[:enough] if choice.probability[i] > 0.0),
        counts={
            "candidates": len(names),
            "feasible": int(np.count_nonzero(choice.feasible)),
            "optimum": int(np.count_nonzero(choice.probability)),
        },
        rests_on=rests_on,
        provenance=provenance(problem, "enumerate"),
    )


def _named(names: Sequence[str], index: int | None) -> str | None:
    return None if index is None else names[index]


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
