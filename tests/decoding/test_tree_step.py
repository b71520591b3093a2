"""The loop with drafts that branch: the text is plain decoding's own, token for token, at any temperature."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Counters, Request, Result
from hspec.decoding.session import Session
from hspec.drafters.context import Chooser, Draft, DraftContext
from hspec.drafters.tree import DraftTree
from hspec.targets.cache import CacheShape, KVCache, KVView
from hspec.targets.target import Target
from hspec.targets.template import ChatTemplate
from tests.decoding.replay import ReplayTreeDrafter, all_in_turn, random_plan
from tests.tiny import tiny_target

LENGTH, DEPTH = 40, 4
SIZE: dict[str, Any] = {"layers": 3, "hidden": 48}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 5},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.3, "seed": 6},
    {"repetition_penalty": 1.5},
    {"temperature": 1.3, "top_k": 50, "min_p": 0.01, "seed": 7, "draft": "greedy"},
]
PROMPTS = [(7, 20, 33), (9, 8, 7, 6, 5, 4), tuple(range(40, 60)), (3,), (90, 14)]


def requests(settings: Sequence[dict[str, Any]] = SETTINGS, **further: Any) -> list[Request]:
    common = {"max_tokens": LENGTH, "ignore_eos": True}
    return [Request(p, SamplingParams.model_validate(common | own | further)) for p, own in zip(PROMPTS, settings, strict=True)]


def known(target: Target, asked: list[Request]) -> list[list[int]]:
    return [[*r.prompt, *result.tokens] for r, result in zip(asked, Engine(target).generate(asked), strict=True)]


def replay(target: Target, asked: list[Request], start: int = 0, **settings: Any) -> ReplayTreeDrafter:
    return ReplayTreeDrafter(target, known(target, asked), all_in_turn(DEPTH, start), max_draft=DEPTH, **settings)


def same_answers(mine: list[Result], others: list[Result]) -> None:
    assert [(r.tokens, r.text, r.finish_reason) for r in mine] == [(r.tokens, r.text, r.finish_reason) for r in others]


def accepted_lengths(results: list[Result]) -> set[int]:
    return {run - 1 for result in results for run in result.runs[:-1]}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def either(request: pytest.FixtureRequest) -> Target:
    return tiny_target(request.param, **SIZE)


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target("llama", **SIZE)


# -- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [[{}] * 5, SETTINGS], ids=["greedy", "mixed"])
def test_the_text_is_plain_decodings(either: Target, settings: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is sampled: with trees it depends on the seed alone, not on what is drafted."""
    asked, paths, keep = requests(settings), [], KVCache.keep_paths
    monkeypatch.setattr(KVCache, "keep_paths", lambda cache, rows: (paths.extend(rows), keep(cache, rows)))
    for start in range(2):
        drafter = replay(either, asked, start)
        results = Engine(either, drafter).generate(asked)
        same_answers(results, Engine(either).generate(asked))
        assert accepted_lengths(results) == drafter.seen == set(range(DEPTH + 1))
    assert any(rows != list(range(len(rows))) for rows in paths), "a rollback by length would not do"


@pytest.mark.parametrize("k", [1, 2, 3])
def test_k_is_the_depth(target: Target, k: int) -> None:
    asked = requests()
    drafter = replay(target, asked)
    results = Engine(target, drafter, k).generate(asked)
    same_answers(results, Engine(target).generate(asked))
    assert drafter.depths == {k} and accepted_lengths(results) == set(range(k + 1))


def test_a_perfect_drafter_is_accepted_whole(target: Target) -> None:
    asked = requests(max_tokens=1 + 8 * (DEPTH + 1))
    drafter = replay(target, asked)
    drafter.right = lambda position: DEPTH
    for result in Engine(target, drafter).generate(asked):
        assert result.runs == [DEPTH + 1] * 8 and result.counters.acceptance == [1.0] * DEPTH
        assert result.drafted == [False, *([True] * DEPTH + [False]) * 8]


def test_noise(target: Target) -> None:
    asked = requests()
    results = Engine(target, ReplayTreeDrafter(target, max_draft=DEPTH)).generate(asked)
    same_answers(results, Engine(target).generate(asked))


def test_eos_inside_a_path() -> None:
    target = tiny_target("llama", **SIZE)
    longer = requests()
    texts = known(target, longer)
    ends = frozenset(text[len(r.prompt) + 9 + 4 * i] for i, (r, text) in enumerate(zip(longer, texts, strict=True)))
    target.template = ChatTemplate(target.tokenizer, extra_eos=ends)
    asked = requests(ignore_eos=False)
    plain, inside = Engine(target).generate(asked), 0
    assert all(result.finish_reason == "stop" for result in plain)
    for start in range(4):
        drafter = ReplayTreeDrafter(target, texts, all_in_turn(DEPTH, start), max_draft=DEPTH)
        results = Engine(target, drafter).generate(asked)
        same_answers(results, plain)
        inside += sum(r.drafted[-1] for r in results)
        assert all(r.counters.emitted == len(r.tokens) - 1 == sum(r.runs) for r in results)
    assert inside > 0


