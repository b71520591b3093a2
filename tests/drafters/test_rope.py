"""Rotary positions against transformers', and against the keys that a target really caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hspec.drafters.rope import Rope, rotate
from hspec.errors import UsageError
from tests.tiny import tiny_target

HEAD_DIM = 16
DEFAULT = {"rope_type": "default", "rope_theta": 10_000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}
KINDS = [DEFAULT, LINEAR, LLAMA3, YARN, YARN | {"attention_factor": 1.5, "beta_fast": 16, "beta_slow": 2}]
POSITIONS = torch.tensor([[0, 1, 2, 63, 64], [7, 100, 255, 1000, 5000]])


@pytest.mark.parametrize("parameters", KINDS, ids=lambda p: p["rope_type"])
def test_against_transformers(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=HEAD_DIM, max_position_embeddings=256, rope_parameters=dict(parameters)
    )
    theirs = LlamaRotaryEmbedding(config)(torch.zeros(1), POSITIONS)
    for own, other in zip(Rope(parameters, HEAD_DIM)(POSITIONS), theirs, strict=True):
        assert torch.equal(own, other)


def test_scaling_is_not_lost() -> None:
    """Each kind gives other angles, so that the test above could not pass with the default for all."""
    angles = [Rope(p, HEAD_DIM)(torch.tensor([50]))[1] for p in (DEFAULT, LINEAR, LLAMA3, YARN)]
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(angles[i], angles[j], atol=1e-3)


@pytest.mark.parametrize("parameters", KINDS, ids=lambda p: p["rope_type"])
def test_partial_rotation(parameters: dict[str, Any]) -> None:
    """Only the first part is rotated, with the frequencies of a head of that size."""
    rope = Rope(parameters | {"partial_rotary_factor": 0.5}, HEAD_DIM)
    cos, sin = rope(POSITIONS)
    full_cos, full_sin = Rope(parameters, HEAD_DIM // 2)(POSITIONS)
    assert torch.equal(cos, full_cos) and torch.equal(sin, full_sin)
    x = torch.randn(*POSITIONS.shape, HEAD_DIM)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], rotate(x[..., :8], cos, sin))
    assert not torch.allclose(turned[0, 1, :8], x[0, 1, :8])


def test_rotation_pairs_halves() -> None:
    """Dimension i turns with i + half, as in transformers; not with its neighbour."""
    x = torch.randn(2, 3, 5, HEAD_DIM)
    cos, sin = Rope(DEFAULT, HEAD_DIM)(POSITIONS)
    theirs, _ = apply_rotary_pos_emb(x, x, cos, sin)
    assert torch.allclose(rotate(x, cos[:, None], sin[:, None]), theirs, atol=1e-6)


def test_scores_depend_on_distance_only() -> None:
    q, k = torch.randn(2, HEAD_DIM, dtype=torch.float64)
    rope = Rope(DEFAULT, HEAD_DIM)

    def score(i: int, j: int) -> float:
        (cos_i, sin_i), (cos_j, sin_j) = rope(torch.tensor(i)), rope(torch.tensor(j))
        return float(rotate(q, cos_i, sin_i) @ rotate(k, cos_j, sin_j))

    assert score(30, 20) == pytest.approx(score(110, 100), abs=1e-3)
    assert score(30, 20) != pytest.approx(score(31, 20), abs=1e-3)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("parameters", [DEFAULT, LINEAR, LLAMA3, YARN], ids=lambda p: p["rope_type"])
def test_keys_are_those_of_the_target_cache(family: str, parameters: dict[str, Any]) -> None:
    """The drafter's own keys, made with the target's weights, would be the cached ones: same order of norm and rotation."""
    target = tiny_target(family, layers=3, rope_parameters=dict(parameters), max_positions=256)  # type: ignore[arg-type]
    tokens, layer = torch.arange(1, 101)[None], 2
    cache = target.new_cache(1, 100)
    tap = target.forward(tokens, cache, [layer]).taps[0, :, 0]
    weights = target.layer_weights(layer)
    eps = target.config.rms_norm_eps  # type: ignore[union-attr]
    normed = torch.nn.functional.rms_norm(tap, tap.shape[-1:], weights["input_layernorm.weight"], eps)
    k = (normed @ weights["self_attn.k_proj.weight"].T).view(100, 2, HEAD_DIM)
    if family == "qwen3":
        k = torch.nn.functional.rms_norm(k, (HEAD_DIM,), weights["self_attn.k_norm.weight"], eps)
    cos, sin = Rope(dict(target.config.rope_parameters), HEAD_DIM)(torch.arange(100))  # type: ignore[union-attr]
    k = rotate(k, cos[:, None], sin[:, None]).transpose(0, 1)
    assert torch.allclose(k, cache.keys[layer][0, :, :100], atol=1e-4)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope", "rope_theta": 1.0}, "'longrope' is not supported"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_type": "linear", "rope_theta": 1.0}, "factor"),
        ({"rope_type": "yarn", "rope_theta": 1.0, "factor": None, "original_max_position_embeddings": 64}, "factor"),
    ],
)
def test_refuses_what_it_does_not_know(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Rope(parameters, HEAD_DIM)
