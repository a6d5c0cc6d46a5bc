"""Checks of a backend's claims, made without the backend.

"Certified" means: of the model. The incumbent and the candidates behind it are priced again by the
scalar formulas, their tokens and losses are computed again, and the pairs that the search reports
must add up to the space. That a candidate was rejected is not checked here: it is the word of the
backend, which the tests hold against brute force.
"""

from __future__ import annotations

from math import isclose
from typing import Protocol

from mosaic_opt.problem import Outcome, Problem
from perfmodel.frozen import Frozen

RELATIVE_TOLERANCE = 1e-9

RUNNERS_UP = 20
"""How many candidates behind the incumbent are priced again."""


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
    def unexamined(self) -> tuple[int, ...]:
        """Candidates not examined."""

    @property
    def discarded_pairs(self) -> int:
        """Pairs that a bound ruled out."""


class Check(Frozen):
    """One thing that was checked."""

    name: str
    passed: bool
    detail: str


class Certificate(Frozen):
    """What the checks found; ``certified`` if all of them passed and nothing is left open."""

    certified: bool
    checks: tuple[Check, ...]


def _close(a: float, b: float) -> bool:
    return a == b or isclose(a, b, rel_tol=RELATIVE_TOLERANCE)


def _price_checks(problem: Problem, outcome: Outcome, prefix: str = "") -> list[Check]:
    """Price a candidate's best layout again, with the scalar formulas."""
    plan = problem.table.plan(outcome.row)
    estimate = problem.reprice(outcome.index, plan)  # raises if the plan is illegal
    budget = problem.tokens(outcome.index, estimate.step_time_s)
    loss = problem.loss(outcome.index, budget.tokens)
    cap = problem.envelope.memory_cap_bytes
    return [
        Check(
            name=f"{prefix}step_time",
            passed=_close(estimate.step_time_s, outcome.step_s),
            detail=f"scalar {estimate.step_time_s!r} s, claimed {outcome.step_s!r} s",
        ),
        Check(
            name=f"{prefix}memory",
            passed=_close(estimate.memory_bytes, outcome.memory_bytes)
            and estimate.memory_bytes <= cap,
            detail=f"scalar {estimate.memory_bytes!r} B, cap {cap!r} B",
        ),
        Check(
            name=f"{prefix}loss",
            passed=_close(budget.tokens, outcome.tokens) and _close(loss, outcome.loss),
            detail=f"recomputed {loss!r} nats/token, claimed {outcome.loss!r}",
        ),
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
    return Check(
        name="runners_up",
        passed=not wrong,
        detail=f"{len(checked)} priced again, of which wrong: {', '.join(wrong) or 'none'}",
    )


def certify(problem: Problem, claims: Claims) -> Certificate:
    """Check the claims of a report against the problem.

    Returns
    -------
    Certificate
        ``certified`` only if every check passed: the incumbent is what it is said to be, no
        examined candidate is better, no candidate is left, the pairs add up and the bound meets
        the incumbent.
    """
    examined = sorted(outcome.index for outcome in claims.outcomes)
    everything = sorted([*examined, *claims.unexamined])
    pairs = sum(o.counts.priced + o.counts.infeasible for o in claims.outcomes)
    pairs += claims.discarded_pairs + len(claims.unexamined) * len(problem.table)
    losses = [o.loss for o in claims.outcomes if o.feasible]
    best = min(losses, default=float("inf"))
    primal = claims.incumbent.loss if claims.incumbent is not None else float("inf")
    checks = [
        Check(
            name="candidates",
            passed=everything == list(range(len(problem.architectures))),
            detail=f"{len(examined)} examined and {len(claims.unexamined)} not, "
            f"of {len(problem.architectures)}",
        ),
        Check(
            name="pairs",
            passed=pairs == problem.size,
            detail=f"{pairs} accounted for, of {problem.size}",
        ),
        Check(
            name="discarded",
            passed=claims.discarded_pairs == 0,
            detail=f"{claims.discarded_pairs} pairs discarded on a bound; none can be checked yet",
        ),
        Check(
            name="incumbent_is_best",
            passed=primal == best,
            detail=f"incumbent {primal!r}, best examined {best!r} nats/token",
        ),
        Check(
            name="nothing_left",
            passed=not claims.unexamined and claims.dual_bound == primal,
            detail=f"bound {claims.dual_bound!r}, incumbent {primal!r} nats/token",
        ),
    ]
    if claims.incumbent is not None:
        checks += [*_price_checks(problem, claims.incumbent), _runners_up(problem, claims)]
    return Certificate(certified=all(check.passed for check in checks), checks=tuple(checks))
