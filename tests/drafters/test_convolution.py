"""DFlash-2's convolution against its formula, and where it stands round a sub-layer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hspec.drafters.config import ConvolutionConfig
from hspec.drafters.convolution import BlockConvolution
from hspec.targets.target import Target
from tests.drafters.test_parallel import make_context
from tests.tiny import randomise, tiny_drafter

HIDDEN, GROUP, SLOTS = 6, 3, 4


def make_convolution(kernel: int) -> BlockConvolution:
    convolution = BlockConvolution(HIDDEN, ConvolutionConfig(kernel=kernel, group=GROUP))
    randomise(convolution, 0)
    return convolution.requires_grad_(False)


def naive(convolution: BlockConvolution, normed: Tensor, x: Tensor, side: int) -> Tensor:
    """out[t, c] = sum over taps i of (base[side, i, c] + delta[side, i, t, group of c]) x[t - i, c], zero before the block."""
    kernel, groups = convolution.kernel, HIDDEN // GROUP
    weight = convolution.kernel_projection.weight.tolist()
    out = torch.zeros(SLOTS, HIDDEN)
    for t in range(SLOTS):
        for c in range(HIDDEN):
            for i in range(min(kernel, t + 1)):
                row = weight[(side * kernel + i) * groups + c // GROUP]
                delta = sum(w * v for w, v in zip(row, normed[t].tolist(), strict=True))
                out[t, c] += (float(convolution.base_kernel[side, i, c]) + delta) * float(x[t - i, c])
    return out


@pytest.mark.parametrize("kernel", [2, 3])
@pytest.mark.parametrize("side", [0, 1])
def test_it_is_the_formula(kernel: int, side: int) -> None:
    convolution, normed, x = make_convolution(kernel), torch.randn(2, SLOTS, HIDDEN), torch.randn(2, SLOTS, HIDDEN)
    out = convolution(normed)(x, side)
    for b in range(2):
        torch.testing.assert_close(out[b], naive(convolution, normed[b], x[b], side), atol=1e-5, rtol=1e-5)


def test_it_starts_as_the_identity() -> None:
    x = torch.randn(2, SLOTS, HIDDEN)
    filters = BlockConvolution(HIDDEN, ConvolutionConfig(group=GROUP))(torch.randn(2, SLOTS, HIDDEN))
    assert torch.equal(filters(x, 0), x) and torch.equal(filters(x, 1), x)


def test_a_block_shorter_than_the_kernel() -> None:
    convolution, normed, x = make_convolution(3), torch.randn(1, SLOTS, HIDDEN), torch.randn(1, SLOTS, HIDDEN)
    for slots in (1, 2):
        short = convolution(normed[:, :slots])(x[:, :slots], 0)
        torch.testing.assert_close(short, convolution(normed)(x, 0)[:, :slots])


def test_where_it_stands(target: Target) -> None:
    """x + filter_1(layer(filter_0(norm(x)))) with both filters from norm(x), round attention and MLP; none round Mamba."""
    drafter = tiny_drafter(target, pattern=["mamba", "mlp"], attention=None, kv_layers=[], convolution={"group": 16})
    assert drafter.convolutions is not None
    assert [isinstance(c, BlockConvolution) for c in drafter.convolutions] == [False, True]
    trace: list[Tensor] = []
    drafter.backbone(make_context(target, drafter), 5, trace)
    x = trace[0]
    y = drafter.norms[1](x)
    filters = drafter.convolutions[1](y)
    torch.testing.assert_close(trace[1], x + filters(drafter.layers[1](filters(y, 0)), 1))
    without = x + drafter.layers[1](y)
    assert not torch.allclose(trace[1], without, atol=1e-2)


def test_it_looks_back_within_its_own_block_only(target: Target) -> None:
    """Of several blocks in a row of training, none sees another's slots."""
    drafter = tiny_drafter(target, pattern=["mlp"], mamba=None, attention=None, kv_layers=[], convolution={"group": 16})
    context = make_context(target, drafter)
    two = replace(
        context,
        anchors=torch.tensor([[7, 9]]),
        positions=context.positions.expand(1, 2),
        taps=context.taps.expand(1, 2, -1, -1),
    )
    both = drafter.backbone(two, 4)
    for n, anchor in enumerate((7, 9)):
        alone = drafter.backbone(replace(context, anchors=torch.tensor([[anchor]])), 4)
        torch.testing.assert_close(both[:, n : n + 1], alone)
