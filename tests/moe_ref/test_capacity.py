"""Exactly the tokens over capacity are dropped, in the order that is named."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from moe_ref import (  # noqa: E402
    Capacity,
    CapacityRounding,
    DropOrder,
    MoeRefError,
    within_capacity,
)


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    """Draw choices of some local groups of tokens, of which some are not sent."""
    local_groups, size = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    n_experts = draw(st.integers(1, 5))
    top_k = draw(st.integers(1, n_experts))
    tokens = local_groups * size
    row = st.permutations(range(n_experts)).map(lambda p: p[:top_k])
    experts = draw(st.lists(row, min_size=tokens, max_size=tokens))
    sent = draw(st.lists(st.booleans(), min_size=tokens * top_k, max_size=tokens * top_k))
    level = st.sampled_from([0.125, 0.25, 0.5, 0.75])  # with ties
    priority = draw(st.lists(level, min_size=tokens * top_k, max_size=tokens * top_k))
    return {
        "experts": experts,
        "sent": [sent[t * top_k : (t + 1) * top_k] for t in range(tokens)],
        "priority": [priority[t * top_k : (t + 1) * top_k] for t in range(tokens)],
        "n_experts": n_experts,
        "local_groups": local_groups,
        "slots": draw(st.integers(0, 4)),
    }


def served(case: dict[str, Any], order: DropOrder) -> list[tuple[int, int]]:
    """List (token, choice) as they are served, from what the order says."""
    tokens, top_k = len(case["experts"]), len(case["experts"][0])
    pairs = [(t, k) for t in range(tokens) for k in range(top_k)]
    priority = case["priority"]
    key = {
        DropOrder.GSHARD: lambda p: (p[1], p[0]),
        DropOrder.POSITION: lambda p: (p[0], p[1]),
        DropOrder.MEGATRON_PROBS: lambda p: (-priority[p[0]][p[1]], p[0], p[1]),
        DropOrder.DEEPSPEED_PROBS: lambda p: (-priority[p[0]][p[1]], p[0], p[1]),
        DropOrder.BATCH_PRIORITIZED: lambda p: (p[1], -max(priority[p[0]]), p[0]),
    }[order]
    return sorted(pairs, key=key)


@pytest.mark.parametrize("order", DropOrder)
@given(case=choices())
def test_those_over_capacity_are_dropped_in_order(order: DropOrder, case: dict[str, Any]) -> None:
    size = len(case["experts"]) // case["local_groups"]
    taken: dict[tuple[int, int], int] = {}
    expected = [[False] * len(row) for row in case["experts"]]
    for t, k in served(case, order):
        if case["sent"][t][k]:
            room = (t // size, case["experts"][t][k])
            expected[t][k] = taken.get(room, 0) < case["slots"]
            taken[room] = taken.get(room, 0) + 1
    kept_TK = within_capacity(
        torch.tensor(case["experts"]),
        case["n_experts"],
        case["slots"],
        order,
        sent_TK=torch.tensor(case["sent"]),
        priority_TK=torch.tensor(case["priority"]),
        local_groups=case["local_groups"],
    )
    assert kept_TK.tolist() == expected


@given(case=choices(), more=st.integers(0, 3))
def test_room_for_more_keeps_all_that_were_kept(case: dict[str, Any], more: int) -> None:
    experts_TK = torch.tensor(case["experts"])
    few, many = (
        within_capacity(experts_TK, case["n_experts"], slots, local_groups=case["local_groups"])
        for slots in (case["slots"], case["slots"] + more)
    )
    assert (many | ~few).all()


def test_an_order_by_probability_needs_one() -> None:
    with pytest.raises(MoeRefError, match="priority_TK is None, but the order megatron-probs"):
        within_capacity(torch.tensor([[0]]), 1, 1, DropOrder.MEGATRON_PROBS)


@given(
    tokens=st.integers(1, 5000),
    n_experts=st.integers(1, 256),
    top_k=st.integers(1, 8),
    factor=st.floats(0.1, 4.0),
)
def test_a_capacity_is_near_its_factor(
    tokens: int, n_experts: int, top_k: int, factor: float
) -> None:
    for rounding in (CapacityRounding.MEGATRON, CapacityRounding.DEEPSPEED):
        slots = Capacity(factor=factor, rounding=rounding).slots_for(tokens, n_experts, top_k)
        exact = top_k * tokens / n_experts * factor
        assert exact * (1.0 - 1e-6) <= slots < (exact + 1.0) * (1.0 + 1e-6)
    floor = Capacity(factor=factor, rounding=CapacityRounding.PLAIN_INT)
    assert floor.slots_for(tokens, n_experts, top_k) <= tokens / n_experts * factor


def test_a_minimum_and_fixed_slots() -> None:
    assert Capacity(minimum=4).slots_for(8, 8, 1) == 4
    assert Capacity(slots=7, factor=3.0, minimum=9).slots_for(8, 8, 1) == 7
    room = Capacity(factor=1.0, eval_factor=2.0)
    assert (room.slots_for(8, 4, 1), room.slots_for(8, 4, 1, training=False)) == (2, 4)
