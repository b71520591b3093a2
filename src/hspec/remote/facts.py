"""What a feature server and a trainer must have in common, so that it does not matter in which process the layers run."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch

import hspec
from hspec.targets.target import Target

FEATURE_DTYPES = ("float32", "bfloat16", "float16")
LINEARS_OF: dict[str, Literal["packed", "bf16"]] = {"fp32": "packed", "bf16": "bf16"}
"""By ``precision``, how a frozen target runs its linears (see :meth:`hspec.targets.target.Target.prepare`)."""


@dataclass(frozen=True)
class Facts:
    """Of a target, and of how its layers are run."""

    target: str
    weight_hash: str | None
    layers: int
    hidden_size: int
    vocab_size: int
    dtype: str
    """Of weights and residual streams."""
    precision: str
    """fp32 or bf16: that of the matrix products of a float32 target, as in training; of another target its type."""
    version: str = hspec.__version__

    @staticmethod
    def of(target: Target, dtype: torch.dtype, precision: str) -> Facts:
        name = str(dtype).removeprefix("torch.")
        precision = precision if dtype == torch.float32 else name
        sizes = (len(target.layers), target.hidden_size, target.vocab_size)
        return Facts(target.name, target.weight_hash(), *sizes, name, precision)

    def difference(self, served: dict[str, Any]) -> str | None:
        """What a server has otherwise than this, as the end of a sentence about the server; None if nothing matters."""
        mine = asdict(self)
        for name, advice in _ADVICE.items():
            if served.get(name) != mine[name]:
                value = served.get(name)
                return f"has {_WORDS[name]} {value!r}, and this run {mine[name]!r}: {advice.format(**mine)}"
        return None


_WORDS = {
    "version": "the version of hspec",
    "weight_hash": "a target whose weights have the hash",
    "layers": "a target whose layers number",
    "hidden_size": "a target of the width",
    "vocab_size": "a target whose vocabulary is",
    "dtype": "weights of the type",
    "precision": "products of the precision",
}
_ADVICE = {
    "version": "install the same on both sides",
    "dtype": "start it with --dtype {dtype}, or set feature_server.dtype",
    "precision": "start it with --precision {precision}, or set train.precision",
    "weight_hash": "start it on this run's target ({target})",
    "layers": "start it on this run's target ({target})",
    "hidden_size": "start it on this run's target ({target})",
    "vocab_size": "start it on this run's target ({target})",
}
