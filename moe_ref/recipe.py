"""The optimizer, the schedule and the learning rate of arXiv 2608.10605, Appendix A.2."""

from __future__ import annotations

import math
from typing import Any, Final, Self

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from moe_ref.errors import MoeRefError

__all__ = ["WarmupStableDecay", "adamw", "parameter_groups", "peak_learning_rate"]

ADAM_BETAS: Final = (0.9, 0.999)
ADAM_EPSILON: Final = 1e-14
WEIGHT_DECAY: Final = 0.1
WARMUP_TOKENS: Final = 100_000_000
DECAY_SHARE: Final = 0.2


def peak_learning_rate(n_active: float, tokens: float) -> float:
    """Return the peak learning rate of rule (17), ``3.30 (6 N_act D)^-0.199`` [-].

    FITTED by the paper on runs of 1.9e18 to 8.1e20 FLOP; below and above it extrapolates.

    Parameters
    ----------
    n_active : float
        Active parameters without embedding and head [parameter].
    tokens : float
        Training tokens [token].

    Raises
    ------
    MoeRefError
        A value that is not finite and above 0.
    """
    for name, value in (("n_active", n_active), ("tokens", tokens)):
        if not (math.isfinite(value) and value > 0):
            raise MoeRefError(f"{name}={value} must be finite and above 0.")
    return 3.30 * math.pow(6.0 * n_active * tokens, -0.199)


class WarmupStableDecay(BaseModel):
    """A learning rate that rises linearly, stays, and falls linearly to 0 over its last steps.

    Attributes
    ----------
    peak : float
        Of the learning rate [-].
    steps : int
        Optimizer steps of the whole run.
    warmup_steps : int
        Steps until the peak; the first has one part in ``warmup_steps`` of it.
    decay_share : float
        Part of all steps over which it falls: 0.2 in A.2. The last step has the smallest rate
        above 0; the step behind it, which is never made, has 0.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    peak: float = Field(gt=0)
    steps: int = Field(ge=1)
    warmup_steps: int = Field(default=0, ge=0)
    decay_share: float = Field(default=DECAY_SHARE, ge=0, le=1)

    @classmethod
    def of_tokens(
        cls, peak: float, tokens: int, tokens_per_step: int, warmup_tokens: int = WARMUP_TOKENS
    ) -> Self:
        """Return the schedule of a run: as many whole steps as its tokens fill.

        A.2 warms up over about 100 million tokens, whatever the length of the run; a run of less
        needs another ``warmup_tokens``.

        Raises
        ------
        MoeRefError
            Tokens that fill no step, or a warm-up longer than the steps before the decay.
        """
        steps = tokens // tokens_per_step
        if steps < 1:
            raise MoeRefError(
                f"tokens={tokens} must be at least tokens_per_step={tokens_per_step}, one step."
            )
        schedule = cls(peak=peak, steps=steps, warmup_steps=-(-warmup_tokens // tokens_per_step))
        if schedule.warmup_steps + schedule.decay_steps > steps:
            room = (steps - schedule.decay_steps) * tokens_per_step
            raise MoeRefError(
                f"warmup_tokens={warmup_tokens} must end before the decay of a run of {tokens} "
                f"tokens begins; nearest: {room}."
            )
        return schedule

    @property
    def decay_steps(self) -> int:
        """Steps over which the rate falls."""
        return round(self.decay_share * self.steps)

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0 [-].

        Raises
        ------
        MoeRefError
            A step that the run does not have.
        """
        if not 0 <= step < self.steps:
            raise MoeRefError(
                f"step={step} must be from 0 to {self.steps - 1}; "
                f"nearest: {min(max(step, 0), self.steps - 1)}."
            )
        rise = (step + 1) / self.warmup_steps if self.warmup_steps else 1.0
        fall = (self.steps - step) / self.decay_steps if self.decay_steps else 1.0
        return self.peak * min(1.0, rise, fall)


def parameter_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return the matrices, which decay, and the gains of norms, which do not.

    Embedding, head, router and stacked experts are matrices. The paper prints one weight decay
    and no exception; the exception of vectors is Megatron-LM's, whose architecture A.1 names.
    """
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": vectors, "weight_decay": 0.0},
    ]


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Return the optimizer of A.2 for a model; its learning rate is set at every step.

    ``beta = (0.9, 0.999)``, ``epsilon = 1e-14``, weight decay 0.1, and no clipping of gradients.
    """
    return torch.optim.AdamW(parameter_groups(model), lr=0.0, betas=ADAM_BETAS, eps=ADAM_EPSILON)
