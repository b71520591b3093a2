"""Fusion of tapped hidden states, and the seed of the Mamba states, against their formulas."""

from __future__ import annotations

import pytest
import torch

from hspec.drafters.fusion import Fusion, StateSeed
from hspec.targets.target import Target
from tests.drafters.heads.naive import Vector, matvec
from tests.tiny import randomise, tiny_config

PATTERN = ("mamba", "mlp", "mamba", "attention", "mlp")
TAPS, HIDDEN, RANK, EPS = 3, 6, 5, 1e-6


def rms_norm(x: Vector, weight: Vector) -> Vector:
    scale = (sum(v * v for v in x) / len(x) + EPS) ** -0.5
    return [v * scale * w for v, w in zip(x, weight, strict=True)]


@pytest.mark.parametrize("tap_norms", [False, True])
def test_fusion_is_its_formula(tap_norms: bool) -> None:
    fusion = Fusion(TAPS, HIDDEN, RANK, EPS, tap_norms).requires_grad_(False)
    randomise(fusion, 1)
    taps = torch.randn(2, 4, TAPS, HIDDEN)
    fused = fusion.fuse(taps)
    assert fused.shape == (2, 4, RANK)
    for b in range(2):
        for i in range(4):
            joined: Vector = []
            for f, tap in enumerate(taps[b, i].tolist()):
                norms = fusion.tap_norms
                joined += tap if norms is None else rms_norm(tap, norms[f].weight.tolist())  # type: ignore[operator]
            wanted = rms_norm(matvec(fusion.fc.weight.tolist(), joined), fusion.norm.weight.tolist())
            torch.testing.assert_close(fused[b, i], torch.tensor(wanted), atol=1e-5, rtol=1e-5)


def test_norm_of_every_tap() -> None:
    """With it the scale of a tap does not matter any more, one by one."""
    taps = torch.randn(5, TAPS, HIDDEN)
    scaled = taps * torch.tensor([1.0, 10.0, 1000.0])[:, None]
    for tap_norms in (False, True):
        fusion = Fusion(TAPS, HIDDEN, RANK, EPS, tap_norms)
        randomise(fusion, 1)
        assert torch.allclose(fusion.fuse(taps), fusion.fuse(scaled), atol=1e-3) == tap_norms


def make_seed(target: Target, **overrides: object) -> StateSeed:
    seed = StateSeed(tiny_config(target, pattern=PATTERN, fusion_rank=20, **overrides))  # type: ignore[arg-type]
    randomise(seed, 2)
    return seed.requires_grad_(False)


def test_the_state_is_row_major(target: Target) -> None:
    """S_init[h, p, n] is entry (h P + p) N + n of W_seed z."""
    seed, taps = make_seed(target), torch.randn(2, 3, 64)
    state = seed(taps, 2)[0]
    assert state is not None and state.shape == (2, 4, 8, 4)
    for b, z in enumerate(seed.fuse(taps).tolist()):
        flat = matvec(seed.projections[0].weight.tolist(), z)  # type: ignore[operator]
        wanted = [[[flat[(h * 8 + p) * 4 + n] for n in range(4)] for p in range(8)] for h in range(4)]
        torch.testing.assert_close(state[b], torch.tensor(wanted), atol=1e-5, rtol=1e-5)


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
