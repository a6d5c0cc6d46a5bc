"""How far the layouts that experts chose are from the best that the search finds.

    python -m perfmodel.validation.expert_layouts --csv expert-layouts-scores.csv

Every case of :mod:`perfmodel.validation.expert_rows` is priced by the scalar estimate, under the
stack profile with the switches of its row. The plans of a stated space
(:mod:`perfmodel.validation.expert_spaces`) are priced under the same profile by the kernel of the
search (:mod:`perfmodel.layout_search`). What an expert may choose and that space cannot, single
modules to compute again and stages of the recipes' own rule, is given to the other plans as well
(:func:`perfmodel.validation.expert_spaces.variants_of`), so that all compete on equal
terms. Nothing is fitted to these layouts.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from io import StringIO
from pathlib import Path
from statistics import fmean, median

import numpy as np

from perfmodel.calibration.stacks import load_stack
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.memory import stage_total
from perfmodel.plan import Plan
from perfmodel.step import StepModel
from perfmodel.validation.expert_rows import ExpertCase, ExpertTable, expert_cases
from perfmodel.validation.expert_spaces import PricedSpace, spaces_of, variants_of

__all__ = [
    "ExpertScore",
    "Share",
    "score_case",
    "score_cases",
    "share_of_layouts",
    "shares_of",
    "spaces_of",
]

NEAR = 0.9
"""Throughput over the best's from which a layout counts as near it [-]."""

AIM = 0.7
"""Share of cases that should be near the best [-]."""

SAME = 1.0 - 1e-9
"""Times nearer than this are the same."""

ROOM = 0.92
"""Share of a device's memory that a plan may take, as an envelope has it by default [-]."""

FULL = 0.95
"""Share of the memory above which a plan is said to fill a device [-]."""

Progress = Callable[[str, int, int], None]


class ExpertScore(Frozen):
    """One case.

    Attributes
    ----------
    case, rows : str, tuple of int
        What is trained where; the rows of the table that say so.
    model, phase, hardware, devices, precision, global_batch, seq_len
    stack : str
    expert, best : str
        The expert's plan, and the shortest that fits.
    expert_s, best_s : float
        Times of a step [s].
    ratio : float
        Throughput of the expert's plan over that of the best; at most 1, since the expert's is
        a candidate too where it fits, and above 1 where it is faster and does not fit [-].
    roomy_ratio : float
        The same against the best of a device that has as much memory as the expert's plan needs,
        where that is more than it has [-].
    search_ratio : float
        The same against the best that `search_layouts` itself finds, without the plans of
        `variants_of` and the expert's own; above 1 where the expert's is faster [-].
    rank : int
        1 and the plans that fit and are faster.
    near_plans, fitting, priced : int
        Plans of the space within 10% of the best, that fit, and all.
    expert_fits : bool
    expert_bytes, best_bytes, device_bytes : float
        Memory of the heaviest stage, and of the device [B].
    heaviest : str
        The largest bucket of the expert's heaviest stage.
    differs : str
        Degrees in which the best differs.
    lost : str
        The three parts of the step that make the expert's longer than the best's, as shares of
        the best's step.
    """

    case: str
    rows: tuple[int, ...]
    model: str
    phase: str
    hardware: str
    devices: int
    precision: str
    global_batch: int
    seq_len: int
    stack: str
    expert: str
    best: str
    expert_s: float
    best_s: float
    ratio: float
    roomy_ratio: float
    search_ratio: float
    rank: int
    near_plans: int
    fitting: int
    priced: int
    expert_fits: bool
    expert_bytes: float
    best_bytes: float
    device_bytes: float
    heaviest: str
    differs: str
    lost: str

    @property
    def near(self) -> bool:
        """Whether the expert's throughput is within 10% of the best's."""
        return self.ratio >= NEAR


class Share(Frozen):
    """How many of some cases are near the best."""

    by: str
    name: str
    cases: int
    near: int
    roomy_near: int  # with as much memory as the expert's plan needs
    search_near: int  # against the search alone
    fit: int
    ratio: float  # median [-]
    rank: float  # median [-]
    chance: float  # mean share of the plans that fit that are near the best [-]

    @property
    def share(self) -> float:
        """Share of the cases that are near the best [-]."""
        return self.near / self.cases


# ---------------------------------------------------------------- one case

_COMPARED = ("tp", "cp", "ep", "pp", "vpp", "micro_batch", "zero")


def _differs(expert: Plan, best: Plan) -> str:
    changed = [
        f"{name} {getattr(expert, name)}>{getattr(best, name)}"
        for name in _COMPARED
        if getattr(expert, name) != getattr(best, name)
    ]
    own, other = (
        "+".join(plan.recompute_modules) or str(plan.recompute) for plan in (expert, best)
    )
    if own != other:
        changed.append(f"recompute {own}>{other}")
    return " ".join(changed)


