"""Whether backends that searched one problem can all be right, and who contradicts what.

Three laws hold of honest reports, whoever made them:

- what a report claims passes the checks of :mod:`mosaic_opt.certificate`, apart from
  ``nothing_left`` where the search does not claim to be done;
- exact searches that are done name one point: architecture, layout and loss;
- no lower bound is above the loss of a candidate that was priced again.

None of them asks which backend is the right one. Where two contradict each other, the incumbent
that was priced again stands, since that can be checked without its author.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf, isclose, isnan
from typing import Literal, NamedTuple

from mosaic_opt.backends.base import Capability, Report, Termination
from mosaic_opt.certificate import RELATIVE_TOLERANCE, Certificate
from mosaic_opt.outcome import Outcome
from mosaic_opt.problem import Problem
from perfmodel.frozen import Frozen

PRICE_CHECKS = frozenset({"step_time", "memory", "loss"})
"""Checks of a certificate that price the incumbent again."""


class Claim(NamedTuple):
    """What a backend reported, and what the checks found."""

    backend: str
    provides: Capability
    report: Report
    certificate: Certificate

    @property
    def done(self) -> bool:
        """Whether it says that its incumbent is the optimum."""
        finished = self.report.termination is Termination.EXHAUSTED
        return finished and self.provides == Capability.EXACT

    @property
    def failed_checks(self) -> tuple[str, ...]:
        """Names of the checks that a report like this should pass, and fails."""
        open_still = set() if self.done else {"nothing_left"}
        if self.provides != Capability.EXACT:  # a heuristic need not have the best layout
            open_still |= {"priced_layouts", "layout_counts"}
        checks = self.certificate.checks
        return tuple(c.name for c in checks if not c.passed and c.name not in open_still)

    @property
    def priced_again(self) -> Outcome | None:
        """The incumbent, if the scalar formulas give it the same price."""
        passed = {c.name for c in self.certificate.checks if c.passed}
        return self.report.incumbent if passed >= PRICE_CHECKS else None


class Disagreement(Frozen):
    """One contradiction.

    Attributes
    ----------
    backend : str
        Whose claim does not hold.
    about : str
        "failure": it raised, so it claims nothing; "checks", "point" or "bound": the law above
        that it breaks.
    detail : str
        One sentence.
    """

    backend: str
    about: Literal["failure", "checks", "point", "bound"]
    detail: str


class Agreement(Frozen):
    """Whether all that was claimed can be true at once.

    Attributes
    ----------
    agree : bool
        Nothing contradicts anything.
    exact : tuple of str
        Backends that claim an optimum, or that nothing is feasible. With fewer than two of them
        the only thing that was held against another backend is the bounds.
    best_of : tuple of str
        Backends whose incumbent has the least loss of those that were priced again.
    disagreements : tuple of Disagreement
    """

    agree: bool
    exact: tuple[str, ...]
    best_of: tuple[str, ...]
    disagreements: tuple[Disagreement, ...]


def agreement(
    problem: Problem, claims: Sequence[Claim], failures: Mapping[str, str] | None = None
) -> Agreement:
    """Hold claims about one problem against each other.

    Parameters
    ----------
    problem : Problem
        What all of them searched.
    claims : sequence of Claim
        One for each backend that reported.
    failures : mapping of str to str, optional
        Words of each backend that raised in place of a report.
    """
    found = [
        Disagreement(backend=name, about="failure", detail=f"{name} failed: {words}.")
        for name, words in (failures or {}).items()
    ]
    found += [*_checks(claims), *_points(problem, claims), *_bounds(problem, claims)]
    best = _best(claims)
    return Agreement(
        agree=not found,
        exact=tuple(c.backend for c in claims if c.done),
        best_of=tuple(
            c.backend
            for c in claims
            if best is not None and c.priced_again is not None and _same(c.priced_again, best)
        ),
        disagreements=tuple(found),
    )


def _checks(claims: Sequence[Claim]) -> Iterator[Disagreement]:
    for claim in claims:
        details = {c.name: c.detail for c in claim.certificate.checks}
        for name in claim.failed_checks:
            yield Disagreement(
                backend=claim.backend,
                about="checks",
                detail=f"{claim.backend} fails the check {name}: {details[name]}.",
            )


def _points(problem: Problem, claims: Sequence[Claim]) -> Iterator[Disagreement]:
    done = [claim for claim in claims if claim.done]
    best = _best(done)
    if best is None:
        return  # nothing feasible, or nothing whose price holds
    by = next(c.backend for c in done if c.priced_again is best)
    for claim in done:
        named = claim.report.incumbent
        if named is None:
            said = f"{claim.backend} says that nothing is feasible"
        elif not _same(named, best):
            said = f"{claim.backend} names {_point(problem, named)}"
        else:
            continue
        yield Disagreement(
            backend=claim.backend,
            about="point",
            detail=f"{said}, and {by} {_point(problem, best)}.",
        )


def _bounds(problem: Problem, claims: Sequence[Claim]) -> Iterator[Disagreement]:
    best = _best(claims)
    for claim in claims:
        bound = claim.report.dual_bound
        if isnan(bound):
            said = f"the bound of {claim.backend} is no number"
        elif best is not None and bound > best.loss + RELATIVE_TOLERANCE * abs(best.loss):
            by = next(c.backend for c in claims if c.priced_again is best)
            below = "is feasible" if bound == inf else f"has a loss below {bound:.9f}"
            said = (
                f"{claim.backend} says that no candidate {below}, and {by} has "
                f"{_point(problem, best)}, priced again"
            )
        else:
            continue
        yield Disagreement(backend=claim.backend, about="bound", detail=f"{said}.")


def _best(claims: Sequence[Claim]) -> Outcome | None:
    """Return the best incumbent whose price holds.

    Ties go to the first candidate and, where a cap on tokens makes the losses of its layouts
    equal, to the one with the shortest step, as the problem has it.
    """
    held = [c.priced_again for c in claims if c.priced_again is not None]
    return min(held, key=lambda o: (o.loss, o.index, o.step_s, o.row), default=None)


def _same(one: Outcome, other: Outcome) -> bool:
    near = isclose(one.loss, other.loss, rel_tol=RELATIVE_TOLERANCE)
    return near and (one.index, one.row) == (other.index, other.row)


def _point(problem: Problem, outcome: Outcome) -> str:
    architecture = problem.architectures[outcome.index].name
    return f"{architecture} with {problem.table.plan(outcome.row)} at {outcome.loss:.9f}"
