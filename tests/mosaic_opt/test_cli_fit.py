"""The command fit: page, JSON, HTML, the law's file, and an envelope that takes it."""

from __future__ import annotations

import csv
import json
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from lawfit import CHINCHILLA_EPOCH, MOSAIC_TABLE2, FitResult, bootstrap, fit, load_law, read_runs
from lawfit import profile as profiles
from lawfit.published_runs import run_design
from mosaic_opt.envelope import load_envelope, parse_envelope
from mosaic_opt.errors import EnvelopeError, MosaicError
from mosaic_opt.figure_fit import fit_page, parity_figure, profile_figure, residual_figure
from mosaic_opt.fit_report import FitReport
from mosaic_opt.result import Solution
from mosaic_opt.studies.robust import robust
from mosaic_opt.studies.robust_result import Robust
from perfmodel.sources import Source

from .strategies import Run, tiny, tiny_envelope, written

QUICK = ("--starts", "8", "--draws", "30", "--restarts", "8")
BARE = ("--starts", "8", "--draws", "0", "--restarts", "0")
NASTY = '</script><script>alert("1")</script>'


def saved(folder: Path, rows: list[list[object]], name: str = "runs.csv") -> str:
    file = folder / name
    with file.open("w", encoding="utf-8", newline="") as out:
        csv.writer(out).writerows(rows)
    return str(file)


def dense(folder: Path, **options: str) -> str:
    """Write 40 dense runs of the Chinchilla law, their losses off by 0.35 %."""
    draw = np.random.default_rng(1)
    size = np.exp(draw.uniform(np.log(70e6), np.log(16e9), 40))
    tokens = np.exp(draw.uniform(np.log(5e9), np.log(500e9), 40))
    loss = CHINCHILLA_EPOCH.loss(n_total=size, n_active=size, tokens=tokens, expert_split=1.0)
    loss = loss * np.exp(0.0035 * draw.standard_normal(40))
    names = [options.get("first", "run 0"), *(f"run {k}" for k in range(1, 40))]
    rows = [list(row) for row in zip(names, size, tokens, loss, strict=True)]
    return saved(folder, [["run", "params", "tokens", "loss"], *rows])


def sparse(folder: Path, noise: float = 0.0035) -> str:
    """Write 120 runs of the joint law at the design of its paper."""
    design = run_design(fitted=False)
    draw = np.random.default_rng(2)
    at = draw.choice(len(design.runs), 120, p=design.runs / design.runs.sum())
    point = {"n_total": design.n_total[at], "n_active": design.n_active[at]}
    point |= {"tokens": design.tokens[at], "expert_split": design.expert_split[at]}
    loss = MOSAIC_TABLE2.loss(**point) * np.exp(noise * draw.standard_normal(120))
    columns = [point["n_total"] / 1e9, point["n_active"], point["expert_split"], point["tokens"]]
    rows = [list(row) for row in zip(*columns, loss, strict=True)]
    return saved(folder, [["total_params_B", "active_params", "G", "D", "val_loss"], *rows])


@cache
def found(first: str = "run 0") -> FitResult:
    with TemporaryDirectory() as folder:
        runs = read_runs(dense(Path(folder), first=first))
    return fit("chinchilla", runs, starts=8, holdout="future:0.1")


def chinchilla(file: str, *options: str) -> tuple[str, ...]:
    return ("fit", file, "--law", "chinchilla", *options)


