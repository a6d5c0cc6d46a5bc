"""Data and expert parallelism over several processes, without overlap.

Each rank trains on sequences of its own. One all-reduce a step sums the gradients of what every
rank holds, in one flat buffer, as Megatron-LM does. Under expert parallelism a rank holds
``E / n`` experts of each layer, and two all-to-all exchanges a layer, and two more in its backward
pass, bring each pair of a token and an expert to the rank of the expert and back: K copies of a
token. Nothing is exchanged while something is computed, so a step is the sum of its parts.

Shape suffixes: `moe_ref.routing`; R is the rows that a rank receives, N the ``n`` ranks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from moe_ref.errors import MoeRefError
from moe_ref.experts import Experts, apply_segments, apply_sorted, as_products_take
from moe_ref.layer import MoELayer
from moe_ref.model import ReferenceModel
from moe_ref.recipe import WarmupStableDecay
from moe_ref.routing import Routing
from moe_ref.training import Run, gradient_norm

__all__ = ["ParallelExperts", "ParallelRun"]


class ParallelExperts(Experts):
    """Experts ``rank * E / n`` to ``(rank + 1) * E / n - 1`` of a layer; other ranks have the rest.

    It is called as `Experts` is, by all ranks of the group at once, and gives the same numbers for
    the tokens of this rank. Rows are sorted by expert, whatever way the full experts had. Under
    autocast they travel in its precision.

    Parameters
    ----------
    experts : Experts
        All experts of the layer, equal on all ranks; this rank's are copied.
    group : torch.distributed.ProcessGroup, optional
        Ranks that share the experts; all unless given.

    Attributes
    ----------
    gate_EDF, up_EDF, down_EFD : Parameter
        The three matrices of each expert of this rank, of ``E / n`` experts.
    n_experts : int
        E, of all ranks.

    Raises
    ------
    MoeRefError
        A number of experts that the ranks do not divide.
    """

    def __init__(self, experts: Experts, group: dist.ProcessGroup | None = None) -> None:
        nn.Module.__init__(self)
        self.group, self.ranks = group, dist.get_world_size(group)
        self.n_experts = len(experts.gate_EDF)
        if self.n_experts % self.ranks:
            nearest = max(1, round(self.n_experts / self.ranks)) * self.ranks
            raise MoeRefError(
                f"n_experts={self.n_experts} must be a multiple of the {self.ranks} ranks that "
                f"share the experts; nearest: {nearest}."
            )
        rank = dist.get_rank(group)
        self.gate_EDF, self.up_EDF, self.down_EFD = (
            nn.Parameter(weight.detach().chunk(self.ranks)[rank].clone())
            for weight in (experts.gate_EDF, experts.up_EDF, experts.down_EFD)
        )
        self.grouped = True

    def forward(self, x_TD: Tensor, routing: Routing) -> Tensor:
        """Return the sum of each token's experts, weighted by its gates, shape (T, D)."""
        return apply_sorted(self._there_and_back, x_TD, routing, self.n_experts)

    def _there_and_back(self, x_PD: Tensor, counts_E: Tensor) -> Tensor:
        """Return what the experts of all ranks make of rows that are sorted by expert."""
        sent_NE = counts_E.view(self.ranks, -1)
        received_NE = torch.empty_like(sent_NE)
        dist.all_to_all_single(received_NE, sent_NE, group=self.group)
        sent, received = sent_NE.sum(dim=1).tolist(), received_NE.sum(dim=1).tolist()
        x_RD = _Exchange.apply(as_products_take(x_PD), sent, received, self.group)
        # received by rank, and of each rank by expert: now by expert, and of each by rank
        expert_NE = torch.arange(sent_NE.shape[1], device=x_RD.device).expand_as(received_NE)
        expert_R = expert_NE.flatten().repeat_interleave(received_NE.flatten())
        order_R = expert_R.argsort(stable=True)
        y_RD = apply_segments(self, x_RD.index_select(0, order_R), received_NE.sum(dim=0))
        return _Exchange.apply(y_RD.index_select(0, order_R.argsort()), received, sent, self.group)


