"""How long the parts of a decoding step take."""

from __future__ import annotations

import time

import torch


class StepClock:
    """Sums the seconds of drafting and of the rest of a step: the target's forward, acceptance, bookkeeping.

    Args:
        device: where the work runs; a CUDA device is waited for at every reading, so that its time is counted where it is due.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self.reset()

    def reset(self) -> None:
        self.steps = 0
        self.draft_seconds = 0.0
        self.verify_seconds = 0.0

    def now(self) -> float:
        """A reading, in seconds of a monotonic clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def add(self, began: float, drafted: float, ended: float) -> None:
        """One step: when it began, when its drafts were there, when its tokens were."""
        self.steps += 1
        self.draft_seconds += drafted - began
        self.verify_seconds += ended - drafted
