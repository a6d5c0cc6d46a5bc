"""Checkpoints of a run that continue bit-identically: tensors by safetensors, the rest in JSON.

Nothing is pickled. A checkpoint is a folder of two files, written beside its place and moved there
when it is complete.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe_ref.errors import MoeRefError
from moe_ref.recipe import WarmupStableDecay
from moe_ref.training import Run
from perfmodel import Architecture

__all__ = ["load_checkpoint", "save_checkpoint"]

TENSORS: Final = "tensors.safetensors"
RECORD: Final = "run.json"


class _Record(BaseModel):
    """What a checkpoint holds beside tensors; all but ``step`` must be the run's own."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = 1
    step: int
    architecture: Architecture
    routers: list[str]
    schedule: WarmupStableDecay
    accumulate: int
    precision: str | None
    seed: int


def _record(run: Run) -> _Record:
    return _Record(
        step=run.step,
        architecture=run.model.architecture,
        routers=[repr(router) for router in run.model.routers()],
        schedule=run.schedule,
        accumulate=run.accumulate,
        precision=None if run.precision is None else str(run.precision),
        seed=run.seed,
    )


def save_checkpoint(run: Run, folder: str | Path) -> None:
    """Write the state of a run: model, buffers, optimizer, step, and the state of the noise.

    Raises
    ------
    MoeRefError
        A folder that exists.
    """
    folder = Path(folder)
    if folder.exists():
        raise MoeRefError(f"{folder} exists, and a checkpoint is never written over: name another.")
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    save_file(_tensors(run), partial / TENSORS)
    (partial / RECORD).write_text(_record(run).model_dump_json(indent=1) + "\n")
    os.replace(partial, folder)


def load_checkpoint(run: Run, folder: str | Path) -> None:
    """Bring a run, made as the saved one was, to the state of a checkpoint.

    Raises
    ------
    MoeRefError
        A folder that is no checkpoint, or the checkpoint of another run.
    """
    folder = Path(folder)
    try:
        saved = _Record.model_validate_json((folder / RECORD).read_text())
        tensors = load_file(folder / TENSORS)
    except (OSError, ValidationError, SafetensorError) as error:
        raise MoeRefError(f"{folder} is no checkpoint: {str(error).splitlines()[0]}.") from error
    mine = _record(run)
    for name in _Record.model_fields:
        if name != "step" and getattr(saved, name) != getattr(mine, name):
            raise MoeRefError(
                f"{folder} is of another run: its {name} is {getattr(saved, name)!r}, and this "
                f"run's is {getattr(mine, name)!r}."
            )
    _restore(run, tensors, folder)
    run.step = saved.step


def _tensors(run: Run) -> dict[str, Tensor]:
    """Return every tensor of a run under a name of its own."""
    tensors = {f"model.{name}": value for name, value in run.model.state_dict().items()}
    for name, parameter in run.model.named_parameters():
        for key, value in run.optimizer.state.get(parameter, {}).items():
            tensors[f"optimizer.{key}.{name}"] = value
    tensors["generator"] = run.generator.get_state()
    return {name: value.detach().contiguous() for name, value in tensors.items()}


def _restore(run: Run, tensors: dict[str, Tensor], folder: Path) -> None:
    """Put the tensors of a checkpoint where they belong."""
    for name, value in run.model.state_dict().items():
        saved = tensors.get(f"model.{name}")
        if saved is None or (saved.shape, saved.dtype) != (value.shape, value.dtype):
            found = "absent" if saved is None else f"{saved.dtype} {tuple(saved.shape)}"
            raise MoeRefError(
                f"{folder} is of another model: {name} is {found}, and must be {value.dtype} "
                f"{tuple(value.shape)}."
            )
    run.model.load_state_dict({name: tensors[f"model.{name}"] for name in run.model.state_dict()})
    states = [name.split(".", 2) for name in tensors if name.startswith("optimizer.")]
    parameters = dict(run.model.named_parameters())
    run.optimizer.state.clear()
    for _, key, name in states:
        parameter, value = parameters[name], tensors[f"optimizer.{key}.{name}"]
        on_device = value.to(parameter.device) if value.ndim else value
        run.optimizer.state[parameter][key] = on_device
    run.generator.set_state(tensors["generator"].to(torch.uint8))
