"""Laws of dense models in variables of their own: Kaplan, over-training, repeated tokens."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, Literal

import numpy as np

from lawfit._coefficients import AboveZero, Prefactor
from lawfit._values import LawError, Quantity, plain, positive
from lawfit.general import (
    GeneralLaw,
    Number,
    Point,
    PosynomialLaw,
    PowerTerm,
    finite_solution,
    gap_above,
    power_of_gap,
)
from lawfit.laws import ChinchillaLaw


class KaplanLaw(GeneralLaw):
    """Loss of a dense model in parameters and tokens, without a constant term.

    Equation (1.5) of Kaplan et al., arXiv 2001.08361::

        L = [(N_c/N)^(alpha_N/alpha_D) + D_c/D]^alpha_D        [nats/token]

    ``N`` leaves out embeddings and positions, and ``D`` is the number of tokens in the data set,
    trained on until the loss of held-out text stops falling.

    Attributes
    ----------
    n_c
        ``N_c``, scale of the parameters [parameter].
    d_c
        ``D_c``, scale of the tokens [token].
    alpha_n, alpha_d
        Exponents of either limit [-], above 0.
    """

    equation: ClassVar[str] = "L = [(N_c/N)^(alpha_N/alpha_D) + D_c/D]^alpha_D"
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "n": "N: parameters of a dense model, without embeddings and positions [parameter]",
            "tokens": "D: tokens in the data set [token]",
        }
    )
    convexity: ClassVar[str] = (
        "The law and its logarithm are convex in (log N, log D): log L is a positive multiple of "
        "the log-sum-exp of two affine functions."
    )

    kind: Literal["kaplan"] = "kaplan"
    n_c: AboveZero
    d_c: AboveZero
    alpha_n: AboveZero
    alpha_d: AboveZero

    def value_at(self, at: Point) -> Number:
        """Return the loss [nats/token]."""
        capacity, data = self._parts(at)
        return plain(np.exp(self.alpha_d * np.logaddexp(capacity, data)))

    def slopes_at(self, at: Point) -> Point:
        """Return the slopes in ``log N`` and ``log D`` [nats/token]."""
        capacity, data = self._parts(at)
        loss = self.value_at(at)
        share = np.exp(capacity - np.logaddexp(capacity, data))
        return {
            "n": plain(-self.alpha_n * loss * share),
            "tokens": plain(-self.alpha_d * loss * np.exp(data - np.logaddexp(capacity, data))),
        }

    def tokens_for(self, loss: Quantity, *, n: Quantity) -> Number:
        """Invert the law: ``D = D_c / (L^(1/alpha_D) - (N_c/N)^(alpha_N/alpha_D))``.

        Parameters
        ----------
        loss
            The target [nats/token].
        n
            Parameters without embeddings [parameter].

        Returns
        -------
        float or ndarray
            Tokens [token].

        Raises
        ------
        LawError
            If infinitely many tokens do not reach the target, or they overflow a float.
        """
        size = self._checked({"n": n}, without=("tokens",))["n"]
        target = positive("loss", loss)
        log_floor = self.alpha_n * (np.log(self.n_c) - np.log(size))
        gap_above(target, plain(np.exp(log_floor)), "tokens")
        with np.errstate(over="ignore", divide="ignore"):
            log_gap = np.log(np.expm1((np.log(target) - log_floor) / self.alpha_d))
            tokens = np.exp(np.log(self.d_c) - log_floor / self.alpha_d - log_gap)
        return finite_solution(plain(tokens), "tokens")

    def _parts(self, at: Point) -> tuple[Number, Number]:
        capacity = self.alpha_n / self.alpha_d * (np.log(self.n_c) - np.log(at["n"]))
        return plain(capacity), plain(np.log(self.d_c) - np.log(at["tokens"]))


class GadreLaw(PosynomialLaw):
    """Loss of a dense model in compute and over-training.

    Equation (4) of Gadre et al., arXiv 2403.08540::

        L = E + (a M^eta + b M^-eta) C^-eta                    [nats/token]

    with ``C = 6 N D`` and ``M = D/N``. It is the law of Chinchilla with one exponent for size
    and tokens, ``alpha = beta = 2 eta``, in other variables: see `as_chinchilla`.

    Attributes
    ----------
    a, b
        Prefactors of size and of tokens, at least 0.
    eta
        Exponent of compute [-], above 0.
    e
        ``E``, the constant term [nats/token].
    """

    equation: ClassVar[str] = "L = E + (a M^eta + b M^-eta) C^-eta"
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "compute": "C: 6 N D, with N all parameters of a dense model [FLOP]",
            "tokens_per_parameter": "M: D / N, tokens over the same parameters [token/parameter]",
        }
    )

    kind: Literal["gadre"] = "gadre"
    a: Prefactor
    b: AboveZero
    eta: AboveZero
    e: Prefactor

    @property
    def terms(self) -> tuple[PowerTerm, ...]:
        """Capacity, data and constant [nats/token]."""
        eta = self.eta
        return (
            PowerTerm("capacity", self.a, {"tokens_per_parameter": eta, "compute": -eta}),
            PowerTerm("data", self.b, {"tokens_per_parameter": -eta, "compute": -eta}),
            PowerTerm("constant", self.e, {}),
        )

    def as_chinchilla(self) -> ChinchillaLaw:
        """Return the same law in parameters and tokens.

        ``M/C = 1/(6 N^2)`` and ``1/(M C) = 1/(6 D^2)``, so ``A = a 6^-eta``, ``B = b 6^-eta``
        and ``alpha = beta = 2 eta``. Its ``n_active`` is the ``N`` of this law.
        """
        fold = 6.0**-self.eta
        return ChinchillaLaw(
            a=self.a * fold,
            b=self.b * fold,
            e=self.e,
            alpha=2.0 * self.eta,
            beta=2.0 * self.eta,
            source=f"{self.source}, in parameters and tokens",
        )

    def compute_for(self, loss: Quantity, *, tokens_per_parameter: Quantity) -> Number:
        """Invert the law: ``C = ((a M^eta + b M^-eta) / (L - E))^(1/eta)``.

        Parameters
        ----------
        loss
            The target [nats/token].
        tokens_per_parameter
            ``M`` [token/parameter].

        Returns
        -------
        float or ndarray
            Compute [FLOP].

        Raises
        ------
        LawError
            If the target is not above ``E``, or the compute overflows a float.
        """
        given = {"tokens_per_parameter": tokens_per_parameter}
        ratio = self._checked(given, without=("compute",))["tokens_per_parameter"]
        prefactor = self.a * np.power(ratio, self.eta) + self.b * np.power(ratio, -self.eta)
        return power_of_gap(loss, self.e, plain(prefactor), self.eta, "compute")

    def tokens_for(self, loss: Quantity, *, n: Quantity) -> Number:
        """Invert the law at a model: the tokens that `as_chinchilla` needs for a loss.

        Parameters
        ----------
        loss
            The target [nats/token].
        n
            ``N``, all parameters of the dense model [parameter].

        Returns
        -------
        float or ndarray
            Tokens [token].

        Raises
        ------
        LawError
            As `lawfit.ScalingLaw.tokens_for`.
        """
        return self.as_chinchilla().tokens_for(loss, n_total=n, n_active=n, expert_split=1.0)


class DataConstrainedLaw(GeneralLaw):
    """Loss of a dense model that sees some tokens more than once.

    Muennighoff et al., arXiv 2305.16264::

        L = A/N'^alpha + B/D'^beta + E                         [nats/token]
        D' = U_D + U_D R_D* (1 - exp(-R_D/R_D*)),    R_D = D/U_D - 1
        N' = U_N + U_N R_N* (1 - exp(-R_N/R_N*)),    R_N = N/U_N - 1
        U_N = min(N, N_opt(U_D)),   N_opt(D) = (alpha A/(beta B))^(1/alpha) D^(beta/alpha)

    ``U_D`` are the unique tokens and ``R_D`` the repetitions after the first pass: a repeated
    token is worth less than a new one, and parameters beyond those that ``U_D`` tokens call for
    are worth less than the others. ``N_opt`` is the size for which the Chinchilla law with the
    same coefficients takes ``D`` tokens at its compute optimum. Where nothing is repeated
    (``D = U_D``) and ``N`` is at most ``N_opt``, the law is that of Chinchilla.

    Attributes
    ----------
    a, alpha, b, beta, e
        As in `lawfit.ChinchillaLaw`; ``a`` above 0, since ``N_opt`` needs it.
    r_d
        ``R_D*``, how many repetitions a token takes to lose its worth [-], above 0.
    r_n
        ``R_N*``, the same for excess parameters [-], above 0.
    """

    equation: ClassVar[str] = (
        "L = A/N'^alpha + B/D'^beta + E, D' = U_D (1 + R_D* (1 - exp(-R_D/R_D*))), "
        "R_D = D/U_D - 1, and N' alike with U_N = min(N, N_opt(U_D))"
    )
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "n": "N: parameters of a dense model, as its Chinchilla law counts them [parameter]",
            "tokens": "D: training tokens, each repetition counted [token]",
            "unique_tokens": "U_D: different tokens among them, at most D [token]",
        }
    )
    convexity: ClassVar[str] = (
        "Convex in (log N, log D) at fixed U_D: the elasticities of N' in N and of D' in D fall, "
        "so each power is the exponential of a convex function. No claim in log U_D."
    )

    kind: Literal["data_constrained"] = "data_constrained"
    a: AboveZero
    alpha: AboveZero
    b: AboveZero
    beta: AboveZero
    e: Prefactor
    r_d: AboveZero
    r_n: AboveZero

    def value_at(self, at: Point) -> Number:
        """Return the loss [nats/token]."""
        size, data = self._effective(at)[0], self._effective_tokens(at)[0]
        return plain(
            self.a * np.power(size, -self.alpha) + self.b * np.power(data, -self.beta) + self.e
        )

    def slopes_at(self, at: Point) -> Point:
        """Return the slopes in ``log N``, ``log D`` and ``log U_D`` [nats/token].

        They are continuous at ``N = N_opt(U_D)``, where a marginal parameter is worth as much
        on either side.
        """
        size, by_n, by_fit = self._effective(at)
        data, by_tokens, by_unique = self._effective_tokens(at)
        capacity = -self.alpha * self.a * np.power(size, -self.alpha)
        tokens = -self.beta * self.b * np.power(data, -self.beta)
        return {
            "n": plain(capacity * by_n),
            "tokens": plain(tokens * by_tokens),
            "unique_tokens": plain(
                capacity * by_fit * (self.beta / self.alpha) + tokens * by_unique
            ),
        }

    def optimal_size(self, unique_tokens: Quantity) -> Number:
        """Return ``N_opt``, the size for which these tokens are the compute optimum [parameter].

        Parameters
        ----------
        unique_tokens
            ``U_D`` [token].
        """
        unique = positive("unique_tokens", unique_tokens)
        log_ratio = np.log(self.alpha * self.a) - np.log(self.beta * self.b)
        return plain(np.exp((log_ratio + self.beta * np.log(unique)) / self.alpha))

    def tokens_for(self, loss: Quantity, *, n: Quantity, unique_tokens: Quantity) -> Number:
        """Invert the law in ``D`` at given unique tokens.

        ``D' = (B / (L - E - A/N'^alpha))^(1/beta)``, then
        ``D = U_D (1 - R_D* ln(1 - (D'/U_D - 1)/R_D*))``.

        Parameters
        ----------
        loss
            The target [nats/token].
        n
            Parameters [parameter].
        unique_tokens
            ``U_D``, all of which are seen at least once [token].

        Returns
        -------
        float or ndarray
            Training tokens, at least ``unique_tokens`` [token].

        Raises
        ------
        LawError
            If no number of repetitions reaches the target, or if one pass over the unique
            tokens goes below it.
        """
        given = {"n": n, "unique_tokens": unique_tokens}
        at = self._checked(given, without=("tokens",))
        unique = at["unique_tokens"]
        start = plain(self.a * np.power(self._effective(at)[0], -self.alpha) + self.e)
        most = plain(start + self.b * np.power(unique * (1.0 + self.r_d), -self.beta))
        target = positive("loss", loss)
        gap_above(target, most, "number of repetitions")
        data = power_of_gap(target, start, self.b, self.beta, "tokens")
        excess = np.divide(data, unique) - 1.0
        if np.any(excess < -1e-9):
            once = plain(start + self.b * np.power(unique, -self.beta))
            raise LawError(
                f"loss is {float(np.max(target)):.6g} nats/token, but one pass over the unique "
                f"tokens reaches {float(np.min(once)):.6g}, which is lower; take fewer unique "
                "tokens."
            )
        left = np.log1p(-np.maximum(excess, 0.0) / self.r_d)
        return finite_solution(plain(unique * (1.0 - self.r_d * left)), "tokens")

    def _checked(
        self, point: Mapping[str, Quantity], without: tuple[str, ...] = ()
    ) -> dict[str, Number]:
        at = super()._checked(point, without)
        if "tokens" in at:
            excess = np.greater(at["unique_tokens"], at["tokens"])
            if np.any(excess):
                unique, tokens = (
                    float(np.broadcast_to(at[name], np.shape(excess))[excess][0])
                    for name in ("unique_tokens", "tokens")
                )
                raise LawError(
                    f"unique_tokens is {unique:.6g} and tokens is {tokens:.6g}, but a run cannot "
                    f"see more different tokens than tokens; the nearest legal value is "
                    f"{tokens:.6g}."
                )
        return at

    def _effective(self, at: Point) -> tuple[Number, Number, Number]:
        """Return ``N'`` and its elasticities in ``N`` and ``U_N``, the latter 0 if it is ``N``."""
        fit = np.minimum(at["n"], self.optimal_size(at["unique_tokens"]))
        return _worth(at["n"], plain(fit), self.r_n)

    def _effective_tokens(self, at: Point) -> tuple[Number, Number, Number]:
        """Return ``D'`` and its elasticities in ``D`` and ``U_D``."""
        return _worth(at["tokens"], at["unique_tokens"], self.r_d)


def _worth(count: Number, unique: Number, decay: float) -> tuple[Number, Number, Number]:
    """Return ``x' = u (1 + r (1 - exp(-(x/u - 1)/r)))`` and its elasticities in ``x`` and ``u``.

    At ``x = u`` the elasticities are 1 and 0.
    """
    repeats = np.divide(count, unique) - 1.0
    faded = np.exp(-repeats / decay)
    gained = -decay * np.expm1(-repeats / decay)
    ratio = 1.0 + gained
    by_count = (1.0 + repeats) * faded / ratio
    return plain(unique * ratio), plain(by_count), plain(1.0 - by_count)
