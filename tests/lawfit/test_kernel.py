"""The compiled kernel: rounding, places without a cache, threads, and no BLAS."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from numba.core.caching import CacheImpl

import lawfit
from lawfit import _newton, fit
from lawfit._newton import terms_of
from lawfit._posynomial import posynomial

from .fit_tables import dense_runs, fitted, joint_runs


@pytest.mark.parametrize("noise", [1e-4, 1e-6, 1e-7, 1e-9])
def test_starts_converge_however_small_the_residuals(noise: float) -> None:
    """Near rounding the objective cannot tell a step that still lowers the gradient."""
    for objective in ("huber", "least_squares"):
        found = fit("chinchilla", dense_runs(noise=noise), objective=objective, starts=20)  # type: ignore[arg-type]
        assert found.converged
        assert found.starts_agreeing >= 19


# ---------------------------------------------------------------- where it is compiled


def copy_of_newton() -> ModuleType:
    """Load the module again, so that it decorates its functions again."""
    spec = importlib.util.spec_from_file_location("copy_of_newton", str(_newton.__file__))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_without_any_place_to_cache_the_kernel_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """numba finds no locator on a read-only install without a home directory, and raises."""
    assert _newton.value.stats.cache_path  # type: ignore[attr-defined]
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    copy = copy_of_newton()
    assert not copy.value.stats.cache_path
    runs = joint_runs()
    logs = runs.logs()
    form = posynomial(fitted("joint").law, logs.variables, logs.loss)
    data = logs.loss, runs.column("weight"), 1e-3, form.point(fitted("joint").law.model_dump())
    assert copy.value(terms_of(form), *data) == _newton.value(terms_of(form), *data)


def test_kernels_let_other_threads_run_and_follow_ieee_arithmetic() -> None:
    for name in ("value", "derivatives", "descend_many"):
        options = getattr(_newton, name).targetoptions
        assert options["nogil"]
        assert options["error_model"] == "numpy"
        assert not options.get("fastmath", False)


FRESH = """
import sys
sys.modules["scipy"] = None  # numba's products of matrices and decompositions go through it
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []
from lawfit import fit, sample_runs
found = fit("joint", sample_runs(), starts=3)
print(repr(found.objective), sorted({"scipy.linalg", "lawfit._early_stop"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_a_fit_needs_no_blas_and_no_writable_place(tmp_path: Path) -> None:
    environment = {
        key: value for key, value in os.environ.items() if key not in ("HOME", "NUMBA_CACHE_DIR")
    }
    environment |= {
        "PYTHONPATH": str(Path(lawfit.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # the tests of misfit need scipy's distributions, the descent must not
    code = FRESH.replace(
        "found = fit",
        "import lawfit.fitting as fitting\nfitting.remarks = lambda *_: []\nfound = fit",
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    objective, modules = done.stdout.split(maxsplit=1)
    assert modules.strip() == "[]"
    assert float(objective) == fit("joint", joint_runs(), starts=3).objective
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------- threads


def alive() -> list[str]:
    return [each.name for each in threading.enumerate() if each.name.startswith("lawfit")]


def test_a_fit_leaves_no_thread_when_it_ends_or_is_interrupted() -> None:
    seen: list[int] = []

    def stop(done: int, of: int) -> None:
        seen.append(len(alive()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit("joint", joint_runs(), starts=4000, progress=stop)
    assert seen[0] >= 1
    assert not alive()
    fit("chinchilla", dense_runs(), starts=20)
    assert not alive()


def test_an_interrupt_drops_the_starts_that_have_not_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[int] = []
    whole = _newton.descend_many

    def counted(*arguments: object) -> None:
        begun.append(1)
        whole(*arguments)  # type: ignore[arg-type]

    def stop(done: int, of: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_newton, "descend_many", counted)
    with pytest.raises(KeyboardInterrupt):
        fit("joint", joint_runs(), starts=8000, progress=stop)
    assert 1 <= len(begun) < 200  # of 1000 batches
    assert not alive()


def test_another_error_of_a_callback_comes_through() -> None:
    def fail(done: int, of: int) -> None:
        raise ValueError("no disk left")

    with pytest.raises(ValueError, match="no disk left"):
        fit("chinchilla", dense_runs(), starts=20, progress=fail)
    assert not alive()
    assert np.isfinite(fit("chinchilla", dense_runs(), starts=3).objective)
