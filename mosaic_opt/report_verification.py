"""The pages of a verification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mosaic_opt.verification import MOST_DIFFERENCES, Difference, Verification
from mosaic_opt.verification_batches import BatchVerification

if TYPE_CHECKING:
    from rich.console import RenderableType


def render_batch_verification(found: BatchVerification) -> RenderableType:
    """Return the page of a choice of the global batch."""
    from rich.console import Group
    from rich.text import Text

    word = "VERIFIED" if found.verified else "NOT VERIFIED"
    parts: list[RenderableType] = [
        Text(f"{found.name}: {word}, of the model, at {len(found.solutions)} batches", style="bold")
    ]
    for one in found.solutions:
        parts += [Text(""), render_verification(one)]
    if found.differences:
        parts += [Text("\nIn what is made of them:"), _table(found.differences)]
    return Group(*parts)


def _table(differences: Sequence[Difference]) -> RenderableType:
    from rich.table import Table

    table = Table("where", "the document says", "found", box=None, pad_edge=False)
    for difference in differences:
        table.add_row(difference.where, difference.claimed, difference.found)
    return table


def render_verification(found: Verification) -> RenderableType:
    """Return the page as a rich renderable."""
    from rich.console import Group
    from rich.text import Text

    how = "all" if found.checked == found.candidates else f"{found.checked:,} of"
    if found.mode == "sample":
        how += f" (seed {found.seed})"
    word = "VERIFIED" if found.verified else "NOT VERIFIED"
    if found.verified and found.mode == "sample":
        word += " on a sample"
    lines: list[RenderableType] = [
        Text(f"{found.name}: {word}, of the model", style="bold"),
        Text(f"searched again   {how} {found.candidates:,} candidates"),
        Text(f"certificate      {'holds' if found.certified else 'does not hold'}, made again"),
    ]
    if found.checked < found.candidates:
        rest = found.candidates - found.checked
        lines.append(Text(f"taken as said    what the document says of {rest:,} candidates"))
    if not found.differences:
        lines.append(Text("document         every field is what it should be"))
        return Group(*lines)
    many = "first " if len(found.differences) >= MOST_DIFFERENCES else ""
    lines.append(Text(f"\nThe {many}{len(found.differences)} differences:"))
    return Group(*lines, _table(found.differences))
