"""Time of one compute kernel on one device, as smooth surfaces of the kernel's shape.

Every surface is a roofline with fitted efficiencies: no table look-up, no nearest neighbour, so a
shape that nobody measured has a price, and every surface is non-decreasing in each size. Times
are *device* times; what the host spends on launching a kernel is apart (``*_launch``), since it
overlaps with the device and must be counted once.

The parameters come from a hardware pack (:mod:`perfmodel.calibration`); the forms are documented
in ``docs/theory/kernels.md``. Units: seconds, bytes, FLOP, FLOP/s, bytes/s.
"""

from __future__ import annotations

from math import log10, sqrt
from typing import NamedTuple

from perfmodel._jit import formula, inner_formula

BF16_BYTES = 2.0
FP32_BYTES = 4.0


class DeviceRates(NamedTuple):
    """Datasheet rates of one device."""

    peak_flops: float  # dense bf16 tensor throughput [FLOP/s]
    fp32_flops: float  # dense fp32 (non-tensor) throughput [FLOP/s]
    memory_bw: float  # [B/s]


class GemmSurface(NamedTuple):
    """Dense GEMM, C[m,n] = A[m,k] B[k,n] in bf16; a p-norm of a compute and a traffic roofline."""

    launch_s: float  # host time of one launch [s]
    floor_s: float  # shortest device time of any kernel [s]
    flop_eff: float  # fraction of peak reached by a large GEMM [-]
    bw_eff: float  # fraction of memory bandwidth reached [-]
    k_half: float  # inner size at which half of the efficiency is lost [-]
    mn_half: float  # output size m*n at which half of the efficiency is lost [-]
    droop: float  # relative slow-down per decade of FLOP above 1e12 (power limit) [-]
    norm: float  # exponent of the p-norm that joins the two rooflines [-]
    operand_bytes: float = BF16_BYTES  # of one element of A and B [B]


class GroupedGemmSurface(NamedTuple):
    """One pass (forward, or backward = dgrad + wgrad) of n equal GEMMs, one per local expert."""

    launch_s: float  # host time of one call [s]
    launch_per_gemm_s: float  # host time of each GEMM in the call [s]
    flop_eff: float  # [-]
    bw_eff: float  # [-]
    operand_bytes: float = BF16_BYTES  # of one element of what is multiplied [B]


class AttentionSurface(NamedTuple):
    """One pass of causal fused attention."""

    launch_s: float  # host time of one call [s]
    fixed_s: float  # device time that does not depend on the shape [s]
    eff_d128: float  # fraction of peak at head_dim >= 128 [-]
    eff_d64: float  # fraction of peak at head_dim <= 64 [-]
    seq_half: float  # sequence length at which half of the efficiency is lost [-]


class HeadSurface(NamedTuple):
    """Language-model head (a GEMM with the vocabulary as n) and fp32 cross-entropy."""

    forward_eff: float  # [-]
    backward_eff: float  # [-]
    ce_forward_passes: float  # passes over tokens x vocabulary in fp32 [-]
    ce_backward_passes: float  # [-]


class TopKSurface(NamedTuple):
    """Top-k selection over the router's scores, fp32."""

    launch_s: float  # host time [s]
    fixed_s: float  # device time that does not depend on the shape [s]
    tokens_per_s: float  # of the kernels that sort and gather the winners
    elements_per_s: float  # tokens x experts per second, of the kernel that reads the scores


class ElementwiseSurface(NamedTuple):
    """Kernels that only move bytes: norms, activations, residuals, permutation of tokens."""

    fixed_s: float  # device time per kernel beyond its traffic [s]
    bw_eff: float  # fraction of memory bandwidth [-]


class Cast(NamedTuple):
    """What quantising an operand of a product moves; nothing in bf16."""

    element_bytes: float  # read and written for one element of an activation or gradient [B]
    kernels: float  # for one operand [-]
    weight_bytes: float  # read and written for one weight, once a step [B]


NO_CAST = Cast(0.0, 0.0, 0.0)


@formula
def gemm_time(device: DeviceRates, s: GemmSurface, m: float, n: float, k: float) -> float:
    """Device time of a dense GEMM of shape (m, k) x (k, n) with bf16 output [s].

    ``sqrt(floor^2 + R^2)`` with ``R = (C^p + B^p)^(1/p)``, ``C = 2mnk / (peak e) (1 + k_half/k)
    (1 + mn_half/(mn)) (1 + droop max(0, log10(FLOP / 1e12)))`` and
    ``B = (b(mk + kn) + 2mn) / (bandwidth e_b)``, b bytes an operand's element (2 in bf16).
    """
    flop = 2.0 * m * n * k
    compute = flop / (device.peak_flops * s.flop_eff)
    compute *= (1.0 + s.k_half / k) * (1.0 + s.mn_half / (m * n))
    compute *= 1.0 + s.droop * max(0.0, log10(flop / 1e12))
    moved = s.operand_bytes * (m * k + k * n) + BF16_BYTES * m * n
    traffic = moved / (device.memory_bw * s.bw_eff)
    slower = max(compute, traffic)
    ratio = min(compute, traffic) / slower
    rooflines = slower * (1.0 + ratio**s.norm) ** (1.0 / s.norm)
    return float(sqrt(s.floor_s * s.floor_s + rooflines * rooflines))


