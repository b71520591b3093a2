"""The golden cases as drafters and inputs (see golden/README.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from hspec.drafters.checkpoint import load_weights
from hspec.drafters.context import DraftContext
from hspec.drafters.formats.authors import authors_config
from hspec.drafters.formats.speculators import read_weights
from hspec.drafters.parallel import ParallelDrafter
from hspec.targets.cache import CacheShape, KVCache

FOLDER = Path(__file__).parent / "golden"
LAYERS = 8
LENGTH = 64
"""Tokens that the K/V of the inputs stand for."""


@dataclass
class GoldenCase:
    raw: dict[str, Any]
    """The checkpoint's config.json."""
    tensors: dict[str, Tensor]
    drafter: ParallelDrafter
    cache: KVCache
    """One row; longer than the inputs, with NaN behind them, so that reading too far shows."""

    @property
    def anchors(self) -> list[int]:
        return self.tensors["in.anchors"].tolist()

    def expected(self, anchor: int, name: str) -> Tensor:
        return self.tensors[f"out.{anchor}.{name}"]

    def context(self, anchors: list[int]) -> DraftContext:
        """All of ``anchors`` as blocks of the one sequence."""
        at = torch.tensor(anchors)
        return DraftContext(
            anchors=self.tensors["in.input_ids"][at][None],
            positions=at[None],
            taps=self.tensors["in.target_hidden"][at - 1][None],
            kv=self.cache.view(),
        )

    def weights(self) -> dict[str, Tensor]:
        """Under the layout's names."""
        return {name[2:]: tensor for name, tensor in self.tensors.items() if name.startswith("w.")}


def load_case(name: str) -> GoldenCase:
    raw = json.loads((FOLDER / f"case_{name}.json").read_text(encoding="utf-8"))
    tensors = load_file(FOLDER / f"case_{name}.safetensors")
    config = authors_config(raw, LAYERS)
    weights = {key[2:]: tensor for key, tensor in tensors.items() if key.startswith("w.")}
    read = read_weights(raw, weights, config, name)
    assert read.embedding is not None and read.head is not None
    drafter = ParallelDrafter(config, read.embedding, read.head, read.draft_ids)
    load_weights(drafter, read.weights, name)
    cache = KVCache(CacheShape(LAYERS, 2, 16), 1, LENGTH + 32, torch.float32, "cpu")
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(float("nan"))
    for index, layer in enumerate(sorted(set(raw["attn_kv_layer_ids"]))):
        for tensor, given in zip((cache.keys[layer], cache.values[layer]), tensors["in.target_kv"][index], strict=True):
            tensor[0, :, :LENGTH] = given.transpose(0, 1)
    cache.lengths = [LENGTH]
    return GoldenCase(raw, tensors, drafter.eval().requires_grad_(False), cache)
