"""Every method in the one loop, with random weights: nothing of what is written changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.decoding.engine import Drafter as AnyDrafter
from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.decoding.session import Session
from hspec.drafters.context import Chooser, Draft, DraftContext
from hspec.drafters.drafter import Drafter
from hspec.targets.cache import KVCache
from hspec.targets.target import Target
from tests.decoding.test_engine import SIZE, prompts, same_answers
from tests.decoding.test_session import ask, fresh
from tests.methods import DRAFTING, TRAINED, drafting, trained
from tests.tiny import tiny_target

PROMPTS = prompts(1, 9, 26)
LENGTH = 20


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", max_positions=256, **SIZE)


@pytest.fixture(scope="module")
def qwen() -> Target:
    return tiny_target("qwen3", **SIZE)


def requests(of: Sequence[tuple[int, ...]] = PROMPTS, **params: Any) -> list[Request]:
    settings = [{"max_tokens": LENGTH, "ignore_eos": True, "seed": i} | params for i in range(len(of))]
    return [Request(p, SamplingParams(**own)) for p, own in zip(of, settings, strict=True)]


class Helped:
    """A drafter whose first drafts are put right, 0, 1, 2 .. of them in turn, so that random weights get drafts accepted.

    What the drafter itself made of the context is in ``own``, by sequence (its anchor's position) and text.
    """

    def __init__(self, drafter: Drafter, texts: Sequence[Sequence[int]]):
        self.drafter, self.texts, self.turn = drafter, [tuple(text) for text in texts], 0
        self.taps, self.draft_ids, self.max_draft = drafter.taps, drafter.draft_ids, drafter.max_draft
        self.memory_shape, self.remember, self.max_nodes = drafter.memory_shape, drafter.remember, drafter.max_nodes
        self.reads_history = True
        self.own: dict[tuple[int, ...], list[int]] = {}

    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft:
        assert context.history is not None
        draft = self.drafter.propose(context, k, choose)
        tokens = draft.tokens.clone()
        for row, history in enumerate(context.history):
            self.own[history] = tokens[row].tolist()
            text = next(text for text in self.texts if text[: len(history)] == history)
            right = list(text[len(history) : len(history) + self.turn % (k + 1)])
            tokens[row, : len(right)] = torch.tensor(right, dtype=torch.long)
        self.turn += 1
        return Draft(tokens, None)


# -- greedy ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTING)
def test_greedy_text_is_the_targets(target: Target, qwen: Target, name: str) -> None:
    for model in (target, qwen):
        same_answers(Engine(model, drafting(model, name)).generate(requests()), Engine(model).generate(requests()))


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("name", DRAFTING)
def test_shorter_drafts(target: Target, name: str, k: int) -> None:
    same_answers(Engine(target, drafting(target, name), k).generate(requests()), Engine(target).generate(requests()))


def seen_afresh(target: Target, drafter: Drafter, history: tuple[int, ...], k: int) -> list[int]:
    """What a drafter drafts behind a text that is run at once, with what it keeps of it made at once."""
    length = len(history) - 1
    cache = target.new_cache(1, length + k + 1)
    output = target.forward(torch.tensor([history[:-1]]), cache, drafter.taps)
    cache.advance([length])
    memory = None
    if drafter.memory_shape is not None:
        memory = KVCache(drafter.memory_shape, 1, length, torch.float32, "cpu")
        kept = drafter.remember(output.taps, torch.tensor([history[1:]]), torch.arange(length)[None], None)
        memory.stage(length)
        for layer, (keys, values) in enumerate(kept):
            memory.update(keys, values, layer)
        memory.advance([length])
    anchor, position = torch.tensor([[history[-1]]]), torch.tensor([[length]])
    context = DraftContext(anchor, position, output.taps[:, -1:], cache.view(), None if memory is None else memory.view())
    return drafter.propose(context, k).tokens[0].tolist()


@pytest.mark.parametrize("name", TRAINED)
def test_the_context_of_every_step_is_whole(target: Target, name: str) -> None:
    """After any number of accepted drafts, in a batch that shrinks and is refilled, a drafter sees what a fresh run gives it."""
    asked = [
        Request(p, SamplingParams(max_tokens=n, ignore_eos=True))
        for p, n in zip(prompts(1, 9, 26, 13), (20, 7, 14, 20), strict=True)
    ]
    plain = Engine(target).generate(asked)
    helped = Helped(trained(target, name), [(*r.prompt, *a.tokens, *[0] * 9) for r, a in zip(asked, plain, strict=True)])
    results = Engine(target, helped, max_batch=3).generate(asked)
    same_answers(results, plain)
    assert {run for r in results for run in r.runs[:-1]} == set(range(1, helped.max_draft + 2))
    for history, drafts in helped.own.items():
        assert drafts == seen_afresh(target, helped.drafter, history, len(drafts)), f"behind {len(history)} tokens"


def test_a_memory_of_something_else_would_be_seen(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: here what is kept of a chunk is in the wrong order. The text stays right all the same."""
    drafter = trained(target, "dflash")
    remember = drafter.remember

    def shifted(taps: Tensor, following: Tensor, positions: Tensor, past: Any) -> Any:
        return remember(taps.flip(1), following, positions, past)

    monkeypatch.setattr(drafter, "remember", shifted)
    [asked] = requests(prompts(12))
    [plain] = Engine(target).generate([asked])
    helped = Helped(drafter, [(*asked.prompt, *plain.tokens, *[0] * 9)])
    same_answers(Engine(target, helped).generate([asked]), [plain])
    monkeypatch.undo()
    assert any(d != seen_afresh(target, drafter, history, len(d)) for history, d in helped.own.items())


# -- sampled -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTING)
def test_seeded_text_is_free_of_its_neighbours(target: Target, name: str) -> None:
    drafter = drafting(target, name)
    asked = requests(temperature=1.0, top_p=0.95, max_tokens=12)
    alone = [Engine(target, drafter).generate([request])[0] for request in asked]
    assert Engine(target, drafter).generate(asked) == alone
    assert Engine(target, drafter, max_batch=2).generate(asked[::-1])[::-1] == alone


@pytest.mark.parametrize("name", DRAFTING)
def test_greedy_and_sampled_rows_share_a_batch(target: Target, name: str) -> None:
    drafter = drafting(target, name)
    asked = [*requests(PROMPTS[:2]), *requests(PROMPTS[1:], temperature=0.8, repetition_penalty=1.2, max_tokens=12)]
    alone = [Engine(target, drafter).generate([request])[0] for request in asked]
    assert Engine(target, drafter).generate(asked) == alone
    same_answers(alone[:2], Engine(target).generate(asked[:2]))


# -- conversations -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", DRAFTING)
def test_every_turn_is_as_if_run_from_the_beginning(target: Target, name: str, temperature: float) -> None:
    drafter: AnyDrafter = drafting(target, name)
    session = Session(target, drafter, system="be brief")
    for text in ("hi", "and then?", "well"):
        wanted = fresh(session, text, temperature=temperature)
        assert ask(session, text, temperature=temperature) == wanted


@pytest.mark.parametrize("name", DRAFTING)
def test_a_turn_taken_back(target: Target, name: str) -> None:
    """What was kept of an answer is not used for another conversation that begins alike."""
    session = Session(target, drafting(target, name))
    ask(session, "hello there")
    del session.messages[1:]
    session.messages[0]["content"] = "hello thereafter"
    wanted = fresh(session, "go on", temperature=0.0)
    assert ask(session, "go on", temperature=0.0) == wanted
