"""Which values of an estimate lie outside what its surfaces and its stack were fitted on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from perfmodel.attention import kv_heads_per_rank
from perfmodel.calibration.packs import Flag, UnmeasuredFlag
from perfmodel.collectives import ranks_per_node
from perfmodel.kernels import BF16_BYTES, FP32_BYTES
from perfmodel.layer import rows_per_expert
from perfmodel.memory import dense_parameters, expert_parameters
from perfmodel.mesh import replicas, sequence_shards
from perfmodel.precision import Precision

if TYPE_CHECKING:
    from perfmodel.step import StepModel


Queries = list[tuple[str, dict[str, float]]]


def queries(model: StepModel) -> Queries:
    """Return every surface that a step asks, with the sizes that it asks for.

    Shapes and volumes are those of the forward pass; the backward pass asks for the same sizes
    in another order.
    """
    a, p = model.architecture.dims, model.dims
    asked = _attention(model) + _groups(model)
    tokens = p.micro_batch * float(model.batch.seq_len) / p.cp
    asked.append(("head", {"tokens": tokens, "d_model": a.d_model, "vocab": a.vocab_size / p.tp}))
    local = tokens / sequence_shards(p)
    dense = model.architecture.n_dense_layers > 0
    asked.append(("elementwise", {"traffic_bytes": 2.0 * BF16_BYTES * local * a.d_model}))
    widths = {a.d_ff if dense else 0.0, a.d_shared if a.n_experts > 0.0 else 0.0}
    for width in sorted(widths - {0.0}):
        asked += _block("gemm", {"m": tokens}, a.d_model, width / p.tp, a.ffn_matrices)
    if a.n_experts > 0.0:
        rows = rows_per_expert(a, p, tokens)
        fixed = {"n_gemms": a.n_experts / p.ep, "rows": rows}
        for way in ("forward", "backward"):
            asked += _block(f"grouped_{way}", fixed, a.d_model, a.d_expert / p.etp, a.ffn_matrices)
        asked.append(("topk", {"tokens": local, "n_experts": a.n_experts}))
    return asked


def _block(
    surface: str, fixed: dict[str, float], d_model: float, width: float, matrices: float
) -> Queries:
    """Return the two products of a feed-forward block."""
    up = (matrices - 1.0) * width
    return [
        (surface, fixed | {"n": up, "k": d_model}),
        (surface, fixed | {"n": d_model, "k": width}),
    ]


def _attention(model: StepModel) -> Queries:
    a, p = model.architecture.dims, model.dims
    seq_len = float(model.batch.seq_len)
    tokens = p.micro_batch * seq_len / p.cp
    heads = a.n_heads / p.tp
    core = {
        "sequences": p.micro_batch,
        "heads": heads,
        "seq_len": seq_len,
        "head_dim": a.head_dim,
    }
    products = [{"m": tokens, "n": a.d_model, "k": heads * a.v_head_dim}]
    if a.latent > 0.0:
        local, query = tokens / sequence_shards(p), a.q_lora_rank or a.d_model
        unfolded = heads * (a.head_dim - a.rope_head_dim + a.v_head_dim)
        products += [
            {"m": local, "n": a.kv_lora_rank + a.rope_head_dim, "k": a.d_model},
            {"m": tokens, "n": unfolded, "k": a.kv_lora_rank},
            {"m": tokens, "n": heads * a.head_dim, "k": query},
        ]
        if a.q_lora_rank > 0.0:
            products.append({"m": local, "n": a.q_lora_rank, "k": a.d_model})
    else:
        qkv = (heads + 2.0 * kv_heads_per_rank(a, p.tp)) * a.head_dim
        products.insert(0, {"m": tokens, "n": qkv, "k": a.d_model})
    return [
        *(("gemm", sizes) for sizes in products),
        ("attention_forward", core),
        ("attention_backward", core),
    ]


def _groups(model: StepModel) -> Queries:
    """Return what the groups of the two meshes exchange."""
    a, p = model.architecture.dims, model.dims
    local = p.micro_batch * float(model.batch.seq_len) / p.cp / sequence_shards(p)
    hidden = BF16_BYTES * a.d_model
    last = model.contents[-1]
    dense = dense_parameters(a, p, last)
    expert = expert_parameters(a, p, last)
    ranks, edp = replicas(p)
    asked: Queries = []
    if a.n_experts > 0.0 and p.ep > 1.0:
        volume = local * a.top_k * hidden
        asked.append(("all_to_all", {"size": p.ep, "stride": p.etp, "volume": volume}))
    if a.n_experts > 0.0 and p.etp > 1.0:
        volume = p.etp * local * a.top_k * hidden
        asked.append(("all_gather", {"size": p.etp, "stride": 1.0, "volume": volume}))
    rings = [
        (p.tp, 1.0, local * sequence_shards(p) * hidden, local * sequence_shards(p) * hidden),
        (ranks, p.tp, FP32_BYTES * dense, BF16_BYTES * dense),
        (edp, p.etp * p.ep, FP32_BYTES * expert, BF16_BYTES * expert),
    ]
    for size, stride, scattered, gathered in rings:
        if size > 1.0 and scattered > 0.0:
            group = {"size": size, "stride": stride}
            asked.append(("reduce_scatter", group | {"volume": scattered}))
            asked.append(("all_gather", group | {"volume": gathered}))
    return asked


def range_flags(model: StepModel) -> tuple[Flag, ...]:
    """Return one flag for each surface and variable out of range, the farthest value of each.

    A surface that was not measured at all has one flag.
    """
    pack, precision = model.cluster.pack, model.batch.precision
    found: dict[tuple[str, str], Flag] = {}
    flags: list[Flag] = [
        flag
        for surface, sizes in queries(model)
        for flag in pack.check_at(precision, surface, **sizes)
    ]
    flags += model.profile.check(**_layout_variables(model))
    for flag in flags:
        key = (flag.surface, flag.variable)
        if key not in found or _excess(flag) > _excess(found[key]):
            found[key] = flag
    return tuple(found.values())


def parts_of(model: StepModel) -> dict[str, str]:
    """Return the parts of a step that a fitted run may never have had, each with a sentence."""
    a, parts = model.architecture, {}
    counts = {c.layers for c in model.contents}
    if len(counts) > 1:
        parts["uneven stages"] = (
            f"stages of {min(counts):g} to {max(counts):g} layers: every run that the stack was "
            "fitted on has equal stages"
        )
    if a.latent is not None:
        parts["latent attention"] = (
            "latent attention is priced by the surfaces of its products; no run that the stack "
            "was fitted on has it"
        )
    if a.moe_every > 1:
        parts["dense layers between"] = (
            f"experts on every layer in {a.moe_every}: no run that the stack was fitted on has "
            "dense layers between sparse ones"
        )
    if a.mtp_layers:
        parts["prediction layers"] = (
            f"mtp_layers={a.mtp_layers}: prediction layers have logits where the loss is and a "
            "copy of the embedding where they are; no run that the stack was fitted on has them"
        )
    if model.batch.precision is not Precision.BF16:
        parts[f"precision {model.batch.precision}"] = (
            f"precision={model.batch.precision}: no run that the stack was fitted on had it; the "
            "host's time to launch the quantising is that of none"
        )
    return parts


def unmeasured_parts(model: StepModel) -> tuple[str, ...]:
    """Return one sentence for each part of the model that no fitted run had, or none has priced."""
    a, covered = model.architecture, model.profile.covers
    said = [text for name, text in parts_of(model).items() if name not in covered]
    if a.window is not None:
        said.append(
            f"a window of {a.window.width} tokens on {a.window_layers} of {a.n_layers} layers is "
            "priced as its share of full attention, spread evenly over the layers"
        )
    if a.extra is not None:
        said.append(
            f"extra.parameters={a.extra.parameters} ({a.extra.reason}) are priced as one linear "
            "layer in each layer; what they do is not modelled"
        )
    return tuple(f"{a.name}: {sentence}." for sentence in said)


def machine_flags(model: StepModel) -> tuple[str, ...]:
    """Return a sentence for what the pack's machine does and the formulas do not count."""
    pack = model.cluster.pack
    if pack.device.dtype != "fp32":
        return ()
    return (
        f"{pack.name}: kernels were timed in fp32 and are priced as such; memory, and the weights "
        "that are gathered, are counted in bf16.",
    )


