"""The interface of every scaling law, and the arithmetic that all of them share.

A law here is a posynomial: a sum of terms ``k * N_tot^p * N_act^q * D^s * G^t``
with ``k >= 0`` and real exponents of either sign. A subclass lists its terms;
loss, gradient, floor and inverse follow from them. The logarithm of each term
is affine in the logarithms of the variables, so the loss is convex in
``(log N_tot, log N_act, log D, log G)``. It is convex in
``(log N_tot, log(1-S), log D, log G)`` too, since ``log(1-S)`` is
``log N_act - log N_tot``.
"""

import math
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Literal, NamedTuple, overload

import numpy as np
from pydantic import BaseModel, ConfigDict

from lawfit._coefficients import AboveZero, Prefactor
from lawfit._values import (
    FloatArray,
    LawError,
    LogPoint,
    Quantity,
    check_shapes,
    log_point,
    plain,
    positive,
)
from lawfit.shapes import ShapeRange
from lawfit.validity import ValidRange


class Monomial(NamedTuple):
    """One term of a law: a coefficient times powers of the four variables.

    The fields named after variables hold the exponents, in the order of the
    variables everywhere else. The value of the term is in nats/token.
    """

    name: str
    coefficient: float
    n_total: float = 0.0
    n_active: float = 0.0
    tokens: float = 0.0
    expert_split: float = 0.0

    @property
    def exponents(self) -> tuple[float, float, float, float]:
        """Exponents of ``n_total``, ``n_active``, ``tokens`` and ``expert_split``."""
        return self.n_total, self.n_active, self.tokens, self.expert_split

    def _at(self, logs: LogPoint) -> float | FloatArray:
        power = sum(p * x for p, x in zip(self.exponents, logs, strict=True))
        return self.coefficient * np.exp(power)


class TokenTerm(NamedTuple):
    """The one term that holds the tokens: ``loss = floor + b * tokens**-beta``."""

    b: float
    beta: float


class Gradient(NamedTuple):
    """Partial derivatives of the loss in the natural logarithm of each variable.

    Every component is ``d loss / d log x`` [nats/token] with the other three
    variables held. Divide it by ``x`` for the raw partial ``d loss / d x``.

    In the coordinates ``(N_tot, S, D, G)`` of the papers, ``n_active`` is the
    derivative in ``log(1-S)`` at fixed ``N_tot``, and ``n_total + n_active`` is
    the derivative in ``log N_tot`` at fixed ``S``.
    """

    n_total: float | FloatArray
    n_active: float | FloatArray
    tokens: float | FloatArray
    expert_split: float | FloatArray


