"""Posynomial laws of mixture-of-experts models: in the variables of a run, and in their own."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

from lawfit._coefficients import AboveZero, Exponent, Prefactor
from lawfit._values import Quantity, plain
from lawfit.base import Monomial, ScalingLaw
from lawfit.general import (
    Number,
    PosynomialLaw,
    PowerTerm,
    power_of_gap,
)


class KrajewskiLaw(ScalingLaw):
    """Loss of a fine-grained mixture in total parameters, tokens and granularity.

    Krajewski et al., arXiv 2402.07871::

        L = c + (g/G^gamma + a)/N^alpha + b/D^beta             [nats/token]

    ``G`` is ``4 d_model / d_expert``: the ``d_ff / d_expert`` of this package for a model whose
    dense block has the width ``4 d_model``. ``N`` is read as ``n_total``; ``n_active`` is checked
    and then ignored. The runs have one ratio of total to active parameters, so the law says
    nothing of another.

    Attributes
    ----------
    a
        Prefactor of capacity, at least 0.
    alpha
        Exponent of capacity [-], above 0.
    g
        Prefactor of granularity, at least 0.
    gamma
        Exponent of granularity [-].
    b, beta, e
        ``b``, ``beta`` and ``c``, as in `lawfit.ScalingLaw`.
    """

    equation: ClassVar[str] = "L = c + (g/G^gamma + a)/N^alpha + b/D^beta"
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "N": "n_total: parameters with all experts [parameter]",
            "D": "tokens: training tokens [token]",
            "G": "expert_split: granularity, 4 d_model / d_expert [-]",
        }
    )

    kind: Literal["krajewski"] = "krajewski"
    a: Prefactor
    alpha: AboveZero
    g: Prefactor
    gamma: Exponent

    @property
    def floor_terms(self) -> tuple[Monomial, ...]:
        """Capacity, granularity and constant [nats/token]."""
        return (
            Monomial("capacity", self.a, n_total=-self.alpha),
            Monomial("granularity", self.g, n_total=-self.alpha, expert_split=-self.gamma),
            Monomial("constant", self.e),
        )


class AbnarLaw(PosynomialLaw):
    """Loss of a mixture in total parameters, tokens and density of experts.

    Abnar et al., arXiv 2501.12370::

        L = a/N^alpha + b/D^beta + c/(1-S)^lambda + d/((1-S)^delta N^gamma) + e   [nats/token]

    with ``S = 1 - K/E``, the share of experts that a token leaves idle. `lawfit.PerSplitLaw` has
    the same form with another ``S``, over parameters. The code takes ``density = 1 - S = K/E``.
    The published ``lambda`` is below 0: that term falls as experts are added.

    Attributes
    ----------
    a, b, c, d, e
        Prefactors, at least 0; ``b`` above 0.
    alpha, beta
        Exponents of capacity and tokens [-], above 0.
    lambda_, delta, gamma
        Exponents [-] of either sign.
    """

    equation: ClassVar[str] = (
        "L = a/N^alpha + b/D^beta + c/(1-S)^lambda + d/((1-S)^delta N^gamma) + e"
    )
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "n_total": "N: parameters with all experts [parameter]",
            "tokens": "D: training tokens [token]",
            "density": "1 - S = K/E: experts of one token over all experts [-]",
        }
    )
    limits: ClassVar[Mapping[str, tuple[float, float]]] = MappingProxyType({"density": (0.0, 1.0)})

    kind: Literal["abnar"] = "abnar"
    a: Prefactor
    alpha: AboveZero
    b: AboveZero
    beta: AboveZero
    c: Prefactor
    lambda_: Exponent
    d: Prefactor
    delta: Exponent
    gamma: Exponent
    e: Prefactor

    @property
    def terms(self) -> tuple[PowerTerm, ...]:
        """Capacity, sparsity, interaction, constant and data [nats/token]."""
        return (
            PowerTerm("capacity", self.a, {"n_total": -self.alpha}),
            PowerTerm("sparsity", self.c, {"density": -self.lambda_}),
            PowerTerm("interaction", self.d, {"density": -self.delta, "n_total": -self.gamma}),
            PowerTerm("constant", self.e, {}),
            PowerTerm("data", self.b, {"tokens": -self.beta}),
        )

    def tokens_for(self, loss: Quantity, *, n_total: Quantity, density: Quantity) -> Number:
        """Invert the law: ``D = (b / (L - all other terms))^(1/beta)``.

        Parameters
        ----------
        loss
            The target [nats/token].
        n_total
            Parameters with all experts [parameter].
        density
            ``K/E`` [-].

        Returns
        -------
        float or ndarray
            Training tokens [token].

        Raises
        ------
        LawError
            If infinitely many tokens do not reach the target, or they overflow a float.
        """
        at = self._checked({"n_total": n_total, "density": density}, without=("tokens",))
        floor = sum(value for term, value in self._values(at) if term.name != "data")
        return power_of_gap(loss, plain(floor), self.b, self.beta, "tokens")
