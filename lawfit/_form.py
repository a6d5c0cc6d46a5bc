"""What a law says of its coefficients before any fit: names, signs, bounds, and where to start."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import numpy as np
from pydantic import ValidationError
from pydantic_core import PydanticUndefined

from lawfit._curve import AnyForm, BoolArray
from lawfit._posynomial import Posynomial, moves, posynomial
from lawfit._values import FloatArray, LawError
from lawfit.base import ScalingLaw
from lawfit.general import GeneralLaw, PosynomialLaw
from lawfit.runs import RUN_VARIABLES

LARGEST = 1e30
"""Largest coefficient that a fit looks at, and one over the smallest that must be above 0."""

_MODEST, _WIDE = (1e-3, 1e3), (1e-3, 1e15)
"""Ranges of random coefficients above 0: of most, and of the scales among them."""

_SIGNED = (1e-3, 5.0)
"""Range of the sizes of random coefficients of either sign."""


class Form(NamedTuple):
    """A kind of law with its free coefficients.

    Attributes
    ----------
    kind : class
        Of the law.
    rest : mapping
        Its other fields.
    names : tuple of str
        Free coefficients.
    lower, upper : ndarray of shape (coefficients,)
        Bounds.
    logged : ndarray of bool, shape (coefficients,)
        Those that the law wants at or above 0.
    given : ndarray of shape (coefficients,) or None
        The coefficients of the law, where one was given and not its class.
    held : tuple of str
        Coefficients in `rest`.
    """

    kind: type[AnyForm]
    rest: Mapping[str, Any]
    names: tuple[str, ...]
    lower: FloatArray
    upper: FloatArray
    logged: BoolArray
    given: FloatArray | None
    held: tuple[str, ...]

    @property
    def vanishing(self) -> BoolArray:
        """Those of `logged` that may be 0."""
        return self.logged & (self.lower <= 0.0)

    def prototype(self) -> AnyForm:
        """Return a law of the kind, unchecked, its free coefficients without meaning."""
        return self.kind.model_construct(**{**self.rest, **dict.fromkeys(self.names, 1.0)})

    def point(self, law: AnyForm) -> FloatArray:
        """Return the coefficients of a law, moved inside the bounds."""
        point = np.array([getattr(law, name) for name in self.names], dtype=np.float64)
        return np.asarray(np.clip(point, self.lower, self.upper))

    def draw(
        self,
        number: int,
        ranges: Mapping[str, tuple[float, float]],
        generator: np.random.Generator,
    ) -> FloatArray:
        """Return random points, shape (number, coefficients)."""
        shape = (number, len(self.names))
        unit, sign, wide = generator.random(shape), generator.random(shape), generator.random(shape)
        low = np.where(self.logged, _MODEST[0], _SIGNED[0])
        high = np.where(self.logged, np.where(wide < 0.3, _WIDE[1], _MODEST[1]), _SIGNED[1])
        points = np.exp(np.log(low) + unit * np.log(high / low))
        points *= np.where(self.logged | (sign < 0.5), 1.0, -1.0)
        for k, name in enumerate(self.names):
            if name in ranges:
                points[:, k] = _between(*ranges[name], unit[:, k])
            elif math.isfinite(self.upper[k] - self.lower[k]) and not self.logged[k]:
                points[:, k] = _between(self.lower[k], self.upper[k], unit[:, k])
        return np.asarray(np.clip(points, self.lower, self.upper))


def form_of(
    law: type[AnyForm] | AnyForm,
    fixed: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
) -> Form:
    """Return what a law, or its class, says of its coefficients.

    Raises
    ------
    LawError
        It is no law, has no free coefficient or fields that only a law has, or the names or
        values of ``fixed`` or ``bounds`` are not the law's.
    """
    kind = law if isinstance(law, type) else type(law)
    lawful: bool = issubclass(kind, GeneralLaw | ScalingLaw)
    if not lawful or kind.__abstractmethods__:
        raise LawError(f"law is {law!r}, but must be a law, or the class of one.")
    rest = _rest(law, kind)
    names = _coefficients(kind, rest)
    _check_names("fixed", fixed, names)
    free = tuple(name for name in names if name not in fixed)
    _check_names("bounds", bounds, free)
    if not free:
        raise LawError("all coefficients are fixed, but a fit needs at least 1 that is not.")
    wild = [name for name, value in fixed.items() if name in _refused(kind, value)]
    if wild:
        raise LawError(
            f"fixed holds {wild[0]} at {fixed[wild[0]]:g}, which the law does not accept."
        )
    lower, upper = _bounds(kind, free, bounds)
    return Form(
        kind=kind,
        rest={**{k: v for k, v in rest.items() if k not in free}, **fixed},
        names=free,
        lower=lower,
        upper=upper,
        logged=np.array([low >= 0.0 for low in lower], dtype=bool),
        given=None
        if isinstance(law, type)
        else np.clip([float(getattr(law, name)) for name in free], lower, upper),
        held=tuple(fixed),
    )


def posynomial_of(
    form: Form, columns: Mapping[str, FloatArray], log_loss: FloatArray
) -> Posynomial | None:
    """Return the law as a sum of exponentials with free exponents, where it is one."""
    if not issubclass(form.kind, PosynomialLaw | ScalingLaw):
        return None
    law = cast(PosynomialLaw | ScalingLaw, form.prototype())
    order = list(law.variables) if isinstance(law, PosynomialLaw) else list(RUN_VARIABLES)
    if any((columns[name] <= 0.0).any() for name in order):
        return None
    variables = np.log([columns[name] for name in order])
    try:
        found = posynomial(law, variables, log_loss, {name: form.rest[name] for name in form.held})
    except LawError:
        return None
    return found if set(form.names) <= set(found.names) else None


def _rest(law: type[AnyForm] | AnyForm, kind: type[AnyForm]) -> dict[str, Any]:
    """Return the fields of the law, or the defaults of its class."""
    if not isinstance(law, type):
        return {name: getattr(law, name) for name in kind.model_fields}
    rest: dict[str, Any] = {"source": "a form without coefficients"}
    for name, field in kind.model_fields.items():
        if not field.is_required():
            rest[name] = field.get_default(call_default_factory=True)
        elif field.annotation is not float and name != "source":
            raise LawError(
                f"{kind.__name__} has the field {name}, which is no coefficient, so its class does "
                "not say all; give a law in place of the class."
            )
    return {name: value for name, value in rest.items() if value is not PydanticUndefined}


def _coefficients(kind: type[AnyForm], rest: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the fields that are floats; of a law that lists terms, those that move one."""
    names = [name for name, field in kind.model_fields.items() if field.annotation is float]
    if issubclass(kind, PosynomialLaw | ScalingLaw):
        law = kind.model_construct(**{**rest, **dict.fromkeys(names, 1.0)})
        still = [name for name in names if not moves(law, name)]
        if lacking := [name for name in still if name not in rest]:
            raise LawError(
                f"{kind.__name__} has the field {lacking[0]}, which is in none of its terms, so "
                "its class does not say all; give a law in place of the class."
            )
        names = [name for name in names if name not in still]
    return tuple(names)


