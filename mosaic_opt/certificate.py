"""Checks of a backend's claims, made without the backend.

"Certified" means: of the model. The incumbent and the candidates behind it are priced again by the
scalar formulas, their tokens and losses are computed again, the bound of every block of layouts
that was discarded is computed again, and the pairs that the search reports must add up to the
space. That a candidate was rejected, and the prices of other candidates, are not checked here: they
are the word of the backend, which :func:`mosaic_opt.verification.verify` computes again, and the
tests hold against brute force.
"""

from __future__ import annotations

from math import inf, isclose, isfinite, isnan, nan
from typing import Protocol

import numpy as np

from mosaic_opt.bounds import BlockBounds, Floats, Indices
from mosaic_opt.outcome import Discarded, Outcome, Settled
from mosaic_opt.problem import Problem
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
    step_s, memory = problem.scalar_price(outcome.index, plan)  # raises if the plan is illegal
    budget = problem.tokens(outcome.index, step_s)
    loss = nan if isnan(budget.tokens) else problem.loss(outcome.index, budget.tokens)
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


def _malformed(problem: Problem, claims: Claims) -> list[int]:
    """List candidates of which something is claimed that nothing can be."""
    rows = range(-1, len(problem.table))
    return [one.index for one in settled(claims) if not _well_formed(problem, one, rows)]


def _well_formed(problem: Problem, one: Settled, rows: range) -> bool:
    counts, cutoff_s = one.counts, one.cutoff_s
    counted = min(counts) >= 0 and counts.plans == len(problem.table)
    counted &= counts.over_memory + counts.refused <= counts.priced
    if one.index not in range(len(problem.architectures)) or not counted or not cutoff_s >= 0.0:
        return False
    if isinstance(one, Discarded):
        return one.bound_s > 0.0
    numbers = (one.step_s, one.memory_bytes, one.tokens, one.loss)
    known = all(0.0 < number < inf for number in numbers)
    return one.row in rows and one.nearest_row in rows and (known or not one.feasible)


def _point(outcome: Outcome | None) -> tuple[float, ...] | None:
    if outcome is None:
        return None
    o = outcome
    return o.index, o.row, o.step_s, o.memory_bytes, o.tokens, o.loss


def settled(claims: Claims) -> list[Settled]:
    """List what is claimed of each candidate that the search is done with."""
    return [*claims.outcomes, *claims.discarded]


class _Again:
    """Some candidates, looked at again: bounds of their blocks, and the layouts these leave."""

    def __init__(self, problem: Problem, claims: Claims) -> None:
        self.problem, self.bounds = problem, BlockBounds(problem)
        self.bar = self.bounds.bar(claims.incumbent)
        self.unsound: list[int] = []  # discarded layouts that the bounds do not discard
        self.miscounted: list[int] = []
        self.mispriced: list[int] = []  # another layout, or none, is the best of those priced

    def look_at(self, some: list[Settled]) -> None:
        """Check some candidates."""
        indices = np.array([o.index for o in some], dtype=np.int64)
        floors = self.bounds.floors(indices)
        cutoffs = np.array([o.cutoff_s for o in some])
        ahead = np.where(floors > cutoffs[:, None], floors, inf).min(axis=1, initial=inf)
        enough = (ahead == inf) | (self.bounds.losses(indices, ahead) > self.bar)
        for place, one in enumerate(some):
            self._one(one, floors[place], float(ahead[place]), bool(enough[place]))

    def _one(self, one: Settled, floors: Floats, ahead_s: float, enough: bool) -> None:
        found = self.bounds.examine(one.index, floors, one.cutoff_s)
        if type(found) is not type(one):
            self.mispriced.append(one.index)
        elif isinstance(one, Discarded) and isinstance(found, Discarded):
            if not enough or not _close(one.bound_s, found.bound_s):
                self.unsound.append(one.index)
        elif isinstance(one, Outcome) and isinstance(found, Outcome):
            best = (one.row, one.nearest_row) == (found.row, found.nearest_row)
            if not best or not (one.row < 0 or _close(one.step_s, found.step_s)):
                self.mispriced.append(one.index)
            if not (ahead_s == inf or found.step_s < ahead_s):
                self.unsound.append(one.index)
        if one.counts != found.counts or not _close(one.cutoff_s, found.cutoff_s):
            self.miscounted.append(one.index)


