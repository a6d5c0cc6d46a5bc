"""A decoder-only transformer of the shape that a `perfmodel.Architecture` names.

Pre-norm blocks of attention and of a feed-forward part, dense or sparse; on one device. Shape
suffixes: `moe_ref.routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import isfinite

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, embedding, linear

from moe_ref.attention import Attention, Rotation, rotation
from moe_ref.errors import MoeRefError
from moe_ref.experts import Experts
from moe_ref.layer import MoELayer
from moe_ref.paper_router import PaperRouter
from moe_ref.parts import INITIAL_DEVIATION, SwiGlu, matrix, norm, write_deviation
from moe_ref.recompute import recomputed
from moe_ref.routing import Router, Routing, wide_dtype
from perfmodel import Architecture, Biases

__all__ = ["Block", "ModelOutput", "ReferenceModel", "RouterFactory"]

RouterFactory = Callable[[int, int, int], Router]
"""Makes a router of ``(d_model, n_experts, top_k)``."""


@dataclass(frozen=True)
class ModelOutput:
    """What a forward pass gives.

    Attributes
    ----------
    logits_BSV : Tensor
        Of the next token.
    routings : tuple of Routing
        What the router of each sparse layer decided, first layer first.
    """

    logits_BSV: Tensor
    routings: tuple[Routing, ...]

    def cross_entropy(self, targets_BS: Tensor) -> Tensor:
        """Return the mean loss of a token, in float32 or wider [nat]."""
        logits_TV = self.logits_BSV.flatten(0, 1)
        return cross_entropy(logits_TV.to(wide_dtype(logits_TV)), targets_BS.flatten())

    def router_losses(self) -> dict[str, Tensor]:
        """Return what the routers add to the objective, each kind summed over the layers."""
        losses: dict[str, Tensor] = {}
        for routing in self.routings:
            for name, loss in routing.losses.items():
                losses[name] = losses[name] + loss if name in losses else loss
        return losses


class Block(nn.Module):
    """One layer: norm, attention, norm, feed-forward part, each pair added to the stream."""

    def __init__(self, attention: Attention, feed_forward: SwiGlu | MoELayer, d_model: int) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(d_model), attention
        self.feed_forward_norm, self.feed_forward = norm(d_model), feed_forward

    def forward(
        self, x_BSD: Tensor, turned: Rotation, generator: torch.Generator | None
    ) -> tuple[Tensor, Routing | None]:
        """Return the stream behind the layer, and the routing of a sparse one."""
        x_BSD = x_BSD + self.attention(self.attention_norm(x_BSD), turned)
        read_BSD = self.feed_forward_norm(x_BSD)
        if not isinstance(self.feed_forward, MoELayer):
            return x_BSD + self.feed_forward(read_BSD), None
        written_BSD, routing = self.feed_forward(read_BSD, generator)
        return x_BSD + written_BSD, routing


class ReferenceModel(nn.Module):
    """The transformer of an architecture, with any router of this package.

    Without ``gated_attention`` its parameters are those that the architecture counts.

    Parameters
    ----------
    architecture : perfmodel.Architecture
        Grouped-query attention, SwiGLU, two norms a layer, no biases; dense or sparse.
    router : callable, optional
        Makes the router of each sparse layer of ``(d_model, n_experts, top_k)``; `PaperRouter`
        unless given.
    gated_attention : bool
        Gate the output of each head (A.1): ``d_model * n_heads`` parameters a layer beside those
        that the architecture counts.
    grouped : bool
        Experts by segments of sorted tokens, else by a loop; the same numbers.
    recompute : bool
        Compute the activations of every layer again in the backward pass.
    deviation : float
        Of the initial weights that read the residual stream; that of A.1 unless given. Those that
        write to it have one part in ``sqrt(2 L)`` of it.
    seed : int
        Of the initial weights.

    Raises
    ------
    MoeRefError
        An architecture with a part that this model does not have, or a deviation that is not
        finite and above 0.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        router: RouterFactory = PaperRouter,
        gated_attention: bool = False,
        grouped: bool = True,
        recompute: bool = False,
        deviation: float = INITIAL_DEVIATION,
        seed: int = 0,
    ) -> None:
        super().__init__()
        _refuse(architecture)
        if not (isfinite(deviation) and deviation > 0.0):
            raise MoeRefError(f"deviation={deviation} must be finite and above 0.")
        self.architecture, self.recompute = architecture, recompute
        a = architecture
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding_VD = matrix(a.vocab_size, a.d_model)
            self.blocks = nn.ModuleList(
                Block(_attention(a, gated_attention), _part(a, layer, router, grouped), a.d_model)
                for layer in range(a.n_layers)
            )
            self.norm = norm(a.d_model)
            self.head_VD = None if a.tied_embeddings else matrix(a.vocab_size, a.d_model)
        if deviation != INITIAL_DEVIATION:
            with torch.no_grad():
                for parameter in self.parameters():
                    if parameter.ndim > 1:  # gains of norms stay 1
                        parameter *= deviation / INITIAL_DEVIATION

    def forward(self, tokens_BS: Tensor, generator: torch.Generator | None = None) -> ModelOutput:
        """Return logits of the token behind each, and what the routers decided.

        Parameters
        ----------
        tokens_BS : Tensor of int64
            From 0 to ``vocab_size - 1``.
        generator : torch.Generator, optional
            Of the routers' noise, on the device of the model; without one, torch's own.
        """
        x_BSD = embedding(tokens_BS, self.embedding_VD)
        turned = rotation(tokens_BS.shape[1], self.architecture.head_dim, x_BSD)
        routings = []
        for block in self.blocks:
            if self.recompute and self.training and torch.is_grad_enabled():
                x_BSD, routing = recomputed(block, generator, x_BSD, turned)
            else:
                x_BSD, routing = block(x_BSD, turned, generator)
            if routing is not None:
                routings.append(routing)
        head_VD = self.embedding_VD if self.head_VD is None else self.head_VD
        return ModelOutput(linear(self.norm(x_BSD), head_VD), tuple(routings))

    def routers(self) -> Iterator[Router]:
        """Yield the router of each sparse layer, first layer first."""
        for block in self.blocks:
            if isinstance(block.feed_forward, MoELayer):
                yield block.feed_forward.router

    def after_step(self) -> None:
        """Let every router change what it remembers; once for every optimizer step."""
        for router in self.routers():
            router.after_step()


