"""The stage layout with the least slowest stage, as a CP-SAT model.

Variables are the borders between virtual stages, counted in decoder layers, where the prediction
layers are, and the pool of each device of the pipeline. Each device has one table over what it can
hold: (dense layers, MoE layers, prediction, pool) -> time of one microbatch. A content that does
not fit the memory of its device is not in the table. Times are whole units, rounded down
(:class:`.rounding.Scale`), so that the solver's bound is below every true time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, NamedTuple

from mosaic_opt.backends.cpsat.rounding import Scale
from mosaic_opt.backends.cpsat.running import run

if TYPE_CHECKING:
    from ortools.sat.python.cp_model import CpModel

__all__ = ["Held", "StageAnswer", "StageProblem", "StageSolution", "StageState", "solve_stages"]

BITS = 40
"""Bits of the largest time: sums over a pipeline stay within what a double holds exactly."""

TIDY_EFFORT = 5.0
"""Deterministic seconds for choosing among layouts with the same slowest stage."""


class Held(NamedTuple):
    """What one device may hold, and the time of one microbatch on it."""

    dense: int  # decoder layers with a dense block
    moe: int  # decoder layers with experts
    prediction: int  # 1 with the prediction layers
    pool: int
    time_s: float  # [s]


class StageProblem(NamedTuple):
    """Stages to lay out: virtual stage ``s`` is chunk ``s // pp`` of device ``s % pp``."""

    pp: int
    vpp: int
    moe_before: tuple[int, ...]  # layers with experts among the first b; n_layers + 1 entries
    predictions: int  # prediction layers, which stay together
    held: tuple[tuple[Held, ...], ...]  # of each device
    pools: tuple[tuple[int, ...], ...]  # the assignments of pools to devices that are allowed
    max_chunk: int | None = None  # layers of a virtual stage at most, prediction layers included


class StageSolution(NamedTuple):
    """A layout of the stages."""

    counts: tuple[int, ...]  # decoder layers of each virtual stage
    early: bool  # prediction layers before the last virtual stage, which has the loss alone
    pools: tuple[int, ...]  # of each device


class StageAnswer(NamedTuple):
    """What the search found."""

    solutions: tuple[StageSolution, ...]  # of equal slowest stage, but for the unit; best first
    bound_s: float  # no layout has a faster slowest stage [s]; inf if there is none
    proved: bool
    unit_s: float  # times were rounded down to whole units [s]
    interrupted: bool  # Ctrl-C came, or a callback raised KeyboardInterrupt, before the proof


class StageState(NamedTuple):
    """Where the search is."""

    solution: StageSolution | None  # the best so far
    slowest_s: float | None  # its slowest stage, rounded down [s]
    bound_s: float  # no layout has a faster slowest stage [s]; never falls


def _borders(model: CpModel, p: StageProblem) -> tuple[list[Any], Any]:
    """Add the borders between virtual stages, and where prediction layers are."""
    stages, layers = p.pp * p.vpp, len(p.moe_before) - 1
    borders: list[Any] = [
        0,
        *(model.new_int_var(0, layers, f"border_{s}") for s in range(1, stages)),
        layers,
    ]
    early: Any = 0
    if p.predictions and p.pp > 1:
        early = model.new_bool_var("early")
        model.add(borders[-2] == layers).only_enforce_if(early)
    for s in range(stages):
        least: Any = 1  # no stage is empty
        if s in (0, stages - 1):
            least = 0  # embedding, loss
        elif s == stages - 2:
            least = 1 - early
        if stages > 1:
            model.add(borders[s + 1] - borders[s] >= least)
            if p.max_chunk is not None:
                model.add(_units(p, borders, early, s) <= p.max_chunk)
    return borders, early


def _units(p: StageProblem, borders: Sequence[Any], early: Any, s: int) -> Any:
    """Return the layers of a virtual stage, prediction layers included."""
    units = borders[s + 1] - borders[s]
    if s == len(borders) - 2:
        units = units + p.predictions * (1 - early)
    elif s == len(borders) - 3:
        units = units + p.predictions * early
    return units


def _before(model: CpModel, p: StageProblem, border: Any) -> Any:
    """Return the layers with experts before a border."""
    if isinstance(border, int):
        return p.moe_before[border]
    count = model.new_int_var(0, p.moe_before[-1], "")
    model.add_allowed_assignments([border, count], list(enumerate(p.moe_before)))
    return count


def _is(model: CpModel, expression: Any, most: int) -> Any:
    """Return a variable for an expression, which a table can name."""
    made = model.new_int_var(0, most, "")
    model.add(made == expression)
    return made


