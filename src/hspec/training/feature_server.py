"""Where a run's target is, if its layers run at feature servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field, model_validator

from hspec.drafters.config import DrafterConfig, Strict
from hspec.errors import UsageError
from hspec.remote.address import Address
from hspec.remote.ahead import StreamsAhead
from hspec.remote.client import FeatureClient, Patience
from hspec.remote.facts import Facts
from hspec.remote.vllm import VllmClient
from hspec.targets.partial import PartialTarget, load_partial_target

Place = TypeVar("Place")


class FeatureServerConfig(Strict):
    """One or more servers of the same target. An address alone, or a list of them, stands for a server with nothing else said."""

    at: tuple[str, ...] = Field(min_length=1)
    """``host:port`` or ``unix:PATH`` of ``hspec serve-features``, or ``http://host:port`` of vLLM (see :mod:`hspec.remote.vllm`)."""
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
            for text in () if self.vllm else self.at:
                Address.parse(text)
        except UsageError as error:
            raise ValueError(str(error)) from error
        return self

    @property
    def vllm(self) -> bool:
        return all(text.startswith(("http://", "https://")) for text in self.at)


def needed_streams(config: DrafterConfig) -> list[int]:
    """Whose inputs a training asks for, first and last: those of taps, of layers whose K/V are read or whose weights it begins with, and
    what leaves the last layer."""
    layers = config.target.layers
    begun_with = {min(tap, layers - 1) for tap in config.taps}
    return sorted({*config.taps, *begun_with, *getattr(config, "kv_layers", ()), layers})


def served_target(
    source: str,
    config: FeatureServerConfig,
    precision: Literal["fp32", "bf16"],
    device: str,
    rank: int,
    count: int,
    layers: Sequence[int] = (),
) -> PartialTarget:
    """A target without its layers, connected to the servers that run them.

    Args:
        rank, count: of this process among those of the run.
        layers: whose streams vLLM was started with (see :func:`needed_streams`); other servers are told with every batch.

    Raises:
        UsageError: no such target, or its weights are not in safetensors files.
        HSpecError: a server is not there, or has another target.
    """

    def connect(target: PartialTarget) -> StreamsAhead:
        dtype = getattr(torch, config.dtype)
        # Weights that are stored in fp32 are others when they are loaded in bf16.
        facts = replace(Facts.of(target, dtype, precision), weight_hash=target.files.hash(dtype))
        patience = Patience(config.patience, config.timeout)
        if config.vllm:
            asked = shared_out(config.at, rank, count)
            return StreamsAhead([VllmClient(at, facts, patience, layers, target) for at in asked], f"vLLM, {config.dtype}")
        places = shared_out([Address.parse(text) for text in config.at], rank, count)
        clients = [FeatureClient(at, facts, patience) for at in places]
        return StreamsAhead(clients, None if config.dtype == "float32" else config.dtype)

    return load_partial_target(source, connect, device, "bf16" if precision == "bf16" else "packed")


def shared_out(places: Sequence[Place], rank: int, count: int) -> list[list[Place]]:
    """Which servers a process asks in turn, and for each of them whom it asks instead if that one is gone.

    Processes take the servers one after the other; where there are more servers than processes, each has several.
    """
    own = [rank % len(places)] if count >= len(places) else range(rank, len(places), count)
    return [[*places[place:], *places[:place]] for place in own]
