"""The ladder of arXiv 2608.10605, Section 7.1, and its text form."""

from __future__ import annotations

from math import gcd

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from perfmodel.errors import PerfmodelError
from perfmodel.ladders import GPT2_VOCABULARY, ladder, parse_ladder

from .strategies import few_steps


@given(st.integers(1, 40), st.integers(1, 512), st.data())
def test_the_geometry_of_every_rung(q: int, n_experts: int, data: st.DataObject) -> None:
    top_k = data.draw(st.integers(1, n_experts))
    split = data.draw(st.sampled_from((1, 2, 4, 5, 8)))
    model = ladder(q, n_experts, top_k, split)
    assert model.n_layers == model.n_heads == 4 * q
    assert model.d_model == 512 * q == model.n_heads * model.head_dim
    assert model.d_ff == 2.5 * model.d_model == split * model.d_expert
    assert model.d_shared == model.d_expert
    assert model.expert_split == split
    assert model.first_k_dense == 1
    assert model.n_kv_heads == gcd(8, model.n_heads)
    assert (model.n_experts, model.top_k) == (n_experts, top_k)
    assert model.vocab_size == GPT2_VOCABULARY
    assert model.gated
    assert not model.tied_embeddings


@given(st.integers(1, 40), st.integers(1, 512), st.integers(1, 8))
def test_the_name_of_a_rung_is_the_text_that_makes_it(q: int, n_experts: int, k: int) -> None:
    model = ladder(q, n_experts, min(k, n_experts), 4)
    assert parse_ladder(model.name) == model


def test_the_name_of_a_rung_with_another_vocabulary_says_so() -> None:
    model = ladder(2, 8, 2, 4, vocab_size=1000)
    assert parse_ladder(model.name) == model


def test_text_forms() -> None:
    model = ladder(12, 96, 2, 4)
    assert parse_ladder("ladder:q=12,E=96,K=2,G=4") == model
    assert parse_ladder("G=4, K=2 ,E = 96,q=12") == model
    assert parse_ladder("ladder:q=12,E=96,K=2,G=4,V=1000") == ladder(12, 96, 2, 4, 1000)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("ladder:q=12,E=96,K=2", "lacks G"),
        ("ladder:", "not a size of a ladder model"),
        ("", "not a size of a ladder model"),
        ("q=12", "lacks E, K, G"),
        ("ladder:q=12,E=96,K=2,G=4,d=3", "'d=3' is not a size of a ladder model"),
        ("ladder:q=12,q=12,E=96,K=2,G=4", "each of q, E, K and G once"),
        ("ladder:q=12;E=96", "must be a whole number"),
        ("ladder:q=1.5,E=96,K=2,G=4", "q='1.5' must be a whole number"),
        ("ladder:q=-1,E=96,K=2,G=4", "q='-1' must be a whole number"),
        ("ladder:q=1_0,E=96,K=2,G=4", "q='1_0' must be a whole number"),
        ("ladder:q=٣,E=96,K=2,G=4", "must be a whole number"),
        ("ladder:q=nan,E=96,K=2,G=4", "q='nan' must be a whole number"),
        ("ladder:q=0,E=96,K=2,G=4", "q=0 must be from 1 to 4096; nearest: 1"),
        ("ladder:q=12,E=0,K=2,G=4", "E=0 must be from 1 to"),
        ("ladder:q=12,E=96,K=0,G=4", "K=0 must be from 1 to"),
        ("ladder:q=12,E=96,K=2,G=0", "G=0 must be from 1 to"),
        ("ladder:q=12,E=96,K=2,G=7", "G=7 must divide d_ff=15360; nearest: "),
        ("ladder:q=12,E=96,K=2,G=999999999", "must divide d_ff=15360; nearest: 15360"),
    ],
)
def test_text_that_names_no_model_is_said_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(PerfmodelError) as caught:
        parse_ladder(text)
    message = str(caught.value)
    assert says in message
    assert message.endswith(".")
    assert "\n" not in message


def test_the_nearest_split_divides_and_is_nearest() -> None:
    with pytest.raises(PerfmodelError, match=r"G=7 must divide d_ff=15360; nearest: (6|8)\.$"):
        ladder(12, 96, 2, 7)


def test_more_active_experts_than_experts() -> None:
    with pytest.raises(PerfmodelError, match=r"^K=5 must be at most E=4; nearest: 4\.$"):
        ladder(2, 4, 5, 4)


@pytest.mark.parametrize("text", ["q=300000000,E=8,K=2,G=4", "q=1,E=8,K=2,G=4,V=0"])
def test_a_size_beyond_every_model_is_said_in_one_sentence(text: str) -> None:
    with pytest.raises(PerfmodelError) as caught:
        parse_ladder(text)
    assert str(caught.value).endswith(".")
    assert "\n" not in str(caught.value)


def test_a_split_that_does_not_divide_a_huge_width_is_refused_at_once() -> None:
    """A search over every number up to the width would not come back."""
    with few_steps(), pytest.raises((PerfmodelError, ValidationError)):
        parse_ladder("q=200000000,E=8,K=2,G=7")
