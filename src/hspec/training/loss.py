"""The loss of a batch of blocks: the objective on every slot, and what a part of a drafter needs besides.

All methods share one recipe, the same terms against the target. Only where a part cannot learn from that alone it has a term of its
own: Domino's base logits while its GRU is young, DFlash-2's selector over its candidates, DBLAST's latent, the confidence head.

Sums and counts are kept apart. So the loss of a batch that is spread over processes is the loss of the joined batch: all totals over
all normalisers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec.drafters.drafter import Drafter, Prediction
from hspec.drafters.heads.causal import LowRankHead
from hspec.drafters.heads.gru import GruHead
from hspec.drafters.heads.latent import LatentHead
from hspec.drafters.heads.selector import PathSelector
from hspec.targets.target import Target
from hspec.training.blocks import BlockBatch
from hspec.training.config import TrainConfig
from hspec.training.objective import (
    Extras,
    LossWeights,
    SlotStatistics,
    block_objective,
    candidate_objective,
    dpace_weights,
    slot_decay,
)
from hspec.training.target_rows import TargetRows


@dataclass(frozen=True)
class LossSums:
    """Of the R supervised slots of a batch."""

    total: Tensor
    """The weighted sum of their losses, a differentiable scalar."""
    normaliser: Tensor
    """The sum of their decays exp(-(j - 1) / gamma), a scalar. It does not depend on the drafter, so that total / normaliser is
    a mean under the fixed decay, and keeps what D-PACE's weights amount to under those."""
    parts: dict[str, Tensor]
    """Detached sums of each term alone under the fixed decay, without its weight in the loss; over ``normaliser`` they are means."""
    slots: Tensor
    """Which slot of its block each is, from 0, ``[R]`` int64."""
    stats: SlotStatistics
    reach: Tensor
    """The chance that a draft of the text's own tokens stands up to this slot when sampling, ``[R]``: prod_{i<j} min(1, q_i / p_i)
    there. Over text drawn from the target its mean is how often a slot is reached."""
    reach_greedy: Tensor
    """Whether every slot before agrees with the target's argmax, ``[R]``."""
    confidence: Tensor | None = None
    """What the confidence head says, as a probability, ``[R]``; None without one."""

    @property
    def k(self) -> int:
        """Slots of the longest block."""
        return int(self.slots.max()) + 1 if len(self.slots) else 0

    @property
    def mean(self) -> Tensor:
        """The loss of this batch alone."""
        return self.total / self.normaliser


@dataclass(frozen=True)
class _Slots:
    """The R supervised slots of a batch of M blocks."""

    index: Tensor
    """Their places in ``[M * k]``."""
    shape: tuple[int, int]
    """M, k."""
    decay: Tensor
    """exp(-(j - 1) / gamma), ``[R]``."""
    rows: Tensor
    """See :class:`BlockBatch`; ``[R]``."""
    previous: Tensor
    """``[R]`` target ids."""
    tokens: Tensor
    """``[R]`` target ids."""
    target: TargetRows

    @property
    def slot(self) -> Tensor:
        """Which slot of its block each is, from 0, ``[R]``."""
        return self.index % self.shape[1]

    @property
    def block(self) -> Tensor:
        """Which block each is of, ``[R]``."""
        return self.index // self.shape[1]

    def pick(self, values: Tensor) -> Tensor:
        """``[M, k, ...]`` -> ``[R, ...]``."""
        return values.flatten(0, 1)[self.index]

    def spread(self, values: Tensor, fill: float) -> Tensor:
        """``[R]`` -> ``[M, k]``, with ``fill`` at the slots that do not count."""
        whole = torch.full((self.shape[0] * self.shape[1],), fill, device=values.device)
        return whole.index_put_((self.index,), values.float()).view(self.shape)

    def before(self, values: Tensor) -> Tensor:
        """The product over the slots before each one in its block, ``[R]``."""
        whole = self.spread(values, 1.0)
        return self.pick(torch.cat((torch.ones_like(whole[:, :1]), whole[:, :-1]), dim=1).cumprod(1))


@dataclass(frozen=True)
class _Loss:
    """What a method makes of the slots."""

    total: Tensor
    stats: SlotStatistics
    own: dict[str, Tensor] = field(default_factory=dict)
    """The method's own terms; as ``LossSums.parts``."""
    reach: Tensor | None = None
    """Where it is not the product of ``token_ratio``; as in :class:`LossSums`."""


