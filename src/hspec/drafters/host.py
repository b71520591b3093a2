"""What a drafter needs of the target that it is joined to."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol

import torch
from torch import Tensor

from hspec.targets.cache import CacheShape


class HashedTemplate(Protocol):
    @property
    def hash(self) -> str: ...


class DrafterHost(Protocol):
    """A :class:`hspec.targets.target.Target`, or the same facts about a target that another engine runs."""

    @property
    def name(self) -> str: ...
    @property
    def config(self) -> Any: ...
    @property
    def layers(self) -> Sized: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def cache_shape(self) -> CacheShape: ...
    @property
    def template(self) -> HashedTemplate: ...
    @property
    def embedding_weight(self) -> Tensor: ...
    @property
    def head_weight(self) -> Tensor: ...
    @property
    def device(self) -> torch.device: ...
    def weight_hash(self) -> str | None:
        """None where it cannot be told."""
