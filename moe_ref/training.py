"""A plain training run: the state between optimizer steps, and one step.

The same seeds, tokens and threads give the same run, bit for bit, on the same machine; on CUDA
only under ``torch.use_deterministic_algorithms``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_ref.errors import MoeRefError
from moe_ref.model import ModelOutput, ReferenceModel
from moe_ref.recipe import WarmupStableDecay, adamw
from moe_ref.routing import Routing, wide_dtype
from moe_ref.statistics import RoutingStatistics, mean_statistics, routing_statistics

__all__ = ["Run", "StepReport", "TokenWindows", "gradient_norm", "train"]


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step was.

    Attributes
    ----------
    step : int
        Counted from 0.
    learning_rate : float
        Of the step [-].
    loss : float
        Cross-entropy before the step, the mean over its tokens [nat].
    router_losses : dict of str to float
        What the routers added to the objective, each kind summed over layers.
    gradient_norm : float
        Of all gradients together; nothing is clipped.
    balance : RoutingStatistics or None
        Mean over the sparse layers; None for a dense model.
    """

    step: int
    learning_rate: float
    loss: float
    router_losses: dict[str, float]
    gradient_norm: float
    balance: RoutingStatistics | None


class Run:
    """A model in training, between two optimizer steps.

    Parameters
    ----------
    model : ReferenceModel
        Trained in place, on the device where it is.
    schedule : WarmupStableDecay
        Learning rate of each step.
    accumulate : int
        Microbatches of a step; it divides the sequences of a batch. Bias controllers act once a
        step, on the tokens of all microbatches.
    precision : torch.dtype, optional
        Of the matrix products, by autocast, such as ``torch.bfloat16`` with float32 weights (the
        master copy of A.1); without it that of the weights.
    seed : int
        Of the routers' noise.

    Attributes
    ----------
    step : int
        Optimizer steps made.
    """

    def __init__(
        self,
        model: ReferenceModel,
        schedule: WarmupStableDecay,
        *,
        accumulate: int = 1,
        precision: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        if accumulate < 1:
            raise MoeRefError(f"accumulate={accumulate} must be at least 1; nearest: 1.")
        self.model, self.schedule = model, schedule
        self.accumulate, self.precision, self.seed = accumulate, precision, seed
        self.device = next(model.parameters()).device
        self.generator = torch.Generator(self.device).manual_seed(seed)
        self.optimizer = adamw(model)
        self.step = 0

    def advance(self, tokens_BS: Tensor) -> StepReport:
        """Make one optimizer step on a batch.

        Parameters
        ----------
        tokens_BS : Tensor of int64
            Sequences one token longer than those trained on: each token but the first is a target.

        Raises
        ------
        MoeRefError
            Sequences that the microbatches do not divide, or a run that has ended.
        """
        if len(tokens_BS) % self.accumulate:
            raise MoeRefError(
                f"accumulate={self.accumulate} must divide the {len(tokens_BS)} sequences of a "
                "batch."
            )
        rate = self.schedule.rate(self.step)
        self.model.train()
        self.optimizer.zero_grad()
        outputs = [self._backward(tokens_bS) for tokens_bS in tokens_BS.chunk(self.accumulate)]
        norm = self._finish_gradients()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        balance = self._balance([routings for _, _, routings in outputs])
        self.model.after_step()
        self.step += 1
        names = outputs[0][1]
        return StepReport(
            step=self.step - 1,
            learning_rate=rate,
            loss=sum(float(loss) for loss, _, _ in outputs) / self.accumulate,
            router_losses={
                name: sum(float(added[name]) for _, added, _ in outputs) / self.accumulate
                for name in names
            },
            gradient_norm=norm,
            balance=balance,
        )

    def _backward(self, tokens_BS: Tensor) -> tuple[Tensor, dict[str, Tensor], list[Routing]]:
        """Add a microbatch's part to the gradients; return its losses and its routings."""
        tokens_BS = tokens_BS.to(self.device)
        with self._autocast():
            output: ModelOutput = self.model(tokens_BS[:, :-1], self.generator)
        loss, added = output.cross_entropy(tokens_BS[:, 1:]), output.router_losses()
        (sum(added.values(), start=loss) / self.accumulate).backward()
        detached = {name: value.detach() for name, value in added.items()}
        return loss.detach(), detached, [_without_graph(routing) for routing in output.routings]

    def _finish_gradients(self) -> float:
        """Make the gradients those of the whole batch, which they are here; return their norm."""
        return gradient_norm(self.model.parameters())

    def _autocast(self) -> AbstractContextManager[None]:
        if self.precision is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.precision)

    def _balance(self, microbatches: list[list[Routing]]) -> RoutingStatistics | None:
        """Return the mean over layers of the balance of the step, before the biases move."""
        layers = [
            routing_statistics(routings, router)
            for router, *routings in zip(self.model.routers(), *microbatches, strict=True)
        ]
        return mean_statistics(layers) if layers else None


def train(
    run: Run,
    batches: Callable[[int], Tensor],
    *,
    until: int | None = None,
    on_step: Callable[[StepReport], None] | None = None,
) -> list[StepReport]:
    """Make the steps of a run that are left, and return their reports.

    Parameters
    ----------
    run : Run
        Where to begin.
    batches : callable
        The batch of a step, as `Run.advance` takes it: a function of the step alone, so that a
        resumed run reads what it would have read.
    until : int, optional
        Steps made in the end; all of the schedule unless given.
    on_step : callable, optional
        Called with the report of every step.
    """
    reports = []
    while run.step < (run.schedule.steps if until is None else until):
        reports.append(run.advance(batches(run.step)))
        if on_step is not None:
            on_step(reports[-1])
    return reports


class TokenWindows:
    """Batches of one pass over a text: every window once, in a seeded order.

    Windows of ``seq_len + 1`` tokens overlap in one token, so that each token but the first of
    the text is a target once.

    Parameters
    ----------
    tokens_N : Tensor of int64
        The text.
    sequences, seq_len : int
        Sequences of a batch, tokens of a sequence.
    seed : int
        Of the order.
    """

    def __init__(self, tokens_N: Tensor, sequences: int, seq_len: int, seed: int = 0) -> None:
        self.tokens_N, self.sequences, self.seq_len = tokens_N, sequences, seq_len
        windows = (len(tokens_N) - 1) // seq_len
        generator = torch.Generator().manual_seed(seed)
        self.order = torch.randperm(max(windows, 0), generator=generator)
        self.steps = len(self.order) // sequences

    def __call__(self, step: int) -> Tensor:
        """Return the batch of a step, shape (sequences, seq_len + 1).

        Raises
        ------
        MoeRefError
            A step that the text has no tokens for.
        """
        if not 0 <= step < self.steps:
            raise MoeRefError(
                f"step={step} must be below {self.steps}: {len(self.tokens_N)} tokens give no more "
                f"batches of {self.sequences} sequences of {self.seq_len}."
            )
        window_B = self.order[step * self.sequences : (step + 1) * self.sequences]
        return self.tokens_N[window_B[:, None] * self.seq_len + torch.arange(self.seq_len + 1)]


def gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Return the norm of the gradients of parameters together; 0 where none has one."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return 0.0
    return float(torch.stack([g.to(wide_dtype(g)).norm() for g in gradients]).norm())


def _without_graph(routing: Routing) -> Routing:
    """Return the counts of a routing, which keep no activations alive."""
    return Routing(routing.experts_TK, routing.gates_TK.detach(), routing.kept_TK, routing.counts_E)