def _refused(kind: type[AnyForm], value: float) -> set[str]:
    """Return the fields that do not accept this value, whatever the others are."""
    names = [name for name, field in kind.model_fields.items() if field.annotation is float]
    try:
        kind.model_validate({**dict.fromkeys(names, value), "source": ""})
    except ValidationError as error:
        return {str(each["loc"][0]) for each in error.errors() if each["loc"]}
    return set()


def _bounds(
    kind: type[AnyForm], names: tuple[str, ...], bounds: Mapping[str, tuple[float, float]]
) -> tuple[FloatArray, FloatArray]:
    negative, zero = _refused(kind, -1e-6), _refused(kind, 0.0)
    lower, upper = [], []
    for name in names:
        low, high = -math.inf, math.inf
        for rule in kind.model_fields[name].metadata:
            low = max(low, *(_limit(rule, key, -math.inf) for key in ("ge", "gt")))
            high = min(high, *(_limit(rule, key, math.inf) for key in ("le", "lt")))
        if name in negative:
            low = max(low, 1.0 / LARGEST if name in zero else 0.0)
            high = min(high, LARGEST)
        if name in bounds:
            least, most = bounds[name]
            if not least <= most:
                raise LawError(
                    f"bounds of {name} are {least:g} to {most:g}, but must ascend; "
                    f"the nearest legal ones are {most:g} to {least:g}."
                )
            low, high = max(low, least), min(high, most)
            if not low <= high:
                raise LawError(
                    f"bounds of {name} are {least:g} to {most:g}, which the law does not accept."
                )
        lower.append(low)
        upper.append(high)
    return np.array(lower), np.array(upper)


def _limit(rule: object, key: str, none: float) -> float:
    value = getattr(rule, key, None)
    return none if value is None else float(value)


def _check_names(what: str, given: Mapping[str, Any], names: tuple[str, ...]) -> None:
    for name in given:
        if name not in names:
            raise LawError(f"{what} names {name!r}, but the coefficients are {', '.join(names)}.")


def _between(low: float, high: float, unit: FloatArray) -> FloatArray:
    """Return values from low to high: even in the logarithm where both are above 0."""
    if low > 0.0:
        return np.asarray(low * (high / low) ** unit)
    return np.asarray(low + unit * (high - low))
