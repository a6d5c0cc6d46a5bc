"""The shape of a decoder-only transformer, dense or sparse: parameters and FLOPs by convention.

A layer is attention (grouped-query, or latent) and a feed-forward block. The first
``first_k_dense`` layers have a dense block of width ``d_ff``; of the later ones, if the model has
experts, every ``moe_every``-th has a router, ``n_experts`` experts of width ``d_expert`` of which
``top_k`` work on a token, and a shared expert of width ``d_shared`` that works on every token.
"""

from __future__ import annotations

import json
from enum import StrEnum
from functools import cached_property
from typing import Self

from pydantic import ConfigDict, Field, model_validator

from perfmodel import flops, parameters
from perfmodel._integers import nearest_divisor
from perfmodel.dims import ArchitectureDims, dims_of
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import Frozen
from perfmodel.parts import (
    Biases,
    ExtraParameters,
    LatentAttention,
    Optional0,
    QkNorm,
    Size,
    SlidingWindow,
)


class ParameterConvention(StrEnum):
    """Which matrices a parameter count includes.

    The router is a matrix of the layer and is always counted; so are norms, biases (the head's
    too) and ``extra``. Learned positions belong to the embedding. A tied head is the embedding,
    stored once and used twice. Multi-token prediction is in none of them
    (:attr:`Architecture.mtp_parameters`).
    """

    WITH_EMBEDDING = "with_embedding"  # input embedding and head
    WITHOUT_EMBEDDING = "without_embedding"  # head only
    WITHOUT_EMBEDDING_AND_HEAD = "without_embedding_and_head"  # neither: the scaling law's N


