"""Module swaps change nothing, whatever the number of rows."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hspec.targets.packing import (
    FusedRMSNorm,
    HalfLinear,
    PackedLinear,
    can_pack,
    fuse_norms,
    halve_linears,
    has_bf16_products,
    pack_linears,
)

SHAPES = [
    (576, 576, False),
    (64, 211, False),
    (48, 100, True),
    (300, 7, True),
    (1, 5, False),
    (1024, 64, False),
    (1536, 576, False),
    (2048, 64, True),
]


@pytest.mark.parametrize("inner, outer, bias", SHAPES)
def test_a_row_is_the_same_among_any_number_of_rows(inner: int, outer: int, bias: bool) -> None:
    """Bit for bit: verifying k + 1 rows gives exactly the linears of one-row decoding."""
    packed = PackedLinear(nn.Linear(inner, outer, bias=bias))
    x = torch.randn(40, inner)
    alone = torch.cat([packed(row[None]) for row in x])
    for count in (2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 40):
        assert torch.equal(packed(x[:count]), alone[:count])
        assert torch.equal(packed(x[None, -count:])[0], alone[-count:])


@pytest.mark.parametrize("inner, outer, bias", SHAPES)
def test_packed_is_the_linear(inner: int, outer: int, bias: bool) -> None:
    linear = nn.Linear(inner, outer, bias=bias)
    x = torch.randn(2, 9, inner)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double() if bias else None)
    torch.testing.assert_close(PackedLinear(linear)(x).double(), exact, atol=1e-5, rtol=1e-5)


def test_every_linear_below_is_swapped() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Sequential(nn.SiLU(), nn.Linear(8, 4, bias=False)), nn.LayerNorm(4))
    x = torch.randn(3, 8)
    before = model(x)
    assert pack_linears(model) == 2
    assert isinstance(model[0], PackedLinear) and isinstance(model[1][1], PackedLinear)
    assert "in_features=8, out_features=4, packed" in repr(model)
    torch.testing.assert_close(model(x), before, atol=1e-6, rtol=1e-5)
    assert pack_linears(model) == 0


def test_only_fp32_on_the_cpu_is_packed() -> None:
    model = nn.Sequential(nn.Linear(8, 8)).bfloat16()
    assert not can_pack(model) and pack_linears(model) == 0 and isinstance(model[0], nn.Linear)
    assert not can_pack(nn.Linear(2, 2, device="meta")) and not can_pack(nn.SiLU())


def test_tied_weights_stay_where_they_are_shared() -> None:
    embedding, head = nn.Embedding(20, 8), nn.Linear(8, 20, bias=False)
    head.weight = embedding.weight
    model = nn.Sequential(embedding, head)
    wanted = embedding.weight.detach().clone()
    pack_linears(model)
    assert torch.equal(embedding.weight, wanted)
    torch.testing.assert_close(model(torch.tensor([3])), (wanted[3] @ wanted.T)[None], atol=1e-6, rtol=1e-5)


def test_fused_norms() -> None:
    norm = LlamaRMSNorm(48, eps=1e-5)
    nn.init.normal_(norm.weight)
    gemma = Gemma3RMSNorm(48)  # scales by 1 + weight: not the same kind
    model = nn.ModuleList([norm, gemma, LlamaRMSNorm(48).bfloat16()])
    x = torch.randn(5, 48)
    before = norm(x)
    assert fuse_norms(model) == 1
    assert isinstance(model[0], FusedRMSNorm) and model[1] is gemma
    torch.testing.assert_close(model[0](x), before, atol=1e-6, rtol=1e-5)
    assert torch.equal(torch.cat([model[0](row[None]) for row in x]), model[0](x)), "a row does not depend on others"


def test_half_linears() -> None:
    model = nn.Sequential(nn.Linear(48, 16), nn.Linear(16, 4, bias=False))
    x = torch.randn(3, 48)
    before = model(x)
    assert halve_linears(model) == 2
    assert all(isinstance(m, HalfLinear) and m.weight.dtype == torch.bfloat16 for m in model)
    after = model(x)
    assert after.dtype == torch.float32
    torch.testing.assert_close(after, before, atol=0.05, rtol=0.05)


def test_bf16_products_are_asked_of_the_device() -> None:
    assert isinstance(has_bf16_products(torch.device("cpu")), bool)
    assert not has_bf16_products(torch.device("meta"))