def test_stop_strings_and_max_tokens_inside_a_path(target: Target) -> None:
    longer = Engine(target).generate(requests())
    stop, reasons, inside = tuple(result.text[20:22] for result in longer), set(), 0
    texts = known(target, requests())
    for params in ({"stop": stop}, {"max_tokens": 13}, {"stop": stop[:1], "max_tokens": 25}):
        asked = requests(**params)
        plain = Engine(target).generate(asked)
        for start in range(3):
            drafter = ReplayTreeDrafter(target, texts, all_in_turn(DEPTH, start), max_draft=DEPTH)
            results = Engine(target, drafter).generate(asked)
            same_answers(results, plain)
            inside += sum(r.drafted[-1] for r in results)
        reasons |= {result.finish_reason for result in plain}
    assert reasons == {"stop", "length"} and inside > 0


# -- batches and limits ------------------------------------------------------------------------------------------------


def test_a_request_does_not_depend_on_its_neighbours(target: Target) -> None:
    """Nor on the shapes of their trees; text, counters and all."""
    asked = requests([{"max_tokens": 5 + 8 * i} | own for i, own in enumerate(SETTINGS)])
    drafter = ReplayTreeDrafter(target, known(target, asked), random_plan(DEPTH), max_draft=DEPTH)
    alone = [Engine(target, drafter).generate([request])[0] for request in asked]
    for max_batch, step in ((2, 1), (3, -1), (16, 1)):
        assert Engine(target, drafter, max_batch=max_batch).generate(asked[::step]) == alone[::step]
    assert accepted_lengths(alone) == set(range(DEPTH + 1))


class ChainsAndTrees(ReplayTreeDrafter):
    """Some of a batch's trees are chains, and some are empty."""

    def _tree(self, context: DraftContext, row: int, position: int, k: int) -> DraftTree:
        tree = super()._tree(context, row, position, k)
        return [DraftTree((), ()), DraftTree.of([self._planned(context, row, position, k)]), tree][position % 3]


def test_empty_trees_and_chains_beside_others(target: Target) -> None:
    asked = requests()
    drafter = ChainsAndTrees(target, known(target, asked), random_plan(DEPTH), max_draft=DEPTH)
    alone = [Engine(target, drafter).generate([request])[0] for request in asked]
    assert Engine(target, drafter).generate(asked) == alone
    same_answers(alone, Engine(target).generate(asked))


@pytest.fixture(scope="module")
def short() -> Target:
    return tiny_target("llama", max_positions=48, **SIZE)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_up_to_the_context_limit(short: Target, temperature: float) -> None:
    asked = [
        Request(tuple(range(50, 50 + n)), SamplingParams(max_tokens=500, ignore_eos=True, temperature=temperature, seed=n))
        for n in (1, 47, 20, 46, 45, 40)
    ]
    plain = Engine(short).generate(asked)
    assert [len(result.tokens) for result in plain] == [48 - len(request.prompt) for request in asked]
    texts = known(short, asked)
    for right in (random_plan(DEPTH), random_plan(DEPTH, 1), lambda position: DEPTH):
        drafter = ReplayTreeDrafter(short, texts, right, max_draft=DEPTH)
        alone = [Engine(short, drafter).generate([request])[0] for request in asked]
        same_answers(alone, plain)
        assert Engine(short, drafter, max_batch=4).generate(asked) == alone


def test_a_kept_state_has_room_for_a_tree_at_the_end(short: Target) -> None:
    [asked] = [Request(tuple(range(60, 70)), SamplingParams(max_tokens=500, ignore_eos=True))]
    drafter = ReplayTreeDrafter(short, known(short, [asked]), max_draft=DEPTH)
    engine = Engine(short, drafter)
    state = engine.new_state(1, short.max_positions)
    [fresh] = engine.generate([asked])
    assert [step.result for step in engine.stream([asked], state)][-1] == fresh
    assert state.cache.lengths == [47]


def test_a_conversation_with_trees() -> None:
    target = tiny_target("llama", max_positions=128, **SIZE)
    session = Session(target, ReplayTreeDrafter(target, max_draft=DEPTH))
    for text, most in (("hi", 9), ("and?", 9), ("well", 500)):
        prompt = target.template.encode([*session.messages, {"role": "user", "content": text}])
        params = SamplingParams(max_tokens=most, temperature=1.0, seed=4, ignore_eos=True)
        wanted = Engine(target, session.engine.drafter).generate([Request(tuple(prompt), params)])[0]
        assert [step.result for step in session.ask(text, params)][-1] == wanted
    assert len(prompt) + len(wanted.tokens) == 128, "up to the end of the context"


# -- counters ------------------------------------------------------------------------------------------------------------


