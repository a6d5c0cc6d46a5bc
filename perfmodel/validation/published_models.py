"""Which architecture a published run trained, from its label and its dimensions.

Named models are the catalogue's. Models by dimensions take layers, widths and heads from the row;
what a row leaves out stands in the tables here, each with the public document that has it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from pydantic import ValidationError

from perfmodel.architecture import Architecture
from perfmodel.errors import PerfmodelError
from perfmodel.frozen import explain
from perfmodel.models import catalogue
from perfmodel.parts import Biases

__all__ = ["ModelRow", "architecture_of"]


class ModelRow(NamedTuple):
    """What a row says of its model; None where it says nothing."""

    source: str
    label: str
    n_layers: int | None
    d_model: int | None
    d_ff: int | None
    seq_len: int
    facts: Mapping[str, str]


_GPT_BIASES = Biases(qkv=True, output=True, ffn=True, norms=True)

_NAMED: tuple[tuple[str, str], ...] = (
    (r"deep-?seek-?v3(-671b)?", "DeepSeek-V3"),
    (r"deep-?seek-?v2", "DeepSeek-V2"),
    (r"kimi-?k2", "Kimi-K2"),
    (r"moonlight-?16b", "Moonlight-16B-A3B"),
    (r"qwen3-?(moe-?)?30b(-?a3b)?", "Qwen3-30B-A3B"),
    (r"qwen3-?235b-?a22b", "Qwen3-235B-A22B"),
    (r"qwen2-57b-a14b", "Qwen2-57B-A14B"),
    (r"gpt-?oss-?120b", "gpt-oss-120b"),
    (r"gpt-?oss-?20b", "gpt-oss-20b"),
    (r"mixtral-8x7b", "Mixtral-8x7B"),
    (r"mixtral-8x22b", "Mixtral-8x22B"),
    (r"llama-?2-?(7|13|70)b", r"Llama-2-\1B"),
    (r"llama-?3(\.1)?-?(8|70|405)b", r"Llama-3-\2B"),
    (r"llama-?4-(scout|maverick)", r"Llama-4-\1"),
    (r"gpt-?3-175b", "GPT-3-175B"),
    (r"megatron-22b", "Megatron-GPT-22B"),
    (r"megatron-175b", "GPT-3-175B"),
    (r"megatron-530b", "Megatron-GPT-530B"),
    (r"megatron-1008b", "Megatron-GPT-1T"),
)

# Layers, width, heads of MPT: llm-foundry scripts/train/yamls/pretrain/mpt-*.yaml (vocabulary
# 50368, learned positions, no biases, heads of 128 at 760m to 3b for FlashAttention). With them
# the published MFU follows from the published tokens/s within 0.1%.
_MPT = {
    "125m": (12, 768, 12),
    "350m": (24, 1024, 16),
    "760m": (24, 1536, 12),
    "1b": (24, 2048, 16),
    "3b": (32, 2560, 20),
    "7b": (32, 4096, 32),
    "13b": (40, 5120, 40),
    "30b": (48, 7168, 56),
    "70b": (80, 8192, 64),
}
_MPT_VOCABULARY = 50368

# Layers, width, heads, feed-forward width: InternEvo configs/_base_/models/internlm_7B.py and
# internlm_20B.py (width ratio 8/3, rounded up to a multiple of 256).
_INTERNLM = {"7B": (32, 4096, 32, 11008), "20B": (60, 5120, 40, 13824)}
_INTERNLM_VOCABULARY = 103168

# Heads, KV heads, vocabulary, gated: NeMo's recipes of these models (nemo/collections/llm).
_NEMO = {
    "gpt3-5b": (32, 32, 51200),
    "gpt3-20b": (48, 48, 51200),
    "gpt3-175b": (96, 96, 51200),
    "nemotron-8b": (32, 32, 256000),
    "nemotron-15b": (48, 8, 256000),
    "nemotron-22b": (48, 48, 256000),
    "nemotron-340b": (96, 8, 256000),
}

# Heads where a BigScience row does not state them: 64 "all (above too)" in its "Final round"
# section, but 64 does not divide 14400, for which the first section states 96 (32 at 8 layers).
# Vocabulary 250880: with it the published TFLOPs follow from the published times to 4 digits.
# ALiBi: no learned positions.
_BIGSCIENCE_HEADS = 64
_BIGSCIENCE_HEADS_14400 = {8: 32}
_BIGSCIENCE_VOCABULARY = 250880

# MegaScale, arXiv 2402.15627, table 1: heads; vocabulary 64,000 (section 6).
_MEGASCALE_HEADS = {"GPT-175B": 128, "GPT-530B": 160}

_MEGATRON_VOCABULARY = 51200  # arXiv 2104.04473, section 5

# nanotron: vocabulary 131072; with it the published TFLOPs follow from tokens/s.
_NANOTRON_VOCABULARY = 131072

_LORA = re.compile(r"\(lora\)", re.IGNORECASE)
_NOT_PRICED: tuple[tuple[str, str], ...] = (
    (r"nemotron-(3|v3)-.*", "its hybrid Mamba-attention layers are not modelled"),
    (r"qwen3-next.*|qwen3\.5.*", "its gated delta layers are not modelled"),
    (r"deep-?seek-?v4.*", "its sparse attention is not described"),
    (r"gemma4.*", "its mixed attention is not described"),
    (r"llama3-8x70b", "the row has no top-k"),
    (r"mixtral-8x2b.*", "its widths are not stated"),
    (r"moe-352b", "the row has no tensor and expert degrees"),
)


def _bare(label: str) -> str:
    """Return a label in lower case, without what stands in brackets, spaces and underscores."""
    text = re.sub(r"\(.*?\)", "", label).strip().lower()
    return re.sub(r"[ _]+", "-", text)


def _made(label: str, **fields: object) -> Architecture:
    try:
        return Architecture.model_validate({"name": label, **fields})
    except ValidationError as error:
        raise PerfmodelError(f"The shape of {label} is not possible: {explain(error)}.") from None


def _gpt(
    row: ModelRow, n_layers: int, d_model: int, heads: int, vocabulary: int, **more: object
) -> Architecture:
    """Return a GPT: multi-head attention, ungated blocks of 4 d, tied embeddings, biases."""
    return _made(
        row.label,
        **{
            "n_layers": n_layers,
            "d_model": d_model,
            "n_heads": heads,
            "n_kv_heads": heads,
            "head_dim": d_model // heads,
            "d_ff": row.d_ff or 4 * d_model,
            "vocab_size": vocabulary,
            "gated": False,
            "tied_embeddings": True,
            "biases": _GPT_BIASES,
            "learned_positions": row.seq_len,
            **more,
        },
    )


def _whole(facts: Mapping[str, str], key: str) -> int | None:
    text = facts.get(key, "")
    return int(text) if text.isdigit() else None


def _named(row: ModelRow) -> Architecture | None:
    bare = _bare(row.label)
    if bare == "mixtral-8x22b-g8t8":
        fine = catalogue["Mixtral-8x22B"].model_dump(exclude={"name"})
        return _made(row.label, **fine | {"n_experts": 64, "top_k": 8, "d_expert": 2048})
    for pattern, name in _NAMED:
        match = re.fullmatch(pattern, bare)
        if match:
            return _variant(row, catalogue[match.expand(name)])
    return None


def _variant(row: ModelRow, model: Architecture) -> Architecture:
    """Return a named model with the row's depth, and with prediction layers if it has them."""
    changes: dict[str, object] = {}
    if row.n_layers is not None and row.n_layers != model.n_layers:
        if "layers)" not in row.label:
            raise PerfmodelError(
                f"n_layers={row.n_layers} is not that of {model.name}, {model.n_layers}."
            )
        changes["n_layers"] = row.n_layers
        changes["first_k_dense"] = min(1, model.first_k_dense)
        changes["mtp_layers"] = 0
    elif model.mtp_layers:
        with_mtp = row.source.startswith("Megatron-Bridge") or "mtp_layers" in row.facts
        changes["mtp_layers"] = int(with_mtp and "w/o MTP" not in row.label)
    if not changes:
        return model
    return _made(model.name, **model.model_dump(exclude={"name"}) | changes)


