"""A toy envelope of this machine: which shape loses least within a time, and within FLOPs.

The price of a step is a measured pack's (`mosaic_opt.solve`), or where none is given that of
the sweep's own timings.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np

from benchmarks.mini_sweep_design import LARGEST, SEQUENCES, WIDTHS, run_of, shape
from benchmarks.mini_sweep_fit import StepTimes
from lawfit import AnyLaw
from moe_ref import SweepRun
from mosaic_opt import solve
from mosaic_opt.envelope import parse_envelope
from perfmodel import Architecture, Batch, Cluster, Plan, estimate, load_stack

SEQ_LEN = 128
BUDGET_S = 40.0
"""Processor seconds of one thread that a pick may train for."""

PICK_SEED = 100
PICKS = 10


@dataclass(frozen=True)
class Choice:
    """One shape under the two budgets.

    Attributes
    ----------
    architecture : Architecture
        The shape.
    step_s : float
        Predicted time of a step [s].
    tokens, loss : float
        What the time allows [token], and the law's loss there [nat/byte].
    flop_tokens, flop_loss : float
        The same with every shape given the same ``6 N_act D``.
    """

    architecture: Architecture
    step_s: float
    tokens: float
    loss: float
    flop_tokens: float
    flop_loss: float


def candidates(sparsity: tuple[float, float]) -> list[Architecture]:
    """Return all shapes of the widths of the sweep whose sparsity lies in its range."""
    axes = product((*WIDTHS, LARGEST), (4, 8, 16, 32, 64), (1, 2, 4, 8), (1, 2, 4))
    shapes = [shape(*point) for point in axes if point[2] < point[1]]
    low, high = sparsity
    return [a for a in shapes if low <= 1.0 - a.n_active() / a.n_total() <= high]


def by_timings(architectures: Sequence[Architecture], times: StepTimes) -> list[float]:
    """Return the time of a step of each shape by the sweep's own timings [s]."""
    return [times.of(a) for a in architectures]


def by_pack(
    architectures: Sequence[Architecture], law: AnyLaw, pack: Path | str, stack: Path | str
) -> tuple[list[float], str]:
    """Return the time of a step of each shape by a measured pack, and the page of the answer.

    The envelope has one device, no recomputation and one microbatch a step, as the runs have.

    Raises
    ------
    ValueError
        A shape that the envelope rejects.
    """
    envelope = parse_envelope(
        {
            "name": "this machine",
            "cluster": {"hardware": str(pack), "nodes": 1, "devices": 1},
            "window_days": BUDGET_S / 86_400.0,
            "batch": {"global_batch": SEQUENCES, "seq_len": SEQ_LEN},
            "candidates": {
                "kind": "explicit",
                "models": [a.model_dump(mode="json") for a in architectures],
            },
            "law": law,
            "plans": {"micro_batch": [SEQUENCES], "recompute": ["none"]},
            "stack": str(stack),
            "extrapolation": "flag",
        }
    )
    solution = solve(envelope)
    step_s = {found.index: found.step_time_s for found in solution.candidates}
    lacking = [a.name for at, a in enumerate(architectures) if at not in step_s]
    if lacking:
        raise ValueError(f"the envelope rejects {lacking[0]}, and {len(lacking) - 1} more")
    return [step_s[at] for at in range(len(architectures))], str(solution)


def priced_steps(
    architectures: Sequence[Architecture], pack: Path | str, stack: Path | str
) -> list[float]:
    """Return the time of a step of each shape by a pack and a stack, as `by_pack` has it [s]."""
    cluster = Cluster(hardware=str(pack), nodes=1, devices=1)
    plan, batch = Plan(dp=1, micro_batch=SEQUENCES), Batch(global_batch=SEQUENCES, seq_len=SEQ_LEN)
    profile = load_stack(str(stack))
    return [estimate(a, plan, cluster, batch, stack=profile).step_time_s for a in architectures]


def choices(
    architectures: Sequence[Architecture], step_s: Sequence[float], law: AnyLaw
) -> list[Choice]:
    """Return every shape under both budgets, the least loss in the time first.

    The FLOPs are those that the first of them trains with in the time.
    """
    active = np.array([a.n_active() for a in architectures], dtype=float)
    tokens = BUDGET_S / np.array(step_s) * SEQUENCES * SEQ_LEN
    total = np.array([a.n_total() for a in architectures], dtype=float)
    split = np.array([a.expert_split for a in architectures], dtype=float)

    def losses(given: np.ndarray) -> np.ndarray:
        return np.asarray(
            law.loss(n_total=total, n_active=active, tokens=given, expert_split=split)
        )

    in_time = losses(tokens)
    first = int(np.argmin(in_time))
    flop_tokens = active[first] * tokens[first] / active
    columns = (step_s, tokens, in_time, flop_tokens, losses(flop_tokens))
    found = [
        Choice(a, *(float(column[at]) for column in columns)) for at, a in enumerate(architectures)
    ]
    return sorted(found, key=lambda choice: choice.loss)


def picked(ordered: Sequence[Choice]) -> list[Choice]:
    """Return the shapes to train: the first of each ordering, and evenly spaced ranks of the first.

    Three first by time, three first by FLOPs, and the rest from ranks of the ordering by time
    evenly spaced down to the last.
    """
    by_flop = sorted(ordered, key=lambda choice: choice.flop_loss)
    first = {c.architecture.name: c for c in (*ordered[:3], *by_flop[:3])}
    ranks = np.linspace(0, len(ordered) - 1, PICKS - len(first) + 1).round().astype(int)[1:]
    first |= {ordered[at].architecture.name: ordered[at] for at in ranks}
    return sorted(first.values(), key=lambda choice: choice.loss)


def run_within(architecture: Architecture, tokens: float) -> SweepRun:
    """Return the run of a pick: as many whole steps as its tokens fill."""
    step = SEQUENCES * SEQ_LEN
    return run_of(architecture, max(1, math.floor(tokens / step)) * step, PICK_SEED)
