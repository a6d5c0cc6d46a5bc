"""What each device of a pipeline may hold: time, memory and recompute mode of every content.

All of it comes from the scalar model: :func:`perfmodel.iteration.time_of_content` and
:func:`perfmodel.memory.bytes_of`. A device's memory depends on its own content and its own
recompute mode alone, so the best mode of a content is the fastest that fits: modes need no search.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import permutations
from typing import NamedTuple

from perfmodel.activations import LayerBytes, layer_bytes
from perfmodel.iteration import time_of_content
from perfmodel.memory import bytes_of, stage_total
from perfmodel.mesh import PlanDims, StageContent, moe_layers_before
from perfmodel.modes import ModeTotals, mode_totals
from perfmodel.plan import Recompute
from perfmodel.step import StepModel

__all__ = ["Content", "Load", "Parts", "StageTables", "pool_runs"]


class Content(NamedTuple):
    """What one device holds: decoder layers by kind, and 1 with the prediction layers [-]."""

    dense: int
    moe: int
    prediction: int


class Load(NamedTuple):
    """A device with its content, in the recompute mode that is the fastest of those that fit."""

    mode: Recompute
    time_s: float  # one microbatch, forward and backward [s]
    memory_bytes: float  # [B]


class Parts(NamedTuple):
    """What a pool and a mode fix."""

    plan: PlanDims
    totals: ModeTotals
    layer: LayerBytes


class StageTables:
    """The contents that fit each device, on each pool.

    Parameters
    ----------
    models : sequence of StepModel
        The same plan, without a stage layout, on the cluster of each pool.
    modes : sequence of Recompute
        What a stage may choose from, least first.
    caps_bytes : sequence of float
        Memory that a device of each pool may use [B].
    """

    def __init__(
        self,
        models: Sequence[StepModel],
        modes: Sequence[Recompute],
        caps_bytes: Sequence[float],
    ) -> None:
        self.models, self.modes, self.caps = tuple(models), tuple(modes), tuple(caps_bytes)
        plan, self.architecture = models[0].plan, models[0].architecture
        self.pp, self.vpp = plan.pp, plan.vpp
        self._times: dict[tuple[object, ...], float] = {}
        self._loads: dict[tuple[object, ...], Load | None] = {}

    @cached_property
    def moe_before(self) -> tuple[int, ...]:
        """Layers with experts among the first b, for b from 0 to all layers."""
        a = self.architecture.dims
        return tuple(int(moe_layers_before(a, float(b))) for b in range(int(a.n_layers) + 1))

    @cached_property
    def _parts(self) -> dict[tuple[int, Recompute], Parts]:
        a = self.architecture.dims
        found: dict[tuple[int, Recompute], Parts] = {}
        for pool, model in enumerate(self.models):
            stack, seq = model.profile.stack(), float(model.batch.seq_len)
            for mode in self.modes:
                p = model.dims._replace(recompute=float(mode.code))
                totals = mode_totals(model.cost, a, stack, p.recompute)
                layer = layer_bytes(a, p, stack, seq, p.recompute)
                found[pool, mode] = Parts(p, totals, layer)
        return found

    def parts(self, pool: int, mode: Recompute) -> Parts:
        """Return what a pool and a mode fix."""
        return self._parts[pool, mode]

    def stage_content(self, device: int, content: Content) -> StageContent:
        """Return a content as the formulas take it."""
        a = self.architecture.dims
        prediction = (a.mtp_dense + a.mtp_moe) * content.prediction
        return StageContent(
            layers=float(content.dense + content.moe),
            dense=content.dense + a.mtp_dense * content.prediction,
            moe=content.moe + a.mtp_moe * content.prediction,
            prediction=prediction,
            embedding=float(device == 0),
            loss=float(device == self.pp - 1),
        )

    def time(self, device: int, pool: int, content: Content, mode: Recompute) -> float:
        """Time of one microbatch on a device, forward and backward [s]."""
        key = (device == 0, device == self.pp - 1, pool, content, mode)
        if key not in self._times:
            model = self.models[pool]
            p, totals, _ = self._parts[pool, mode]
            self._times[key] = float(
                time_of_content(
                    self.architecture.dims,
                    model.hardware,
                    model.profile.stack(),
                    p,
                    totals,
                    float(model.batch.seq_len),
                    self.stage_content(device, content),
                ).time
            )
        return self._times[key]

    def memory(self, device: int, pool: int, content: Content, mode: Recompute) -> float:
        """Memory of a device [B]."""
        model = self.models[pool]
        p, _, layer = self._parts[pool, mode]
        return float(
            stage_total(
                bytes_of(
                    self.architecture.dims,
                    p,
                    model.batch.optimizer.dims,
                    model.profile.stack(),
                    float(model.n_microbatches),
                    float(device),
                    self.stage_content(device, content),
                    layer,
                )
            )
        )

    def load(self, device: int, pool: int, content: Content) -> Load | None:
        """Return a device under its best recompute mode, the first of equals; None if none fits."""
        key = (device, pool, content)
        if key not in self._loads:
            best: Load | None = None
            for mode in self.modes:
                time_s = self.time(device, pool, content, mode)
                if best is not None and time_s >= best.time_s:
                    continue
                memory = self.memory(device, pool, content, mode)
                if memory <= self.caps[pool]:
                    best = Load(mode, time_s, memory)
            self._loads[key] = best
        return self._loads[key]

    def contents(self, device: int) -> Iterator[Content]:
        """Yield what a device could hold if every other virtual stage had the least it may have."""
        layers, moe = len(self.moe_before) - 1, self.moe_before[-1]
        others = (self.pp - 1) * self.vpp
        most = layers - max(0, others - 3)  # the ends may be without a layer, and the one before
        predictions = (0, 1) if self.architecture.mtp_layers and device >= self.pp - 2 else (0,)
        if self.architecture.mtp_layers and self.pp == 1:
            predictions = (1,)
        for dense in range(min(most, layers - moe) + 1):
            for experts in range(min(most - dense, moe) + 1):
                for prediction in predictions:
                    yield Content(dense, experts, prediction)

    def contents_of(self, counts: Sequence[int], early: bool) -> tuple[Content, ...]:
        """Return what each device holds under counts of layers of the virtual stages.

        ``early`` puts the prediction layers on the virtual stage before the last.
        """
        held = [[0, 0, 0] for _ in range(self.pp)]
        border = 0
        for s, count in enumerate(counts):
            moe = self.moe_before[border + count] - self.moe_before[border]
            held[s % self.pp][0] += count - moe
            held[s % self.pp][1] += moe
            border += count
        if self.architecture.mtp_layers:
            held[(len(counts) - 1 - early) % self.pp][2] = 1
        return tuple(Content(*one) for one in held)

    def loads_of(
        self, counts: Sequence[int], early: bool, pools: Sequence[int]
    ) -> tuple[Load, ...] | None:
        """Return each device under a layout, or None where one does not fit."""
        found = []
        for device, content in enumerate(self.contents_of(counts, early)):
            load = self.load(device, pools[device], content)
            if load is None:
                return None
            found.append(load)
        return tuple(found)


def pool_runs(capacities: Sequence[int], pp: int) -> tuple[tuple[int, ...], ...]:
    """Assign devices of a pipeline to pools in contiguous runs, in every way.

    Parameters
    ----------
    capacities : sequence of int
        Stages that each pool has room for.
    pp : int
        Stages.

    Returns
    -------
    tuple of tuple of int
        The pool of each stage; pools may be left out.
    """
    found: set[tuple[int, ...]] = set()

    def extend(row: tuple[int, ...], order: Sequence[int]) -> None:
        if len(row) == pp:
            found.add(row)
        elif order:
            pool, *rest = order
            for n in range(min(capacities[pool], pp - len(row)) + 1):
                extend((*row, *[pool] * n), rest)

    for order in permutations(range(len(capacities))):
        extend((), order)
    return tuple(sorted(found))
