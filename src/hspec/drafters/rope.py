"""Rotary positions as the reused target layer has them: theta, scaling and partial rotation included."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

_SUPPORTED = ("default", "linear", "llama3", "yarn")


class Rope(nn.Module):
    """cos and sin for absolute positions.

    Args:
        parameters: transformers' ``rope_parameters`` of one layer (``rope_type``, ``rope_theta``, ...).
        head_dim: of the attention it serves; with ``partial_rotary_factor`` only the first part is rotated.
    """

    def __init__(self, parameters: dict[str, Any], head_dim: int, max_positions: int = 0):
        super().__init__()
        kind = parameters.get("rope_type", "default")
        if kind not in _SUPPORTED:
            raise ValueError(f"rope_type {kind!r} is not supported ({', '.join(_SUPPORTED)} are)")
        rotary = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
        if kind == "default":
            steps = torch.arange(0, rotary, 2, dtype=torch.float32) / rotary
            inverse, self.scaling = 1.0 / parameters["rope_theta"] ** steps, 1.0
        else:
            config = SimpleNamespace(
                rope_parameters=parameters,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                standardize_rope_params=lambda: None,
            )
            inverse, self.scaling = ROPE_INIT_FUNCTIONS[kind](config, device=None)
        self.register_buffer("inverse_frequency", inverse.float(), persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Positions ``[...]`` -> cos, sin ``[..., rotary]`` in fp32."""
        angles = positions[..., None].float() * self.inverse_frequency
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scaling, angles.sin() * self.scaling


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``cos.shape[-1]`` dimensions of ``x``, pairs (i, i + half), and leave the rest."""
    rotary = cos.shape[-1]
    head, rest = x[..., :rotary], x[..., rotary:]
    half = rotary // 2
    turned = torch.cat((-head[..., half:], head[..., :half]), dim=-1)
    head = head * cos + turned * sin
    return head if rest.shape[-1] == 0 else torch.cat((head, rest), dim=-1)
