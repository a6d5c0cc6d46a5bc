"""One family of kernels: its table, its grid, and how one of its rows is measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from moe_ref.microbench.grids import Point, Scale
from moe_ref.microbench.store import Cell
from moe_ref.microbench.timing import Timer, Timing

__all__ = ["COUNTS", "Bench", "Family", "backward_calls", "counts", "quantiles"]

POOL_ELEMENTS = 1 << 23
"""Numbers that operands are cut from [-]."""

IN_TURN_ELEMENTS = 1 << 22
"""Operands of the calls that are timed in turn, together; more than the nearest caches hold [-]."""

ALIGNED = 64
"""Operands begin at a multiple of it [-]."""

MOST_COPIES = 4


@dataclass(frozen=True)
class Bench:
    """Where and how to measure.

    Attributes
    ----------
    device : str
        "cpu" or "cuda".
    dtype : torch.dtype
        Of products.
    timer : Timer
    """

    device: str
    dtype: Any
    timer: Timer
    _pools: dict[Any, Any] = field(default_factory=dict)
    _next: dict[Any, int] = field(default_factory=dict)

    def random(self, *shape: int, dtype: Any = None) -> Any:
        """Return numbers of a shape on the device, to be read and not to be written.

        They are cut from one pool, the next ones each time.
        """
        wanted = self.dtype if dtype is None else dtype
        size = prod(shape)
        if size > POOL_ELEMENTS:
            return torch.randn(shape, device=self.device).to(wanted)
        if wanted not in self._pools:
            self._pools[wanted] = torch.randn(POOL_ELEMENTS, device=self.device).to(wanted)
        first = self._next.get(wanted, 0)
        if first + size > POOL_ELEMENTS:
            first = 0
        self._next[wanted] = first + -(-size // ALIGNED) * ALIGNED
        return self._pools[wanted][first : first + size].view(shape).detach()

    def time(self, elements: float, make: Callable[[], Callable[[], object]]) -> Timing:
        """Time a call; ``make`` returns it on operands of its own, of ``elements`` together."""
        return self.timer.time(self.copies(elements, make))

    @staticmethod
    def copies(elements: float, make: Callable[[], Any]) -> list[Any]:
        """Return what ``make`` makes, several times over if the operands are small."""
        return [make() for _ in range(int(min(MOST_COPIES, max(1, IN_TURN_ELEMENTS // elements))))]


@dataclass(frozen=True)
class Family:
    """A family.

    Attributes
    ----------
    name : str
        What ``--only`` calls it.
    table : str
        File name of its table.
    keys : tuple of str
        Columns that say what a row measured, beside the device.
    values : tuple of str
        Columns of the measurement.
    grid : callable
        Points for a scale and a number format.
    measure : callable
        Values of a point.
    """

    name: str
    table: str
    keys: tuple[str, ...]
    values: tuple[str, ...]
    grid: Callable[[Scale, str], list[Point]]
    measure: Callable[[Bench, Point], dict[str, Cell]]

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns of the table."""
        return ("device", *self.keys, *self.values)


def quantiles(timing: Timing, name: str, middle: str = "_med") -> dict[str, Cell]:
    """Return a timing as columns ``name`` with an ending each [ms]."""
    parts = {middle: timing.median_s, "_p10": timing.p10_s, "_p90": timing.p90_s}
    return {f"{name}{part}": 1e3 * seconds for part, seconds in parts.items()}


def counts(*timings: Timing) -> dict[str, Cell]:
    """Return the columns of how many calls a row rests on, the fewest of several timings."""
    return {
        "repeats": min(each.repeats for each in timings),
        "set_aside": max(each.set_aside for each in timings),
        "waited": round(max(each.waited for each in timings), 3),
    }


COUNTS = ("repeats", "set_aside", "waited")


def backward_calls(outputs: Sequence[Any], inputs: Sequence[Any]) -> Callable[[], object]:
    """Return a call that runs the backward pass of a graph that stays, on fixed gradients."""
    gradients = [torch.ones_like(y) for y in outputs]

    def call() -> object:
        return torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)

    return call
