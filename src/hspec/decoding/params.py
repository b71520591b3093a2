"""What a request asks of the decoding loop."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from hspec.drafters.config import Strict

COLDEST = 1e-6
"""Least temperature above 0: quotients of logits stay far from where fp32 ends."""
LEAST = 1e-9
"""Least ``top_p`` and ``repetition_penalty``, for the same reason."""


class SamplingParams(Strict):
    """How tokens are chosen and when to stop. Temperature 0 is greedy; the rest then only stops or penalises."""

    temperature: float = Field(0.0, ge=0)
    """Logits are divided by it, so that what is above 0 must be at least :data:`COLDEST`."""
    top_k: int = Field(0, ge=0)
    """0 keeps all."""
    top_p: float = Field(1.0, ge=LEAST, le=1)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, ge=LEAST, le=1 / LEAST)
    """Divides positive and multiplies negative logits of tokens in the prompt and the answer so far."""
    seed: int = 0
    max_tokens: int = Field(256, gt=0)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    draft: Literal["auto", "sample", "greedy"] = "auto"
    """At temperature > 0, whether drafts are drawn from the drafter's distribution or are its argmax (one-hot q). Either is
    lossless; ``auto`` is ``sample`` (docs/decoding.md says why)."""

    @field_validator("temperature")
    @classmethod
    def _not_too_cold(cls, temperature: float) -> float:
        if 0 < temperature < COLDEST:
            raise ValueError(f"it must be 0 (greedy) or {COLDEST:g} at least")
        return temperature

    @field_validator("stop")
    @classmethod
    def _no_empty_stop(cls, stop: tuple[str, ...]) -> tuple[str, ...]:
        if any(not s for s in stop):
            raise ValueError("a stop string must not be empty")
        return stop

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def plain(self) -> bool:
        """Whether the chosen token is just the argmax of the raw logits."""
        return self.greedy and self.repetition_penalty == 1.0

    @property
    def drafts_greedily(self) -> bool:
        return self.greedy or self.draft == "greedy"