def test_a_page_and_the_document(mosaic: Run, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    options = ("--holdout", "future:0.1", "--convention", "with_embedding", "--json", str(target))
    code, out, err = mosaic(*chinchilla(dense(tmp_path), *QUICK, *options))
    assert (code, err) == (0, "")
    document = json.loads(target.read_text("utf-8"))
    promised = "law coefficients objective converged starts_agreeing rmse_train rmse_holdout"
    assert set(promised.split()) <= set(document)
    assert document["schema_version"] == 1
    report = FitReport.from_json(target.read_text("utf-8"))
    assert "chinchilla law, 36 runs of runs.csv, 4 held out: CONVERGED" in out
    assert "N counts       with_embedding" in out
    for name, one in report.coefficients.items():
        assert one.low is not None
        assert one.high is not None
        assert one.low < one.value < one.high
        assert isinstance(one.identified, bool)
        assert f"{one.value:.5g}" in out
        assert getattr(report.law, name) == one.value
    assert report.intervals is not None
    assert (report.intervals.draws, report.intervals.level) == (30, 0.95)
    assert report.rmse_holdout is not None
    assert report.law.convention == "with_embedding"


def test_the_intervals_are_those_of_the_library(mosaic: Run, tmp_path: Path) -> None:
    options = ("--seed", "3", "--bootstrap", "pairs", "--level", "0.8", "--json", "-")
    file = dense(tmp_path)
    code, out, _ = mosaic(*chinchilla(file, *QUICK, *options))
    assert code == 0
    again = fit("chinchilla", read_runs(file), starts=8, rng=3)
    interval = bootstrap(again, kind="pairs", draws=30, seed=3).interval("beta", level=0.8)
    beta = FitReport.from_json(out).coefficients["beta"]
    assert (beta.low, beta.high) == (interval.low, interval.high)


def test_runs_to_a_law_to_an_envelope(mosaic: Run, tmp_path: Path) -> None:
    law_file, document = tmp_path / "laws" / "law.json", tmp_path / "laws" / "report.json"
    law_file.parent.mkdir()
    options = ("--convention", "without_embedding", "--holdout", "nact:0.1")
    files = ("--law-file", str(law_file), "--json", str(document))
    code, out, _ = mosaic("fit", sparse(tmp_path), *BARE, *options, *files)
    assert code == 0
    assert "joint law, 107 runs of runs.csv, 13 held out: CONVERGED" in out
    law = load_law(law_file)
    assert law == load_law(document)
    assert json.loads(law_file.read_text("utf-8"))["provenance"]["converged"] is True
    code, out, _ = mosaic("solve", written(tmp_path, law="laws/law.json"), "--json", "-")
    assert code == 0
    solution = Solution.from_json(out)
    assert solution.provenance["law"]["source"] == law.source  # type: ignore[index]
    best = solution.optimum
    assert best is not None
    a = best.architecture
    point = {name: float(str(a[name])) for name in ("n_total", "n_active", "expert_split")}
    assert best.loss == pytest.approx(law.loss(**point, tokens=best.tokens), rel=1e-12)
    laws = [flag for flag in best.flags if flag.startswith("law: ")]
    assert laws[0].startswith("law: N counts 'without_embedding' in its runs")
    assert [flag.removeprefix("law: ") for flag in laws[1:]] == list(
        law.flags(**point, tokens=best.tokens)
    )


def test_a_law_of_small_runs_flags_what_it_was_not_fitted_on() -> None:
    law = found().law
    assert law.flags(n_total=1e11, n_active=1e11, tokens=1e10, expert_split=1.0)


def test_a_fit_that_did_not_converge_is_exit_1_and_its_law_says_so(
    mosaic: Run, tmp_path: Path
) -> None:
    target = tmp_path / "law.json"
    options = ("--starts", "1", "--law-file", str(target))
    code, out, _ = mosaic(*chinchilla(dense(tmp_path), *options))
    assert code == 1
    assert "NOT CONVERGED" in out
    assert "few_starts_agree" in out
    assert "not_learnt" in out
    assert load_law(target).source.endswith("; the fit did NOT converge")


def test_an_interrupt_shows_the_fit(
    mosaic: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(_: object, what: str, done: int, of: int) -> None:
        if what == "refits":
            raise KeyboardInterrupt

    monkeypatch.setattr("mosaic_opt.console.Bar.count", stop)
    code, out, _ = mosaic(*chinchilla(dense(tmp_path), *QUICK))
    assert code == 130
    assert "CONVERGED" in out
    assert "interrupted: The command was interrupted after the fit" in out


def test_too_few_refits_for_an_interval_are_a_warning(mosaic: Run, tmp_path: Path) -> None:
    options = ("--starts", "8", "--draws", "5", "--restarts", "0", "--json", "-")
    code, out, _ = mosaic(*chinchilla(dense(tmp_path), *options))
    assert code == 0
    report = FitReport.from_json(out)
    assert report.intervals is None
    assert report.coefficients["beta"].low is None
    assert "no_intervals" in [warning.reason for warning in report.warnings]


def test_rows_and_coefficients_by_name(mosaic: Run, tmp_path: Path) -> None:
    options = ("--holdout", "ids:run 1,run 2", "--outliers", "ids:run 3", "--fix", "alpha=0.35")
    code, out, _ = mosaic(*chinchilla(dense(tmp_path), *BARE, *options, "--json", "-"))
    assert code == 0
    report = FitReport.from_json(out)
    assert (report.n_train, report.held_out) == (37, ("run 1", "run 2"))
    assert report.outlier_rule == "dropped by name: run 3"
    alpha = report.coefficients["alpha"]
    assert (alpha.value, alpha.fixed, alpha.low, alpha.identified) == (0.35, True, None, None)


def test_one_expert_split_of_several(mosaic: Run, tmp_path: Path) -> None:
    file = sparse(tmp_path, noise=0.0)
    options = ("--law", "per_split", "--expert-split", "4", *BARE, "--json", "-")
    code, out, _ = mosaic("fit", file, *options)
    assert code == 0
    report = FitReport.from_json(out)
    assert report.law.kind == "per_split"
    assert report.law.expert_split == 4.0
    assert report.n_train == read_runs(file).expert_split.count(4.0)


def test_the_points_of_the_chinchilla_figure(mosaic: Run, shared_data: Path) -> None:
    """The coefficients on the page about fits; 1.0182740e-3 is the least known objective."""
    file = shared_data / "laws" / "epoch_chinchilla" / "svg_extracted_data.csv"
    code, out, _ = mosaic(*chinchilla(str(file), *BARE, "--outliers", "highest:5", "--json", "-"))
    assert code == 0
    report = FitReport.from_json(out)
    assert report.n_train == 240
    assert report.objective == pytest.approx(1.0182740e-3, rel=1e-7)
    assert report.coefficients["beta"].value == pytest.approx(0.36717, abs=1e-5)
    assert "tokens_from_compute" in [warning.reason for warning in report.warnings]


def test_the_refits_of_a_fit_are_the_draws_of_robust(mosaic: Run, tmp_path: Path) -> None:
    law_file, report = tmp_path / "law.json", tmp_path / "fit.json"
    options = ("--convention", "without_embedding_and_head", "--starts", "20", "--restarts", "0")
    files = ("--law-file", str(law_file), "--json", str(report))
    file = sparse(tmp_path)
    code, _, _ = mosaic("fit", file, *options, "--draws", "25", *files)
    assert code == 0
    laws = FitReport.from_file(law_file).ensemble()
    again = read_runs(file, convention="without_embedding_and_head")
    assert laws.laws == bootstrap(fit("joint", again, starts=20), draws=25).ensemble().laws
    assert (laws.basis, laws.method) == ("FITTED", "converged refits, wild bootstrap of 120 runs")
    assert FitReport.from_file(report) == FitReport.from_file(law_file)
    envelope = written(tmp_path, law="law.json")
    for given in (law_file, report):
        code, out, err = mosaic("robust", envelope, "--ensemble", str(given), "--json", "-")
        assert (code, err) == (0, "")
        found = Robust.from_json(out)
        assert (found.draws, found.rests_on.law) == (25, Source.FITTED)
        assert found == robust(load_envelope(envelope), draws=25, ensemble=laws)


@pytest.mark.parametrize(
    ("law", "fitted", "options", "words"),
    [
        ("law.json", BARE, (), "holds no refits, and so no draws"),
        ("mosaic-table2", QUICK, (), "and the envelope's law is another"),
        ("law.json", QUICK, ("--draws", "31"), "holds 30 laws and draws=31; nearest: 30"),
        ("law.json", QUICK, ("--uncertain", "stack"), "no use without law in --uncertain"),
    ],
)
def test_draws_that_are_none_of_the_law_are_refused(
    mosaic: Run,
    tmp_path: Path,
    law: str,
    fitted: tuple[str, ...],
    options: tuple[str, ...],
    words: str,
) -> None:
    file = tmp_path / "law.json"
    assert mosaic(*chinchilla(dense(tmp_path), *fitted, "--law-file", str(file)))[0] == 0
    code, _, err = mosaic("robust", written(tmp_path, law=law), "--ensemble", str(file), *options)
    assert code == 2
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"refits": {"a": [1.0]}}, "refits must have the names of coefficients"),
        ({"refits": {"a": [], "alpha": [], "b": [], "beta": [], "e": []}}, "refits"),
        ({"law": None}, "law"),
        ({"provenance": {}}, "coefficients"),
    ],
)
def test_a_file_of_draws_that_is_none(
    tmp_path: Path, change: dict[str, object], words: str
) -> None:
    report = FitReport.of(found(), bootstrap=bootstrap(found(), draws=20))
    assert len(report.ensemble()) == 20
    file = tmp_path / "fit.json"
    file.write_text(json.dumps({**json.loads(report.to_json()), **change}), "utf-8")
    with pytest.raises(MosaicError, match=words) as error:
        FitReport.from_file(file)
    assert str(error.value).startswith(f"{file}: ")
    wrong = {name: (-1.0,) * 20 for name in report.coefficients}
    with pytest.raises(
        MosaicError, match="A refit of the report is no law: b: -1 is out of bounds"
    ):
        report.model_copy(update={"refits": wrong}).ensemble()
    for text in ("[]", "3"):
        file.write_text(text, "utf-8")
        with pytest.raises(MosaicError, match="Not a report of fit"):
            FitReport.from_file(file)


