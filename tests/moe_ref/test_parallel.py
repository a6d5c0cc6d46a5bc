"""Several processes make the step of one, and none outlives another's failure."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_ref.errors import MoeRefError, RankError  # noqa: E402
from moe_ref.experts import Experts  # noqa: E402
from moe_ref.lineage.deepseek import DeepSeekV3Router  # noqa: E402
from moe_ref.model import ReferenceModel  # noqa: E402
from moe_ref.parallel import ParallelExperts, ParallelRun  # noqa: E402
from moe_ref.ranks import run_ranks  # noqa: E402
from moe_ref.recipe import WarmupStableDecay  # noqa: E402
from moe_ref.routing import Routing, counts_of  # noqa: E402
from moe_ref.training import Run, StepReport, train  # noqa: E402

from .models import noiseless, seeded, small, text  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
RANKS, STEPS = 2, 3
SCHEDULE = WarmupStableDecay(peak=3e-3, steps=10, warmup_steps=2)

# Experts, router, experts shared among the ranks, microbatches, recompute.
RUNS: dict[str, tuple[int, Any, bool, int, bool]] = {
    "data, 4 experts": (4, noiseless, False, 1, False),
    "data, 8 experts, DeepSeek-V3": (8, DeepSeekV3Router, False, 2, False),
    "experts, 4": (4, noiseless, True, 1, False),
    "experts, 8": (8, noiseless, True, 1, False),
    "experts, 8, DeepSeek-V3, microbatches, recompute": (8, DeepSeekV3Router, True, 2, True),
}


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    """Return the batch of a step, or a rank's half of it."""
    tokens_BS = text(8, 9, seed=100 + step)
    return tokens_BS if rank is None else tokens_BS.chunk(RANKS)[rank]


def model_of(n_experts: int, router: Any, recompute: bool) -> ReferenceModel:
    return ReferenceModel(
        small(n_experts=n_experts), router=router, recompute=recompute, seed=3
    ).double()


State = dict[str, torch.Tensor]


def trained(rank: int, name: str) -> tuple[State, list[StepReport]]:
    n_experts, router, shared, accumulate, recompute = RUNS[name]
    of = ParallelRun(
        model_of(n_experts, router, recompute),
        SCHEDULE,
        expert_parallel=shared,
        accumulate=accumulate,
    )
    reports = train(of, lambda step: batch(step, rank), until=STEPS)
    return of.model.state_dict(), reports


# Of each rank: tokens, experts that they choose from, share of the pairs that has room.
EXCHANGES: dict[str, list[tuple[int, range, float]]] = {
    "uneven": [(5, range(6), 1.0), (11, range(6), 1.0)],
    "no token for rank 1": [(5, range(3), 1.0), (7, range(3), 1.0)],
    "all tokens to the other rank": [(5, range(3, 6), 1.0), (7, range(3), 1.0)],
    "some without room": [(9, range(6), 0.5), (7, range(6), 0.5)],
    "rank 0 without any room": [(5, range(6), 0.0), (7, range(6), 1.0)],
    "nothing to do": [(5, range(6), 0.0), (7, range(6), 0.0)],
}


def tokens_of(rank: int, name: str) -> tuple[torch.Tensor, Routing]:
    """Return the hidden states of a rank and what a router may have decided for them."""
    tokens, experts, room = EXCHANGES[name][rank]
    draw = seeded(17 + rank)
    chosen_TK = torch.rand(tokens, len(experts), generator=draw).topk(2).indices + experts.start
    kept_TK = None if room == 1.0 else torch.rand(tokens, 2, generator=draw) < room
    x_TD, gates_TK = (
        torch.randn(tokens, width, generator=draw, dtype=torch.float64).requires_grad_()
        for width in (4, 2)
    )
    return x_TD, Routing(chosen_TK, gates_TK, kept_TK, counts_of(chosen_TK, 6))


def experts_of_all() -> Experts:
    torch.manual_seed(5)
    return Experts(4, 6, 3, deviation=0.3).double()


def applied(experts: Experts, rank: int, name: str) -> tuple[list[torch.Tensor], list[Any]]:
    """Return the output and the gradients of the inputs, and those of the experts."""
    experts.zero_grad()
    x_TD, routing = tokens_of(rank, name)
    y_TD = experts(x_TD, routing)
    y_TD.pow(3).sum().backward()
    found = [y_TD.detach(), x_TD.grad, routing.gates_TK.grad]
    return found, [parameter.grad for parameter in experts.parameters()]


def refused(n_experts: int) -> str:
    try:
        ParallelExperts(Experts(4, n_experts, 3))
    except MoeRefError as error:
        return str(error)
    return "not refused"


def narrow(rank: int) -> StepReport:
    model = ReferenceModel(small(), router=noiseless, seed=3)
    of = ParallelRun(model, SCHEDULE, expert_parallel=True, precision=torch.bfloat16)
    return of.advance(batch(0, rank))


