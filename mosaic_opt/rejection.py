"""Why a candidate has no layout or no tokens, and the smallest thing that would help."""

from __future__ import annotations

from math import ceil, floor, inf, isfinite, log10, nan
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mosaic_opt.envelope import SECONDS_PER_DAY, Envelope
from perfmodel.architecture import Architecture
from perfmodel.layout_search import nearest_to_legal
from perfmodel.plan_table import PlanTable


class Rejection(NamedTuple):
    """A reason, a sentence on it, and what is missing.

    ``shortfall`` is in bytes a device (reason "memory") or seconds of window ("tokens"); NaN where
    no number says it.
    """

    reason: str
    detail: str
    shortfall: float


def without_layout(
    envelope: Envelope,
    table: PlanTable,
    architecture: Architecture,
    memory_bytes: NDArray[np.float64],
    refused: NDArray[np.bool_],
    most_ranks: float,
) -> Rejection:
    """Say why no layout of a candidate can be chosen.

    Parameters
    ----------
    memory_bytes, refused : arrays of shape (layouts,)
        Of its legal layouts: memory [B], and whether the price lies beyond a measured range.
    most_ranks : float
        Ranks of the largest all-to-all that the pack prices.
    """
    cap = envelope.memory_cap_bytes
    if not len(memory_bytes):
        # the rules that it breaks in the layout that breaks fewest
        nearest = nearest_to_legal(
            table,
            architecture.rule_variables(),
            envelope.cluster.n_devices,
            envelope.batch.seq_len,
            envelope.batch.global_batch,
        )
        return Rejection("no_legal_layout", nearest, nan)
    if not (memory_bytes <= cap).any():
        leanest = float((memory_bytes if refused.all() else memory_bytes[~refused]).min())
        short = leanest - cap
        detail = (
            f"the leanest layout needs {leanest / 1e9:.1f} GB of {cap / 1e9:.1f} GB: "
            f"{short / 1e9:.1f} GB short on every device"
        )
        return Rejection("memory", detail, short)
    detail = (
        f"every layout that fits needs expert parallelism over more than {most_ranks:g} ranks, "
        "which nobody measured; extrapolation: flag would admit it"
    )
    return Rejection("beyond_measured_range", detail, nan)


def without_tokens(envelope: Envelope, n_active: float, available: float) -> Rejection:
    """Say why a candidate with a layout has no token budget; ``available`` is its D* [token]."""
    rule, window_days = envelope.tokens, envelope.window_days
    least = rule.least_tokens_per_parameter
    if rule.max_tokens is not None and rule.max_tokens < least * n_active:
        detail = (
            f"max_tokens={rule.max_tokens:g} is less than the {least * n_active:.4g} tokens "
            f"that {least:g} tokens per parameter ask for"
        )
        return Rejection("tokens", detail, nan)
    reached = available / n_active
    more_days = window_days * (least / reached - 1.0) if reached else inf
    if not isfinite(more_days):
        detail = f"its best layout sees next to no tokens in a window of {window_days:g} days"
        return Rejection("tokens", detail, nan)
    more_days = max(more_days, 1e-9 * window_days)  # short by a rounding
    detail = (
        f"its best layout sees {reached:.4g} tokens per parameter in the window, of at least "
        f"{least:g}: {_at_least(more_days)} more days would do"
    )
    return Rejection("tokens", detail, more_days * SECONDS_PER_DAY)


def _at_least(value: float) -> str:
    """Write a positive number with two digits, rounded up."""
    step = 10.0 ** (floor(log10(value)) - 1)
    return f"{ceil(value / step * (1.0 - 1e-12)) * step:.6g}"
