"""Tables that a CPU with known constants would give, to the last digit."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path

from perfmodel.calibration import load_pack
from perfmodel.collectives import AllToAllSurface, all_to_all_time, ring_over_nodes_time
from perfmodel.hardware import Hardware
from perfmodel.kernels import (
    AttentionSurface,
    DeviceRates,
    ElementwiseSurface,
    GemmSurface,
    GroupedGemmSurface,
    HeadSurface,
    TopKSurface,
    attention_time,
    elementwise_time,
    gemm_time,
    grouped_gemm_launch,
    grouped_gemm_time,
    head_time,
    topk_time,
)

DEVICE = "toy-2t"
RATES = DeviceRates(peak_flops=1e11, fp32_flops=1e11, memory_bw=2e10)
GPU = load_pack("p6-b200").constants()
RING = GPU.fabric.all_reduce._replace(
    intra_latency_s=2e-4, intra_bw=1.5e9, intra_ramp_bytes=2e4, two_node_gain=1.0
)
CPU = Hardware(
    device=RATES,
    gemm=GemmSurface(3e-6, 2e-6, 0.9, 0.45, 20.0, 3e3, 0.0, 3.0),
    grouped_forward=GroupedGemmSurface(8e-6, 4e-6, 0.8, 0.5),
    grouped_backward=GroupedGemmSurface(3e-5, 1.5e-5, 0.7, 0.4),
    attention_forward=AttentionSurface(0.0, 1.5e-5, 0.35, 0.25, 40.0),
    attention_backward=AttentionSurface(0.0, 4e-5, 0.25, 0.2, 60.0),
    head=HeadSurface(0.85, 0.75, 6.0, 4.0),
    topk=TopKSurface(0.0, 8e-6, 3e7, 1e8),
    elementwise=ElementwiseSurface(5e-6, 0.45),
    fabric=GPU.fabric._replace(
        devices_per_node=2.0,
        all_to_all=AllToAllSurface(3e-4, 1e9, 1e9, 1e5, 1.0, 1.0, 1.0, 1.0),
        all_reduce=RING,
        reduce_scatter=RING._replace(intra_bw=2e9),
        all_gather=RING._replace(intra_latency_s=1e-4),
    ),
    blocking=1.0,
)
"""A CPU in fp32: what a call costs beside its work is in the surfaces of all but products."""

PASSES = (0.0, 1.0)  # forward, backward
HEAD_TERMS = {
    "lm_head_gemm": ("forward_eff", "backward_eff"),
    "cross_entropy": ("ce_forward_passes", "ce_backward_passes"),
}


def write(path: Path, header: str, rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["device", *header.split(",")])
        writer.writerows([DEVICE, *row] for row in rows)


def cpu_tables(folder: Path, hw: Hardware = CPU) -> None:
    """Write the tables of one device, without collectives."""
    d, ms = hw.device, 1e3
    bare = hw.gemm._replace(floor_s=0.0)
    sizes = (64.0, 256.0, 1024.0, 2048.0)
    write(
        folder / "dense_gemm.csv",
        "dtype,M,N,K,time_ms_med",
        [
            ("fp32", *s, ms * (hw.gemm.launch_s + gemm_time(d, bare, *s)))
            for s in itertools.product(sizes, sizes, sizes)
        ],
    )
    write(
        folder / "dispatch_gap.csv",
        "mode,M,N,K,dtype,gpu_active_us_per_kernel",
        [("gemm", 1.0, 64.0, 64.0, "fp32", 1e6 * hw.gemm.floor_s)],
    )
    grouped = (hw.grouped_forward, hw.grouped_backward)
    write(
        folder / "grouped_gemm.csv",
        "distribution,num_gemms,tokens_per_expert,hidden,ffn,in_features,out_features,dtype,"
        "fwd_ms,bwd_ms",
        [
            (
                *("balanced", n, rows, k, out / 2, k, out, "fp32"),
                *(
                    ms * (grouped_gemm_launch(s, n) + grouped_gemm_time(d, s, n, rows, out, k, b))
                    for s, b in zip(grouped, PASSES, strict=True)
                ),
            )
            for n in (2.0, 8.0, 16.0)
            for rows in (16.0, 128.0, 1024.0)
            for out, k in ((256.0, 128.0), (1024.0, 512.0))
        ],
    )
    attention = (hw.attention_forward, hw.attention_backward)
    write(
        folder / "sdpa.csv",
        "micro_bs,n_q_heads,seq_len,head_dim,backend,dtype,fwd_time_ms_med,bwd_time_ms_med",
        [
            (
                *(*size, "sdpa", "fp32"),
                *(
                    ms * attention_time(d, s, *size, b)
                    for s, b in zip(attention, PASSES, strict=True)
                ),
            )
            for size in itertools.product(
                (1.0, 4.0), (2.0, 8.0), (128.0, 512.0, 2048.0), (64.0, 128.0)
            )
        ],
    )
    off = HeadSurface(inf, inf, 0.0, 0.0)

    def head(term: str, *size: float) -> float:
        return ms * head_time(d, off._replace(**{term: getattr(hw.head, term)}), *size)

    write(
        folder / "vocab_gemm_ce.csv",
        "op,m_tokens,hidden,vocab_padded,dtype,fwd_ms_p50,bwd_ms_p50",
        [
            (op, *size, "fp32", *(head(term, *size) for term in terms))
            for size in itertools.product((256.0, 1024.0, 2048.0), (128.0, 256.0), (4096.0,))
            for op, terms in HEAD_TERMS.items()
        ],
    )
    write(
        folder / "topk.csv",
        "num_tokens,num_experts,k,dtype,event_time_ms",
        [
            (tokens, experts, 2, "fp32", ms * topk_time(hw.topk, tokens, experts))
            for tokens in (256.0, 1024.0, 8192.0)
            for experts in (8.0, 64.0)
        ],
    )

    def moved(op: str, read: float, written: float) -> float:
        if op == "stream":  # 4 bytes an element at the bandwidth
            return ms * 4.0 * (read + written) / d.memory_bw
        return ms * elementwise_time(d, hw.elementwise, 2.0 * (read + written), 1.0)

    write(
        folder / "elementwise.csv",
        "op,elements_read,elements_written,dtype,time_ms_med",
        [
            (op, read * size, size, "fp32", moved(op, read * size, size))
            for op, read in (("copy", 1.0), ("add", 2.0), ("stream", 1.0))
            for size in (1e3, 1e5, 1e6, 4e6)
        ],
    )


VOLUMES = (4e3, 64e3, 1e6, 4e6, 64e6)


def cpu_collectives(folder: Path, hw: Hardware = CPU) -> None:
    """Write the tables of collectives between two processes."""
    ms = 1e3
    write(
        folder / "all_to_all.csv",
        "group_size,buffer_bytes,time_ms_p50",
        # fp32 activations: the formulas count half of the bytes
        [(2, v, ms * all_to_all_time(hw.fabric, 2.0, 1.0, v / 2.0)) for v in VOLUMES],
    )
    write(
        folder / "dp_collectives.csv",
        "layout,group_size,collective,payload_bytes,time_ms_p50",
        [
            ("contiguous", 2, name, v, ms * ring_over_nodes_time(ring, 2.0, 2.0, 1.0, v))
            for name in ("all_reduce", "reduce_scatter", "all_gather")
            for ring in (getattr(hw.fabric, name),)
            for v in VOLUMES
        ],
    )