def everything(rank: int) -> dict[str, Any]:
    """Do in one start of the processes all that takes two of them."""
    experts = ParallelExperts(experts_of_all())
    return {
        "runs": {name: trained(rank, name) for name in RUNS},
        "exchanges": {name: applied(experts, rank, name) for name in EXCHANGES},
        "refused": [refused(n_experts) for n_experts in (1, 5, 7)],
        "narrow": narrow(rank),
        "threads": torch.get_num_threads(),
        "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }


@pytest.fixture(scope="module", autouse=True)
def _found_by_name() -> Iterator[None]:
    """Let ranks import this module: they get the path of the process that starts them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT)
        yield


@pytest.fixture(scope="module")
def ranks(_found_by_name: None) -> list[dict[str, Any]]:
    """Return what each rank found."""
    return run_ranks(everything, RANKS)


def close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-9, atol=1e-11)


# ---------------------------------------------------------------- steps


@pytest.mark.parametrize("name", RUNS)
def test_ranks_make_the_steps_of_one_process_on_all_sequences(name: str, ranks: Any) -> None:
    n_experts, router, shared, _, _ = RUNS[name]
    alone = Run(model_of(n_experts, router, False), SCHEDULE)
    want = train(alone, batch, until=STEPS)
    states = [found["runs"][name][0] for found in ranks]
    for key, value in alone.model.state_dict().items():
        parts = [state[key] for state in states]
        if shared and ".experts." in key:
            assert [len(part) for part in parts] == [n_experts // RANKS] * RANKS
            assert close(torch.cat(parts), value), key
        else:
            assert torch.equal(*parts), key
            assert close(parts[0], value), key
    biases = [value for key, value in states[0].items() if key.endswith("bias_E")]
    assert biases
    assert all(bias_E.abs().max() > 0.0 for bias_E in biases)
    reports = [found["runs"][name][1] for found in ranks]
    for of_all, *of_ranks in zip(want, *reports, strict=True):
        for report in of_ranks:
            assert report.gradient_norm == pytest.approx(of_all.gradient_norm, rel=1e-10)
            assert report.learning_rate == of_all.learning_rate
        mean = sum(report.loss for report in of_ranks) / RANKS
        assert mean == pytest.approx(of_all.loss, rel=1e-12)


def test_autocast_reaches_the_experts_of_other_ranks(ranks: Any) -> None:
    model = ReferenceModel(small(), router=noiseless, seed=3)
    want = Run(model, SCHEDULE, precision=torch.bfloat16).advance(batch(0))
    for found in ranks:
        assert found["narrow"].gradient_norm == pytest.approx(want.gradient_norm, rel=0.02)
    mean = sum(found["narrow"].loss for found in ranks) / RANKS
    assert mean == pytest.approx(want.loss, rel=1e-4)


# ---------------------------------------------------------------- exchange


@pytest.mark.parametrize("name", EXCHANGES)
def test_experts_of_other_ranks_are_as_good_as_ones_own(name: str, ranks: Any) -> None:
    full = experts_of_all()
    summed = [torch.zeros_like(parameter) for parameter in full.parameters()]
    for rank, found in enumerate(ranks):
        want, slopes = applied(full, rank, name)
        got, _ = found["exchanges"][name]
        for one, other in zip(got, want, strict=True):
            assert torch.allclose(one, other, rtol=0.0, atol=1e-12)
        summed = [total + slope for total, slope in zip(summed, slopes, strict=True)]
    parts = zip(*(found["exchanges"][name][1] for found in ranks), strict=True)
    for of_ranks, total in zip(parts, summed, strict=True):
        assert torch.allclose(torch.cat(of_ranks), total, rtol=0.0, atol=1e-12)


def test_experts_that_the_ranks_do_not_divide_are_refused(ranks: Any) -> None:
    rule = "must be a multiple of the 2 ranks that share the experts; nearest: "
    want = [f"n_experts={n} {rule}{nearest}." for n, nearest in ((1, 2), (5, 4), (7, 8))]
    assert [found["refused"] for found in ranks] == [want, want]


# ---------------------------------------------------------------- processes


def test_ranks_have_their_threads_and_talk_over_loopback(ranks: Any) -> None:
    assert [found["threads"] for found in ranks] == [1, 1]
    assert {found["interface"] for found in ranks} <= {"lo", "lo0", None}


def fails(rank: int) -> None:
    if rank == 1:
        raise KeyError("what went wrong")
    torch.distributed.barrier()


def cannot_be_sent(rank: int) -> Any:
    return lambda: rank


def dies(rank: int) -> None:
    if rank == 0:
        os._exit(3)
    torch.distributed.barrier()


def test_a_rank_that_fails_ends_the_others_and_says_why() -> None:
    with pytest.raises(RankError, match="rank 1 failed: KeyError: 'what went wrong'") as caught:
        run_ranks(fails, RANKS)
    assert "in fails" in caught.value.__notes__[0]


def test_a_result_that_cannot_be_sent_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankError, match=r"rank 0 failed: .*pickle"):
        run_ranks(cannot_be_sent, 1)


def test_a_rank_that_dies_ends_the_others() -> None:
    with pytest.raises(RankError, match="rank 0 ended without a result, with exit code 3"):
        run_ranks(dies, RANKS)


@pytest.mark.parametrize(("count", "threads"), [(0, 1), (1, 0)])
def test_less_than_one_rank_or_thread_is_refused(count: int, threads: int) -> None:
    with pytest.raises(MoeRefError, match="=0 must be at least 1; nearest: 1"):
        run_ranks(fails, count, threads=threads)
