"""Rotary positions as the reused target layer has them: theta, scaling and partial rotation included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from hspec.errors import UsageError

_SUPPORTED = ("default", "linear", "llama3", "yarn")


class Rope(nn.Module):
    """cos and sin for absolute positions.

    Args:
        parameters: transformers' ``rope_parameters`` of one layer (``rope_type``, ``rope_theta``, ...).
        head_dim: of the attention it serves; with ``partial_rotary_factor`` only the first part is rotated.

    Raises:
        UsageError: a kind of scaling that is not supported, or parameters without what their kind needs.
    """

    inverse_frequency: Tensor

    def __init__(self, parameters: dict[str, Any], head_dim: int):
        super().__init__()
        kind = parameters.get("rope_type", "default")
        if kind not in _SUPPORTED:
            raise UsageError(
                f"rope_type {kind!r} is not supported ({', '.join(_SUPPORTED)} are): choose another target or drafter"
            )
        parameters = {name: value for name, value in parameters.items() if value is not None}
        try:
            inverse, self.scaling = _frequencies(kind, parameters, head_dim)
        except KeyError as error:
            raise UsageError(f"rope_parameters of the kind {kind!r} lack {error}: {parameters}") from error
        self.register_buffer("inverse_frequency", inverse.float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions ``[...]`` -> cos, sin ``[..., rotary]`` in fp32."""
        angles = positions[..., None].float() * self.inverse_frequency
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def _frequencies(kind: str, parameters: dict[str, Any], head_dim: int) -> tuple[Tensor, float]:
    """Inverse frequencies ``[rotary / 2]`` and the factor on cos and sin."""
    if kind == "default":
        rotary = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        steps = torch.arange(0, rotary, 2, dtype=torch.float32) / rotary
        return 1.0 / parameters["rope_theta"] ** steps, 1.0
    # What transformers' functions ask of a model's configuration; some read the sizes although head_dim is given.
    config = SimpleNamespace(
        rope_parameters=parameters,
        head_dim=head_dim,
        hidden_size=head_dim,
        num_attention_heads=1,
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[kind](config, device=None)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` dimensions of ``x``, pairs (i, i + half), and leave the rest."""
    rotary = cos.shape[-1]
    head, rest = x[..., :rotary], x[..., rotary:]
    half = rotary // 2
    turned = torch.cat((-head[..., half:], head[..., :half]), dim=-1)
    head = head * cos + turned * sin
    return head if rest.shape[-1] == 0 else torch.cat((head, rest), dim=-1)
