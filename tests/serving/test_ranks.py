"""A served step by several ranks, each with the pages of its own heads: drafts are those of one, and every rank has the same."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hspec.drafters.checkpoint import load_drafter, save_drafter
from hspec.drafters.context import Draft
from hspec.drafters.head_share import HeadShare, keep_share
from hspec.serving.memory import Ran
from hspec.serving.pages import cpu_vec
from hspec.serving.ranks import ALONE, Ranks
from hspec.serving.step import Proposal, Step, StepDrafter
from hspec.targets.cache import KVView
from hspec.targets.target import Target
from tests.methods import trained
from tests.ranks import GlooGroup, heads_of, on_ranks
from tests.serving.paged import cpu_vec_pages
from tests.tiny import tiny_target
from tests.training.runs import End, together

BLOCK, BLOCKS, K, LENGTH = 8, 32, 3, 21
SHAPES = {2: {"heads": 4, "kv_heads": 2}, 3: {"hidden": 96, "heads": 6, "kv_heads": 3}, 4: {"heads": 4, "kv_heads": 2}}
GREEDY = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0, "seed": None, "structured_outputs": None}
SAMPLED = GREEDY | {"temperature": 1.2, "top_k": 50}


@dataclass(frozen=True)
class Prompted:
    """A target that has run the prompts of two requests."""

    target: Target
    folder: Path
    """Its drafter's."""
    tokens: Tensor
    tables: Tensor
    taps: list[Tensor]
    kv: KVView

    @staticmethod
    @torch.no_grad()
    def of(target: Target, folder: Path) -> Prompted:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(3, 150, (2, LENGTH), generator=generator)
        tables = torch.randperm(BLOCKS - 1, generator=generator)[: 2 * 3].view(2, 3).to(torch.int32) + 1
        cache = target.new_cache(2, LENGTH)
        output = target.forward(tokens, cache, load_drafter(folder, target).taps)
        cache.advance([LENGTH] * 2)
        return Prompted(target, folder, tokens, tables, list(output.taps.flatten(0, 1).unbind(1)), cache.view())


def step_by(prompted: Prompted, ranks: Ranks, sampled: bool) -> Proposal:
    """What a rank drafts behind the prompts."""
    drafter, tables, taps = load_drafter(prompted.folder, prompted.target), prompted.tables, prompted.taps
    attention: Any = drafter.config.attention  # type: ignore[attr-defined]
    share = HeadShare.of(attention.heads, attention.kv_heads, ranks.rank, ranks.count)
    if ranks.count > 1:
        keep_share(drafter, ranks.rank, ranks.count, ranks.sum)
    runner = StepDrafter(drafter.prepare(half=False), K, ranks)
    runner.pages.layout = cpu_vec
    for layer in runner.target_layers:
        keys, values = heads_of(prompted.kv.layer(layer), share.kv_heads)
        runner.pages.layers[layer] = cpu_vec_pages(keys, values, tables, BLOCK, BLOCKS)
    if runner.memory is not None:
        _keep(runner, Ran(taps, torch.arange(LENGTH).repeat(2), _slots(tables)))
    params = [SimpleNamespace(**(SAMPLED if sampled else GREEDY)), SimpleNamespace(**GREEDY)]
    step = Step(
        ["a", "b"], params, [[5], [7]], [0, 0], [LENGTH, 2 * LENGTH], [LENGTH] * 2, [LENGTH + 1] * 2, tables, taps, K,
        lambda i: [*prompted.tokens[i].tolist(), (5, 7)[i]],
    )  # fmt: skip
    return runner.draft(step)