# ---------------------------------------------------------------- the page with figures


def test_a_page_of_html_that_needs_nothing_else(mosaic: Run, tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    page, target = tmp_path / "fit.html", tmp_path / "out.json"
    options = ("--holdout", "future:0.1", "--html", str(page), "--json", str(target))
    file = dense(tmp_path, first=NASTY)
    code, _, _ = mosaic(*chinchilla(file, *BARE, *options, "--source", NASTY))
    assert code == 0
    text = page.read_text("utf-8")
    assert "alert(" in text
    assert NASTY not in text
    assert 'src="http' not in text
    assert "<link" not in text
    for title in ("Predicted and measured loss", "Residuals", "Profiles", "Coefficients"):
        assert f"<h2>{title}" in text
    report = FitReport.from_json(target.read_text("utf-8"))
    curves = profiles(found(NASTY))
    for name, one in report.coefficients.items():
        assert (one.profile_low, one.profile_high) == (curves[name].low, curves[name].high)


def test_the_figures_have_the_runs_and_the_thresholds() -> None:
    pytest.importorskip("plotly")
    result = found()
    assert result.held is not None
    parity = {trace.name: trace for trace in parity_figure(result).data}
    assert list(parity["in the fit"].x) == list(result.train.loss)
    assert list(parity["held out"].x) == list(result.held.loss)
    miss = np.subtract(parity["held out"].y, parity["held out"].x)
    assert np.sqrt(np.mean(miss**2)) == pytest.approx(result.rmse_holdout)
    residuals = residual_figure(result)
    assert len(residuals.data) == 12
    titles = [axis.title.text for axis in residuals.select_xaxes()]
    assert [title.split()[0] for title in titles] == ["N_tot", "N_act", "S", "D", "G", "D"]
    assert list(residuals.data[6].x) == list(result.train.tokens)
    for trace in residuals.data:
        runs = result.train if trace.name == "in the fit" else result.held
        predicted = result.law.loss(
            **{n: runs.column(n) for n in ("n_total", "n_active", "tokens", "expert_split")}
        )
        assert list(trace.y) == pytest.approx(list(predicted - runs.column("loss")))
    curves = profiles(result, ["beta"], points=7)
    figure = profile_figure(curves)
    assert list(figure.data[0].x) == list(curves["beta"].values)
    lines = [shape.y0 for shape in figure.layout.shapes if shape.y0 == shape.y1]
    assert lines == [curves["beta"].threshold ** 2]
    ends = [shape.x0 for shape in figure.layout.shapes if shape.x0 == shape.x1]
    assert ends == [curves["beta"].low, curves["beta"].high]


def test_without_plotly_the_figures_are_one_sentence(
    mosaic: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MosaicError, match="A figure needs plotly"):
        fit_page(FitReport.of(found()), found())
    code, out, err = mosaic(*chinchilla(dense(tmp_path), "--html", str(tmp_path / "x.html")))
    assert (code, out) == (2, "")
    assert "A figure needs plotly" in err


# ---------------------------------------------------------------- documents


def test_a_report_reads_back_and_prints_itself() -> None:
    report = FitReport.of(found())
    assert FitReport.from_json(report.to_json()) == report
    assert "no intervals were made" in str(report)
    with pytest.raises(MosaicError, match="Not a report of fit: law is missing"):
        FitReport.from_json("{}")


def test_an_envelope_takes_a_law_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    law = found().law
    (tmp_path / "law.json").write_text(FitReport.of(found()).law_file(), "utf-8")
    monkeypatch.chdir(tmp_path.parent)
    assert load_envelope(written(tmp_path, law="law.json")).law == law
    assert tiny_envelope(law=str(tmp_path / "law.json")).law == law
    again = parse_envelope(
        json.loads(tiny_envelope(law=f"{tmp_path.name}/law.json").model_dump_json())
    )
    assert again.law == law


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "law.json cannot be read: No such file"),
        ("{}", "law.json holds no law: it needs the key 'law'"),
        ('{"law": {"kind": "joint"}}', "the key 'alpha' is missing"),
        ("nothing", "law.json is not valid JSON"),
    ],
)
def test_an_envelope_says_what_is_wrong_with_a_law_file(
    tmp_path: Path, text: str | None, words: str
) -> None:
    if text is not None:
        (tmp_path / "law.json").write_text(text, "utf-8")
    with pytest.raises(EnvelopeError, match=words):
        load_envelope(written(tmp_path, law="law.json"))


