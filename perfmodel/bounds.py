"""Lower bounds of a step's time over blocks of layouts: what lets a search discard them unpriced.

A block is all layouts with the same number of sequences on a device at a time, ``u = micro_batch /
(tp cp)``, and the same expert and pipeline degrees (`BLOCK_COLUMNS`). Its bound leaves terms out
and adds none: it has the work of the layers at the efficiency of the largest products, the host's
launches, the expert all-to-all, the pipeline's bubble and the exchange of the experts' gradients
and weights, and it is infinite where the parameters and the inputs of layers do not fit. It has no
communication of TP and CP, no other exchange, no optimizer, no replay, and no wait for the slowest
rank.

With ``B`` sequences in a step over ``N`` devices there are ``n_mb = B pp / (N u)`` microbatches. Of
one microbatch, ``W`` is the time of all layers, and ``tau`` that of the last stage: the slower of
host and device, and the all-to-all that compute cannot hide. Any schedule takes ``n_mb W / pp`` or
more. Where stages are alike and not interleaved, the first microbatch passes the other stages, and
all of them the last one:

    T >= n_mb tau + (W - tau)

A sum of maxima over stages is at least the maximum of the sums, so ``W`` needs no stages. What a
device does for ``u`` sequences is least without TP and CP: they share out products and tokens
alike, and make products smaller.

A bound is lowered by `MARGIN`, for the rounding of sums in another order than the estimate's.
"""

from __future__ import annotations

from functools import cache
from math import inf
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from perfmodel._jit import compile_kernel, formula, formulas_digest, inner_formula
from perfmodel.attention import attention_weights, core_time
from perfmodel.batch import PLAIN, Kernel
from perfmodel.collectives import all_to_all_once_time, all_to_all_time
from perfmodel.dims import ArchitectureDims
from perfmodel.exchange import group_exchange_time
from perfmodel.hardware import Hardware
from perfmodel.iteration import pipeline_depth_cost
from perfmodel.kernels import (
    BF16_BYTES,
    elementwise_time,
    grouped_gemm_launch,
    head_time,
    router_time,
    topk_time,
)
from perfmodel.layer import expert_time
from perfmodel.memory import OptimizerDims, dense_of, rank_parameters, stages_are_alike
from perfmodel.mesh import PlanDims, moe_layers_before, replicas, stage_content, state_shards
from perfmodel.modes import ModeTotals
from perfmodel.plan_table import PlanTable
from perfmodel.records import as_record
from perfmodel.schedule import in_flight_microbatches
from perfmodel.stack import Stack

__all__ = ["BLOCK_COLUMNS", "EP", "MARGIN", "Blocks", "block_floors", "blocks_of"]

MARGIN = 1e-9
"""By how much a bound is lowered for the rounding of its arithmetic, relative [-]."""

BLOCK_COLUMNS = ("sequences", "etp", "ep", "pp", "vpp", "load")
"""What the layouts of a block have in common; ``sequences`` is ``micro_batch / (tp cp)``."""

SEQUENCES, ETP, EP, PP, VPP, LOAD = range(len(BLOCK_COLUMNS))


class Layers(NamedTuple):
    """Layers by kind [-]."""

    dense: float
    moe: float


@inner_formula
def all_layers(a: ArchitectureDims) -> Layers:
    """Count a model's layers, prediction layers included [-]."""
    moe = moe_layers_before(a, a.n_layers)
    return Layers(a.n_layers - moe + a.mtp_dense, moe + a.mtp_moe)


@inner_formula
def layers_floor(stack: Stack, t: ModeTotals, n: Layers, stages: float, heads: float) -> float:
    """Time of one microbatch on ``stages`` stages that hold ``n`` and ``heads``, summed [s].

    Compute is taken to hide all of the all-to-all that the stack lets it: it may take longer than
    ``t`` says, and hide more.
    """
    layer = stack.host_layer_s * t.host_share
    host = n.moe * (layer + t.launches) + n.dense * stack.dense_layer_share * layer
    host += stages * stack.host_microbatch_s
    device = n.moe * t.moe_device + n.dense * t.dense_device + heads * t.head
    return max(host, device) + (1.0 - stack.a2a_hidden) * n.moe * t.dispatch


