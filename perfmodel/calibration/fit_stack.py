"""Fit a stack profile to measured runs.

    python -m perfmodel.calibration.fit_stack --base megatron-eager --name mine --out mine.toml

The constants that the base profile fits (those of :data:`perfmodel.stack.SWEEP_CONSTANTS` for
megatron-eager) minimise the soft-L1 loss of the log ratio of predicted to measured MFU (scale 0.05,
so that a run which did something else than its label says bends the fit little). Nothing else is
fitted: kernels and collectives come from the hardware pack. Intervals are the 5-95% quantiles of a
bootstrap over runs, of the resamples that identify the constant.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibration.stacks import StackErrors, StackProfile, load_stack
from perfmodel.calibration.writer import record_toml
from perfmodel.errors import PerfmodelError
from perfmodel.iteration import step_total
from perfmodel.ranges import stack_variables
from perfmodel.sources import Source
from perfmodel.stack import SWEEP_CONSTANTS, Stack
from perfmodel.step import StepModel
from perfmodel.validation.runs import MeasuredRun, layout_sweeps

Vector = NDArray[np.float64]

LOSS_SCALE = 0.05
"""Log ratio at which the loss turns from quadratic to linear [-]."""

SHIPPED_ORIGIN = "figures of arXiv 2608.10605, released with dmlc/ScalePlan"

STARTS = {
    "host_layer_s": (0.02, 0.005),
    "host_microbatch_s": (0.02, 0.005),
    "jitter_s": (0.01, 0.005),
    "pipeline_node_cost": (0.5, 0.2),
    "elementwise_scale": (4.0, 1.0),
    "router_scale": (4.0, 1.0),
    "optimizer_scale": (2.0, 1.0),
}
"""Constants that runs can fit, and the two starting points; the better of the fits is kept."""


@dataclass(frozen=True)
class PreparedRun:
    """A measured run with everything computed that the stack's constants do not touch."""

    model: StepModel
    flops: float
    measured: float

    @classmethod
    def of(cls, run: MeasuredRun, profile: StackProfile) -> PreparedRun:
        """Price the layers of a run once."""
        model = StepModel(run.architecture, run.plan, run.cluster, run.batch, profile)
        _ = model.cost, model.synchronisation
        flops = run.architecture.flops_per_token(run.mfu_convention, run.batch.seq_len)
        flops *= run.batch.tokens
        peak = run.cluster.n_devices * run.cluster.peak_flops
        return cls(model, flops / peak, run.measured_mfu)

    def mfu(self, stack: Stack) -> float:
        """Return the predicted MFU under a stack's fitted constants [-]."""
        pipeline = self.model.pipeline_under(stack)
        sync = self.model.synchronisation
        if stack.optimizer_scale != self.model.profile.stack().optimizer_scale:
            sync = self.model.synchronisation_under(stack)
        sync = sync._replace(step_host=stack.step_host_s)
        step = step_total(stack, pipeline, sync, float(self.model.n_microbatches))
        return self.flops / float(step)


def prepare(runs: Sequence[MeasuredRun], profile: StackProfile) -> tuple[PreparedRun, ...]:
    """Price the layers of every run once."""
    return tuple(PreparedRun.of(run, profile) for run in runs)


def predict(
    runs: Sequence[PreparedRun],
    base: Stack,
    constants: Vector,
    names: Sequence[str] = SWEEP_CONSTANTS,
) -> Vector:
    """Return the MFU of every run under the constants of these names [-]."""
    stack = base._replace(**dict(zip(names, map(float, constants), strict=True)))
    return np.array([run.mfu(stack) for run in runs])


def starting_points(names: Sequence[str]) -> tuple[tuple[float, ...], ...]:
    """Return the starting points of some constants.

    Raises
    ------
    PerfmodelError
        A constant that this fit does not know.
    """
    if unknown := sorted(set(names) - set(STARTS)):
        raise PerfmodelError(
            f"The constant {unknown[0]} cannot be fitted to a table of runs; those that can are "
            f"{', '.join(STARTS)}."
        )
    return tuple(zip(*(STARTS[name] for name in names), strict=True))


