"""The training loop: text -> frozen target -> blocks -> objective -> weights, with averages, checkpoints and exact resume."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hspec.drafters.checkpoint import save_drafter
from hspec.drafters.drafter import Drafter
from hspec.errors import HSpecError, UsageError
from hspec.files import reason
from hspec.targets.target import Target
from hspec.training.blocks import BlockBatch, cut_blocks, draw_anchors
from hspec.training.config import TrainConfig
from hspec.training.examples import Batch, Example, ExampleStream
from hspec.training.features import FeatureSource, KeptFeatures
from hspec.training.loss import BlockLoss, LossSums
from hspec.training.trackers import Trackers
from hspec.training.validation import Meter, Validation

STATE_FILE = "state.pt"
FEATURES_FILE = "features.bin"


class Trainer:
    """Owns a drafter while it learns.

    Args:
        target: frozen; may run its linears in bf16.
        drafter: trainable, fp32.
        examples: training documents. held_out: documents that only validation sees.
        folder: where checkpoints and the log go.
    """

    def __init__(
        self, config: TrainConfig, target: Target, drafter: Drafter, examples: Sequence[Example],
        held_out: Sequence[Example], folder: Path,
    ):  # fmt: skip
        config = config.for_block(drafter.config.max_draft)
        self.config, self.target, self.drafter, self.folder = config, target, drafter, folder
        self.slots = max(stage.slots for stage in config.growth)
        drafter.check_k(self.slots)
        self.stream = ExampleStream(examples, config.batch_tokens, config.seed)
        self._streamed = FeatureSource(target, drafter.config)
        self.features = self._streamed
        if config.features != "stream":
            file = folder / FEATURES_FILE if config.features == "disk" else None
            self.features = KeptFeatures(target, drafter.config, self.stream.examples, file)
        self.validation = Validation(held_out, config, self._streamed, self.slots) if held_out else None
        self.trackers = Trackers(folder, config.trackers, config.model_dump(mode="json"))
        self.step = 0
        self.blocks_seen = 0
        self.seconds = 0.0
        drafter.train()
        self.optimiser = torch.optim.AdamW(self._groups(), lr=config.learning_rate, betas=config.betas, fused=True)
        self.ema = {name: p.detach().clone() for name, p in drafter.named_parameters()}
        self.loss = BlockLoss(drafter, target, config)

    # -- one step ------------------------------------------------------------------------------------------------

    def train_step(self) -> tuple[LossSums, int]:
        """One optimiser step; returns what the loss was made of, and how many blocks."""
        stage = self.config.stage(self.step)
        blocks = self._blocks(self.stream.batch(self.step), stage.slots, stage.density, self.step, self.features)
        for group in self.optimiser.param_groups:
            group["lr"] = self._learning_rate() * group["factor"]
        sums = self.loss(blocks, self.config.weights(self.step), self.step / self.config.steps)
        self.optimiser.zero_grad(set_to_none=True)
        sums.mean.backward()
        norm = nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.clip)
        if not math.isfinite(float(norm)):
            raise HSpecError(
                f"step {self.step}: the gradients are not finite, the run has diverged; what {self.folder} holds is from before: "
                f"start again with a lower learning_rate, from there if you like (--init-from)"
            )
        self.optimiser.step()
        self.step += 1
        self._average()
        count = int(blocks.weight[..., 0].sum())
        self.blocks_seen += count
        return sums, count

    def _blocks(self, batch: Batch, slots: int, density: float, key: int, source: FeatureSource) -> BlockBatch:
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + key)
        anchors = draw_anchors(batch, density, generator)
        return cut_blocks(source(batch), batch, anchors, slots)

    def _learning_rate(self) -> float:
        c = self.config
        if self.step < c.warmup_steps:
            return c.learning_rate * (self.step + 1) / c.warmup_steps
        done = (self.step - c.warmup_steps) / max(1, c.steps - c.warmup_steps)
        low = c.final_learning_rate
        return c.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))

    def _average(self) -> None:
        decay = min(self.config.ema, (1 + self.step) / (10 + self.step))
        own = [p.detach() for _, p in self.drafter.named_parameters()]
        torch._foreach_lerp_(list(self.ema.values()), own, 1 - decay)

    def _groups(self) -> list[dict[str, Any]]:
        """Weight decay for matrices only: norms, biases, A_log, D, dt_bias and the mask embedding are vectors, and have none.
        The causal head learns faster."""
        c = self.config
        groups: dict[tuple[bool, bool], list[nn.Parameter]] = {}
        for name, p in self.drafter.named_parameters():
            groups.setdefault((p.dim() < 2, name.startswith("causal.")), []).append(p)
        return [
            {
                "params": parameters,
                "weight_decay": 0.0 if plain else c.weight_decay,
                "factor": c.head_learning_rate if causal else 1.0,
            }
            for (plain, causal), parameters in groups.items()
        ]

    # -- the run -------------------------------------------------------------------------------------------------

    def run(self, report: Callable[[dict[str, Any]], None], stop: Callable[[], bool] = lambda: False) -> None:
        """Train to the end, or until ``stop`` says so; saves at intervals, at the end and when stopped."""
        meter = Meter()
        last_save = last_check = last_report = time.monotonic()
        while self.step < self.config.steps and not stop():
            began = time.monotonic()
            meter.add(*self.train_step())
            now = time.monotonic()
            self.seconds += now - began
            if now - last_report > 20 or self.step == self.config.steps:
                report(self._log("train", meter, meter.blocks / (now - last_report)))
                meter, last_report = Meter(), now
            if now - last_check > self.config.validate_minutes * 60:
                self._check(report)
                last_check = time.monotonic()
            if now - last_save > self.config.save_minutes * 60:
                self.save()
                last_save = time.monotonic()
        if self.step == self.config.steps:
            self._check(report)
        self.save()
        self.trackers.close()

    def _check(self, report: Callable[[dict[str, Any]], None]) -> None:
        if self.validation is not None:
            report(self.validate())

    def validate(self) -> dict[str, Any]:
        """Statistics of the averaged weights on held-out documents, at the drafter's full block; anchors are always the same."""
        if self.validation is None:
            return {}
        own = {name: p.detach().clone() for name, p in self.drafter.named_parameters()}
        try:
            self._load(self.ema)
            meter = self.validation(self.loss)
        finally:
            self._load(own)
        return self._log("held-out", meter, 0.0)

    def _load(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, p in self.drafter.named_parameters():
                p.copy_(weights[name])

    def _log(self, kind: str, meter: Meter, rate: float) -> dict[str, Any]:
        record = {
            "kind": kind, "step": self.step, "steps": self.config.steps, "blocks": self.blocks_seen,
            "seconds": round(self.seconds, 1), "blocks_per_second": round(rate, 1),
            "slots": self.config.stage(min(self.step, self.config.steps - 1)).slots, **meter.report(),
        }  # fmt: skip
        self.trackers.log(record)
        return record

    # -- state ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """The averaged weights as a drafter that can be used, and the state to go on from; each appears whole or not at all."""
        save_drafter(self.drafter, self.folder, state=self.ema)
        state = {
            "format": 1,
            "config": self.config.model_dump(),
            "drafter": self.drafter.state_dict(),
            "ema": self.ema,
            "optimiser": self.optimiser.state_dict(),
            "step": self.step,
            "blocks": self.blocks_seen,
            "seconds": self.seconds,
            "draft_ids": self.drafter.draft_ids,
            "data": self.stream.fingerprint(),
        }
        temporary = self.folder / (STATE_FILE + ".partial")
        try:
            torch.save(state, temporary)
            temporary.replace(self.folder / STATE_FILE)
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            raise HSpecError(
                f"cannot write the training state to {self.folder}: {reason(error)}. The last one is still whole: free some space "
                f"and --resume"
            ) from error

    def resume(self) -> None:
        """Go on from what :meth:`save` wrote; every later step is the same as if the run had not stopped.

        Raises:
            UsageError: nothing to resume from.
        HSpecError: a damaged state, or one of another configuration, drafter or data.
        """
        path = self.folder / STATE_FILE
        if not path.exists():
            raise UsageError(f"nothing to resume: {path} is not there; start without --resume")
        try:
            state = torch.load(path, map_location=self.target.device, weights_only=True)
        except Exception as error:  # torch raises many types for a damaged archive
            raise HSpecError(
                f"{path} is damaged ({_first_line(error)}): train on from the drafter beside it, with --init-from {self.folder} and "
                f"another --out"
            ) from error
        if not isinstance(state, dict) or state.get("format") != 1:
            raise HSpecError(f"{path} is no training state that this version can read: start anew in another folder")
        if TrainConfig.model_validate(state["config"]) != self.config:
            raise HSpecError(
                f"{path} belongs to a run with other settings: resume with the settings saved there, or start anew"
            )
        if state.get("data", self.stream.fingerprint()) != self.stream.fingerprint():
            raise HSpecError(
                f"the training data is not what the run in {self.folder} began with: bring it back, or start another run with "
                f"--init-from {self.folder}"
            )
        if not torch.equal(state["draft_ids"], self.drafter.draft_ids):
            raise HSpecError(f"{path} is of a drafter with another draft vocabulary than the one in {self.folder}: start anew")
        try:
            self.drafter.load_state_dict(state["drafter"])
            self.ema = {name: state["ema"][name] for name in self.ema}
            self.optimiser.load_state_dict(state["optimiser"])
        except (RuntimeError, KeyError, ValueError) as error:
            raise HSpecError(
                f"{path} does not fit the drafter in {self.folder} ({_first_line(error)}): start anew in another folder"
            ) from error
        self.step, self.blocks_seen, self.seconds = state["step"], state["blocks"], state["seconds"]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
