"""Stacks fitted to published runs: who fits what, known constants found again, shipped ones too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.calibration.fit_published import (
    TimedRun,
    fit_published,
    fit_values,
    held_out_ratios,
    layout_weights,
    log_ratios,
    main,
    predictions,
    stack_of,
    timed_runs,
)
from perfmodel.calibration.fit_stack import ratio_interval
from perfmodel.calibration.published_stacks import (
    ASSUMED,
    MEANING,
    SPECS,
    START,
    StackSpec,
    fits,
    layout_key,
    spec,
)
from perfmodel.calibration.records import PackError
from perfmodel.calibration.stacks import load_stack, shipped_stacks
from perfmodel.errors import PerfmodelError
from perfmodel.ranges import stack_variables
from perfmodel.sources import Source
from perfmodel.stack import MAX_FITTED, MEMORY_CONSTANTS, Stack
from perfmodel.validation.published import published_runs

SMALL = "megatron-core-2021"
PUBLISHED = tuple(s.name for s in SPECS if s.published)


@cache
def rows(name: str) -> tuple[TimedRun, ...]:
    """Price the layers of a stack's runs once."""
    return timed_runs(spec(name))


def fitted_rows(name: str) -> list[TimedRun]:
    return [run for run in rows(name) if fits(run.run)]


def timed(run: TimedRun, step_s: float) -> TimedRun:
    """Return a run with another measured time."""
    update = {"step_time_s": step_s}
    return replace(run, run=run.run.model_copy(update=update))


# ---------------------------------------------------------------- who fits what


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_layout_fits_or_scores_and_never_both(name: str) -> None:
    halves: tuple[set[str], set[str]] = (set(), set())
    for run in rows(name):
        halves[fits(run.run)].add(layout_key(run.run))
    assert not halves[0] & halves[1]
    assert halves[0]
    assert halves[1]
    assert len(halves[0] | halves[1]) == len({layout_key(run.run) for run in rows(name)})


def test_about_half_of_the_layouts_fit() -> None:
    layouts = {layout_key(run): fits(run) for run in published_runs()}
    share = np.mean(list(layouts.values()))
    assert abs(share - 0.5) < 3 * 0.5 / np.sqrt(len(layouts))


def test_no_run_belongs_to_two_stacks() -> None:
    taken = [[s.name for s in SPECS if s.takes(run)] for run in published_runs()]
    assert max(map(len, taken)) == 1
    assert {name for names in taken for name in names} == {*PUBLISHED}


def test_the_split_depends_on_the_layout_alone() -> None:
    for run in rows(SMALL)[:10]:
        again = run.run.model_copy(update={"step_time_s": 1.0, "year": 2031, "container": "x"})
        assert layout_key(again) == layout_key(run.run)
        assert fits(again) is fits(run.run)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_give_every_layout_the_same_say(name: str) -> None:
    mine = fitted_rows(name)
    weights = layout_weights(mine)
    keys = [layout_key(run.run) for run in mine]
    for key in set(keys):
        assert sum(w for w, k in zip(weights, keys, strict=True) if k == key) == pytest.approx(1)


# ---------------------------------------------------------------- constants of a run


@pytest.mark.parametrize("s", SPECS, ids=lambda s: s.name)
def test_a_spec_accounts_for_every_constant(s: StackSpec) -> None:
    values = {key: 0.25 for key in s.keys}
    stated = {*s.fitted, *s.assumptions(), *MEMORY_CONSTANTS}
    assert stated == set(Stack._fields)
    assert len(s.keys) <= MAX_FITTED
    assert {key.rpartition(".")[2] for key in s.keys} <= set(MEANING) & set(START)
    plain = stack_of(s, values, ())
    for name in s.fitted:
        assert getattr(plain, name) == 0.25
    for name, switch in s.switches.items():
        on = stack_of(s, values | {f"{name}.{key}": 0.75 for key in switch.fitted}, (name,))
        changed = {field for field in Stack._fields if getattr(on, field) != getattr(plain, field)}
        assert changed <= {*switch.fitted, *switch.assumed}
        assert {*switch.fitted} <= changed