@pytest.mark.parametrize(
    ("convention", "words"),
    [
        ("Without embedding and-head", None),
        (None, None),
        ("not stated", "law: what N counts in its runs is not stated"),
        (
            "with embeddings",
            "law: N counts 'with embeddings' in its runs and without_embedding_and",
        ),
    ],
)
def test_a_law_of_other_counts_is_flagged(convention: str | None, words: str | None) -> None:
    from mosaic_opt.solver import convention_flags

    law = MOSAIC_TABLE2.model_copy(update={"convention": convention})
    flags = [f"law: {flag}" for flag in convention_flags(parse_envelope(tiny(law=law)))]
    assert len(flags) == (words is not None)
    assert words is None or flags[0].startswith(words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fit", "/no/runs.csv"], "/no/runs.csv cannot be read"),
        (["fit", "DENSE"], "--law joint is for sparse models"),
        (["fit", "DENSE", "--law", "cubic"], "law is 'cubic', but fit takes one of joint"),
        (["fit", "SPARSE", "--law", "per_split"], "as in --expert-split 1, or --law joint"),
        (["fit", "SPARSE", "--expert-split", "3"], "--expert-split 3 is that of no run; there are"),
        (["fit", "SPARSE", "--expert-split", "4"], "take --law per_split, or hold it"),
        (["fit", "DENSE", "--column", "n_active"], "--column 'n_active' must be NAME=VALUE"),
        (["fit", "DENSE", "--column", "n_active=N"], "the column 'N', but the table has only"),
        (["fit", "DENSE", "--fix", "alpha=x"], "--fix 'alpha=x' must hold a number"),
        (["fit", "DENSE", "--draws", "-1"], "--draws -1 must be at least 0"),
        (["fit", "DENSE", "--restarts", "1"], "--restarts 1 must be 0, for none"),
        (["fit", "DENSE", "--seed", "-1"], "--seed -1 must be at least 0"),
        (["fit", "DENSE", "--level", "95"], "--level 95 must lie between 0 and 1"),
        (["fit", "DENSE", "--bootstrap", "tame"], "--bootstrap 'tame' must be wild or pairs"),
        (["fit", "DENSE", "--law-file", "law.txt"], "must end in .json"),
        (["fit", "DENSE", "--json", "/no/such/out"], "cannot be written"),
        (["fit", "DENSE", "--html", "/no/such/out"], "cannot be written"),
        (["fit", "DENSE", "--loss-unit", "bans"], "loss_unit is 'bans'"),
        (
            ["fit", "DENSE", "--law", "chinchilla", "--holdout", "nact"],
            "holdout is 'nact', but must be 'nact:' or 'future:'",
        ),
        (
            ["fit", "DENSE", "--law", "chinchilla", "--holdout", "ids:x"],
            "holdout names 'x', which is the id of no run",
        ),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(
    mosaic: Run, tmp_path: Path, arguments: list[str], words: str
) -> None:
    files = {"DENSE": dense, "SPARSE": sparse}
    code, out, err = mosaic(*(files[a](tmp_path) if a in files else a for a in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert words in err
    assert len(err.splitlines()) == 1