@formula
def linear_backward_time(
    device: DeviceRates, s: GemmSurface, m: float, n: float, k: float
) -> float:
    """Device time of the two GEMMs behind a linear layer: input gradient, weight gradient [s]."""
    return gemm_time(device, s, m, k, n) + gemm_time(device, s, k, n, m)


@formula
def grouped_gemm_time(
    device: DeviceRates,
    s: GroupedGemmSurface,
    n_gemms: float,
    rows: float,
    n: float,
    k: float,
    backward: float,
) -> float:
    """Device time of ``n_gemms`` GEMMs (rows, k) x (k, n) in one call [s].

    ``backward`` is 0 for the forward pass and 1 for the backward pass (twice the FLOP; the
    weights are read, their gradients written, and both activations read and written). Operands
    below bf16 are read with fewer bytes: ``nk + rows k`` elements, and backward ``nk + rows (2n
    + k)``.
    """
    flop = (2.0 + 2.0 * backward) * n_gemms * rows * n * k
    elements = n_gemms * ((1.0 + 2.0 * backward) * n * k + (1.0 + backward) * rows * (n + k))
    operands = n_gemms * (n * k + rows * (k + 2.0 * backward * n))
    moved = BF16_BYTES * elements - (BF16_BYTES - s.operand_bytes) * operands
    return flop / (device.peak_flops * s.flop_eff) + moved / (device.memory_bw * s.bw_eff)


@formula
def grouped_gemm_launch(s: GroupedGemmSurface, n_gemms: float) -> float:
    """Host time of one grouped-GEMM call: it launches one GEMM per local expert [s]."""
    return s.launch_s + s.launch_per_gemm_s * n_gemms


@formula
def attention_time(
    device: DeviceRates,
    s: AttentionSurface,
    sequences: float,
    heads: float,
    seq_len: float,
    head_dim: float,
    backward: float,
) -> float:
    """Device time of causal attention over ``sequences`` sequences [s].

    FLOP are the causal half, ``2 B h S^2 d`` forward and 2.5 times that backward (scores are
    recomputed). The efficiency falls off at short sequences as ``1 / (1 + seq_half / S)``.
    """
    flop = 2.0 * sequences * heads * seq_len * seq_len * head_dim * (1.0 + 1.5 * backward)
    weight = min(1.0, max(0.0, (head_dim - 64.0) / 64.0))
    eff = s.eff_d64 + (s.eff_d128 - s.eff_d64) * weight
    return s.fixed_s + flop / (device.peak_flops * eff) * (1.0 + s.seq_half / seq_len)


@formula
def head_time(
    device: DeviceRates, s: HeadSurface, tokens: float, d_model: float, vocab: float
) -> float:
    """Device time of the head's forward and backward and of cross-entropy, fp32 [s]."""
    flop = 2.0 * tokens * d_model * vocab
    gemm = flop / device.peak_flops * (1.0 / s.forward_eff + 2.0 / s.backward_eff)
    passes = s.ce_forward_passes + s.ce_backward_passes
    return gemm + passes * FP32_BYTES * tokens * vocab / device.memory_bw


@formula
def topk_time(s: TopKSurface, tokens: float, n_experts: float) -> float:
    """Device time of the top-k selection [s]."""
    return s.fixed_s + tokens / s.tokens_per_s + tokens * n_experts / s.elements_per_s


@inner_formula
def elementwise_time(
    device: DeviceRates, s: ElementwiseSurface, traffic_bytes: float, n_kernels: float
) -> float:
    """Device time of ``n_kernels`` kernels that together move ``traffic_bytes`` [s]."""
    return n_kernels * s.fixed_s + traffic_bytes / (device.memory_bw * s.bw_eff)


@inner_formula
def cast_time(device: DeviceRates, s: ElementwiseSurface, cast: Cast, elements: float) -> float:
    """Device time to quantise an activation or gradient, by rows and by columns; 0 in bf16 [s]."""
    return elementwise_time(device, s, cast.element_bytes * elements, cast.kernels)


@formula
def router_time(
    device: DeviceRates, s: ElementwiseSurface, tokens: float, d_model: float, n_experts: float
) -> float:
    """Device time of the fp32 router GEMM (tokens, d) x (d, E) [s].

    A roofline without an efficiency of its own: fp32 throughput from the datasheet, traffic of
    the up-cast activations (read bf16, write and read fp32).
    """
    flop = 2.0 * tokens * d_model * n_experts
    traffic = tokens * d_model * (BF16_BYTES + 2.0 * FP32_BYTES) + FP32_BYTES * (
        d_model * n_experts + tokens * n_experts
    )
    return max(flop / device.fp32_flops, traffic / (device.memory_bw * s.bw_eff)) + s.fixed_s


@inner_formula
def ramped(volume: float, ramp_bytes: float) -> float:
    """Return the effective volume ``V (1 + sqrt(V0 / V))``: bandwidth ramps up with size [B]."""
    return volume + sqrt(ramp_bytes * volume)
