"""Formulas run as plain Python; kernels are cached where possible, and never stale."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest
from numba.core.caching import CacheImpl

import perfmodel
from perfmodel import _jit
from perfmodel._jit import compile_kernel, formula, formulas_digest

SOURCES = Path(_jit.__file__).parent


@formula
def doubled(x: float) -> float:
    return 2.0 * x


def kernel(x: float) -> float:
    return doubled(x) + 1.0 / (x - 1.0)


# ---------------------------------------------------------------- one source


def test_a_formula_is_still_a_python_function() -> None:
    assert doubled(21.0) == 42.0
    assert type(doubled) is type(kernel)
    with pytest.raises(TypeError, match=r"unsupported operand|can't multiply"):
        doubled(None)  # type: ignore[arg-type]


def test_a_compiled_kernel_calls_the_same_formula() -> None:
    compiled = compile_kernel(kernel)
    assert compiled(3.0) == kernel(3.0) == 6.5
    assert isinstance(compiled, numba.core.dispatcher.Dispatcher)


def test_kernels_follow_ieee_arithmetic_and_let_others_run() -> None:
    options = compile_kernel(kernel).targetoptions
    assert options["nogil"]
    assert not options.get("fastmath", False)
    assert compile_kernel(kernel)(1.0) == float("inf")  # a division by zero raises nothing


# ---------------------------------------------------------------- caching


def test_without_any_place_to_cache_a_kernel_is_compiled_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """numba finds no locator on a read-only install without a home directory, and raises."""
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    with pytest.raises(RuntimeError, match="no locator available"):
        numba.njit(cache=True)(kernel)
    compiled = compile_kernel(kernel)
    assert compiled(3.0) == 6.5
    assert not compiled.stats.cache_path


def test_another_error_of_a_kernel_is_not_swallowed() -> None:
    def broken(x: float) -> float:
        return undefined_name(x)  # type: ignore[name-defined] # noqa: F821

    with pytest.raises(numba.core.errors.TypingError, match="undefined_name"):
        compile_kernel(broken)(1.0)


def copy_of_jit(folder: Path) -> ModuleType:
    """Load the module again, as if the package lay in a folder."""
    shutil.copy(_jit.__file__, folder / "_jit.py")
    spec = importlib.util.spec_from_file_location("copy_of_jit", folder / "_jit.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_digest_follows_every_source(tmp_path: Path) -> None:
    seen = set()
    for name, text in (
        ("layer.py", "A = 1"),
        ("layer.py", "A = 2"),  # changed
        ("memory.py", "A = 1"),  # added
        ("memory.py", "A = 2"),
    ):
        (tmp_path / name).write_text(text)
        seen.add(copy_of_jit(tmp_path).formulas_digest())
    (tmp_path / "memory.py").rename(tmp_path / "mesh.py")
    seen.add(copy_of_jit(tmp_path).formulas_digest())
    assert len(seen) == 5
    (tmp_path / "notes.txt").write_text("not a source")
    assert copy_of_jit(tmp_path).formulas_digest() in seen


def test_the_digest_covers_the_file_of_every_formula() -> None:
    """It reads the package's own folder, so no formula may lie deeper."""
    users = [
        path.relative_to(SOURCES)
        for path in SOURCES.rglob("*.py")
        if "@formula" in path.read_text("utf-8") and path.name != "_jit.py"
    ]
    assert len(users) >= 5
    assert all(path.parent == Path() for path in users)
    assert len(formulas_digest()) == 64


PRICE = """
import numpy as np
from perfmodel.architecture import Architecture
from perfmodel.batch import _kernel, plan_matrix, price
from perfmodel.cluster import Cluster, Optimizer
from perfmodel.calibration.stacks import load_stack
from perfmodel.plan_space import PlanSpace

table = PlanSpace(tp=(1,), cp=(1,), micro_batch=(1,)).skeleton(8, 256, 8)
a = Architecture(n_layers=4, d_model=64, n_heads=4, n_kv_heads=4, head_dim=16, d_ff=64,
                 vocab_size=100)
step, memory = price(a, plan_matrix(table), np.zeros(1, dtype=np.int64),
                     hardware=Cluster(hardware="p6-b200", nodes=1).constants,
                     stack=load_stack("megatron-eager").stack(),
                     optimizer=Optimizer.ADAMW.dims, seq_len=256, global_batch=8)
print(memory[0], sum(_kernel().stats.cache_hits.values()))
"""


@pytest.mark.slow
def test_a_cached_kernel_is_used_again_until_a_formula_changes(tmp_path: Path) -> None:
    """In the folder that NUMBA_CACHE_DIR names, and in no other."""
    package = tmp_path / "perfmodel"
    shutil.copytree(
        Path(perfmodel.__path__[0]), package, ignore=shutil.ignore_patterns("__pycache__")
    )
    cache = tmp_path / "cache"
    environment = os.environ | {
        "NUMBA_CACHE_DIR": str(cache),
        "PYTHONPATH": str(tmp_path),
        "PYTHONDONTWRITEBYTECODE": "1",
    }

    def run() -> tuple[float, int]:
        done = subprocess.run(
            [sys.executable, "-c", PRICE],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        )
        memory, hits = done.stdout.split()
        return float(memory), int(hits)

    first, hits = run()
    assert hits == 0
    assert list(cache.rglob("*.nbi"))
    assert not list(package.rglob("*.nb[ic]"))
    assert run() == (first, 1)

    source = package / "activations.py"
    text = source.read_text("utf-8")
    written, changed_to = "logits=stack.logit_bytes *", "logits=(stack.logit_bytes + 1.0) *"
    assert written in text
    source.write_text(text.replace(written, changed_to), "utf-8")
    changed, hits = run()
    assert hits == 0
    assert changed - first == 256 * 100  # one byte more for every logit