def fit_constants(
    runs: Sequence[PreparedRun],
    base: Stack,
    weights: Vector | None = None,
    starts: Sequence[Sequence[float]] | None = None,
    names: Sequence[str] = SWEEP_CONSTANTS,
) -> Vector:
    """Fit constants to runs.

    A constant that none of the runs responds to (no pipeline over several nodes, say) is not
    identified by them. A time is then set to 0, the effect left out and not guessed; a scale keeps
    the value of ``base``.

    Parameters
    ----------
    runs : sequence of PreparedRun
    base : Stack
        The assumed constants.
    weights : array, optional
        Weight of each run; 1 unless given.
    starts : sequence of as many positive numbers each as there are names, optional
        Starting points; those of `STARTS` unless given.
    names : sequence of str
        Which constants; A, H, s [s] and c [-] unless given.

    Returns
    -------
    array of shape (names,)

    Raises
    ------
    PerfmodelError
        Fewer runs than constants.
    """
    from scipy.optimize import least_squares

    if len(runs) < len(names):
        raise PerfmodelError(
            f"{len(runs)} measured runs cannot fit {len(names)} constants; at least "
            f"{len(names)} are needed outside each row, or sweep, that is left out."
        )
    measured = np.log([run.measured for run in runs])
    root = np.ones(len(runs)) if weights is None else np.sqrt(weights)

    def residuals(log_constants: Vector) -> Vector:
        ratio = np.log(predict(runs, base, np.exp(log_constants), names)) - measured
        # soft L1 by hand, so that weights multiply the loss and not its argument
        loss = 2.0 * (np.sqrt(1.0 + (ratio / LOSS_SCALE) ** 2) - 1.0)
        signed: Vector = root * np.sign(ratio) * np.sqrt(loss)
        return signed

    best: Any = None
    for start in starts or starting_points(names):
        fit = least_squares(
            residuals, np.log(start), bounds=(np.log(1e-9), np.log(1e3)), xtol=1e-10, ftol=1e-12
        )
        if best is None or fit.cost < best.cost:
            best = fit
    constants: Vector = np.exp(best.x)
    silent = ~responds(runs, base, constants, names)
    kept = [getattr(base, name) if name.endswith("_scale") else 0.0 for name in names]
    return np.where(silent, kept, constants)


def responds(
    runs: Sequence[PreparedRun], base: Stack, constants: Vector, names: Sequence[str]
) -> NDArray[np.bool_]:
    """Say of each constant whether the prediction of any run changes with it, shape (names,)."""
    found = np.empty(len(names), dtype=np.bool_)
    for i, name in enumerate(names):
        there, without = constants.copy(), constants.copy()
        there[i] = max(constants[i], *STARTS[name])
        without[i] = 0.0
        change = predict(runs, base, without, names) / predict(runs, base, there, names)
        found[i] = np.max(np.abs(np.log(change))) >= 1e-9
    return found


def errors(
    runs: Sequence[PreparedRun],
    base: Stack,
    constants: Vector,
    names: Sequence[str] = SWEEP_CONSTANTS,
) -> Vector:
    """Relative error of the predicted MFU of every run [-]."""
    measured: Vector = np.array([run.measured for run in runs])
    relative: Vector = predict(runs, base, constants, names) / measured - 1.0
    return relative


def held_out_errors(
    runs: Sequence[PreparedRun],
    base: Stack,
    groups: Sequence[object],
    progress: Callable[[int, int], None] | None = None,
    constants: Sequence[str] = SWEEP_CONSTANTS,
) -> Vector:
    """Relative error of each run under constants fitted to the runs of the other groups [-]."""
    out = np.empty(len(runs))
    names = list(dict.fromkeys(groups))
    for done, name in enumerate(names):
        inside = [i for i, group in enumerate(groups) if group == name]
        rest = [run for i, run in enumerate(runs) if groups[i] != name]
        fitted = fit_constants(rest, base, names=constants)
        out[inside] = errors([runs[i] for i in inside], base, fitted, constants)
        if progress is not None:
            progress(done + 1, len(names))
    return out


def bootstrap(
    runs: Sequence[PreparedRun],
    base: Stack,
    n: int,
    rng: np.random.Generator,
    start: Vector,
    progress: Callable[[int, int], None] | None = None,
    names: Sequence[str] = SWEEP_CONSTANTS,
) -> NDArray[np.float64]:
    """Refit to ``n`` resamples of the runs, with replacement, from ``start``; shape (n, names).

    NaN where no run of a resample responds to the constant: it says nothing of it.
    """
    draws = np.empty((n, len(names)))
    for i in range(n):
        weights = np.bincount(rng.integers(len(runs), size=len(runs)), minlength=len(runs))
        chosen = [int(k) for k in np.flatnonzero(weights)]
        drawn = [runs[k] for k in chosen]
        draws[i] = fit_constants(
            drawn,
            base,
            weights[chosen].astype(np.float64),
            starts=[np.maximum(start, 1e-6).tolist()],
            names=names,
        )
        draws[i, ~responds(drawn, base, draws[i], names)] = np.nan
        if progress is not None:
            progress(i + 1, n)
    return draws