@formula
def dispatch_floor(
    a: ArchitectureDims, hw: Hardware, stack: Stack, p: PlanDims, tokens: float
) -> float:
    """Time of one expert all-to-all, without what ETP gathers behind it [s]."""
    token_bytes = p.load * tokens * BF16_BYTES * a.d_model
    once, time = stack.copies_once, 0.0
    if once < 1.0:
        time += (1.0 - once) * all_to_all_time(hw.fabric, p.ep, p.etp, token_bytes * a.top_k)
    if once > 0.0:
        time += once * all_to_all_once_time(hw.fabric, p.ep, p.etp, token_bytes, a.top_k)
    return time


@formula
def layer_floor(
    a: ArchitectureDims, hw: Hardware, stack: Stack, seq_len: float, p: PlanDims
) -> ModeTotals:
    """Return what a layer costs at least, nothing replayed; ``p.micro_batch`` is ``u`` [s].

    Products outside of experts run at the efficiency of the largest.
    """
    dev, elem, k = hw.device, hw.elementwise, stack.device_scale
    tokens = p.micro_batch * seq_len
    rate = dev.peak_flops * hw.gemm.flop_eff
    core = core_time(a, hw, p.micro_batch, a.n_heads, seq_len, 0.0)
    core += core_time(a, hw, p.micro_batch, a.n_heads, seq_len, 1.0)
    attention = 6.0 * tokens * attention_weights(a, 1.0) / rate + stack.attention_scale * core
    dense = attention + 6.0 * tokens * a.ffn_matrices * a.d_model * a.d_ff / rate
    moe, launches, dispatch = 0.0, 0.0, 0.0
    if a.n_experts > 0.0:
        n_local = a.n_experts / p.ep
        rows = p.load * tokens * a.top_k * p.ep * p.etp / a.n_experts
        width = a.d_expert / p.etp
        moe = attention + 6.0 * tokens * a.ffn_matrices * a.d_model * a.d_shared / rate
        moe += expert_time(a, hw, n_local, rows, width, 0.0)
        moe += expert_time(a, hw, n_local, rows, width, 1.0)
        routed = 3.0 * router_time(dev, elem, tokens, a.d_model, a.n_experts)
        routed += topk_time(hw.topk, tokens, a.n_experts)
        moe += stack.router_scale * routed
        passes = 4.0 if p.ep * p.etp > 1.0 else 2.0
        moved = 2.0 * (1.0 + p.load * p.etp) if p.ep * p.etp > 1.0 else 2.0
        volume = moved * 2.0 * tokens * a.top_k * BF16_BYTES * a.d_model
        moe += 2.0 * stack.elementwise_scale * elementwise_time(dev, elem, volume, passes)
        forward = grouped_gemm_launch(hw.grouped_forward, n_local)
        backward = grouped_gemm_launch(hw.grouped_backward, n_local)
        launches = 2.0 * stack.launch_share * (forward + backward)
        dispatch = 4.0 * dispatch_floor(a, hw, stack, p, tokens)
    return ModeTotals(
        moe_device=k * moe,
        dense_device=k * dense,
        launches=launches,
        dispatch=dispatch,
        host_share=stack.forward_share + stack.backward_share,
        forward_share=1.0 / 3.0,
        head=k * head_time(dev, hw.head, tokens, a.d_model, a.vocab_size),
        joined=0.0,
    )


@inner_formula
def wide(p: PlanDims, tp: float) -> PlanDims:
    """Return a plan with another TP, and nothing else of it changed."""
    return PlanDims(
        tp,
        p.etp,
        p.ep,
        p.pp,
        p.vpp,
        p.cp,
        p.dp,
        p.micro_batch,
        p.recompute,
        p.load,
        p.sequence_parallel,
        p.zero,
        p.instances,
        p.heads_over_cp,
        p.offload,
        p.saved_bytes,
    )


