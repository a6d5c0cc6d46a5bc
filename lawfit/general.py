"""Laws in variables of their own: what any of them offers, and what a user's own law declares.

`lawfit.ScalingLaw` is for laws in the total and active parameters, tokens and expert split of a
run. Other papers use other variables: a number of experts, a density of experts, unique tokens.
Such a law is a `GeneralLaw`: it names its variables and gives its value and its slopes. A
`PosynomialLaw` lists its terms, and value, slopes and convexity follow from them.

Examples
--------
A law of one's own, as a posynomial:

>>> from collections.abc import Mapping
>>> from typing import ClassVar
>>> from lawfit import PosynomialLaw, PowerTerm
>>> class WidthLaw(PosynomialLaw):
...     equation: ClassVar[str] = "L = a/(w^2 l)^alpha + e"
...     variables: ClassVar[Mapping[str, str]] = {
...         "width": "w: width of the residual stream [-]",
...         "layers": "l: number of layers [-]",
...     }
...     a: float
...     alpha: float
...     e: float
...
...     @property
...     def terms(self) -> tuple[PowerTerm, ...]:
...         powers = {"width": -2 * self.alpha, "layers": -self.alpha}
...         return PowerTerm("size", self.a, powers), PowerTerm("constant", self.e, {})
>>> law = WidthLaw(a=60.0, alpha=0.2, e=1.7, source="my runs")
>>> round(law.loss(width=1024.0, layers=24.0), 3)
3.686
>>> round(law.gradient(width=1024.0, layers=24.0)["width"], 3)
-0.794
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, TypeAlias, overload

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._values import FloatArray, LawError, Quantity, check_shapes, finite, plain, positive

Number: TypeAlias = float | FloatArray
Point: TypeAlias = Mapping[str, Number]


class PowerTerm(NamedTuple):
    """One term of a posynomial: a coefficient times powers of named variables.

    Attributes
    ----------
    name
        What the term stands for.
    coefficient
        At least 0 [the unit of the law].
    exponents
        Exponent of each variable [-]; one that is absent has the exponent 0.
    """

    name: str
    coefficient: float
    exponents: Mapping[str, float]


class GeneralLaw(BaseModel):
    """A law of the loss in the variables that it was defined in.

    Floats give floats; arrays broadcast, and give arrays. Variables are given by name, all of
    them, and each must be finite and above 0, unless `limits` says otherwise.

    A subclass sets the four class attributes, and defines `value_at` and `slopes_at`.

    Attributes
    ----------
    equation
        The law in the symbols of its paper.
    variables
        What each variable counts, by the name under which the code takes it.
    convexity
        Where the law is convex, as far as that is proved.
    limits
        Smallest and largest legal value of a variable, where they are not 0 and infinity. Where
        the smallest is below 0 the variable may be 0 or negative; `slopes_at` is then for the law
        to define.
    basis
        How the numbers arise: always "FITTED".
    source
        Where the coefficients come from.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    equation: ClassVar[str]
    variables: ClassVar[Mapping[str, str]]
    convexity: ClassVar[str] = "No claim."
    limits: ClassVar[Mapping[str, tuple[float, float]]] = {}
    basis: ClassVar[Literal["FITTED"]] = "FITTED"

    source: str

    @abstractmethod
    def value_at(self, at: Point) -> Number:
        """Return the value of the law at a point that has been checked.

        Parameters
        ----------
        at
            Each variable by name, finite and above 0.
        """

    @abstractmethod
    def slopes_at(self, at: Point) -> Point:
        """Return the derivative in the natural logarithm of each variable, the others held.

        Parameters
        ----------
        at
            As for `value_at`.
        """

    @overload
    def loss(self, **point: float) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def loss(self, **point: Quantity) -> FloatArray: ...
    def loss(self, **point: Quantity) -> Number:
        """Predict the loss.

        Parameters
        ----------
        **point
            Every variable of `variables`, by name.

        Returns
        -------
        float or ndarray
            Loss [nats/token].

        Raises
        ------
        LawError
            If a variable is missing, unknown or out of its bounds.
        """
        at = self._checked(point)
        return _shaped(self.value_at(at), at)

    def gradient(self, **point: Quantity) -> dict[str, Number]:
        """Differentiate the law in the logarithm of each variable, the others held.

        Parameters and errors are those of `loss`.

        Returns
        -------
        dict
            ``d loss / d log x`` [nats/token] of each variable, by name.
        """
        at = self._checked(point)
        slopes = self.slopes_at(at)
        return {name: _shaped(slopes[name], at) for name in self.variables}

    def _checked(
        self, point: Mapping[str, Quantity], without: tuple[str, ...] = ()
    ) -> dict[str, Number]:
        names = [name for name in self.variables if name not in without]
        unknown = [name for name in point if name not in names]
        missing = [name for name in names if name not in point]
        if unknown or missing:
            what = f"{unknown[0]!r} is unknown" if unknown else f"{missing[0]!r} is missing"
            raise LawError(f"the variable {what}, but this law takes {', '.join(names)} by name.")
        signed = [name for name in names if self.limits.get(name, (0.0, math.inf))[0] < 0.0]
        at = {name: (finite if name in signed else positive)(name, point[name]) for name in names}
        check_shapes(**at)
        for name, value in at.items():
            low, high = self.limits.get(name, (0.0, math.inf))
            outside = np.ravel(value)[(np.ravel(value) < low) | (np.ravel(value) > high)]
            if outside.size:
                bad = float(outside[0])
                rule, near = ("at least", low) if bad < low else ("at most", high)
                raise LawError(
                    f"{name} is {bad:.6g}, but this law needs {rule} {near:g}; "
                    f"the nearest legal value is {near:g}."
                )
        return at


