"""A drafter spread over ranks drafts what it drafts whole."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hspec.drafters.checkpoint import load_drafter, save_drafter
from hspec.drafters.context import DraftContext
from hspec.drafters.head_share import HeadShare, can_share, keep_share
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import UsageError
from hspec.targets.cache import KVView
from hspec.targets.target import Target
from tests.methods import trained
from tests.ranks import ThreadGroup, heads_of, on_ranks
from tests.tiny import tiny_drafter, tiny_target

K = 4
HEADS = {2: (4, 2), 3: (6, 3), 4: (4, 2), 6: (6, 2)}
"""Query and KV heads by ranks: with 4 and 6, several ranks have the same KV head."""
READING = (
    "hspec",
    "hspec-no-state",
    "hspec-no-kv",
    "attention-only",
    "mamba-only",
    "dflash-kv",
    "hspec-dflash2",
    "hspec-domino",
)


@dataclass(frozen=True)
class Case:
    """A drafter as files, and what its target has run of two sequences."""

    target: Target
    folder: Path
    context: DraftContext

    def load(self) -> ParallelDrafter:
        drafter = load_drafter(self.folder, self.target)
        assert isinstance(drafter, ParallelDrafter)
        return drafter

    def seen_by(self, share: HeadShare) -> DraftContext:
        """The context with the K/V of a rank's heads alone."""
        kv = self.context.kv
        assert isinstance(kv, KVView)
        own = KVView(heads_of(kv.keys, share.kv_heads), heads_of(kv.values, share.kv_heads), kv.lengths)
        return DraftContext(self.context.anchors, self.context.positions, self.context.taps, own)


def make(folder: Path, ranks: int, method: str = "hspec", **settings: int) -> Case:
    heads, kv_heads = HEADS[ranks]
    target = tiny_target("qwen3", hidden=96, heads=heads, kv_heads=kv_heads)
    drafter = trained(target, method, **settings) if method != "hspec" else tiny_drafter(target, **settings)
    save_drafter(drafter, folder)
    tokens = torch.randint(3, 200, (2, 30))
    cache = target.new_cache(2, 40)
    output = target.forward(tokens, cache, drafter.taps)
    cache.advance([30, 30])
    context = DraftContext(
        anchors=torch.randint(3, 200, (2, 1)), positions=torch.tensor([[30], [30]]), taps=output.taps[:, -1:], kv=cache.view()
    )
    return Case(target, folder, context)


def spread(case: Case, ranks: int, reduced: bool = True, packed: bool = True) -> list[tuple[Tensor, Tensor, int]]:
    """Of every rank the slots' hidden states, the drafts, and how many sums it took for each."""

    def rank(group: ThreadGroup) -> tuple[Tensor, Tensor, int]:
        drafter = case.load()
        attention = drafter.config.attention
        share = HeadShare(range(0), range(0))
        if attention is not None:
            share = HeadShare.of(attention.heads, attention.kv_heads, group.rank_in_group, ranks)
        keep_share(drafter, group.rank_in_group, ranks, group.all_reduce if reduced else lambda x: x)
        context = case.seen_by(share) if attention is not None and attention.context == "target" else case.context
        with torch.no_grad():
            hidden = drafter.backbone(context, K + 1)
            sums = group.sums
            drafts = (drafter.prepare(half=False) if packed else drafter).propose(context, K).tokens
        return hidden, drafts, sums

    return on_ranks(ranks, rank)


@pytest.mark.parametrize("ranks", HEADS)
def test_hidden_states_and_drafts_are_those_of_the_whole(tmp_path: Path, ranks: int) -> None:
    case = make(tmp_path, ranks, window=12)
    whole = case.load()
    with torch.no_grad():
        hidden = whole.backbone(case.context, K + 1)
    drafts = whole.prepare(half=False).propose(case.context, K).tokens
    for own, tokens, sums in spread(case, ranks):
        assert torch.allclose(own, hidden, rtol=1e-4, atol=1e-5)
        assert torch.equal(tokens, drafts)
        assert sums == whole.config.pattern.count("attention")


@pytest.mark.parametrize("method", READING)
def test_every_method_that_keeps_nothing(tmp_path: Path, method: str) -> None:
    case = make(tmp_path, 2, method)
    drafts = case.load().propose(case.context, K).tokens
    for _, tokens, _ in spread(case, 2, packed=False):
        assert torch.equal(tokens, drafts)


@pytest.mark.parametrize("ranks", HEADS)
def test_no_rank_has_it_all(tmp_path: Path, ranks: int) -> None:
    """So that the tests above would see it if a rank's part were left out, or counted twice."""
    case = make(tmp_path, ranks)
    with torch.no_grad():
        hidden = case.load().backbone(case.context, K + 1)
    for own, _, _ in spread(case, ranks, reduced=False):
        assert not torch.allclose(own, hidden, rtol=1e-2, atol=1e-2)


def test_what_is_kept_for_a_token_is_that_of_the_share(tmp_path: Path) -> None:
    """K and V of a drafter's own, for those that keep them."""
    case = make(tmp_path, 3, "dspark")
    whole = case.load()
    taps, positions = torch.randn(1, 5, len(whole.taps), 96), torch.arange(5)[None]
    all_heads = whole.remember(taps, positions, positions, None)
    for rank in range(3):
        own = case.load()
        keep_share(own, rank, 3, lambda x: x)
        assert own.memory_shape is not None and whole.memory_shape is not None
        assert (own.memory_shape.kv_heads, own.memory_shape.layers) == (1, whole.memory_shape.layers)
        for mine, everyones in zip(own.remember(taps, positions, positions, None), all_heads, strict=True):
            for part, full in zip(mine, everyones, strict=True):
                assert torch.allclose(part, full[:, rank : rank + 1], atol=1e-6)


@pytest.mark.parametrize("heads, kv_heads, ranks", [(9, 3, 3), (9, 3, 9), (32, 8, 4), (32, 8, 16), (4, 1, 2), (6, 2, 1)])
def test_shares_are_whole_groups(heads: int, kv_heads: int, ranks: int) -> None:
    """Every query head is on one rank, together with the KV head that it reads; all ranks have as much."""
    shares = [HeadShare.of(heads, kv_heads, rank, ranks) for rank in range(ranks)]
    assert [h for share in shares for h in share.heads] == list(range(heads))
    assert len({(len(s.heads), len(s.kv_heads)) for s in shares}) == 1
    for share in shares:
        assert sorted({h // (heads // kv_heads) for h in share.heads}) == list(share.kv_heads)


@pytest.mark.parametrize("heads, kv_heads, ranks", [(9, 3, 2), (6, 3, 2), (4, 2, 3), (4, 2, 8), (12, 4, 6)])
def test_heads_that_cannot_be_shared(heads: int, kv_heads: int, ranks: int) -> None:
    assert not can_share(heads, kv_heads, ranks)
    with pytest.raises(UsageError, match=f"{heads} query and {kv_heads} KV heads cannot be spread evenly over {ranks} ranks"):
        HeadShare.of(heads, kv_heads, 0, ranks)
