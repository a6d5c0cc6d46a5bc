"""Activation recompute that decides as the first pass did and counts nothing twice.

The backward pass runs a block again in place of keeping its activations. A router draws noise and
counts tokens in that pass too. So the second run starts its generator where the first one started
and puts it back afterwards, and works on copies of the block's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["recomputed"]


def recomputed(block: nn.Module, generator: torch.Generator | None, *inputs: Any) -> Any:
    """Return ``block(*inputs, generator)``, whose activations the backward pass computes again.

    What the block returns and what its buffers hold are those of a plain call, bit for bit, and
    so are the gradients where the operations of the block are deterministic.
    """
    start = None if generator is None else generator.get_state()

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _second_run(block, generator, start)

    run: Callable[..., Any] = checkpoint
    return run(block, *inputs, generator, use_reentrant=False, context_fn=contexts)


@contextmanager
def _second_run(block: nn.Module, generator: torch.Generator | None, start: Any) -> Iterator[None]:
    originals = [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module.named_buffers(recurse=False)
    ]
    for module, name, buffer in originals:
        setattr(module, name, buffer.clone())
    now = None if generator is None else generator.get_state()
    if generator is not None:
        generator.set_state(start)
    try:
        yield
    finally:
        for module, name, buffer in originals:
            setattr(module, name, buffer)
        if generator is not None:
            generator.set_state(now)
