"""Parameters and FLOPs counted on a live model, to hold against `perfmodel.Architecture`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe_ref.experts import Experts
from moe_ref.model import ReferenceModel
from perfmodel import ParameterConvention

__all__ = ["count_matmul_flops", "count_parameters"]


def count_parameters(
    model: ReferenceModel,
    convention: ParameterConvention = ParameterConvention.WITHOUT_EMBEDDING_AND_HEAD,
    *,
    active: bool = False,
) -> int:
    """Return the parameters of a model [-].

    Parameters
    ----------
    model : ReferenceModel
        Whose tensors are counted.
    convention : ParameterConvention
        Which of embedding and head to include. A tied matrix is there once, as the head.
    active : bool
        Of the stacked experts count ``top_k``, which work on one token, in place of all.
    """
    embedding, head = model.embedding_VD, model.head_VD
    matrices = {id(embedding)} if head is None else {id(embedding), id(head)}
    count = sum(p.numel() for p in model.parameters() if id(p) not in matrices)
    if active:
        a = model.architecture
        stacked = [p for m in model.modules() if isinstance(m, Experts) for p in m.parameters()]
        count -= sum(p[0].numel() * (a.n_experts - a.top_k) for p in stacked)
    if convention == ParameterConvention.WITH_EMBEDDING:
        count += embedding.numel() + (0 if head is None else head.numel())
    elif convention == ParameterConvention.WITHOUT_EMBEDDING:
        count += embedding.numel() if head is None else head.numel()
    return count


def count_matmul_flops(model: ReferenceModel, tokens_BS: Tensor) -> int:
    """Return the FLOPs of the matrix products of one forward and backward pass [FLOP].

    torch's own count of what was executed: two a multiply-add, on the true sizes. Attention is
    counted whole, since its products are made whole and masked. The model is left as it was.

    Parameters
    ----------
    model : ReferenceModel
        Whose pass is counted, without noise, without recompute.
    tokens_BS : Tensor of int64
        Tokens; each is its own target.
    """
    training = model.training
    model.eval()
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        loss = model(tokens_BS).cross_entropy(tokens_BS)
        torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    model.train(training)
    return int(counter.get_total_flops())
