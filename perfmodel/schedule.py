r"""Makespan of a pipeline schedule in closed form, and the bubble and memory that come with it.

A pipeline has ``pp`` devices. Device 0 takes ``tau_first`` for the forward and backward pass of
one microbatch, the last one ``tau_last``, and the ``pp - 2`` between them ``tau_mid`` each [s].
The forms below are longest paths of the task graph that :mod:`perfmodel.schedule_graph` builds;
the tests compare the two. ``docs/theory/schedule.md`` derives them and says where they are exact:

* :func:`makespan_1f1b_split`: always; :func:`makespan_1f1b`: always, if the forward pass is the
  same share of every stage;
* :func:`makespan_interleaved`: if the last device is the slowest; a lower bound otherwise.

Stages that all differ are in :mod:`perfmodel.schedule_stages`.

Transfers between stages take no time here: what they cost is not part of a makespan.
Counts are floats with integer values, as in every formula that a compiled kernel calls.
"""

from __future__ import annotations

from typing import NamedTuple

from perfmodel._jit import formula, inner_formula

__all__ = [
    "BubbleFraction",
    "activation_penalty",
    "bubble_fraction",
    "in_flight_microbatches",
    "makespan_1f1b",
    "makespan_1f1b_split",
    "makespan_interleaved",
    "warmup_forwards",
]


class BubbleFraction(NamedTuple):
    """Idle time of a device in a pipeline of equal stages, in the two ways it is quoted."""

    of_compute: float  # idle / busy [-]
    of_total: float  # idle / (idle + busy) [-]


@inner_formula
def makespan_1f1b_split(
    forward_first: float,
    forward_mid: float,
    forward_last: float,
    backward_first: float,
    backward_mid: float,
    backward_last: float,
    pp: float,
    n_microbatches: float,
) -> float:
    """Makespan of 1F1B [s]: exact for any times of the first, middle and last stages. O(1).

    The critical path enters the steady state, stays with one stage, and leaves. Three stages
    come into question: the last, the one before it, and the earliest that reaches a steady state.

    Parameters
    ----------
    forward_first, forward_mid, forward_last : float
        Forward time of one microbatch [s]; ``forward_mid`` counts if ``pp >= 3``.
    backward_first, backward_mid, backward_last : float
        Backward time of one microbatch [s].
    pp, n_microbatches : float
        Stages and microbatches [-]. With ``pp = 1`` the only stage is the last one.

    References
    ----------
    The schedule: arXiv 2104.04473, section 2.2; Megatron-LM, ``pipeline_parallel/schedules.py``.
    """
    m = n_microbatches
    last = forward_last + backward_last
    if pp <= 1.0:
        return m * last
    first = forward_first + backward_first
    mid = forward_mid + backward_mid
    inner = pp - 2.0

    # Steady in the last stage: it works without a pause.
    path = first + inner * mid + m * last
    if m <= 1.0:
        return path

    # Slowest passes before the last stage, and the ways around that stage: into the steady state
    # through its first microbatch or a warm-up forward, out of it through its last microbatch or
    # a cool-down backward.
    top_forward = forward_first
    top_backward = backward_first
    if inner > 0.0:
        top_forward = max(forward_first, forward_mid)
        top_backward = max(backward_first, backward_mid)
    enter = max(top_forward, last)
    leave = max(top_backward, last)

    # Steady in the stage before the last.
    if inner > 0.0:
        path = max(path, first + (inner + m - 2.0) * mid + enter + leave)

    # Steady in the earliest stage that is not all warm-up: the first one where m >= pp.
    stage = max(0.0, pp - m)
    warmup = pp - 1.0 - stage
    between = (inner - stage) * mid
    if stage > 0.0:
        before = first + (stage - 1.0) * mid
        own = mid
        warm = warmup * top_forward
        cool = warmup * top_backward
    else:
        before = 0.0
        own = first
        warm = warmup * forward_first
        cool = warmup * backward_first
    around = max(warm, between + enter) + max(cool, between + leave)
    return max(path, before + (m - warmup) * own + around)


@inner_formula
def makespan_1f1b(
    tau_first: float,
    tau_mid: float,
    tau_last: float,
    pp: float,
    n_microbatches: float,
    forward_fraction: float = 1.0 / 3.0,
) -> float:
    """Makespan of 1F1B from forward-plus-backward times [s].

    Exact if the forward pass is the share ``forward_fraction`` of every stage; the share has no
    effect where the last stage is the slowest: ``sum_{j < pp-1} tau_j + n_mb tau_last``.

    Parameters
    ----------
    tau_first, tau_mid, tau_last : float
        Time of one microbatch, forward and backward [s]; ``tau_mid`` counts if ``pp >= 3``.
    pp, n_microbatches : float
        Stages and microbatches [-]. With ``pp = 1`` the only stage is the last one.
    forward_fraction : float
        Forward time / (forward + backward time) [-]: 1/3, and 1/4 with full recomputation.

    See Also
    --------
    makespan_1f1b_split : for shares that differ.
    """
    backward_fraction = 1.0 - forward_fraction
    return makespan_1f1b_split(
        forward_fraction * tau_first,
        forward_fraction * tau_mid,
        forward_fraction * tau_last,
        backward_fraction * tau_first,
        backward_fraction * tau_mid,
        backward_fraction * tau_last,
        pp,
        n_microbatches,
    )


