"""Prompt lookup: what it finds, and that decoding with it changes nothing but the number of steps."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Literal

import pytest
import torch

from hspec.api import drafter_folder, load_drafter
from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request, Result
from hspec.decoding.session import Session
from hspec.drafters.context import DraftContext
from hspec.drafters.ngram import NgramDrafter
from hspec.errors import UsageError
from hspec.targets.cache import KVView
from hspec.targets.target import Target
from tests.decoding.test_engine import prompts
from tests.decoding.test_session import ask, fresh
from tests.tiny import tiny_target


def naive(tokens: list[int], k: int, longest: int = 4, shortest: int = 2) -> list[int]:
    for n in range(longest, shortest - 1, -1):
        for start in range(len(tokens) - n - 1, -1, -1):
            if tokens[start : start + n] == tokens[-n:] and n < len(tokens):
                return tokens[start + n : start + n + k]
    return []


# -- looking up --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "wanted"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3, 4], [9, 1, 2]),  # four
        ([0, 2, 3, 4, 9, 1, 2, 3, 4], [9, 1, 2]),  # three
        ([0, 0, 3, 4, 9, 1, 2, 3, 4], [9, 1, 2]),  # two
        ([0, 0, 0, 4, 9, 1, 2, 3, 4], []),  # one is too few
        ([3, 4, 5, 3, 4, 6, 7, 3, 4], [6, 7, 3]),  # the most recent ...
        ([2, 3, 4, 5, 3, 4, 6, 7, 2, 3, 4], [5, 3, 4]),  # ... of the longest
        ([7, 7, 7], [7]),  # overlapping itself
        ([1, 2, 1, 2], [1, 2]),  # what followed, and no more than there is
        ([1, 1], []),
        ([1], []),
        ([1, 2, 3], []),
    ],
    ids=str,
)
def test_what_is_found(tokens: list[int], wanted: list[int]) -> None:
    assert NgramDrafter(211).continuation(tokens, 3) == wanted == naive(tokens, 3)


@pytest.mark.parametrize("longest, shortest", [(4, 2), (3, 3), (2, 1)])
def test_against_a_slow_search(longest: int, shortest: int) -> None:
    drafter = NgramDrafter(5, longest=longest, shortest=shortest)
    generator = torch.Generator().manual_seed(1)
    found = 0
    for length in range(1, 60):
        tokens = torch.randint(0, 5, (length,), generator=generator).tolist()
        own = drafter.continuation(tuple(tokens), 4)
        assert own == naive(tokens, 4, longest, shortest)
        found += bool(own)
    assert found > 2


def test_lengths_that_are_none() -> None:
    for settings in ({"longest": 1}, {"shortest": 0}, {"max_draft": 0}):
        with pytest.raises(UsageError, match="1 <= shortest <= longest is needed"):
            NgramDrafter(211, **settings)  # type: ignore[arg-type]


def test_a_long_text_takes_milliseconds() -> None:
    """The worst case, nothing found in 100,000 tokens."""
    text = tuple(range(100_000))
    drafter = NgramDrafter(200_000)
    begun = time.perf_counter()
    assert drafter.continuation(text, 8) == []
    assert time.perf_counter() - begun < 0.5


def context(*histories: tuple[int, ...]) -> DraftContext:
    anchors = torch.tensor([[h[-1]] for h in histories])
    positions = torch.tensor([[len(h) - 1] for h in histories])
    return DraftContext(anchors, positions, torch.zeros(len(histories), 1, 0, 8), KVView([], [], ()), history=histories)


def test_a_batch_drafts_what_each_finds() -> None:
    draft = NgramDrafter(211).propose(context((1, 2, 3, 4, 5, 1, 2), (1, 2, 3), (7, 7, 7)), 4)
    assert draft.tokens.tolist() == [[3, 4, 5, 1], [0, 0, 0, 0], [7, 0, 0, 0]]
    assert draft.counts == (4, 0, 1) and draft.probabilities is None
    assert NgramDrafter(211).propose(context((7, 7, 7)), 4).tokens.tolist() == [[7]], "no wider than what was found"
    assert NgramDrafter(211).propose(context((1, 2)), 4).counts == (0,)


# -- decoding ----------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def repetitive(target: Target) -> tuple[int, ...]:
    """The target's own text, and then its beginning again."""
    [start] = prompts(9)
    [answer] = Engine(target).generate([Request(start, PARAMS)])
    return (*start, *answer.tokens, *start)


