"""Which runs the small sweep has: shapes, tokens, learning rates and seeds."""

from __future__ import annotations

import random

from moe_ref import SweepRow, SweepRun, peak_learning_rate
from perfmodel import Architecture

WIDTHS = (32, 64, 96)
LARGEST = 128
EXPERTS = (
    (4, 1, 1), (16, 1, 1), (16, 2, 1),
    (8, 2, 2), (32, 2, 2), (32, 4, 2),
    (16, 4, 4), (64, 4, 4), (64, 8, 4),
)  # fmt: skip
"""(E, K, G): three densities at three splits; a column has one K/G and one E/G."""

TOKENS = (65_536, 131_072, 262_144, 524_288)
SEQUENCES = 2
REPEATED = ((32, 16, 1, 1, 131_072), (64, 16, 2, 1, 131_072), (32, 64, 8, 4, 65_536))
SEEDS = (1, 2)
"""Seeds of the repeated runs beside seed 0, which is in the grid."""

DEVIATION = 0.1
"""Of the initial weights: about ``1 / sqrt(d)`` of the middle widths.

A.1 has 0.006, for widths from 512. Here that keeps a run on a plateau for hundreds of its steps,
and runs that differ in their seed alone leave it so far apart that losses differ by up to 10 %.
"""

PILOT = ((32, 16, 1, 1, 65_536), (64, 32, 2, 2, 131_072), (96, 16, 4, 4, 262_144))
PILOT_FACTORS = (0.0625, 0.125, 0.25)
FACTOR = 0.125
"""Of rule (17), by the pilot."""


def shape(d_model: int, n_experts: int, top_k: int, split: int) -> Architecture:
    """Return a model of three layers, the first dense, of the ladder's proportions.

    ``d_ff = 2.5 d``, one shared expert of the width of an expert, two query heads for each key
    and value head, heads of 16.
    """
    d_ff = 5 * d_model // 2
    return Architecture(
        name=f"d{d_model}-E{n_experts}-K{top_k}-G{split}",
        n_layers=3,
        d_model=d_model,
        n_heads=d_model // 16,
        n_kv_heads=d_model // 32,
        head_dim=16,
        d_ff=d_ff,
        vocab_size=256,
        n_experts=n_experts,
        top_k=top_k,
        d_expert=d_ff // split,
        d_shared=d_ff // split,
        first_k_dense=1,
    )


def architecture_of(row: SweepRow) -> Architecture:
    """Return the shape of a row."""
    return shape(row.d_model, row.n_experts, row.top_k, round(row.expert_split))


def run_of(
    architecture: Architecture, tokens: int, seed: int = 0, factor: float = FACTOR
) -> SweepRun:
    """Return a run at ``factor`` times the learning rate of rule (17)."""
    peak = factor * peak_learning_rate(architecture.n_active(), tokens)
    return SweepRun(
        architecture=architecture,
        tokens=tokens,
        sequences=SEQUENCES,
        peak=float(f"{peak:.6g}"),
        deviation=DEVIATION,
        seed=seed,
    )


def grid() -> list[SweepRun]:
    """Return the runs of the grid, in a shuffled order, so that the first ones are of all kinds.

    Shapes of the smallest width have two of the four token budgets, a factor of four apart, in
    turn; of the second width one of the four, of the third one of the first three, in turn; of the
    largest, which a fit holds out, the second.
    """
    small, middle, large = WIDTHS
    runs = []
    for x, experts in enumerate(EXPERTS):
        runs += [run_of(shape(small, *experts), TOKENS[at]) for at in (x % 2, x % 2 + 2)]
        runs.append(run_of(shape(middle, *experts), TOKENS[(x + 3) % 4]))
        runs.append(run_of(shape(large, *experts), TOKENS[(x + 2) % 3]))
    sparse = [experts for at, experts in enumerate(EXPERTS) if at % 3]
    runs += [run_of(shape(LARGEST, *experts), TOKENS[1]) for experts in sparse]
    random.Random(0).shuffle(runs)
    return runs


def repeats() -> list[SweepRun]:
    """Return runs that differ from some of the grid in their seed alone."""
    return [run_of(shape(*at[:4]), at[4], seed) for at in REPEATED for seed in SEEDS]


def pilot(factor: float) -> list[SweepRun]:
    """Return the runs that one learning rate is judged by."""
    return [run_of(shape(*at[:4]), at[4], factor=factor) for at in PILOT]
