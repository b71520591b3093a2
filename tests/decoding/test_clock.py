"""The clock takes every step's time, split where the drafts are there, and changes nothing."""

import torch

from hspec.decoding.clock import StepClock
from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.drafters.parallel import ParallelDrafter
from hspec.targets.target import Target


def test_sums() -> None:
    clock = StepClock(torch.device("cpu"))
    clock.add(1.0, 1.5, 3.5)
    clock.add(4.0, 4.25, 5.0)
    assert (clock.steps, clock.draft_seconds, clock.verify_seconds) == (2, 0.75, 2.75)
    clock.reset()
    assert (clock.steps, clock.draft_seconds, clock.verify_seconds) == (0, 0.0, 0.0)
    assert clock.now() <= clock.now()


def test_every_step_is_timed(target: Target, drafter: ParallelDrafter) -> None:
    request = Request((5, 6, 7), SamplingParams(max_tokens=12, ignore_eos=True))
    clock = StepClock(target.device)
    timed = Engine(target, drafter, clock=clock).generate([request])[0]
    assert clock.steps == timed.counters.steps > 0
    assert clock.draft_seconds > 0 and clock.verify_seconds > 0
    assert timed.tokens == Engine(target, drafter).generate([request])[0].tokens