def partial_nodes(model: StepModel) -> tuple[str, ...]:
    """Return a sentence for each ring with some of the devices of its nodes: none was measured."""
    p, node = model.dims, model.cluster.constants.fabric.devices_per_node
    ranks, edp = replicas(p)
    groups = {
        "tensor-parallel": (p.tp, 1.0),
        "data-parallel": (ranks, p.tp),
        "expert-data-parallel": (edp if model.architecture.n_experts else 1.0, p.etp * p.ep),
    }
    said = []
    for name, (size, stride) in groups.items():
        local = ranks_per_node(node, size, stride)
        if size > 1.0 and 1.0 < local < node:
            said.append(
                f"The {name} group has {local:g} of the {node:g} devices of a node, which lies "
                "between the rings that were measured (one and all)."
            )
    return tuple(said)


def stack_variables(model: StepModel) -> dict[str, float]:
    """Return what a stack profile states ranges of: layout, batch, the model's size, options."""
    return _layout_variables(model) | option_variables(model)


def option_variables(model: StepModel) -> dict[str, float]:
    """Return the options of a plan and its routing; what has no effect there is as by default."""
    plan = model.plan
    replicated = plan.dp * plan.cp > 1
    return DEFAULT_OPTIONS | {
        name: value
        for name, value, used in (
            ("zero", float(plan.zero), replicated),
            ("optimizer_instances", float(plan.optimizer_instances), replicated),
            ("sequence_parallel", float(plan.sequence_parallel), plan.tp > 1),
            ("heads_over_cp", model.dims.heads_over_cp, plan.cp > 1),
            ("offload", plan.optimizer_offload, True),
            ("load", model.dims.load, model.architecture.n_experts > 0),
        )
        if used
    }


