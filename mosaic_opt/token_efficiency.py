r"""What a token is worth at a batch size: the critical batch, and the tokens that a law sees.

The empirical model of McCandlish et al. 2018 (arXiv 1812.06162): to reach one loss, optimizer steps
S and tokens E trade as ``(S / S_min - 1)(E / E_min - 1) = 1``. With ``E = B S`` and
``B_crit = E_min / S_min`` the tokens are ``E = E_min (1 + B / B_crit)``: a run at the critical
batch needs twice the least.

A law is fitted to runs at some batch ``B_ref``, whose tokens bought no more than that either. A run
of D tokens at batch B so reaches the loss that the law has at D_eff tokens, with

    D = D_eff (1 + B / B_crit) / (1 + B_ref / B_crit),    B_crit = B_crit(D_eff)

``B_ref = 0`` says that the law's tokens are the least ones, E_min. At ``B = B_ref`` a token is a
token. Batches are in tokens. ``B_crit`` belongs to the loss that is reached, so it is a function of
D_eff. D_eff rises with D as long as B_crit rises slower than D_eff itself, which the fields see to.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from math import exp, log
from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from perfmodel.frozen import Frozen
from perfmodel.sources import Source

_LOWEST, _HIGHEST = -256.0, 256.0  # logarithms of tokens between which D_eff is sought
_ROUNDS = 200

BatchTokens = Annotated[float, Field(gt=0.0, le=1e30, allow_inf_nan=False, strict=True)]
Reference = Annotated[float, Field(ge=0.0, le=1e30, allow_inf_nan=False, strict=True)]
LossOf = Callable[[float], float]


def _exp(power: float) -> float:
    """Return a power of e that is neither 0 nor infinite."""
    return exp(min(max(power, -600.0), 600.0))


class TokenEfficiency(Frozen):
    """What the tokens of a run are worth.

    Attributes
    ----------
    tokens, tokens_effective : float
        Tokens trained on, D, and what they count as under the law, D_eff [token].
    batch_tokens, critical_batch_tokens, reference_batch_tokens : float
        Batch of the run, critical batch at the loss reached, batch of the law's runs [token].
    source : Source
        What the critical batch rests on; ``origin`` says where it comes from.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    tokens: float
    tokens_effective: float
    batch_tokens: float
    critical_batch_tokens: float
    reference_batch_tokens: float
    source: Source
    origin: str


class _CriticalBatch(Frozen):
    batch_tokens: BatchTokens
    reference_batch_tokens: Reference
    source: Source = Source.ASSUMED
    origin: Annotated[str, Field(max_length=400)] = ""

    @abstractmethod
    def at(self, tokens_effective: float, loss_of: LossOf) -> float:
        """Return the critical batch where the law's tokens are so many [token]."""

    def tokens_for(self, tokens_effective: float, batch_tokens: float, loss_of: LossOf) -> float:
        """Return the tokens that count as ``tokens_effective`` under the law, D(D_eff) [token]."""
        critical = self.at(tokens_effective, loss_of)
        scale = (critical + batch_tokens) / (critical + self.reference_batch_tokens)
        return tokens_effective * scale

    def effective(self, tokens: float, batch_tokens: float, loss_of: LossOf) -> float:
        """Return what tokens count as under the law, D_eff(D) [token].

        Bisection of ``log D(D_eff) = log D`` over bounds that no argument moves, so that more
        tokens never count as fewer, not even by a rounding.

        Parameters
        ----------
        tokens : float
            Tokens trained on, D, above 0.
        batch_tokens : float
            Tokens of an optimizer step, B.
        loss_of : callable
            The law's loss of the model in D_eff [nats/token].
        """
        if batch_tokens == self.reference_batch_tokens:
            return tokens
        low, high, target = _LOWEST, _HIGHEST, log(tokens)
        for _ in range(_ROUNDS):
            middle = 0.5 * (low + high)
            if middle in (low, high):
                break
            critical = self.at(exp(middle), loss_of)
            scale = (critical + batch_tokens) / (critical + self.reference_batch_tokens)
            low, high = (middle, high) if middle + log(scale) <= target else (low, middle)
        return exp(low)

    def efficiency(self, tokens: float, batch_tokens: float, loss_of: LossOf) -> TokenEfficiency:
        """Return what the tokens of a run are worth, with the critical batch that says so."""
        effective = self.effective(tokens, batch_tokens, loss_of)
        return TokenEfficiency(
            tokens=tokens,
            tokens_effective=effective,
            batch_tokens=batch_tokens,
            critical_batch_tokens=self.at(effective, loss_of),
            reference_batch_tokens=self.reference_batch_tokens,
            source=self.source,
            origin=self.origin,
        )


