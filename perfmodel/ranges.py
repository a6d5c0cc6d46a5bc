"""Which values of an estimate lie outside what its surfaces and its stack were fitted on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.calibration.packs import RangeFlag
from perfmodel.layer import kv_heads_per_rank, rows_per_expert

if TYPE_CHECKING:
    from perfmodel.step import StepModel


def queries(model: StepModel) -> list[tuple[str, dict[str, float]]]:
    """Return every surface that a step asks, with the sizes that it asks for.

    The volumes and shapes are those of the forward pass; the backward pass asks for the same
    sizes in another order.
    """
    a, p = model.architecture.dims, model.dims
    seq_len = float(model.batch.seq_len)
    tokens = p.micro_batch * seq_len / p.cp
    local = tokens / p.tp
    heads = a.n_heads / p.tp
    qkv = (heads + 2.0 * kv_heads_per_rank(a, p.tp)) * a.head_dim
    asked = [
        ("gemm", {"m": tokens, "n": qkv, "k": a.d_model}),
        ("gemm", {"m": tokens, "n": a.d_model, "k": heads * a.head_dim}),
        ("head", {"tokens": tokens, "d_model": a.d_model, "vocab": a.vocab_size / p.tp}),
    ]
    attention = {
        "sequences": p.micro_batch,
        "heads": heads,
        "seq_len": seq_len,
        "head_dim": a.head_dim,
    }
    asked += [(f"attention_{way}", attention) for way in ("forward", "backward")]
    if a.n_experts > 0.0:
        rows = rows_per_expert(a, tokens, p.tp, p.etp, p.ep)
        width = a.d_expert / p.etp
        up = (a.ffn_matrices - 1.0) * width
        n_gemms = a.n_experts / p.ep
        for way in ("forward", "backward"):
            for n, k in ((up, a.d_model), (a.d_model, width)):
                shape = {"n_gemms": n_gemms, "rows": rows, "n": n, "k": k}
                asked.append((f"grouped_{way}", shape))
        asked.append(("topk", {"tokens": local, "n_experts": a.n_experts}))
        if p.ep > 1.0:
            asked.append(
                ("all_to_all", {"size": p.ep, "volume": 2.0 * local * a.top_k * a.d_model})
            )
    ranks = p.dp * p.cp
    edp = p.tp * ranks / (p.etp * p.ep)
    for group in (ranks, edp if a.n_experts > 0.0 else 1.0):
        if group > 1.0:
            asked += [(name, {"size": group}) for name in ("reduce_scatter", "all_gather")]
    return asked


def range_flags(model: StepModel) -> tuple[RangeFlag, ...]:
    """Return one flag for each surface and variable out of range, the farthest value of each."""
    pack = model.cluster.pack
    found: dict[tuple[str, str], RangeFlag] = {}
    flags = [flag for surface, sizes in queries(model) for flag in pack.check(surface, **sizes)]
    flags += model.profile.check(**stack_variables(model))
    for flag in flags:
        key = (flag.surface, flag.variable)
        if key not in found or _excess(flag) > _excess(found[key]):
            found[key] = flag
    return tuple(found.values())


def stack_variables(model: StepModel) -> dict[str, float]:
    """Return what a stack profile states ranges of: the layout, the batch and the model's size."""
    plan, architecture = model.plan, model.architecture
    return {
        "tp": float(plan.tp),
        "etp": float(plan.etp),
        "ep": float(plan.ep),
        "pp": float(plan.pp),
        "vpp": float(plan.vpp),
        "cp": float(plan.cp),
        "micro_batch": float(plan.micro_batch),
        "recompute": float(plan.recompute.code),
        "seq_len": float(model.batch.seq_len),
        "n_devices": float(model.cluster.n_devices),
        "n_layers": float(architecture.n_layers),
        "d_model": float(architecture.d_model),
        "n_dense_layers": float(architecture.n_dense_layers),
        "local_experts": architecture.n_experts / plan.ep,
    }


def _excess(flag: RangeFlag) -> float:
    return max(flag.low - flag.value, flag.value - flag.high)
