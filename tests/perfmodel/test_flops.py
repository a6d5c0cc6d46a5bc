"""Megatron's convention: published throughput, known faults, and what it leaves out."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from statistics import mean, median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import Architecture, catalogue
from perfmodel.architecture import MfuConvention
from perfmodel.errors import PerfmodelError

from .strategies import architectures, latent, moe

MEGATRON = MfuConvention.MEGATRON


def giga(a: Architecture, seq_len: int = 4096) -> str:
    return f"{a.flops_per_token(seq_len=seq_len, convention='megatron') / 1e9:.3f}"


@pytest.mark.parametrize(
    ("name", "gflop"),
    [
        ("DeepSeek-V3", "259.993"),
        ("Kimi-K2", "204.477"),
        ("Qwen3-235B-A22B", "148.035"),
        ("Qwen3-30B-A3B", "23.006"),
    ],
)
def test_flops_of_a_token_to_the_printed_digit(name: str, gflop: str) -> None:
    assert giga(catalogue[name]) == gflop


def test_without_its_prediction_layer_deepseek_does_less() -> None:
    assert giga(catalogue["DeepSeek-V3"].model_copy(update={"mtp_layers": 0})) == "249.812"


@pytest.mark.parametrize(
    ("changes", "tflops"),
    [
        ({"gated": False, "window": None}, "158.2"),  # the fault of the 26.02 tables
        ({"window": None}, "199.9"),
        ({}, "189.7"),
    ],
)
def test_report_8_a_gate_by_its_flag_and_a_window_by_its_width(
    changes: dict[str, object], tflops: str
) -> None:
    a = catalogue["gpt-oss-120b"].model_copy(update=changes)
    assert f"{5824 * a.flops_per_token(MEGATRON, 4096) / 1e12:.1f}" == tflops


def test_report_9_active_experts_work_and_not_all() -> None:
    """MaxText's count of 1024 tokens has the whole square of scores, and the router."""
    a = catalogue["Mixtral-8x7B"]

    def maxtext(a: Architecture) -> float:
        router = 6 * a.n_layers * a.d_model * a.n_experts
        return 1024 * (a.flops_per_token(MEGATRON, 2 * 1024) + router) / 1e12

    every = maxtext(a.model_copy(update={"top_k": 8}))
    assert f"{maxtext(a):.2f}" == "79.98"
    assert f"{every:.2f}" == "287.78"
    assert f"{every / maxtext(a):.3f}" == "3.598"


def test_report_7_throughput_of_256_devices() -> None:
    tokens_per_s = 15360 * 4096 / 38.3 / 256
    assert round(tokens_per_s) == 6417
    flops = catalogue["DeepSeek-V3"].flops_per_token(MEGATRON, 4096)
    assert tokens_per_s * flops / 1e12 == pytest.approx(1668, abs=0.5)


def test_report_34_attention_over_packed_sequences() -> None:
    """Four sequences of a quarter each need a quarter of the scores."""
    a = Architecture(
        n_layers=4, d_model=512, n_heads=8, n_kv_heads=8, head_dim=64, d_ff=2048, vocab_size=1
    )
    core = {s: a.flops_per_token(MEGATRON, s) - a.flops_per_token(MEGATRON, 1) for s in (256, 1024)}
    assert core[1024] == 6 * 4 * 8 * 64 * 1023
    assert 1024 * core[1024] - 1024 * core[256] == 6 * 4 * 512 * 1024 * (1024 - 256)


# ---------------------------------------------------------------- laws


@given(architectures(), st.integers(1, 8192))
def test_a_look_up_is_no_product_and_a_head_is_tied_or_not(a: Architecture, seq_len: int) -> None:
    for tied in (False, True):
        same = a.model_copy(update={"tied_embeddings": tied, "learned_positions": 7})
        assert same.flops_per_token(MEGATRON, seq_len) == a.flops_per_token(MEGATRON, seq_len)
    larger = a.model_copy(update={"vocab_size": a.vocab_size + 1})
    grown = larger.flops_per_token(MEGATRON, seq_len) - a.flops_per_token(MEGATRON, seq_len)
    assert grown == pytest.approx(6 * (1 + a.mtp_layers) * a.d_model, abs=1)


@given(architectures(), st.integers(1, 4096))
def test_longer_sequences_and_more_active_experts_take_more(a: Architecture, seq_len: int) -> None:
    here = a.flops_per_token(MEGATRON, seq_len)
    assert a.flops_per_token(MEGATRON, 2 * seq_len) >= here
    if 1 <= a.top_k < a.n_experts:
        more = a.model_copy(update={"top_k": a.top_k + 1}).flops_per_token(MEGATRON, seq_len)
        assert (more > here) is (a.n_moe_layers > 0)
    idle = a.model_copy(update={"n_experts": 2 * a.n_experts})
    assert idle.flops_per_token(MEGATRON, seq_len) == here


