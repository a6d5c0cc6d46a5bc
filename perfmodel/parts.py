"""The parts of an architecture that most models do not have, each a small record of its own."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from perfmodel.frozen import Frozen

MAX_SIZE = 2**30
Size = Annotated[int, Field(ge=1, le=MAX_SIZE)]
Optional0 = Annotated[int, Field(ge=0, le=MAX_SIZE)]
QkNorm = Literal["none", "head", "full"]


class LatentAttention(Frozen):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434): low-rank queries, keys, values.

    Keys and values are unfolded from one latent vector of ``kv_lora_rank`` a token; a rotary part
    of ``qk_rope_head_dim``, shared by all heads, stands beside it. Queries go through a latent
    vector of their own, or directly where ``q_lora_rank`` is 0. Each latent vector has a norm.
    """

    model_config = ConfigDict(strict=True)

    q_lora_rank: Optional0 = 0
    kv_lora_rank: Size
    qk_nope_head_dim: Size
    qk_rope_head_dim: Size
    v_head_dim: Size

    @property
    def qk_head_dim(self) -> int:
        """Width of a head's queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


class Biases(Frozen):
    """Which products and norms add a bias.

    Attributes
    ----------
    qkv, output : bool
        Attention's projections in and out.
    ffn : bool
        Both products of a dense block.
    experts : bool
        Both products of every expert, routed or shared.
    router : bool
        A value for each expert: a bias of the product, or a correction of the selection.
    norms : bool
        Every norm (LayerNorm in place of RMSNorm).
    head : bool
        A value for each entry of the vocabulary.
    """

    model_config = ConfigDict(strict=True)

    qkv: bool = False
    output: bool = False
    ffn: bool = False
    experts: bool = False
    router: bool = False
    norms: bool = False
    head: bool = False


class SlidingWindow(Frozen):
    """Attention to the last ``width`` tokens only, on a fraction of the layers."""

    model_config = ConfigDict(strict=True)

    width: Size
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0


class ExtraParameters(Frozen):
    """Parameters beside those that the other fields imply; all of them work on every token.

    They are spread evenly over the layers and priced as one linear layer in each: what they do is
    not modelled. ``reason`` says what they are.
    """

    model_config = ConfigDict(strict=True)

    parameters: Annotated[int, Field(ge=1, le=2**50)]
    reason: Annotated[str, Field(min_length=1)]
