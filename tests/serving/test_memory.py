"""What a drafter keeps in pages is what the embedded engine keeps for it by position, whatever happens to the blocks."""

from __future__ import annotations

import pytest
import torch

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.drafters.checkpoint import load_drafter
from hspec.drafters.config import MarkovConfig
from hspec.drafters.drafter import Drafter
from hspec.serving.step import StepDrafter
from hspec.targets.target import Target
from tests.methods import trained
from tests.serving.simulated import BLOCK, Simulated, SimulatedServer
from tests.serving.taught import SLOTS, answers, from_scratch, prompts, teach

LENGTHS, TOKENS = (5, 40, 21), 30
KEEPING = ("dspark", "dflash", "dflash2", "domino", "dblast")
VARIANTS = ("vanilla", "gated", "recurrent")


def check_drafts(target: Target, drafter: Drafter, requests: list[Simulated]) -> None:
    for request in requests:
        assert request.drafted
        for count, drafts in request.drafted:
            assert drafts == from_scratch(target, drafter, request.tokens[:count], SLOTS)


def text(target: Target, prompt: list[int], tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [*prompt, *Engine(target).generate([Request(tuple(prompt), params)])[0].tokens]


@pytest.fixture(scope="module")
def taught(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Drafter:
    """A dspark drafter that knows half of what the target says."""
    folder = tmp_path_factory.mktemp("taught")
    teach(target, "dspark", answers(target, prompts(LENGTHS), TOKENS), folder, steps=30)
    return load_drafter(folder, target).prepare(half=False)


@pytest.mark.parametrize("chunk", [7, 64])
def test_steps_are_those_of_the_embedded_engine(target: Target, taught: Drafter, chunk: int) -> None:
    server = SimulatedServer(target, taught, SLOTS, chunk)
    requests = [server.request(prompt) for prompt in prompts(LENGTHS)]
    while any(len(r.tokens) - len(r.prompt) < TOKENS for r in requests):
        server.step([r for r in requests if len(r.tokens) - len(r.prompt) < TOKENS])
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    results = Engine(target, taught, SLOTS).generate([Request(tuple(r.prompt), params) for r in requests])
    assert sum(result.counters.tau for result in results) > 1.25 * len(results)  # some drafts stand, some do not
    for request, result in zip(requests, results, strict=True):
        assert request.tokens[len(request.prompt) :][:TOKENS] == result.tokens
        assert request.runs[0] == 1 and request.runs[1:-1] == result.runs[:-1]  # the engine cuts the last one at max_tokens
    check_drafts(target, taught, requests)


@pytest.mark.parametrize("method", [m for m in KEEPING if m != "dspark"])
def test_every_method_that_keeps_features(target: Target, method: str) -> None:
    drafter = trained(target, method, block_size=SLOTS + 1)
    server = SimulatedServer(target, drafter, SLOTS, 16)
    requests = [server.request(prompt) for prompt in prompts(LENGTHS)]
    for _ in range(12):
        server.step(requests)
    check_drafts(target, drafter, requests)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("window", [None, 9])
def test_heads_and_windows_of_dspark(target: Target, variant: str, window: int | None) -> None:
    head = MarkovConfig(rank=8, variant=variant)  # type: ignore[arg-type]
    drafter = trained(target, "dspark", block_size=SLOTS + 1, head=head, window=window)
    server = SimulatedServer(target, drafter, SLOTS, 16)
    requests = [server.request(prompt) for prompt in prompts(LENGTHS)]
    for _ in range(10):
        server.step(requests)
    check_drafts(target, drafter, requests)


def test_blocks_that_are_taken_back_and_shared(target: Target, taught: Drafter) -> None:
    asked = prompts(LENGTHS)
    server = SimulatedServer(target, taught, SLOTS, 16)
    first, second = server.request(asked[1]), server.request(asked[2])
    for _ in range(8):
        server.step([first, second])
    server.preempt(second)
    like = server.request([*asked[1][:30], 7, 8, 9], shared=first)
    assert like.computed == 30 // BLOCK * BLOCK
    for _ in range(8):
        server.step([first, second, like])
    server.preempt(first)
    for _ in range(8):
        server.step([first, like, second])
    check_drafts(target, taught, [first, second, like])
    for request, prompt in ((first, asked[1]), (second, asked[2]), (like, list(like.prompt))):
        assert request.tokens == text(target, prompt, len(request.tokens) - len(prompt))


def test_a_step_without_drafts_is_remembered_too(target: Target, taught: Drafter) -> None:
    server = SimulatedServer(target, taught, SLOTS, 16)
    requests = [server.request(prompt) for prompt in prompts(LENGTHS)]
    for i in range(12):
        server.step(requests, propose=i % 3 == 0)
    check_drafts(target, taught, requests)


def test_drafts_follow_from_what_is_remembered(target: Target, taught: Drafter) -> None:
    """So that the tests above would see it if something else were read."""
    server = SimulatedServer(target, taught, SLOTS, 64)
    request = server.request(prompts(LENGTHS)[1])
    server.step([request])
    assert server.runner.memory is not None
    for pages in server.runner.memory.pages.layers.values():
        pages.copy_(torch.randn_like(pages))
    server.step([request])
    count, drafts = request.drafted[-1]
    assert drafts != from_scratch(target, taught, request.tokens[:count], SLOTS)


def test_memory_and_target_are_read_apart(target: Target) -> None:
    """A drafter that keeps something reads none of the target's layers, the others keep nothing."""
    keeps, reads = (StepDrafter(trained(target, m, block_size=SLOTS + 1), SLOTS) for m in ("dspark", "dflash-kv"))
    assert keeps.memory is not None and keeps.target_layers == set()
    assert reads.memory is None and reads.target_layers == set(reads.drafter.config.kv_layers)  # type: ignore[attr-defined]
