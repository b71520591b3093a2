"""A model's weights in its folder's safetensors files, read one by one: what is not asked for is never in memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hspec.errors import HSpecError, UsageError
from hspec.files import reason
from hspec.targets.weight_hash import hash_weights, sampled_rows

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


class WeightFiles:
    """
    Args:
        folder: of a model in transformers' layout. config: its configuration.

    Raises:
        UsageError: its weights are not in safetensors files.
        HSpecError: a file is damaged or missing.
    """

    def __init__(self, folder: Path, config: Any):
        self.folder = folder
        self._files = _files(folder)
        tied = getattr(config, "tie_word_embeddings", False) and "lm_head.weight" not in self._files
        self._stored = {name: name for name in self._files} | ({"lm_head.weight": "model.embed_tokens.weight"} if tied else {})

    @property
    def names(self) -> list[str]:
        """Of all weights that the model has, tied ones under both names."""
        return sorted(self._stored)

    def below(self, prefix: str) -> list[str]:
        """The names that begin so."""
        return [name for name in self.names if name.startswith(prefix)]

    def read(self, name: str) -> Tensor:
        """A weight as it is stored, on the CPU.

        Raises:
            HSpecError: it is not there, or its file is damaged.
        """
        return self._open(name, lambda file, stored: file.get_tensor(stored))

    def hash(self, dtype: torch.dtype = torch.float32) -> str:
        """What :meth:`hspec.targets.target.Target.weight_hash` is for the model loaded in this type; some rows of each weight are read."""
        return hash_weights((name, self._open(name, _some_rows).to(dtype)) for name in self.names)

    def _open(self, name: str, read: Any) -> Tensor:
        if name not in self._stored:
            raise HSpecError(f"{self.folder} has no weight {name}: the checkpoint is incomplete, or of another layout")
        path = self._files[self._stored[name]]
        try:
            with safe_open(path, framework="pt") as file:
                return read(file, self._stored[name])
        except (OSError, SafetensorError) as error:
            raise HSpecError(f"cannot read {name} from {path}: {reason(error)}; fetch the model again") from error


def _some_rows(file: Any, name: str) -> Tensor:
    part = file.get_slice(name)
    return torch.stack([part[row] for row in sampled_rows(part.get_shape()[0])])


def _files(folder: Path) -> dict[str, Path]:
    """Which file holds each weight."""
    index, single = folder / _INDEX, folder / _SINGLE
    try:
        if index.is_file():
            return {name: folder / file for name, file in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return dict.fromkeys(file.keys(), single)
    except (OSError, ValueError, LookupError, SafetensorError) as error:
        raise HSpecError(f"the weights in {folder} cannot be read: {reason(error)}; fetch the model again") from error
    raise UsageError(f"{folder} has neither {_SINGLE} nor {_INDEX}: single weights can be read from safetensors files only")
