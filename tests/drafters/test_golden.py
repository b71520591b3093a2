"""The drafter against numbers that the authors' own code computed, sub-layer by sub-layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hspec.drafters.context import Prefix
from hspec.drafters.parallel import ParallelDrafter
from tests.drafters.golden_case import LENGTH, GoldenCase, load_case
from tests.tiny import markov_bias

TOLERANCE = 1e-4
SLOTS = 8


@pytest.fixture(scope="module", params=["A", "B"])
def case(request: pytest.FixtureRequest) -> GoldenCase:
    return load_case(request.param)


def run(case: GoldenCase, anchors: list[int]) -> list[dict[str, Tensor]]:
    """Every value that the golden file has, for each anchor, from one forward over all of them."""
    d, context = case.drafter, case.context(anchors)
    trace: list[Tensor] = []
    hidden = d.backbone(context, SLOTS, trace)
    assert d.seed is not None
    z = d.seed.fuse(context.taps)
    states = d.seed(context.taps[0], d.config.pattern.count("mamba"))
    found = []
    for n, anchor in enumerate(anchors):
        values = {f"sub.{i}": x[0, n] for i, x in enumerate(trace)}
        values |= {"embed": d.embed_block(context.anchors, SLOTS)[0, n], "z": z[0, n], "hidden": hidden[0, n]}
        values["base_logits"] = d.base_logits(hidden[0, n])
        for k in range(len(d.seed.projections)):
            values[f"s_init.{k}"] = states[k][n]  # type: ignore[index]
        if d.causal is not None:
            previous = case.expected(anchor, "prev_token_ids")
            values["markov_logits"] = values["base_logits"] + markov_bias(d, previous)
            assert d.confidence is not None
            values["confidence_logits"] = d.confidence(hidden[0, n], d.causal.embed(previous))
        found.append(values)
    return found


def assert_golden(case: GoldenCase, anchor: int, found: dict[str, Tensor]) -> None:
    names = {name.split(".", 2)[2] for name in case.tensors if name.startswith(f"out.{anchor}.")}
    others = {"block_token_ids", "slot_positions", "attn_context_mask", "attn_block_mask", "prev_token_ids"}
    assert found.keys() == names - others
    for name, value in found.items():
        difference = float((value - case.expected(anchor, name)).abs().max())
        assert difference < TOLERANCE, f"anchor {anchor}: {name} is off by {difference:.1e}"


def test_all_anchors_in_one_forward(case: GoldenCase) -> None:
    """The trainer's path: N blocks against the whole sequence, masked."""
    for anchor, found in zip(case.anchors, run(case, case.anchors), strict=True):
        assert_golden(case, anchor, found)


def test_one_anchor_at_a_time(case: GoldenCase) -> None:
    """The decoding path: one block against exactly its window of the cache."""
    for anchor in case.anchors:
        assert_golden(case, anchor, run(case, [anchor])[0])


def test_visible_context_and_block(case: GoldenCase) -> None:
    attention = case.drafter.config.attention
    assert attention is not None
    for anchor in case.anchors:
        visible = Prefix.before(torch.tensor([[anchor]]), attention.window).mask(LENGTH)[0, 0]
        assert torch.equal(visible.expand(SLOTS, -1).to(torch.uint8), case.expected(anchor, "attn_context_mask"))
        block = torch.ones(SLOTS, SLOTS, dtype=torch.uint8)
        assert torch.equal(block.tril() if attention.causal_block else block, case.expected(anchor, "attn_block_mask"))


def test_inputs_of_the_block(case: GoldenCase) -> None:
    """Slot 0 is the anchor's real token, at its own position; the others are the mask token, one further each."""
    for anchor in case.anchors:
        tokens = case.expected(anchor, "block_token_ids")
        assert tokens[0] == case.tensors["in.input_ids"][anchor]
        assert set(tokens[1:].tolist()) == {case.raw["mask_token_id"]}
        assert case.expected(anchor, "slot_positions").tolist() == list(range(anchor, anchor + SLOTS))


def test_fewer_slots_see_the_same(case: GoldenCase) -> None:
    """A causal block of 4 slots is the first half of one of 8: k may be smaller than trained. A bidirectional one is not: its
    slots see those that are missing."""
    assert case.drafter.config.attention is not None
    short = case.drafter.backbone(case.context([30]), 4)
    same = torch.allclose(short[0, 0], case.expected(30, "hidden")[:4], atol=TOLERANCE)
    assert same == case.drafter.config.attention.causal_block


def test_numbers_are_sensitive(case: GoldenCase) -> None:
    """The tolerance would not pass a block that stands one position too far."""
    context = case.context([30])
    moved = type(context)(context.anchors, context.positions + 1, context.taps, context.kv)
    hidden = case.drafter.backbone(moved, SLOTS)[0, 0]
    assert float((hidden - case.expected(30, "hidden")).abs().max()) > 100 * TOLERANCE


def test_greedy_chain_follows_the_golden_logits(case: GoldenCase) -> None:
    """``propose`` walks: argmax of base logits plus the bias of the token chosen before, in target ids."""
    d: ParallelDrafter = case.drafter
    for anchor in case.anchors:
        draft = d.propose(case.context([anchor]), SLOTS - 1)
        previous, expected = case.tensors["in.input_ids"][anchor], []
        for slot in range(1, SLOTS):
            logits = case.expected(anchor, "base_logits")[slot]
            if d.causal is not None:
                w1, w2 = case.tensors["w.markov_head.markov_w1.weight"], case.tensors["w.markov_head.markov_w2.weight"]
                logits = logits + w2 @ w1[previous]
            draft_id = logits.argmax()
            previous = draft_id + case.tensors["w.d2t"][draft_id]
            expected.append(int(previous))
        assert draft.tokens.tolist() == [expected]
        assert draft.probabilities is None
