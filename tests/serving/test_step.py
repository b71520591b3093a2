"""A step of a served target gives the drafts that the embedded loop would have from the same state."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hspec.decoding.draft_sampler import DraftSampler
from hspec.drafters.context import DraftContext
from hspec.drafters.source import Around
from hspec.errors import HSpecError
from hspec.serving.pages import cpu_vec
from hspec.serving.rows import DraftRow, draft_rows
from hspec.serving.sampling import draft_params
from hspec.serving.step import Step, StepDrafter
from tests.serving.paged import cpu_vec_pages, shuffled_tables

BLOCK, BLOCKS, K = 8, 32, 3


def params(**changes: Any) -> SimpleNamespace:
    """Like ``vllm.SamplingParams``, as far as drafts depend on it."""
    defaults = {
        "temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": 3, "structured_outputs": None,
    }  # fmt: skip
    return SimpleNamespace(**(defaults | changes))


@pytest.fixture
def served(target, drafter):
    """Three requests behind a forward with rejected drafts; the second is still within its prompt."""
    lengths, rejected = [21, 9, 14], [2, 0, 0]
    tokens = torch.randint(3, 200, (3, 40))
    cache = target.new_cache(3, 48)
    taps = []
    for row, length in enumerate(lengths):
        own = cache.rows(row, row + 1)
        taps.append(target.prefill_chunks(tokens[row : row + 1, :length], own, drafter.taps).__next__().taps[0])
        cache.lengths[row] = length
    valid = [length - r for length, r in zip(lengths, rejected, strict=True)]
    tables = shuffled_tables(3, 40, BLOCK, BLOCKS)
    batched = torch.cat(taps)  # [rows, taps, hidden]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    step = Step(
        ids=["a", "b", "c"],
        params=[params(), params(), params()],
        sampled=[[int(t) for t in tokens[0, 17:20]], [], [int(tokens[2, 14])]],
        drafted=[4, 0, 0],
        query_ends=ends,
        lengths=lengths,
        known=[valid[0] + 1, 9, valid[2] + 1],
        tables=tables,
        taps=[batched[:, f] for f in range(batched.shape[1])],
        k=K,
        history=lambda i: tokens[i, : valid[i] + 1].tolist(),
    )
    runner = StepDrafter(drafter, K)
    runner.pages.layout = cpu_vec
    for layer in drafter.config.kv_layers:
        keys, values = cache.view().layer(layer)
        runner.pages.layers[layer] = cpu_vec_pages(keys[:, :, :40], values[:, :, :40], tables, BLOCK, BLOCKS)
    return SimpleNamespace(runner=runner, step=step, cache=cache, taps=taps, tokens=tokens, valid=valid, drafter=drafter)


def embedded(served, row: int, own: Any):
    """The embedded drafter on one sequence."""
    p = served.valid[row]
    context = DraftContext(
        anchors=served.tokens[row, p].view(1, 1) if row == 2 else torch.tensor([[served.step.sampled[row][-1]]]),
        positions=torch.tensor([[p]]),
        taps=served.taps[row][p - 1][None, None],
        kv=served.cache.rows(row, row + 1).view(),
    )
    history = torch.tensor(sorted(set(served.step.history(row)))) if own.repetition_penalty != 1.0 else None
    return served.drafter.propose(context, K, DraftSampler([own], [p], served.drafter.draft_ids, [history]))


def test_greedy_drafts_are_the_embedded_ones(served):
    proposal = served.runner.draft(served.step)
    assert proposal.tokens[1] == []
    assert proposal.probabilities is None
    for row in (0, 2):
        assert proposal.tokens[row] == embedded(served, row, draft_params(params())).tokens[0].tolist()


def test_sampled_drafts_come_with_what_they_were_drawn_from(served):
    own = params(temperature=0.9, top_k=20, top_p=0.9, repetition_penalty=1.2)
    served.step.params[0] = own
    proposal = served.runner.draft(served.step)
    expected = embedded(served, 0, draft_params(own))
    assert proposal.ids == ["a", "c"]
    assert proposal.tokens[0] == expected.tokens[0].tolist()
    q = proposal.probabilities
    assert q.shape == (2, K, served.drafter.config.target.vocab_size)
    assert torch.allclose(q.sum(-1), torch.ones(2, K), atol=1e-5)
    assert torch.allclose(q[0][:, served.drafter.draft_ids], expected.probabilities[0], atol=1e-5)
    for slot, token in enumerate(proposal.tokens[2]):  # a greedy neighbour is one-hot
        assert q[1, slot, token] == 1


def test_extremes_that_a_server_lets_through_do_not_end_it():
    """vLLM allows any top-p above 0 and any repetition penalty above 0; drafts may be drawn with others, the text is the same."""
    drawn = draft_params(params(temperature=1.0, top_p=1e-300, repetition_penalty=1e-40))
    assert 0 < drawn.top_p < 1e-6 and 0 < drawn.repetition_penalty < 1e-6
    assert draft_params(params(temperature=1.0, repetition_penalty=1e30)).repetition_penalty > 1e6


def test_drafts_under_a_grammar_are_greedy_and_one_hot(served):
    plain = served.runner.draft(served.step).tokens
    served.step.params[0] = params(temperature=1.0, structured_outputs=object())
    served.step.params[2] = params(temperature=1.0)
    proposal = served.runner.draft(served.step)
    assert proposal.tokens[0] == plain[0]
    assert proposal.probabilities[0].max(-1).values.tolist() == [1.0] * K


@pytest.fixture
def copying(served):
    """The same with lookup before it, and a third request whose last three tokens stood in it before, with two tokens behind them."""
    runner = StepDrafter(served.drafter, K, around=Around(lookup=True))
    runner.pages = served.runner.pages
    own = served.step.history
    step = replace(served.step, history=lambda i: [3, 4, 5, 6, 7, 11, 12, 5, 6, 7] if i == 2 else own(i))
    return SimpleNamespace(runner=runner, step=step)


def test_lookup_comes_first(served, copying):
    """One request copies three tokens, its neighbour drafts as without lookup."""
    proposal = copying.runner.draft(copying.step)
    assert proposal.tokens == [served.runner.draft(served.step).tokens[0], [], [11, 12, 5]]
    assert proposal.probabilities is None
    fewer = copying.runner.draft(replace(copying.step, k=2))
    assert fewer.tokens[2] == [11, 12] and len(fewer.tokens[0]) == 2


def test_copies_are_certain_where_neighbours_draw(served, copying):
    for row in (0, 2):
        copying.step.params[row] = params(temperature=0.9)
    proposal = copying.runner.draft(copying.step)
    assert proposal.tokens[2] == [11, 12, 5] and proposal.ids == ["a", "c"]
    q = proposal.probabilities
    assert [q[1, slot, token].item() for slot, token in enumerate((11, 12, 5))] == [1.0] * K
    assert torch.allclose(q.sum(-1), torch.ones(2, K), atol=1e-5) and float(q[0].max()) < 1


def test_nothing_is_kept_between_steps(served):
    first = served.runner.draft(served.step)
    assert served.runner.draft(served.step).tokens == first.tokens


def test_a_seed_is_made_up_where_there_is_none():
    seeds = {draft_params(params(temperature=1.0, seed=None)).seed for _ in range(8)}
    assert len(seeds) == 8
    assert draft_params(params(temperature=1e-6)).greedy


def test_rows():
    rows = draft_rows([[7, 8], [], [9]], [4, 0, 0], [5, 15, 22], [25, 10, 7], [23, 30, 8])
    assert rows == [DraftRow(0, 8, 22, 1), DraftRow(2, 9, 7, 21)]


@pytest.mark.parametrize("known", [22, 24])
def test_contradicting_rows_are_refused(known):
    with pytest.raises(HSpecError, match="not the one that this plugin knows"):
        draft_rows([[7, 8]], [4], [5], [25], [known])


def test_doubted_drafts_are_left_out(served):
    """Of each request those that are unlikely to stand; the distributions of the others stay."""
    for row in (0, 2):
        served.step.params[row] = params(temperature=0.9)
    always = served.runner.draft(served.step)
    served.drafter.says_chances = True
    chances = [embedded(served, row, draft_params(served.step.params[row])).chances[0].tolist() for row in (0, 2)]
    least = sorted(chance for own in chances for chance in own)[K]  # so that some stay and some go
    runner = StepDrafter(served.drafter, K, around=Around(least=least))
    runner.pages = served.runner.pages
    sure = runner.draft(served.step)
    for row, own in zip((0, 2), chances, strict=True):
        assert sure.tokens[row] == always.tokens[row][: sum(chance >= least for chance in own)]
    assert 0 < len(sure.tokens[0]) + len(sure.tokens[2]) < 2 * K and sure.tokens[1] == []
    assert torch.equal(sure.probabilities, always.probabilities)
