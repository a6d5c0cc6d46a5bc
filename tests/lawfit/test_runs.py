"""Tables of runs: what is kept, what is refused, what is flagged, and which runs are held out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lawfit import LawError, Runs, held_out

from .fit_tables import dense_runs, joint_runs

COLUMNS = {"N": [1e9, 2e9, 4e9, 8e9], "D": [2e10, 4e10, 9e10, 2e11], "L": [2.6, 2.5, 2.4, 2.3]}
MAPPING = {"n_active": "N", "tokens": "D", "loss": "L"}


def from_columns(columns: dict[str, list[object]], mapping: dict[str, str] = MAPPING) -> Runs:
    return Runs.from_columns(columns, mapping, convention="all parameters", source="a test")


def reasons(runs: Runs) -> set[str]:
    return {remark.reason for remark in runs.remarks}


@given(st.permutations(range(4)), st.lists(st.booleans(), min_size=4, max_size=4).filter(any))
def test_a_table_is_its_columns_whatever_their_order(order: list[int], keep: list[bool]) -> None:
    runs = from_columns({name: [values[k] for k in order] for name, values in COLUMNS.items()})
    assert runs.n_active == runs.n_total == tuple(COLUMNS["N"][k] for k in order)
    assert runs.expert_split == runs.weight == (1.0,) * 4
    some = runs.where(keep)
    assert some.id == tuple(name for name, kept in zip(runs.id, keep, strict=True) if kept)
    assert some.loss == tuple(x for x, kept in zip(runs.loss, keep, strict=True) if kept)
    assert Runs.model_validate_json(runs.model_dump_json()) == runs


@given(
    st.lists(
        st.sampled_from([1.0, 2.5, None, math.nan, math.inf, 0.0, -1.0, "", "n/a", "3e0"]),
        min_size=4,
        max_size=4,
    )
)
def test_rows_without_a_number_are_left_out_and_named(losses: list[object]) -> None:
    legal = [k for k, value in enumerate(losses) if value in (1.0, 2.5, "3e0")]
    columns = {**COLUMNS, "L": losses, "name": ["p", "q", "r", "s"]}
    if not legal:
        with pytest.raises(LawError, match="no row of 4"):
            from_columns(columns, {**MAPPING, "id": "name"})
        return
    runs = from_columns(columns, {**MAPPING, "id": "name"})
    assert runs.id == tuple("pqrs"[k] for k in legal)
    assert runs.loss == tuple(float(losses[k]) for k in legal)  # type: ignore[arg-type]
    assert len(runs.left_out) == (len(legal) < 4)
    for remark in runs.left_out:
        assert f"{4 - len(legal)} of 4 rows" in remark.sentence
        assert all("pqrs"[k] in remark.sentence for k in range(4) if k not in legal)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"n_active": "N", "tokens": "D"}, "lacks 'loss'.*'N', 'D', 'L'"),
        ({**MAPPING, "loss": "Loss"}, "'Loss', but the table has only 'N', 'D', 'L'"),
        ({**MAPPING, "n": "N"}, "'n', but may name only n_total"),
        ({**MAPPING, "n_total": "N"}, "lacks 'expert_split'"),
        ({**MAPPING, "expert_split": "N"}, "lacks 'n_total'"),
    ],
)
def test_a_wrong_mapping_is_one_sentence(mapping: dict[str, str], words: str) -> None:
    with pytest.raises(LawError, match=words) as error:
        from_columns(COLUMNS, mapping)
    assert str(error.value).count(". ") == 0


@pytest.mark.parametrize(
    ("update", "words"),
    [
        ({"loss": (2.0, math.nan, 2.0, 2.0)}, "loss of run 'row 2' is nan"),
        ({"weight": (1.0, 1.0, 0.0, 1.0)}, "weight of run 'row 3' is 0"),
        ({"n_active": (9e9, 1e9, 1e9, 1e9)}, "nearest legal value is 1e\\+09"),
        ({"id": ("x", "y", "x", "z")}, "'x' stands twice"),
        ({"tokens": (1e9,)}, "tokens has 1 rows"),
    ],
)
def test_a_table_refuses_what_no_run_can_be(update: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Runs.model_validate({**from_columns(COLUMNS).model_dump(), **update})


# ---------------------------------------------------------------- flags


def test_runs_of_a_law_are_not_flagged() -> None:
    assert reasons(dense_runs()) == set()
    assert reasons(joint_runs()) <= {"duplicate"}


def test_a_run_twice_is_a_duplicate_and_a_second_seed_is_none() -> None:
    runs = from_columns({name: [*values, values[0]] for name, values in COLUMNS.items()})
    assert reasons(runs) == {"duplicate"}
    assert "row 5 of row 1" in runs.remarks[0].sentence
    other = {**COLUMNS, "L": [*COLUMNS["L"], 2.61]}
    other |= {name: [*COLUMNS[name], COLUMNS[name][0]] for name in ("N", "D")}
    assert reasons(from_columns(other)) == set()


@pytest.mark.parametrize(
    ("factor", "unit"),
    [(1.0 / math.log(2.0), "bits per token"), (0.25 / math.log(2.0), "bits per byte")],
)
def test_losses_in_bits_are_flagged(factor: float, unit: str) -> None:
    for runs in (dense_runs(), joint_runs()):
        scaled = tuple(factor * x for x in runs.loss)
        flagged = runs.model_copy(update={"loss": scaled}).remarks
        assert [unit in x.sentence for x in flagged if x.reason == "loss_unit"] == [True]


def test_perplexities_are_flagged() -> None:
    for runs in (dense_runs(), joint_runs()):
        flagged = runs.model_copy(update={"loss": tuple(math.exp(x) for x in runs.loss)}).remarks
        said = [x.sentence for x in flagged if x.reason == "loss_unit"]
        assert ["a perplexity" in x and "its logarithm" in x for x in said] == [True]


@given(st.integers(2, 12), st.booleans())
def test_evenly_spaced_tokens_of_one_model_look_like_checkpoints(count: int, even: bool) -> None:
    steps = np.arange(1.0, count + 1.0) if even else 2.0 ** np.arange(count)
    runs = from_columns(
        {
            "N": [1e9] * count,
            "D": (1e10 * steps).tolist(),
            "L": (2.0 + 1.0 / (1.0 + steps)).tolist(),
        }
    )
    assert ("mid_schedule" in reasons(runs)) == (even and count >= 5)


# ---------------------------------------------------------------- held out


@given(st.integers(0, 20), st.floats(0.01, 0.6))
def test_the_most_active_runs_of_each_split_are_held_out(seed: int, share: float) -> None:
    runs = joint_runs(seed=seed)
    out = held_out(runs, f"nact:{share}")
    split, active = runs.column("expert_split"), runs.column("n_active")
    for each in np.unique(split):
        here = split == each
        assert out[here].sum() == round(share * here.sum())
        if out[here].any() and not out[here].all():
            assert active[here & out].min() >= active[here & ~out].max()


@given(st.integers(0, 20), st.floats(0.01, 0.9))
def test_the_future_is_the_runs_of_most_compute(seed: int, share: float) -> None:
    runs = joint_runs(seed=seed)
    out = held_out(runs, f"future:{share}")
    compute = 6.0 * runs.column("n_active") * runs.column("tokens")
    assert out.sum() == round(share * len(runs))
    if out.any():
        assert compute[out].min() >= compute[~out].max()


def test_ids_and_none_hold_out_just_those() -> None:
    runs = dense_runs()
    assert not held_out(runs, None).any()
    assert np.flatnonzero(held_out(runs, ["run 3", "run 7"])).tolist() == [3, 7]


@pytest.mark.parametrize("rule", ["nact", "nact:0", "nact:1", "nact:x", "past:0.1", ["run -1"]])
def test_an_unknown_rule_is_an_error(rule: str | list[str]) -> None:
    with pytest.raises(LawError, match="holdout"):
        held_out(dense_runs(), rule)