DEFAULT_OPTIONS = {
    "zero": 1.0,
    "optimizer_instances": 1.0,
    "sequence_parallel": 1.0,
    "heads_over_cp": 0.0,
    "offload": 0.0,
    "load": 1.0,
}
"""What a profile without a range of an option was fitted with."""

_SAID = {
    "zero": "zero={0:g}: what ZeRO exchanges follows from its definition",
    "optimizer_instances": "optimizer_instances={0:g}: the exchange among them is one all-reduce",
    "sequence_parallel": "sequence_parallel={0:g}: an all-reduce in place of two halves of it",
    "heads_over_cp": "heads_over_cp={0:g} (cp_comm): an exchange of heads is exposed whole",
    "offload": "offload={0:g}: the host's link and memory set its part of the optimizer's time",
    "load": "load={0:g} on the fullest rank of EP over the mean is ASSUMED for every layer",
}


def option_flags(model: StepModel) -> tuple[str, ...]:
    """Return a sentence for each option that no run had which the stack was fitted on."""
    ranges, said = model.profile.ranges, []
    for name, value in option_variables(model).items():
        low, high = ranges.get(name, (DEFAULT_OPTIONS[name],) * 2)
        if not low <= value <= high:
            had = "no run that the stack was fitted on has it"
            said.append(f"{model.profile.name}: {_SAID[name].format(value)}; {had}.")
    return tuple(said)


def _layout_variables(model: StepModel) -> dict[str, float]:
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


def _excess(flag: Flag) -> float:
    if isinstance(flag, UnmeasuredFlag):
        return 0.0
    return max(flag.low - flag.value, flag.value - flag.high)