def _mpt(row: ModelRow) -> Architecture:
    shape = _MPT.get(_bare(row.label).removeprefix("mpt-"))
    if shape is None:
        raise PerfmodelError(f"{row.label} is no MPT whose configuration is known.")
    return _gpt(row, *shape, _MPT_VOCABULARY, biases=Biases(), d_ff=4 * shape[1])


def _internlm(row: ModelRow) -> Architecture:
    shape = _INTERNLM.get(row.label.removeprefix("InternLM-"))
    if shape is None:
        raise PerfmodelError(f"{row.label} is no InternLM whose configuration is known.")
    n_layers, d_model, heads, d_ff = shape
    return _made(
        row.label,
        n_layers=n_layers,
        d_model=d_model,
        n_heads=heads,
        n_kv_heads=heads,
        head_dim=d_model // heads,
        d_ff=d_ff,
        vocab_size=_INTERNLM_VOCABULARY,
        biases=Biases(qkv=True, output=True),
    )


def _nanotron(row: ModelRow) -> Architecture:
    heads = _whole(row.facts, "heads")
    if not (row.n_layers and row.d_model and row.d_ff and heads):
        raise PerfmodelError("The row lacks a width or the number of heads.")
    kv = _whole(row.facts, "kv_heads") or heads
    fields: dict[str, object] = {
        "n_layers": row.n_layers,
        "d_model": row.d_model,
        "n_heads": heads,
        "n_kv_heads": kv,
        "head_dim": row.d_model // heads,
        "d_ff": row.d_ff,
        "vocab_size": _NANOTRON_VOCABULARY,
    }
    untied = _made(row.label, **fields)
    printed = re.fullmatch(r"nanotron-([0-9.]+)G", row.label)
    # The label is the number of parameters, with one matrix of the vocabulary or with both.
    both = untied.n_total() + 2 * untied.vocab_size * untied.d_model
    one = both - untied.vocab_size * untied.d_model
    if printed and abs(float(printed[1]) * 1e9 - one) < abs(float(printed[1]) * 1e9 - both):
        return _made(row.label, **fields, tied_embeddings=True)
    return untied