def _needs(model: StepModel) -> float:
    return max(float(stage_total(model.stage(i))) for i in range(model.plan.pp))


def _lost(expert: StepModel, best: StepModel) -> str:
    """Name the parts of a step that cost the expert's plan most against the best."""
    ours, theirs = best.breakdown(), expert.breakdown()
    parts = sorted(((theirs[n] - ours[n], n) for n in ours), reverse=True)[:3]
    return " ".join(f"{n} {100.0 * d / best.step_s:+.0f}%" for d, n in parts if d > 0.0)


def score_case(case: ExpertCase, room: float = ROOM) -> ExpertScore:
    """Compare one expert's layout with the best of the space.

    Parameters
    ----------
    case : ExpertCase
    room : float
        Share of a device's memory that a plan may take [-].

    Raises
    ------
    PerfmodelError
        No plan of the space fits.
    """
    run, profile = case.run, load_stack(case.stack)
    model = StepModel(run.architecture, run.plan, run.cluster, run.batch, profile)
    expert = model.step_s
    heaviest = max((model.stage(i) for i in range(run.pp)), key=stage_total)
    needs = float(stage_total(heaviest))
    limit = room * run.cluster.device_memory_bytes
    best_s = expert if needs <= limit else np.inf
    best_plan, best_bytes, roomy_s = run.plan, needs, expert
    spaces = [PricedSpace(case, space, profile) for space in spaces_of(case)]
    for found in spaces:
        fit = np.flatnonzero(found.memory <= limit)
        if len(fit):
            i = int(fit[np.argmin(found.step_s[fit])])
            if found.step_s[i] < best_s:
                best_s, best_bytes = float(found.step_s[i]), float(found.memory[i])
                best_plan = found.table.plan(i)
        roomy = found.step_s[found.memory <= max(limit, needs)]
        roomy_s = min(roomy_s, float(roomy.min(initial=np.inf)))
    if not any((found.memory <= limit).any() for found in spaces):
        raise PerfmodelError(f"No layout of the space fits {run.model} on {run.hardware}.")
    fitting_s = np.concatenate([found.step_s[found.memory <= limit] for found in spaces])
    faster = int(np.count_nonzero(fitting_s < expert * SAME))
    alone_s = float(fitting_s.min())
    for other in (v for f in spaces for v in variants_of(case, f, max(expert, alone_s))):
        takes, other_s = _needs(other), other.step_s
        if takes <= max(limit, needs):
            roomy_s = min(roomy_s, other_s)
        if takes <= limit:
            faster += other_s < expert * SAME
            if other_s < best_s * SAME:
                best_s, best_plan, best_bytes = other_s, other.plan, takes
    best = StepModel(run.architecture, best_plan, run.cluster, run.batch, profile)
    bucket = max(heaviest._fields, key=lambda name: getattr(heaviest, name))
    return ExpertScore(
        case=f"{run.model} {run.devices}x{run.hardware} {run.precision} gbs{run.global_batch}"
        + (" sft" if run.phase == "sft" else ""),
        rows=case.rows,
        model=run.architecture.name,
        phase=run.phase,
        hardware=run.hardware,
        devices=run.devices,
        precision=run.precision,
        global_batch=run.global_batch,
        seq_len=run.seq_len,
        stack=profile.name,
        expert=str(run.plan),
        best=str(best_plan),
        expert_s=expert,
        best_s=best_s,
        ratio=best_s / expert,
        roomy_ratio=roomy_s / expert,
        search_ratio=alone_s / expert,
        rank=1 + faster,
        near_plans=int(np.count_nonzero(fitting_s * NEAR <= best_s)),
        fitting=len(fitting_s),
        priced=sum(len(found.table) for found in spaces),
        expert_fits=needs <= limit,
        expert_bytes=needs,
        best_bytes=best_bytes,
        device_bytes=limit,
        heaviest=bucket,
        differs=_differs(run.plan, best_plan),
        lost=_lost(model, best) if best_s < expert else "",
    )


def score_cases(
    cases: Sequence[ExpertCase], progress: Progress | None = None, room: float = ROOM
) -> tuple[ExpertScore, ...]:
    """Compare every case; ``progress`` is told what is done after each."""
    scores = []
    for i, case in enumerate(cases, start=1):
        scores.append(score_case(case, room))
        if progress is not None:
            progress("layouts of experts", i, len(cases))
    return tuple(scores)


