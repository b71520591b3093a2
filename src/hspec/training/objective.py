"""The objective of a block: CE, KL, TV and LK-hybrid against the target, over the draft vocabulary, in bounded memory.

Logits over the vocabulary exist for a few positions at a time only. Because the gradient of every term with respect to the
logits is known in closed form, forward computes it chunk by chunk and keeps just the gradients of its small inputs.

With q = softmax(z) over the draft vocabulary, p the target's probabilities there (of its full distribution, not
renormalised), P = sum p and a = sum min(p, q), a slot's terms and their gradients with respect to z are

    CE, label y:   -log q_y                           q - 1[y]
    KL:            sum p log(p / q) - P log P         P q - p
    TV:            1 - a                              q (sum over q<=p of q) - q 1[q <= p]
    LK-hybrid:     l KL + (1 - l) TV                  the same mix; l = exp(-eta a) is held fixed

KL is P KL(p / P || q): what a drafter confined to its vocabulary can still win, never negative. 1 - TV is the chance that a draft
sampled from q is accepted (Leviathan et al., arXiv 2211.17192). LK-hybrid: Samarin et al., arXiv 2602.23881. See docs/objective.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from hspec.training.target_rows import Distributions, TargetRows, argmax_of_rows


@dataclass(frozen=True)
class LossWeights:
    """Of the terms; the paper's recipe is 0.1 CE + 0.9 TV after a warm-up that starts from KL."""

    ce: float = 0.1
    kl: float = 0.0
    tv: float = 0.9
    lk: float = 0.0
    lk_eta: float = 3.0
    """How soon LK-hybrid turns from KL to TV as the acceptance rises."""

    def of_divergences(self, acceptance: Tensor) -> tuple[Tensor, Tensor]:
        """What KL and TV weigh at slots of this acceptance ``[R]``, LK-hybrid's shares included: ``[R]`` each."""
        share = torch.exp(-self.lk_eta * acceptance.detach())
        return self.kl + self.lk * share, self.tv + self.lk * (1 - share)


@dataclass(frozen=True)
class Candidates:
    """Of every supervised slot, detached."""

    ids: Tensor
    """Draft ids, ``[R, C + 1]``. The first C are learnt from: those with the highest logits, the best first, but CE's label in the
    C-th place where it would be missing. In the last column is the C-th best, so that it is known what would be drafted."""
    p: Tensor
    """The target's probabilities there, ``[R, C + 1]``."""
    label: Tensor
    """Which of the first C is CE's label, ``[R]``; -1 where that is not in the draft vocabulary."""
    argmax: Tensor
    """The target's argmax, as a draft id, ``[R]``; -1 where it is not in the draft vocabulary."""
    token: Tensor
    """The text's own token, likewise; -1 also where the text was not given."""

    @staticmethod
    def drafted(columns: Tensor) -> Tensor:
        """Of ``[R, C + 1]`` those of the candidates that a drafter has, which knows no label: ``[R, C]``."""
        return torch.cat((columns[:, :-2], columns[:, -1:]), dim=1)


@dataclass(frozen=True)
class SlotStatistics:
    """Of every supervised slot, detached, ``[R]`` each."""

    loss: Tensor
    """The terms, weighted."""
    ce: Tensor
    """0 where the label is not in the draft vocabulary."""
    kl: Tensor
    acceptance: Tensor
    """sum min(p, q) = 1 - TV: the probability that a draft sampled from q is accepted."""
    agreement: Tensor
    """Whether the drafter's argmax is the target's argmax over the full vocabulary."""
    token_ratio: Tensor
    """min(1, q / p) at the text's own token: how likely it is to be accepted as a draft; 0 where it is not in the draft
    vocabulary, and everywhere if the text was not given."""
    candidates: Candidates | None = None
    """The best draft ids of every slot, where they were asked for."""


@dataclass(frozen=True)
class Extras:
    """What else is known, or to be found out, while logits exist."""

    candidates: int = 0
    """How many of the best draft ids."""
    tokens: Tensor | None = None
    """The text's own tokens ``[R]`` (target ids), to learn how likely they are to be accepted."""
    labels: Tensor | None = None
    """What CE is told, ``[R]`` target ids; None: the target's argmax. A slot whose label is outside the draft vocabulary has no CE."""


