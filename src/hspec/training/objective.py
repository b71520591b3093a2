"""The objective of a block: CE, KL and TV against the target, over the draft vocabulary, in bounded memory.

Logits over the vocabulary exist for a few positions at a time only. Because the gradient of every term with respect to the
logits is known in closed form, forward computes it chunk by chunk and keeps just the gradients of its small inputs.

With q = softmax(z) over the draft vocabulary and p the target's probabilities there (of its full distribution, not
renormalised), the gradients with respect to z are

    CE, label y:              q - 1[y]
    KL, -sum p log q:         (sum p) q - p
    TV, 1 - sum min(p, q):    q (sum over q<p of q) - q 1[q < p]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LossWeights:
    """Of the terms; the paper's recipe is 0.1 CE + 0.9 TV after a warm-up that starts from KL."""

    ce: float = 0.1
    kl: float = 0.0
    tv: float = 0.9


@dataclass(frozen=True)
class SlotStatistics:
    """Of every supervised slot, detached, ``[R]`` each."""

    loss: Tensor
    acceptance: Tensor
    """sum min(p, q): the probability that a draft sampled from q is accepted."""
    agreement: Tensor
    """Whether the drafter's argmax is the target's argmax over the full vocabulary."""


@dataclass(frozen=True)
class TargetRows:
    """Where the target's distributions come from: hidden rows and the functions that turn them into probabilities."""

    hidden: Tensor
    """After the target's final norm, ``[P, hidden]``."""
    logits: Logits
    """``[n, hidden]`` -> ``[n, vocabulary]`` fp32."""
    draft_ids: Tensor
    """``[draft vocabulary]`` target ids."""


class _BlockObjective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        markov: Tensor | None,
        w2: Tensor | None,
        head: Tensor,
        rows: Tensor,
        slot_weight: Tensor,
        target: TargetRows,
        weights: LossWeights,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        R = hidden.shape[0]
        need = hidden.requires_grad
        d_hidden = torch.zeros_like(hidden) if need else None
        d_markov = torch.zeros_like(markov) if need and markov is not None else None
        d_w2 = torch.zeros_like(w2, dtype=torch.float32) if need and w2 is not None else None
        loss, acceptance = hidden.new_zeros(R, dtype=torch.float32), hidden.new_zeros(R, dtype=torch.float32)
        agreement = torch.zeros(R, dtype=torch.bool, device=hidden.device)
        order = torch.argsort(rows, stable=True)
        for part in order.split(chunk):
            positions, where = torch.unique_consecutive(rows[part], return_inverse=True)
            full = target.logits(target.hidden[positions])
            label = full.argmax(-1)
            p = torch.softmax(full, -1)[:, target.draft_ids][where]
            logits = hidden[part] @ head.T
            if markov is not None and w2 is not None:
                logits = logits + markov[part] @ w2.to(markov.dtype).T
            q = torch.softmax(logits.float(), dim=-1)
            small = torch.minimum(p, q)
            accept = small.sum(-1)
            label_draft, has_label = _draft_labels(label[where], target.draft_ids)
            log_q_label = q.gather(-1, label_draft[:, None]).squeeze(-1).clamp_min(1e-30).log()
            value = weights.tv * (1 - accept) - weights.ce * log_q_label * has_label
            if weights.kl:
                value = value - weights.kl * (p * q.clamp_min(1e-30).log()).sum(-1)
            loss[part], acceptance[part] = value, accept
            agreement[part] = (q.argmax(-1) == label_draft) & has_label.bool()
            if not need:
                continue
            d = q * (weights.ce * has_label + weights.kl * p.sum(-1))[:, None]
            if weights.kl:
                d.sub_(p, alpha=weights.kl)
            if weights.tv:
                below = q.masked_fill(q >= p, 0.0)
                d.add_(q * below.sum(-1, keepdim=True) - below, alpha=weights.tv)
            d.scatter_add_(1, label_draft[:, None], (-weights.ce * has_label)[:, None])
            d.mul_(slot_weight[part][:, None])
            d = d.to(hidden.dtype)
            assert d_hidden is not None
            d_hidden[part] = d @ head
            if markov is not None and w2 is not None and d_markov is not None and d_w2 is not None:
                d_markov[part] = (d @ w2.to(d.dtype)).to(d_markov.dtype)
                d_w2 += (d.T @ markov[part].to(d.dtype)).float()
        ctx.gradients = (d_hidden, d_markov, None if d_w2 is None or w2 is None else d_w2.to(w2.dtype))
        total = (loss * slot_weight).sum()
        ctx.mark_non_differentiable(loss, acceptance, agreement)
        return total, loss, acceptance, agreement

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # type: ignore[override]
        d_hidden, d_markov, d_w2 = (None if g is None else g * grad.to(g.dtype) for g in ctx.gradients)
        return d_hidden, d_markov, d_w2, None, None, None, None, None, None


def _draft_labels(label: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Target ids -> draft ids, and 1.0 where the id is in the draft vocabulary."""
    index = torch.searchsorted(draft_ids, label).clamp_max(draft_ids.shape[0] - 1)
    return index, (draft_ids[index] == label).float()


def block_objective(
    hidden: Tensor,
    markov: Tensor | None,
    w2: Tensor | None,
    head: Tensor,
    rows: Tensor,
    slot_weight: Tensor,
    target: TargetRows,
    weights: LossWeights,
    chunk: int = 128,
) -> tuple[Tensor, SlotStatistics]:
    """Weighted sum of the slots' losses, differentiable in ``hidden``, ``markov`` and ``w2``.

    Args:
        hidden: drafter's hidden states of R slots, ``[R, hidden]``.
        markov: Markov embeddings of the slots' true previous tokens, ``[R, rank]``, or None.
        w2: the Markov head's ``[draft vocabulary, rank]``, or None.
        head: frozen LM-head rows ``[draft vocabulary, hidden]``, in the dtype to multiply in.
        rows: for each slot, the row of ``target.hidden`` that predicts the same token, ``[R]`` int64.
        slot_weight: ``[R]`` fp32; already divided by the batch's total.
        chunk: slots whose logits exist at once. Peak extra memory is about
            ``chunk * (2 * vocabulary + 8 * draft vocabulary) * 4`` bytes.
    """
    total, loss, acceptance, agreement = _BlockObjective.apply(
        hidden, markov, w2, head, rows, slot_weight, target, weights, chunk
    )
    return total, SlotStatistics(loss, acceptance, agreement)


def slot_decay(k: int, gamma: float = 4.0) -> Tensor:
    """Weights exp(-(j - 1) / gamma) of the slots j = 1..k."""
    return torch.exp(-torch.arange(k, dtype=torch.float32) / gamma)
