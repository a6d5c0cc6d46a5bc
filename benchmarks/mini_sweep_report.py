"""What the small sweep found, as the Markdown tables of ``docs/mini-sweep.md``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from benchmarks import mini_sweep_design as design
from benchmarks.mini_sweep_design import architecture_of
from benchmarks.mini_sweep_fit import (
    StepTimes,
    fitted,
    intervals,
    residuals,
    seconds_of_step,
    seed_noise,
    step_times,
)
from benchmarks.mini_sweep_solve import (
    BUDGET_S,
    Choice,
    by_pack,
    by_timings,
    candidates,
    choices,
    picked,
    priced_steps,
    run_within,
)
from lawfit import MOSAIC_TABLE2, FitResult, ridge_scan
from moe_ref import SweepRow, read_sweep

SURE = 2.0
"""Deviations of a difference of two seeds, above which a predicted gap is counted as one."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Found:
    """What the tables of a folder lead to.

    Attributes
    ----------
    rows, repeats : list of SweepRow
        The grid, and the runs of other seeds.
    noise, freedom : float, int
        Deviation of ``log L`` between seeds, and its degrees of freedom.
    joint, dense : FitResult
        The joint law, and a law of active parameters and tokens alone.
    times : StepTimes
        Price of a step by the runs' own timings.
    page : str
        The answer of `mosaic_opt.solve`, once a pack has priced the shapes.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = read_sweep(folder / "runs.csv")
        self.repeats = read_sweep(folder / "repeats.csv")
        self.noise, self.freedom = seed_noise([*self.rows, *self.repeats])
        self.joint = fitted("joint", self.rows, self.noise)
        self.dense = fitted("chinchilla", self.rows, self.noise)
        self.times: StepTimes = step_times(self.rows)
        self.page = ""

    def ordered(self, pack: str | None = None, stack: str = "megatron-eager") -> list[Choice]:
        """Return the shapes in the order of their loss in the time, by a pack or by timings."""
        sparsity = [1.0 - row.n_active / row.n_total for row in self.rows]
        shapes = candidates((min(sparsity), max(sparsity)))
        law = self.joint.law
        if pack is None:
            return choices(shapes, by_timings(shapes, self.times), law)
        step_s, self.page = by_pack(shapes, law, pack, stack)
        return choices(shapes, step_s, law)


def pilot_table(folder: Path) -> str:
    """Return the losses at each multiple of rule (17)."""
    rows = []
    for factor in design.PILOT_FACTORS:
        found = read_sweep(folder / f"pilot_{factor:g}.csv")
        by_id = {row.id: row.loss for row in found}
        losses = [by_id[run.id] for run in design.pilot(factor)]
        mean = float(np.exp(np.mean(np.log(losses))))
        rows.append([f"1/{1 / factor:g}", *(f"{loss:.4f}" for loss in losses), f"{mean:.4f}"])
    names = [f"{run.architecture.name}, {run.tokens:,} tokens" for run in design.pilot(1.0)]
    return table(["times rule (17)", *names, "geometric mean"], rows)


def coefficient_table(found: FitResult) -> str:
    """Return the coefficients with their intervals, beside the paper's."""
    refits, scan = intervals(found), ridge_scan(found)
    rows = []
    for name, each in found.coefficients.items():
        interval = refits.interval(name)
        printed = name.rstrip("_")
        said = "identified" if printed in scan.identified or name in scan.identified else "ridge"
        rows.append(
            [
                f"`{printed}`",
                f"{each.value:.4g}",
                f"{interval.low:.4g}",
                f"{interval.high:.4g}",
                said if each.at_bound is None else f"at its {each.at_bound} bound",
                f"{getattr(MOSAIC_TABLE2, name):.4g}",
            ]
        )
    return table(["", "value", "low", "high", "the runs say", "the paper"], rows)


