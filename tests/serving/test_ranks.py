"""A served step by several ranks, each with the pages of its own heads: drafts are those of one, and every rank has the same."""

from __future__ import annotations

import pickle
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from hspec.drafters.checkpoint import load_drafter, save_drafter
from hspec.drafters.head_share import HeadShare, keep_share
from hspec.serving.memory import Ran
from hspec.serving.pages import cpu_vec
from hspec.serving.ranks import ALONE, Group, Ranks
from hspec.serving.step import Proposal, Step, StepDrafter
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


def step_by(target: Target, folder: Path, ranks: Ranks, sampled: bool) -> Proposal:
    """What a rank drafts behind a prompt of two requests; the same prompts, keys and tables for each."""
    drafter = load_drafter(folder, target)
    attention: Any = drafter.config.attention  # type: ignore[attr-defined]
    share = HeadShare.of(attention.heads, attention.kv_heads, ranks.rank, ranks.count)
    if ranks.count > 1:
        keep_share(drafter, ranks.rank, ranks.count, ranks.sum)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, 150, (2, LENGTH), generator=generator)
    tables = torch.randperm(BLOCKS - 1, generator=generator)[: 2 * 3].view(2, 3).to(torch.int32) + 1
    cache = target.new_cache(2, 24)
    output = target.forward(tokens, cache, drafter.taps)
    taps = list(output.taps.flatten(0, 1).unbind(1))
    cache.advance([LENGTH] * 2)
    runner = StepDrafter(drafter.prepare(half=False), K, ranks)
    runner.pages.layout = cpu_vec
    for layer in runner.target_layers:
        keys, values = heads_of([t[:, :, :LENGTH] for t in cache.view().layer(layer)], share.kv_heads)
        runner.pages.layers[layer] = cpu_vec_pages(keys, values, tables, BLOCK, BLOCKS)
    if runner.memory is not None:
        _keep(runner, Ran(taps, torch.arange(LENGTH).repeat(2), _slots(tables)))
    params = [SimpleNamespace(**(SAMPLED if sampled else GREEDY)), SimpleNamespace(**GREEDY)]
    step = Step(
        ["a", "b"], params, [[5], [7]], [0, 0], [LENGTH, 2 * LENGTH], [LENGTH] * 2, [LENGTH + 1] * 2, tables, taps, K,
        lambda i: [*tokens[i].tolist(), (5, 7)[i]],
    )  # fmt: skip
    return runner.draft(step)


def _slots(tables: Tensor) -> Tensor:
    places = torch.arange(LENGTH)
    return (tables[:, places // BLOCK] * BLOCK + places % BLOCK).flatten().long()


def _keep(runner: StepDrafter, ran: Ran) -> None:
    """Give it pages of its own, and let it write to them."""
    assert runner.memory is not None and (shape := runner.drafter.memory_shape) is not None
    for layer in range(shape.layers):
        pages = torch.full((BLOCKS, shape.kv_heads, BLOCK, 2 * shape.head_dim), float("nan"))
        runner.memory.pages.layers[layer], runner.memory.pages.layout = pages, cpu_vec

        def write(keys: Tensor, values: Tensor, slots: Tensor, sides: tuple[Tensor, Tensor] = cpu_vec(pages)) -> None:
            for side, own in zip(sides, (keys, values), strict=True):
                side[slots // BLOCK, :, slots % BLOCK] = own

        runner.memory.writers[layer] = write
    runner.memory.remember(ran)


def saved(folder: Path, ranks: int, method: str) -> Target:
    target = tiny_target(**SHAPES[ranks])
    save_drafter(trained(target, method, block_size=K + 1, window=12), folder)
    return target


@pytest.mark.parametrize("method", ["hspec", "dspark", "hspec-domino"])
@pytest.mark.parametrize("ranks", SHAPES)
def test_greedy_drafts_are_those_of_one_rank(tmp_path: Path, ranks: int, method: str) -> None:
    target = saved(tmp_path, ranks, method)
    expected = step_by(target, tmp_path, ALONE, False)
    for proposal in on_ranks(ranks, lambda group: step_by(target, tmp_path, Ranks(group), False)):
        assert proposal.tokens == expected.tokens and proposal.probabilities is None


def by(group: Group, target: Target, folder: Path) -> Proposal:
    """Sampled without a seed, so that each rank makes up its own."""
    return step_by(target, folder, Ranks(group), True)


def check(proposals: list[Proposal], expected: Proposal) -> None:
    first = proposals[0]
    assert all(p.tokens == first.tokens and torch.equal(p.probabilities, first.probabilities) for p in proposals)  # every bit
    assert first.tokens[1] == expected.tokens[1]  # a greedy neighbour
    q = first.probabilities
    assert q is not None and torch.allclose(q.sum(-1), torch.ones(2, K), atol=1e-5)
    assert torch.allclose(q[:, 0], expected.probabilities[:, 0], atol=1e-5)  # type: ignore[index]  # later slots: what was drawn decides
    assert bool((q[0, range(K), first.tokens[0]] > 0).all())


def test_sampled_drafts_and_distributions_are_the_first_ranks(tmp_path: Path) -> None:
    """The sums of three ranks differ in their last bits."""
    target = saved(tmp_path, 3, "hspec")
    expected = step_by(target, tmp_path, ALONE, True)
    check(on_ranks(3, lambda group: by(group, target, tmp_path)), expected)


def test_ranks_would_disagree_by_themselves(tmp_path: Path) -> None:
    """So that the test above would see it."""
    target = saved(tmp_path, 3, "hspec")

    class Alone(Ranks):
        def agree(self, draft: Any) -> Any:
            return draft

    first, second, third = on_ranks(3, lambda group: step_by(target, tmp_path, Alone(group), True))
    assert not first.tokens[0] == second.tokens[0] == third.tokens[0]
    assert not torch.equal(first.probabilities[:, 0], second.probabilities[:, 0])  # type: ignore[index]


def converse(folder: Path, shape: dict[str, int], seed: int) -> None:
    """What a rank drafts, as a process."""
    dist.init_process_group("gloo")
    random.seed(seed)
    group = GlooGroup()
    proposal = by(group, tiny_target(**shape), folder)
    rows = Ranks(group).join(torch.full((2, 3), float(group.rank_in_group)))
    (folder / f"said-{group.rank_in_group}").write_bytes(pickle.dumps((proposal, rows)))
    dist.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    target = saved(tmp_path, 2, "hspec")
    expected = step_by(target, tmp_path, ALONE, True)
    assert together(converse, (tmp_path, SHAPES[2], 1), (tmp_path, SHAPES[2], 2)) == [End(0)] * 2
    said = [pickle.loads((tmp_path / f"said-{rank}").read_bytes()) for rank in range(2)]
    check([proposal for proposal, _ in said], expected)
    for _, rows in said:
        assert rows[:, 0].tolist() == [0, 0, 1, 1]
