"""Parameter counts against published tables, published models and a list of every tensor."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.architecture import Architecture, MfuConvention, ParameterConvention
from perfmodel.ladders import ladder

from .strategies import (
    Tensor,
    architectures,
    dense,
    few_steps,
    latent,
    moe,
    prediction_tensors,
    tensors,
)

BILLION = 1e9
WITH_EMBEDDING = ParameterConvention.WITH_EMBEDDING
WITHOUT_EMBEDDING = ParameterConvention.WITHOUT_EMBEDDING
NEITHER = ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD


# ---------------------------------------------------------------- arXiv 2608.10605


@pytest.mark.parametrize(
    ("q", "n_total", "n_active", "sparsity"),
    [
        (4, "15.5", "0.7", "0.954"),
        (6, "53.2", "2.3", "0.957"),
        (8, "127.3", "5.4", "0.958"),
        (10, "250.0", "10.4", "0.958"),
        (12, "433.7", "17.9", "0.959"),
        (14, "690.5", "28.2", "0.959"),
        (16, "1032.8", "41.9", "0.959"),
        # The paper prints 1472.8: the one digit of its tables that its own formula does not give.
        (18, "1472.9", "59.5", "0.960"),
    ],
)
def test_table_9_to_the_printed_digit(q: int, n_total: str, n_active: str, sparsity: str) -> None:
    model = ladder(q, n_experts=128, top_k=3, expert_split=4)
    assert f"{model.n_total() / BILLION:.1f}" == n_total
    assert f"{model.n_active() / BILLION:.1f}" == n_active
    assert f"{model.sparsity:.3f}" == sparsity


@pytest.mark.parametrize(
    ("q", "n_experts", "top_k", "expert_split", "n_active", "n_total"),
    [
        (10, 128, 2, 4, "8.5", "250.0"),
        (10, 128, 2, 8, "5.6", "126.4"),
        (10, 32, 2, 4, "8.5", "66.0"),
        (8, 32, 2, 2, "7.3", "65.8"),
    ],
)
def test_table_5_to_the_printed_digit(
    q: int, n_experts: int, top_k: int, expert_split: int, n_active: str, n_total: str
) -> None:
    model = ladder(q, n_experts, top_k, expert_split)
    assert f"{model.n_active() / BILLION:.1f}" == n_active
    assert f"{model.n_total() / BILLION:.1f}" == n_total


def test_the_optimum_of_table_3() -> None:
    model = ladder(12, n_experts=96, top_k=2, expert_split=4)
    assert f"{model.n_active() / BILLION:.2f}" == "14.52"
    assert f"{model.n_total() / BILLION:.2f}" == "327.22"
    assert f"{model.sparsity:.4f}" == "0.9556"


# ---------------------------------------------------------------- published models

MIXTRAL_8X7B = Architecture(
    name="mixtral-8x7b",
    n_layers=32,
    d_model=4096,
    n_heads=32,
    n_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    n_experts=8,
    top_k=2,
    d_expert=14336,
)
MIXTRAL_8X22B = Architecture(
    name="mixtral-8x22b",
    n_layers=56,
    d_model=6144,
    n_heads=48,
    n_kv_heads=8,
    head_dim=128,
    vocab_size=32000,
    n_experts=8,
    top_k=2,
    d_expert=16384,
)
LLAMA_2_7B = Architecture(
    name="llama-2-7b",
    n_layers=32,
    d_model=4096,
    n_heads=32,
    n_kv_heads=32,
    head_dim=128,
    d_ff=11008,
    vocab_size=32000,
)


def test_published_models_to_the_parameter() -> None:
    """Sizes of the checkpoints; all of them are free of biases."""
    assert MIXTRAL_8X7B.n_total(WITH_EMBEDDING) == 46_702_792_704
    assert MIXTRAL_8X7B.n_active(WITH_EMBEDDING) == 12_879_925_248
    assert MIXTRAL_8X7B.n_active(WITHOUT_EMBEDDING) == 12_748_853_248
    assert MIXTRAL_8X7B.n_active(NEITHER) == 12_617_781_248
    assert MIXTRAL_8X7B.n_total(NEITHER) == 46_440_648_704
    assert MIXTRAL_8X22B.n_total(WITH_EMBEDDING) == 140_620_634_112
    assert MIXTRAL_8X22B.n_active(WITH_EMBEDDING) == 39_152_031_744
    assert LLAMA_2_7B.n_total(WITH_EMBEDDING) == 6_738_415_616
    assert f"{MIXTRAL_8X7B.sparsity:.4f}" == "0.7283"


def test_qwen3_30b_up_to_its_norms_of_queries_and_keys() -> None:
    model = Architecture(
        n_layers=48,
        d_model=2048,
        n_heads=32,
        n_kv_heads=4,
        head_dim=128,
        vocab_size=151936,
        n_experts=128,
        top_k=8,
        d_expert=768,
    )
    query_and_key_norms = 48 * 2 * 128
    assert model.n_total(WITH_EMBEDDING) + query_and_key_norms == 30_532_122_624


# ---------------------------------------------------------------- a list of every tensor


def working(found: list[Tensor], a: Architecture) -> int:
    """Sum what works on one token: of the routed experts of a layer, K of E."""
    routed = sum(t.size for t in found if "expert" in t.split)
    rest = sum(t.size for t in found if "expert" not in t.split)
    return rest + (routed // a.n_experts * a.top_k if routed else 0)


@given(architectures())
def test_counts_are_those_of_a_list_of_every_tensor(a: Architecture) -> None:
    every = tensors(a)
    layers = [t for t in every if t.layer not in ("embedding", "positions", "head")]
    # A tied head is a matrix in its own right where the embedding is not counted.
    head = next(t for t in every if t.layer == ("embedding" if a.tied_embeddings else "head"))
    expected = {WITH_EMBEDDING: every, WITHOUT_EMBEDDING: [*layers, head], NEITHER: layers}
    for convention, counted in expected.items():
        assert a.n_total(convention) == sum(t.size for t in counted)
        assert a.n_active(convention) == working(counted, a)
    assert a.mtp_parameters == sum(t.size for t in prediction_tensors(a))


@given(architectures())
def test_flops_are_six_per_active_parameter_of_the_convention_that_is_named(
    a: Architecture,
) -> None:
    for mfu, parameters in (
        (MfuConvention.SIX_N_NONEMBEDDING, NEITHER),
        (MfuConvention.SIX_N_HEAD, WITHOUT_EMBEDDING),
        (MfuConvention.SIX_N_EMBEDDING, WITH_EMBEDDING),
    ):
        assert mfu.parameters is parameters
        assert a.flops_per_token(mfu) == 6 * a.n_active(parameters)
    assert a.flops_per_token() == 6 * a.n_active()


@given(architectures())
def test_conventions_are_nested_and_sparsity_is_a_fraction(a: Architecture) -> None:
    sizes = [a.n_total(c) for c in (NEITHER, WITHOUT_EMBEDDING, WITH_EMBEDDING)]
    assert sizes == sorted(sizes)
    assert all(a.n_active(c) <= a.n_total(c) for c in ParameterConvention)
    assert 0 <= a.sparsity < 1
    everything_works = a.n_moe_layers == 0 or a.top_k == a.n_experts
    assert (a.sparsity == 0) is everything_works


def test_more_experts_are_stored_but_do_not_work() -> None:
    few, many = moe(n_experts=16), moe(n_experts=32)
    router = 3 * 512 * 16
    assert many.n_active() - few.n_active() == router
    assert many.n_total() - few.n_total() == router + 3 * 16 * (3 * 512 * 384)


def test_layers_of_each_kind() -> None:
    assert (moe().n_dense_layers, moe().n_moe_layers) == (1, 3)
    assert (dense().n_dense_layers, dense().n_moe_layers) == (4, 0)
    assert moe().expert_split == 4.0
    assert dense().expert_split is None
    assert moe(d_ff=0, first_k_dense=0).expert_split is None


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"n_layers": 0}, ("n_layers", "greater than or equal to 1", "0")),
        ({"d_model": -512}, ("d_model", "greater than or equal to 1", "-512")),
        ({"d_ff": -1}, ("d_ff", "greater than or equal to 0", "-1")),
        ({"n_heads": float("nan")}, ("n_heads", "valid integer", "nan")),
        ({"head_dim": float("inf")}, ("head_dim", "valid integer", "inf")),
        ({"d_model": 512.5}, ("d_model", "valid integer", "512.5")),
        ({"vocab_size": 2**30 + 1}, ("vocab_size", "less than or equal to", "1073741825")),
        ({"n_experts": 10**30}, ("n_experts", "10000")),
        ({"d_model": "512"}, ("d_model", "valid integer", "'512'")),
        ({"n_layers": True}, ("n_layers", "valid integer", "True")),
        ({"gated": 1}, ("gated", "valid boolean", "1")),
        ({"top_k": 17}, ("top_k=17", "from 1 to n_experts=16", "nearest: 16")),
        ({"top_k": 0}, ("top_k=0", "from 1 to n_experts=16", "nearest: 1")),
        ({"n_kv_heads": 3}, ("n_kv_heads=3", "divide n_heads=8", "nearest: 2")),
        ({"n_kv_heads": 16}, ("n_kv_heads=16", "divide n_heads=8", "nearest: 8")),
        ({"d_expert": 0}, ("d_expert=0", "at least 1", "n_experts=16")),
        ({"first_k_dense": 5}, ("first_k_dense=5", "at most n_layers=4", "nearest: 4")),
        ({"d_ff": 0}, ("d_ff=0", "at least 1", "1 dense layers")),
        ({"n_experts": 0}, ("top_k=2", "must be 0", "n_experts=0")),
        ({"hidden_size": 512}, ("hidden_size", "Extra inputs are not permitted")),
        (latent() | {"n_kv_heads": 4}, ("n_kv_heads=4", "n_heads=8", "latent attention")),
        (latent() | {"head_dim": 64}, ("head_dim=64", "qk_rope_head_dim=96")),
        (latent() | {"qk_norm": "head"}, ("qk_norm='head'", "latent attention")),
        (latent() | {"biases": {"qkv": True}}, ("biases.qkv=true", "latent attention")),
        (latent(kv_lora_rank=0), ("kv_lora_rank", "greater than or equal to 1")),
        ({"moe_every": 0}, ("moe_every", "greater than or equal to 1", "0")),
        ({"moe_every": 2, "first_k_dense": 0, "d_ff": 0}, ("d_ff=0", "2 dense layers")),
        ({"window": {"width": 0}}, ("window.width", "greater than or equal to 1")),
        ({"window": {"width": 8, "fraction": 0.3}}, ("fraction=0.3", "n_layers=4", "nearest: 1")),
        ({"shared_expert_gate": True, "d_shared": 0}, ("shared_expert_gate", "d_shared=0")),
        ({"biases": {"all": True}}, ("biases.all", "Extra inputs are not permitted")),
        ({"extra": {"parameters": 5}}, ("extra.reason", "Field required")),
        ({"qk_norm": "some"}, ("qk_norm", "'none', 'head' or 'full'")),
    ],
)
def test_bad_sizes_are_said(changes: dict[str, object], says: tuple[str, ...]) -> None:
    with pytest.raises(ValidationError) as caught:
        moe(**changes)
    message = str(caught.value)
    assert all(part in message for part in says), message


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"moe_every": 2}, "moe_every=2 must be 1"),
        ({"biases": {"experts": True}}, "biases.experts=true must be false"),
        ({"biases": {"router": True}}, "biases.router=true must be false"),
    ],
)
def test_a_dense_model_has_nothing_of_a_sparse_one(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=f"{says} in a model with n_experts=0"):
        dense(**changes)


@pytest.mark.parametrize("field", ["top_k", "d_expert", "d_shared"])
def test_a_dense_model_has_no_part_of_an_expert(field: str) -> None:
    with pytest.raises(ValidationError, match=f"{field}=1 must be 0 in a model with n_experts=0"):
        dense(**{field: 1})


def test_a_missing_size_is_named() -> None:
    fields = moe().model_dump()
    del fields["vocab_size"]
    with pytest.raises(ValidationError, match=r"(?s)vocab_size.*Field required"):
        Architecture(**fields)


def test_the_nearest_number_of_heads_is_found_at_any_size() -> None:
    """A search over every number up to the largest size would not come back."""
    with few_steps(), pytest.raises(ValidationError, match=r"nearest: [24]"):
        moe(n_heads=2**30, n_kv_heads=3)


# ---------------------------------------------------------------- as a value


@given(architectures())
def test_a_model_reads_back_from_its_json(a: Architecture) -> None:
    again = Architecture.model_validate_json(a.model_dump_json())
    assert again == a
    assert again.dims == a.dims


def test_a_model_cannot_be_changed() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        moe().n_layers = 5  # type: ignore[misc]


@given(architectures(), st.sampled_from((1, 2, 4)))
def test_a_changed_copy_forgets_what_the_original_had_derived(a: Architecture, times: int) -> None:
    _ = a.dims, a.n_total()
    changed = {"n_heads": times * a.n_heads}
    if a.latent is not None:
        changed["n_kv_heads"] = changed["n_heads"]
    copy = a.model_copy(update=changed)
    fresh = Architecture(**(a.model_dump() | changed))
    assert copy.dims == fresh.dims
    assert copy.n_total() == fresh.n_total()


@given(architectures())
def test_the_summary_states_the_counts_and_their_convention(a: Architecture) -> None:
    summary = json.loads(json.dumps(a.summary()))
    assert summary["n_total"] == a.n_total(ParameterConvention(summary["parameter_convention"]))
    assert summary["n_active"] == a.n_active(ParameterConvention(summary["parameter_convention"]))
    assert summary["sparsity"] == 1 - summary["n_active"] / summary["n_total"]
    assert {name: summary[name] for name in Architecture.model_fields} == a.model_dump()
