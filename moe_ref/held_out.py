"""A text as bytes, and the loss of a model on the part of it that no run reads."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

import numpy as np
import torch
from torch import Tensor

from moe_ref.errors import MoeRefError
from moe_ref.model import ReferenceModel

__all__ = ["byte_tokens", "evaluate"]

HELD_OUT_SHARE: Final = 0.05
EVALUATED_TOKENS: Final = 65_536


def byte_tokens(path: str | Path) -> tuple[Tensor, Tensor, str]:
    """Return the bytes of a file as tokens: for training, held out (the last 5 %), and their hash.

    Raises
    ------
    MoeRefError
        A file that cannot be read.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise MoeRefError(f"{path} cannot be read: {error.strerror}.") from error
    tokens_N = torch.from_numpy(np.frombuffer(content, dtype=np.uint8).astype(np.int64))
    at = len(content) - round(HELD_OUT_SHARE * len(content))
    return tokens_N[:at], tokens_N[at:], hashlib.sha256(content).hexdigest()[:12]


@torch.no_grad()
def evaluate(model: ReferenceModel, tokens_N: Tensor, seq_len: int, sequences: int = 8) -> float:
    """Return the mean cross-entropy over the first windows of a text [nat/token].

    Parameters
    ----------
    model : ReferenceModel
        Evaluated without noise, and left as it was.
    tokens_N : Tensor of int64
        The text; at most 65,536 of its targets are read, from its beginning.
    seq_len, sequences : int
        Tokens of a window, windows of a batch.

    Raises
    ------
    MoeRefError
        A text of less than one window.
    """
    windows = min((len(tokens_N) - 1) // seq_len, max(1, EVALUATED_TOKENS // seq_len))
    if windows < 1:
        raise MoeRefError(
            f"the held-out text has {len(tokens_N)} tokens, but must have one window of "
            f"{seq_len + 1}; nearest: {seq_len + 1}."
        )
    training = model.training
    model.eval()
    total = 0.0
    for first in range(0, windows, sequences):
        window_B = torch.arange(first, min(first + sequences, windows))
        tokens_BS = tokens_N[window_B[:, None] * seq_len + torch.arange(seq_len + 1)]
        loss = model(tokens_BS[:, :-1]).cross_entropy(tokens_BS[:, 1:])
        total += float(loss) * len(window_B)
    model.train(training)
    return total / windows