NOTHING_ELSE = Extras()


@dataclass(frozen=True)
class _Chunk:
    """n slots while their logits exist."""

    p: Tensor
    """``[n, draft vocabulary]``."""
    q: Tensor
    """``[n, draft vocabulary]``."""
    common: Tensor
    """min(p, q)."""
    mass: Tensor
    """sum p, ``[n]``."""
    label: Tensor
    """CE's, as a draft id, -1 where it has none, ``[n]``."""
    argmax: Tensor
    """The target's argmax, likewise."""
    ce: Tensor
    """``[n]``."""
    kl: Tensor
    """``[n]``."""
    acceptance: Tensor
    """``[n]``."""

    @staticmethod
    def of(log_q: Tensor, target: Distributions, rows: Tensor, labels: Tensor | None, draft_ids: Tensor) -> _Chunk:
        """Of log-probabilities ``[n, draft vocabulary]``, which are used up, the slots' rows in ``target`` ``[n]`` and CE's labels
        ``[n]``."""
        p, mass = target.p.index_select(0, rows), target.mass[rows]
        kl = target.log_mean[rows] - torch.linalg.vecdot(p, log_q) - torch.special.xlogy(mass, mass)
        argmax = _draft_labels(target.argmax[rows], draft_ids)
        label = argmax if labels is None else _draft_labels(labels, draft_ids)
        ce = -log_q.gather(-1, label.clamp_min(0)[:, None]).squeeze(-1) * (label >= 0)
        q = log_q.exp_()
        common = torch.minimum(p, q)
        return _Chunk(p, q, common, mass, label, argmax, ce, kl.clamp_min(0.0), common.sum(-1))

    def loss(self, weights: LossWeights) -> Tensor:
        """``[n]``."""
        kl, tv = weights.of_divergences(self.acceptance)
        return weights.ce * self.ce + kl * self.kl + tv * (1 - self.acceptance)

    def gradient(self, weights: LossWeights, slot_weight: Tensor) -> Tensor:
        """Of the weighted losses with respect to the draft logits, ``[n, draft vocabulary]``; p, q and common are used up.

        Row by row it is q times a number, a smaller one where q < p, less KL's p: everything in place, since what costs here is memory.
        """
        kl, tv = (w * slot_weight for w in weights.of_divergences(self.acceptance))
        ce = weights.ce * slot_weight * (self.label >= 0)
        pull = ce + kl * self.mass
        if weights.tv or weights.lk:
            below = self.common.sub_(self.q).sign_().add_(1)  # 0 where p < q, else 1
            pull = pull + tv * torch.linalg.vecdot(self.q, below)
            d = below.mul_(-tv[:, None]).add_(pull[:, None]).mul_(self.q)
        else:
            d = self.q.mul_(pull[:, None])
        if weights.kl or weights.lk:
            d.addcmul_(self.p, kl[:, None], value=-1)
        return d.scatter_add_(1, self.label.clamp_min(0)[:, None], -ce[:, None])

    def candidates(self, count: int, token: Tensor) -> Candidates:
        """``token``: the text's own, as a draft id or -1, ``[n]``."""
        best = self.q.topk(count, dim=-1).indices
        missing = (self.label >= 0) & ~(best == self.label[:, None]).any(-1)
        ids = torch.cat((best, best[:, -1:]), dim=1)
        ids[:, -2] = torch.where(missing, self.label, best[:, -1])
        return Candidates(ids, self.p.gather(-1, ids), _place(ids[:, :-1], self.label), self.argmax, token)


def _draft_labels(label: Tensor, draft_ids: Tensor) -> Tensor:
    """Target ids -> draft ids, -1 where the id is not in the draft vocabulary."""
    index = torch.searchsorted(draft_ids, label).clamp_max(draft_ids.shape[0] - 1)
    return torch.where(draft_ids[index] == label, index, -1)


def _place(ids: Tensor, wanted: Tensor) -> Tensor:
    """Where in each row of ``[n, C]`` the id ``[n]`` stands; -1 where it does not."""
    found = ids == wanted[:, None]
    return torch.where(found.any(-1), found.int().argmax(-1), -1)