def error_table(found: Found) -> str:
    """Return errors in and out of sample of both laws."""

    def line(name: str, fit: FitResult) -> list[str]:
        inside, outside = residuals(fit, held=False), residuals(fit, held=True)
        moving = sum(not each.fixed for each in fit.coefficients.values())
        return [
            name,
            str(moving),
            f"{np.sqrt(np.mean(inside**2)):.2%}",
            f"{np.sqrt(np.sum(inside**2) / (len(inside) - moving)):.2%}",
            f"{np.sqrt(np.mean(outside**2)):.2%}",
            f"{np.mean(outside):+.2%}",
            f"{np.abs(outside).max():.2%}",
        ]

    return table(
        [
            "law",
            "coefficients",
            "RMS in sample",
            "with freedom",
            "RMS held out",
            "bias held out",
            "largest held out",
        ],
        [line("joint (10)", found.joint), line("of N_act and D alone", found.dense)],
    )


def order_table(ordered: Sequence[Choice], by: str, number: int = 5) -> str:
    """Return the first shapes of an ordering."""
    key = (lambda c: c.loss) if by == "time" else (lambda c: c.flop_loss)
    rows = [
        [
            c.architecture.name,
            f"{c.architecture.n_active() / 1e3:.0f}k",
            f"{1e3 * c.step_s:.1f}",
            f"{(c.tokens if by == 'time' else c.flop_tokens) / 1e3:.0f}k",
            f"{key(c):.4f}",
        ]
        for c in sorted(ordered, key=key)[:number]
    ]
    return table(["shape", "N_act", "step [ms]", "D", "predicted [nat/byte]"], rows)


def pick_runs(ordered: Sequence[Choice]) -> dict[str, list]:
    """Return the runs of the picks, by budget."""
    picks = picked(ordered)
    return {
        "time": [run_within(c.architecture, c.tokens) for c in picks],
        "flop": [run_within(c.architecture, c.flop_tokens) for c in picks],
    }


def pick_table(ordered: Sequence[Choice], folder: Path, by: str) -> str:
    """Return predicted and measured losses of the picks under one budget."""
    picks, rows = _measured(ordered, folder, by)
    predicted = _predicted(picks, by)
    measured = np.array([row.loss for row in rows])
    places = [_places(predicted), _places(measured)]
    lines = []
    for at in np.argsort(predicted, kind="stable"):
        lines.append(
            [
                picks[at].architecture.name,
                f"{rows[at].tokens / 1e3:.0f}k",
                f"{predicted[at]:.4f}",
                f"{measured[at]:.4f}",
                f"{predicted[at] / measured[at] - 1.0:+.2%}",
                str(places[0][at]),
                str(places[1][at]),
                f"{rows[at].cpu_s:.0f}",
            ]
        )
    head = ["shape", "D", "predicted", "measured", "error", "place", "measured place", "took [s]"]
    return table(head, lines)


def pick_verdict(ordered: Sequence[Choice], folder: Path, noise: float) -> str:
    """Return how well each ordering holds under each budget."""
    lines = []
    for by in ("time", "flop"):
        picks, rows = _measured(ordered, folder, by)
        measured = np.array([row.loss for row in rows])
        for order in ("time", "flop"):
            predicted = _predicted(picks, order)
            right, sure = _pairs(predicted, measured, noise)
            first = int(np.argmin(predicted))
            lines.append(
                [
                    by,
                    order,
                    f"{spearmanr(predicted, measured).statistic:.3f}",
                    f"{right} of {sure}",
                    picks[first].architecture.name,
                    f"{measured[first] - measured.min():.4f}",
                ]
            )
    head = ["trained under", "ordered by", "Spearman", "sure pairs", "its first", "regret"]
    return table(head, lines)


def _measured(
    ordered: Sequence[Choice], folder: Path, by: str
) -> tuple[list[Choice], list[SweepRow]]:
    found = {row.id: row for row in read_sweep(folder / f"picks_{by}.csv")}
    return picked(ordered), [found[run.id] for run in pick_runs(ordered)[by]]