class PosynomialLaw(GeneralLaw):
    """A law that is a sum of powers: convex in the logarithms of its variables.

    A subclass lists its terms, with coefficients of at least 0 and exponents of either sign.
    The logarithm of each term is affine in the logarithms of the variables, so a solver of
    geometric programs can take `terms` as they stand.
    """

    convexity: ClassVar[str] = (
        "The law and its logarithm are convex in the logarithms of the variables, because it is "
        "a posynomial."
    )

    @property
    @abstractmethod
    def terms(self) -> tuple[PowerTerm, ...]:
        """All terms of the law; their sum is the loss [nats/token]."""

    def value_at(self, at: Point) -> Number:
        """Return the sum of the terms."""
        return plain(sum(value for _, value in self._values(at)))

    def slopes_at(self, at: Point) -> Point:
        """Return the sum of the terms, each times its exponent of the variable."""
        values = self._values(at)
        return {
            name: plain(sum(term.exponents.get(name, 0.0) * value for term, value in values))
            for name in self.variables
        }

    def _values(self, at: Point) -> list[tuple[PowerTerm, Number]]:
        found: list[tuple[PowerTerm, Number]] = []
        for term in self.terms:
            if not (np.isfinite(term.coefficient) & (np.real(term.coefficient) >= 0.0)).all():
                raise LawError(
                    f"the coefficient of the term {term.name!r} is {term.coefficient:g}, but a "
                    "posynomial needs a finite one of at least 0; the nearest legal value is 0."
                )
            if strange := [name for name in term.exponents if name not in self.variables]:
                raise LawError(
                    f"the term {term.name!r} has an exponent of {strange[0]!r}, but the variables "
                    f"of this law are {', '.join(self.variables)}."
                )
            if wild := [p for p in term.exponents.values() if not np.isfinite(p).all()]:
                raise LawError(
                    f"the term {term.name!r} has the exponent {wild[0]:g}, but an exponent must "
                    "be a finite number; the nearest legal value in use is 0."
                )
            power = sum(p * np.log(at[name]) for name, p in term.exponents.items() if name in at)
            found.append((term, term.coefficient * np.exp(power)))
        return found


def power_of_gap(loss: Quantity, floor: Number, b: Number, beta: Number, name: str) -> Number:
    """Return ``x = (b / (loss - floor))**(1/beta)``, which solves ``loss = floor + b x^-beta``.

    Parameters
    ----------
    loss, floor
        The target, and what the law leaves at infinite ``x`` [nats/token].
    b
        Prefactor of the power, above 0 [nats/token].
    beta
        Exponent, above 0 [-].
    name
        What ``x`` is, for the message.

    Raises
    ------
    LawError
        If the target is not above the floor, or so little above it that ``x`` overflows.
    """
    target = positive("loss", loss)
    check_shapes(loss=target, floor=floor)
    gap = gap_above(target, floor, name)
    with np.errstate(over="ignore"):
        found = np.exp((np.log(b) - np.log(gap)) / beta)
    return finite_solution(plain(found), name)


def gap_above(target: Number, floor: Number, name: str) -> Number:
    """Return ``target - floor`` [nats/token], all of it above 0.

    Raises
    ------
    LawError
        If it is not.
    """
    gap = np.subtract(target, floor)
    if np.any(gap <= 0):
        at = int(np.argmin(gap))
        wanted, lowest = (np.broadcast_to(x, np.shape(gap)).flat[at] for x in (target, floor))
        raise LawError(
            f"loss is {wanted:.6g} nats/token, but it stays above {lowest:.6g} here whatever the "
            f"{name}; the target must lie above {lowest:.6g}."
        )
    return plain(gap)


def finite_solution(value: Number, name: str) -> Number:
    """Return a solution, all of it a finite number above 0.

    Raises
    ------
    LawError
        If it overflows or underflows a float.
    """
    if not (np.all(np.isfinite(value)) and np.all(np.greater(value, 0.0))):
        raise LawError(
            f"the {name} for that loss would not fit a float; the target must lie nearer to the "
            "losses of runs."
        )
    return value


def _shaped(value: Number, at: Point) -> Number:
    shape = np.broadcast_shapes(*(np.shape(x) for x in at.values()))
    return plain(value) if np.shape(value) == shape else np.broadcast_to(value, shape).copy()