def _looked_at_again(problem: Problem, claims: Claims, foremost: list[Outcome]) -> list[Check]:
    """Look again at the foremost candidates, and at all that have discarded layouts."""
    foremost_indices = {o.index for o in foremost}
    every = [
        o
        for o in settled(claims)
        if isinstance(o, Discarded)
        or o.cutoff_s < inf
        or o.counts.discarded
        or o.index in foremost_indices
    ]
    again = _Again(problem, claims)
    for place in range(0, len(every), _AT_ONCE):
        again.look_at(every[place : place + _AT_ONCE])
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
                again.unsound,
                "candidates whose discarded layouts are discarded by their bounds again",
            ),
            (
                "priced_layouts",
                again.mispriced,
                "those whose best priced layout is the best again, or again not good enough",
            ),
            (
                "layout_counts",
                again.miscounted,
                "those whose blocks part at the same bound, and whose layouts add up again",
            ),
        )
    ]


def _runners_up(problem: Problem, checked: list[Outcome]) -> Check:
    """Price the next best candidates again: a wrong price would most likely be among them."""
    wrong = [
        o.index for o in checked if not all(check.passed for check in _price_checks(problem, o))
    ]
    return _check(
        "runners_up",
        not wrong,
        len(checked),
        len(checked) - len(wrong),
        "candidates behind it that the scalar formulas price alike; "
        f"wrong: {_names(problem, wrong)}",
    )


def _names(problem: Problem, indices: list[int]) -> str:
    names = [problem.architectures[i].name for i in indices[:5]]
    more = f" and {len(indices) - 5} more" if len(indices) > 5 else ""
    return (", ".join(names) or "none") + more


def _bound_of_unexamined(problem: Problem, claims: Claims) -> float:
    """Return a bound of the loss of every candidate that was not examined [nats/token]."""
    bounds = BlockBounds(problem)
    left: Indices = np.array(claims.unexamined, dtype=np.int64)
    least = inf
    for place in range(0, len(left), _AT_ONCE):
        some = left[place : place + _AT_ONCE]
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
        incumbent and its near-ties, the pairs add up and the bound meets the incumbent. Where the
        claims are malformed nothing else is looked at.
    """
    n = len(problem.architectures)
    every = settled(claims)
    indices = sorted([*(o.index for o in every), *claims.unexamined])
    malformed = _malformed(problem, claims)
    checks = [
        _check(
            "candidates",
            indices == list(range(n)),
            len(indices),
            n,
            f"candidates; {len(claims.outcomes)} examined, {len(claims.discarded)} discarded, "
            f"{len(claims.unexamined)} not examined",
        ),
        _check(
            "well_formed",
            not malformed,
            len(every),
            len(every) - len(malformed),
            "claims of which each number can be one",
        ),
    ]
    if not all(check.passed for check in checks):
        return Certificate(certified=False, checks=tuple(checks))
    pairs = sum(o.counts.priced + o.counts.infeasible + o.counts.discarded for o in every)
    pairs += len(claims.unexamined) * len(problem.table)
    ranked = sorted((o for o in claims.outcomes if o.feasible), key=lambda o: (o.loss, o.index))
    best = ranked[0].loss if ranked else inf
    primal = claims.incumbent.loss if claims.incumbent is not None else inf
    bound = min(primal, _bound_of_unexamined(problem, claims))
    checks += [
        _check("pairs", pairs == problem.size, pairs, problem.size, "pairs accounted for"),
        *_looked_at_again(problem, claims, ranked[: 1 + RUNNERS_UP]),
        _check(
            "incumbent_is_best",
            _point(claims.incumbent) == _point(ranked[0] if ranked else None),
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
        checks += [
            *_price_checks(problem, claims.incumbent),
            _runners_up(problem, ranked[1 : 1 + RUNNERS_UP]),
        ]
    return Certificate(certified=all(check.passed for check in checks), checks=tuple(checks))
