"""The notes of a published run, as facts: ``key=value`` pairs behind one another.

A table says some facts in words ("force-balanced routing"); here each becomes a pair, so that a
reader of the table asks for a key. What no rule knows is kept under ``remark``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["canonical", "facts_of", "number"]

_PAIR = re.compile(r"([a-z][a-z0-9_]*)=(.*)")
_NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")

_WORDS: tuple[tuple[str, dict[str, str]], ...] = (
    (r"NeMo container (\S+)", {"container": r"\1"}),
    (r"Pre-Training", {"phase": "pretrain"}),
    (
        r"force-balanced routing|forced balance|forced load balancing|forced-balanced"
        r"|fake balanced gate",
        {"routing": "balanced"},
    ),
    (r"dropless, natural routing", {"routing": "natural", "dropless": "yes"}),
    (r"dropless", {"dropless": "yes"}),
    (r"token dropping", {"dropless": "no"}),
    (r"token drop capacity factor (\S+)", {"dropless": "no", "capacity_factor": r"\1"}),
    (r"dp_derived", {"dp_derived": "yes"}),
    (r"recipe (\S+@\S+) exact layout match", {"recipe": r"\1"}),
    (r"recipe (\S+@\S+) match except (.+)", {"recipe": r"\1", "recipe_differs": r"\2"}),
    (r"recipe sets no recompute modules", {"recompute_modules": "recipe default"}),
    (r"hybrid Mamba-attention MoE", {"hybrid": "mamba"}),
    (r"EP overlap off", {"a2a_overlap": "False"}),
    (r"EP overlap( on.*)?", {"a2a_overlap": "True"}),
    (r"HybridEP \+ plain EP overlap", {"dispatcher": "hybridep", "a2a_overlap": "True"}),
    (
        r"alltoall, EP overlap \+ delay_wgrad_compute",
        {"dispatcher": "alltoall", "a2a_overlap": "True", "delay_wgrad": "yes"},
    ),
    (r"HybridEP", {"dispatcher": "hybridep"}),
    (r"DeepEP", {"dispatcher": "deepep"}),
    (r"(TE \+ DeepEP.*)", {"dispatcher": "deepep", "kernels": r"\1"}),
    (r"(TE \+ .*)", {"kernels": r"\1"}),
    (r"CUDA graphs (\S+)", {"cg_scope": r"\1"}),
    (r"router/preprocess CG", {"cg_scope": "moe_router+moe_preprocess"}),
    (r"partial CG", {"cg_scope": "partial"}),
    (r"full CG", {"cg_scope": "full_iteration"}),
    (r"VPP ?([0-9]+)", {"vpp": r"\1"}),
    (r"FP8 blockwise", {"scaling": "block"}),
    (r"no sequence parallel", {"sequence_parallel": "no"}),
    (r"truncated depth", {"truncated": "yes"}),
    (r"no comm overlap", {"comm_overlap": "no"}),
    (r"MoE dense_layers=([0-9]+) for V3", {"first_k_dense": r"\1"}),
    (r"memory row", {"kind": "memory"}),
    (r"date (\d\d-\d\d)( .*)?", {"date": r"\1"}),
    (r"older FLOPs calculator.*", {"calculator": "older"}),
    (r"printed DP x TP.* does not equal the GPU count", {"dp_printed": "wrong"}),
    (r"(Megatron-DeepSpeed) 1F1B", {"software": r"\1", "schedule": "1f1b"}),
    (r"(fp16|bf16)", {"dtype": r"\1"}),
    (r"((FSDP|DDP|MCore|TP|HSDP)(\+\S+)*|PTD-P)", {"method": r"\1"}),
    (r"ZeRO-3 baseline.*", {"zero": "3"}),
    (r"FSDP on", {"fsdp": "yes"}),
    (r"local batch ([0-9]+)", {"local_batch": r"\1"}),
    (r"1F1B", {"schedule": "1f1b"}),
    (r"interleaved schedule", {"schedule": "interleaved"}),
    (r"(vanilla|async) TP", {"tp_kind": r"\1"}),
    (r"AsyncTP", {"tp_kind": "async"}),
    (r"Megatron-LM baseline", {"system": "Megatron-LM"}),
    (r"(MegaScale(-MoE)?)( \(.*\))?", {"system": r"\1"}),
    (r"vocab 64k", {"vocab_size": "64000"}),
    (r"global_batch derived", {"global_batch_derived": "yes"}),
    (r"A100 .*GB with (.*) node-node interconnect.*", {"network": r"\1"}),
    (r"(4x100Gb RoCE) inter-node", {"network": r"\1"}),
    (r"Eos DGX-H100.*", {"cluster": "Eos DGX-H100"}),
    (r"peak ([0-9.]+)", {"peak_tflops": r"\1"}),
    (r"(Muon) optimizer.*", {"optimizer": "muon"}),
    (r"excerpt only.*", {"excerpt": "yes"}),
    (r"activation offload(ing)?( \(.*\))?|offload", {"activation_offload": "yes"}),
    (r"OOM label", {}),
)
_RULES = tuple((re.compile(pattern), pairs) for pattern, pairs in _WORDS)


def _pairs(item: str) -> dict[str, str]:
    for pattern, pairs in _RULES:
        match = pattern.fullmatch(item)
        if match:
            return {key: match.expand(value) for key, value in pairs.items()}
    pair = _PAIR.fullmatch(item)
    return {pair[1]: pair[2].strip()} if pair else {"remark": item}


def facts_of(notes: str) -> dict[str, str]:
    """Read notes; remarks are joined with " / ", and of a key said twice the first value stays."""
    found: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in notes.split(";"))):
        for key, value in _pairs(item).items():
            if key == "remark" and key in found:
                found[key] = f"{found[key]} / {value}"
            else:
                found.setdefault(key, value)
    return found


def canonical(notes: str) -> str:
    """Write notes as pairs; reading the result gives the same facts."""
    return "; ".join(f"{key}={value}" for key, value in facts_of(notes).items())


def number(facts: Mapping[str, str], key: str) -> float | None:
    """Return the number that a fact begins with, None where there is none."""
    match = _NUMBER.match(facts.get(key, "").strip())
    return float(match[0]) if match else None