def _nemo(row: ModelRow) -> Architecture | None:
    shape = _NEMO.get(_bare(row.label))
    if shape is None or not (row.n_layers and row.d_model and row.d_ff):
        return None
    heads, kv, vocabulary = shape
    more = {"n_kv_heads": kv}
    if vocabulary != _MEGATRON_VOCABULARY:
        more |= {"learned_positions": 0, "tied_embeddings": False}
    return _gpt(row, row.n_layers, row.d_model, heads, vocabulary, **more)


def _by_dimensions(row: ModelRow) -> Architecture:
    """Return a GPT of the row's own dimensions."""
    if not (row.n_layers and row.d_model):
        raise PerfmodelError(f"The row of {row.label} has no number of layers or no width.")
    heads = _whole(row.facts, "heads")
    vocabulary = _whole(row.facts, "vocab_size") or _MEGATRON_VOCABULARY
    more: dict[str, object] = {}
    if row.source.startswith("BigScience"):
        vocabulary, more["learned_positions"] = _BIGSCIENCE_VOCABULARY, 0
        if heads is None:
            known = _BIGSCIENCE_HEADS_14400.get(row.n_layers, 96)
            heads = known if row.d_model == 14400 else _BIGSCIENCE_HEADS
    elif row.source.startswith("MegaScale"):
        heads = heads or _MEGASCALE_HEADS.get(row.label)
        vocabulary = 64000
    if heads is None:
        raise PerfmodelError(f"The row of {row.label} has no number of heads.")
    if row.d_model % heads:
        raise PerfmodelError(f"heads={heads} must divide the width {row.d_model} of {row.label}.")
    return _gpt(row, row.n_layers, row.d_model, heads, vocabulary, **more)


def architecture_of(row: ModelRow) -> Architecture:
    """Return the architecture of a row.

    Raises
    ------
    PerfmodelError
        One sentence: a model that is not modelled, or that the row does not describe.
    """
    bare = _bare(row.label)
    if _LORA.search(row.label):
        raise PerfmodelError("LoRA trains adapters alone, a step that is not modelled.")
    for pattern, reason in _NOT_PRICED:
        if re.fullmatch(pattern, bare):
            raise PerfmodelError(f"{row.label} is left out: {reason}.")
    if bare.startswith("mpt-"):
        return _mpt(row)
    if bare.startswith("internlm"):
        return _internlm(row)
    if bare.startswith("nanotron"):
        return _nanotron(row)
    found = _named(row) or _nemo(row)
    if found is None and bare == "gpt-529.6b" and row.n_layers is None:
        found = catalogue["Megatron-GPT-530B"]
    if found is None and bare == "gpt-174.6b" and row.n_layers is None:
        found = catalogue["GPT-3-175B"]  # arXiv 2104.04473, section 5.2
    return found or _by_dimensions(row)
