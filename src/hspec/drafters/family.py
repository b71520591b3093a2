"""Which class a configuration makes."""

from __future__ import annotations

import torch
from torch import Tensor

from hspec.drafters.config import DrafterConfig, EagleConfig, ParallelConfig, ReDrafterConfig
from hspec.drafters.drafter import Drafter
from hspec.drafters.eagle import EagleDrafter
from hspec.drafters.parallel import ParallelDrafter
from hspec.drafters.redrafter import ReDrafter


def make_drafter(config: DrafterConfig, embedding: Tensor, head: Tensor, draft_ids: Tensor) -> Drafter:
    """A drafter with fresh weights; see :class:`hspec.drafters.drafter.Drafter` for the arguments."""
    if isinstance(config, ParallelConfig):
        return ParallelDrafter(config, embedding, head, draft_ids)
    if isinstance(config, EagleConfig):
        return EagleDrafter(config, embedding, head, draft_ids)
    if isinstance(config, ReDrafterConfig):
        return ReDrafter(config, embedding, head, draft_ids)
    raise AssertionError(f"no class for {type(config).__name__}")


def meta_drafter(config: DrafterConfig) -> Drafter:
    """One without weights, to count or to look up shapes."""
    with torch.device("meta"):
        return make_drafter(
            config,
            torch.empty(config.target.vocab_size, config.hidden_size),
            torch.empty(config.draft_vocab_size, config.hidden_size),
            torch.empty(config.draft_vocab_size, dtype=torch.int64),
        )