def solve_stages(
    p: StageProblem,
    *,
    workers: int = 1,
    seed: int = 0,
    time_s: float | None = None,
    hint: StageSolution | None = None,
    on_state: Callable[[StageState], None] | None = None,
) -> StageAnswer:
    """Minimise the slowest device's time; among equals, prefer what leaves less waiting.

    With a proof of the first, a second search of bounded effort keeps the slowest stage as it is.
    With chunks it makes the sum over turns of the largest chunk's layers small (a device waits for
    others within a turn), then, as without, the sum of all times, which fill and drain take.

    Parameters
    ----------
    hint : StageSolution, optional
        Where to begin.
    on_state : callable, optional
        Told each better layout, each rise of the bound, and where the search ended.
    """
    from ortools.sat.python.cp_model import CpModel

    stages, layers = p.pp * p.vpp, len(p.moe_before) - 1
    scale = Scale.of(max((h.time_s for row in p.held for h in row), default=0.0), BITS)
    if not p.pools or not all(p.held):
        return StageAnswer((), inf, True, scale.unit, False)
    model = CpModel()
    borders, early = _borders(model, p)
    before = [_before(model, p, border) for border in borders]
    most = max(scale.down(h.time_s) for row in p.held for h in row)
    slowest = model.new_int_var(0, most, "slowest")
    last_pool = max(max(row) for row in p.pools)
    pools = [model.new_int_var(0, last_pool, f"pool_{r}") for r in range(p.pp)]
    model.add_allowed_assignments(pools, [list(row) for row in p.pools])
    times = []
    for r in range(p.pp):
        mine = range(r, stages, p.pp)
        moe = _is(model, sum(before[s + 1] - before[s] for s in mine), layers)
        held = _is(model, sum(borders[s + 1] - borders[s] for s in mine), layers)
        dense = _is(model, held - moe, layers)
        prediction: Any = 0
        if p.predictions:
            prediction = 1 - early if r == p.pp - 1 else early if r == p.pp - 2 else 0
        time = model.new_int_var(0, most, f"time_{r}")
        model.add_allowed_assignments(
            [dense, moe, _is(model, prediction, 1), pools[r], time],
            [(h.dense, h.moe, h.prediction, h.pool, scale.down(h.time_s)) for h in p.held[r]],
        )
        model.add(time <= slowest)
        times.append(time)
    model.minimize(slowest)
    named = {f"border_{s}": borders[s] for s in range(1, stages)}
    named |= {f"pool_{r}": pools[r] for r in range(p.pp)} | {"slowest": slowest}
    if not isinstance(early, int):
        named["early"] = early
    if hint is not None:
        _hint(model, named, hint)

    state, unit = StageState(None, None, 0.0), scale.unit

    def tell(solution: StageSolution | None, slowest_s: float | None, bound: int) -> None:
        nonlocal state
        now = StageState(solution, slowest_s, max(state.bound_s, bound * unit))
        if now != state:
            state = now
            if on_state is not None:
                on_state(now)

    began = monotonic()
    found = run(
        model,
        named,
        workers=workers,
        seed=seed,
        time_s=time_s,
        on_solution=lambda values, best, bound: tell(_read(p, values), best * unit, bound),
        on_bound=lambda bound: tell(state.solution, state.slowest_s, bound),
    )
    stopped = found.interrupted and not found.proved
    if found.values is None or found.objective is None:
        bound_s = inf if found.proved else max(state.bound_s, found.bound * unit)
        return StageAnswer((), bound_s, found.proved, unit, stopped)
    answer, best = _read(p, found.values), found.objective
    answers = [answer]
    try:
        if not found.interrupted:
            tell(answer, best * unit, found.bound)
        if found.proved and not found.interrupted:
            left = None if time_s is None else time_s - (monotonic() - began)
            tidy = _tidied(model, p, named, borders, early, times, best, answer, seed, left)
            answers.insert(0, tidy)
    except KeyboardInterrupt:
        stopped = not found.proved
    bound_s = max(state.bound_s, found.bound * unit)
    return StageAnswer(tuple(answers), bound_s, found.proved, unit, stopped)


def _tidied(
    model: Any,
    p: StageProblem,
    named: dict[str, Any],
    borders: Sequence[Any],
    early: Any,
    times: Sequence[Any],
    best: int,
    answer: StageSolution,
    seed: int,
    time_s: float | None,
) -> StageSolution:
    """Choose among the layouts whose slowest stage is the best one's."""
    model.clear_objective()
    model.clear_hints()
    model.add(named["slowest"] == best)
    aim: Any = sum(times)
    if p.vpp > 1:
        layers = len(p.moe_before) - 1
        for chunk in range(p.vpp):  # a turn lasts as long as its largest chunk
            largest = model.new_int_var(0, layers + p.predictions, f"largest_{chunk}")
            for s in range(chunk * p.pp, (chunk + 1) * p.pp):
                model.add(largest >= _units(p, borders, early, s))
            aim = aim + (best + 1) * p.pp * largest
    model.minimize(aim)
    _hint(model, named, answer)
    found = run(model, named, workers=1, seed=seed, time_s=time_s, effort=TIDY_EFFORT)
    return answer if found.values is None else _read(p, found.values)


def _hint(model: CpModel, named: dict[str, Any], hint: StageSolution) -> None:
    border = 0
    for s, count in enumerate(hint.counts[:-1], 1):
        border += count
        model.add_hint(named[f"border_{s}"], border)
    for r, pool in enumerate(hint.pools):
        model.add_hint(named[f"pool_{r}"], pool)
    if "early" in named:
        model.add_hint(named["early"], hint.early)


def _read(p: StageProblem, values: Mapping[str, int]) -> StageSolution:
    stages = p.pp * p.vpp
    borders = [0, *(values[f"border_{s}"] for s in range(1, stages)), len(p.moe_before) - 1]
    return StageSolution(
        counts=tuple(borders[s + 1] - borders[s] for s in range(stages)),
        early=bool(values.get("early", 0)),
        pools=tuple(values[f"pool_{r}"] for r in range(p.pp)),
    )
