"""A drafter that stops where it doubts: what its chances are, what it leaves out, and that the text stays the target's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hspec.api import load_drafter
from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.drafters.context import Draft, DraftContext
from hspec.drafters.drafter import Drafter
from hspec.drafters.lookup_first import LookupFirst
from hspec.drafters.source import NOTHING, Around, split, unwrapped
from hspec.drafters.while_sure import WhileSure
from hspec.errors import UsageError
from hspec.targets.target import Target
from tests.decoding.test_engine import prompts
from tests.drafters.test_ngram import repetitive
from tests.methods import TRAINED, trained
from tests.saved import loaded, save_drafter_for, save_target

CONFIDENT = ["hspec", "hspec-no-state", "dspark", "mamba-only"]


# -- chances -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIDENT)
def test_chances_are_what_the_head_was_trained_to_say(target: Target, name: str) -> None:
    """Training sees slots behind true tokens; behind the tokens that were drafted it must say what drafting says."""
    drafter = trained(target, name)
    tokens = torch.tensor([prompts(20)[0], prompts(21)[0][:20]])
    cache = target.new_cache(2, 20)
    output = target.forward(tokens, cache, drafter.taps)
    cache.advance([20, 20])
    memory = None
    if drafter.memory_shape is not None:
        from hspec.decoding.state import DecodingState

        state = DecodingState.new(target, drafter.memory_shape, 2, 20)
        state.keep(drafter.remember(output.taps, tokens, torch.arange(20).repeat(2, 1), None))
        assert state.memory is not None
        state.memory.advance([20, 20])
        memory = state.memory.view()
    anchors = torch.tensor([[5], [9]])
    context = DraftContext(anchors, torch.full((2, 1), 20), output.taps[:, -1:], cache.view(), memory)
    k = drafter.max_draft
    assert drafter.propose(context, k).chances is None  # nobody has asked
    drafter.says_chances = True
    draft = drafter.propose(context, k)
    previous = torch.cat((anchors, draft.tokens[:, :-1]), dim=1)
    logits = drafter.confidence_logits(drafter.predict(context, previous[:, None]).hidden, previous)
    assert draft.chances is not None and draft.chances.shape == (2, k)
    torch.testing.assert_close(draft.chances, logits.sigmoid().cumprod(1), atol=1e-5, rtol=1e-4)
    assert float(draft.chances[:, 0].std()) > 0


class Saying:
    """Drafts 50, 51 .. and says of each what chance it has."""

    draft_ids, taps, memory_shape, max_draft, max_nodes, reads_history = torch.arange(99), (), None, 5, 5, False
    embedding, confidence = torch.zeros(99, 1), object()

    def __init__(self, chances: list[list[float]]):
        self.chances = torch.tensor(chances)

    def propose(self, context: DraftContext, k: int, choose: object) -> Draft:
        count = len(self.chances)
        return Draft(torch.arange(50, 50 + k).repeat(count, 1), None, chances=self.chances[:, :k])


@given(st.lists(st.lists(st.floats(0.05, 1.0), min_size=4, max_size=4), min_size=1, max_size=5), st.floats(0.01, 0.99))
def test_a_draft_is_tested_if_it_and_all_before_it_are_likely_enough(steps: list[list[float]], least: float) -> None:
    chances = torch.tensor(steps).cumprod(1)
    draft = WhileSure(Saying(chances.tolist()), least).propose(None, 4)  # type: ignore[arg-type]
    assert draft.counts is not None and draft.tokens.shape == (len(steps), 4)
    least = float(torch.tensor(least))  # chances are fp32
    for own, count in zip(chances.tolist(), draft.counts, strict=True):
        assert all(chance >= least for chance in own[:count]) and (count == 4 or own[count] < least)


def test_a_drafter_that_says_nothing_is_refused(target: Target) -> None:
    with pytest.raises(UsageError, match=r"this drafter \(dflash\) has no confidence head, .*: leave \+sure out"):
        WhileSure(trained(target, "dflash"), 0.5)


# -- decoding ----------------------------------------------------------------------------------------------------

PARAMS = SamplingParams(max_tokens=40, ignore_eos=True)


def median_chance(target: Target, drafter: Drafter, asked: list[Request]) -> float:
    """Below which half of the drafts of these requests' steps lie, so that some are left out and some are not."""
    seen: list[torch.Tensor] = []

    class Watching(WhileSure):
        def propose(self, context: DraftContext, k: int, choose: object = None) -> Draft:
            draft = self.drafter.propose(context, k, choose)  # type: ignore[arg-type]
            assert draft.chances is not None
            seen.append(draft.chances.flatten())
            return draft

    Engine(target, Watching(drafter, 0.5)).generate(asked)
    return float(torch.cat(seen).median())


