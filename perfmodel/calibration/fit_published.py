"""Fit stack profiles to published runs.

    python -m perfmodel.calibration.fit_published megatron-bridge --out megatron-bridge.toml

A spec (:mod:`perfmodel.calibration.published_stacks`) says which rows are the stack's and which
constants are fitted. Half of the layouts fit, the others score. The constants minimise the
soft-L1 loss of the log ratio of predicted to measured step time (scale 0.1); rows of one layout
share the weight of one. Intervals are the 5-95% quantiles of a bootstrap over layouts.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibration.fit_stack import ratio_interval
from perfmodel.calibration.memory_profiles import load_memory_profile
from perfmodel.calibration.published_stacks import (
    MEANING,
    SPECS,
    START,
    StackSpec,
    fits,
    layout_key,
)
from perfmodel.calibration.stacks import (
    Assumption,
    Constant,
    StackErrors,
    StackProfile,
    Variant,
    load_stack,
)
from perfmodel.calibration.writer import record_toml
from perfmodel.errors import PerfmodelError
from perfmodel.exchange import SynchronisationTime
from perfmodel.iteration import step_total
from perfmodel.ranges import parts_of, stack_variables
from perfmodel.sources import Source
from perfmodel.stack import Stack
from perfmodel.step import DEFAULT_STACK, StepModel
from perfmodel.validation.published import PublishedRun, published_runs, read_runs

Vector = NDArray[np.float64]

LOSS_SCALE = 0.1
"""Log ratio at which the loss turns from quadratic to linear [-]."""

FOLDS = 8
"""Parts of the fitted layouts that are left out in turn."""


@dataclass(frozen=True)
class TimedRun:
    """A published run, with everything computed that the fitted constants do not touch."""

    run: PublishedRun
    model: StepModel
    switches: tuple[str, ...]
    synchronisation: SynchronisationTime  # no fitted constant enters it but the host time of a step

    @classmethod
    def of(cls, run: PublishedRun, spec: StackSpec) -> TimedRun:
        """Price the layers of a run once."""
        base = load_stack(DEFAULT_STACK)  # its constants are replaced
        model = StepModel(run.architecture, run.plan, run.cluster, run.batch, base)
        switches = spec.switches_of(run)
        start = {key: START[key.rpartition(".")[2]] for key in spec.keys}
        stack = stack_of(spec, start, switches)
        return cls(run, model, switches, model.synchronisation_under(stack))

    @property
    def measured_s(self) -> float:
        """Measured time of a step [s]."""
        assert self.run.step_time_s is not None
        return self.run.step_time_s

    def predicted_s(self, stack: Stack) -> float:
        """Return the predicted time of a step [s]."""
        pipeline = self.model.pipeline_under(stack)
        sync = self.synchronisation._replace(step_host=stack.step_host_s)
        return float(step_total(stack, pipeline, sync, float(self.model.n_microbatches)))


@cache
def _memory_constants(name: str) -> dict[str, float]:
    return {key: float(c.value) for key, c in load_memory_profile(name).constants.items()}


def stack_of(spec: StackSpec, values: dict[str, float], switches: Sequence[str]) -> Stack:
    """Return the constants of a run under a spec, its fitted values and a run's switches."""
    constants = {name: value for name, (value, _) in spec.assumptions().items()}
    constants |= _memory_constants(spec.memory)
    constants |= {name: values[name] for name in spec.fitted}
    for name in switches:
        switch = spec.switches[name]
        constants |= {key: values[f"{name}.{key}"] for key in switch.fitted}
        constants |= {key: value for key, (value, _) in switch.assumed.items()}
    return Stack(**constants)


def predictions(runs: Sequence[TimedRun], spec: StackSpec, values: dict[str, float]) -> Vector:
    """Return the predicted step times of runs [s]."""
    stacks: dict[tuple[str, ...], Stack] = {}
    for run in runs:
        if run.switches not in stacks:
            stacks[run.switches] = stack_of(spec, values, run.switches)
    return np.array([run.predicted_s(stacks[run.switches]) for run in runs])


def log_ratios(runs: Sequence[TimedRun], spec: StackSpec, values: dict[str, float]) -> Vector:
    """Logarithms of measured over predicted step times [-]."""
    measured = np.array([run.measured_s for run in runs])
    ratios: Vector = np.log(measured / predictions(runs, spec, values))
    return ratios