def _predicted(picks: Sequence[Choice], by: str) -> np.ndarray:
    return np.array([c.loss if by == "time" else c.flop_loss for c in picks])


def _places(losses: np.ndarray) -> np.ndarray:
    return losses.argsort(kind="stable").argsort(kind="stable") + 1


def _pairs(predicted: np.ndarray, measured: np.ndarray, noise: float) -> tuple[int, int]:
    """Return the pairs in the right order, of those measured further apart than seeds are."""
    right = sure = 0
    for i, k in combinations(range(len(measured)), 2):
        gap = np.log(measured[i] / measured[k])
        if abs(gap) > SURE * np.sqrt(2.0) * noise:
            sure += 1
            right += bool((predicted[i] - predicted[k]) * gap > 0.0)
    return right, sure


def law_part(found: Found) -> str:
    """Return all that the grid says."""
    cpu_s = sum(row.cpu_s for row in found.rows)
    losses = [row.loss for row in found.rows]
    times = found.times
    lines = [
        f"{len(found.rows)} runs, {sum(row.tokens for row in found.rows) / 1e6:.1f}M tokens, "
        f"{cpu_s / 60:.0f} minutes of processor; losses {min(losses):.3f} to {max(losses):.3f} "
        "nat/byte.",
        f"Between seeds, log L deviates by {found.noise:.2%} ({found.freedom} degrees of freedom).",
        pilot_table(found.folder),
        f"{found.joint.n_train} runs fitted, {found.joint.n_holdout} held out; "
        f"{found.joint.starts_agreeing} of {found.joint.starts} starts agree; converged: "
        f"{found.joint.converged}.",
        coefficient_table(found.joint),
        error_table(found),
        *(f"- {remark.reason}: {remark.sentence}" for remark in found.joint.warnings),
        f"A step takes {1e3 * times.fixed:.2f} ms, {1e6 * times.expert:.0f} us an expert and "
        f"layer, {1e12 * times.product:.1f} ps a FLOP ({1e-9 / times.product:.1f} GFLOP/s) and "
        f"{1e9 * times.optimizer:.1f} ns a parameter; RMS error {times.error:.1%}, of the largest "
        f"width from the smaller ones {times.error_largest:.1%}."
        if times.product
        else f"{times}",
    ]
    return "\n\n".join(lines)


def price_part(found: Found, pack: str, stack: str) -> str:
    """Return how well a pack and a stack price the steps of the grid, which fitted neither."""
    shapes = [architecture_of(row) for row in found.rows]
    priced = np.array(priced_steps(shapes, pack, stack))
    taken = np.array([seconds_of_step(row) for row in found.rows])
    error = priced / taken - 1.0
    return (
        f"Steps of the {len(error)} runs by pack and stack: MAPE {np.abs(error).mean():.1%}, bias "
        f"{error.mean():+.1%}, Spearman {spearmanr(priced, taken).statistic:.3f}."
    )


def order_part(found: Found, ordered: Sequence[Choice]) -> str:
    """Return both orderings."""
    by_time = np.array([c.loss for c in ordered])
    by_flop = np.array([c.flop_loss for c in ordered])
    first = min(ordered, key=lambda c: c.flop_loss)
    lines = [
        f"{len(ordered)} shapes, {BUDGET_S:g} s each.",
        order_table(ordered, "time"),
        order_table(ordered, "flop"),
        f"Spearman between the orderings: {spearmanr(by_time, by_flop).statistic:.3f}. The first "
        f"by FLOPs, {first.architecture.name}, is number {ordered.index(first) + 1} by time, "
        f"{first.loss - ordered[0].loss:.4f} nat/byte behind.",
    ]
    return "\n\n".join(lines)


def picks_part(found: Found, ordered: Sequence[Choice]) -> str:
    """Return what the trained picks say."""
    return "\n\n".join(
        [
            pick_table(ordered, found.folder, "time"),
            pick_table(ordered, found.folder, "flop"),
            pick_verdict(ordered, found.folder, found.noise),
        ]
    )
