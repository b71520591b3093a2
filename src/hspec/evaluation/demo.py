"""The main job on a real model: the same answers with H-Spec, without it, and by transformers' generate, timed and compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from hspec.api import make_request
from hspec.decoding.engine import Drafter, Engine, Step
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Counters, Result
from hspec.targets.target import Target

PROMPTS = (
    "Explain in simple terms why the sky is blue during the day and red at sunset.",
    "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "Write a short, polite email to a colleague to move our meeting from Monday to Wednesday.",
)
"""Fixed before a drafter had answered any of them, and never chosen by how well one does."""


@dataclass
class Timed:
    """A decoded answer and the seconds its steps took, the prefill left out."""

    result: Result
    seconds: float

    @property
    def tokens(self) -> int:
        return self.result.counters.emitted


@dataclass
class Comparison:
    """One prompt, answered every way."""

    prompt: str
    drafted: Timed
    plain: Timed
    reference_tokens: list[int]
    reference_seconds: float

    @property
    def identical(self) -> bool:
        """Whether all texts are the same, token for token."""
        return self.drafted.result.tokens == self.plain.result.tokens == self.reference_tokens


@dataclass
class Report:
    """All prompts; ratios are of summed times over the same tokens."""

    comparisons: list[Comparison] = field(default_factory=list)

    def numbers(self) -> dict[str, Any]:
        """What the table shows, and what ``--json`` prints."""
        counters = Counters()
        for c in self.comparisons:
            counters.add(c.drafted.result.counters)
        tokens = sum(c.drafted.tokens for c in self.comparisons)
        drafted = sum(c.drafted.seconds for c in self.comparisons)
        plain = sum(c.plain.seconds for c in self.comparisons)
        plain_tokens = sum(c.plain.tokens for c in self.comparisons)
        reference = sum(c.reference_seconds for c in self.comparisons)
        reference_tokens = sum(len(c.reference_tokens) - 1 for c in self.comparisons)
        per_token, per_plain = _ratio(drafted, tokens), _ratio(plain, plain_tokens)
        per_reference = _ratio(reference, reference_tokens)
        return {
            "tokens": tokens,
            "steps": counters.steps,
            "tau": counters.tau,
            "acceptance": counters.acceptance,
            "ms_per_token": 1e3 * per_token,
            "ms_per_token_ar": 1e3 * per_plain,
            "ms_per_token_transformers": 1e3 * per_reference,
            "cycle": _ratio(_ratio(drafted, counters.steps), per_plain),
            "speedup": _ratio(per_plain, per_token),
            "speedup_transformers": _ratio(per_reference, per_token),
            "identical": all(c.identical for c in self.comparisons),
        }


def _ratio(a: float, b: float) -> float:
    """0 where there is nothing to divide by: answers of one token have no steps."""
    return a / b if b else 0.0


def run(
    target: Target,
    drafter: Drafter,
    reference: nn.Module,
    k: int,
    max_tokens: int,
    on_step: Callable[[int, str, Step], None] = lambda *_: None,
) -> Report:
    """Answer every prompt each way, greedily, one after the other so that a change in the machine's load meets all alike.

    ``on_step(prompt index, "h-spec" | "plain", step)`` streams what is decoded.
    """
    report = Report()
    params = SamplingParams(max_tokens=max_tokens)
    with_drafts, without = Engine(target, drafter, k), Engine(target)
    warm = make_request(target, "Hello", SamplingParams(max_tokens=8))
    for engine in (with_drafts, without):
        engine.generate([warm])
    for index, prompt in enumerate(PROMPTS):
        request = make_request(target, prompt, params)
        drafted = _timed(with_drafts, request, partial(on_step, index, "h-spec"))
        plain = _timed(without, request, partial(on_step, index, "plain"))
        longest = min(max_tokens, target.max_positions - len(request.prompt))
        tokens, seconds = time_reference(reference, list(request.prompt), longest, sorted(target.eos_ids))
        report.comparisons.append(Comparison(prompt, drafted, plain, tokens, seconds))
    return report


def _timed(engine: Engine, request: Any, on_step: Callable[[Step], None]) -> Timed:
    seconds = 0.0
    stream = engine.stream([request])
    step = next(stream)  # the prefill and its token
    on_step(step)
    while step.result is None:
        began = time.perf_counter()
        step = next(stream)
        seconds += time.perf_counter() - began
        on_step(step)
    return Timed(step.result, seconds)


class _Clock:
    """A transformers streamer that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, _: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


@torch.no_grad()
def time_reference(model: nn.Module, prompt: list[int], max_tokens: int, eos: list[int]) -> tuple[list[int], float]:
    """Greedy tokens of transformers' own generate, and the seconds from its first token to its last."""
    clock = _Clock()
    ids = torch.tensor([prompt])
    out = model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, streamer=clock,
        eos_token_id=eos or None, pad_token_id=eos[0] if eos else 0, repetition_penalty=1.0,
    )  # fmt: skip
    times = clock.times[1:]  # the first call hands over the prompt
    return out[0, len(prompt) :].tolist(), times[-1] - times[0]