def _slots(tables: Tensor) -> Tensor:
    places = torch.arange(LENGTH)
    return (tables[:, places // BLOCK] * BLOCK + places % BLOCK).flatten().long()


def _keep(runner: StepDrafter, ran: Ran) -> None:
    """Give it pages of its own, and let it write to them."""
    shape = runner.drafter.memory_shape
    assert runner.memory is not None and shape is not None
    for layer in range(shape.layers):
        pages = torch.full((BLOCKS, shape.kv_heads, BLOCK, 2 * shape.head_dim), float("nan"))
        runner.memory.pages.layers[layer], runner.memory.pages.layout = pages, cpu_vec

        def write(keys: Tensor, values: Tensor, slots: Tensor, sides: tuple[Tensor, Tensor] = cpu_vec(pages)) -> None:
            for side, own in zip(sides, (keys, values), strict=True):
                side[slots // BLOCK, :, slots % BLOCK] = own

        runner.memory.writers[layer] = write
    runner.memory.remember(ran)


def saved(folder: Path, ranks: int, method: str) -> Prompted:
    target = tiny_target(**SHAPES[ranks])  # type: ignore[arg-type]
    save_drafter(trained(target, method, block_size=K + 1, window=12), folder)
    return Prompted.of(target, folder)


@pytest.mark.parametrize("method", ["hspec", "dspark", "hspec-domino"])
@pytest.mark.parametrize("ranks", SHAPES)
def test_greedy_drafts_are_those_of_one_rank(tmp_path: Path, ranks: int, method: str) -> None:
    prompted = saved(tmp_path, ranks, method)
    expected = step_by(prompted, ALONE, False)
    for proposal in on_ranks(ranks, lambda group: step_by(prompted, Ranks(group), False)):
        assert proposal.tokens == expected.tokens and proposal.probabilities is None


def check(proposals: list[Proposal], expected: Proposal) -> None:
    """Of a step with one request that samples without a seed, so that each rank makes one up."""
    first, whole = proposals[0].probabilities, expected.probabilities
    assert first is not None and whole is not None
    for other in proposals[1:]:
        assert other.probabilities is not None and torch.equal(other.probabilities, first)  # in every bit
        assert other.tokens == proposals[0].tokens
    assert proposals[0].tokens[1] == expected.tokens[1]  # a greedy neighbour
    assert torch.allclose(first[:, 0], whole[:, 0], atol=1e-5)  # later slots follow from what was drawn
    assert bool((first[0, range(K), proposals[0].tokens[0]] > 0).all())


def test_sampled_drafts_and_distributions_are_the_first_ranks(tmp_path: Path) -> None:
    """The sums of three ranks differ in their last bits."""
    prompted = saved(tmp_path, 3, "hspec")
    check(on_ranks(3, lambda group: step_by(prompted, Ranks(group), True)), step_by(prompted, ALONE, True))


def test_how_many_drafts_count_is_the_first_ranks_to_say() -> None:
    """Chances that differ in the last bit may fall on two sides of what is asked for."""
    firsts = {(2, 3): torch.tensor([[7, 8, 9], [4, 5, 6]]), (2,): torch.tensor([3, 1])}
    group = SimpleNamespace(world_size=2, rank_in_group=1, broadcast=lambda own, src: firsts[tuple(own.shape)])
    agreed = Ranks(group).agree(Draft(torch.zeros(2, 3, dtype=torch.int64), None, counts=(2, 0)))  # type: ignore[arg-type]
    assert agreed.counts == (3, 1) and agreed.tokens.tolist() == [[7, 8, 9], [4, 5, 6]]
    assert Ranks(group).agree(Draft(torch.zeros(2, 3, dtype=torch.int64), None)).counts is None  # type: ignore[arg-type]


def test_ranks_would_disagree_by_themselves(tmp_path: Path) -> None:
    """So that the test above would see it."""
    prompted = saved(tmp_path, 3, "hspec")

    class Stubborn(Ranks):
        def agree(self, draft: Draft) -> Draft:
            return draft

    first, second, third = on_ranks(3, lambda group: step_by(prompted, Stubborn(group), True))
    assert not first.tokens[0] == second.tokens[0] == third.tokens[0]
    assert first.probabilities is not None and second.probabilities is not None
    assert not torch.equal(first.probabilities[:, 0], second.probabilities[:, 0])


def converse(folder: Path, shape: dict[str, int], seed: int) -> None:
    """What a rank drafts, as a process."""
    dist.init_process_group("gloo")
    random.seed(seed)
    group = GlooGroup()
    proposal = step_by(Prompted.of(tiny_target(**shape), folder), Ranks(group), True)  # type: ignore[arg-type]
    rows = Ranks(group).join(torch.full((2, 3), float(group.rank_in_group)))
    (folder / f"said-{group.rank_in_group}").write_bytes(pickle.dumps((proposal, rows)))
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    expected = step_by(saved(tmp_path, 2, "hspec"), ALONE, True)
    assert together(converse, (tmp_path, SHAPES[2], 1), (tmp_path, SHAPES[2], 2)) == [End(0)] * 2
    said = [pickle.loads((tmp_path / f"said-{rank}").read_bytes()) for rank in range(2)]
    check([proposal for proposal, _ in said], expected)
    for _, rows in said:
        assert rows[:, 0].tolist() == [0, 0, 1, 1]