class MfuConvention(StrEnum):
    """What the numerator of MFU counts for a token.

    6 N_act, with N_act under one parameter convention; or the matrix products of Megatron-LM's
    own count (:mod:`perfmodel.flops`), which depends on the sequence length.
    """

    SIX_N_NONEMBEDDING = "6n-nonembedding"
    SIX_N_HEAD = "6n-head"
    SIX_N_EMBEDDING = "6n-embedding"
    MEGATRON = "megatron"

    @property
    def parameters(self) -> ParameterConvention | None:
        """The parameter convention behind the numerator; None for Megatron's."""
        return {
            MfuConvention.SIX_N_NONEMBEDDING: ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD,
            MfuConvention.SIX_N_HEAD: ParameterConvention.WITHOUT_EMBEDDING,
            MfuConvention.SIX_N_EMBEDDING: ParameterConvention.WITH_EMBEDDING,
        }.get(self)


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
    moe_every: Size = 1
    latent: LatentAttention | None = Field(default=None, strict=False)
    window: SlidingWindow | None = Field(default=None, strict=False)
    biases: Biases = Field(default=Biases(), strict=False)
    qk_norm: QkNorm = "none"
    attention_sinks: bool = False
    shared_expert_gate: bool = False
    norms_per_layer: Size = 2
    learned_positions: Optional0 = 0
    mtp_layers: Optional0 = 0
    extra: ExtraParameters | None = Field(default=None, strict=False)

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
        else:
            self._without_experts()
        if self.first_k_dense > self.n_layers:
            raise ValueError(
                f"first_k_dense={self.first_k_dense} must be at most n_layers={self.n_layers}; "
                f"nearest: {self.n_layers}"
            )
        if self.n_dense_layers and not self.d_ff:
            raise ValueError(
                f"d_ff=0 must be at least 1 in a model with {self.n_dense_layers} dense layers"
            )
        self._attention_consistent()
        return self

    def _without_experts(self) -> None:
        for field in ("top_k", "d_expert", "d_shared"):
            if getattr(self, field):
                raise ValueError(
                    f"{field}={getattr(self, field)} must be 0 in a model with n_experts=0"
                )
        if self.moe_every != 1:
            raise ValueError(f"moe_every={self.moe_every} must be 1 in a model with n_experts=0")
        for bias in ("experts", "router"):
            if getattr(self.biases, bias):
                raise ValueError(f"biases.{bias}=true must be false in a model with n_experts=0")

    def _attention_consistent(self) -> None:
        if self.shared_expert_gate and not self.d_shared:
            raise ValueError("shared_expert_gate=true must be false in a model with d_shared=0")
        if self.window is not None:
            layers = self.window.fraction * self.n_layers
            if abs(layers - round(layers)) > 1e-6 or round(layers) < 1:
                raise ValueError(
                    f"window.fraction={self.window.fraction} must be a whole number of the "
                    f"n_layers={self.n_layers} layers; nearest: {max(1, round(layers))} of them"
                )
        if self.latent is None:
            return
        if self.n_kv_heads != self.n_heads:
            raise ValueError(
                f"n_kv_heads={self.n_kv_heads} must be n_heads={self.n_heads} in a model with "
                "latent attention, which unfolds keys and values for every head"
            )
        if self.head_dim != self.latent.qk_head_dim:
            raise ValueError(
                f"head_dim={self.head_dim} must be qk_nope_head_dim + qk_rope_head_dim="
                f"{self.latent.qk_head_dim} in a model with latent attention"
            )
        if self.qk_norm != "none" or self.biases.qkv:
            field = "biases.qkv=true" if self.biases.qkv else f"qk_norm={self.qk_norm!r}"
            raise ValueError(
                f"{field} is not modelled with latent attention, whose latent vectors have norms "
                "of their own"
            )

    @property
    def attention_kind(self) -> str:
        """``mla`` with latent attention, else ``gqa`` (multi-head where n_kv_heads = n_heads)."""
        return "gqa" if self.latent is None else "mla"

    def is_moe(self, layer: int) -> bool:
        """Say whether a layer, counted from 0, has experts.

        The last of every ``moe_every`` layers behind the leading dense ones (Llama 4's
        ``interleave_moe_layer_step``; Megatron's integer ``moe_layer_freq`` has the first).
        """
        behind = layer + 1 - self.first_k_dense
        return self.n_experts > 0 and behind > 0 and behind % self.moe_every == 0

    @property
    def n_dense_layers(self) -> int:
        """Layers with a dense feed-forward block."""
        if not self.n_experts:
            return self.n_layers
        return self.n_layers - (self.n_layers - self.first_k_dense) // self.moe_every

    @property
    def window_layers(self) -> int:
        """Layers whose attention has a window."""
        return 0 if self.window is None else round(self.window.fraction * self.n_layers)

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
    def _layers(self) -> tuple[int, int]:
        """Parameters of all layers: stored ones, those of one token."""
        return parameters.layers(self, self.n_experts), parameters.layers(self, self.top_k)

    def _count(self, layers: int, convention: ParameterConvention) -> int:
        count = layers + parameters.norm(self)
        count += self.vocab_size if self.biases.head else 0
        count += 0 if self.extra is None else self.extra.parameters
        matrix = self.vocab_size * self.d_model
        if convention == ParameterConvention.WITHOUT_EMBEDDING:
            count += matrix
        elif convention == ParameterConvention.WITH_EMBEDDING:
            count += matrix if self.tied_embeddings else 2 * matrix
            count += self.learned_positions * self.d_model
        return count

    def n_total(
        self, convention: ParameterConvention = ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD
    ) -> int:
        """Return the stored parameters, N_tot [-].

        Without embedding and head this is the count of arXiv 2608.10605:
        ``L(2 d^2 + 256 d n_kv + 2d) + 3 d d_ff + (L-1)[(E+1) 3 d d_expert + d E] + d`` on its
        ladder (heads of 128, first layer dense, one shared expert).
        """
        return self._count(self._layers[0], convention)

    def n_active(
        self, convention: ParameterConvention = ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD
    ) -> int:
        """Return the parameters that work on one token, N_act [-]: K experts in place of E."""
        return self._count(self._layers[1], convention)

    @property
    def sparsity(self) -> float:
        """S = 1 - N_act / N_tot, without embedding and head [-]."""
        return 1.0 - self.n_active() / self.n_total()

    @property
    def mtp_parameters(self) -> int:
        """Parameters of the multi-token prediction layers, which no other count includes [-].

        Each has a layer of the kind of the last one, a projection from 2d to d and three norms;
        it shares embedding and head with the model.
        """
        return self.mtp_layers * parameters.prediction_layer(self, self.n_experts)

    def flops_per_token(
        self,
        convention: MfuConvention | str = MfuConvention.SIX_N_NONEMBEDDING,
        seq_len: int | None = None,
    ) -> int:
        """Return the model FLOPs of one token, forward and backward [FLOP].

        Parameters
        ----------
        convention : MfuConvention or str
            ``6 N_act``, or ``megatron``: the matrix products (:mod:`perfmodel.flops`).
        seq_len : int, optional
            Tokens in a sequence; only ``megatron``, which counts attention, needs it.

        Raises
        ------
        PerfmodelError
            An unknown convention; ``megatron`` without a ``seq_len`` of at least 1.
        """
        if convention not in list(MfuConvention):
            raise PerfmodelError(
                f"convention={convention!r} must be one of {', '.join(MfuConvention)}."
            )
        counted = MfuConvention(convention).parameters
        if counted is not None:
            return 6 * self.n_active(counted)
        if seq_len is None or seq_len < 1:
            raise PerfmodelError(
                f"seq_len={seq_len} must be at least 1: FLOPs under the convention megatron count "
                "attention, which depends on it."
            )
        return flops.megatron(self, seq_len)

    @cached_property
    def dims(self) -> ArchitectureDims:
        """The sizes as the formulas take them."""
        return dims_of(self)

    def rule_variables(self) -> dict[str, int]:
        """Return the sizes that the legality rules of a plan refer to.

        ``first_k_dense`` stands for every layer with a dense block, leading or not.
        """
        return {
            "n_layers": self.n_layers,
            "n_heads": self.n_heads,
            "n_kv_heads": self.n_kv_heads,
            "d_ff": self.d_ff,
            "n_experts": self.n_experts,
            "d_expert": self.d_expert,
            "d_shared": self.d_shared,
            "first_k_dense": self.first_k_dense if self.moe_every == 1 else self.n_dense_layers,
            "mtp_layers": self.mtp_layers,
            "latent": 0 if self.latent is None else self.latent.kv_lora_rank,
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