def fit_values(
    runs: Sequence[TimedRun],
    spec: StackSpec,
    weights: Vector,
    start: dict[str, float] | None = None,
) -> dict[str, float]:
    """Fit the constants of a spec to runs.

    Parameters
    ----------
    runs : sequence of TimedRun
    spec : StackSpec
    weights : array
        Weight of each run.
    start : dict, optional
        Where to start; the spec's own starting values unless given.

    Returns
    -------
    dict
        The fitted value of every one of ``spec.keys``.
    """
    from scipy.optimize import least_squares

    keys = spec.keys
    names = [key.rpartition(".")[2] for key in keys]
    logged = np.array([not name.endswith(("_hidden", "_share")) for name in names])
    first = np.array([(start or {}).get(k, START[n]) for k, n in zip(keys, names, strict=True)])
    low = np.where(logged, np.log(1e-7), 0.0)
    high = np.where(logged, np.log(100.0), 1.0)
    root = np.sqrt(weights)

    def values_of(x: Vector) -> dict[str, float]:
        natural = np.where(logged, np.exp(x), x)
        return dict(zip(keys, map(float, natural), strict=True))

    def residuals(x: Vector) -> Vector:
        ratio = log_ratios(runs, spec, values_of(x))
        loss = 2.0 * (np.sqrt(1.0 + (ratio / LOSS_SCALE) ** 2) - 1.0)
        signed: Vector = root * np.sign(ratio) * np.sqrt(loss)
        return signed

    x0 = np.where(logged, np.log(np.maximum(first, 1e-6)), np.clip(first, 0.01, 0.99))
    best = None
    for slower in (1.0,) if start else (1.0, 10.0):
        x = x0 + np.where([name == "host_layer_s" for name in names], np.log(slower), 0.0)
        fit = least_squares(residuals, x, bounds=(low, high), diff_step=1e-3, xtol=1e-6, ftol=1e-7)
        if best is None or fit.cost < best.cost:
            best = fit
    assert best is not None
    return values_of(best.x)


def layout_weights(runs: Sequence[TimedRun]) -> Vector:
    """Weights that give every layout, however often it was measured, the same say [-]."""
    keys = [layout_key(run.run) for run in runs]
    return np.array([1.0 / keys.count(key) for key in keys])


def timed_runs(spec: StackSpec, table: Path | None = None) -> tuple[TimedRun, ...]:
    """Return the runs of a stack that have a time, from the shipped table or from another.

    Raises
    ------
    PerfmodelError
        The stack's rows do not ship, and no table is given.
    """
    if table is None and not spec.published:
        raise PerfmodelError(f"The runs of {spec.name} do not ship with the package; give --runs.")
    runs = published_runs() if table is None else read_runs(table).runs
    return tuple(
        TimedRun.of(run, spec) for run in runs if run.step_time_s is not None and spec.takes(run)
    )


def held_out_ratios(runs: Sequence[TimedRun], spec: StackSpec, start: dict[str, float]) -> Vector:
    """Logarithms of measured over predicted, by constants fitted without a run's layout [-]."""
    keys = sorted({layout_key(run.run) for run in runs})
    fold = {key: i % FOLDS for i, key in enumerate(keys)}
    where = np.array([fold[layout_key(run.run)] for run in runs])
    out = np.empty(len(runs))
    for i in sorted({*where.tolist()}):
        rest = [run for run, f in zip(runs, where, strict=True) if f != i]
        left = [run for run, f in zip(runs, where, strict=True) if f == i]
        values = fit_values(rest, spec, layout_weights(rest), start) if rest else start
        out[where == i] = log_ratios(left, spec, values)
    return out