@given(architectures())
def test_without_attention_it_is_six_per_weight(a: Architecture) -> None:
    """At one token the scores are one product; vectors and router are the rest of the 6 N."""
    a = a.model_copy(update={"mtp_layers": 0})
    rest = 6 * a.n_active(MfuConvention.SIX_N_HEAD.parameters or "")
    width = a.head_dim + (a.latent.v_head_dim if a.latent else a.head_dim)
    scores = 3 * a.n_layers * a.n_heads * width
    assert a.flops_per_token(MEGATRON, 1) <= rest + scores


def test_a_window_as_long_as_the_sequence_changes_nothing() -> None:
    full = moe()
    for width, same in ((4096, True), (2048, True), (2047, False)):
        a = moe(window={"width": width, "fraction": 0.5})
        equal = a.flops_per_token(MEGATRON, 2048) == full.flops_per_token(MEGATRON, 2048)
        assert equal is same


def test_latent_attention_by_hand() -> None:
    a = moe(**latent(), n_experts=0, top_k=0, d_expert=0, d_shared=0, first_k_dense=0)
    layer = 96 * (512 + 8 * 96 + 1) + 64 * (512 + 8 * (64 + 48) + 1) + 512 * 32 + 8 * 48 * 512
    core = 1000 * 8 * (96 + 48) // 2
    weights = 4 * (layer + core + 3 * 512 * 1536) + 512 * 32000
    assert a.flops_per_token(MEGATRON, 1000) == 6 * weights


# ---------------------------------------------------------------- input


@pytest.mark.parametrize("seq_len", [None, 0, -1])
def test_a_missing_sequence_length_is_said(seq_len: int | None) -> None:
    with pytest.raises(PerfmodelError, match=r"seq_len=.* must be at least 1.*attention"):
        moe().flops_per_token("megatron", seq_len)


def test_an_unknown_convention_is_said() -> None:
    with pytest.raises(PerfmodelError, match="convention='7n' must be one of 6n-nonembedding"):
        moe().flops_per_token("7n")


# ---------------------------------------------------------------- published throughput

FAULTY = re.compile(r"25\.11|26\.0[24]")
"""Tables whose GPT-OSS rows count an ungated block and no window."""


def published(data: Path) -> dict[str, list[tuple[str, float, float]]]:
    """Return source, stated and derived TFLOP/s of Megatron-Bridge's tables, by model.

    Hybrids are not in the catalogue; fine-tuning packs sequences, so its tokens attend to fewer.
    """
    found: dict[str, list[tuple[str, float, float]]] = {}
    path = data / "published_runs" / "published_runs.csv"
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            name = re.sub(r" \(.*\)", "", row["model"])
            stated = re.search(r"(?:^|; )tflops_per_gpu=([0-9.]+)", row["notes"])
            summary = "Megatron-Bridge perf summary" in row["source"]
            if not summary or stated is None or name not in catalogue:
                continue
            if "SFT" in row["model"] or row["unit"] != "tokens/s/GPU":
                continue
            a = catalogue[name]
            if "w/o MTP" in row["model"]:
                a = a.model_copy(update={"mtp_layers": 0})
            flops = a.flops_per_token(MEGATRON, int(row["seq_len"]))
            derived = float(row["measured_value"]) * flops / 1e12
            found.setdefault(a.name, []).append((row["source"], float(stated[1]), derived))
    return found


def test_published_tflops_follow_from_published_tokens(shared_data: Path) -> None:
    errors = {
        name: [
            derived / stated - 1 for source, stated, derived in rows if not FAULTY.search(source)
        ]
        for name, rows in published(shared_data).items()
        if name == "gpt-oss-120b"
    } | {
        name: [derived / stated - 1 for _, stated, derived in rows]
        for name, rows in published(shared_data).items()
        if name != "gpt-oss-120b"
    }
    sparse = [e for name, found in errors.items() if catalogue[name].n_experts for e in found]
    assert len(sparse) >= 60
    assert max(map(abs, sparse)) < 0.009
    assert abs(mean(sparse)) < 0.0005
    # One table (26.04.01) rounds those of Llama 3 to multiples of 32 tokens/s.
    solid = [e for name, found in errors.items() if not catalogue[name].n_experts for e in found]
    assert len(solid) >= 60
    assert max(map(abs, solid)) < 0.023
    assert median(map(abs, solid)) < 0.0005


def test_report_8_the_fault_is_in_every_row_of_the_older_tables(shared_data: Path) -> None:
    a = catalogue["gpt-oss-120b"]
    fault = a.model_copy(update={"gated": False, "window": None})
    share = fault.flops_per_token(MEGATRON, 4096) / a.flops_per_token(MEGATRON, 4096)
    rows = [row for row in published(shared_data)[a.name] if FAULTY.search(row[0])]
    assert len(rows) > 10
    for _, stated, derived in rows:
        assert derived * share == pytest.approx(stated, rel=0.011)