def run(target: Target, asked: list[Request], ngram: bool = True, batch: int = 16) -> list[Result]:
    return Engine(target, NgramDrafter(target.vocab_size) if ngram else None, max_batch=batch).generate(asked)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_text_is_the_targets_in_fewer_steps(family: Literal["llama", "qwen3"]) -> None:
    """A target whose next token is a function of the last one alone comes to repeat itself."""
    target = tiny_target(family, layers=2, linears="plain")
    for layer in target.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    asked = [Request(p, PARAMS.model_copy(update={"max_tokens": 120})) for p in prompts(1, 12, 30)]
    plain, drafted = run(target, asked, ngram=False), run(target, asked)
    assert [(r.tokens, r.text, r.finish_reason) for r in drafted] == [(r.tokens, r.text, r.finish_reason) for r in plain]
    assert all(r.counters.tau > 1.5 for r in drafted)
    assert max(max(r.runs) for r in drafted) > 4, "several drafts of one step were accepted"


@pytest.mark.parametrize("family", ["target", "qwen_target"])
def test_greedy_text_with_few_hits_is_the_targets(family: str, request: pytest.FixtureRequest) -> None:
    target = request.getfixturevalue(family)
    asked = [Request(p, PARAMS) for p in (repetitive(target), *prompts(1, 12, 30))]
    plain, drafted = run(target, asked, ngram=False), run(target, asked)
    assert [(r.tokens, r.text, r.finish_reason) for r in drafted] == [(r.tokens, r.text, r.finish_reason) for r in plain]


def test_where_nothing_is_found_steps_are_plain(target: Target) -> None:
    """No row is run in vain: the target sees single tokens."""
    seen: list[int] = []
    forward = target.forward

    class Watched(Engine):
        def _step(self, running, state):  # type: ignore[no-untyped-def]
            def counting(tokens, *rest):  # type: ignore[no-untyped-def]
                seen.append(tokens.shape[1])
                return forward(tokens, *rest)

            target.forward = counting  # type: ignore[method-assign]
            try:
                return super()._step(running, state)
            finally:
                target.forward = forward  # type: ignore[method-assign]

    [result] = Watched(target, NgramDrafter(target.vocab_size, longest=40, shortest=40)).generate([Request((5, 6, 7), PARAMS)])
    assert set(seen) == {1} and result.counters.tau == 1.0 and not any(result.drafted)


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_neighbours_change_nothing(target: Target, temperature: float) -> None:
    """A batch of rows that find much, little and nothing."""
    asked = [
        Request(p, SamplingParams(max_tokens=30, temperature=temperature, seed=i, ignore_eos=True))
        for i, p in enumerate([repetitive(target), *prompts(1, 20), (5, 6) * 12])
    ]
    alone = [run(target, [request])[0] for request in asked]
    assert run(target, asked) == alone == run(target, asked, batch=2)
    assert sum(sum(r.drafted) for r in alone) > 0


def test_conversations(target: Target) -> None:
    session = Session(target, load_drafter("ngram", target))
    for text in ("say it again and again", "say it again and again", "and again"):
        wanted = fresh(session, text)
        assert ask(session, text) == wanted


def test_it_is_loaded_by_name(target: Target, tmp_path: Path) -> None:
    drafter = load_drafter("ngram", target)
    assert isinstance(drafter, NgramDrafter)
    assert drafter.draft_ids.tolist() == list(range(target.vocab_size))
    drafter_folder("ngram", "x")  # what the command line asks before it loads anything
    (tmp_path / "ngram").mkdir()
    with pytest.raises(UsageError, match="is not a drafter: it has no config"):
        load_drafter(tmp_path / "ngram", target)  # a path is a path
