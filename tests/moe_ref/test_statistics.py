"""Balance of experts against figures worked out by hand and published ones."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")

from moe_ref.errors import MoeRefError  # noqa: E402
from moe_ref.paper_router import PaperRouter  # noqa: E402
from moe_ref.routing import Routing, counts_of  # noqa: E402
from moe_ref.statistics import (  # noqa: E402
    RoutingStatistics,
    mean_statistics,
    routing_statistics,
)


def routing(counts: list[int], kept: list[bool] | None = None) -> Routing:
    """Build a routing with K = 1 of given counts."""
    experts_TK = torch.repeat_interleave(torch.tensor(counts))[:, None]
    kept_TK = None if kept is None else torch.tensor(kept)[:, None]
    counts_E = counts_of(experts_TK, len(counts))
    return Routing(experts_TK, torch.ones(experts_TK.shape), kept_TK, counts_E)


@pytest.mark.parametrize(("counts", "squared"), [([4, 0, 0, 0], 3.0), ([3, 1, 2, 2], 0.125)])
def test_the_variation_is_over_all_experts(counts: list[int], squared: float) -> None:
    """CV^2 with the variance of the population, as Shazeer's code has it (not 0.16667)."""
    assert routing_statistics([routing(counts)]).load_cv ** 2 == pytest.approx(squared)


def test_starved_experts_and_violation_by_hand() -> None:
    """Mean 100: below 5 tokens is starved, 5 is not."""
    found = routing_statistics([routing([4, 5, 0, 391])])
    assert found.starved == 2
    assert found.max_violation == pytest.approx(2.91)
    assert found.drop_rate == 0.0
    assert found.bias_range is None


def test_balance_is_0_everywhere() -> None:
    assert routing_statistics([routing([7, 7, 7])]) == RoutingStatistics(0.0, 0.0, 0.0, 0.0, None)


def test_microbatches_add_up() -> None:
    found = routing_statistics([routing([4, 0]), routing([0, 4], [True, True, False, True])])
    assert found.max_violation == found.load_cv == 0.0
    assert found.drop_rate == 1 / 8


def test_the_range_of_the_bias_is_the_routers() -> None:
    router = PaperRouter(4, 3, 1)
    router.bias_E.copy_(torch.tensor([-0.5, 0.25, 1.0]))
    assert routing_statistics([routing([1, 1, 1])], router).bias_range == 1.5


def test_the_mean_over_layers() -> None:
    one = RoutingStatistics(1.0, 2.0, 3.0, 0.5, 4.0)
    two = RoutingStatistics(3.0, 0.0, 1.0, 0.0, 2.0)
    assert mean_statistics([one, two]) == RoutingStatistics(2.0, 1.0, 2.0, 0.25, 3.0)
    without = RoutingStatistics(3.0, 0.0, 1.0, 0.0, None)
    assert mean_statistics([one, without]).bias_range is None


def test_nothing_to_count_is_refused() -> None:
    with pytest.raises(MoeRefError, match="routings has no token"):
        routing_statistics([])
    with pytest.raises(MoeRefError, match="layers is empty"):
        mean_statistics([])


def test_counts_are_exact() -> None:
    experts_TK = torch.tensor([[3, 0], [0, 3], [2, 3]])
    counts_E = counts_of(experts_TK, 5)
    assert counts_E.tolist() == [2, 0, 1, 3, 0]
    assert counts_E.dtype == torch.int64
    assert math.fsum(counts_E.tolist()) == experts_TK.numel()
