"""Where a run's target is, if its layers run at feature servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field, model_validator

from hspec.drafters.config import Strict
from hspec.errors import UsageError
from hspec.remote.address import Address
from hspec.remote.ahead import StreamsAhead
from hspec.remote.client import FeatureClient, Patience
from hspec.remote.facts import Facts
from hspec.targets.partial import PartialTarget, load_partial_target


class FeatureServerConfig(Strict):
    """One or more servers of the same target. An address alone, or a list of them, stands for a server with nothing else said."""

    at: tuple[str, ...] = Field(min_length=1)
    """``host:port`` or ``unix:PATH`` (see :mod:`hspec.remote.address`)."""
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """In which type they run the target."""
    patience: float = Field(600.0, ge=0)
    """Seconds for which a server that is gone is tried again."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that a server may take for a batch."""

    @model_validator(mode="before")
    @classmethod
    def _named(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"at": [value]}
        return {"at": value} if isinstance(value, list | tuple) else value

    @model_validator(mode="after")
    def _addresses(self) -> FeatureServerConfig:
        try:
            self.addresses  # noqa: B018
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def addresses(self) -> list[Address]:
        return [Address.parse(text) for text in self.at]


def served_target(
    source: str, config: FeatureServerConfig, precision: Literal["fp32", "bf16"], device: str, rank: int, count: int
) -> PartialTarget:
    """A target without its layers, connected to the servers that run them.

    Args:
        rank, count: of this process among those of the run.

    Raises:
        UsageError: no such target, or its weights are not in safetensors files.
        HSpecError: a server is not there, or has another target.
    """

    def connect(target: PartialTarget) -> StreamsAhead:
        dtype = getattr(torch, config.dtype)
        # Weights that are stored in fp32 are others when they are loaded in bf16.
        facts = replace(Facts.of(target, dtype, precision), weight_hash=target.files.hash(dtype))
        patience = Patience(config.patience, config.timeout)
        clients = [FeatureClient(addresses, facts, patience) for addresses in shared_out(config.addresses, rank, count)]
        return StreamsAhead(clients, None if config.dtype == "float32" else config.dtype)

    return load_partial_target(source, connect, device, "bf16" if precision == "bf16" else "packed")


def shared_out(addresses: Sequence[Address], rank: int, count: int) -> list[list[Address]]:
    """Which servers a process asks in turn, and for each of them whom it asks instead if that one is gone.

    Processes take the servers one after the other; where there are more servers than processes, each has several.
    """
    own = [rank % len(addresses)] if count >= len(addresses) else range(rank, len(addresses), count)
    return [[*addresses[place:], *addresses[:place]] for place in own]
