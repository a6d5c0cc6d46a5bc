"""The small sweep: its design, its pipeline on runs of a known law, and the page's figures."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from lawfit import JointLaw
from moe_ref import SweepRow, SweepRun, peak_learning_rate, read_sweep
from moe_ref.sweeps import _what, _write

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "benchmarks" / "data" / "mini_sweep"
MACHINE = (str(DATA / "pack.toml"), f"{DATA / 'stack.toml'}+busy")

TRUE = JointLaw(
    a=60.0, alpha=0.35, b=300.0, beta=0.5, c=0.3, lambda_=0.3, j=8.0, delta=0.3, gamma=0.3,
    eta=0.4, e=0.4, source="a law to simulate",
)  # fmt: skip


def part(name: str) -> Any:
    """Import a file of benchmarks, which are no package of the distribution."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT))
        return import_module(f"benchmarks.{name}")


def simulated(run: SweepRun, noise: float, draw: np.random.Generator) -> SweepRow:
    """Make the row of a run by a known law, and by a known price of a step."""
    a = run.architecture
    loss = float(
        TRUE.loss(
            n_total=a.n_total(),
            n_active=a.n_active(),
            tokens=run.tokens,
            expert_split=a.expert_split,
        )
    )
    step = 2e-3 + 2e-5 * a.n_experts * a.n_moe_layers + 5e-11 * 6 * a.n_active() * 256
    step += 3e-9 * a.n_total()
    return SweepRow(
        **_what(run),
        loss=loss * float(np.exp(noise * draw.standard_normal())),
        loss_training=loss,
        starved=0.0,
        max_violation=0.0,
        step_s=step,
        step_low_s=step,
        cpu_s=step * run.steps,
        text="0" * 12,
        torch="0",
    )


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Write the tables of a sweep of the known law, and return what they lead to."""
    folder, draw = tmp_path_factory.mktemp("sweep"), np.random.default_rng(0)
    design, report = part("mini_sweep_design"), part("mini_sweep_report")
    for name, runs in (("runs", design.grid()), ("repeats", design.repeats())):
        _write([simulated(run, 1e-3, draw) for run in runs], folder / f"{name}.csv")
    found = report.Found(folder)
    for by, runs in report.pick_runs(found.ordered()).items():
        _write([simulated(run, 1e-3, draw) for run in runs], folder / f"picks_{by}.csv")
    return found


def test_the_grid_is_what_its_page_says() -> None:
    design = part("mini_sweep_design")
    runs = design.grid()
    assert len({run.id for run in runs}) == len(runs) == 42
    ids = {run.id for run in runs}
    for run in design.repeats():
        assert run.id not in ids
        assert f"{run.id.rpartition('-s')[0]}-s0" in ids
    for run in runs:
        rule = peak_learning_rate(run.architecture.n_active(), run.tokens)
        assert run.peak == pytest.approx(design.FACTOR * rule, rel=1e-5)
    held = [run for run in runs if run.architecture.d_model == design.LARGEST]
    assert sorted(run.architecture.expert_split for run in held) == [1.0, 1.0, 2.0, 2.0, 4.0, 4.0]


def test_html_becomes_prose() -> None:
    prose = part("mini_sweep_text").prose
    page = "<title>no</title><h1>A &amp; B</h1><p>one\n <b>two</b></p><script>x</script><p> </p>c"
    assert prose(page) == "A & B\none two\nc"


def test_noise_is_pooled_over_the_runs_that_differ_in_their_seed(world: Any) -> None:
    assert world.freedom == 6
    assert 3e-4 < world.noise < 3e-3


def test_a_known_law_is_found_again(world: Any) -> None:
    assert world.joint.converged
    held = set(world.joint.held_out)
    assert held == {row.id for row in world.rows if row.d_model == 128}
    fit = part("mini_sweep_fit")
    assert np.abs(fit.residuals(world.joint, held=True)).max() < 0.01
    assert np.sqrt(np.mean(fit.residuals(world.joint, held=False) ** 2)) < 1.5e-3
    # a law that knows neither experts nor split cannot follow
    assert np.sqrt(np.mean(fit.residuals(world.dense, held=False) ** 2)) > 3e-3


def test_a_known_price_of_a_step_is_found_again(world: Any) -> None:
    times = world.times
    found = (times.fixed, times.expert, times.product, times.optimizer)
    assert found == pytest.approx((2e-3, 2e-5, 5e-11, 3e-9), rel=1e-6)
    assert times.error < 1e-9
    assert times.error_largest < 1e-9


def test_the_orderings_are_those_of_the_law(world: Any) -> None:
    solve = part("mini_sweep_solve")
    ordered = world.ordered()
    assert [c.loss for c in ordered] == sorted(c.loss for c in ordered)
    flops = [6 * c.architecture.n_active() * c.flop_tokens for c in ordered]
    assert flops == pytest.approx([flops[0]] * len(flops))
    for c in ordered[:: len(ordered) // 7]:
        assert c.tokens == pytest.approx(solve.BUDGET_S / c.step_s * 256)
        expected = world.joint.law.loss(
            n_total=c.architecture.n_total(),
            n_active=c.architecture.n_active(),
            tokens=c.tokens,
            expert_split=c.architecture.expert_split,
        )
        assert c.loss == pytest.approx(float(expected))
    picks = solve.picked(ordered)
    assert len(picks) == solve.PICKS
    assert {c.architecture.name for c in ordered[:3]} <= {c.architecture.name for c in picks}
    assert ordered[-1] in picks


def test_trained_picks_keep_the_order_of_their_own_law(world: Any) -> None:
    report = part("mini_sweep_report")
    ordered = world.ordered()
    verdict = report.pick_verdict(ordered, world.folder, world.noise).splitlines()
    cells = [[cell.strip() for cell in line.split("|")] for line in verdict[2:]]
    own = [row for row in cells if row[1] == row[2]]
    assert len(own) == 2
    for row in own:
        right, sure = map(int, row[4].split(" of "))
        assert float(row[3]) > 0.9
        assert sure > 20
        assert right >= 0.95 * sure


def test_a_pack_prices_the_same_shapes(world: Any) -> None:
    """The answer of `solve` under a shipped pack, whose device is another: times only differ."""
    solve = part("mini_sweep_solve")
    shapes = [c.architecture for c in world.ordered()[:4]]
    step_s, page = solve.by_pack(shapes, world.joint.law, "h100", "megatron-eager")
    assert len(step_s) == 4
    assert min(step_s) > 0.0
    assert "OPTIMAL" in page


@pytest.mark.slow
def test_the_page_has_the_figures_of_the_committed_tables() -> None:
    report = part("mini_sweep_report")
    found = report.Found(DATA)
    ordered = found.ordered(*MACHINE)
    page = (ROOT / "docs" / "mini-sweep.md").read_text()
    printed = "\n\n".join(
        [
            report.law_part(found),
            report.price_part(found, *MACHINE),
            report.order_part(found, ordered),
            report.picks_part(found, ordered),
        ]
    )
    for block in re.split(r"\n\n", printed):
        assert block in page


def test_the_committed_fit_is_the_one_of_the_page() -> None:
    report = part("mini_sweep_report")
    found = report.Found(DATA)
    page = (ROOT / "docs" / "mini-sweep.md").read_text()
    assert found.joint.converged
    assert len(read_sweep(DATA / "runs.csv")) == 42
    assert report.error_table(found) in page
    for name, each in found.joint.coefficients.items():
        assert f"| `{name.rstrip('_')}` | {each.value:.4g} |" in page