def fit_profile(
    runs: Sequence[MeasuredRun],
    base: StackProfile,
    *,
    name: str,
    provenance: str,
    resamples: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> StackProfile:
    """Fit the constants of ``base``; assumptions, units and meanings are those of ``base``.

    Parameters
    ----------
    runs : sequence of MeasuredRun
        Their ranges become the profile's.
    base : StackProfile
    name, provenance : str
    resamples, seed : int
        Of the bootstrap behind the intervals.
    progress : callable, optional
        Called with (done, of) while the bootstrap runs.
    """
    stack, names = base.stack(), tuple(base.constants)
    prepared = prepare(runs, base)
    fitted = fit_constants(prepared, stack, names=names)
    draws = bootstrap(
        prepared, stack, resamples, np.random.default_rng(seed), fitted, progress, names
    )
    low, high = np.nanquantile(draws, (0.05, 0.95), axis=0)
    identified = np.mean(np.isfinite(draws), axis=0)
    constants = {
        constant: base.constants[constant].model_copy(
            update={
                "value": _round(fitted[i]),
                "low": min(_round(low[i]), _round(fitted[i])),
                "high": max(_round(high[i]), _round(fitted[i])),
                "identified": float(identified[i]),
                "source": Source.FITTED,
            }
        )
        for i, constant in enumerate(names)
    }
    observed = [stack_variables(run.model) for run in prepared]
    ranges = {
        key: (min(row[key] for row in observed), max(row[key] for row in observed))
        for key in observed[0]
    }
    rows = list(range(len(runs)))
    sweeps = [run.sweep for run in runs]
    left_out = held_out_errors(prepared, stack, rows, constants=names)
    by_sweep = held_out_errors(prepared, stack, sweeps, constants=names)
    low, high = ratio_interval(np.log1p(left_out))  # of predicted over measured MFU
    scores = StackErrors(
        rows=len(runs),
        mape_in_sample=_mean(errors(prepared, stack, fitted, names)),
        mape_leave_one_out=_mean(left_out),
        low=_round(low),
        high=_round(high),
        mape_leave_one_sweep_out=_mean(by_sweep),
    )
    content = base.model_dump() | {
        "name": name,
        "hardware": sorted({run.cluster.pack.name for run in runs}),
        "provenance": provenance,
        "constants": {key: constant.model_dump() for key, constant in constants.items()},
        "ranges": ranges,
        "errors": scores.model_dump(),
    }
    return StackProfile.model_validate(content)


def ratio_interval(log_ratios: Vector) -> tuple[float, float]:
    """Return the 5% and 95% quantiles of ratios, from the logarithms of some of them [-].

    Each is the order statistic that a further ratio of the same kind falls beyond with a chance
    of at most 5% (split conformal prediction, arXiv 2107.07511); the extreme one where the
    sample is too small to have such.
    """
    ordered = np.sort(log_ratios)
    n = len(ordered)
    rank = min(n, int(np.ceil(0.95 * (n + 1))))
    return float(np.exp(ordered[n - rank])), float(np.exp(ordered[rank - 1]))


def _round(value: float) -> float:
    return float(f"{value:.6g}")


def _mean(values: Vector) -> float:
    return float(f"{np.mean(np.abs(values)):.4g}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    o = _parser().parse_args(arguments)
    if not o.out.absolute().parent.is_dir():
        _say(f"{o.out} cannot be written: its folder does not exist.")
        return 2
    try:
        measured = layout_sweeps(o.runs, o.hardware)
        profile = fit_profile(
            measured,
            load_stack(o.base),
            name=o.name,
            provenance=(
                f"{len(measured)} measured runs ({o.origin}); soft-L1 on the log ratio of MFU, "
                f"scale {LOSS_SCALE:g}; intervals 5-95% of {o.resamples} bootstrap resamples, "
                f"seed {o.seed}"
            ),
            resamples=o.resamples,
            seed=o.seed,
            progress=lambda done, of: _say(f"bootstrap {done}/{of}") if done % 50 == 0 else None,
        )
    except PerfmodelError as error:
        _say(str(error))
        return 2
    words = ["--base", o.base, "--name", o.name, "--hardware", o.hardware]
    if o.runs is not None:
        words += ["--runs", o.runs.name]
    words += ["--resamples", str(o.resamples), "--seed", str(o.seed), "--origin", o.origin]
    command = (
        f"python -m perfmodel.calibration.fit_stack {shlex.join([*words, '--out', o.out.name])}"
    )
    o.out.write_text(record_toml(profile, f"Written by a program:\n{command}"), "utf-8")
    _say(f"wrote {o.out} (digest {profile.digest[:12]})")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.calibration.fit_stack",
        description="Fit the constants of a stack profile to measured runs.",
    )
    parser.add_argument("--out", type=Path, required=True, help="TOML file to write")
    parser.add_argument("--name", required=True, help="name of the profile")
    parser.add_argument(
        "--base", default="megatron-eager", help="profile whose assumptions and wording are kept"
    )
    parser.add_argument("--runs", type=Path, help="CSV of measured runs; default: the shipped ones")
    parser.add_argument("--hardware", default="p6-b200", help="hardware pack, by name or path")
    parser.add_argument("--resamples", type=_positive, default=400, help="bootstrap resamples")
    parser.add_argument("--seed", type=_natural, default=2608, help="seed of the bootstrap")
    parser.add_argument("--origin", default=SHIPPED_ORIGIN, help="where the runs come from")
    return parser


def _natural(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} must be at least 0")
    return value


def _positive(text: str) -> int:
    if _natural(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return int(text)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
