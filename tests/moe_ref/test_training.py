"""A run is repeatable, resumable and indifferent to how a batch is divided."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from moe_ref.errors import MoeRefError  # noqa: E402
from moe_ref.model import ReferenceModel  # noqa: E402
from moe_ref.paper_router import PaperRouter, RouterRecipe  # noqa: E402
from moe_ref.recipe import WarmupStableDecay  # noqa: E402
from moe_ref.training import Run, TokenWindows, train  # noqa: E402

from .models import VOCABULARY, noiseless, noisy, small, text  # noqa: E402

SCHEDULE = WarmupStableDecay(peak=3e-3, steps=10, warmup_steps=2)


def run(router: Any = noisy, double: bool = False, architecture: Any = None, **options: Any) -> Run:
    recompute = options.pop("recompute", False)
    model = ReferenceModel(architecture or small(), router=router, recompute=recompute)
    return Run(model.double() if double else model, SCHEDULE, **options)


def batch(step: int) -> torch.Tensor:
    return text(4, 9, seed=100 + step)


def state(of: Run) -> dict[str, torch.Tensor]:
    """Return all that a run is."""
    found = {f"model.{name}": value for name, value in of.model.state_dict().items()}
    for name, parameter in of.model.named_parameters():
        for key, value in of.optimizer.state.get(parameter, {}).items():
            found[f"{key}.{name}"] = value
    return found | {"noise": of.generator.get_state(), "step": torch.tensor(of.step)}


def same(one: Run, other: Run) -> bool:
    mine, yours = state(one), state(other)
    return mine.keys() == yours.keys() and all(torch.equal(mine[k], yours[k]) for k in mine)


# ---------------------------------------------------------------- steps


def test_the_same_seed_gives_the_same_run() -> None:
    runs = [run(seed=seed) for seed in (1, 1, 2)]
    reports = [train(of, batch, until=4) for of in runs]
    assert reports[0] == reports[1] != reports[2]
    assert same(runs[0], runs[1])
    assert not same(runs[0], runs[2])


def test_recompute_gives_the_same_run() -> None:
    plain, again = run(), run(recompute=True)
    assert train(plain, batch, until=4) == train(again, batch, until=4)
    assert same(plain, again)


def test_accumulated_microbatches_make_the_step_of_the_whole_batch() -> None:
    whole, parts = (run(noiseless, double=True, accumulate=n) for n in (1, 4))
    for step in range(3):
        one, other = whole.advance(batch(step)), parts.advance(batch(step))
        assert one.loss == pytest.approx(other.loss, rel=1e-12)
        assert one.router_losses == pytest.approx(other.router_losses, rel=1e-12)
        assert one.gradient_norm == pytest.approx(other.gradient_norm, rel=1e-12)
        assert one.balance == other.balance
    mine, yours = whole.model.state_dict(), parts.model.state_dict()
    for name, value in mine.items():
        assert torch.allclose(value, yours[name], rtol=1e-9, atol=1e-12), name


def test_report_78_biases_move_once_for_every_optimizer_step() -> None:
    calls = []

    class Watched(PaperRouter):
        def after_step(self) -> None:
            calls.append(int(self.seen_E.sum()))
            super().after_step()

    of = run(Watched, accumulate=2)
    train(of, batch, until=3)
    tokens = 4 * 8
    assert calls == [tokens * 2] * (2 * 3)  # two sparse layers, K = 2, each of three steps
    assert all(router.seen_E.sum() == 0 for router in of.model.routers())
    assert all(router.bias_E.abs().sum() > 0 for router in of.model.routers())


def test_a_report_says_what_the_step_was() -> None:
    of = run(noiseless)
    before = of.model.eval()(batch(0)[:, :-1])
    want = before.cross_entropy(batch(0)[:, 1:]).item()
    report = of.advance(batch(0))
    assert (report.step, report.learning_rate, of.step) == (0, 1.5e-3, 1)
    assert report.loss == pytest.approx(want, rel=1e-6)
    assert report.router_losses.keys() == {"z", "sequence"}
    assert report.balance is not None
    assert report.balance.bias_range == 0.0  # of the biases that routed this step
    assert of.advance(batch(1)).balance.bias_range > 0.0
    last = of.advance(batch(2))
    gradient = torch.cat([parameter.grad.flatten() for parameter in of.model.parameters()])
    assert last.gradient_norm == pytest.approx(float(gradient.norm()), rel=1e-5)


def test_a_dense_model_trains_and_has_no_balance() -> None:
    none = {"n_experts": 0, "top_k": 0, "d_expert": 0, "d_shared": 0, "first_k_dense": 0}
    of = run(architecture=small(**none))
    report = of.advance(batch(0))
    assert report.balance is None
    assert report.router_losses == {}


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_it_learns_a_text_that_repeats(precision: torch.dtype | None) -> None:
    """Every token follows from the one before it: the loss goes from log V to near 0."""
    words = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(0)).repeat(60)
    windows = TokenWindows(words, sequences=8, seq_len=8)
    schedule = WarmupStableDecay(peak=2e-2, steps=30, warmup_steps=4)
    of = Run(ReferenceModel(small()), schedule, precision=precision)
    losses = [report.loss for report in train(of, windows)]
    assert losses[0] == pytest.approx(math.log(VOCABULARY), abs=0.05)
    assert losses[-1] < 0.3 * losses[0]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(MoeRefError, match="accumulate=3 must divide the 4 sequences"):
        run(accumulate=3).advance(batch(0))
    with pytest.raises(MoeRefError, match="accumulate=0 must be at least 1"):
        run(accumulate=0)


def test_a_run_ends_with_its_schedule() -> None:
    seen = []
    of = run()
    reports = train(of, batch, on_step=seen.append)
    assert [report.step for report in reports] == list(range(10))
    assert reports == seen
    with pytest.raises(MoeRefError, match="step=10 must be from 0 to 9"):
        of.advance(batch(10))


# ---------------------------------------------------------------- text


def test_windows_have_every_target_once_in_a_seeded_order() -> None:
    windows = TokenWindows(torch.arange(50), sequences=3, seq_len=4, seed=1)
    assert windows.steps == 4
    batches = [windows(step) for step in range(4)]
    assert all(tokens.shape == (3, 5) for tokens in batches)
    assert all((tokens.diff(dim=1) == 1).all() for tokens in batches)
    assert sorted(torch.cat(batches)[:, 1:].flatten().tolist()) == list(range(1, 49))
    again = TokenWindows(torch.arange(50), sequences=3, seq_len=4, seed=1)
    other = TokenWindows(torch.arange(50), sequences=3, seq_len=4, seed=2)
    assert torch.equal(again(2), batches[2])
    assert not torch.equal(other(2), batches[2])
    with pytest.raises(MoeRefError, match="step=4 must be below 4: 50 tokens give no more"):
        windows(4)


# ---------------------------------------------------------------- checkpoints


@pytest.fixture
def checkpoints() -> Any:
    pytest.importorskip("safetensors")
    from moe_ref import checkpoints

    return checkpoints


@pytest.mark.parametrize("done", [0, 3])
@pytest.mark.parametrize("tied", [False, True])
def test_a_checkpoint_continues_bit_identically(
    checkpoints: Any, tmp_path: Path, done: int, tied: bool
) -> None:
    through = run(architecture=small(tied_embeddings=tied), accumulate=2, seed=4)
    train(through, batch, until=done)
    checkpoints.save_checkpoint(through, tmp_path / "deep" / "a")
    rest = train(through, batch)

    resumed = run(architecture=small(tied_embeddings=tied), accumulate=2, seed=4)
    train(resumed, batch, until=1)  # what is loaded replaces whatever was
    checkpoints.load_checkpoint(resumed, tmp_path / "deep" / "a")
    assert resumed.step == done
    assert train(resumed, batch) == rest
    assert same(through, resumed)


def test_a_checkpoint_is_tensors_and_json(checkpoints: Any, tmp_path: Path) -> None:
    of = run()
    train(of, batch, until=1)
    checkpoints.save_checkpoint(of, tmp_path / "a")
    assert {path.name for path in tmp_path.iterdir()} == {"a"}
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"tensors.safetensors", "run.json"}
    record = json.loads((tmp_path / "a" / "run.json").read_text())
    assert (record["step"], record["seed"], record["precision"]) == (1, 0, None)


def test_a_checkpoint_is_never_written_over(checkpoints: Any, tmp_path: Path) -> None:
    checkpoints.save_checkpoint(run(), tmp_path / "a")
    with pytest.raises(MoeRefError, match="exists, and a checkpoint is never written over"):
        checkpoints.save_checkpoint(run(), tmp_path / "a")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"architecture": small(d_expert=8)}, "architecture"),
        ({"seed": 1}, "seed"),
        ({"accumulate": 2}, "accumulate"),
        ({"precision": torch.bfloat16}, "precision"),
        ({"router": noiseless}, "routers"),
    ],
)
def test_the_checkpoint_of_another_run_is_refused(
    checkpoints: Any, tmp_path: Path, options: dict[str, Any], field: str
) -> None:
    checkpoints.save_checkpoint(run(), tmp_path / "a")
    with pytest.raises(MoeRefError, match=f"is of another run: its {field} is"):
        checkpoints.load_checkpoint(run(**options), tmp_path / "a")


def test_the_checkpoint_of_another_type_or_with_a_gate_is_refused(
    checkpoints: Any, tmp_path: Path
) -> None:
    checkpoints.save_checkpoint(run(), tmp_path / "a")
    with pytest.raises(
        MoeRefError, match=r"embedding_VD is torch.float32 .* must be torch.float64"
    ):
        checkpoints.load_checkpoint(run(double=True), tmp_path / "a")
    gated = Run(ReferenceModel(small(), router=noisy, gated_attention=True), SCHEDULE)
    with pytest.raises(MoeRefError, match=r"attention.gate.weight is absent"):
        checkpoints.load_checkpoint(gated, tmp_path / "a")


def test_what_is_no_checkpoint_is_refused(checkpoints: Any, tmp_path: Path) -> None:
    with pytest.raises(MoeRefError, match="is no checkpoint"):
        checkpoints.load_checkpoint(run(), tmp_path / "nowhere")
    checkpoints.save_checkpoint(run(), tmp_path / "a")
    tensors = tmp_path / "a" / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-1])
    with pytest.raises(MoeRefError, match="is no checkpoint"):
        checkpoints.load_checkpoint(run(), tmp_path / "a")
    (tmp_path / "a" / "run.json").write_text('{"step": "no"}')
    with pytest.raises(MoeRefError, match="is no checkpoint"):
        checkpoints.load_checkpoint(run(), tmp_path / "a")


def test_a_recipe_that_differs_is_another_run(checkpoints: Any, tmp_path: Path) -> None:
    def hot(d_model: int, n_experts: int, top_k: int) -> PaperRouter:
        return PaperRouter(d_model, n_experts, top_k, RouterRecipe(temperature=0.5, proposal=1))

    checkpoints.save_checkpoint(run(), tmp_path / "a")
    with pytest.raises(MoeRefError, match=r"routers is .*temperature=1.0.*temperature=0.5"):
        checkpoints.load_checkpoint(run(hot), tmp_path / "a")
