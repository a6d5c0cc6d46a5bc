"""What a law accepts as a number: array types, the error, and the checks."""

import math
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
Quantity: TypeAlias = float | NDArray[np.floating[Any] | np.integer[Any]]


class LawError(ValueError):
    """A law was asked for something that it cannot answer.

    The message is one sentence: what was given, which rule it breaks, and the
    nearest legal value where there is one.
    """


class LogPoint(NamedTuple):
    """Natural logarithms of the four variables of a law, already checked."""

    n_total: float | FloatArray
    n_active: float | FloatArray
    tokens: float | FloatArray
    expert_split: float | FloatArray


def log_point(
    *, n_total: Quantity, n_active: Quantity, tokens: Quantity = 1.0, expert_split: Quantity
) -> LogPoint:
    """Check the four variables of a law and take their logarithms.

    Parameters
    ----------
    n_total, n_active
        Total and active parameters [parameter].
    tokens
        Training tokens [token]; the default drops out of every power law.
    expert_split
        Expert split factor, ``d_ff / d_expert`` [-].

    Raises
    ------
    LawError
        If a value is not a finite number above 0, if ``n_active`` exceeds
        ``n_total``, or if the shapes do not broadcast.
    """
    total = positive("n_total", n_total)
    active = positive("n_active", n_active)
    data = positive("tokens", tokens)
    split = positive("expert_split", expert_split)
    check_shapes(n_total=total, n_active=active, tokens=data, expert_split=split)
    excess = np.greater(active, total)
    if np.any(excess):
        most = _first(np.broadcast_to(total, np.shape(excess)), excess)
        raise LawError(
            f"n_active is {_first(np.broadcast_to(active, np.shape(excess)), excess):.6g} and "
            f"n_total is {most:.6g}, but a model cannot activate more parameters than it has; "
            f"the nearest legal n_active is {most:.6g}."
        )
    return LogPoint(np.log(total), np.log(active), np.log(data), np.log(split))


def positive(name: str, value: Quantity) -> float | FloatArray:
    """Return `value` as float or float array, all of it finite and above 0.

    Raises
    ------
    LawError
        If it is not.
    """
    number = _as_float(name, value)
    if isinstance(number, float):
        if not (math.isfinite(number) and number > 0):
            raise LawError(_not_positive(name, number))
        return number
    bad = ~(np.isfinite(number) & (number > 0))
    if np.any(bad):
        raise LawError(_not_positive(name, _first(number, bad)))
    return number


def finite(name: str, value: Quantity) -> float | FloatArray:
    """Return `value` as float or float array, all of it finite.

    Raises
    ------
    LawError
        If it is not.
    """
    number = _as_float(name, value)
    bad = ~np.isfinite(number)
    if np.any(bad):
        raise LawError(f"{name} is {_first(number, bad):g}, but this law needs a finite number.")
    return number


def check_shapes(**named: float | FloatArray) -> None:
    """Check that the named values broadcast against each other.

    Raises
    ------
    LawError
        If they do not.
    """
    shapes = {name: np.shape(value) for name, value in named.items()}
    try:
        np.broadcast_shapes(*shapes.values())
    except ValueError:
        listed = ", ".join(f"{name} {shape}" for name, shape in shapes.items())
        raise LawError(
            f"the shapes are {listed}, but they must broadcast; give all one shape, or scalars."
        ) from None


def plain(value: float | FloatArray) -> float | FloatArray:
    """Return a Python float for a scalar and leave an array alone."""
    return float(value) if np.ndim(value) == 0 else value


def _as_float(name: str, value: Quantity) -> float | FloatArray:
    if isinstance(value, int | float) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            return math.inf if value > 0 else -math.inf
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise LawError(
            f"{name} is {value!r}, but a law needs a real number above 0, or an array of them; "
            "the nearest legal value in use is 1."
        )
    return float(array) if array.ndim == 0 else array.astype(np.float64, copy=False)


def _not_positive(name: str, value: float) -> str:
    if name == "tokens" and value == math.inf:
        return "tokens is inf, but a law needs a finite number; floor() gives that limit."
    nearest = f"{np.finfo(np.float64).max:.4g}" if value == math.inf else "1"
    return (
        f"{name} is {value:.6g}, but a law needs a finite number above 0; "
        f"the nearest legal value in use is {nearest}."
    )


def _first(values: Any, where: Any) -> float:
    return float(np.atleast_1d(values)[np.atleast_1d(where)][0])