class Fixed:
    """Drafts one tree, made from the text to come."""

    taps: Sequence[int] = ()
    memory_shape = None
    reads_history = True
    max_draft = 3
    max_nodes = 6

    def __init__(self, text: list[int], make: Callable[[list[int]], list[list[int]]]):
        self.text, self.make, self.draft_ids = text, make, torch.arange(211)

    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft:
        assert context.history is not None
        (own,) = context.history
        return Draft.of_trees([DraftTree.of(self.make([*self.text[len(own) :], 0, 0, 0]))])

    def remember(self, *_: Any) -> list[tuple[Tensor, Tensor]]:
        raise AssertionError


@pytest.mark.parametrize(
    "make, reached, accepted",
    [
        (lambda t: [[t[0] + 1], [t[0]]], [10], [10]),  # nothing was tested behind a leaf
        (lambda t: [[t[0] + 1, t[1]], [t[0], t[1] + 1], [t[0], t[1] + 2]], [10, 10], [10, 0]),  # two siblings are one position
        (lambda t: [[t[0] + 1], [t[0] + 2], [t[0] + 3]], [20], [0]),
        (lambda t: [[t[0], t[1], t[2] + 1], [t[0], t[1] + 1]], [7, 7, 6], [7, 7, 0]),
        (lambda t: [], [], []),
    ],
)
def test_what_is_counted(
    target: Target, make: Callable[[list[int]], list[list[int]]], reached: list[int], accepted: list[int]
) -> None:
    asked = requests(max_tokens=21)[:1]
    [text] = known(target, asked)
    [result] = Engine(target, Fixed(text, lambda t: make([x % 200 for x in t] if max(t) >= 208 else t))).generate(asked)
    assert [*asked[0].prompt, *result.tokens] == text
    assert (result.counters.reached, result.counters.accepted) == (reached, accepted)
    assert result.counters.emitted == 20


def test_more_nodes_than_there_is_room_for_are_the_drafters_fault(target: Target) -> None:
    asked = requests()[:1]
    with pytest.raises(AssertionError, match="a tree of 7 nodes by a drafter that gives 6 at most"):
        Engine(target, Fixed([], lambda _: [[i] for i in range(7)])).generate(asked)


# -- trees against chains --------------------------------------------------------------------------------------------------


class Preferred(ReplayTreeDrafter):
    """The first candidate of each tree alone: a chain."""

    def _tree(self, context: DraftContext, row: int, position: int, k: int) -> DraftTree:
        tree, path = super()._tree(context, row, position, k), list[int]()
        while below := tree.children[path[-1] + 1 if path else 0]:
            path.append(below[0])
        return DraftTree.of([[tree.tokens[node] for node in path]])


def test_a_second_branch_is_accepted_where_a_chain_fails(target: Target) -> None:
    """What trees are for: where the preferred draft is wrong and the next one right, a chain stops."""
    asked, tau = requests(), []
    texts = known(target, asked)
    for kind in (ReplayTreeDrafter, Preferred):
        pooled = Counters()
        for result in Engine(target, kind(target, texts, max_draft=DEPTH)).generate(asked):
            pooled.add(result.counters)
        tau.append(pooled.tau)
    assert tau[0] > 1.3 * tau[1] > 1.3


# -- what a drafter keeps --------------------------------------------------------------------------------------------------


class Remembering(ReplayTreeDrafter):
    """Keeps the last tap and the following token of every token, and checks them whenever it drafts."""

    reads_history = True

    def __init__(self, target: Target, *args: Any, **settings: Any):
        super().__init__(target, *args, **settings)
        self.memory_shape: CacheShape = CacheShape(1, 1, target.hidden_size)
        self.checked = 0

    def remember(self, taps: Tensor, following: Tensor, positions: Tensor, past: KVView | None) -> list[tuple[Tensor, Tensor]]:
        assert past is not None and positions[:, 0].tolist() == list(past.lengths)
        assert torch.equal(positions, positions[:, :1] + torch.arange(following.shape[1]))
        last = taps[:, :, -1]
        return [(last[:, None], following[:, None, :, None].expand(-1, 1, -1, last.shape[-1]).float())]

    def propose(self, context: DraftContext, k: int, choose: Chooser) -> Draft:
        assert context.memory is not None and context.history is not None
        assert context.memory.lengths == context.kv.lengths
        keys, values = context.memory.layer(0)
        for row, (own, length) in enumerate(zip(context.history, context.memory.lengths, strict=True)):
            assert values[row, 0, :length, 0].tolist() == list(own[1:])
            text = self._recognise(context, row, length)
            if text is not None:
                _, known_taps = self.traces[self.texts.index(text)]
                torch.testing.assert_close(keys[row, 0, :length], known_taps[:length, -1], atol=1e-3, rtol=1e-4)
                self.checked += 1
        return super().propose(context, k, choose)


@pytest.mark.parametrize("max_batch", [1, 2, 16])
def test_memory_holds_the_path_and_what_follows(target: Target, max_batch: int) -> None:
    asked = requests()
    drafter = Remembering(target, known(target, asked), random_plan(DEPTH), max_draft=DEPTH)
    results = Engine(target, drafter, max_batch=max_batch).generate(asked)
    same_answers(results, Engine(target).generate(asked))
    assert drafter.checked > 40 and accepted_lengths(results) == set(range(DEPTH + 1))
