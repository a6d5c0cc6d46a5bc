"""Small architectures, texts and routers that the tests of the model share."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st

from moe_ref.model import ReferenceModel
from moe_ref.paper_router import PaperRouter, RouterRecipe
from perfmodel import Architecture

VOCABULARY = 37


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator of its own."""
    return torch.Generator().manual_seed(seed)


def small(**changes: Any) -> Architecture:
    """Build a sparse architecture of three layers, the first of them dense."""
    fields: dict[str, Any] = {
        "n_layers": 3,
        "d_model": 16,
        "n_heads": 4,
        "n_kv_heads": 2,
        "head_dim": 4,
        "d_ff": 24,
        "vocab_size": VOCABULARY,
        "n_experts": 8,
        "top_k": 2,
        "d_expert": 12,
        "d_shared": 12,
        "first_k_dense": 1,
    }
    return Architecture(**(fields | changes))


def noisy(d_model: int, n_experts: int, top_k: int) -> PaperRouter:
    """Build a router whose noise decides: it proposes exactly the experts that it takes."""
    return PaperRouter(d_model, n_experts, top_k, RouterRecipe(proposal=1, temperature=1.0))


def noiseless(d_model: int, n_experts: int, top_k: int) -> PaperRouter:
    """Build a router without noise."""
    return PaperRouter(d_model, n_experts, top_k, RouterRecipe(temperature=0.0))


def text(sequences: int = 4, length: int = 9, seed: int = 0) -> torch.Tensor:
    """Draw tokens, shape (sequences, length)."""
    return torch.randint(VOCABULARY, (sequences, length), generator=seeded(seed))


def objective(model: ReferenceModel, tokens_BS: torch.Tensor, generator: Any = None) -> Any:
    """Return what training minimises on a batch."""
    output = model(tokens_BS[:, :-1], generator)
    return sum(output.router_losses().values(), start=output.cross_entropy(tokens_BS[:, 1:]))


@st.composite
def architectures(draw: st.DrawFn) -> Architecture:
    """Draw any architecture that the model has, small."""

    def size(low: int, high: int) -> int:
        return draw(st.integers(low, high))

    layers, kv_heads, sparse = size(1, 4), size(1, 3), draw(st.booleans())
    fields: dict[str, Any] = {"n_experts": 0, "first_k_dense": 0}
    if sparse:
        experts = size(1, 6)
        fields = {
            "n_experts": experts,
            "top_k": size(1, experts),
            "d_expert": size(1, 9),
            "d_shared": size(0, 9),
            "first_k_dense": size(0, layers),
            "moe_every": size(1, 2),
        }
    return Architecture(
        n_layers=layers,
        d_model=size(1, 20),
        n_heads=kv_heads * size(1, 3),
        n_kv_heads=kv_heads,
        head_dim=2 * size(1, 5),
        d_ff=size(1, 20),
        vocab_size=size(2, 40),
        tied_embeddings=draw(st.booleans()),
        **fields,
    )
