"""What a search over layouts answers: priced layouts with intervals, and how many there were."""

from __future__ import annotations

from typing import Literal

from perfmodel.architecture import MfuConvention
from perfmodel.cluster import Batch, Cluster
from perfmodel.frozen import Frozen
from perfmodel.plan import Plan
from perfmodel.plan_space import PlanSpace
from perfmodel.sources import Source
from perfmodel.uncertainty import Interval

__all__ = ["LayoutCounts", "LayoutSearch", "PricedLayout"]


class PricedLayout(Frozen):
    """One layout with its price; the numbers are those of :func:`perfmodel.estimate`.

    Attributes
    ----------
    plan : Plan
        The layout.
    step_time_s : float
        Time of one optimizer step [s].
    tokens_per_s_per_device, tflops_per_device, mfu : Interval
        Throughput of a device [token/s], [1e12 FLOP/s], [-], the last two under the search's
        `mfu_convention`; see `LayoutSearch` for what the interval is and is not.
    interval_error : str
        Which left-out error of the stack profile is in the interval
        (:func:`perfmodel.uncertainty.residual_error`).
    memory_bytes : float
        Memory of a device of the heaviest stage, which is `heaviest_stage` [B].
    shortfall_bytes : float
        What it needs more than the device has; 0 where it fits [B].
    fits : bool
        Whether it fits.
    near_tie : bool
        Fits, and its step is so little longer than the shortest that the model cannot tell them
        apart (`LayoutSearch.near_tie_tolerance`).
    sources : dict
        What the headline numbers rest on.
    flags : tuple of str
        Every value outside the range that a surface or the stack was fitted on.
    """

    plan: Plan
    step_time_s: float
    tokens_per_s_per_device: Interval
    tflops_per_device: Interval
    mfu: Interval
    interval_error: str
    memory_bytes: float
    heaviest_stage: int
    shortfall_bytes: float
    fits: bool
    near_tie: bool
    sources: dict[str, Source]
    flags: tuple[str, ...]


class LayoutCounts(Frozen):
    """How the layouts of a space fared.

    Attributes
    ----------
    enumerated : int
        Layouts of the space that the cluster and the batch allow.
    legal : int
        Of these, legal for the architecture.
    refused : int
        Of the legal, need an all-to-all over more ranks than was measured; not priced.
    priced : int
        The legal ones that were not refused.
    fit : int
        Of the priced, fit the memory of a device.
    """

    enumerated: int
    legal: int
    refused: int
    priced: int
    fit: int


class LayoutSearch(Frozen):
    """The layouts of one architecture with the shortest steps.

    An interval holds 5% to 95% of seeded draws of the stack's fitted constants, each within its
    own interval, times an error of what the model misses, as large as the profile's error on runs
    left out of its fit (:mod:`perfmodel.uncertainty`). It is not a statement about runs unlike
    any that the profile has seen, beyond the error of the sweeps left out; errors of kernel
    surfaces, of assumed constants and of the memory model are in it only as far as they are in
    those errors; and it says nothing of the difference between two layouts, which share most of
    their error.

    Attributes
    ----------
    status : str
        ``found``; or ``nothing_fits``, ``nothing_measured`` (every legal layout was refused),
        ``nothing_legal``.
    reason : str
        Where nothing was found: one sentence that says why.
    layouts : tuple of PricedLayout
        The shortest steps of those that fit, shortest first; of equals the one with less memory,
        then the first of the enumeration.
    near_ties : int
        Layouts that fit whose step is at most ``1 + near_tie_tolerance`` times the shortest,
        itself included.
    near_tie_tolerance : float
        The profile's error on a run left out of its fit [-].
    pareto_front : tuple of PricedLayout
        Of all that were priced, fitting or not: those that no other beats in both throughput and
        memory, least memory first. Of equals the first of the enumeration.
    leanest : tuple of PricedLayout
        Where nothing fits: the layouts with the least memory, least first.
    counts : LayoutCounts
        How many there were.
    """

    schema_version: Literal[1] = 1
    status: Literal["found", "nothing_fits", "nothing_measured", "nothing_legal"]
    reason: str
    layouts: tuple[PricedLayout, ...]
    near_ties: int
    near_tie_tolerance: float
    pareto_front: tuple[PricedLayout, ...]
    leanest: tuple[PricedLayout, ...]
    counts: LayoutCounts
    architecture: dict[str, object]
    batch: Batch
    cluster: Cluster
    n_devices: int
    device_memory_bytes: float
    space: PlanSpace
    extrapolation: Literal["refuse", "flag"]
    mfu_convention: MfuConvention
    stack: str
    hardware: str
    draws: int
    seed: int
