"""A training run as one strict schema: the source of the command line, the YAML file and what is saved beside the weights."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from hspec.drafters.config import Strict
from hspec.training.objective import LossWeights


class GrowthStage(Strict):
    """From this fraction of the steps on, blocks have so many drafted slots, and so many anchors are drawn per candidate."""

    start: float = Field(ge=0, lt=1)
    slots: int = Field(ge=1)
    density: float = Field(gt=0, le=1)


class TrainConfig(Strict):
    """Everything that decides what a run computes."""

    steps: int = Field(1000, gt=0)
    """Optimiser steps; the learning rate, the growth and the loss schedule are laid out over them."""
    batch_tokens: int = Field(2048, gt=0)
    """Padded document tokens a step."""
    max_tokens: int = Field(1024, gt=1)
    """Longer documents are cut."""
    anchor_cap: int | None = Field(None, gt=0)
    """At most so many anchors in one document a step; None leaves it to the density (see :func:`hspec.training.blocks.anchor_counts`)."""
    learning_rate: float = Field(1e-3, gt=0)
    final_learning_rate: float = Field(0.05, ge=0, le=1)
    """As a fraction of the peak."""
    warmup_steps: int = Field(50, ge=0)
    head_learning_rate: float = Field(4.0, gt=0)
    """Factor on the learning rate of the Markov head."""
    weight_decay: float = Field(0.01, ge=0)
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float = Field(1.0, gt=0)
    ema: float = Field(0.998, ge=0, lt=1)
    growth: tuple[GrowthStage, ...] = ()
    """Empty: one slot, then two, then the drafter's whole block (see :func:`default_growth`)."""
    ce: float = Field(0.1, ge=0)
    """What the objective's terms weigh (see docs/objective.md)."""
    lk: float = Field(0.0, ge=0)
    kl: float | None = Field(None, ge=0)
    """With ``tv`` unset too, the two share what CE and LK-hybrid leave of 1, by the schedule that follows. If one of them is set,
    both weigh the same from the first step to the last, the unset one nothing."""
    tv: float | None = Field(None, ge=0)
    warm_kl_until: float = Field(0.5, ge=0, le=1)
    """KL instead of TV up to this fraction of the steps ..."""
    tv_from: float = Field(0.7, ge=0, le=1)
    """... and TV alone from here on, linear in between."""
    lk_eta: float = Field(3.0, ge=0)
    """LK-hybrid is KL with the weight exp(-eta acceptance), and TV with the rest."""
    ce_label: Literal["argmax", "data"] = "argmax"
    """CE's label: the target's likeliest token, or the token of the text. Outside the draft vocabulary a slot has no CE."""
    gamma: float = Field(4.0, gt=0)
    """Slot j weighs exp(-(j - 1) / gamma) ..."""
    position_weights: Literal["decay", "dpace"] = "decay"
    """... or what it adds to the expected accepted length as the drafter stands (D-PACE)."""
    dpace_alpha: float = Field(0.5, gt=0, le=1)
    """How much of every acceptance D-PACE takes for granted."""
    confidence: float = Field(1.0, ge=0)
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs the matrix products of drafter and target in bf16 where the processor can; weights stay fp32."""
    features: Literal["stream", "memory", "disk"] = "stream"
    """What the target leaves of a document: run anew every time, or kept in half precision from the first time."""
    seed: int = Field(0, ge=0, lt=2**40)
    save_minutes: float = Field(5.0, gt=0)
    keep: int = Field(2, gt=0)
    """How many of the last saved states."""
    validate_minutes: float = Field(10.0, gt=0)
    validate_tokens: int = Field(16384, gt=0)
    """Held-out tokens that a validation looks at, at most; it always takes the same ones, and one document at least."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Who is told the numbers beside log.jsonl (see :mod:`hspec.training.trackers`)."""
    objective_chunk: int = Field(128, gt=0)
    """Slots whose logits exist at once: the objective's memory is in proportion to it."""

    @model_validator(mode="after")
    def _growth_ascends(self) -> TrainConfig:
        starts = [stage.start for stage in self.growth]
        if starts and (starts[0] != 0 or starts != sorted(set(starts))):
            raise ValueError(f"growth must start at 0 and ascend, not {starts}")
        if self.tv_from < self.warm_kl_until:
            raise ValueError(f"tv_from ({self.tv_from}) must not come before warm_kl_until ({self.warm_kl_until})")
        return self

    @model_validator(mode="after")
    def _terms_weigh(self) -> TrainConfig:
        if self.scheduled and self.ce + self.lk > 1:
            raise ValueError(
                f"ce ({self.ce}) and lk ({self.lk}) leave nothing of 1 for KL and TV: let them sum to 1 at most, or set kl or tv"
            )
        if not self.scheduled and not (self.ce or self.lk or self.kl or self.tv):
            raise ValueError("ce, lk, kl and tv are all 0: give one of the objective's terms a weight")
        return self

    @property
    def scheduled(self) -> bool:
        """Whether KL gives way to TV in the course of the run."""
        return self.kl is None and self.tv is None

    def weights(self, step: int) -> LossWeights:
        """What the objective's terms weigh at a step; ``steps`` itself is past the last one."""
        kl, tv = self.kl or 0.0, self.tv or 0.0
        if self.scheduled:
            share, rest = self.kl_share(step), 1 - self.ce - self.lk
            kl, tv = rest * share, rest * (1 - share)
        return LossWeights(self.ce, kl, tv, self.lk, self.lk_eta)

    @property
    def slots(self) -> int | None:
        """The longest block that is trained, or None if the drafter decides."""
        return max((stage.slots for stage in self.growth), default=None)

    def for_block(self, slots: int) -> TrainConfig:
        """The same, with the growth for a drafter of so many slots written out."""
        return self if self.growth else self.model_copy(update={"growth": default_growth(slots)})

    def stage(self, step: int) -> GrowthStage:
        return next(s for s in reversed(self.growth) if s.start <= step / self.steps)

    def kl_share(self, step: int) -> float:
        """1 in the warm-up, 0 at the end: the share of KL in what KL and TV have together."""
        done = step / self.steps
        if done < self.warm_kl_until:
            return 1.0
        if done >= self.tv_from:
            return 0.0
        return (self.tv_from - done) / (self.tv_from - self.warm_kl_until)


def default_growth(slots: int) -> tuple[GrowthStage, ...]:
    """One slot at every position for the first third, two for the second, then the whole block: a prototype took about 40 %
    less time so than with whole blocks from the start."""
    stages = (GrowthStage(start=0.0, slots=1, density=1.0), GrowthStage(start=0.35, slots=2, density=0.7))
    short = tuple(stage for stage in stages if stage.slots < slots)
    last = (0.0, 0.35, 0.7)[len(short)]
    return (*short, GrowthStage(start=last, slots=slots, density=1.0 if slots == 1 else 0.5))
