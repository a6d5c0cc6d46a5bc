"""Checks of a backend's claims, made without the backend.

"Certified" means: of the model. The incumbent and the candidates behind it are priced again by the
scalar formulas, their tokens and losses are computed again, the bound of every block of layouts
that was discarded is computed again, and the pairs that the search reports must add up to the
space. That a candidate was rejected, and the prices of other candidates, are not checked here: they
are the word of the backend, which :func:`mosaic_opt.verification.verify` computes again, and the
tests hold against brute force.
"""

from __future__ import annotations

from math import inf, isclose, isfinite
from typing import Protocol

import numpy as np

from mosaic_opt.bounds import Bounds, Floats, Indices
from mosaic_opt.problem import Discarded, Outcome, Problem
from perfmodel.frozen import Frozen

RELATIVE_TOLERANCE = 1e-9

RUNNERS_UP = 20
"""How many candidates behind the incumbent are priced again."""

_AT_ONCE = 64


class Claims(Protocol):
    """The part of a backend's report that is checked."""

    @property
    def incumbent(self) -> Outcome | None:
        """Best candidate found."""

    @property
    def dual_bound(self) -> float:
        """Lower bound of the optimum [nats/token]."""

    @property
    def outcomes(self) -> tuple[Outcome, ...]:
        """Candidates examined."""

    @property
    def discarded(self) -> tuple[Discarded, ...]:
        """Candidates that bounds ruled out."""

    @property
    def unexamined(self) -> tuple[int, ...]:
        """Candidates not examined."""


class Check(Frozen):
    """One thing that was checked: what was claimed, what was found, in the unit of ``detail``.

    None where a number is infinite or not a number.
    """

    name: str
    passed: bool
    claimed: int | float | None
    found: int | float | None
    detail: str


class Certificate(Frozen):
    """What the checks found; ``certified`` if all of them passed and nothing is left open."""

    certified: bool
    checks: tuple[Check, ...]


def _close(a: float, b: float) -> bool:
    return a == b or isclose(a, b, rel_tol=RELATIVE_TOLERANCE)


def _check(name: str, passed: bool, claimed: float, found: float, detail: str) -> Check:
    return Check(
        name=name,
        passed=bool(passed),
        claimed=claimed if isfinite(claimed) else None,
        found=found if isfinite(found) else None,
        detail=detail,
    )


def _price_checks(problem: Problem, outcome: Outcome) -> list[Check]:
    """Price a candidate's best layout again, with the scalar formulas."""
    plan = problem.table.plan(outcome.row)
    estimate = problem.reprice(outcome.index, plan)  # raises if the plan is illegal
    step_s, memory = estimate.step_time_s, estimate.memory_bytes
    budget = problem.tokens(outcome.index, step_s)
    loss = problem.loss(outcome.index, budget.tokens)
    fits = memory <= problem.envelope.memory_cap_bytes
    return [
        _check(
            "step_time",
            _close(step_s, outcome.step_s),
            outcome.step_s,
            step_s,
            "step of the incumbent by the scalar formulas [s]",
        ),
        _check(
            "memory",
            _close(memory, outcome.memory_bytes) and fits,
            outcome.memory_bytes,
            memory,
            "its memory by the scalar formulas, within the cap [B]",
        ),
        _check(
            "tokens",
            _close(budget.tokens, outcome.tokens) and budget.binding == outcome.binding,
            outcome.tokens,
            budget.tokens,
            "its tokens [token]",
        ),
        _check("loss", _close(loss, outcome.loss), outcome.loss, loss, "its loss [nats/token]"),
    ]


def _runners_up(problem: Problem, claims: Claims) -> Check:
    """Price the next best candidates again: a wrong price would most likely be among them."""
    feasible = sorted((o for o in claims.outcomes if o.feasible), key=lambda o: (o.loss, o.index))
    checked = feasible[1 : 1 + RUNNERS_UP]
    wrong = [
        problem.architectures[o.index].name
        for o in checked
        if not all(check.passed for check in _price_checks(problem, o))
    ]
    return _check(
        "runners_up",
        not wrong,
        len(checked),
        len(checked) - len(wrong),
        f"candidates behind it that the scalar formulas price alike; wrong: "
        f"{', '.join(wrong) or 'none'}",
    )


