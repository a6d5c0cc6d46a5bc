"""How well the model predicts measured runs: in the fit, left out of it, and never in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from perfmodel.architecture import MfuConvention
from perfmodel.calibration.fit_stack import errors, fit_constants, held_out_errors, predict, prepare
from perfmodel.calibration.stacks import Constant, StackProfile, load_stack
from perfmodel.cluster import Cluster
from perfmodel.frozen import Frozen
from perfmodel.plan import Recompute
from perfmodel.step import DEFAULT_STACK, estimate
from perfmodel.validation.runs import (
    TABLE5_BATCH,
    TABLE5_CLUSTER,
    MeasuredRun,
    layout_sweeps,
    staged_runs,
    table5_plan,
)

Progress = Callable[[str, int, int], None]


class RowScore(Frozen):
    """One measured run and what is predicted for it."""

    sweep: str
    plan: str
    measured_mfu: float
    predicted_mfu: float
    error: float
    error_leave_one_out: float
    error_leave_one_sweep_out: float
    peer_mfu: float | None


class SweepScore(Frozen):
    """Errors on one sweep, in sample [-]; ``spearman`` is the rank correlation inside it."""

    name: str
    rows: int
    mape: float
    bias: float
    spearman: float
    peer_mape: float | None


class OverallScore(Frozen):
    """Mean absolute percentage errors on MFU over all rows [-]."""

    rows: int
    mape_in_sample: float
    mape_leave_one_out: float
    mape_leave_one_sweep_out: float
    peer_mape: float | None


class Table5Score(Frozen):
    """The four staged runs, in no fit: ratios of MFU to the largest [-]."""

    measured: tuple[float, ...]
    predicted: dict[str, tuple[float, ...]]  # by recompute mode, which the paper does not state
    mean_absolute_error: dict[str, float]
    paper_mean_absolute_error: float
    mfu_convention: str


class Scoreboard(Frozen):
    """Everything that `mosaic validate` prints; ``schema_version`` 1."""

    schema_version: int = 1
    stack: str
    hardware: str
    sweeps: tuple[SweepScore, ...]
    overall: OverallScore
    constants: dict[str, Constant]
    refitted: dict[str, float]
    table5: Table5Score
    rows: tuple[RowScore, ...]
    mfu_convention: str
    source: str


def score_table5(stack: StackProfile) -> Table5Score:
    """Predict the ratios of the four staged runs under every recompute mode."""
    hardware, nodes = TABLE5_CLUSTER
    cluster = Cluster(hardware=hardware, nodes=nodes)
    runs = staged_runs()
    convention = MfuConvention.SIX_N_EMBEDDING  # what the measured sweeps of the same stack count
    measured = np.array([run.measured_ratio for run in runs])
    predicted: dict[str, tuple[float, ...]] = {}
    for mode in Recompute:
        plan = table5_plan(mode)
        mfu = np.array(
            [
                estimate(
                    run.architecture,
                    plan,
                    cluster,
                    TABLE5_BATCH,
                    stack=stack,
                    mfu_convention=convention,
                ).mfu
                for run in runs
            ]
        )
        predicted[mode.value] = tuple(float(x) for x in mfu / mfu.max())
    paper = np.array([run.paper_mfu for run in runs])
    return Table5Score(
        measured=tuple(float(x) for x in measured),
        predicted=predicted,
        mean_absolute_error={
            mode: float(np.mean(np.abs(np.array(ratios) - measured)))
            for mode, ratios in predicted.items()
        },
        paper_mean_absolute_error=float(np.mean(np.abs(paper / paper.max() - measured))),
        mfu_convention=convention.value,
    )


def _mape(values: Sequence[float]) -> float:
    return float(np.mean(np.abs(values)))


def _sweep(name: str, rows: Sequence[RowScore]) -> SweepScore:
    from scipy.stats import spearmanr

    peers = [row.peer_mfu / row.measured_mfu - 1.0 for row in rows if row.peer_mfu is not None]
    measured = [row.measured_mfu for row in rows]
    return SweepScore(
        name=name,
        rows=len(rows),
        mape=_mape([row.error for row in rows]),
        bias=float(np.mean([row.error for row in rows])),
        spearman=float(spearmanr(measured, [row.predicted_mfu for row in rows]).statistic),
        peer_mape=_mape(peers) if len(peers) == len(rows) else None,
    )


def validate(
    stack: str | StackProfile = DEFAULT_STACK,
    runs: Sequence[MeasuredRun] | None = None,
    *,
    progress: Progress | None = None,
) -> Scoreboard:
    """Score a stack profile on measured runs.

    In-sample errors are those of the profile's own constants. The left-out errors are computed
    here, by fitting again without each row, and without each sweep.

    Parameters
    ----------
    stack : str or StackProfile
    runs : sequence of MeasuredRun, optional
        The 24 rows of the B200 layout sweeps unless given.
    progress : callable, optional
        Called with (what, done, of).
    """
    profile = load_stack(stack) if isinstance(stack, str) else stack
    measured = tuple(runs) if runs is not None else layout_sweeps()
    prepared = prepare(measured, profile)
    base, names = profile.stack(), tuple(profile.constants)
    constants = np.array([constant.value for constant in profile.constants.values()])
    predicted = predict(prepared, base, constants, names)
    in_sample = errors(prepared, base, constants, names)

    def step(what: str) -> Callable[[int, int], None] | None:
        return None if progress is None else lambda done, of: progress(what, done, of)

    refitted = fit_constants(prepared, base, names=names)
    sweeps = [run.sweep for run in measured]
    each = list(range(len(measured)))
    one_out = held_out_errors(prepared, base, each, step("leave one row out"), names)
    sweep_out = held_out_errors(prepared, base, sweeps, step("leave one sweep out"), names)
    rows = tuple(
        RowScore(
            sweep=run.sweep,
            plan=str(run.plan),
            measured_mfu=run.measured_mfu,
            predicted_mfu=float(predicted[i]),
            error=float(in_sample[i]),
            error_leave_one_out=float(one_out[i]),
            error_leave_one_sweep_out=float(sweep_out[i]),
            peer_mfu=run.peer_mfu,
        )
        for i, run in enumerate(measured)
    )
    peers = [r.peer_mfu / r.measured_mfu - 1.0 for r in rows if r.peer_mfu is not None]
    return Scoreboard(
        stack=profile.name,
        hardware=measured[0].cluster.pack.name,
        sweeps=tuple(
            _sweep(name, [row for row in rows if row.sweep == name])
            for name in dict.fromkeys(sweeps)
        ),
        overall=OverallScore(
            rows=len(rows),
            mape_in_sample=_mape(list(in_sample)),
            mape_leave_one_out=_mape(list(one_out)),
            mape_leave_one_sweep_out=_mape(list(sweep_out)),
            peer_mape=_mape(peers) if len(peers) == len(rows) else None,
        ),
        constants=profile.constants,
        refitted={name: float(refitted[i]) for i, name in enumerate(names)},
        table5=score_table5(profile),
        rows=rows,
        mfu_convention=measured[0].mfu_convention.value,
        source=profile.provenance,
    )
