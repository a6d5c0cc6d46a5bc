"""The shape of a decoder-only transformer, dense or sparse: parameters and FLOPs by convention.

A layer is attention (grouped-query, no biases) and a feed-forward block. The first
``first_k_dense`` layers have a dense block of width ``d_ff``; every later one, if the model has
experts, a router, ``n_experts`` experts of width ``d_expert`` of which ``top_k`` work on a token,
and a shared expert of width ``d_shared`` that works on every token.
"""

from __future__ import annotations

import json
from enum import StrEnum
from functools import cached_property
from typing import Annotated, NamedTuple, Self

from pydantic import ConfigDict, Field, model_validator

from perfmodel._integers import nearest_divisor
from perfmodel.frozen import Frozen


class ParameterConvention(StrEnum):
    """Which matrices a parameter count includes.

    The router is a matrix of the layer and is always counted; norms are counted; an attention
    gate is not modelled. A tied head is the embedding, stored once and used twice.
    """

    WITH_EMBEDDING = "with_embedding"  # input embedding and head
    WITHOUT_EMBEDDING = "without_embedding"  # head only
    WITHOUT_EMBEDDING_AND_HEAD = "without_embedding_and_head"  # neither: the scaling law's N


class MfuConvention(StrEnum):
    """What the numerator of MFU counts for a token: 6 N_act, with N_act under one convention."""

    SIX_N_NONEMBEDDING = "6n-nonembedding"
    SIX_N_HEAD = "6n-head"
    SIX_N_EMBEDDING = "6n-embedding"

    @property
    def parameters(self) -> ParameterConvention:
        """The parameter convention behind the numerator."""
        return {
            MfuConvention.SIX_N_NONEMBEDDING: ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD,
            MfuConvention.SIX_N_HEAD: ParameterConvention.WITHOUT_EMBEDDING,
            MfuConvention.SIX_N_EMBEDDING: ParameterConvention.WITH_EMBEDDING,
        }[self]


class ArchitectureDims(NamedTuple):
    """The sizes of an architecture as floats, in the form that the formulas take."""

    n_layers: float
    first_k_dense: float
    d_model: float
    n_heads: float
    n_kv_heads: float
    head_dim: float
    d_ff: float
    n_experts: float
    top_k: float
    d_expert: float
    d_shared: float
    vocab_size: float
    ffn_matrices: float  # 3 with a gated unit, 2 without
    tied_embeddings: float  # 1 if the head is the embedding


MAX_SIZE = 2**30
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Optional0 = Annotated[int, Field(ge=0, le=MAX_SIZE)]