@formula
def held_floor(
    a: ArchitectureDims,
    optimizer: OptimizerDims,
    stack: Stack,
    seq_len: float,
    p: PlanDims,
    most_tp: float,
    m: float,
) -> float:
    """Bytes that the first stage holds at least: parameters, and inputs of layers in flight [B].

    What every replica holds is divided by ``most_tp``; what is sharded over all of them is taken
    as without TP, which leaves out what TP replicates.
    """
    c = stage_content(a, p, 0.0)
    one = rank_parameters(a, p)
    experts = c.moe * one.experts
    whole = dense_of(a, rank_parameters(a, wide(p, most_tp)), c) + experts
    sharded = whole
    if p.zero >= 1.0:
        dense_shards, expert_shards = state_shards(p)
        sharded = dense_of(a, one, c) / dense_shards + experts / expert_shards
    held = BF16_BYTES * (sharded if p.zero >= 3.0 else whole)
    held += stack.gradient_memory_bytes * (sharded if p.zero >= 2.0 else whole)
    held += (1.0 - p.offload) * optimizer.state_bytes * sharded
    inputs = p.micro_batch * seq_len * BF16_BYTES * a.d_model
    held += (c.dense + c.moe) * inputs * in_flight_microbatches(0.0, p.pp, p.vpp, m)
    return (1.0 + stack.reserve_share) * held + stack.framework_bytes


@formula
def pipeline_floor(
    a: ArchitectureDims, stack: Stack, devices_per_node: float, p: PlanDims, t: ModeTotals, m: float
) -> float:
    """Time from the first forward to the last backward of ``m`` microbatches [s].

    Interleaved, the other stages are passed once in chunks, and the first of them may be shorter:
    by no more than a stage.
    """
    n = all_layers(a)
    span = m / p.pp * layers_floor(stack, t, n, p.pp, 1.0)
    if stages_are_alike(a, p):
        c = stage_content(a, p, p.pp - 1.0)
        path = m * layers_floor(stack, t, Layers(c.dense, c.moe), 1.0, 1.0)
        if p.vpp <= 1.0:
            if p.pp > 1.0:
                rest = Layers(n.dense - c.dense, n.moe - c.moe)
                path += layers_floor(stack, t, rest, p.pp - 1.0, 0.0)
        elif p.pp - 1.0 > p.vpp:
            c = stage_content(a, p, p.pp - 2.0)
            chunks = (p.pp - 1.0) / p.vpp - 1.0
            path += chunks * layers_floor(stack, t, Layers(c.dense, c.moe), 1.0, 0.0)
        span = max(span, path)
    return span * (1.0 + pipeline_depth_cost(stack, devices_per_node, p.pp))


@formula
def exchange_floor(a: ArchitectureDims, hw: Hardware, stack: Stack, p: PlanDims) -> float:
    """Exposed exchange of the routed experts' gradients and weights, on the last stage [s].

    TP and CP do not move it: experts are replicated over what EP and ETP leave of a stage's ranks.
    """
    if a.n_experts <= 0.0 or stack.dp_hidden >= 1.0:
        return 0.0
    experts = stage_content(a, p, p.pp - 1.0).moe * rank_parameters(a, p).experts
    _, edp = replicas(p)
    exchange = group_exchange_time(hw, stack, p, edp, p.etp * p.ep, experts)
    return (1.0 - stack.dp_hidden) * exchange


@inner_formula
def plan_of_block(block: Any, n_devices: float, alike: PlanDims) -> PlanDims:
    """Return the layout of a block that has neither TP nor CP, on a device ``u`` sequences."""
    return PlanDims(
        1.0,
        block[ETP],
        block[EP],
        block[PP],
        block[VPP],
        1.0,
        n_devices / block[PP],
        block[SEQUENCES],
        0.0,
        block[LOAD],
        alike.sequence_parallel,
        alike.zero,
        alike.instances,
        alike.heads_over_cp,
        alike.offload,
        alike.saved_bytes,
    )


