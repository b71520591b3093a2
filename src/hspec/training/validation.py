"""What is measured of blocks, as sums and counts that pool, and the held-out blocks that it is measured on.

Which documents and which anchors those are depends on the documents alone: not on the run's seed, its batches, or how many
processes share them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hspec.training.blocks import Anchors, cut_blocks, draw_anchors
from hspec.training.calibration import Calibration
from hspec.training.config import TrainConfig
from hspec.training.examples import Batch, Example, ExampleStream
from hspec.training.features import FeatureSource
from hspec.training.loss import BlockLoss, LossSums

DENSITY = 0.25
"""Of every held-out document's candidates, the share that are anchors."""


def _no_slots() -> Tensor:
    return torch.zeros(7, 0, dtype=torch.float64)


@dataclass
class Meter:
    """Sums and counts, kept apart so that ratios pool over batches and processes."""

    loss: float = 0.0
    normaliser: float = 0.0
    blocks: int = 0
    parts: dict[str, float] = field(default_factory=dict)
    slots: Tensor = field(default_factory=_no_slots)
    """By slot, ``[7, k]``: how many; their acceptance; their agreement; reached when sampling, and accepted of those; reached
    greedily, and accepted of those."""
    calibration: Calibration = field(default_factory=Calibration)

    def add(self, sums: LossSums, blocks: int) -> None:
        """A batch of so many blocks."""
        self.loss += float(sums.total.detach())
        self.normaliser += float(sums.normaliser)
        self.blocks += blocks
        for name, value in sums.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + float(value)
        accepted, agreed = sums.stats.acceptance, sums.stats.agreement.float()
        rows = (torch.ones_like(accepted), accepted, agreed, sums.reach, sums.reach * accepted,
                sums.reach_greedy, sums.reach_greedy * agreed)  # fmt: skip
        values = torch.stack(rows).double().cpu()
        self._add_slots(torch.zeros(7, sums.k, dtype=torch.float64).index_add_(1, sums.slots.cpu(), values))
        if sums.confidence is not None:
            self.calibration.add(sums.confidence, accepted)

    def merge(self, other: Meter) -> None:
        """Add what another process has seen."""
        self.loss, self.normaliser = self.loss + other.loss, self.normaliser + other.normaliser
        self.blocks += other.blocks
        for name, value in other.parts.items():
            self.parts[name] = self.parts.get(name, 0.0) + value
        self._add_slots(other.slots)
        self.calibration.merge(other.calibration)

    def _add_slots(self, slots: Tensor) -> None:
        width = max(self.slots.shape[1], slots.shape[1])
        self.slots = sum((F.pad(s, (0, width - s.shape[1])) for s in (self.slots, slots)), start=torch.zeros(7, width).double())

    def report(self) -> dict[str, Any]:
        """Loss and its parts (means under the slots' decay), rates by slot, the tau they would give, and the calibration of the
        confidence head if there is one.

        ``acceptance`` (1 - TV) and ``agreement`` are means over all blocks. ``conditional`` has the same over the blocks whose
        drafts reach the slot, as decoding counts them; tau is made of those.
        """
        counted, accepted, agreed, reached, stood, reached_greedy, stood_greedy = self.slots
        sampling, greedy = _rates(stood, reached), _rates(stood_greedy, reached_greedy)
        out: dict[str, Any] = {
            "loss": self.loss / max(self.normaliser, 1e-9),
            "parts": {name: round(value / max(self.normaliser, 1e-9), 5) for name, value in self.parts.items()},
            "acceptance": _rates(accepted, counted),
            "agreement": _rates(agreed, counted),
            "conditional": {"sampling": sampling, "greedy": greedy},
            "tau_sampling": round(estimated_tau(sampling), 4),
            "tau_greedy": round(estimated_tau(greedy), 4),
        }
        return out | ({"calibration": self.calibration.report()} if self.calibration.count else {})


def _rates(part: Tensor, whole: Tensor) -> list[float]:
    """By slot, as far as any block reaches."""
    k = int((whole > 0).sum())
    return [round(rate, 4) for rate in (part[:k] / whole[:k]).tolist()]


def estimated_tau(rates: Sequence[float]) -> float:
    """1 + a_1 + a_1 a_2 + ...: tokens a verification step, from conditional acceptance by slot."""
    total, reach = 1.0, 1.0
    for rate in rates:
        reach *= rate
        total += reach
    return total


class Validation:
    """Held-out documents, and always the same blocks of them.

    Args:
        examples: held-out documents; at least one must have a block.
        source: runs the target over them.
        slots: of a block, as many as the drafter will serve.
    """

    def __init__(self, examples: Sequence[Example], config: TrainConfig, source: FeatureSource, slots: int):
        chosen: list[Example] = []
        tokens = 0
        for example in sorted((e for e in examples if e.has_block), key=lambda e: _digest(e.id)):
            if chosen and tokens + len(example.tokens) > config.validate_tokens:
                break
            chosen.append(example)
            tokens += len(example.tokens)
        self.stream = ExampleStream(chosen, config.batch_tokens, seed=0)
        self.config, self.source, self.slots = config, source, slots

    @torch.no_grad()
    def __call__(self, loss: BlockLoss, part: int = 0, parts: int = 1) -> Meter:
        """Measure the drafter of ``loss`` under the weights that its run ends with.

        Args:
            part, parts: with several processes, which of how many parts of the batches to take; their meters then merge.
        """
        meter, weights = Meter(), self.config.weights(self.config.steps)
        for index in range(part, self.stream.batches_per_epoch, parts):
            batch = self.stream.batch(index)
            features = self.source(batch)
            if index + parts < self.stream.batches_per_epoch:
                self.source.expect(self.stream.batch(index + parts))
            blocks = cut_blocks(features, batch, fixed_anchors(batch, self.stream.examples), self.slots)
            meter.add(loss(blocks, weights, 1.0), int(blocks.weight[..., 0].sum()))
        return meter


def fixed_anchors(batch: Batch, examples: Sequence[Example], density: float = DENSITY) -> Anchors:
    """Random anchors of every document, drawn by its id: always the same ones, in whatever company it comes."""
    drawn = []
    for row, document in enumerate(batch.documents):
        length = len(examples[document].tokens)
        alone = Batch(batch.tokens[row : row + 1, :length], batch.supervised[row : row + 1, :length])
        drawn.append(draw_anchors(alone, density, torch.Generator().manual_seed(_digest(examples[document].id))))
    width = max(a.positions.shape[1] for a in drawn)
    missing = [width - a.positions.shape[1] for a in drawn]
    positions = [F.pad(a.positions, (0, n), value=int(a.positions[0, 0])) for a, n in zip(drawn, missing, strict=True)]
    valid = [F.pad(a.valid, (0, n), value=False) for a, n in zip(drawn, missing, strict=True)]
    return Anchors(torch.cat(positions), torch.cat(valid))


def _digest(id: str) -> int:
    return int.from_bytes(hashlib.sha256(id.encode()).digest()[:7], "big")
