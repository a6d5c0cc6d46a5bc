"""How far the constants of a stack, and what the model misses, move a predicted throughput.

Each fitted constant is drawn from a normal distribution in two halves with the profile's value as
its median and the ends of the profile's interval as its 5% and 95% points, cut at 0, and
at 1 for a share:

    constant = max(0, value + z (high - value) / 1.645)    z >= 0
    constant = max(0, value + z (value - low) / 1.645)     z < 0

and what the model misses multiplies the throughput by ``exp(sigma z)``, where ``sigma = MAPE
sqrt(pi / 2)`` is that of a normal error with this mean absolute value. Constants are drawn
independently: a profile says nothing about their correlation.
"""

from __future__ import annotations

from math import inf, pi, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel.calibration.stacks import StackProfile
from perfmodel.frozen import Frozen
from perfmodel.ranges import stack_variables
from perfmodel.stack import Stack
from perfmodel.step import StepModel

__all__ = [
    "Interval",
    "StackDraws",
    "draw_stacks",
    "residual_error",
    "residual_factor",
    "scaled",
    "throughput_ratios",
]

LOW, HIGH = 0.05, 0.95
_Z_HIGH = 1.6448536269514722  # the 95% point of a standard normal distribution
_SHARES = ("_hidden", "_share", "_once")  # constants that are at most 1


class Interval(Frozen):
    """A predicted number and the 5% and 95% points of its draws; these always hold the number."""

    value: float
    low: float
    high: float


class StackDraws(NamedTuple):
    """Seeded draws of a stack's constants, and a standard normal number for each."""

    stacks: tuple[Stack, ...]
    residual: NDArray[np.float64]  # shape (draws,) [-]


def draw_stacks(profile: StackProfile, pairs: int, seed: int) -> StackDraws:
    """Draw the fitted constants ``2 pairs`` times, each draw with its mirror image.

    Parameters
    ----------
    profile : StackProfile
        Whose constants to draw; assumptions stay as they are.
    pairs : int
        Half the number of draws.
    seed : int
        Of the generator; the same seed gives the same draws.
    """
    half = np.random.default_rng(seed).standard_normal((pairs, len(profile.constants) + 1))
    z = np.concatenate([half, -half])
    point = profile.stack()
    stacks = []
    for row in z:
        drawn = {}
        for name, number in zip(profile.constants, row, strict=False):
            c = profile.constants[name]
            side = c.high - c.value if number >= 0.0 else c.value - c.low
            most = 1.0 if name.endswith(_SHARES) else inf
            drawn[name] = min(max(0.0, c.value + float(number) * side / _Z_HIGH), most)
        stacks.append(point._replace(**drawn))
    return StackDraws(tuple(stacks), z[:, -1])


def residual_error(model: StepModel) -> tuple[str, float]:
    """Return which left-out error of the profile stands for what the model misses, and its value.

    ``mape_leave_one_out`` where every value lies within the ranges of the fitted runs and the
    hardware is theirs; ``mape_leave_one_sweep_out`` elsewhere, which is how wrong the profile was
    on runs unlike those that it was fitted to.
    """
    errors, profile = model.profile.errors, model.profile
    inside = model.cluster.pack.name in profile.hardware
    if inside and not profile.check(**stack_variables(model)):
        return "mape_leave_one_out", errors.mape_leave_one_out
    return "mape_leave_one_sweep_out", errors.mape_leave_one_sweep_out


def residual_factor(
    residual: NDArray[np.float64], mape: float | NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return what multiplies throughput, for standard normal numbers and a mean error [-]."""
    return np.asarray(np.exp(mape * sqrt(pi / 2.0) * residual), dtype=np.float64)


def throughput_ratios(
    step_s: float, drawn_s: NDArray[np.float64], residual: NDArray[np.float64], mape: float
) -> tuple[float, float]:
    """Return the 5% and 95% points of throughput, relative to the predicted one [-].

    Parameters
    ----------
    step_s : float
        Predicted step time [s].
    drawn_s : array of shape (draws,)
        Step times under the draws [s].
    residual : array of shape (draws,)
        Standard normal numbers.
    mape : float
        Mean absolute error of what the model misses [-].
    """
    ratios = step_s / drawn_s * residual_factor(residual, mape)
    low, high = np.quantile(ratios, [LOW, HIGH])
    return min(float(low), 1.0), max(float(high), 1.0)


def scaled(value: float, ratios: tuple[float, float]) -> Interval:
    """Return the interval of a number that is proportional to throughput."""
    return Interval(value=value, low=value * ratios[0], high=value * ratios[1])