def shares_of(scores: Sequence[ExpertScore]) -> tuple[Share, ...]:
    """Count the cases near the best: all, by device, by model, and by whether they fit."""
    ways: tuple[tuple[str, Callable[[ExpertScore], str]], ...] = (
        ("all", lambda s: "all"),
        ("device", lambda s: s.hardware),
        ("model", lambda s: s.model),
        ("kind", lambda s: "fits" if s.expert_fits else "does not fit"),
        ("stack", lambda s: s.stack),
    )
    shares = []
    for by, key in ways:
        for name in sorted({key(s) for s in scores}):
            mine = [s for s in scores if key(s) == name]
            shares.append(
                Share(
                    by=by,
                    name=name,
                    cases=len(mine),
                    near=sum(s.near for s in mine),
                    roomy_near=sum(s.roomy_ratio >= NEAR for s in mine),
                    search_near=sum(s.search_ratio >= NEAR for s in mine),
                    fit=sum(s.expert_fits for s in mine),
                    ratio=median(s.ratio for s in mine),
                    rank=median(s.rank for s in mine),
                    chance=fmean(s.near_plans / max(1, s.fitting) for s in mine),
                )
            )
    return tuple(shares)


def share_of_layouts(scores: Sequence[ExpertScore]) -> tuple[int, float]:
    """Return the number of different layouts, and the share near the best with one say each [-].

    A layout is a plan of a model on a number of devices of a kind, whatever the precision and the
    batch: recipes repeat it for several.
    """
    groups: dict[tuple[object, ...], list[bool]] = {}
    for s in scores:
        groups.setdefault((s.model, s.hardware, s.devices, s.phase, s.expert), []).append(s.near)
    return len(groups), fmean(fmean(near) for near in groups.values())


# ---------------------------------------------------------------- command line

FIELDS = tuple(ExpertScore.model_fields)


def scores_csv(scores: Iterable[ExpertScore]) -> str:
    """Write cases as CSV; numbers to six digits."""
    out = StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(FIELDS)
    for score in scores:
        values = score.model_dump().values()
        cells = (" ".join(map(str, v)) if isinstance(v, tuple) else v for v in values)
        writer.writerow([f"{v:.6g}" if isinstance(v, float) else v for v in cells])
    return out.getvalue()


def _line(s: ExpertScore) -> str:
    fits = "" if s.expert_fits else f"  does not fit: {s.expert_bytes / 1e9:.0f} GB, {s.heaviest}"
    return f"{100 * s.ratio:6.1f}% rank {s.rank:5d} of {s.fitting:6d}  {s.case}  {s.stack}{fits}"


def _reasons(table: ExpertTable) -> list[str]:
    counts: dict[str, int] = {}
    for row in table.excluded:
        counts[row.reason] = counts.get(row.reason, 0) + 1
    return [f"{n:4d}  {why}" for why, n in sorted(counts.items(), key=lambda kv: -kv[1])]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.validation.expert_layouts",
        description="Compare layouts that experts chose with the best of a search.",
    )
    parser.add_argument("--csv", type=Path, help="file to write every case to")
    parser.add_argument("--only", default="", help="cases whose model or device has this text")
    parser.add_argument("--tag", help="rows of this tag of the recipes alone")
    parser.add_argument(
        "--room", type=float, default=ROOM, help="share of a device's memory that a plan may take"
    )
    o = parser.parse_args(arguments)

    def progress(what: str, done: int, of: int) -> None:
        if done % 10 == 0 or done == of:
            sys.stderr.write(f"{what}: {done} of {of}\n")

    table = expert_cases(tag=o.tag)
    cases = [c for c in table.cases if o.only.lower() in f"{c.run.model} {c.run.hardware}".lower()]
    if not cases:
        sys.stderr.write(f"No case has {o.only!r} in its model or device.\n")
        return 2
    try:
        scores = score_cases(cases, progress, o.room)
    except PerfmodelError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    if o.csv is not None:
        o.csv.write_text(scores_csv(scores), "utf-8")
    lines = [_line(s) for s in sorted(scores, key=lambda s: s.ratio)]
    lines += ["", "Not near the best: what the best changes, and where its time is shorter"]
    for s in sorted(scores, key=lambda s: s.ratio):
        if not s.near:
            lines += [f"{s.case}: {s.differs}", f"    {s.lost}"]
    lines += ["", "Rows that are not priced", *_reasons(table), ""]
    lines += [
        f"{s.by:7s} {s.name:36s} {s.near:4d} of {s.cases:4d} near {100 * s.share:5.1f}%  "
        f"(roomy {s.roomy_near}, search alone {s.search_near}, by chance {100 * s.chance:.1f}%)  "
        f"median ratio {100 * s.ratio:5.1f}% rank {s.rank:g}  fit {s.fit}"
        for s in shares_of(scores)
    ]
    layouts, share = share_of_layouts(scores)
    lines.append(f"{layouts} different layouts, one say each: {100 * share:.1f}% near")
    fills = [s for s in scores if not s.near and s.best_bytes > FULL * s.device_bytes]
    lines.append(
        f"not near: {sum(not s.near for s in scores)}, of which the best fills more than "
        f"{100 * FULL:.0f}% of the memory in {len(fills)}"
    )
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