def test_assumptions_have_notes() -> None:
    for s in SPECS:
        for value, note in {**ASSUMED, **s.assumed}.values():
            assert value >= 0
            assert note


# ---------------------------------------------------------------- known constants are found


@pytest.mark.parametrize("truth", [(0.9, 6.0), (1.4, 14.0)])
def test_known_constants_are_recovered(truth: tuple[float, float]) -> None:
    s, values = spec(SMALL), dict(zip(spec(SMALL).keys, truth, strict=True))
    mine = fitted_rows(SMALL)
    made = [timed(r, float(t)) for r, t in zip(mine, predictions(mine, s, values), strict=True)]
    found = fit_values(made, s, layout_weights(made))
    assert found == pytest.approx(values, rel=1e-3)
    assert np.abs(log_ratios(made, s, found)).max() < 1e-3


def test_noise_moves_constants_by_about_its_size_and_one_wild_run_by_little() -> None:
    s, values = spec(SMALL), {"device_scale": 1.1, "score_bytes": 10.0}
    mine = fitted_rows(SMALL)
    clean = predictions(mine, s, values)
    noise = np.exp(np.random.default_rng(2608).normal(0.0, 0.02, len(mine)))
    made = [timed(r, float(t)) for r, t in zip(mine, clean * noise, strict=True)]
    found = fit_values(made, s, layout_weights(made))
    assert found["device_scale"] == pytest.approx(1.1, rel=0.05)
    wild = [timed(made[0], 5 * made[0].measured_s), *made[1:]]
    bent = fit_values(wild, s, layout_weights(wild))
    assert bent["device_scale"] == pytest.approx(found["device_scale"], rel=0.1)


def test_left_out_layouts_do_not_enter_their_own_fit() -> None:
    """A layout that is off by a factor is as far off when it is left out; the others are not."""
    s, values = spec(SMALL), {"device_scale": 1.1, "score_bytes": 10.0}
    mine = fitted_rows(SMALL)
    clean = predictions(mine, s, values)
    wrong = layout_key(mine[0].run)
    made = [
        timed(r, float(t) * (2.0 if layout_key(r.run) == wrong else 1.0))
        for r, t in zip(mine, clean, strict=True)
    ]
    left = held_out_ratios(made, s, values)
    for run, ratio in zip(made, left, strict=True):
        if layout_key(run.run) == wrong:
            assert ratio == pytest.approx(np.log(2.0), abs=1e-3)


@given(st.integers(0, 100), st.floats(0.02, 0.5))
def test_nine_in_ten_further_ratios_lie_in_the_interval(seed: int, spread: float) -> None:
    rng = np.random.default_rng(seed)
    low, high = ratio_interval(rng.normal(0.1, spread, 400))
    fresh = np.exp(rng.normal(0.1, spread, 4000))
    covered = np.mean((fresh >= low) & (fresh <= high))
    assert 0.84 < covered < 0.96
    assert low < np.exp(0.1) < high


def test_few_ratios_have_the_widest_interval() -> None:
    ratios = np.log([0.8, 1.0, 1.3])
    assert ratio_interval(ratios) == pytest.approx((0.8, 1.3))


# ---------------------------------------------------------------- shipped profiles