class ScalingLaw(BaseModel):
    """A fitted law for the loss of a pretraining run.

    Floats give floats; arrays broadcast, and give arrays. All laws take the
    same four variables, and check all of them before they ignore any.

    Attributes
    ----------
    equation
        The law in the symbols of its paper.
    variables
        What each variable of the equation counts.
    basis
        How the numbers arise: always "FITTED".
    b
        Prefactor of the token term [nats/token], above 0.
    beta
        Exponent of the token term [-], above 0, so that tokens lower the loss.
    e
        Constant term [nats/token].
    source
        Where the coefficients come from.
    convention
        What the parameters of the runs counted, in the words of who fitted the law; None
        where only `variables` says it.
    valid_range
        The range of the training runs; see `flags`.
    shape_range
        The shapes of the models of those runs; see `ShapeRange.flags`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    equation: ClassVar[str]
    variables: ClassVar[Mapping[str, str]]
    basis: ClassVar[Literal["FITTED"]] = "FITTED"

    b: AboveZero
    beta: AboveZero
    e: Prefactor
    source: str
    convention: str | None = None
    valid_range: ValidRange = ValidRange()
    shape_range: ShapeRange = ShapeRange()

    @property
    @abstractmethod
    def floor_terms(self) -> tuple[Monomial, ...]:
        """The terms without tokens; their sum is the floor [nats/token]."""

    @property
    def terms(self) -> tuple[Monomial, ...]:
        """All terms of the law, the token term last; their sum is the loss."""
        return (*self.floor_terms, Monomial("data", self.b, tokens=-self.beta))

    @property
    def token_term(self) -> TokenTerm:
        """Coefficients of the term that holds the tokens."""
        return TokenTerm(self.b, self.beta)

    @overload
    def loss(  # type: ignore[overload-overlap]  # an array argument gives an array
        self, *, n_total: float, n_active: float, tokens: float, expert_split: float
    ) -> float: ...
    @overload
    def loss(
        self, *, n_total: Quantity, n_active: Quantity, tokens: Quantity, expert_split: Quantity
    ) -> FloatArray: ...
    def loss(
        self, *, n_total: Quantity, n_active: Quantity, tokens: Quantity, expert_split: Quantity
    ) -> float | FloatArray:
        """Predict the loss.

        Parameters
        ----------
        n_total, n_active
            Total and active parameters [parameter].
        tokens
            Training tokens [token].
        expert_split
            Expert split factor, ``d_ff / d_expert`` [-].

        Returns
        -------
        float or ndarray
            Loss [nats/token].

        Raises
        ------
        LawError
            If a variable is not finite and above 0, or ``n_active > n_total``.
        """
        logs = self._logs(
            n_total=n_total, n_active=n_active, tokens=tokens, expert_split=expert_split
        )
        return plain(sum(term._at(logs) for term in self.terms))

    @overload
    def floor(  # type: ignore[overload-overlap]
        self, *, n_total: float, n_active: float, expert_split: float
    ) -> float: ...
    @overload
    def floor(
        self, *, n_total: Quantity, n_active: Quantity, expert_split: Quantity
    ) -> FloatArray: ...
    def floor(
        self, *, n_total: Quantity, n_active: Quantity, expert_split: Quantity
    ) -> float | FloatArray:
        """Predict the loss at infinitely many tokens.

        Parameters and errors are those of `loss`, without the tokens.

        Returns
        -------
        float or ndarray
            Loss [nats/token].
        """
        logs = self._logs(n_total=n_total, n_active=n_active, expert_split=expert_split)
        return plain(sum(term._at(logs) for term in self.floor_terms))

    def gradient(
        self, *, n_total: Quantity, n_active: Quantity, tokens: Quantity, expert_split: Quantity
    ) -> Gradient:
        """Differentiate the loss in the logarithm of each variable.

        Parameters and errors are those of `loss`.

        Returns
        -------
        Gradient
            Four partial derivatives ``d loss / d log x`` [nats/token].
        """
        logs = self._logs(
            n_total=n_total, n_active=n_active, tokens=tokens, expert_split=expert_split
        )
        values = [(term.exponents, term._at(logs)) for term in self.terms]
        return Gradient(*(plain(sum(p[axis] * v for p, v in values)) for axis in range(len(logs))))

    @overload
    def tokens_for(  # type: ignore[overload-overlap]
        self, loss: float, *, n_total: float, n_active: float, expert_split: float
    ) -> float: ...
    @overload
    def tokens_for(
        self, loss: Quantity, *, n_total: Quantity, n_active: Quantity, expert_split: Quantity
    ) -> FloatArray: ...
    def tokens_for(
        self, loss: Quantity, *, n_total: Quantity, n_active: Quantity, expert_split: Quantity
    ) -> float | FloatArray:
        """Invert the law: the tokens that reach a loss, ``(b / (loss - floor))**(1/beta)``.

        Parameters
        ----------
        loss
            Target [nats/token].
        n_total, n_active
            Total and active parameters [parameter].
        expert_split
            Expert split factor [-].

        Returns
        -------
        float or ndarray
            Training tokens [token].

        Raises
        ------
        LawError
            If the target is at or below the floor, which no number of tokens
            reaches, or so close above it that the tokens overflow a float; or
            as in `loss`.
        """
        target = positive("loss", loss)
        floor = self.floor(n_total=n_total, n_active=n_active, expert_split=expert_split)
        check_shapes(loss=target, floor=floor)
        gap = np.subtract(target, floor)
        if np.any(gap <= 0):
            at = int(np.argmin(gap))
            wanted, lowest = (np.broadcast_to(x, np.shape(gap)).flat[at] for x in (target, floor))
            raise LawError(
                f"loss is {wanted:.6g} nats/token, but infinitely many tokens reach "
                f"{lowest:.6g} at this model; the target must lie above {lowest:.6g}."
            )
        with np.errstate(over="ignore"):
            tokens = np.exp((math.log(self.b) - np.log(gap)) / self.beta)
        if not np.all(np.isfinite(tokens)):
            raise LawError(
                f"loss is {float(np.min(gap)):.3g} nats/token above the floor, but the tokens for "
                "that exceed the largest float; the target must lie further above the floor."
            )
        return plain(tokens)

    def flags(
        self, *, n_total: float, n_active: float, tokens: float, expert_split: float
    ) -> tuple[str, ...]:
        """Name every variable outside the range of the training runs.

        Parameters and errors are those of `loss`, for one point.

        Returns
        -------
        tuple of str
            One sentence for each variable outside, with its value and the bound.
        """
        self._logs(n_total=n_total, n_active=n_active, tokens=tokens, expert_split=expert_split)
        return self.valid_range.flags(
            n_total=n_total, n_active=n_active, tokens=tokens, expert_split=expert_split
        )

    def _logs(
        self,
        *,
        n_total: Quantity,
        n_active: Quantity,
        tokens: Quantity = 1.0,
        expert_split: Quantity,
    ) -> LogPoint:
        return log_point(
            n_total=n_total, n_active=n_active, tokens=tokens, expert_split=expert_split
        )