def _ratio(q: Tensor, p: Tensor, at: Tensor) -> Tensor:
    """min(1, q / p) at one place of each row of ``[n, V]``; 0 where the place is -1."""
    q, p = (t.gather(-1, at.clamp_min(0)[:, None]).squeeze(-1) for t in (q, p))
    return (q / p.clamp_min(1e-30)).clamp_max(1.0) * (at >= 0)


def _empty_statistics(slots: int, candidates: int, device: torch.device) -> SlotStatistics:
    numbers = [torch.zeros(slots, device=device) for _ in range(5)]
    loss, ce, kl, acceptance, ratio = numbers
    agreement = torch.zeros(slots, dtype=torch.bool, device=device)
    found = None
    if candidates:
        ids = torch.zeros(slots, candidates + 1, dtype=torch.int64, device=device)
        found = Candidates(ids, torch.zeros_like(ids, dtype=torch.float32), *(ids.new_zeros(slots) for _ in range(3)))
    return SlotStatistics(loss, ce, kl, acceptance, agreement, ratio, found)


def _note(stats: SlotStatistics, part: Tensor, chunk: _Chunk, weights: LossWeights, extras: Extras, draft_ids: Tensor) -> None:
    """Write what is found out about a chunk where its slots have their place."""
    stats.loss[part], stats.ce[part], stats.kl[part] = chunk.loss(weights), chunk.ce, chunk.kl
    stats.acceptance[part] = chunk.acceptance
    stats.agreement[part] = argmax_of_rows(chunk.q) == chunk.argmax
    token = torch.full_like(part, -1) if extras.tokens is None else _draft_labels(extras.tokens[part], draft_ids)
    stats.token_ratio[part] = _ratio(chunk.q, chunk.p, token)
    if stats.candidates is not None:
        found = chunk.candidates(extras.candidates, token)
        for field in fields(Candidates):
            getattr(stats.candidates, field.name)[part] = getattr(found, field.name)


class _Inputs:
    """What draft logits are made of, ``hidden @ head.T + markov @ w2.T``, and the gradients that come back to it."""

    def __init__(self, hidden: Tensor, markov: Tensor | None, w2: Tensor | None, head: Tensor):
        self.hidden, self.head = hidden, head
        self.markov, self.w2 = None if w2 is None else markov, None if w2 is None else w2.to(hidden.dtype)
        self.d_hidden = torch.zeros_like(hidden)
        self.d_markov = None if self.markov is None else torch.zeros_like(self.markov)
        self.d_w2 = None if self.w2 is None else torch.zeros_like(self.w2, dtype=torch.float32)

    def logits(self, part: Tensor) -> Tensor:
        """Of some slots ``[n]``: ``[n, draft vocabulary]``."""
        logits = self.hidden[part] @ self.head.T
        if self.markov is not None and self.w2 is not None:
            logits += self.markov[part] @ self.w2.T
        return logits

    def take(self, part: Tensor, d: Tensor) -> None:
        """Gradients ``d`` with respect to the logits of some slots."""
        self.d_hidden[part] = d @ self.head
        if self.markov is not None and self.w2 is not None and self.d_markov is not None and self.d_w2 is not None:
            self.d_markov[part] = d @ self.w2
            self.d_w2 += (d.T @ self.markov[part]).float()


