"""Laws of mixture-of-experts models in their number of experts, which saturates at both ends."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np
from pydantic import model_validator

from lawfit._coefficients import AboveZero, Exponent, Prefactor
from lawfit._values import LawError, Quantity, plain, positive
from lawfit.general import GeneralLaw, Number, Point, finite_solution, power_of_gap
from lawfit.laws import ChinchillaLaw


class SaturatingLaw(GeneralLaw):
    """A law with the transform of a number of experts, or of a ratio, that saturates.

    Attributes
    ----------
    start, most
        Ends of the transform [-], the first below the second.
    """

    start: AboveZero
    most: AboveZero

    @model_validator(mode="after")
    def _ordered(self) -> "SaturatingLaw":
        if not self.start < self.most:
            raise ValueError(
                f"start is {self.start:g} and most is {self.most:g}, but the transform saturates "
                f"between them, so most must exceed start; the nearest legal most is above "
                f"{self.start:g}"
            )
        return self

    def _saturated(self, x: Number, origin: float) -> tuple[Number, Number]:
        """Return ``1/y = 1/(x - origin + 1/(1/start - 1/most)) + 1/most``, and ``dlny/dlnx``."""
        shifted = np.subtract(x, origin) + 1.0 / (1.0 / self.start - 1.0 / self.most)
        y = 1.0 / (1.0 / shifted + 1.0 / self.most)
        return plain(y), plain(y * x / (shifted * shifted))


class _ExpertCountLaw(SaturatingLaw):
    limits: ClassVar[Mapping[str, tuple[float, float]]] = MappingProxyType(
        {"experts": (1.0, float("inf"))}
    )

    def effective_experts(self, experts: Quantity) -> Number:
        """Return the transformed number of experts: `start` for one, towards `most` for many [-].

        ``1/E_hat = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max``.

        Parameters
        ----------
        experts
            ``E`` [-], at least 1.
        """
        others = tuple(name for name in self.variables if name != "experts")
        at = self._checked({"experts": experts}, without=others)
        return self._saturated(at["experts"], 1.0)[0]


class ClarkLaw(_ExpertCountLaw):
    """Loss of a routed model in the size of its dense base and its number of experts.

    Equation (1) of Clark et al., arXiv 2202.01169, in decimal logarithms::

        log L = a log N + b log E_hat + c log N log E_hat + d
        1/E_hat = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max

    All its runs take 130 billion tokens, so that tokens are no variable of it. ``L`` is the loss
    on held-out text.

    Attributes
    ----------
    a, b, c, d
        Coefficients of either sign [-].
    start, most
        ``E_start`` and ``E_max`` [-], the transformed number for one and for very many experts.
    """

    equation: ClassVar[str] = (
        "log10 L = a log10 N + b log10 E_hat + c log10 N log10 E_hat + d, "
        "1/E_hat = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max"
    )
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "n": "N: parameters of the dense base without embeddings, active at K = 1 [parameter]",
            "experts": "E: routed experts of a layer, 1 for a dense model [-]",
        }
    )
    convexity: ClassVar[str] = (
        "log L is affine in log N at fixed E, so L is convex there. Not convex in both: the law is "
        "bilinear in the logarithms."
    )

    kind: Literal["clark"] = "clark"
    a: Exponent
    b: Exponent
    c: Exponent
    d: Exponent

    def value_at(self, at: Point) -> Number:
        """Return the loss [nats/token]."""
        size = np.log10(at["n"])
        experts = np.log10(self._saturated(at["experts"], 1.0)[0])
        power = self.a * size + self.b * experts + self.c * size * experts + self.d
        return plain(np.power(10.0, power))

    def slopes_at(self, at: Point) -> Point:
        """Return the slopes in ``log N`` and ``log E`` [nats/token]."""
        loss = self.value_at(at)
        hat, elasticity = self._saturated(at["experts"], 1.0)
        return {
            "n": plain(loss * (self.a + self.c * np.log10(hat))),
            "experts": plain(loss * (self.b + self.c * np.log10(at["n"])) * elasticity),
        }

    def size_for(self, loss: Quantity, *, experts: Quantity) -> Number:
        """Invert the law: the dense base that reaches a loss with so many experts.

        With one expert it is the size of the dense model that does as well, the effective
        parameter count of the paper.

        Parameters
        ----------
        loss
            The target [nats/token].
        experts
            ``E`` [-].

        Returns
        -------
        float or ndarray
            ``N`` [parameter].

        Raises
        ------
        LawError
            If the size does not lower the loss at that number of experts, or overflows a float.
        """
        hat = np.log10(self.effective_experts(experts))
        slope = self.a + self.c * hat
        if np.any(slope >= 0):
            raise LawError(
                f"the exponent of N is {float(np.max(slope)):.4g} at this number of experts, so "
                "that size does not lower the loss; take fewer experts."
            )
        with np.errstate(over="ignore"):
            power = (np.log10(positive("loss", loss)) - self.d - self.b * hat) / slope
            return finite_solution(plain(np.power(10.0, power)), "parameters")


class LudziejewskiLaw(_ExpertCountLaw):
    """Loss of a mixture in active parameters, tokens and number of experts.

    Ludziejewski et al., arXiv 2502.05172, in natural logarithms::

        L = a E_hat^delta N_act^(alpha + gamma ln E_hat)
            + b E_hat^omega D^(beta + zeta ln E_hat) + c       [nats/token]
        1/E_hat = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max

    ``N_act`` counts embedding and output layers: ``2 d V + 13 L d^2`` in their models. The
    exponents carry their sign, so the published ``alpha`` and ``beta`` are below 0.

    Attributes
    ----------
    a, b
        Prefactors of size and tokens, above 0.
    alpha, gamma, delta, beta, zeta, omega
        Exponents of either sign [-].
    c
        Constant term [nats/token].
    start, most
        ``E_start`` and ``E_max`` [-].
    """

    equation: ClassVar[str] = (
        "L = a E_hat^delta N_act^(alpha + gamma ln E_hat) "
        "+ b E_hat^omega D^(beta + zeta ln E_hat) + c, "
        "1/E_hat = 1/(E - 1 + 1/(1/E_start - 1/E_max)) + 1/E_max"
    )
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "n_active": "N_act: active parameters with embedding and output layers [parameter]",
            "tokens": "D: training tokens [token]",
            "experts": "E: experts of a layer, 1 for a dense model [-]",
        }
    )
    convexity: ClassVar[str] = (
        "Convex in (log N_act, log D) at fixed E, where it is a posynomial (at_experts). No claim "
        "in log E."
    )

    kind: Literal["ludziejewski"] = "ludziejewski"
    a: AboveZero
    alpha: Exponent
    gamma: Exponent
    delta: Exponent
    b: AboveZero
    beta: Exponent
    zeta: Exponent
    omega: Exponent
    c: Prefactor

    def value_at(self, at: Point) -> Number:
        """Return the loss [nats/token]."""
        size, tokens = self._two_terms(at)
        return plain(size + tokens + self.c)

    def slopes_at(self, at: Point) -> Point:
        """Return the slopes in ``log N_act``, ``log D`` and ``log E`` [nats/token]."""
        size, tokens = self._two_terms(at)
        hat, elasticity = self._saturated(at["experts"], 1.0)
        log_hat = np.log(hat)
        by_hat = size * (self.delta + self.gamma * np.log(at["n_active"]))
        by_hat = by_hat + tokens * (self.omega + self.zeta * np.log(at["tokens"]))
        return {
            "n_active": plain(size * (self.alpha + self.gamma * log_hat)),
            "tokens": plain(tokens * (self.beta + self.zeta * log_hat)),
            "experts": plain(by_hat * elasticity),
        }

    def at_experts(self, experts: float) -> ChinchillaLaw:
        """Return the law at one number of experts: ``m N_act^mu + n D^nu + c``.

        Its ``a``, ``alpha``, ``b``, ``beta`` and ``e`` are the paper's ``m``, ``-mu``, ``n``,
        ``-nu`` and ``c``; its ``n_active`` counts as this law does.

        Parameters
        ----------
        experts
            ``E`` [-].

        Raises
        ------
        LawError
            If size or tokens do not lower the loss at that number of experts.
        """
        hat = float(self.effective_experts(experts))
        alpha = -(self.alpha + self.gamma * float(np.log(hat)))
        beta = -float(self._falling(np.log(hat)))
        if alpha <= 0:
            raise LawError(
                f"the exponent of N_act is {-alpha:.4g} at {experts:g} experts, so that size does "
                "not lower the loss; take another number of experts."
            )
        return ChinchillaLaw(
            a=self.a * hat**self.delta,
            alpha=alpha,
            b=self.b * hat**self.omega,
            beta=beta,
            e=self.c,
            source=f"{self.source}, at {experts:g} experts",
        )

    def tokens_for(self, loss: Quantity, *, n_active: Quantity, experts: Quantity) -> Number:
        """Invert the law at a model: ``D = (n / (L - m N_act^mu - c))^(-1/nu)``.

        Parameters
        ----------
        loss
            The target [nats/token].
        n_active
            Active parameters with embeddings [parameter].
        experts
            ``E`` [-].

        Returns
        -------
        float or ndarray
            Training tokens [token].

        Raises
        ------
        LawError
            If infinitely many tokens do not reach the target, they overflow a float, or tokens
            do not lower the loss at that number of experts.
        """
        at = self._checked({"n_active": n_active, "experts": experts}, without=("tokens",))
        log_hat = np.log(self._saturated(at["experts"], 1.0)[0])
        falling = self._falling(log_hat)
        floor = self._size_term(at) + self.c
        prefactor = self.b * np.exp(self.omega * log_hat)
        return power_of_gap(loss, plain(floor), plain(prefactor), plain(-falling), "tokens")

    def _falling(self, log_hat: Number) -> Number:
        exponent = self.beta + self.zeta * log_hat
        if np.any(exponent >= 0):
            raise LawError(
                f"the exponent of D is {float(np.max(exponent)):.4g} at this number of experts, "
                "so that tokens do not lower the loss; take another number of experts."
            )
        return plain(exponent)

    def _size_term(self, at: Point) -> Number:
        log_hat = np.log(self._saturated(at["experts"], 1.0)[0])
        power = (self.alpha + self.gamma * log_hat) * np.log(at["n_active"])
        return plain(self.a * np.exp(self.delta * log_hat + power))

    def _two_terms(self, at: Point) -> tuple[Number, Number]:
        log_hat = np.log(self._saturated(at["experts"], 1.0)[0])
        power = (self.beta + self.zeta * log_hat) * np.log(at["tokens"])
        return self._size_term(at), plain(self.b * np.exp(self.omega * log_hat + power))