class _Discards:
    """Recomputed bounds of the candidates that have discarded layouts."""

    def __init__(self, problem: Problem, claims: Claims) -> None:
        self.problem, self.bounds = problem, Bounds(problem)
        self.bar = self.bounds.bar(claims.incumbent)
        self.unsound: list[int] = []  # candidates with a block whose bound does not discard it
        self.miscounted: list[int] = []

    def look_at(self, found: list[Outcome | Discarded]) -> None:
        """Check some candidates."""
        indices = np.array([o.index for o in found], dtype=np.int64)
        floors = self.bounds.floors(indices)
        cutoffs = np.array([o.cutoff_s for o in found])
        ahead = np.where(floors > cutoffs[:, None], floors, inf).min(axis=1, initial=inf)
        enough = (ahead == inf) | (self.bounds.losses(indices, ahead) > self.bar)
        for place, one in enumerate(found):
            self._one(one, floors[place], float(ahead[place]), bool(enough[place]))

    def _one(self, one: Outcome | Discarded, floors: Floats, ahead_s: float, enough: bool) -> None:
        if isinstance(one, Discarded):
            sound = enough and (one.bound_s == ahead_s or _close(one.bound_s, ahead_s))
        else:
            step_s = one.step_s if one.row >= 0 or one.nearest_row >= 0 else inf
            sound = ahead_s == inf or step_s < ahead_s
        if not sound:
            self.unsound.append(one.index)
        if isinstance(one, Discarded) and one.counts == self.problem.all_discarded:
            priced, legal = (floors <= one.cutoff_s).sum(), len(self.problem.table)
        else:
            rows, legal = self.bounds.rows(one.index, floors, one.cutoff_s)
            priced = len(rows)
        counts = one.counts
        agree = (counts.priced, counts.discarded) == (priced, legal - priced)
        if not agree or counts.plans - counts.infeasible != legal:
            self.miscounted.append(one.index)


def _discard_checks(problem: Problem, claims: Claims) -> list[Check]:
    """Compute the bounds of discarded blocks again, and what they leave to be priced."""
    n = range(len(problem.architectures))
    every: list[Outcome | Discarded] = [o for o in claims.outcomes if o.cutoff_s < inf]
    every = [o for o in (*every, *claims.discarded) if o.index in n]
    discards = _Discards(problem, claims)
    for place in range(0, len(every), _AT_ONCE):
        discards.look_at(every[place : place + _AT_ONCE])
    return [
        _check(
            name,
            not wrong,
            len(every),
            len(every) - len(wrong),
            f"{detail}; wrong: {_names(problem, wrong)}",
        )
        for name, wrong, detail in (
            (
                "discarded_bounds",
                discards.unsound,
                "candidates with discarded layouts, whose bounds discard them again",
            ),
            ("discarded_counts", discards.miscounted, "those whose layouts add up again"),
        )
    ]


def _names(problem: Problem, indices: list[int]) -> str:
    names = [problem.architectures[i].name for i in indices[:5]]
    more = f" and {len(indices) - 5} more" if len(indices) > 5 else ""
    return (", ".join(names) or "none") + more


def _bound_of_unexamined(problem: Problem, claims: Claims) -> float:
    """Return a bound of the loss of every candidate that was not examined [nats/token]."""
    bounds = Bounds(problem)
    indices: Indices = np.array(
        [i for i in claims.unexamined if i in range(len(problem.architectures))], dtype=np.int64
    )
    least = inf
    for place in range(0, len(indices), _AT_ONCE):
        some = indices[place : place + _AT_ONCE]
        floors = bounds.floors(some).min(axis=1, initial=inf)
        least = min(least, float(problem.losses(some, floors).min(initial=inf)))
    return least


def certify(problem: Problem, claims: Claims) -> Certificate:
    """Check the claims of a report against the problem.

    Returns
    -------
    Certificate
        ``certified`` only if every check passed: the incumbent is what it is said to be, no
        examined candidate is better, no candidate is left, what was discarded is worse than the
        incumbent and its near-ties, the pairs add up and the bound meets the incumbent.
    """
    settled: list[Outcome | Discarded] = [*claims.outcomes, *claims.discarded]
    everything = sorted([*(o.index for o in settled), *claims.unexamined])
    pairs = sum(o.counts.priced + o.counts.infeasible + o.counts.discarded for o in settled)
    pairs += len(claims.unexamined) * len(problem.table)
    losses = [o.loss for o in claims.outcomes if o.feasible]
    best = min(losses, default=inf)
    primal = claims.incumbent.loss if claims.incumbent is not None else inf
    bound = min(primal, _bound_of_unexamined(problem, claims))
    checks = [
        _check(
            "candidates",
            everything == list(range(len(problem.architectures))),
            len(everything),
            len(problem.architectures),
            f"candidates; {len(claims.outcomes)} examined, {len(claims.discarded)} discarded, "
            f"{len(claims.unexamined)} not examined",
        ),
        _check("pairs", pairs == problem.size, pairs, problem.size, "pairs accounted for"),
        *_discard_checks(problem, claims),
        _check(
            "incumbent_is_best",
            primal == best and (claims.incumbent is None or claims.incumbent in claims.outcomes),
            primal,
            best,
            "least loss of the examined [nats/token]",
        ),
        _check(
            "bound",
            claims.dual_bound <= primal,
            claims.dual_bound,
            bound,
            "bound of every loss, at most the incumbent's; found: by the bounds of blocks",
        ),
        _check(
            "nothing_left",
            not claims.unexamined and claims.dual_bound == primal,
            len(claims.unexamined),
            0,
            "candidates left, and the bound is the incumbent's loss",
        ),
    ]
    if claims.incumbent is not None:
        checks += [*_price_checks(problem, claims.incumbent), _runners_up(problem, claims)]
    return Certificate(certified=all(check.passed for check in checks), checks=tuple(checks))
