"""The height of memory between two points, told from what was in use before."""

import torch

from hspec.evaluation.memory import PeakMemory


def test_what_rises_and_falls_is_seen() -> None:
    with PeakMemory(torch.device("cpu")) as memory:
        block = torch.ones(64 << 20, dtype=torch.uint8)
        del block
    with PeakMemory(torch.device("cpu")) as less:
        pass
    if memory.bytes is None:  # a system that does not tell
        assert less.bytes is None
        return
    assert less.bytes is not None
    assert memory.bytes > 60 << 20 > less.bytes
