"""The fusion that seeds the state, the Markov head, the confidence head."""

from __future__ import annotations

import pytest
import torch

from hspec.drafters.fusion import StateSeed
from hspec.drafters.heads.confidence import ConfidenceHead
from hspec.drafters.heads.markov import MarkovHead
from hspec.targets.target import Target
from tests.tiny import randomise, tiny_config

PATTERN = ("mamba", "mlp", "mamba", "attention", "mlp")


def make_seed(target: Target, **overrides: object) -> StateSeed:
    seed = StateSeed(tiny_config(target, pattern=PATTERN, fusion_rank=20, **overrides))  # type: ignore[arg-type]
    randomise(seed, 2)
    return seed.requires_grad_(False)


def test_fusion_is_its_formula(target: Target) -> None:
    seed, taps = make_seed(target), torch.randn(5, 3, 64)
    z = torch.cat([taps[:, f] for f in range(3)], dim=-1) @ seed.fc.weight.T
    z = z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt() * seed.norm.weight
    assert torch.allclose(seed.fuse(taps), z, atol=1e-5)
    state = (z @ seed.projections[0].weight.T).view(5, 4, 8, 4)  # row-major: heads, head dim, state dim
    assert torch.allclose(seed(taps, 2)[0], state, atol=1e-5)  # type: ignore[arg-type]


def test_norm_of_every_tap(target: Target) -> None:
    """With fusion_norm the scale of a tap does not matter any more, one by one."""
    taps = torch.randn(5, 3, 64)
    scaled = taps * torch.tensor([1.0, 10.0, 1000.0])[:, None]
    assert torch.allclose(
        make_seed(target, fusion_norm=True).fuse(taps), make_seed(target, fusion_norm=True).fuse(scaled), atol=1e-3
    )
    assert not torch.allclose(make_seed(target).fuse(taps), make_seed(target).fuse(scaled), atol=1e-1)


@pytest.mark.parametrize(("mode", "projections"), [("shared", 1), ("per_layer", 2), ("once", 1)])
def test_seed_modes(target: Target, mode: str, projections: int) -> None:
    seed = make_seed(target, seed_mode=mode)
    first, second = seed(torch.randn(5, 3, 64), 2)
    assert len(seed.projections) == projections
    assert first is not None and first.shape == (5, 4, 8, 4)
    if mode == "once":
        assert second is None
    else:
        assert second is not None
        assert torch.equal(first, second) == (mode == "shared")


def test_markov_starts_without_effect() -> None:
    head = MarkovHead(11, 7, 3)
    assert torch.equal(head.w2(head.embed(torch.arange(11))), torch.zeros(11, 7))
    assert head.embed(torch.arange(11)).abs().sum() > 0  # or W2 would never get a gradient


def test_markov_is_first_order() -> None:
    head = MarkovHead(11, 7, 3)
    randomise(head, 0)
    bias = head.w2(head.embed(torch.tensor([[4, 10]])))
    assert bias.shape == (1, 2, 7)
    assert torch.allclose(bias[0, 1], head.w2.weight @ head.w1.weight[10])


@pytest.mark.parametrize("rank", [0, 3])
def test_confidence(rank: int) -> None:
    head = ConfidenceHead(6, rank)
    randomise(head, 0)
    hidden, markov = torch.randn(2, 4, 6), torch.randn(2, 4, 3) if rank else None
    features = hidden if markov is None else torch.cat((hidden, markov), -1)
    assert torch.allclose(head(hidden, markov), features @ head.proj.weight[0] + head.proj.bias)
