"""Tables of runs from files: which column is which, units, losses in bits, and refusals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lawfit import LawError, Runs, read_runs

ROWS = [(70e6, 1.4e9, 3.6), (160e6, 3.2e9, 3.2), (410e6, 8.2e9, 2.9)]
"""Parameters, tokens and loss of three dense runs."""


def written(folder: Path, text: str, name: str = "runs.csv") -> Path:
    file = folder / name
    file.write_text(text, "utf-8")
    return file


def dense(folder: Path, head: str = "N,D,loss", name: str = "runs.csv") -> Path:
    lines = [head, *(",".join(f"{x!r}" for x in row) for row in ROWS)]
    return written(folder, "\n".join(lines) + "\n", name)


def read(path: Path, **options: object) -> Runs:
    return read_runs(path, **{"convention": "with embeddings", **options})  # type: ignore[arg-type]


def reasons(runs: Runs) -> list[str]:
    return [remark.reason for remark in runs.notes]


@pytest.mark.parametrize(
    "head",
    [
        "N,D,loss",
        "n_params,tokens,val_loss",
        "Model Size,training tokens,Final Loss",
        "active_params,n_tokens,eval/loss",
        "n_active,tokens,loss (nats/token)",
        "N [parameter],D [token],loss",
        "params,tokens,cross-entropy",
    ],
)
def test_usual_names_of_a_dense_table(tmp_path: Path, head: str) -> None:
    runs = read(dense(tmp_path, head))
    assert list(zip(runs.n_active, runs.tokens, runs.loss, strict=True)) == ROWS
    assert runs.n_total == runs.n_active
    assert set(runs.expert_split) == {1.0}
    assert runs.notes == ()
    assert runs.source == "runs.csv"


def test_a_sparse_table_with_weights_and_ids(tmp_path: Path) -> None:
    head = "run,total_params,active_params,G,D,loss,weight,comment"
    file = written(tmp_path, f"{head}\na,8e9,1e9,4,2e10,2.5,2,x\nb,8e9,2e9,1,2e10,2.4,1,y\n")
    runs = read(file, source="a paper")
    assert (runs.n_total, runs.n_active) == ((8e9, 8e9), (1e9, 2e9))
    assert (runs.expert_split, runs.weight) == ((4.0, 1.0), (2.0, 1.0))
    assert (runs.id, runs.source) == (("a", "b"), "a paper")


def test_columns_that_are_given_go_before_names(tmp_path: Path) -> None:
    file = written(tmp_path, "N,N_no_emb,D,loss\n2e9,1.9e9,4e10,2.5\n")
    assert read(file).n_active == (2e9,)
    assert read(file, columns={"n_active": "N_no_emb"}).n_active == (1.9e9,)


def test_one_expert_split_of_all_runs(tmp_path: Path) -> None:
    file = written(tmp_path, "n_total,n_active,D,loss\n8e9,1e9,2e10,2.5\n")
    with pytest.raises(LawError, match="its value where all runs have one"):
        read(file)
    assert read(file, columns={"expert_split": "4"}).expert_split == (4.0,)


def test_a_table_of_totals_alone_is_dense_and_says_so(tmp_path: Path) -> None:
    runs = read(dense(tmp_path, "total_params,tokens,loss"))
    assert runs.n_active == tuple(row[0] for row in ROWS)
    assert reasons(runs) == ["taken_as_dense"]


def test_active_beside_another_count_without_a_split_is_dense_and_says_so(tmp_path: Path) -> None:
    runs = read(written(tmp_path, "N,Na,D,loss\n8e9,1e9,2e10,2.5\n"))
    assert (runs.n_total, runs.n_active) == ((1e9,), (1e9,))
    assert reasons(runs) == ["taken_as_dense"]


# ---------------------------------------------------------------- units


@pytest.mark.parametrize(
    ("cell", "value"),
    [
        ("1.3B", 1.3e9),
        ("70M", 70e6),
        ("5T", 5e12),
        ("500k", 5e5),
        ("1.3 b", 1.3e9),
        ("2 billion", 2e9),
        ('"1,300,000"', 1.3e6),
        ("1.3e9", 1.3e9),
        ("1300000000", 1.3e9),
    ],
)
def test_counts_as_people_write_them(tmp_path: Path, cell: str, value: float) -> None:
    runs = read(written(tmp_path, f"N,D,loss\n{cell},8e9,2.5\n4e9,8e9,2.4\n"))
    assert runs.n_active[0] == value


@pytest.mark.parametrize(
    "head", ["params_M,tokens_B,loss", "Params (M),Tokens (B),loss", "N_m,D billions,loss"]
)
def test_units_in_names_of_columns(tmp_path: Path, head: str) -> None:
    runs = read(written(tmp_path, f"{head}\n70,1.4,3.6\n160,3.2,3.2\n"))
    assert runs.n_active == (70e6, 160e6)
    assert runs.tokens == (1.4e9, 3.2e9)
    assert reasons(runs) == ["scaled_column", "scaled_column"]
    assert any("n_active is 1e+06 times the column" in note.sentence for note in runs.notes)


def test_a_unit_that_is_given(tmp_path: Path) -> None:
    file = written(tmp_path, "size,D,loss\n1.3,8e9,2.5\n0.7,8e9,2.6\n")
    assert read(file, columns={"n_active": "size:B"}).n_active == (1.3e9, 0.7e9)
    assert read(file, columns={"n_active": "size:1"}).n_active == (1.3, 0.7)
    with pytest.raises(LawError, match="unit 'G', but a unit is K, M, B, T, or 1"):
        read(file, columns={"n_active": "size:G"})


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("1.3,8e9,2.5\n13,8e9,2.4", "'N', which has values such as 13, too few parameters"),
        ("70,8e9,2.5\n13000,8e9,2.4", "values such as 13000, too few parameters"),
        ("0.5,8e9,2.5\n2e9,8e9,2.4", "values such as 0.5, too few parameters"),
        ("1.3e9,26,2.5\n2e9,40,2.4", "'D', which has values such as 40, too few tokens"),
    ],
)
def test_plain_small_counts_are_refused_with_the_unit(
    tmp_path: Path, rows: str, words: str
) -> None:
    with pytest.raises(LawError) as caught:
        read(written(tmp_path, f"N,D,loss\n{rows}\n"))
    assert words in str(caught.value)
    assert ":B" in str(caught.value)


def test_tokens_from_compute(tmp_path: Path) -> None:
    runs = read(written(tmp_path, "N,Training FLOP,loss\n1e9,6e20,2.5\n1e9,,2.4\n"))
    assert runs.tokens == (1e11,)
    assert reasons(runs) == ["tokens_from_compute"]
    assert [remark.reason for remark in runs.left_out] == ["missing_value"]
    both = read(written(tmp_path, "N,flops,tokens,loss\n1e9,6e20,5e10,2.5\n"))
    assert (both.tokens, both.notes) == ((5e10,), ())


def test_losses_in_bits(tmp_path: Path) -> None:
    runs = read(dense(tmp_path), loss_unit="bits")
    assert runs.loss == tuple(math.log(2.0) * row[2] for row in ROWS)
    assert reasons(runs) == ["loss_in_bits"]
    with pytest.raises(LawError, match="says bits"):
        read(dense(tmp_path, "N,D,loss (bits/token)"))
    assert read(dense(tmp_path, "N,D,loss (bits/token)"), loss_unit="bits").loss == runs.loss


def test_losses_that_look_like_bits_stay_flagged(tmp_path: Path) -> None:
    rows = "\n".join(f"{n!r},{d!r},{loss / math.log(2.0)!r}" for n, d, loss in ROWS)
    runs = read(written(tmp_path, f"N,D,loss\n{rows}\n"))
    assert "loss_unit" in [remark.reason for remark in runs.remarks]


def test_what_is_not_defined_is_remarked(tmp_path: Path) -> None:
    file = written(tmp_path, "n_total,n_active,granularity,D,loss\n8e9,1e9,4,2e10,2.5\n")
    runs = read_runs(file)
    assert runs.convention == "not stated"
    assert reasons(runs) == ["granularity", "convention_not_stated"]
    assert runs.notes == runs.remarks[: len(runs.notes)]


# ---------------------------------------------------------------- rows


def test_rows_without_a_number_are_left_out_by_the_name_of_the_table(tmp_path: Path) -> None:
    text = "name,N,D,val_loss\na,1e9,2e10,2.5\nb,1e9,2e10,diverged\nc,unknown,2e10,2.5\nd,1e9\n"
    runs = read(written(tmp_path, text))
    assert runs.id == ("a",)
    sentences = " ".join(remark.sentence for remark in runs.left_out)
    assert "'loss (val_loss)' and were left out: b, d" in sentences
    assert "'n_active (N)' and were left out: c" in sentences


def test_an_id_that_stands_again_is_numbered(tmp_path: Path) -> None:
    rows = "".join(f"big,1e9,{t}e9,2.{9 - t}\n" for t in range(1, 4))
    runs = read(written(tmp_path, f"run,N,D,loss\n{rows}"))
    assert runs.id == ("big", "big #2", "big #3")
    assert reasons(runs) == ["repeated_id"]


def test_checkpoints_and_duplicates_are_remarked(tmp_path: Path) -> None:
    rows = "".join(f"1e9,{t}e9,2.{9 - t}\n" for t in (1, 2, 3, 4, 5, 5))
    found = [r.reason for r in read(written(tmp_path, f"N,D,loss\n{rows}")).remarks]
    assert found == ["duplicate", "mid_schedule"]


# ---------------------------------------------------------------- kinds of files


@pytest.mark.parametrize("name", ["runs.jsonl", "runs.ndjson", "runs.json", "runs.tsv", "semi.csv"])
def test_every_kind_of_file_is_the_same_table(tmp_path: Path, name: str) -> None:
    rows = [{"params": n, "tokens": d, "loss": loss} for n, d, loss in ROWS]
    if name == "runs.json":
        text = json.dumps(rows)
    elif "json" in name:
        text = "\n\n".join(json.dumps(row) for row in rows)
    else:
        mark = "\t" if name.endswith("tsv") else ";"
        text = "\n".join(mark.join(map(str, row)) for row in [list(rows[0]), *ROWS])
    runs = read(written(tmp_path, text, name))
    assert list(zip(runs.n_active, runs.tokens, runs.loss, strict=True)) == ROWS


def test_objects_without_a_key_or_with_another_value_are_left_out(tmp_path: Path) -> None:
    rows = [{"N": 1e9, "D": 2e10, "loss": 2.5}, {"N": True, "D": [1], "loss": 2.5}, {"N": 2e9}]
    text = "\n".join(json.dumps(row) for row in rows) + '\n{"N": 1e9, "D": 2e10, "loss": NaN}\n'
    assert len(read(written(tmp_path, text, "runs.jsonl"))) == 1


def test_decimal_commas_between_semicolons(tmp_path: Path) -> None:
    lines = ["N;D;loss", *(f"{n:g};{d:g};{x}".replace(".", ",") for n, d, x in ROWS)]
    runs = read(written(tmp_path, "\n".join(lines)))
    assert runs.loss == tuple(row[2] for row in ROWS)
    assert reasons(runs) == ["decimal_comma"]
    # without a number that decides it, a comma is one of thousands, and no loss
    lines = ["N;D;loss", *(f"{n:.0f};1,400,000,000;{x:.3f}".replace(".", ",") for n, _, x in ROWS)]
    with pytest.raises(
        LawError, match=r"that of 'loss \(loss\)' has 0, and values such as '3,600'"
    ):
        read(written(tmp_path, "\n".join(lines)))


def test_rows_without_any_cell_are_no_rows(tmp_path: Path) -> None:
    plain = read(dense(tmp_path))
    text = (tmp_path / "runs.csv").read_text("utf-8").replace("\n", "\n,,\n") + " ,, \n\n"
    assert read(written(tmp_path, ",,\n" + text)) == plain


def test_a_byte_order_mark_and_an_index_column(tmp_path: Path) -> None:
    text = "\ufeff,N,D,loss\n0,1e9,2e10,2.5\n"
    assert read(written(tmp_path, text)).n_active == (1e9,)


@pytest.mark.parametrize(
    ("text", "name", "words"),
    [
        ("N,D,loss\n", "runs.csv", "has no row of a run"),
        ("", "runs.csv", "has no row of a run"),
        ("N,D,loss,loss\n1,2,3,4\n", "runs.csv", "two columns 'loss'"),
        ("N,D,loss\n1,2,3,4\n", "runs.csv", "4 values in row 1 and 3 columns"),
        ('N,D,loss\n"1,2,3\n', "runs.csv", "no table of separated values"),
        ("{}\n[1]\n", "runs.jsonl", "a list as run 2"),
        ("{}\n{,}\n", "runs.jsonl", "no JSON in line 2"),
        ('{"N": [1]}', "runs.json", "holds a dict, but a table in JSON is a list"),
        ("[1", "runs.json", "is not valid JSON"),
        ("x", "runs.parquet", "must end in .csv, .tsv"),
        (
            "n_total,n_active,G,D,loss\n1e9,2e9,1,2e10,2.5\n",
            "runs.csv",
            "activate more than it has",
        ),
        ("N,D,loss\n1e9,2e10,-1\n", "runs.csv", "no row of 1 has a finite number above 0"),
        ("N,D,loss\n1e9,2e10,2.5%\n", "runs.csv", "has 0, and values such as '2.5%'"),
        ("my runs\nN,D,loss\n1e9,2e10,2\n", "runs.csv", "first line must be the names"),
        ("N,D,loss,val_loss\n1e9,2e10,2,2\n", "runs.csv", "any of the columns 'loss', 'val_loss'"),
        ("N,params,D,loss\n1e9,1e9,2e10,2\n", "runs.csv", "n_active=N"),
        ("N,steps,ce\n1e9,2e10,2\n", "runs.csv", "--column loss=NAME --column tokens=NAME"),
        ("n_active,G,D,loss\n1e9,1,2e10,2\n", "runs.csv", "no column is n_total"),
        ("N,G,D,loss\n1e9,1,2e10,2\n", "runs.csv", "no column is n_active"),
    ],
)
def test_a_refusal_is_one_sentence(tmp_path: Path, text: str, name: str, words: str) -> None:
    with pytest.raises(LawError) as caught:
        read(written(tmp_path, text, name))
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert message.endswith(".")


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"n_active": "size"}, "column 'size', but the table has only 'N', 'D', 'loss'"),
        ({"n_activ": "N"}, "columns names 'n_activ', but may name only n_total, n_active"),
        ({"loss": "loss:B"}, "column 'loss:B', but the table has only"),
        ({"expert_split": "G"}, "column 'G', but the table has only"),
    ],
)
def test_columns_that_are_not_there(tmp_path: Path, columns: dict[str, str], words: str) -> None:
    with pytest.raises(LawError, match=words):
        read(dense(tmp_path), columns=columns)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(LawError, match="cannot be read: No such file"):
        read(tmp_path / "none.csv")
    file = tmp_path / "bytes.csv"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LawError, match="not UTF-8 text"):
        read(file)
    with pytest.raises(LawError, match="loss_unit is 'nat'"):
        read(dense(tmp_path), loss_unit="nat")


@given(text=st.text(max_size=80), kind=st.sampled_from(["csv", "tsv", "jsonl", "json"]))
def test_any_text_is_a_table_or_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, text: str, kind: str
) -> None:
    file = tmp_path_factory.getbasetemp() / f"any.{kind}"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(LawError):
        read(file)


def test_the_points_of_the_chinchilla_figure(shared_data: Path) -> None:
    file = shared_data / "laws" / "epoch_chinchilla" / "svg_extracted_data.csv"
    runs = read(file)
    assert len(runs) == 245
    assert np.all(runs.column("tokens") > 1e8)
    assert reasons(runs) == ["tokens_from_compute"]