@cache
def _kernel() -> Kernel:
    """Compile the kernel of :func:`block_floors`."""
    digest = int(formulas_digest()[:15], 16)

    def floor_blocks(
        architectures: Any,
        hardware: Any,
        stack_: Any,
        optimizer_: Any,
        alike_: Any,
        seq_len: float,
        global_batch: float,
        n_devices: float,
        most_tp: float,
        memory_cap: float,
        blocks: Any,
        exchanges: Any,
        legal: Any,
        floor_s: Any,
    ) -> int:
        if digest == 0:  # a cell of this closure, and so of the cache's key
            return 0
        hw, stack, optimizer, alike = hardware[0], stack_[0], optimizer_[0], alike_[0]
        node = hw.fabric.devices_per_node
        exposed_s = np.empty(exchanges.max() + 1)
        for i in range(architectures.shape[0]):
            a = architectures[i]
            p = plan_of_block(blocks[0], n_devices, alike)
            totals = layer_floor(a, hw, stack, seq_len, p)
            exposed_s[:] = -1.0
            for j in range(blocks.shape[0]):
                if not legal[i, j]:
                    floor_s[i, j] = inf
                    continue
                q = plan_of_block(blocks[j], n_devices, alike)
                m = global_batch * q.pp / (n_devices * q.micro_batch)
                if held_floor(a, optimizer, stack, seq_len, q, most_tp, m) > memory_cap:
                    floor_s[i, j] = inf
                    continue
                of_layer = q.micro_batch == p.micro_batch and q.etp == p.etp
                if not (of_layer and q.ep == p.ep and q.load == p.load):
                    totals = layer_floor(a, hw, stack, seq_len, q)
                p = q
                span = pipeline_floor(a, stack, node, q, totals, m)
                k = exchanges[j]
                if exposed_s[k] < 0.0:
                    exposed_s[k] = exchange_floor(a, hw, stack, q)
                once = exposed_s[k] + stack.step_host_s
                floor_s[i, j] = (span + once) * (1.0 - MARGIN)
        return 0

    return compile_kernel(floor_blocks)


class Blocks(NamedTuple):
    """The blocks of a plan table.

    Attributes
    ----------
    values : array of shape (blocks, 6)
        `BLOCK_COLUMNS`; ``load`` is that of the fullest rank of EP [-].
    exchanges : array of int64, shape (blocks,)
        Equal where blocks have the same degrees but ``sequences``, and so :func:`exchange_floor`.
    of_row : array of int64, shape (rows,)
        The block of each row of the table.
    most_tp : float
        The largest TP of the table [-].
    """

    values: NDArray[np.float64]
    exchanges: NDArray[np.int64]
    of_row: NDArray[np.int64]
    most_tp: float


def blocks_of(table: PlanTable, loads: NDArray[np.float64]) -> Blocks:
    """Return the blocks of a table, ordered by (u, etp, ep, pp, vpp).

    ``loads`` are those of :func:`perfmodel.batch.loads_of`.
    """
    sequences = table.micro_batch / (table.tp * table.cp)
    columns = (sequences, table.etp, table.ep, table.pp, table.vpp, loads)
    stacked = np.stack(columns, axis=1).astype(np.float64)
    values, of_row = np.unique(stacked, axis=0, return_inverse=True)
    _, exchanges = np.unique(values[:, ETP : VPP + 1], axis=0, return_inverse=True)
    return Blocks(
        values,
        exchanges.reshape(-1).astype(np.int64),
        of_row.reshape(-1).astype(np.int64),
        float(table.tp.max(initial=1)),
    )


def block_floors(
    architectures: NDArray[np.void],
    blocks: Blocks,
    legal: NDArray[np.bool_],
    *,
    hardware: Hardware,
    stack: Stack,
    optimizer: OptimizerDims,
    seq_len: int,
    global_batch: int,
    n_devices: int,
    memory_cap_bytes: float,
    alike: PlanDims = PLAIN,
) -> NDArray[np.float64]:
    """Bound the step time of every block under some architectures.

    Parameters
    ----------
    architectures : structured array of shape (architectures,)
        Their sizes, as :func:`perfmodel.records.as_records` makes them.
    legal : array of bool, shape (architectures, blocks)
        False where no layout of a block is legal.
    memory_cap_bytes : float
        What a device may hold [B].
    alike : PlanDims
        As :func:`perfmodel.batch.price` takes it.

    Returns
    -------
    array of shape (architectures, blocks)
        No layout of the block that is legal and within the memory has a shorter step [s]; inf
        where there is none.
    """
    floor_s = np.empty(legal.shape)
    if legal.size:
        _kernel()(
            architectures,
            as_record(hardware),
            as_record(stack),
            as_record(optimizer),
            as_record(alike),
            float(seq_len),
            float(global_batch),
            float(n_devices),
            blocks.most_tp,
            memory_cap_bytes,
            blocks.values,
            blocks.exchanges,
            legal,
            floor_s,
        )
    return floor_s
