"""Number formats that a run's matrix products are computed in, and what quantising costs.

Whatever the precision, linear layers and experts alone leave bf16: the attention core, the router,
the head with its loss, and all that devices exchange stay as they are. fp16 has the rates of bf16.

Counts of bytes below follow from the formats (arXiv 2209.05433 for fp8, arXiv 2412.19437 for blocks
of 128, the OCP Microscaling specification 1.0 for mxfp8, arXiv 2509.25149 for nvfp4). That each
operand is read once in bf16 and written once by rows and once by columns, and that a scale of the
whole tensor takes one more pass to find, is assumed (``ASSUMED``): fused kernels do less.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from perfmodel.kernels import BF16_BYTES, Cast


class Precision(StrEnum):
    """Number format of the products of linear layers and experts in training."""

    BF16 = "bf16"  # fp16 as well
    FP8 = "fp8"  # one scale a tensor, current or delayed
    FP8_BLOCK = "fp8-block"  # one scale for 1 x 128 activations or 128 x 128 weights
    MXFP8 = "mxfp8"  # one scale for 32 elements
    NVFP4 = "nvfp4"  # one scale for 16 elements and one a tensor


class Recipe(NamedTuple):
    """What a low precision is priced with; every number is ``ASSUMED`` but the format's size."""

    operand_bytes: float  # of one element of a product's inputs, scales included [B]
    four_bit: bool  # whether its peak is that of fp4
    share: float  # of the fraction of peak that measured fp8 products reach [-]
    cast: Cast  # what quantising moves

    @property
    def saved_activation_bytes(self) -> float:
        """Memory of one element of a linear layer's input, kept for its backward pass [B].

        Only the copy by columns is kept. bf16 keeps 2.
        """
        return self.operand_bytes

    @property
    def weight_bytes(self) -> float:
        """Memory of one weight: bf16, and a copy by rows and by columns kept over the step [B].

        bf16 keeps 2. Stacks whose parameters are low-precision themselves keep the copies alone.
        """
        return BF16_BYTES + 2.0 * self.operand_bytes


def _recipe(
    bits: float, scale_bytes: float, block: float, *, share: float, amax_pass: bool
) -> Recipe:
    """Build a recipe from the format: bits of an element, bytes of a scale, elements it is for."""
    operand_bytes = bits / 8.0 + scale_bytes / block
    moved = BF16_BYTES * (2.0 if amax_pass else 1.0) + 2.0 * operand_bytes
    kernels = 2.0 if amax_pass else 1.0
    return Recipe(operand_bytes, bits == 4.0, share, Cast(moved, kernels, moved))


RECIPES: dict[Precision, Recipe] = {
    Precision.FP8: _recipe(8.0, 0.0, 1.0, share=1.0, amax_pass=True),
    # sums are promoted to fp32 every 128 of k outside of the matrix units
    Precision.FP8_BLOCK: _recipe(8.0, 4.0, 128.0, share=0.9, amax_pass=False),
    Precision.MXFP8: _recipe(8.0, 1.0, 32.0, share=1.0, amax_pass=False),
    Precision.NVFP4: _recipe(4.0, 1.0, 16.0, share=0.9, amax_pass=True),
}
"""The low precisions. ``share`` 0.9: nobody measured these products, and they do more than fp8."""


def saved_activation_bytes(precision: Precision) -> float:
    """Return the bytes that one element of a linear layer's saved input takes [B]; ``ASSUMED``."""
    recipe = RECIPES.get(precision)
    return BF16_BYTES if recipe is None else recipe.saved_activation_bytes


def weight_bytes(precision: Precision) -> float:
    """Return the bytes that one weight of a linear layer takes, with its copies [B]; ``ASSUMED``.

    The fp32 master weight belongs to the optimizer and is not among them.
    """
    recipe = RECIPES.get(precision)
    return BF16_BYTES if recipe is None else recipe.weight_bytes
