r"""What any law predicts for a table of runs, and its derivatives in the coefficients.

All that is asked of a law is its value. Where its code takes arrays of coefficients, many points
go through it at once, and where it takes complex numbers, derivatives are exact to rounding: the
imaginary part of ``f(c + i h)`` over a tiny ``h`` (Squire and Trapp, SIAM Rev. 40:110, 1998).
Otherwise points go one by one, and derivatives are central differences of three widths,
extrapolated (Richardson, Phil. Trans. A 210:307, 1911). Both is found out by trying, never by
reading the law.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from lawfit._values import FloatArray
from lawfit.base import ScalingLaw
from lawfit.general import GeneralLaw

AnyForm: TypeAlias = GeneralLaw | ScalingLaw
"""A law of either family."""

BoolArray: TypeAlias = NDArray[np.bool_]

_TINY = 1e-30
"""Imaginary step over the size of a coefficient."""

_WIDTH = 1e-3
"""Widest central difference over the reach of a coefficient."""

_ROUGH = 1e-6
"""Central difference over the size of a coefficient that its reach is found from."""

_SMALL = 1e-2
"""Size that a coefficient near 0 counts as."""

_MOST = 2_000_000
"""Numbers in the largest array that a law is asked for."""


class Curve(NamedTuple):
    """A law as a function of its coefficients, on the columns of a table.

    Attributes
    ----------
    kind : class
        Of the law.
    rest : mapping
        Its fields that are no free coefficients.
    names : tuple of str
        Its free coefficients.
    columns : mapping of str to ndarray of shape (runs,)
        Its variables.
    rows : int
        Number of runs.
    logs : bool
        Whether the function is the logarithm of the law.
    size : float
        Of its values: 1 for logarithms.
    together : bool
        Whether the law takes arrays of coefficients.
    turned : bool
        Whether it takes complex ones.
    """

    kind: type[AnyForm]
    rest: Mapping[str, Any]
    names: tuple[str, ...]
    columns: Mapping[str, FloatArray]
    rows: int
    logs: bool
    size: float = 1.0
    together: bool = False
    turned: bool = False

    def law(self, point: FloatArray) -> AnyForm:
        """Return the law with these coefficients, checked.

        Raises
        ------
        pydantic.ValidationError
            The law does not accept them.
        """
        values = dict(zip(self.names, point.tolist(), strict=True))
        return self.kind.model_validate({**self.rest, **values})

    def legal(self, points: FloatArray) -> BoolArray:
        """Return which points the law accepts, shape (points,)."""
        return np.array([self._accepts(point) for point in points], dtype=bool)

    def values(self, points: NDArray[Any]) -> NDArray[Any]:
        """Return the function at points of shape (points, coefficients), shape (points, runs).

        NaN where the law has no value, or no logarithm.
        """
        rows = max(1, _MOST // self.rows)
        parts = [self._some(points[k : k + rows]) for k in range(0, len(points), rows)]
        return np.concatenate(parts) if parts else np.empty((0, self.rows))

    def slopes(self, points: FloatArray) -> FloatArray:
        """Return the derivatives in the coefficients, shape (points, runs, coefficients)."""
        size = np.maximum(np.abs(points), _SMALL)
        if self.turned:
            steps = _spread(points.astype(np.complex128), 1j * _TINY * size)
            slopes = self._split(self.values(steps).imag, len(points)) / (_TINY * size)[:, None]
            return np.asarray(slopes)
        width = _WIDTH * self.reach(points, self._difference(points, _ROUGH * size))
        level = [self._difference(points, width / 2**k) for k in range(3)]
        first = [(4.0 * level[k + 1] - level[k]) / 3.0 for k in range(2)]
        return np.asarray((16.0 * first[1] - first[0]) / 15.0)

    def reach(self, points: FloatArray, slopes: FloatArray) -> FloatArray:
        """Return how far a coefficient may go before the function is another, (points, same).

        It has then moved by its own size, or the function by its.
        """
        most = np.maximum(np.abs(slopes).max(axis=1), 1e-300)
        return np.asarray(np.fmin(np.maximum(np.abs(points), _SMALL), self.size / most))

    def probed(self, points: FloatArray) -> Curve:
        """Return the same with what the law takes found out at points where it has a value.

        One point that agrees decides: the code is the same at all, and at a wild one differences
        are nothing to compare with.
        """
        plain = self._replace(together=False, turned=False)
        many, turned = (plain._replace(together=True), plain._replace(turned=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            near = np.concatenate([points, points * 1.001])
            wanted = plain.values(near)
            together = _same(lambda: many._at(near), wanted, 1e-10)
            straight = any(turned.agrees(point) for point in points)
        return self._replace(together=together, turned=straight)

    def agrees(self, point: FloatArray) -> bool:
        """Whether the derivatives at a point are those of differences."""
        unit = np.maximum(np.abs(point), _SMALL) / self.size
        with np.errstate(all="ignore"):
            differences = self._replace(turned=False).slopes(point[None]) * unit
            scale = np.abs(differences).max(axis=1, keepdims=True) + 1e-2
            return _same(lambda: self.slopes(point[None]) * unit / scale, differences / scale, 1e-6)

    def _accepts(self, point: FloatArray) -> bool:
        try:
            self.law(point)
        except ValidationError:
            return False
        return True

    def _some(self, points: NDArray[Any]) -> NDArray[Any]:
        if self.together and len(points) > 1:
            try:
                return self._at(points)
            except (ArithmeticError, TypeError, ValueError):
                pass  # one of the points has no value; find out which
        found = np.full((len(points), self.rows), np.nan, dtype=points.dtype)
        for row, point in enumerate(points):
            try:
                found[row] = self._at(point)
            except (ArithmeticError, TypeError, ValueError):
                continue
        return found

    def _at(self, points: NDArray[Any]) -> NDArray[Any]:
        """Return the function at one point, or at all together."""
        if points.ndim == 1:
            fields: dict[str, Any] = dict(zip(self.names, points.tolist(), strict=True))
            shape: tuple[int, ...] = (self.rows,)
        else:
            fields = dict(zip(self.names, points.T[:, :, None], strict=True))
            shape = (len(points), self.rows)
        law = self.kind.model_construct(**{**self.rest, **fields})
        with np.errstate(all="ignore"):
            if isinstance(law, GeneralLaw):
                value: NDArray[Any] = np.asarray(law.value_at(self.columns))
            else:
                value = np.asarray(law.loss(**self.columns))
            if self.logs:
                value = np.where(value.real > 0.0, np.log(value), np.nan)
        return np.broadcast_to(value, shape)

    def _difference(self, points: FloatArray, width: FloatArray) -> FloatArray:
        above, below = (
            self._split(self.values(_spread(points, sign * width)), len(points))
            for sign in (1.0, -1.0)
        )
        return np.asarray((above - below) / (2.0 * width[:, None]))

    def _split(self, values: FloatArray, points: int) -> FloatArray:
        """Turn (points times coefficients, runs) into (points, runs, coefficients)."""
        return np.asarray(values.reshape(points, len(self.names), self.rows).swapaxes(1, 2))


def _spread(points: NDArray[Any], steps: NDArray[Any]) -> NDArray[Any]:
    """Return each point with one coefficient moved, shape (points times coefficients, same)."""
    size = points.shape[1]
    moved = points[:, None] + np.eye(size) * steps[:, :, None]
    return np.asarray(moved.reshape(-1, size))


def _same(values: Callable[[], NDArray[Any]], wanted: NDArray[Any], within: float) -> bool:
    """Whether values come at all, and are those wanted."""
    try:
        found = values()
    except Exception:  # the code of a law may object to what it was not written for in any way
        return False
    near = np.allclose(found, wanted, rtol=within, atol=within, equal_nan=True)
    return found.shape == wanted.shape and bool(np.isfinite(wanted).any()) and bool(near)
