"""Fit the memory constants of a software stack to measured peaks.

A predicted peak is linear in the constants, so a fit is a non-negative least-squares problem on
relative errors, repeated with the heaviest stage of the last solution and with soft-L1 weights.
``python -m perfmodel.calibration.fit_memory --help`` prints how a shipped profile is made.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from perfmodel.calibration.memory_profiles import load_memory_profile
from perfmodel.calibration.stacks import load_stack
from perfmodel.memory import stage_total
from perfmodel.stack import Stack
from perfmodel.validation.memory_runs import (
    MemoryCase,
    nanotron_cases,
    predicted_bytes,
    published_cases,
    stages_of_case,
)

SOFT_L1_SCALE = 0.05
"""Relative error from which a run counts less [-]."""

ROUNDS = 8


def _pinned(case: MemoryCase, stack: Stack) -> MemoryCase:
    """Return the case with the stage that is heaviest under a stack."""
    if case.stage is not None:
        return case
    totals = [stage_total(m) for m in stages_of_case(case, stack)]
    return case._replace(stage=int(np.argmax(totals)))


def fit_memory(cases: Sequence[MemoryCase], names: Sequence[str], start: Stack) -> Stack:
    """Return ``start`` with the named constants fitted to measured peaks.

    Parameters
    ----------
    cases : sequence of MemoryCase
        Runs with a measured peak.
    names : sequence of str
        Constants in which the peak is linear: all but ``gathered_inputs`` and ``reserve_share``.
    """
    from scipy.optimize import nnls

    measured = np.array([case.measured_bytes for case in cases], dtype=np.float64)
    zero = start._replace(**dict.fromkeys(names, 0.0))
    found, weights = start, 1.0 / measured
    for _ in range(ROUNDS):
        pinned = [_pinned(case, found) for case in cases]
        base = np.array([predicted_bytes(case, zero) for case in pinned])
        slopes = np.stack(
            [
                np.array([predicted_bytes(c, zero._replace(**{name: 1.0})) for c in pinned]) - base
                for name in names
            ],
            axis=1,
        )
        values, _ = nnls(slopes * weights[:, None], (measured - base) * weights)
        found = start._replace(**{n: float(v) for n, v in zip(names, values, strict=True)})
        error = (base + slopes @ values) / measured - 1.0
        weights = 1.0 / (measured * np.sqrt(1.0 + (error / SOFT_L1_SCALE) ** 2))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Fit the constants that a profile calls fitted, on half 0 of its runs, and print them."""
    parser = argparse.ArgumentParser(prog="python -m perfmodel.calibration.fit_memory")
    parser.add_argument("--profile", required=True, help="a memory profile: what to fit")
    parser.add_argument("--nanotron", type=Path, help="table of the nanotron sweep")
    parser.add_argument("--all", action="store_true", help="fit on both halves")
    given = parser.parse_args(arguments)
    profile = load_memory_profile(given.profile)
    cases = published_cases() if given.nanotron is None else nanotron_cases(given.nanotron)
    runs = [c for c in cases if c.stack == profile.name and c.measured_bytes is not None]
    start = profile.on(load_stack("megatron-eager").stack())
    fitted = fit_memory([c for c in runs if given.all or c.half == 0], profile.fitted, start)
    for name in profile.fitted:
        sys.stdout.write(f"{name} = {getattr(fitted, name):.4g}\n")
    for half in (0, 1):
        errors = [
            abs(predicted_bytes(c, fitted) / c.measured_bytes - 1.0)
            for c in runs
            if c.half == half and c.measured_bytes
        ]
        middle = float(np.median(errors))
        sys.stdout.write(f"half {half}: {len(errors)} runs, median error {middle:.2%}\n")


if __name__ == "__main__":
    main()
