"""How much memory a piece of work takes at its height."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import torch

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


class PeakMemory:
    """Measures, between ``with`` and its end, how far the memory in use rose above what was in use at the beginning.

    On CUDA what torch has allocated; elsewhere the resident memory of the process, which Linux alone tells the height of.
    """

    def __init__(self, device: torch.device):
        self._cuda = device if device.type == "cuda" else None
        self.bytes: int | None = None
        """Set at the end; None where the system does not tell."""

    def __enter__(self) -> PeakMemory:
        self._before = self._now(peak=False) if self._reset() else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._before is not None:
            peak = self._now(peak=True)
            self.bytes = None if peak is None else max(0, peak - self._before)

    def _reset(self) -> bool:
        """Forget the height so far; False where that cannot be done."""
        if self._cuda is not None:
            torch.cuda.reset_peak_memory_stats(self._cuda)
            return True
        try:
            _RESET.write_text("5")  # Linux: VmHWM starts again from what is resident
        except OSError:
            return False
        return True

    def _now(self, peak: bool) -> int | None:
        if self._cuda is not None:
            return torch.cuda.max_memory_allocated(self._cuda) if peak else torch.cuda.memory_allocated(self._cuda)
        name = "VmHWM:" if peak else "VmRSS:"
        for line in _STATUS.read_text().splitlines():
            if line.startswith(name):
                return int(line.split()[1]) * 1024
        return None
