"""A drafter with prompt lookup before it: who drafts what, and that the text stays the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hspec.api import drafter_folder, load_drafter
from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request, Result
from hspec.decoding.session import Session
from hspec.drafters.context import Draft, DraftContext
from hspec.drafters.drafter import Drafter
from hspec.drafters.lookup_first import LookupFirst
from hspec.drafters.ngram import NgramDrafter
from hspec.drafters.tree import DraftTree
from hspec.errors import UsageError
from hspec.targets.target import Target
from tests.decoding.test_engine import prompts
from tests.decoding.test_session import ask, fresh
from tests.drafters.test_ngram import context, repetitive
from tests.methods import TRAINED, trained
from tests.saved import loaded, save_drafter_for, save_target

FOUND, OTHER, NEW = (1, 2, 3, 4, 5, 6, 1, 2, 3), (7, 8, 9, 7, 8, 9), (1, 2, 3)


class Fixed:
    """Drafts 50, 51 .. for everyone, drawn from half of each row's mass."""

    draft_ids, taps, memory_shape, max_draft, max_nodes = torch.arange(99), (), None, 5, 5

    def __init__(self, sampled: bool = True, counts: tuple[int, ...] | None = None):
        self.sampled, self.counts, self.asked = sampled, counts, 0

    def propose(self, context: DraftContext, k: int, choose: object) -> Draft:
        self.asked += 1
        count = len(context.anchors)
        q = torch.full((count, k, 99), 0.5) if self.sampled else None
        return Draft(torch.arange(50, 50 + k).repeat(count, 1), q, self.counts)


def drafting(drafter: object, most: int = 4) -> LookupFirst:
    return LookupFirst(drafter, NgramDrafter(99, max_draft=most, longest=3, shortest=3))  # type: ignore[arg-type]


# -- who drafts --------------------------------------------------------------------------------------------------


def test_each_row_is_copied_or_drafted() -> None:
    draft = drafting(Fixed()).propose(context(FOUND, NEW, OTHER), 2)
    assert draft.counts == (4, 2, 3) and draft.one_hot == (True, False, True)
    assert [own[:n] for own, n in zip(draft.tokens.tolist(), draft.counts)] == [[4, 5, 6, 1], [50, 51], [7, 8, 9]]
    assert draft.probabilities is not None and draft.probabilities.shape == (3, 2, 99)


def test_copies_that_are_shorter_than_drafts() -> None:
    draft = drafting(Fixed(sampled=False), most=2).propose(context(FOUND, NEW), 5)
    assert draft.counts == (2, 5) and draft.tokens.tolist() == [[4, 5, 0, 0, 0], [50, 51, 52, 53, 54]]
    assert draft.probabilities is None


def test_the_drafter_is_asked_only_where_it_must_be() -> None:
    fixed = Fixed()
    draft = drafting(fixed).propose(context(FOUND, OTHER), 2)
    assert fixed.asked == 0 and draft.counts == (4, 3) and draft.probabilities is None
    alone = drafting(fixed).propose(context(NEW, NEW), 2)
    assert fixed.asked == 1 and alone.counts is None and alone.one_hot is None and alone.tokens.tolist() == [[50, 51]] * 2


def test_a_drafter_that_drafts_unevenly_keeps_its_counts() -> None:
    draft = drafting(Fixed(counts=(2, 1, 0))).propose(context(FOUND, NEW, NEW), 2)
    assert draft.counts == (4, 1, 0)


def test_a_chain_among_trees() -> None:
    class Branching(Fixed):
        max_nodes = 9

        def propose(self, context: DraftContext, k: int, choose: object) -> Draft:
            return Draft.of_trees([DraftTree.of([[50, 51], [60]])] * len(context.anchors))

    both = drafting(Branching())
    draft = both.propose(context(FOUND, NEW), 2)
    assert draft.trees == (DraftTree.of([[4, 5, 6, 1]]), DraftTree.of([[50, 51], [60]]))
    assert both.max_nodes == 9 and both.max_draft == 5 and drafting(Branching(), most=12).max_nodes == 12


# -- decoding ----------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def run(target: Target, asked: list[Request], drafter: Drafter | LookupFirst | None, batch: int = 16) -> list[Result]:
    return Engine(target, drafter, max_batch=batch).generate(asked)


def with_lookup(drafter: Drafter) -> LookupFirst:
    """Short suffixes: a tiny target seldom says three tokens twice."""
    return LookupFirst(drafter, NgramDrafter(drafter.embedding.shape[0], longest=2, shortest=1))


@pytest.mark.parametrize("name", TRAINED)
def test_greedy_text_is_the_targets(target: Target, name: str) -> None:
    """Rows that copy stand beside rows that do not, and a row changes from one to the other; also with memory, and with trees."""
    drafter = trained(target, name)
    asked = [Request(p, PARAMS) for p in (repetitive(target), *prompts(1, 12, 30), (5, 6) * 8)]
    plain, both, alone = (run(target, asked, d) for d in (None, with_lookup(drafter), drafter))
    assert [(r.tokens, r.text, r.finish_reason) for r in both] == [(r.tokens, r.text, r.finish_reason) for r in plain]
    assert [r.runs for r in both] != [r.runs for r in alone]


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_neighbours_change_nothing(target: Target, temperature: float) -> None:
    both = with_lookup(trained(target, "hspec"))
    asked = [
        Request(p, SamplingParams(max_tokens=30, temperature=temperature, seed=i, ignore_eos=True))
        for i, p in enumerate([repetitive(target), *prompts(1, 20), (5, 6) * 12])
    ]
    alone = [run(target, [request], both)[0] for request in asked]
    assert run(target, asked, both) == alone == run(target, asked, both, batch=2)


def test_conversations(target: Target) -> None:
    session = Session(target, with_lookup(trained(target, "dspark")))
    for text in ("say it again and again", "say it again and again", "and again"):
        wanted = fresh(session, text)
        assert ask(session, text) == wanted


# -- by name -----------------------------------------------------------------------------------------------------


def test_it_is_loaded_by_its_suffix(tmp_path: Path) -> None:
    target = loaded(save_target(tmp_path / "target"))
    folder = save_drafter_for(target, tmp_path / "mine")
    both, alone = load_drafter(f"{folder}+ngram", target), load_drafter(folder, target)
    assert isinstance(both, LookupFirst) and isinstance(alone, Drafter) and both.lookup.shortest == 3
    assert both.taps == alone.taps and both.max_draft == alone.max_draft and both.max_nodes == 10
    with pytest.raises(UsageError, match=r"other"):
        load_drafter(f"{tmp_path / 'other'}+ngram", target)
    with pytest.raises(UsageError, match=r"is for generate, chat, measure, eval and serve: leave \+ngram out here"):
        drafter_folder(f"{folder}+ngram", target.name)
