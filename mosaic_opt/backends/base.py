"""What a backend is, what it is told, and what it says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, Flag, StrEnum, auto
from typing import ClassVar

from mosaic_opt.errors import MosaicError
from mosaic_opt.outcome import Discarded, Outcome
from mosaic_opt.problem import Problem


class Capability(Flag):
    """What a backend can deliver."""

    INCUMBENT = auto()
    BOUND = auto()
    EXACT = INCUMBENT | BOUND


class Availability(Enum):
    """Whether a backend can run here; falsy members say why not."""

    AVAILABLE = "available"
    NOT_INSTALLED = "not installed"
    BAD_VERSION = "installed in a version that is too old"
    BROKEN = "registered, but cannot be loaded"  # `registry.listing` has the words

    def __bool__(self) -> bool:
        """Tell whether the backend can run."""
        return self is Availability.AVAILABLE


class Termination(StrEnum):
    """Why a search stopped."""

    EXHAUSTED = "exhausted"  # nothing is left to look at
    TIME_LIMIT = "time_limit"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When to stop: after ``time_s`` seconds of search, or never."""

    time_s: float | None = None

    def __post_init__(self) -> None:
        """Check the limit."""
        if self.time_s is not None and not 0.0 < self.time_s < float("inf"):
            raise MosaicError(f"time_s={self.time_s:g} must be above 0, or None for no limit.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a search is."""

    done: int  # candidates
    of: int
    incumbent: Outcome | None
    bound: float  # lower bound of the optimum [nats/token]


ProgressCallback = Callable[[Progress], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a backend claims. Nothing has a default: every claim is written out.

    Attributes
    ----------
    incumbent : Outcome or None
        The best candidate found.
    dual_bound : float
        No candidate has a lower loss [nats/token]; +inf if no candidate is feasible.
    termination : Termination
    outcomes : tuple of Outcome
        Every candidate whose best layout is known, or known not to be, in the order of the
        problem.
    discarded : tuple of Discarded
        Candidates that bounds ruled out, in the same order.
    unexamined : tuple of int
        Indices of the others.
    """

    incumbent: Outcome | None
    dual_bound: float
    termination: Termination
    outcomes: tuple[Outcome, ...]
    discarded: tuple[Discarded, ...]
    unexamined: tuple[int, ...]


class Backend(ABC):
    """A way to search. Concrete backends are final frozen dataclasses: their fields are options."""

    name: ClassVar[str]
    provides: ClassVar[Capability]

    @classmethod
    @abstractmethod
    def availability(cls) -> Availability:
        """Tell whether it can run here, without importing native code."""

    @abstractmethod
    def search(
        self, problem: Problem, limits: Limits, *, progress: ProgressCallback | None = None
    ) -> Report:
        """Search a problem until it is done, a limit is reached or the user interrupts."""


def check_workers(workers: int | None) -> None:
    """Refuse an impossible number of threads; None stands for all cores.

    Raises
    ------
    MosaicError
        It is below 1.
    """
    if workers is not None and workers < 1:
        raise MosaicError(f"workers={workers} must be at least 1; nearest: 1.")


def rank(outcome: Outcome) -> tuple[float, int]:
    """Order candidates: the least loss first, and of equals the first in the problem."""
    return outcome.loss, outcome.index


def better(candidate: Outcome, incumbent: Outcome | None) -> bool:
    """Say whether a candidate goes before the incumbent."""
    if not candidate.feasible:
        return False
    if incumbent is None:
        return True
    return rank(candidate) < rank(incumbent)


def dual_bound(problem: Problem, incumbent: Outcome | None, unexamined: tuple[int, ...]) -> float:
    """Return the least loss that any candidate can have, given the unexamined ones [nats/token].

    An unexamined candidate is bounded by its loss with every device at its peak.
    """
    examined = incumbent.loss if incumbent is not None else float("inf")
    return min([examined, *(problem.optimistic_loss(i) for i in unexamined)])


def bounds_of_the_rest(problem: Problem) -> list[float]:
    """Return the least loss that any candidate from k on can have, for each k [nats/token].

    As `dual_bound` with those unexamined.
    """
    found = [float("inf")]
    for index in reversed(range(len(problem.architectures))):
        found.append(min(found[-1], problem.optimistic_loss(index)))
    return found[::-1]
