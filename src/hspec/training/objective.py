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
class Candidates:
    """Of every supervised slot, detached."""

    ids: Tensor
    """Draft ids with the highest logits, the best first; the target's argmax replaces the last where it is missing, ``[R, C]``."""
    p: Tensor
    """The target's probabilities there, ``[R, C]``."""
    label: Tensor
    """Which of them is the target's argmax, ``[R]``; -1 where that is not in the draft vocabulary."""


@dataclass(frozen=True)
class SlotStatistics:
    """Of every supervised slot, detached, ``[R]`` each."""

    loss: Tensor
    acceptance: Tensor
    """sum min(p, q): the probability that a draft sampled from q is accepted."""
    agreement: Tensor
    """Whether the drafter's argmax is the target's argmax over the full vocabulary."""
    candidates: Candidates | None = None
    """The best draft ids of every slot, where they were asked for."""
    token_ratio: Tensor | None = None
    """min(1, q / p) at the text's own token, where it was asked for; 0 where that is not in the draft vocabulary."""


@dataclass(frozen=True)
class Extras:
    """What else is to be found out while logits exist."""

    candidates: int = 0
    """How many of the best draft ids."""
    tokens: Tensor | None = None
    """The text's own tokens ``[R]`` (target ids), to learn how likely they are to be accepted."""


NOTHING_ELSE = Extras()


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
        extras: Extras,
    ) -> tuple[Tensor, ...]:
        R = hidden.shape[0]
        need = hidden.requires_grad
        d_hidden = torch.zeros_like(hidden) if need else None
        d_markov = torch.zeros_like(markov) if need and markov is not None else None
        d_w2 = torch.zeros_like(w2, dtype=torch.float32) if need and w2 is not None else None
        loss, acceptance = hidden.new_zeros(R, dtype=torch.float32), hidden.new_zeros(R, dtype=torch.float32)
        agreement = torch.zeros(R, dtype=torch.bool, device=hidden.device)
        best = torch.zeros(R, extras.candidates, dtype=torch.int64, device=hidden.device)
        best_p, best_label = torch.zeros_like(best, dtype=torch.float32), torch.full_like(agreement, -1, dtype=torch.int64)
        ratio = torch.zeros(0 if extras.tokens is None else R, device=hidden.device)
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
            if extras.candidates:
                best[part], best_p[part], best_label[part] = _candidates(q, p, label_draft, has_label.bool(), extras.candidates)
            if extras.tokens is not None:
                token, known = _draft_labels(extras.tokens[part], target.draft_ids)
                at = [t.gather(-1, token[:, None]).squeeze(-1) for t in (q, p)]
                ratio[part] = (at[0] / at[1].clamp_min(1e-30)).clamp_max(1.0) * known
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
        found = (loss, acceptance, agreement, best, best_p, best_label, ratio)
        ctx.mark_non_differentiable(*found)
        return total, *found

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> Any:  # type: ignore[override]
        d_hidden, d_markov, d_w2 = (None if g is None else g * grad.to(g.dtype) for g in ctx.gradients)
        return d_hidden, d_markov, d_w2, None, None, None, None, None, None, None


def _draft_labels(label: Tensor, draft_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Target ids -> draft ids, and 1.0 where the id is in the draft vocabulary."""
    index = torch.searchsorted(draft_ids, label).clamp_max(draft_ids.shape[0] - 1)
    return index, (draft_ids[index] == label).float()


def _candidates(q: Tensor, p: Tensor, label: Tensor, has_label: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`Candidates`; for the slots of a chunk."""
    ids = q.topk(count, dim=-1).indices
    missing = has_label & ~(ids == label[:, None]).any(-1)
    ids[:, -1] = torch.where(missing, label, ids[:, -1])
    place = (ids == label[:, None]).int().argmax(-1)
    return ids, p.gather(-1, ids), torch.where(has_label, place, -1)


def candidate_objective(
    scores: Tensor, found: Candidates, slot_weight: Tensor, weights: LossWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """The same terms for a q that is over a few candidates only, ``scores`` ``[R, C]`` their logits.

    Returns:
        The weighted sum of the losses, and of every slot the acceptance and whether the likeliest candidate is the label, ``[R]``.
    """
    log_q = scores.float().log_softmax(-1)
    q, has_label = log_q.exp(), found.label >= 0
    accept = torch.minimum(q, found.p).sum(-1)
    ce = -log_q.gather(-1, found.label.clamp_min(0)[:, None]).squeeze(-1) * has_label
    kl = -(found.p * log_q).sum(-1)
    loss = weights.ce * ce + weights.kl * kl + weights.tv * (1 - accept)
    return (loss * slot_weight).sum(), accept.detach(), (q.argmax(-1) == found.label)


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
    extras: Extras = NOTHING_ELSE,
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
    total, loss, acceptance, agreement, *found, ratio = _BlockObjective.apply(
        hidden, markov, w2, head, rows, slot_weight, target, weights, chunk, extras
    )
    candidates = Candidates(*found) if extras.candidates else None
    return total, SlotStatistics(loss, acceptance, agreement, candidates, ratio if extras.tokens is not None else None)


def slot_decay(k: int, gamma: float = 4.0) -> Tensor:
    """Weights exp(-(j - 1) / gamma) of the slots j = 1..k."""
    return torch.exp(-torch.arange(k, dtype=torch.float32) / gamma)
