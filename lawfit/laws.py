"""The laws: joint in sparsity and expert split, per split, and Chinchilla."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

import numpy as np
from pydantic import Field, InstanceOf, SerializeAsAny, model_validator
from pydantic.json_schema import SkipJsonSchema

from lawfit._coefficients import AboveZero, Exponent, Prefactor
from lawfit._values import LawError, LogPoint, Quantity, positive
from lawfit.base import Monomial, ScalingLaw


class _SparseLaw(ScalingLaw):
    """What equations (9) and (10) share: all but the power of G."""

    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "N_tot": "n_total: non-embedding parameters, all routed and shared experts [parameter]",
            "S": "1 - n_active / n_total, in non-embedding parameters [-]",
            "D": "tokens: training tokens [token]",
            "G": "expert_split: d_ff / d_expert, d_ff the width of the dense FFN replaced [-]",
        }
    )

    a: Prefactor
    alpha: AboveZero
    c: Prefactor
    lambda_: Exponent
    j: Prefactor
    delta: Exponent
    gamma: Exponent

    @model_validator(mode="before")
    @classmethod
    def _accept_lambda(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "lambda" in data and "lambda_" not in data:
            return {"lambda_" if key == "lambda" else key: data[key] for key in data}
        return data

    def _floor_terms(self, eta: float) -> tuple[Monomial, ...]:
        lam, delta = self.lambda_, self.delta
        return (
            Monomial("capacity", self.a, n_total=-self.alpha),
            Monomial("sparsity", self.c, n_total=lam, n_active=-lam),
            Monomial(
                "interaction",
                self.j,
                n_total=delta - self.gamma,
                n_active=-delta,
                expert_split=-eta,
            ),
            Monomial("constant", self.e),
        )


class JointLaw(_SparseLaw):
    """Loss in total parameters, sparsity, tokens and expert split, in one law.

    Equation (10) of arXiv 2608.10605::

        L = a/N_tot^alpha + b/D^beta + c/(1-S)^lambda
            + j/((1-S)^delta N_tot^gamma G^eta) + e            [nats/token]

    with ``S = 1 - N_act/N_tot`` and ``G = d_ff/d_expert``. ``N_tot`` counts
    non-embedding parameters with all E routed experts and the shared one;
    ``N_act`` the same with K routed experts.

    Attributes
    ----------
    a, c, j
        Prefactors of capacity, sparsity floor and interaction, at least 0.
    alpha
        Exponent of capacity [-], above 0.
    lambda_, delta, gamma, eta
        Exponents [-] of either sign, because published fits of the form have
        ``lambda < 0``. The key "lambda" is accepted on input.
    """

    equation: ClassVar[str] = (
        "L = a/N_tot^alpha + b/D^beta + c/(1-S)^lambda + j/((1-S)^delta N_tot^gamma G^eta) + e"
    )

    kind: Literal["joint"] = "joint"
    eta: Exponent

    @property
    def floor_terms(self) -> tuple[Monomial, ...]:
        """Capacity, sparsity floor, interaction and constant [nats/token]."""
        return self._floor_terms(eta=self.eta)

    def at_split(self, expert_split: float) -> "PerSplitLaw":
        """Return the law at one expert split, with ``G^-eta`` folded into ``j``.

        Parameters
        ----------
        expert_split
            Expert split factor [-].

        Returns
        -------
        PerSplitLaw
            The same loss at that split; ranges and source stay with it.

        Raises
        ------
        LawError
            If ``expert_split`` is not finite and above 0.
        """
        split = float(positive("expert_split", expert_split))
        return PerSplitLaw(
            expert_split=split,
            a=self.a,
            alpha=self.alpha,
            b=self.b,
            beta=self.beta,
            c=self.c,
            lambda_=self.lambda_,
            j=self.j * split**-self.eta,
            delta=self.delta,
            gamma=self.gamma,
            e=self.e,
            source=f"{self.source}, at expert split {split:g}",
            convention=self.convention,
            valid_range=self.valid_range,
            shape_range=self.shape_range,
        )


class PerSplitLaw(_SparseLaw):
    """Loss in total parameters, sparsity and tokens, at one expert split.

    Equation (9) of arXiv 2608.10605::

        L = a/N_tot^alpha + b/D^beta + c/(1-S)^lambda
            + j/((1-S)^delta N_tot^gamma) + e                  [nats/token]

    The paper fits it for each ``G`` in turn and prints no coefficients. Symbols
    are those of `JointLaw`. Any other ``expert_split`` is an error, because the
    coefficients drift with ``G``.

    Attributes
    ----------
    expert_split
        The expert split factor at which the law holds [-].
    a, c, j, alpha, lambda_, delta, gamma
        As in `JointLaw`.
    """

    equation: ClassVar[str] = (
        "L = a/N_tot^alpha + b/D^beta + c/(1-S)^lambda + j/((1-S)^delta N_tot^gamma) + e"
    )

    kind: Literal["per_split"] = "per_split"
    expert_split: AboveZero

    @property
    def floor_terms(self) -> tuple[Monomial, ...]:
        """Capacity, sparsity floor, interaction and constant [nats/token]."""
        return self._floor_terms(eta=0.0)

    def _logs(
        self,
        *,
        n_total: Quantity,
        n_active: Quantity,
        tokens: Quantity = 1.0,
        expert_split: Quantity,
    ) -> LogPoint:
        logs = super()._logs(
            n_total=n_total, n_active=n_active, tokens=tokens, expert_split=expert_split
        )
        other = np.ravel(expert_split)[np.ravel(expert_split) != self.expert_split]
        if other.size:
            raise LawError(
                f"expert_split is {other[0]:.6g}, but this law holds at one expert split only; "
                f"the nearest legal value is {self.expert_split:.6g}."
            )
        return logs


class ChinchillaLaw(ScalingLaw):
    """Loss of a dense model in parameters and tokens.

    Equation (2) of Hoffmann et al., arXiv 2203.15556::

        L = E + A/N^alpha + B/D^beta                           [nats/token]

    ``N`` is ``n_active``: a dense model has only one count, and the active one
    is that which sets the compute ``6 N D``. So ``n_total`` and
    ``expert_split`` are checked and then ignored, and a sparse model gets the
    loss of a dense one of its active size. The published fits count embeddings
    in ``N``; at the non-embedding counts of the sparse laws, which are smaller,
    the loss reads high, most of all for small models.

    Attributes
    ----------
    a
        ``A``, prefactor of capacity, at least 0.
    alpha
        Exponent of capacity [-], above 0.
    b, beta, e
        ``B``, ``beta`` and ``E``, as in `ScalingLaw`.
    """

    equation: ClassVar[str] = "L = E + A/N^alpha + B/D^beta"
    variables: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "N": "n_active: parameters of a dense model, with embeddings [parameter]",
            "D": "tokens: training tokens [token]",
        }
    )

    kind: Literal["chinchilla"] = "chinchilla"
    a: Prefactor
    alpha: AboveZero

    @property
    def floor_terms(self) -> tuple[Monomial, ...]:
        """Capacity and constant [nats/token]."""
        return (
            Monomial("capacity", self.a, n_active=-self.alpha),
            Monomial("constant", self.e),
        )


AnyLaw: TypeAlias = Annotated[
    JointLaw | PerSplitLaw | ChinchillaLaw,
    Field(discriminator="kind"),
]
"""Any law as a field of another pydantic model, told apart by ``kind``."""

LawValue: TypeAlias = AnyLaw | SkipJsonSchema[SerializeAsAny[InstanceOf[ScalingLaw]]]
"""The same, or a value of a class of the user's own, which no document is read into."""


def kind_of(law: ScalingLaw) -> str:
    """Return the ``kind`` of a law, or the name of its class if that is the user's own."""
    return str(getattr(law, "kind", type(law).__name__))
