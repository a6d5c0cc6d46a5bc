"""Models of any shape: from the ladder's ratios the ladder itself, and names that make them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfmodelError
from perfmodel.families import family_model, parse_family, rounded
from perfmodel.ladders import ladder


@given(st.integers(1, 20), st.integers(1, 256), st.integers(1, 8), st.sampled_from((1, 2, 4, 8)))
def test_the_ladders_sizes_give_the_ladders_model(q: int, n_experts: int, k: int, g: int) -> None:
    rung = ladder(q, n_experts, min(k, n_experts), g)
    model = family_model(
        d_model=rung.d_model,
        n_layers=rung.n_layers,
        d_ff=rung.d_ff,
        n_experts=n_experts,
        top_k=rung.top_k,
        d_expert=rung.d_expert,
    )
    assert model.model_copy(update={"name": rung.name}) == rung


@given(
    st.integers(1, 16),
    st.integers(2, 64),
    st.sampled_from((64, 128)),
    st.sampled_from((None, 1, 2, 4)),
    st.sampled_from((None, 0, 100, 256)),
    st.sampled_from((0, 1)),
    st.sampled_from((None, 128)),
    st.sampled_from((None, 4)),
    st.sampled_from((50257, 1000)),
)
def test_the_name_of_a_model_is_the_text_that_makes_it(
    width: int,
    layers: int,
    head_dim: int,
    n_kv: int | None,
    d_shared: int | None,
    dense: int,
    tile: int | None,
    multiple: int | None,
    vocab_size: int,
) -> None:
    model = family_model(
        d_model=512 * width,
        n_layers=layers,
        d_ff=1000,
        n_experts=8,
        top_k=2,
        d_expert=256,
        d_shared=d_shared,
        n_kv_heads=n_kv,
        head_dim=head_dim,
        first_k_dense=dense,
        vocab_size=vocab_size,
        tile=tile,
        layers_multiple=multiple,
    )
    assert parse_family(model.name) == model
    assert (tile is not None) == ("tile=" in model.name)


@given(st.floats(1e-3, 1e6), st.integers(1, 1024))
def test_rounding_takes_the_nearest_multiple_and_never_none_of_it(x: float, m: int) -> None:
    found = rounded(x, m)
    assert found is not None
    assert found % m == 0
    assert found >= m
    if x >= m:
        assert abs(found - x) <= 0.5 * m


def test_rounding_of_a_half_goes_up_and_without_a_multiple_only_whole_numbers_pass() -> None:
    assert rounded(192.0, 128) == 256
    assert rounded(191.9, 128) == 128
    assert rounded(0.1, 128) == 128
    assert rounded(3.0, None) == 3
    assert rounded(3.5, None) is None
    assert rounded(0.0, None) is None


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("family:d=512,L=4,ff=1280,E=8,K=2", "lacks de"),
        ("family:", "not a size of a model of a family"),
        ("family:d=512,d=512", "each of d, L, ff, E, K, de once"),
        ("family:d=512,L=4,ff=1280,E=8,K=2,de=1280,q=3", "'q=3' is not a size"),
        ("family:d=512,L=0,ff=1280,E=8,K=2,de=1280", "L='0' must be a whole number from 1"),
        ("family:d=512,L=4,ff=1280,E=8,K=2,de=1280,ds=-1", "ds='-1' must be a whole number from 0"),
        ("family:d=500,L=4,ff=1280,E=8,K=2,de=1280", "hd=128 must divide d=500; nearest: 125"),
        ("family:d=512,L=4,ff=1280,E=8,K=9,de=1280", "K=9 must be from 1 to E=8; nearest: 8"),
        ("family:d=512,L=4,ff=1280,E=8,K=2,de=1280,kv=3", "kv=3 must divide the 4 heads"),
        ("family:d=512,L=4,ff=1280,E=8,K=2,de=1280,dense=4", "dense=4 must be below L=4"),
    ],
)
def test_text_that_names_no_model_is_said_in_one_sentence(text: str, says: str) -> None:
    with pytest.raises(PerfmodelError) as caught:
        parse_family(text)
    message = str(caught.value)
    assert says in message
    assert message.endswith(".")
    assert "\n" not in message