class BlockLoss:
    """The loss of one drafter under one recipe."""

    def __init__(self, drafter: Drafter, target: Target, config: TrainConfig):
        self.drafter, self.target, self.config = drafter, target, config
        self.dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self._head = drafter.head.to(self.dtype)

    def __call__(self, blocks: BlockBatch, weights: LossWeights, done: float) -> LossSums:
        """``done`` is the share of the run that lies behind."""
        d = self.drafter
        with torch.autocast(self.target.device.type, torch.bfloat16, enabled=self.config.precision == "bf16"):
            predicted = d.predict(blocks.context_for(d), blocks.previous)
        slots = self._slots(blocks)
        if isinstance(d.causal, LatentHead):
            loss = self._latent(d.causal, predicted, slots, weights)
        elif isinstance(d.causal, PathSelector):
            loss = self._selector(d.causal, predicted, slots, weights)
        else:
            loss = self._low_rank(predicted, slots, weights, done)
        stats = loss.stats
        terms = {"ce": stats.ce, "kl": stats.kl, "tv": 1 - stats.acceptance}
        parts = {name: (value * slots.decay).sum() for name, value in terms.items()} | loss.own
        total, scores = loss.total, self._confidence(predicted, slots)
        if scores is not None:
            bce = F.binary_cross_entropy_with_logits(scores, stats.acceptance.clamp(0, 1), reduction="none")
            own = (bce * slots.decay).sum()
            total = total + self.config.confidence * own
            parts["confidence"] = own.detach()
        return LossSums(
            total=total,
            normaliser=slots.decay.sum(),
            parts=parts,
            slots=slots.slot,
            stats=stats,
            reach=slots.before(stats.token_ratio) if loss.reach is None else loss.reach,
            reach_greedy=slots.before(stats.agreement),
            confidence=None if scores is None else scores.detach().sigmoid(),
        )

    def _slots(self, blocks: BlockBatch) -> _Slots:
        M, k = blocks.weight.flatten(0, 1).shape
        index = blocks.weight.flatten().nonzero().squeeze(1)
        rows, previous, tokens = (t.flatten()[index] for t in (blocks.rows, blocks.previous, blocks.tokens))
        decay = slot_decay(k, self.config.gamma).to(index.device)[index % k]
        target = TargetRows(blocks.hidden, self.target.logits, self.drafter.draft_ids)
        return _Slots(index, (M, k), decay, rows, previous, tokens, target)

    def _objective(
        self, hidden: Tensor, features: Tensor | None, slots: _Slots, weight: Tensor, weights: LossWeights, candidates: int = 0
    ) -> tuple[Tensor, SlotStatistics]:
        """The objective on the counted slots: hidden states ``[R, hidden]``, features ``[R, rank]``, slot weights ``[R]``."""
        w2 = self.drafter.causal.w2.weight if features is not None and isinstance(self.drafter.causal, LowRankHead) else None
        labels = slots.tokens if self.config.ce_label == "data" else None
        return block_objective(
            hidden.to(self.dtype), None if features is None else features.to(self.dtype), w2, self._head, slots.rows, weight,
            slots.target, weights, self.config.objective_chunk, Extras(candidates, slots.tokens, labels),
        )  # fmt: skip

    def _weight(self, hidden: Tensor, features: Tensor | None, slots: _Slots, weights: LossWeights) -> Tensor:
        """What each slot weighs, ``[R]``. D-PACE has to know the acceptance before any gradient is taken: a pass of its own."""
        if self.config.position_weights == "decay":
            return slots.decay
        with torch.no_grad():
            features = None if features is None else features.detach()
            stats = self._objective(hidden.detach(), features, slots, slots.decay, weights)[1]
        return self._dpace(slots, stats.acceptance)

    def _dpace(self, slots: _Slots, acceptance: Tensor) -> Tensor:
        return slots.pick(dpace_weights(slots.spread(acceptance, -1.0), self.config.dpace_alpha))

    def _low_rank(self, predicted: Prediction, slots: _Slots, weights: LossWeights, done: float) -> _Loss:
        """The logits with what the causal head adds, and for Domino, less and less, without."""
        hidden = slots.pick(predicted.hidden)
        features = None if predicted.features is None else slots.pick(predicted.features)
        weight = self._weight(hidden, features, slots, weights)
        base = max(0.0, 1.0 - done) if isinstance(self.drafter.causal, GruHead) else 0.0
        total, stats = self._objective(hidden, features, slots, weight * (1.0 - base), weights)
        if not base:
            return _Loss(total, stats)
        without, of_base = self._objective(hidden, None, slots, weight * base, weights)
        return _Loss(total + without, stats, {"base": (of_base.loss * slots.decay).sum()})

    def _selector(self, selector: PathSelector, predicted: Prediction, slots: _Slots, weights: LossWeights) -> _Loss:
        """The unary logits, and the selector's scores of their best candidates."""
        hidden = slots.pick(predicted.hidden)
        weight = self._weight(hidden, None, slots, weights)
        total, unary = self._objective(hidden, None, slots, weight, weights, selector.candidates)
        assert unary.candidates is not None
        ids = unary.candidates.ids
        logits = torch.einsum("rh,rch->rc", hidden.to(self.dtype), self._head[ids])
        scores = selector.scores(logits, ids, hidden, slots.previous)
        own, stats = candidate_objective(scores, unary.candidates, weight, weights)
        return _Loss(total + own, stats, {"unary": (unary.loss * slots.decay).sum()})

    def _latent(self, latent: LatentHead, predicted: Prediction, slots: _Slots, weights: LossWeights) -> _Loss:
        """Trains every category where it is likely to be the one that got so far.

        Drafts of category z reach slot j along the text x with probability r_{z,j} = prior(z) prod_{i<j} min(1, q_i(x_i | z) / p_i(x_i)).
        Slot j's loss under z is weighted with r_{z,j}, normalised over z, and the prior is trained for the expected accepted
        length, sum_z prior(z) sum_j prod_{i<j} ratio_i acceptance_j. Over texts drawn from the target both are what decoding
        would see (an estimate with one sample, the text).
        """
        assert predicted.anchor_hidden is not None
        losses, under, befores = zip(*(self._under(z, latent, predicted, slots, weights) for z in range(latent.values)))
        before = torch.stack(befores, dim=1)  # [R, values]
        prior = latent.prior(predicted.anchor_hidden.float()).softmax(-1)  # [M, values]
        share = before * prior.detach()[slots.block]
        reach = share.sum(-1)
        share = share / reach.clamp_min(1e-9)[:, None]
        stats = _mixture(under, share, prior.detach().argmax(-1)[slots.block])
        accepted = before * torch.stack([found.acceptance for found in under], dim=1)
        k, blocks = slots.shape[1], torch.zeros_like(prior).index_add_(0, slots.block, accepted)
        # A block's expected share of accepted drafts weighs what its slots' losses weigh together.
        expected = (prior * blocks).sum() / k * float(slot_decay(k, self.config.gamma).sum())
        weight = slots.decay if self.config.position_weights == "decay" else self._dpace(slots, stats.acceptance)
        total = (torch.stack(losses, dim=1) * share * weight[:, None]).sum() - expected
        return _Loss(total, stats, {"prior": expected.detach()}, reach)

    def _under(
        self, z: int, latent: LatentHead, predicted: Prediction, slots: _Slots, weights: LossWeights
    ) -> tuple[Tensor, SlotStatistics, Tensor]:
        """Of every slot under one category: its loss (differentiable, ``[R]``), its statistics, and the chance that the drafts
        before it stand, prod_{i<j} min(1, q_i(x_i | z) / p_i(x_i)), ``[R]``."""
        categories = torch.full((slots.shape[0],), z, device=slots.index.device)
        hidden = slots.pick(latent.shift(predicted.hidden, categories))
        leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        loss, found = self._objective(leaf, None, slots, torch.ones_like(slots.decay), weights)
        # The gradient of each slot's loss now; its weight comes when all categories are known.
        gradient = torch.autograd.grad(loss, leaf)[0] if loss.requires_grad else torch.zeros_like(leaf)
        differentiable = found.loss + ((hidden - hidden.detach()) * gradient).sum(-1)
        return differentiable, found, slots.before(found.token_ratio)

    def _confidence(self, predicted: Prediction, slots: _Slots) -> Tensor | None:
        """The confidence head's logits ``[R]``; nothing but the head learns from them."""
        d = self.drafter
        if d.confidence is None or not self.config.confidence:
            return None
        return d.confidence_logits(slots.pick(predicted.hidden).detach().float(), slots.previous)


def _mixture(under: Sequence[SlotStatistics], share: Tensor, likeliest: Tensor) -> SlotStatistics:
    """Statistics of slots whose category z is drawn: shares ``[R, values]`` of each, and the likeliest one ``[R]``, which greedy
    drafting takes."""

    def mean(name: str) -> Tensor:
        return (torch.stack([getattr(found, name) for found in under], dim=1) * share).sum(1)

    agreement = torch.stack([found.agreement for found in under], dim=1).gather(1, likeliest[:, None]).squeeze(1)
    return SlotStatistics(mean("loss"), mean("ce"), mean("kl"), mean("acceptance"), agreement, mean("token_ratio"))