@pytest.mark.parametrize("name", [n for n in TRAINED if n in CONFIDENT])
@pytest.mark.parametrize("lookup", [False, True], ids=["alone", "with lookup"])
def test_greedy_text_is_the_targets(target: Target, name: str, lookup: bool) -> None:
    drafter = trained(target, name)
    asked = [Request(p, PARAMS) for p in (repetitive(target), *prompts(1, 12, 30), (5, 6) * 8)]
    around = Around(lookup, median_chance(target, drafter, asked))
    plain, sure, always = (Engine(target, d).generate(asked) for d in (None, around.put(drafter), drafter))
    assert [(r.tokens, r.text, r.finish_reason) for r in sure] == [(r.tokens, r.text, r.finish_reason) for r in plain]
    tested = [sum(sum(r.counters.reached) for r in results) for results in (sure, always)]
    assert lookup or 0 < tested[0] < tested[1]


def test_nobody_is_sure(target: Target) -> None:
    """Then every step is a plain one."""
    drafter = trained(target, "hspec")
    asked = [Request(p, PARAMS) for p in prompts(3, 17)]
    plain, sure = (Engine(target, d).generate(asked) for d in (None, WhileSure(drafter, 1 - 1e-9)))
    assert sure == plain and all(not sum(r.counters.reached) for r in sure)


# -- by name -----------------------------------------------------------------------------------------------------


def test_it_is_loaded_by_its_ending(tmp_path: Path) -> None:
    target = loaded(save_target(tmp_path / "target"))
    folder = save_drafter_for(target, tmp_path / "mine")
    sure, both = load_drafter(f"{folder}+sure0.25", target), load_drafter(f"{folder}+ngram+sure0.25", target)
    assert isinstance(sure, WhileSure) and sure.least == 0.25 and unwrapped(sure)[1] == Around(False, 0.25)
    assert isinstance(both, LookupFirst) and isinstance(both.drafter, WhileSure) and unwrapped(both)[1] == Around(True, 0.25)
    plain = load_drafter(folder, target)
    assert unwrapped(plain) == (plain, NOTHING) and isinstance(unwrapped(both)[0], Drafter)
    request = [Request((5, 9, 7), PARAMS)]  # its confidence head is packed with the rest
    assert Engine(target, both).generate(request)[0].tokens == Engine(target).generate(request)[0].tokens


@pytest.mark.parametrize("around", [NOTHING, Around(True), Around(False, 0.4), Around(True, 0.05)], ids=str)
def test_endings_and_what_they_stand_for(around: Around) -> None:
    assert split(f"some/where{around.endings}") == ("some/where", around)


def test_endings_in_any_order_and_of_nothing() -> None:
    assert split("a+ngram+sure0.3") == split("a+sure0.3+ngram") == ("a", Around(True, 0.3))
    assert split("+ngram") == (None, Around(True)) and split("+sure0.5") == (None, Around(False, 0.5))  # the one that ships
    assert split(None) == (None, NOTHING) and split("ngram") == ("ngram", NOTHING) and split("a+b") == ("a+b", NOTHING)


def test_a_folder_of_that_name_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a+ngram").mkdir()
    assert split(tmp_path / "a+ngram") == (tmp_path / "a+ngram", NOTHING)
    assert split(f"{tmp_path / 'a+ngram'}+sure0.5") == (str(tmp_path / "a+ngram"), Around(False, 0.5))
    assert split(tmp_path / "b+ngram") == (str(tmp_path / "b"), Around(True))


@pytest.mark.parametrize("chance", ["", "0", "1", "-0.5", "2", "nan", "half", "0.4x"])
def test_chances_that_are_none_are_refused(chance: str) -> None:
    with pytest.raises(UsageError, match=r"behind \+sure a chance above 0 and below 1 is needed, as in \+sure0.4"):
        split(f"mine+sure{chance}")


@pytest.mark.parametrize("wrong", ["ngram+ngram", "ngram+sure0.3"])
def test_nothing_is_put_around_lookup_alone(wrong: str) -> None:
    with pytest.raises(UsageError, match=r"ngram is no trained drafter: give it alone, or a drafter's folder with \+ngram"):
        split(wrong)


@pytest.mark.parametrize("twice", ["a+ngram+ngram", "a+sure0.2+sure0.3", "a+sure0.2+ngram+sure0.2"])
def test_an_ending_twice_is_refused(twice: str) -> None:
    with pytest.raises(UsageError, match="stands there 2 times, leave it there once"):
        split(twice)