class ConstantCriticalBatch(_CriticalBatch):
    """One critical batch for every run.

    Attributes
    ----------
    batch_tokens : float
        B_crit [token].
    reference_batch_tokens : float
        B_ref, the batch of the law's runs [token]; 0 for a law in the least tokens.
    source, origin
        What the critical batch rests on (ASSUMED unless given), and where it comes from.
    """

    kind: Literal["constant"]

    def at(self, tokens_effective: float, loss_of: LossOf) -> float:
        """Return the critical batch, the same everywhere [token]."""
        return self.batch_tokens

    def share(self, batch_tokens: float) -> float:
        """Return D_eff / D at a batch [-]."""
        critical = self.batch_tokens
        return (critical + self.reference_batch_tokens) / (critical + batch_tokens)

    def effective(self, tokens: float, batch_tokens: float, loss_of: LossOf) -> float:
        """Return what tokens count as under the law, in closed form [token]."""
        return tokens * self.share(batch_tokens)


class TokensCriticalBatch(_CriticalBatch):
    """A critical batch that grows with tokens: ``batch_tokens (D_eff / at_tokens)^exponent``.

    Zhang et al. (arXiv 2410.21676) and Bergsma et al. (arXiv 2505.13738) find exponents of 0.46 to
    0.47, and next to no dependence on the size of the model.

    Attributes
    ----------
    batch_tokens, at_tokens : float
        B_crit where the law's tokens are ``at_tokens`` [token].
    exponent : float
        From 0 to 0.9 [-].
    reference_batch_tokens, source, origin
        As in `ConstantCriticalBatch`.
    """

    kind: Literal["tokens"]
    at_tokens: BatchTokens
    exponent: Annotated[float, Field(ge=0.0, le=0.9, allow_inf_nan=False, strict=True)]

    def at(self, tokens_effective: float, loss_of: LossOf) -> float:
        """Return the critical batch where the law's tokens are so many [token]."""
        return self.batch_tokens * _exp(self.exponent * log(tokens_effective / self.at_tokens))


class LossCriticalBatch(_CriticalBatch):
    """A critical batch that grows as the loss falls: ``batch_tokens (L / at_loss)^-exponent``.

    Kaplan et al. (arXiv 2001.08361), Section 5.1: 2e8 tokens at a loss of 1 nat, exponent 1 / 0.21.

    Attributes
    ----------
    batch_tokens, at_loss : float
        B_crit [token] at a loss [nats/token].
    exponent : float
        At least 0; below 1 / beta of the law [-].
    reference_batch_tokens, source, origin
        As in `ConstantCriticalBatch`.
    """

    kind: Literal["loss"]
    at_loss: Annotated[float, Field(ge=1e-3, le=100.0, allow_inf_nan=False, strict=True)]
    exponent: Annotated[float, Field(ge=0.0, le=50.0, allow_inf_nan=False, strict=True)]

    def at(self, tokens_effective: float, loss_of: LossOf) -> float:
        """Return the critical batch at the loss that so many of the law's tokens reach [token]."""
        return self.batch_tokens * exp(
            -self.exponent * log(loss_of(tokens_effective) / self.at_loss)
        )


CriticalBatch = Annotated[
    ConstantCriticalBatch | TokensCriticalBatch | LossCriticalBatch, Field(discriminator="kind")
]