@inner_formula
def makespan_interleaved(
    tau_first: float,
    tau_mid: float,
    tau_last: float,
    pp: float,
    vpp: float,
    n_microbatches: float,
    forward_fraction: float = 1.0 / 3.0,
) -> float:
    """Makespan of the interleaved schedule [s]: ``vpp`` chunks on each device. O(1).

    Every chunk takes ``tau_mid / vpp``; what the first device takes more (or less) than
    ``tau_mid`` is in its first chunk (the embedding), what the last one does in its last chunk
    (the head). Exact if ``tau_last >= max(tau_first, tau_mid)``, which includes equal stages,
    ``(n_mb + (pp - 1) / vpp) tau``. A lower bound otherwise. With ``tau_mid`` fixed it does not
    decrease in ``tau_first`` and ``tau_last``; with these fixed it may decrease in ``tau_mid``.

    Parameters
    ----------
    tau_first, tau_mid, tau_last : float
        Time of one microbatch on the whole device (all chunks), forward and backward [s].
        ``tau_mid`` counts for every ``pp`` if ``vpp >= 2``: it is the time of the plain chunks.
    pp, vpp, n_microbatches : float
        Devices, chunks on each, microbatches [-]; ``n_microbatches`` is a multiple of ``pp``.
    forward_fraction : float
        As in :func:`makespan_1f1b`, which this is for ``vpp = 1``; unused for ``vpp >= 2``.

    References
    ----------
    The schedule: arXiv 2104.04473, section 2.2; Megatron-LM, ``pipeline_parallel/schedules.py``.
    """
    m = n_microbatches
    if vpp <= 1.0 or pp <= 1.0:
        return makespan_1f1b(tau_first, tau_mid, tau_last, pp, m, forward_fraction)
    chunk = tau_mid / vpp
    extra_first = tau_first - tau_mid
    # Ahead of the last device: the first group of pp microbatches is late by pp extras; time
    # that the first device saves, it saves once.
    ahead = extra_first * (pp if extra_first > 0.0 else 1.0)
    path = m * tau_last + (pp - 1.0) * chunk + ahead
    if pp > 2.0:  # a middle device sets the pace
        path = max(path, m * tau_mid + (pp - 2.0) * chunk + ahead, m * tau_mid)
    return max(path, m * tau_first, m * tau_last)


@formula
def bubble_fraction(pp: float, vpp: float, n_microbatches: float) -> BubbleFraction:
    """Bubble of a pipeline of equal stages [-]: ``(pp - 1) / (vpp n_mb)`` of the compute time.

    Both fractions are in use: arXiv 2104.04473 (section 2.2) quotes the one of compute.
    """
    of_compute = (pp - 1.0) / (vpp * n_microbatches)
    return BubbleFraction(of_compute, of_compute / (1.0 + of_compute))


@inner_formula
def warmup_forwards(stage: float, pp: float, vpp: float, n_microbatches: float) -> float:
    """Forward passes (of one chunk each) before the first steady forward-backward pair [-].

    ``pp - stage - 1``; interleaved ``2 (pp - stage - 1) + (vpp - 1) pp``; at most all there are.
    Source: Megatron-LM, ``get_pp_rank_microbatches``, groups of ``pp`` microbatches.
    """
    warmup = pp - stage - 1.0
    if vpp > 1.0:
        warmup = 2.0 * warmup + (vpp - 1.0) * pp
    return min(warmup, vpp * n_microbatches)


@inner_formula
def in_flight_microbatches(stage: float, pp: float, vpp: float, n_microbatches: float) -> float:
    """Most microbatches whose activations ``stage`` holds at once, in whole stages [-].

    The warm-up and one forward more, in chunks of ``1 / vpp`` of a stage:
    ``min(pp - stage, n_mb)`` for 1F1B.
    """
    chunks = warmup_forwards(stage, pp, vpp, n_microbatches) + 1.0
    return min(chunks, vpp * n_microbatches) / vpp


@formula
def activation_penalty(pp: float, vpp: float) -> float:
    """Activations of the first device, interleaved over 1F1B: ``1 + (pp - 1) / (pp vpp)`` [-].

    For ``vpp >= 2`` (1F1B itself is 1) and enough microbatches to fill the pipeline.
    Source: arXiv 2205.05198, section 4.2.3.
    """
    if vpp <= 1.0:
        return 1.0
    return 1.0 + (pp - 1.0) / (pp * vpp)
