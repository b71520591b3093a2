"""The drafter as a whole: blocks, positions, what reaches which slot, and how it is walked."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hspec.drafters.context import DraftContext, Prefix
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import UsageError
from hspec.targets.target import Target
from tests.tiny import markov_bias, tiny_drafter

LENGTH, K = 25, 5


def make_context(target: Target, drafter: ParallelDrafter, anchor: int = 7) -> DraftContext:
    cache = target.new_cache(1, LENGTH + 8)
    taps = target.prefill(torch.arange(5, 5 + LENGTH)[None], cache, drafter.taps).taps
    return DraftContext(torch.tensor([[anchor]]), torch.tensor([[LENGTH]]), taps, cache.view())


def test_block_is_the_anchor_and_masks(target: Target, drafter: ParallelDrafter) -> None:
    block = drafter.embed_block(torch.tensor([[7, 9]]), 4)
    assert block.shape == (1, 2, 4, 64)
    assert torch.equal(block[0, :, 0], target.embedding_weight[[7, 9]])
    assert torch.equal(block[0, :, 1:], drafter.mask_embedding.expand(2, 3, 64))


def test_every_input_reaches_every_slot(target: Target, drafter: ParallelDrafter) -> None:
    context = make_context(target, drafter)
    before = drafter.backbone(context, K + 1)
    others = {
        "anchor": make_context(target, drafter, anchor=8),
        "position": replace(context, positions=context.positions - 1),
        "taps": replace(context, taps=context.taps.flip(-1)),
    }
    for name, other in others.items():
        change = (drafter.backbone(other, K + 1) - before).abs().amax(-1)[0, 0]
        assert (change > 1e-4).all(), f"{name} does not reach slots {(change <= 1e-4).nonzero().flatten().tolist()}"


def test_slots_follow_their_positions(target: Target, drafter: ParallelDrafter) -> None:
    """Slot j stands at anchor + j: the rotations that the attention is given are those positions'."""
    seen: list[Tensor] = []
    handle = drafter.ropes[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    drafter.backbone(make_context(target, drafter), K + 1)
    handle.remove()
    assert seen[0].tolist() == [[[LENGTH + j for j in range(K + 1)]]]


def test_shorter_blocks_are_prefixes(target: Target, drafter: ParallelDrafter) -> None:
    """All of it is causal, so drafting fewer tokens changes none of them."""
    context = make_context(target, drafter)
    whole = drafter.backbone(context, K + 1)
    for slots in range(2, K + 1):
        assert torch.allclose(drafter.backbone(context, slots), whole[:, :, :slots], atol=1e-5)
    assert drafter.propose(context, 2).tokens.tolist() == drafter.propose(context, K).tokens[:, :2].tolist()


@pytest.mark.parametrize("pattern", [["mamba", "mlp"], ["attention", "mlp"], ["mamba", "attention", "mlp", "mamba"]])
def test_other_patterns(target: Target, pattern: list[str]) -> None:
    absent = {kind: None for kind in ("mamba", "attention") if kind not in pattern}
    drafter = tiny_drafter(target, pattern=pattern, **absent)
    trace: list[Tensor] = []
    drafter.backbone(make_context(target, drafter), K + 1, trace)
    assert len(trace) == len(pattern)
    assert (drafter.seed is None) == ("mamba" not in pattern)


def test_without_state_the_taps_are_not_read(target: Target) -> None:
    drafter = tiny_drafter(target, use_state=False)
    context = make_context(target, drafter)
    blind = replace(context, taps=torch.full_like(context.taps, float("nan")))
    assert drafter.seed is None
    assert torch.equal(drafter.backbone(blind, K + 1), drafter.backbone(context, K + 1))


def test_gradients_reach_every_parameter(target: Target) -> None:
    drafter = tiny_drafter(target).train().requires_grad_(True)
    hidden = drafter.backbone(make_context(target, drafter), K + 1)
    assert drafter.causal is not None and drafter.confidence is not None
    previous = torch.randint(0, 211, hidden.shape[:-1])
    logits = drafter.base_logits(hidden) + markov_bias(drafter, previous)
    loss = logits.logsumexp(-1).sum() + drafter.confidence(hidden, drafter.causal.embed(previous)).sum()
    loss.backward()
    dead = [name for name, p in drafter.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert dead == []
    assert not drafter.embedding.requires_grad and not drafter.head.requires_grad


# -- drafting ----------------------------------------------------------------------------------------------------


def test_drafts_are_target_ids(target: Target) -> None:
    drafter = tiny_drafter(target)
    drafter.draft_ids = torch.arange(211)[-drafter.config.draft_vocab_size :]
    context = make_context(target, drafter)
    logits = drafter.base_logits(drafter.backbone(context, 2)[:, 0, 1])
    first = int((logits + markov_bias(drafter, context.anchors[:, 0])).argmax())
    assert drafter.propose(context, 1).tokens.tolist() == [[first + 211 - drafter.config.draft_vocab_size]]


def test_the_chooser_decides_and_is_followed(target: Target, drafter: ParallelDrafter) -> None:
    """Each slot's logits carry the bias of the token that was chosen before, not of the likeliest."""
    context, calls = make_context(target, drafter), []

    def second_best(slot: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        calls.append((slot, logits.clone()))
        return logits.topk(2).indices[:, 1], logits.softmax(-1)

    draft = drafter.propose(context, K, second_best)
    assert [slot for slot, _ in calls] == [1, 2, 3, 4, 5]
    assert draft.tokens.tolist() == [[int(logits.topk(2).indices[0, 1]) for _, logits in calls]]
    assert draft.probabilities is not None
    assert torch.equal(draft.probabilities[0], torch.cat([logits.softmax(-1) for _, logits in calls]))
    base = drafter.base_logits(drafter.backbone(context, K + 1))[0, 0]
    for slot, logits in calls:
        previous = context.anchors[0] if slot == 1 else draft.tokens[0, slot - 2 : slot - 1]
        assert torch.allclose(logits, base[slot : slot + 1] + markov_bias(drafter, previous), atol=1e-5)


@pytest.mark.parametrize("k", [0, -1, K + 1])
def test_k_outside_of_what_was_trained(target: Target, drafter: ParallelDrafter, k: int) -> None:
    with pytest.raises(UsageError, match=rf"k = {k} drafted tokens, but this drafter was trained for 1 to {K}"):
        drafter.propose(make_context(target, drafter), k)


# -- prefixes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("window", "start"), [(None, [0, 0, 0]), (4, [0, 0, 3]), (100, [0, 0, 0])])
def test_prefix(window: int | None, start: list[int]) -> None:
    prefix = Prefix.before(torch.tensor([[0, 3, 7]]), window)
    assert prefix.start.tolist() == [start] and prefix.stop.tolist() == [[0, 3, 7]]
    for row, (low, high) in zip(prefix.mask(9)[0], zip(start, [0, 3, 7], strict=True), strict=True):
        assert row.nonzero().flatten().tolist() == list(range(low, high))
