"""Laws of fine points of a mixture: shared experts and granularity, and the leverage of experts."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal, overload

import numpy as np

from lawfit._coefficients import AboveZero, Exponent, Prefactor
from lawfit._values import FloatArray, LawError, Quantity, plain, positive
from lawfit.expert_count_laws import SaturatingLaw
from lawfit.general import GeneralLaw, Number, Point, power_of_gap


class ZhaoLaw(GeneralLaw):
    """Loss of a mixture in total and active parameters, tokens, active and shared experts.

    Zhao et al., arXiv 2509.23678::

        L = (e G + f/G + m S^2 + n S) (1/N^alpha + k/N_a^alpha + h N_a/N)
            + a/N^alpha + b/D^beta + c/N_a^alpha + eps         [nats/token]

    ``G`` is the number of active experts and ``S`` the share of shared experts among them;
    neither is the ``G`` or ``S`` of another law here.

    Attributes
    ----------
    e, f, m, k, h, a, c
        Prefactors, at least 0.
    n
        Prefactor of ``S``, of either sign; the published one is below 0.
    b, beta, alpha
        Prefactor and exponent of tokens, and exponent of parameters [-], above 0.
    eps
        Constant term [nats/token].
    """

    equation: ClassVar[str] = (
        "L = (e G + f/G + m S^2 + n S)(1/N^alpha + k/N_a^alpha + h N_a/N) "
        "+ a/N^alpha + b/D^beta + c/N_a^alpha + eps"
    )
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "n_total": "N: parameters with all experts [parameter]",
            "n_active": "N_a: parameters that one token uses [parameter]",
            "tokens": "D: training tokens [token]",
            "active_experts": "G: experts that one token uses [-]",
            "shared_ratio": "S: shared experts over active ones [-]",
        }
    )
    convexity: ClassVar[str] = (
        "Convex in (log N, log N_a, log D) at fixed G and S where e G + f/G + m S^2 + n S is at "
        "least 0, since it is a posynomial there. No claim in G and S, because n may be below 0."
    )
    limits: ClassVar[Mapping[str, tuple[float, float]]] = MappingProxyType(
        {"shared_ratio": (0.0, 1.0)}
    )

    kind: Literal["zhao"] = "zhao"
    e: Prefactor
    f: Prefactor
    m: Prefactor
    n: Exponent
    k: Prefactor
    h: Prefactor
    a: Prefactor
    alpha: AboveZero
    b: AboveZero
    beta: AboveZero
    c: Prefactor
    eps: Prefactor

    def value_at(self, at: Point) -> Number:
        """Return the loss [nats/token]."""
        return plain(self._floor(at) + self.b * np.power(at["tokens"], -self.beta))

    def slopes_at(self, at: Point) -> Point:
        """Return the slopes in the logarithm of each variable [nats/token]."""
        size, active, ratio = self._sizes(at)
        shape = self._shape(at)
        inner = size + self.k * active + self.h * ratio
        experts, shared = at["active_experts"], at["shared_ratio"]
        by_total = -self.alpha * (shape + self.a) * size - shape * self.h * ratio
        by_active = -self.alpha * (shape * self.k + self.c) * active + shape * self.h * ratio
        by_shared = 2.0 * self.m * np.square(shared) + self.n * shared
        return {
            "n_total": plain(by_total),
            "n_active": plain(by_active),
            "tokens": plain(-self.beta * self.b * np.power(at["tokens"], -self.beta)),
            "active_experts": plain((self.e * experts - self.f / experts) * inner),
            "shared_ratio": plain(by_shared * inner),
        }

    def tokens_for(
        self,
        loss: Quantity,
        *,
        n_total: Quantity,
        n_active: Quantity,
        active_experts: Quantity,
        shared_ratio: Quantity,
    ) -> Number:
        """Invert the law: ``D = (b / (L - all other terms))^(1/beta)``.

        Parameters
        ----------
        loss
            The target [nats/token].
        n_total, n_active
            Total and active parameters [parameter].
        active_experts, shared_ratio
            ``G`` and ``S`` [-].

        Returns
        -------
        float or ndarray
            Training tokens [token].

        Raises
        ------
        LawError
            If infinitely many tokens do not reach the target, or they overflow a float.
        """
        given = {
            "n_total": n_total,
            "n_active": n_active,
            "active_experts": active_experts,
            "shared_ratio": shared_ratio,
        }
        at = self._checked(given, without=("tokens",))
        return power_of_gap(loss, self._floor(at), self.b, self.beta, "tokens")

    def best_active_experts(self) -> float:
        """Return ``sqrt(f/e)``, the number of active experts of least loss [-].

        Raises
        ------
        LawError
            If ``e`` or ``f`` is 0, so that there is none.
        """
        if not (self.e > 0 and self.f > 0):
            raise LawError(
                f"e is {self.e:g} and f is {self.f:g}, but a best number of active experts needs "
                "both above 0."
            )
        return float(np.sqrt(self.f / self.e))

    def _checked(
        self, point: Mapping[str, Quantity], without: tuple[str, ...] = ()
    ) -> dict[str, Number]:
        at = super()._checked(point, without)
        excess = np.greater(at["n_active"], at["n_total"])
        if np.any(excess):
            active, total = (
                float(np.broadcast_to(at[name], np.shape(excess))[excess][0])
                for name in ("n_active", "n_total")
            )
            raise LawError(
                f"n_active is {active:.6g} and n_total is {total:.6g}, but a model cannot activate "
                f"more parameters than it has; the nearest legal n_active is {total:.6g}."
            )
        return at

    def _shape(self, at: Point) -> Number:
        experts, shared = at["active_experts"], at["shared_ratio"]
        return plain(
            self.e * experts + self.f / experts + self.m * np.square(shared) + self.n * shared
        )

    def _sizes(self, at: Point) -> tuple[Number, Number, Number]:
        total, active = at["n_total"], at["n_active"]
        size, small = np.power(total, -self.alpha), np.power(active, -self.alpha)
        return plain(size), plain(small), plain(np.divide(active, total))

    def _floor(self, at: Point) -> Number:
        size, active, ratio = self._sizes(at)
        mixed = self._shape(at) * (size + self.k * active + self.h * ratio)
        return plain(mixed + self.a * size + self.c * active + self.eps)


class EfficiencyLeverage(SaturatingLaw):
    """How many times the compute a dense model needs for the loss of a mixture.

    Tian et al., arXiv 2507.17702::

        EL = A_hat^(alpha + delta log10 C + gamma (log2 G)^2 + beta log2 G)
        1/A_hat = 1/(A + 1/(1/A_start - 1/A_max)) + 1/A_max

    The bases of the two logarithms are not printed; decimal for ``C`` and binary for ``G`` are
    those that give the paper's leverage above 7 and its best granularity of about 12. It is no
    loss: `leverage` evaluates it, `gradient` differentiates it [-], and `loss` refuses.

    Attributes
    ----------
    alpha, delta, gamma, beta
        Coefficients of the exponent, of either sign [-].
    start, most
        ``A_start`` and ``A_max`` [-].
    """

    equation: ClassVar[str] = (
        "EL = A_hat^(alpha + delta log10 C + gamma (log2 G)^2 + beta log2 G), "
        "1/A_hat = 1/(A + 1/(1/A_start - 1/A_max)) + 1/A_max"
    )
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "activation_ratio": "A: experts that one token uses over all experts [-]",
            "granularity": "G: 2 d_model / d_expert [-]",
            "compute": "C: compute of the training of the mixture [FLOP]",
        }
    )
    convexity: ClassVar[str] = (
        "log EL is affine in log C. Where A_hat < 1 and gamma > 0 it is concave in log G, with its "
        "maximum at log2 G = -beta/(2 gamma). No claim in all variables."
    )
    limits: ClassVar[Mapping[str, tuple[float, float]]] = MappingProxyType(
        {"activation_ratio": (0.0, 1.0)}
    )

    kind: Literal["efficiency_leverage"] = "efficiency_leverage"
    alpha: Exponent
    delta: Exponent
    gamma: Exponent
    beta: Exponent

    @overload
    def leverage(self, **point: float) -> float: ...  # type: ignore[overload-overlap]
    @overload
    def leverage(self, **point: Quantity) -> FloatArray: ...
    def leverage(self, **point: Quantity) -> Number:
        """Return the leverage: compute of a dense model over that of the mixture [-].

        Parameters
        ----------
        **point
            ``activation_ratio`` [-], ``granularity`` [-] and ``compute`` [FLOP].

        Raises
        ------
        LawError
            If a variable is missing, unknown or out of its bounds.
        """
        return super().loss(**point)

    def loss(self, **point: Quantity) -> Number:  # type: ignore[override]
        """Refuse: a leverage is no loss.

        Raises
        ------
        LawError
            Always.
        """
        raise LawError("this law gives a leverage, not a loss; call leverage() instead.")

    def value_at(self, at: Point) -> Number:
        """Return the leverage [-]."""
        hat = self._saturated(at["activation_ratio"], 0.0)[0]
        return plain(np.power(hat, self._exponent(at)))

    def slopes_at(self, at: Point) -> Point:
        """Return the slopes of the leverage in the logarithm of each variable [-]."""
        hat, elasticity = self._saturated(at["activation_ratio"], 0.0)
        leverage = self.value_at(at)
        by_exponent = leverage * np.log(hat)
        by_split = (2.0 * self.gamma * np.log2(at["granularity"]) + self.beta) / np.log(2.0)
        return {
            "activation_ratio": plain(leverage * self._exponent(at) * elasticity),
            "granularity": plain(by_exponent * by_split),
            "compute": plain(by_exponent * self.delta / np.log(10.0)),
        }

    def best_granularity(self) -> float:
        """Return ``2^(-beta / (2 gamma))``, the granularity of most leverage [-].

        Raises
        ------
        LawError
            If ``gamma`` is not above 0, so that there is no maximum.
        """
        if not self.gamma > 0:
            raise LawError(
                f"gamma is {self.gamma:g}, but a best granularity needs it above 0; the nearest "
                "legal value is a small positive number such as 0.01."
            )
        return float(2.0 ** (-self.beta / (2.0 * self.gamma)))

    def compute_for(
        self, leverage: Quantity, *, activation_ratio: Quantity, granularity: Quantity
    ) -> Number:
        """Invert the law: the compute at which a mixture has a leverage.

        Parameters
        ----------
        leverage
            The target [-].
        activation_ratio, granularity
            ``A`` and ``G`` [-].

        Returns
        -------
        float or ndarray
            ``C`` [FLOP].

        Raises
        ------
        LawError
            If the leverage does not depend on compute, or the compute overflows a float.
        """
        target = positive("leverage", leverage)
        at = self._checked(
            {"activation_ratio": activation_ratio, "granularity": granularity},
            without=("compute",),
        )
        log_hat = np.log(self._saturated(at["activation_ratio"], 0.0)[0])
        if self.delta == 0.0 or np.any(log_hat == 0.0):
            raise LawError("the leverage does not depend on compute here, so nothing reaches it.")
        split = np.log2(at["granularity"])
        rest = self.alpha + self.gamma * np.square(split) + self.beta * split
        with np.errstate(over="ignore"):
            compute = np.power(10.0, (np.log(target) / log_hat - rest) / self.delta)
        if not (np.all(np.isfinite(compute)) and np.all(np.greater(compute, 0.0))):
            raise LawError(
                f"the compute for a leverage of {float(np.max(target)):.6g} does not fit a float; "
                "the target must lie nearer to the leverage of runs."
            )
        return plain(compute)

    def _exponent(self, at: Point) -> Number:
        split = np.log2(at["granularity"])
        compute = np.log10(at["compute"])
        return plain(
            self.alpha + self.delta * compute + self.gamma * np.square(split) + self.beta * split
        )