def bootstrap_values(
    runs: Sequence[TimedRun],
    spec: StackSpec,
    start: dict[str, float],
    resamples: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> NDArray[np.float64]:
    """Refit to resamples of the layouts, with replacement; shape (resamples, constants)."""
    rng = np.random.default_rng(seed)
    keys = sorted({layout_key(run.run) for run in runs})
    weights = layout_weights(runs)
    place = {key: i for i, key in enumerate(keys)}
    index = np.array([place[layout_key(run.run)] for run in runs])
    draws = np.empty((resamples, len(spec.keys)))
    for i in range(resamples):
        counts = np.bincount(rng.integers(len(keys), size=len(keys)), minlength=len(keys))
        mine = weights * counts[index]
        chosen = [int(k) for k in np.flatnonzero(mine)]
        values = fit_values([runs[k] for k in chosen], spec, mine[chosen], start)
        draws[i] = [values[key] for key in spec.keys]
        if progress is not None:
            progress(i + 1, resamples)
    return draws


def _round(value: float) -> float:
    return float(f"{value:.5g}")


def fit_published(
    spec: StackSpec,
    runs: Sequence[TimedRun],
    *,
    resamples: int,
    seed: int,
    progress: Callable[[int, int], None] | None = None,
) -> StackProfile:
    """Fit a stack to the half of its runs that fits, and score it on the other half.

    Raises
    ------
    PerfmodelError
        Fewer layouts that fit than constants.
    """
    mine = [run for run in runs if fits(run.run)]
    others = [run for run in runs if not fits(run.run)]
    layouts = len({layout_key(run.run) for run in mine})
    if layouts < len(spec.keys):
        raise PerfmodelError(
            f"{layouts} layouts cannot fit the {len(spec.keys)} constants of {spec.name}."
        )
    values = fit_values(mine, spec, layout_weights(mine))
    values = {key: _round(value) for key, value in values.items()}
    draws = bootstrap_values(mine, spec, values, resamples, seed, progress)
    low, high = np.quantile(draws, (0.05, 0.95), axis=0)

    def constant(key: str) -> Constant:
        i, name = spec.keys.index(key), key.rpartition(".")[2]
        unit, meaning = MEANING[name]
        return Constant(
            value=values[key],
            low=min(_round(low[i]), values[key]),
            high=max(_round(high[i]), values[key]),
            identified=1.0,
            unit=unit,
            source=Source.FITTED,
            meaning=meaning,
        )

    def assumed(given: dict[str, tuple[float, str]]) -> dict[str, Assumption]:
        return {
            name: Assumption(value=value, source=Source.ASSUMED, note=note)
            for name, (value, note) in given.items()
        }

    inside = log_ratios(mine, spec, values)
    outside = held_out_ratios(mine, spec, values)
    scored = _absolute(log_ratios(others, spec, values)) if others else None
    ratio_low, ratio_high = ratio_interval(outside)
    observed = [stack_variables(run.model) for run in mine]
    sources = sorted({run.run.source for run in mine})
    return StackProfile(
        schema_version=1,
        name=spec.name,
        description=spec.description,
        hardware=tuple(sorted({run.run.hardware for run in mine})),
        provenance=(
            f"{len(mine)} published runs of {layouts} layouts ({'; '.join(sources)}); soft-L1 on "
            f"the log ratio of step times, scale {LOSS_SCALE:g}; intervals 5-95% of {resamples} "
            f"bootstrap resamples of layouts, seed {seed}; {len(others)} other runs score it"
        ),
        constants={key: constant(key) for key in spec.fitted},
        assumptions=assumed(spec.assumptions()) | load_memory_profile(spec.memory).constants,
        ranges={
            key: (min(row[key] for row in observed), max(row[key] for row in observed))
            for key in observed[0]
        },
        covers=tuple(sorted({part for run in mine for part in parts_of(run.model)})),
        errors=StackErrors(
            rows=len(mine),
            mape_in_sample=_round(float(_absolute(inside).mean())),
            mape_leave_one_out=_round(float(_absolute(outside).mean())),
            mape_leave_one_sweep_out=_round(float(_absolute(outside).mean())),
            low=_round(ratio_low),
            high=_round(ratio_high),
            scored_rows=len(others),
            scored_median=None if scored is None else _round(float(np.median(scored))),
            scored_mean=None if scored is None else _round(float(scored.mean())),
        ),
        variants={
            name: Variant(
                description=switch.description,
                constants={key: constant(f"{name}.{key}") for key in switch.fitted},
                assumptions=assumed(dict(switch.assumed)),
            )
            for name, switch in spec.switches.items()
        },
    )


def _absolute(log_ratio: Vector) -> Vector:
    """Absolute error of predicted over measured time, from logs of measured over predicted."""
    error: Vector = np.abs(np.exp(-log_ratio) - 1.0)
    return error


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    o = _parser().parse_args(arguments)
    spec = next(s for s in SPECS if s.name == o.name)
    try:
        profile = fit_published(
            spec,
            timed_runs(spec, o.runs),
            resamples=o.resamples,
            seed=o.seed,
            progress=lambda done, of: _say(f"bootstrap {done}/{of}") if done % 20 == 0 else None,
        )
    except PerfmodelError as error:
        _say(str(error))
        return 2
    words = [o.name, *(("--runs", o.runs.name) if o.runs else ())]
    words += ["--resamples", str(o.resamples), "--seed", str(o.seed), "--out", o.out.name]
    command = f"python -m perfmodel.calibration.fit_published {shlex.join(words)}"
    o.out.write_text(record_toml(profile, f"Written by a program:\n{command}"), "utf-8")
    e = profile.errors
    _say(
        f"{spec.name}: fitted rows {e.rows}, mean {e.mape_in_sample:.3f}, left out "
        f"{e.mape_leave_one_out:.3f}; scored rows {e.scored_rows}, median {e.scored_median}, "
        f"mean {e.scored_mean}; interval {e.low:.3f}-{e.high:.3f}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m perfmodel.calibration.fit_published",
        description="Fit a stack profile to published runs.",
    )
    parser.add_argument("name", choices=[s.name for s in SPECS], help="stack to fit")
    parser.add_argument("--out", type=Path, required=True, help="TOML file to write")
    parser.add_argument("--runs", type=Path, help="table of runs; default: the shipped one")
    parser.add_argument("--resamples", type=int, default=100, help="bootstrap resamples")
    parser.add_argument("--seed", type=int, default=2608, help="seed of the bootstrap")
    return parser


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