def _attention(a: Architecture, gated: bool) -> Attention:
    """Return the attention of a layer."""
    deviation = write_deviation(a.n_layers)
    return Attention(
        a.d_model, a.n_heads, a.n_kv_heads, a.head_dim, gated=gated, deviation=deviation
    )


def _part(a: Architecture, layer: int, router: RouterFactory, grouped: bool) -> SwiGlu | MoELayer:
    """Return the feed-forward part of a layer, counted from 0."""
    deviation = write_deviation(a.n_layers)
    if not a.is_moe(layer):
        return SwiGlu(a.d_model, a.d_ff, deviation)
    return MoELayer(
        router(a.d_model, a.n_experts, a.top_k),
        Experts(a.d_model, a.n_experts, a.d_expert, deviation, grouped),
        SwiGlu(a.d_model, a.d_shared, deviation) if a.d_shared else None,
    )


def _refuse(a: Architecture) -> None:
    """Raise where the architecture has a part that this model does not have."""
    plain = {
        "latent": None,
        "window": None,
        "biases": Biases(),
        "qk_norm": "none",
        "attention_sinks": False,
        "shared_expert_gate": False,
        "gated": True,
        "norms_per_layer": 2,
        "learned_positions": 0,
        "mtp_layers": 0,
        "extra": None,
    }
    for field, value in plain.items():
        if getattr(a, field) != value:
            raise MoeRefError(
                f"{field}={getattr(a, field)!r} is not part of the reference model, which has "
                f"{field}={value!r} only."
            )
    if a.head_dim % 2:
        raise MoeRefError(
            f"head_dim={a.head_dim} must be even, because rotary positions turn pairs of features; "
            f"nearest: {a.head_dim + 1}."
        )