class _Exchange(torch.autograd.Function):
    """Rows to the ranks where they belong; in the backward pass, their gradients back."""

    @staticmethod
    def forward(ctx: Any, x_PD: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.back = received, sent, group
        return _exchanged(x_PD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, slope_RD: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchanged(slope_RD, *ctx.back), None, None, None


def _exchanged(x_PD: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
    """Send as many rows to each rank as said, and return those received, by rank."""
    out_RD = x_PD.new_empty(sum(received), x_PD.shape[1])
    dist.all_to_all_single(out_RD, x_PD.contiguous(), received, sent, group=group)
    return out_RD


class ParallelRun(Run):
    """A model in training on several ranks, of which this is one.

    All ranks make the model of the same seed, and `advance` with sequences of their own: as many
    and as long on each. A step is that of one process on the sequences of all, where router losses
    are means over tokens or sequences; capacities and the losses that are products of means are of
    the tokens of a rank. Counts of tokens, in the buffers ``seen_E`` of routers, are summed over
    ranks, so that biases stay equal.

    Of a `StepReport`, ``gradient_norm`` is that of the whole batch, experts of all ranks included;
    loss, router losses and balance are of the sequences of this rank. A checkpoint holds the
    experts of its rank.

    Parameters
    ----------
    model : ReferenceModel
        Trained in place. Under expert parallelism it keeps this rank's experts only.
    schedule : WarmupStableDecay
        Learning rate of each step.
    expert_parallel : bool
        Share the experts of each layer among the ranks; else every rank holds all.
    group : torch.distributed.ProcessGroup, optional
        The ranks; all unless given.
    accumulate, precision : int, torch.dtype
        See `Run`; the gradients of all microbatches are exchanged at once.
    seed : int
        Of the routers' noise, which differs between ranks.

    Raises
    ------
    MoeRefError
        A number of experts that the ranks do not divide.
    """

    def __init__(
        self,
        model: ReferenceModel,
        schedule: WarmupStableDecay,
        *,
        expert_parallel: bool,
        group: dist.ProcessGroup | None = None,
        accumulate: int = 1,
        precision: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.group, self.ranks = group, dist.get_world_size(group)
        if expert_parallel:
            _share_experts(model, group)
        super().__init__(model, schedule, accumulate=accumulate, precision=precision, seed=seed)
        self.generator.manual_seed(seed * self.ranks + dist.get_rank(group))
        shared = [part for part in model.modules() if isinstance(part, ParallelExperts)]
        self.own = [parameter for part in shared for parameter in part.parameters()]
        apart = set(map(id, self.own))
        self.replicated = [p for p in model.parameters() if id(p) not in apart]
        # the gradients, and the squared norm of those of this rank's experts
        sizes = [*(parameter.numel() for parameter in self.replicated), 1]
        double = any(parameter.dtype == torch.float64 for parameter in self.replicated)
        dtype = torch.float64 if double else torch.float32
        self.buffer = torch.zeros(sum(sizes), dtype=dtype, device=self.device)
        *slots, self.own_squared = self.buffer.split(sizes)
        self.slots = [slot.view_as(p) for slot, p in zip(slots, self.replicated, strict=True)]

    def _finish_gradients(self) -> float:
        """Make the gradients the mean over ranks, and counts of tokens the sum."""
        for parameter in self.own:
            if parameter.grad is not None:
                parameter.grad /= self.ranks
        self.own_squared.fill_(gradient_norm(self.own) ** 2)
        for parameter, slot in zip(self.replicated, self.slots, strict=True):
            if parameter.grad is None:
                slot.zero_()
            else:
                slot.copy_(parameter.grad)
        dist.all_reduce(self.buffer, group=self.group)
        for parameter, slot in zip(self.replicated, self.slots, strict=True):
            if parameter.grad is not None:
                slot /= self.ranks
                parameter.grad = slot.to(parameter.dtype)
        self._sum_counts()
        return math.hypot(gradient_norm(self.replicated), math.sqrt(float(self.own_squared)))

    def _sum_counts(self) -> None:
        """Sum over ranks what routers counted."""
        counts = [
            buffer
            for router in self.model.routers()
            for name, buffer in router.named_buffers()
            if name == "seen_E"
        ]
        if counts:
            seen_LE = torch.stack(counts)
            dist.all_reduce(seen_LE, group=self.group)
            for seen_E, summed_E in zip(counts, seen_LE, strict=True):
                seen_E.copy_(summed_E)


def _share_experts(model: ReferenceModel, group: dist.ProcessGroup | None) -> None:
    """Put this rank's part in the place of the experts of each layer."""
    for layer in model.modules():
        if isinstance(layer, MoELayer) and not isinstance(layer.experts, ParallelExperts):
            layer.experts = ParallelExperts(layer.experts, group)
