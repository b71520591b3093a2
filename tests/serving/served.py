"""A tiny target and a drafter of it, on a real vLLM engine and in the embedded one, which must do the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hspec import SamplingParams
from hspec.decoding.engine import Engine
from hspec.decoding.sequence import Request, Result
from hspec.drafters.checkpoint import load_drafter
from hspec.drafters.drafter import Drafter
from hspec.drafters.source import NOTHING, Around
from hspec.targets.target import Target
from hspec.training.examples import Example
from tests.serving.engine import Job, Outcome, VllmEngine
from tests.serving.taught import SLOTS, answers, from_scratch, prompts, teach
from tests.tiny import tiny_target

TOKENS, BLOCK = 40, 32
LENGTHS = (5, 40, 70, 33, 100, 12)
SPACE = 1 << 30
"""Bytes of KV cache that every rank of an engine has."""


@dataclass(frozen=True)
class Served:
    """A target and a drafter of it, as files and in the embedded engine."""

    folders: tuple[str, str]
    target: Target
    drafter: Drafter
    prompts: list[list[int]]

    def embedded(self, asked: list[list[int]] | None = None, draft: bool = True, around: Around = NOTHING) -> list[Result]:
        params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
        engine = Engine(self.target, around.put(self.drafter, longest_copy=SLOTS), SLOTS) if draft else Engine(self.target)
        return engine.generate([Request(tuple(p), params) for p in asked or self.prompts])

    def jobs(self, asked: list[list[int]] | None = None, arrivals: int = 2) -> list[Job]:
        settings = {"max_tokens": TOKENS, "ignore_eos": True}
        return [Job(p, settings, arrives=arrivals * i) for i, p in enumerate(asked or self.prompts)]

    def engine(self, speculate: bool = True, **settings: Any) -> VllmEngine:
        return VllmEngine(speculate, self.folders, **({"max_model_len": 256, "block_size": BLOCK} | settings))

    def kv_tokens(self, ranks: int = 1) -> int:
        """That fit with the drafter's layers, if it has any, beside the target's; ``ranks`` divide the KV heads of both."""
        own, theirs = self.drafter.memory_shape, self.target.cache_shape
        block = sum(BLOCK * s.layers * s.kv_heads // ranks * s.head_dim * 2 * 4 for s in (own, theirs) if s is not None)
        return SPACE // block * BLOCK


Make = Callable[[Target, list[Example], Path], None]
"""Saves a drafter of a target, for which these are its own answers, to a folder."""


def serve(folder: Path, make: Make, family: Literal["llama", "qwen3"] = "llama", **shape: Any) -> Served:
    target = tiny_target(family, head_dim=32, linears="plain", **shape)  # vLLM's CPU attention has no smaller heads
    target.model.save_pretrained(folder / "target")
    target.tokenizer.save_pretrained(folder / "target")
    asked = prompts(LENGTHS)
    make(target, answers(target, asked, TOKENS), folder / "drafter")
    drafter = load_drafter(folder / "drafter", target).prepare(half=False)
    return Served((str(folder / "target"), str(folder / "drafter")), target, drafter, asked)


def taught(method: str, **changes: Any) -> Make:
    return lambda target, texts, folder: teach(target, method, texts, folder, **changes)


def compare(outcomes: list[Outcome], expected: list[Result]) -> None:
    assert [o.tokens for o in outcomes] == [r.tokens for r in expected]
    assert [o.lengths for o in outcomes] == [[1, *r.runs] for r in expected]


def check_drafts(served: Served, asked: list[list[int]], outcomes: list[Outcome]) -> int:
    """Every draft is that of a context which is made at once of all tokens before it; returns how many there were."""
    count = 0
    for prompt, outcome in zip(asked, outcomes, strict=True):
        tokens = [*prompt, *outcome.tokens]
        for known, drafts in zip(outcome.drafted_at, outcome.drafts, strict=True):
            if known <= len(tokens):  # behind the last step that counts nothing is known
                assert drafts == from_scratch(served.target, served.drafter, tokens[:known], SLOTS)
                count += 1
    return count
