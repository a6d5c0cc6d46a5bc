"""Every family of kernels."""

from __future__ import annotations

from collections.abc import Sequence

from moe_ref.microbench.attention import ATTENTION
from moe_ref.microbench.dispatch import DISPATCH
from moe_ref.microbench.elementwise import ELEMENTWISE
from moe_ref.microbench.errors import CalibrationError
from moe_ref.microbench.family import Family
from moe_ref.microbench.gemm import GEMM
from moe_ref.microbench.grouped import GROUPED
from moe_ref.microbench.head import HEAD
from moe_ref.microbench.topk import TOPK

__all__ = ["FAMILIES", "chosen_families"]

FAMILIES: dict[str, Family] = {
    family.name: family for family in (GEMM, DISPATCH, GROUPED, ATTENTION, HEAD, TOPK, ELEMENTWISE)
}
"""The families of one device by name; collectives take several processes."""


def chosen_families(names: Sequence[str] | None) -> tuple[Family, ...]:
    """Return the families of the names, or all.

    Raises
    ------
    CalibrationError
        There is no family of that name.
    """
    if names is None:
        return tuple(FAMILIES.values())
    for name in names:
        if name not in FAMILIES:
            known = ", ".join(FAMILIES)
            raise CalibrationError(f"There is no family {name!r} of kernels; there are {known}.")
    return tuple(FAMILIES[name] for name in dict.fromkeys(names))
