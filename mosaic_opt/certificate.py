"""Checks of a backend's claims, made without the backend.

"Certified" means: of the model. The incumbent is priced again by the scalar formulas, its tokens
and loss are computed again, and the pairs that the search reports must add up to the space.
"""

from __future__ import annotations

from math import isclose, isfinite, isinf
from typing import Protocol

from mosaic_opt.problem import Outcome, Problem
from perfmodel.frozen import Frozen

RELATIVE_TOLERANCE = 1e-9


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


def _incumbent_checks(problem: Problem, incumbent: Outcome) -> list[Check]:
    plan = problem.table.plan(incumbent.row)
    estimate = problem.reprice(incumbent.index, plan)  # raises if the plan is illegal
    budget = problem.tokens(incumbent.index, estimate.step_time_s)
    loss = problem.loss(incumbent.index, budget.tokens)
    cap = problem.envelope.memory_cap_bytes
    return [
        Check(
            name="step_time",
            passed=_close(estimate.step_time_s, incumbent.step_s),
            detail=f"scalar {estimate.step_time_s!r} s, claimed {incumbent.step_s!r} s",
        ),
        Check(
            name="memory",
            passed=_close(estimate.memory_bytes, incumbent.memory_bytes)
            and estimate.memory_bytes <= cap,
            detail=f"scalar {estimate.memory_bytes!r} B, cap {cap!r} B",
        ),
        Check(
            name="loss",
            passed=_close(budget.tokens, incumbent.tokens) and _close(loss, incumbent.loss),
            detail=f"recomputed {loss!r} nats/token, claimed {incumbent.loss!r}",
        ),
    ]


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
            name="incumbent_is_best",
            passed=primal == best and (isinf(primal) or isfinite(primal)),
            detail=f"incumbent {primal!r}, best examined {best!r} nats/token",
        ),
        Check(
            name="nothing_left",
            passed=not claims.unexamined and claims.dual_bound == primal,
            detail=f"bound {claims.dual_bound!r}, incumbent {primal!r} nats/token",
        ),
    ]
    if claims.incumbent is not None:
        checks += _incumbent_checks(problem, claims.incumbent)
    return Certificate(certified=all(check.passed for check in checks), checks=tuple(checks))
