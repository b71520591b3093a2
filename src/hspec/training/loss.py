"""The loss of a batch of blocks: the objective on every slot, and what a part of a drafter needs besides.

All methods share one recipe, CE and TV against the target. Only where a part cannot learn from that alone it has a term of its
own: Domino's base logits while its GRU is young, DFlash-2's selector over its candidates, DBLAST's latent, the confidence head.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec.drafters.drafter import Drafter, Prediction
from hspec.drafters.heads.causal import LowRankHead
from hspec.drafters.heads.gru import GruHead
from hspec.drafters.heads.latent import LatentHead
from hspec.drafters.heads.markov import MarkovHead
from hspec.drafters.heads.selector import PathSelector
from hspec.targets.target import Target
from hspec.training.blocks import BlockBatch
from hspec.training.config import TrainConfig
from hspec.training.objective import (
    NOTHING_ELSE,
    Extras,
    LossWeights,
    SlotStatistics,
    TargetRows,
    block_objective,
    candidate_objective,
    slot_decay,
)


@dataclass(frozen=True)
class _Slots:
    """The R supervised slots of a batch of M blocks."""

    index: Tensor
    """Their places in ``[M * k]``."""
    slot: Tensor
    """Which slot of its block each is, from 0, ``[R]``."""
    weight: Tensor
    """``[R]``, of sum 1."""
    rows: Tensor
    """See :class:`BlockBatch`; ``[R]``."""
    previous: Tensor
    """``[R]`` target ids."""
    target: TargetRows


class BlockLoss:
    """The loss of one drafter under one recipe."""

    def __init__(self, drafter: Drafter, target: Target, config: TrainConfig):
        self.drafter, self.target, self.config = drafter, target, config
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._head = drafter.head.to(self.dtype)

    def __call__(self, blocks: BlockBatch, weights: LossWeights, done: float) -> tuple[Tensor, Tensor, SlotStatistics]:
        """``done`` is the share of the run that lies behind.

        Returns:
            The loss, averaged over its weighted slots; the slot index of every counted slot, and their statistics.
        """
        d = self.drafter
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            predicted = d.predict(blocks.context_for(d), blocks.previous)
        slots = self._slots(blocks)
        if isinstance(d.causal, LatentHead):
            total, stats = self._latent(d.causal, predicted, blocks, slots, weights)
        elif isinstance(d.causal, PathSelector):
            total, stats = self._selector(d.causal, predicted, slots, weights)
        else:
            total, stats = self._low_rank(predicted, slots, weights, done)
        return total + self._confidence(predicted, slots, stats), slots.slot, stats

    def _slots(self, blocks: BlockBatch) -> _Slots:
        k = blocks.weight.shape[-1]
        index = blocks.weight.flatten().nonzero().squeeze(1)
        slot = index % k
        weight = slot_decay(k, self.config.gamma).to(slot.device)[slot]
        target = TargetRows(blocks.hidden, self.target.logits, self.drafter.draft_ids)
        return _Slots(
            index, slot, weight / weight.sum(), blocks.rows.flatten()[index], blocks.previous.flatten()[index], target
        )

    def _objective(
        self, hidden: Tensor, features: Tensor | None, slots: _Slots, weight: Tensor, weights: LossWeights, extras: Extras = NOTHING_ELSE
    ) -> tuple[Tensor, SlotStatistics]:  # fmt: skip
        """The objective on the counted slots: hidden states ``[R, hidden]``, features ``[R, rank]``."""
        w2 = self.drafter.causal.w2.weight if features is not None and isinstance(self.drafter.causal, LowRankHead) else None
        return block_objective(
            hidden.to(self.dtype), None if features is None else features.to(self.dtype), w2, self._head, slots.rows, weight,
            slots.target, weights, self.config.objective_chunk, extras,
        )  # fmt: skip

    def _low_rank(
        self, predicted: Prediction, slots: _Slots, weights: LossWeights, done: float
    ) -> tuple[Tensor, SlotStatistics]:
        """The logits with what the causal head adds, and for Domino, less and less, without."""
        hidden = predicted.hidden.flatten(0, 1)[slots.index]
        features = None if predicted.features is None else predicted.features.flatten(0, 1)[slots.index]
        base = max(0.0, 1.0 - done) if isinstance(self.drafter.causal, GruHead) else 0.0
        total, stats = self._objective(hidden, features, slots, slots.weight * (1.0 - base), weights)
        if base:
            total = total + self._objective(hidden, None, slots, slots.weight * base, weights)[0]
        return total, stats

    def _selector(
        self, selector: PathSelector, predicted: Prediction, slots: _Slots, weights: LossWeights
    ) -> tuple[Tensor, SlotStatistics]:
        """The unary logits, and the selector's scores of their best candidates."""
        hidden = predicted.hidden.flatten(0, 1)[slots.index]
        total, stats = self._objective(hidden, None, slots, slots.weight, weights, Extras(candidates=selector.candidates))
        assert stats.candidates is not None
        unary = torch.einsum("rh,rch->rc", hidden.to(self.dtype), self._head[stats.candidates.ids])
        scores = selector.scores(unary, stats.candidates.ids, hidden, slots.previous)
        own, acceptance, agreement = candidate_objective(scores, stats.candidates, slots.weight, weights)
        return total + own, replace(stats, acceptance=acceptance, agreement=agreement)

    def _latent(
        self, latent: LatentHead, predicted: Prediction, blocks: BlockBatch, slots: _Slots, weights: LossWeights
    ) -> tuple[Tensor, SlotStatistics]:
        """Trains every category where it is likely to be the one that got so far.

        Drafts of category z reach slot j along the text x with probability r_{z,j} = prior(z) prod_{i<j} min(1, q_i(x_i | z) / p_i(x_i)).
        Slot j's loss under z is weighted with r_{z,j}, normalised over z, and the prior is trained for the expected accepted
        length, sum_z prior(z) sum_j prod_{i<j} ratio_i acceptance_j. Over texts drawn from the target both are what decoding
        would see (an estimate with one sample, the text).
        """
        assert predicted.anchor_hidden is not None
        M, k, _ = predicted.hidden.shape
        under = [self._under(z, latent, predicted, blocks, slots, weights) for z in range(latent.values)]
        loss, acceptance, agreement, reach = (torch.stack(of_all, dim=1) for of_all in zip(*under, strict=True))  # [R, values]
        prior = latent.prior(predicted.anchor_hidden.float()).softmax(-1)  # [M, values]
        block = slots.index // k
        share = reach * prior.detach()[block]
        share = share / share.sum(-1, keepdim=True).clamp_min(1e-9)
        accepted = torch.zeros(M, latent.values, device=reach.device).index_add_(0, block, reach * acceptance)
        expected = (prior * accepted).sum(-1).mean() / k
        likeliest = prior.detach().argmax(-1)[block][:, None]
        stats = SlotStatistics(
            (loss.detach() * share).sum(1), (acceptance * share).sum(1), agreement.gather(1, likeliest).squeeze(1)
        )
        return (loss * share * slots.weight[:, None]).sum() - expected, stats

    def _under(
        self, z: int, latent: LatentHead, predicted: Prediction, blocks: BlockBatch, slots: _Slots, weights: LossWeights
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of every slot under one category, ``[R]`` each: its loss (differentiable), acceptance, agreement, and the chance that the
        drafts before it stand, prod_{i<j} min(1, q_i(x_i | z) / p_i(x_i))."""
        M, k, _ = predicted.hidden.shape
        categories = torch.full((M,), z, device=slots.index.device)
        hidden = latent.shift(predicted.hidden, categories).flatten(0, 1)[slots.index]
        leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        extras = Extras(tokens=blocks.tokens.flatten()[slots.index])
        loss, found = self._objective(leaf, None, slots, torch.ones_like(slots.weight), weights, extras)
        # The gradient of each slot's loss now; its weight comes when all categories are known.
        gradient = torch.autograd.grad(loss, leaf)[0] if loss.requires_grad else torch.zeros_like(leaf)
        differentiable = found.loss + ((hidden - hidden.detach()) * gradient).sum(-1)
        assert found.token_ratio is not None
        ratio = torch.ones(M * k, device=leaf.device).index_put_((slots.index,), found.token_ratio).view(M, k)
        before = torch.cat((torch.ones_like(ratio[:, :1]), ratio[:, :-1]), dim=1).cumprod(1)
        return differentiable, found.acceptance, found.agreement, before.flatten()[slots.index]

    def _confidence(self, predicted: Prediction, slots: _Slots, stats: SlotStatistics) -> Tensor | float:
        """BCE of the confidence head against the acceptance; nothing but the head learns from it."""
        d = self.drafter
        if d.confidence is None or not self.config.confidence:
            return 0.0
        hidden = predicted.hidden.flatten(0, 1)[slots.index].detach().float()
        seen = d.causal.embed(slots.previous).detach() if isinstance(d.causal, MarkovHead) and d.confident_of_markov else None
        scores = d.confidence(hidden, seen)
        bce = F.binary_cross_entropy_with_logits(scores, stats.acceptance.clamp(0, 1), reduction="none")
        return self.config.confidence * (bce * slots.weight).sum()