class _BlockObjective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, markov: Tensor | None, w2: Tensor | None, head: Tensor, rows: Tensor, slot_weight: Tensor,
        target: TargetRows, weights: LossWeights, chunk: int, extras: Extras, stats: SlotStatistics,
    ) -> Tensor:  # fmt: skip
        inputs = _Inputs(hidden, markov, w2, head)
        order = torch.argsort(rows, stable=True)
        positions, counts = torch.unique_consecutive(rows[order], return_counts=True)
        # Slots that need the same row of the target come together, so that it is computed once.
        for some, slots in zip(positions.split(chunk), order.split([int(n.sum()) for n in counts.split(chunk)]), strict=True):
            distributions = target.at(some)
            for part in slots.split(chunk):
                log_q = inputs.logits(part).float().log_softmax(-1)
                labels = None if extras.labels is None else extras.labels[part]
                found = _Chunk.of(log_q, distributions, torch.searchsorted(some, rows[part]), labels, target.draft_ids)
                _note(stats, part, found, weights, extras, target.draft_ids)
                if hidden.requires_grad:
                    inputs.take(part, found.gradient(weights, slot_weight[part]).to(hidden.dtype))
                del found, log_q  # before the next chunk's logits come
            del distributions
        d_w2 = None if inputs.d_w2 is None or w2 is None else inputs.d_w2.to(w2.dtype)
        ctx.gradients = (inputs.d_hidden, inputs.d_markov, d_w2)
        return (stats.loss * slot_weight).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        d_hidden, d_markov, d_w2 = (None if g is None else g * grad.to(g.dtype) for g in ctx.gradients)
        return d_hidden, d_markov, d_w2, None, None, None, None, None, None, None, None


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
        slot_weight: ``[R]`` fp32.
        chunk: slots whose logits exist at once; see :func:`chunk_bytes`.
    """
    stats = _empty_statistics(hidden.shape[0], extras.candidates, hidden.device)
    total = _BlockObjective.apply(hidden, markov, w2, head, rows, slot_weight, target, weights, chunk, extras, stats)
    return total, stats


def chunk_bytes(chunk: int, vocabulary: int, draft_vocabulary: int) -> int:
    """Peak memory of the objective beside its inputs, their gradients and the statistics: in proportion to the chunk, whatever the
    number of slots. For each slot of a chunk there are at most two fp32 rows of the target's vocabulary, or one and two of the draft
    vocabulary, and later five of that. Tests measure it."""
    return chunk * max(2 * vocabulary, vocabulary + 2 * draft_vocabulary, 5 * draft_vocabulary) * 4


def candidate_objective(
    scores: Tensor, found: Candidates, slot_weight: Tensor, weights: LossWeights
) -> tuple[Tensor, SlotStatistics]:
    """The same terms for a q that is over a few candidates only, ``scores`` ``[R, C + 1]`` their logits.

    Returns:
        The weighted sum of the losses, over the candidates that are learnt from; and the slots' statistics, of which acceptance, agreement
        and the token's ratio are of those that would be drafted: with the label put among them they would be too good.
    """
    log_q, p = scores[:, :-1].float().log_softmax(-1), found.p[:, :-1]
    q, mass = log_q.exp(), p.sum(-1)
    acceptance = torch.minimum(q, p).sum(-1)
    ce = -log_q.gather(-1, found.label.clamp_min(0)[:, None]).squeeze(-1) * (found.label >= 0)
    kl = (torch.special.xlogy(p, p) - p * log_q).sum(-1) - torch.special.xlogy(mass, mass)
    kl_weight, tv_weight = weights.of_divergences(acceptance)
    loss = weights.ce * ce + kl_weight * kl + tv_weight * (1 - acceptance)
    ids, p, q = found.drafted(found.ids), found.drafted(found.p), found.drafted(scores.detach().float()).softmax(-1)
    agreement = ids.gather(-1, q.argmax(-1, keepdim=True)).squeeze(-1) == found.argmax
    stats = SlotStatistics(
        loss.detach(), ce.detach(), kl.detach(), torch.minimum(q, p).sum(-1), agreement, _ratio(q, p, _place(ids, found.token)),
        found,
    )  # fmt: skip
    return (loss * slot_weight).sum(), stats


def slot_decay(k: int, gamma: float = 4.0) -> Tensor:
    """Weights exp(-(j - 1) / gamma) of the slots j = 1..k."""
    return torch.exp(-torch.arange(k, dtype=torch.float32) / gamma)


def dpace_weights(acceptance: Tensor, alpha: float) -> Tensor:
    """D-PACE: how much each slot of a block adds to the expected accepted length, given how far its drafter is.

    With s_i = (1 - alpha) a_i + alpha, w_j = sum over m >= j of prod_{i <= m} s_i: that is d/d(log s_j) of sum_m prod_{i <= m} s_i, the
    expected number of accepted drafts (Wu et al., arXiv 2605.18810, eq. 7 and 8). They take a_i = q(label), the acceptance
    if the target were sure; a_i here is sum min(p, q), which is the same thing where it is sure.

    Args:
        acceptance: ``[M, k]``; negative at slots that do not count, which must be the last of their block.

    Returns:
        ``[M, k]``, falling along the block, 0 at slots that do not count.
    """
    smooth = ((1 - alpha) * acceptance + alpha).masked_fill(acceptance < 0, 0.0)
    return smooth.cumprod(-1).flip(-1).cumsum(-1).flip(-1)
