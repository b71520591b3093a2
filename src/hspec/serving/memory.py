"""What a drafter keeps of its own, K/V of features of every token, in pages of vLLM's. Nothing here knows vLLM.

The pages are those of further attention layers, which share the target's block tables: a token's K/V lie in the same block and place
as the target's. So whatever vLLM does with blocks (sharing a prefix, taking them back, filling them anew) holds for both, and a
refused draft's K/V are overwritten by the next token at its position, as the target's are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hspec.drafters.drafter import Drafter
from hspec.serving.pages import Pages, Writer


@dataclass(frozen=True)
class Ran:
    """The rows that the target has just run: those of all requests of a step, whether they sample a token in it or not."""

    taps: Sequence[Tensor]
    """The tapped residual streams, ascending, ``[rows, hidden]`` each."""
    positions: Tensor
    """``[rows]`` int64."""
    slots: Tensor
    """Where the target wrote each one's K/V, ``[rows]`` int64."""


@dataclass
class DrafterMemory:
    """A drafter's own K/V: ``pages`` of its layers by index, and what writes to each; both are set once they are there."""

    drafter: Drafter
    pages: Pages = field(default_factory=Pages)
    writers: dict[int, Writer] = field(default_factory=dict)

    @torch.inference_mode()
    def remember(self, ran: Ran) -> None:
        """Write K/V of rows; drafts that will be refused are among them.

        Nothing waits for what the step samples: features are of a row alone, whatever token comes behind it.
        """
        taps = torch.stack(list(ran.taps), dim=1)[:, None]  # [rows, 1, taps, hidden]: each row as a sequence of its own
        positions = ran.positions[:, None]
        kept = self.drafter.remember(taps, torch.zeros_like(positions), positions, None)
        for index, (keys, values) in enumerate(kept):
            dtype = self.pages.layers[index].dtype
            self.writers[index](keys[:, :, 0].to(dtype), values[:, :, 0].to(dtype), ran.slots)
