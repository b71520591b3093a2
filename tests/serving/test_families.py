"""Tiny targets of both families with random drafters: hidden states, keys and tables are those of the embedded engine."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
import torch

from hspec import SamplingParams
from hspec.decoding.engine import Engine
from hspec.decoding.sequence import Request
from hspec.drafters.checkpoint import load_drafter, save_drafter
from tests.serving.engine import Job, K, VllmEngine
from tests.tiny import tiny_drafter, tiny_target

pytestmark = pytest.mark.serve

TOKENS = 40


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_served_as_embedded(family: Literal["llama", "qwen3"], tmp_path: Path) -> None:
    target = tiny_target(family, head_dim=32, linears="plain")  # vLLM's CPU attention has no smaller heads
    folder, drafts = tmp_path / "target", tmp_path / "drafter"
    target.model.save_pretrained(folder)
    target.tokenizer.save_pretrained(folder)
    window = tiny_drafter(target, window=20)
    save_drafter(window, drafts)
    drafter = load_drafter(drafts, target).prepare(half=False)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 200, (n,), generator=generator).tolist() for n in (5, 40, 70, 33, 100, 12)]
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    results = Engine(target, drafter, K).generate([Request(tuple(p), params) for p in prompts])
    settings = {"max_model_len": 256, "max_num_batched_tokens": 64, "block_size": 32}
    jobs = [Job(p, {"max_tokens": TOKENS, "ignore_eos": True}, arrives=2 * i) for i, p in enumerate(prompts)]
    with VllmEngine(True, (str(folder), str(drafts)), **settings) as engine:
        outcomes = engine.run(jobs)
    assert [o.tokens for o in outcomes] == [r.tokens for r in results]
    assert [o.lengths for o in outcomes] == [[1, *r.runs] for r in results]
    for outcome, result in zip(outcomes, results, strict=True):  # random drafts are seldom accepted, but they are the same
        assert len(outcome.drafts) > len(result.runs)
        for drafts, run, refused in zip(outcome.drafts, result.runs, result.refused, strict=False):
            assert not refused or drafts[run - 1 :] == refused