class Architecture(Frozen):
    """A transformer's dimensions.

    Raises
    ------
    pydantic.ValidationError
        An unknown field, a size that is not a positive integer, or sizes that contradict each
        other (``top_k`` above ``n_experts``, experts without a width).
    """

    model_config = ConfigDict(strict=True)

    name: str = "custom"
    n_layers: Size
    d_model: Size
    n_heads: Size
    n_kv_heads: Size
    head_dim: Size
    d_ff: Optional0 = 0
    vocab_size: Size
    n_experts: Optional0 = 0
    top_k: Optional0 = 0
    d_expert: Optional0 = 0
    d_shared: Optional0 = 0
    first_k_dense: Optional0 = 0
    gated: bool = True
    tied_embeddings: bool = False

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.n_kv_heads > self.n_heads or self.n_heads % self.n_kv_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} must divide n_heads={self.n_heads}; nearest: "
                f"{nearest_divisor(self.n_heads, self.n_kv_heads)}"
            )
        if self.n_experts:
            if not 1 <= self.top_k <= self.n_experts:
                raise ValueError(
                    f"top_k={self.top_k} must be from 1 to n_experts={self.n_experts}; "
                    f"nearest: {min(max(self.top_k, 1), self.n_experts)}"
                )
            if not self.d_expert:
                raise ValueError(
                    f"d_expert=0 must be at least 1 in a model with n_experts={self.n_experts}"
                )
        elif self.top_k or self.d_expert or self.d_shared:
            field = next(f for f in ("top_k", "d_expert", "d_shared") if getattr(self, f))
            raise ValueError(
                f"{field}={getattr(self, field)} must be 0 in a model with n_experts=0"
            )
        if self.first_k_dense > self.n_layers:
            raise ValueError(
                f"first_k_dense={self.first_k_dense} must be at most n_layers={self.n_layers}; "
                f"nearest: {self.n_layers}"
            )
        if self.n_dense_layers and not self.d_ff:
            raise ValueError(
                f"d_ff=0 must be at least 1 in a model with {self.n_dense_layers} dense layers"
            )
        return self

    @property
    def n_dense_layers(self) -> int:
        """Layers with a dense feed-forward block."""
        return self.first_k_dense if self.n_experts else self.n_layers

    @property
    def n_moe_layers(self) -> int:
        """Layers with experts."""
        return self.n_layers - self.n_dense_layers

    @property
    def expert_split(self) -> float | None:
        """G = d_ff / d_expert [-]; None for a dense model or where no d_ff is given."""
        return self.d_ff / self.d_expert if self.d_expert and self.d_ff else None

    @property
    def ffn_matrices(self) -> int:
        """Matrices of a feed-forward block: 3 with a gated unit (SwiGLU), else 2."""
        return 3 if self.gated else 2

    @cached_property
    def _attention(self) -> int:
        return 2 * self.d_model * self.head_dim * (self.n_heads + self.n_kv_heads)

    def _count(self, experts: int, convention: ParameterConvention) -> int:
        d = self.d_model
        expert = self.ffn_matrices * d * self.d_expert
        shared = self.ffn_matrices * d * self.d_shared
        count = self.n_layers * (self._attention + 2 * d) + d
        count += self.n_dense_layers * self.ffn_matrices * d * self.d_ff
        count += self.n_moe_layers * (experts * expert + shared + d * self.n_experts)
        matrix = self.vocab_size * d
        if convention is ParameterConvention.WITHOUT_EMBEDDING:
            count += matrix
        elif convention is ParameterConvention.WITH_EMBEDDING:
            count += matrix if self.tied_embeddings else 2 * matrix
        return count

    def n_total(
        self, convention: ParameterConvention = ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD
    ) -> int:
        """Return the stored parameters, N_tot [-].

        Without embedding and head this is the count of arXiv 2608.10605:
        ``L(2 d^2 + 256 d n_kv + 2d) + 3 d d_ff + (L-1)[(E+1) 3 d d_expert + d E] + d`` on its
        ladder (heads of 128, first layer dense, one shared expert).
        """
        return self._count(self.n_experts, convention)

    def n_active(
        self, convention: ParameterConvention = ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD
    ) -> int:
        """Return the parameters that work on one token, N_act [-]: K experts in place of E."""
        return self._count(self.top_k, convention)

    @property
    def sparsity(self) -> float:
        """S = 1 - N_act / N_tot, without embedding and head [-]."""
        return 1.0 - self.n_active() / self.n_total()

    def flops_per_token(self, convention: MfuConvention = MfuConvention.SIX_N_NONEMBEDDING) -> int:
        """Return the model FLOPs of one token, forward and backward, ``6 N_act`` [FLOP]."""
        return 6 * self.n_active(convention.parameters)

    @cached_property
    def dims(self) -> ArchitectureDims:
        """The sizes as the formulas take them."""
        return ArchitectureDims(
            n_layers=float(self.n_layers),
            first_k_dense=float(self.n_dense_layers),
            d_model=float(self.d_model),
            n_heads=float(self.n_heads),
            n_kv_heads=float(self.n_kv_heads),
            head_dim=float(self.head_dim),
            d_ff=float(self.d_ff),
            n_experts=float(self.n_experts),
            top_k=float(self.top_k),
            d_expert=float(self.d_expert),
            d_shared=float(self.d_shared),
            vocab_size=float(self.vocab_size),
            ffn_matrices=float(self.ffn_matrices),
            tied_embeddings=float(self.tied_embeddings),
        )

    def rule_variables(self) -> dict[str, int]:
        """Return the sizes that the legality rules of a plan refer to."""
        return {
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "d_ff": self.d_ff,
            "n_experts": self.n_experts,
            "d_expert": self.d_expert,
            "d_shared": self.d_shared,
            "first_k_dense": self.first_k_dense,
        }

    def summary(self) -> dict[str, object]:
        """Return the fields and the derived counts, as they appear in results."""
        fields: dict[str, object] = json.loads(self.model_dump_json())
        return fields | {
            "expert_split": self.expert_split,
            "n_active": self.n_active(),
            "n_total": self.n_total(),
            "sparsity": self.sparsity,
            "parameter_convention": ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD.value,
        }