def test_every_spec_has_a_profile() -> None:
    assert {s.name for s in SPECS} | {"megatron-eager"} == set(shipped_stacks())


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_shipped_profile_was_fitted_by_the_spec_of_its_name(name: str) -> None:
    s, profile, mine = spec(name), load_stack(name), fitted_rows(name)
    keys = [*profile.constants]
    keys += [f"{v}.{key}" for v, variant in profile.variants.items() for key in variant.constants]
    assert sorted(keys) == sorted(s.keys)
    assert len(keys) <= MAX_FITTED
    assert profile.description == s.description
    assumed = {key: a.value for key, a in profile.assumptions.items()}
    assert {key: assumed[key] for key in s.assumptions()} == {
        key: value for key, (value, _) in s.assumptions().items()
    }
    for switch, variant in profile.variants.items():
        expected = {key: value for key, (value, _) in s.switches[switch].assumed.items()}
        assert {key: a.value for key, a in variant.assumptions.items()} == expected
    assert profile.errors.rows == len(mine)
    assert profile.errors.scored_rows == len(rows(name)) - len(mine)
    assert profile.hardware == tuple(sorted({run.run.hardware for run in mine}))
    observed = [stack_variables(run.model) for run in mine]
    assert dict(profile.ranges) == {
        key: (min(o[key] for o in observed), max(o[key] for o in observed)) for key in observed[0]
    }
    for constant in profile.constants.values():
        assert constant.source is Source.FITTED


def test_a_refit_gives_the_shipped_constants() -> None:
    mine = fitted_rows(SMALL)
    found = fit_values(mine, spec(SMALL), layout_weights(mine))
    shipped = {key: c.value for key, c in load_stack(SMALL).constants.items()}
    assert found == pytest.approx(shipped, rel=1e-3)


def test_a_profile_is_written_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    assert main([SMALL, "--out", str(path), "--resamples", "2"]) == 0
    again, shipped = load_stack(str(path)), load_stack(SMALL)
    errors = again.errors.model_dump()
    assert errors == pytest.approx(shipped.errors.model_dump(), rel=1e-3)
    assert again.ranges == shipped.ranges
    text = path.read_text("utf-8")
    assert "python -m perfmodel.calibration.fit_published megatron-core-2021" in text
    assert str(tmp_path) not in text


# ---------------------------------------------------------------- switches


BRIDGE = "megatron-bridge"


def test_switches_replace_their_own_constants() -> None:
    plain, profile = load_stack(BRIDGE), load_stack(f"{BRIDGE}+overlap+eager")
    assert profile.name == f"{BRIDGE}+eager+overlap"  # in the order of the profile
    assert profile.variants == {}
    for name in Stack._fields:
        on = [plain.variants[v] for v in ("eager", "overlap")]
        fitted = [v.constants[name].value for v in on if name in v.constants]
        assumed = [v.assumptions[name].value for v in on if name in v.assumptions]
        expected = [getattr(plain.stack(), name), *fitted, *assumed][-1]
        assert getattr(profile.stack(), name) == expected
    assert profile.source("host_layer_s") is Source.FITTED
    assert plain.source("host_layer_s") is Source.ASSUMED
    assert plain.varied() == plain


def test_the_last_of_two_switches_on_one_constant_counts() -> None:
    plain = load_stack(BRIDGE)
    both = plain.varied("26.08", "ultra")
    assert both.name == f"{BRIDGE}+ultra+26.08"
    assert both.stack().device_scale == plain.variants["26.08"].constants["device_scale"].value


@pytest.mark.parametrize("name", [f"{BRIDGE}+magic", "torchtitan+eager"])
def test_an_unknown_switch_is_said_with_those_there_are(name: str) -> None:
    stack, _, switch = name.partition("+")
    said = rf"^Stack profile {stack} has no variant '{switch}'; it has [^\n]*\.$"
    with pytest.raises(PackError, match=said):
        load_stack(name)


# ---------------------------------------------------------------- refusals


def test_runs_that_do_not_ship_are_asked_for() -> None:
    with pytest.raises(PerfmodelError, match=r"^The runs of nanotron do not ship [^\n]*--runs\.$"):
        timed_runs(spec("nanotron"))


def test_too_few_layouts_are_refused() -> None:
    mine = fitted_rows(SMALL)
    one = [run for run in mine if layout_key(run.run) == layout_key(mine[0].run)]
    with pytest.raises(PerfmodelError, match=r"^1 layouts cannot fit the 2 constants of"):
        fit_published(spec(SMALL), one, resamples=1, seed=1)


def test_the_command_says_errors_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["nanotron", "--out", str(tmp_path / "x.toml")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "do not ship" in said
    assert not (tmp_path / "x.toml").exists()
