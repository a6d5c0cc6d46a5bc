"""Sweeps: what a run is, its row, and a table that goes on where it stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from moe_ref import (  # noqa: E402
    MoeRefError,
    ReferenceModel,
    SweepRow,
    SweepRun,
    byte_tokens,
    evaluate,
    read_sweep,
    sweep,
    train_sweep_run,
)
from moe_ref.training import TokenWindows  # noqa: E402

from .models import small  # noqa: E402

CLOCK = {"step_s", "step_low_s", "cpu_s"}
"""What two trainings of one run do not share."""


def made(seed: int = 0, **changes: Any) -> SweepRun:
    """Build a run of six steps of 64 tokens."""
    fields: dict[str, Any] = {
        "architecture": small(vocab_size=256),
        "tokens": 384,
        "sequences": 4,
        "seq_len": 16,
        "peak": 3e-3,
        "seed": seed,
    }
    return SweepRun(**(fields | changes))


def lost(rows: list[SweepRow]) -> list[dict[str, Any]]:
    """Return rows without their times, by id."""
    return sorted((row.model_dump(exclude=CLOCK) for row in rows), key=lambda row: row["id"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a text that has something to learn: words of a small vocabulary."""
    generator = torch.Generator().manual_seed(7)
    words = [b"ratio ", b"expert ", b"router ", b"the ", b"token "]
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_bytes(
        b"".join(words[at] for at in torch.randint(5, (3000,), generator=generator).tolist())
    )
    return path


def test_bytes_are_tokens_and_the_last_twentieth_is_held_out(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_bytes(bytes(range(200)))
    train_N, held_N, name = byte_tokens(path)
    assert train_N.tolist() == list(range(190))
    assert held_N.tolist() == list(range(190, 200))
    # sha256sum of these 200 bytes
    assert name == "1901da1c9f699b48f6b2636e65cbf73abf99d0441ef67f5c540a42f7051dec6f"[:12]


def test_a_text_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(MoeRefError, match=r"none\.txt cannot be read: No such file"):
        byte_tokens(tmp_path / "none.txt")


def test_the_loss_is_the_mean_over_windows_without_noise(text: Path) -> None:
    model = ReferenceModel(small(vocab_size=256), seed=3)
    held_N = byte_tokens(text)[1][: 5 * 16 + 1]
    windows = held_N[:-1].view(5, 16), held_N[1:].view(5, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = evaluate(model, held_N, seq_len=16, sequences=2)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    with torch.no_grad():
        expected = float(model.eval()(windows[0]).cross_entropy(windows[1]))
    assert found == pytest.approx(expected, rel=1e-6)
    with pytest.raises(MoeRefError, match="must have one window of 17; nearest: 17"):
        evaluate(model, held_N[:16], seq_len=16)


def test_a_run_learns_and_its_row_says_what_it_was(text: Path) -> None:
    run = made(tokens=64 * 60, peak=1e-2)
    row = train_sweep_run(run, *byte_tokens(text))
    a = run.architecture
    assert (row.n_total, row.n_active) == (a.n_total(), a.n_active())
    assert (row.expert_split, row.top_k, row.n_experts) == (2.0, 2, 8)
    assert row.loss < 3.0 < torch.tensor(256.0).log()
    assert row.loss_training < 3.0
    assert 0.0 < row.step_low_s <= row.step_s
    assert row.cpu_s > 0.0


def test_the_same_seed_gives_the_same_row_and_another_another(text: Path) -> None:
    content = byte_tokens(text)
    first, again, other = (train_sweep_run(made(seed), *content) for seed in (0, 0, 1))
    assert lost([first]) == lost([again])
    assert first.loss != other.loss


def test_a_run_reads_every_part_of_the_text_once_at_most(text: Path) -> None:
    train_N, held_N, name = byte_tokens(text)
    most = TokenWindows(train_N, 4, 16).steps * 64
    with pytest.raises(MoeRefError, match=f"must be at most {most}"):
        train_sweep_run(made(tokens=most + 64), train_N, held_N, name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokens": 400}, "multiple of the 64 tokens of a step; nearest: 384"),
        ({"architecture": small()}, "vocab_size=37 must be 256"),
    ],
)
def test_a_run_that_cannot_be_is_a_sentence(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        made(**changes)


def test_an_interrupted_sweep_goes_on_and_gives_the_rows_of_a_whole_one(
    text: Path, tmp_path: Path
) -> None:
    runs = [made(seed) for seed in range(3)]
    whole = sweep(runs, text, tmp_path / "whole.csv", workers=0)

    def stop(row: SweepRow, ended: int, known: int) -> None:
        assert (ended, known) == (1, 3)
        raise KeyboardInterrupt

    table = tmp_path / "stopped.csv"
    with pytest.raises(KeyboardInterrupt):
        sweep(runs, text, table, workers=0, on_row=stop)
    kept = read_sweep(table)
    assert [row.id for row in kept] == [runs[0].id]
    ended = []
    rows = sweep(runs, text, table, workers=0, on_row=lambda row, *_: ended.append(row.id))
    assert ended == [runs[1].id, runs[2].id]
    assert lost(rows) == lost(whole) == lost(read_sweep(table))
    assert rows[0] == kept[0]  # with its times: it was not trained again
    assert not list(tmp_path.glob("*.partial"))


def test_processes_give_the_rows_of_one(text: Path, tmp_path: Path) -> None:
    runs = [made(seed) for seed in range(2)]
    here = sweep(runs, text, tmp_path / "here.csv", workers=0)
    apart = sweep(runs, text, tmp_path / "apart.csv", workers=2)
    assert lost(here) == lost(apart)
    assert sweep(runs, text, tmp_path / "apart.csv", workers=2) == apart


def test_a_row_of_another_run_or_text_is_refused(text: Path, tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    sweep([made()], text, table, workers=0)
    with pytest.raises(MoeRefError, match="of another run or text"):
        sweep([made(peak=1e-3)], text, table, workers=0)
    other = tmp_path / "other.txt"
    other.write_bytes(text.read_bytes()[::-1])
    with pytest.raises(MoeRefError, match="of another run or text"):
        sweep([made()], other, table, workers=0)
    with pytest.raises(MoeRefError, match="stands twice"):
        sweep([made(), made(peak=1e-3)], text, table, workers=0)
    with pytest.raises(MoeRefError, match="workers=-1 must be at least 0"):
        sweep([made()], text, table, workers=-1)


def test_a_table_that_is_none_is_a_sentence(tmp_path: Path) -> None:
    assert read_sweep(tmp_path / "none.csv") == []
    table = tmp_path / "runs.csv"
    table.write_text("id,loss\nx,1.0\n")
    with pytest.raises(MoeRefError, match="is no table of a sweep: d_model: Field required"):
        read_sweep(table)
