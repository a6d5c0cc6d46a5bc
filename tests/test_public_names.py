"""What the packages export can be imported, whatever was imported before."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module
from pkgutil import walk_packages

import pytest

PACKAGES = ("perfmodel", "lawfit", "moe_ref", "mosaic_opt")


@pytest.mark.parametrize("package", PACKAGES)
def test_every_exported_name_is_there(package: str) -> None:
    if package == "moe_ref":
        pytest.importorskip("torch")
        pytest.importorskip("safetensors")
    module = import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_exported_name_is_shadowed_by_a_module(package: str) -> None:
    """A submodule becomes an attribute of its package when it is imported."""
    module = import_module(package)
    modules = {info.name.rpartition(".")[2] for info in walk_packages(module.__path__)}
    assert not modules & set(module.__all__)


@pytest.mark.parametrize("package", ["perfmodel", "moe_ref", "mosaic_opt"])
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        _ = import_module(package).nonsense


def test_importing_the_product_is_light() -> None:
    code = (
        "import sys, mosaic_opt; print(sorted({'numba', 'pydantic', 'torch'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_the_reference_model_loads_no_torch() -> None:
    code = "import sys, moe_ref; dir(moe_ref); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
