"""The training loop: text -> frozen target -> blocks -> objective -> weights, by one process or by many."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

import torch

from hspec.drafters.checkpoint import save_drafter
from hspec.drafters.config import DrafterConfig
from hspec.drafters.drafter import Drafter
from hspec.errors import HSpecError
from hspec.remote.client import FeatureError
from hspec.targets.partial import PartialTarget
from hspec.targets.target import Target
from hspec.training.agenda import Agenda
from hspec.training.blocks import BlockBatch, cut_blocks, draw_anchors
from hspec.training.calibration import Calibration
from hspec.training.checkpoints import Checkpoints
from hspec.training.config import TrainConfig
from hspec.training.divergence import Tally, diverged
from hspec.training.examples import Batch, Example, ExampleStream
from hspec.training.features import FeatureSource, KeptFeatures
from hspec.training.learner import Learner
from hspec.training.log import cut_log, measured_at_end
from hspec.training.loss import BlockLoss, LossSums
from hspec.training.processes import Processes
from hspec.training.shares import documents_of, share_of
from hspec.training.state import PROCESSES, check_same, check_settings
from hspec.training.trackers import Trackers
from hspec.training.validation import Meter, Validation

FEATURES_FILE = "features.bin"
BEST = "best"
ALONE = Processes()
T = TypeVar("T")
Keep = Callable[[DrafterConfig, Sequence[Example]], KeptFeatures]
"""Where the target's features of some documents are kept for a drafter."""


class Trainer:
    """Owns a drafter while it learns. With several processes each has a trainer, and they come to every method together.

    Args:
        target: frozen; may run its linears in bf16.
        drafter: trainable, fp32.
        examples: training documents. held_out: documents that only validation sees.
        folder: where checkpoints and the log go; only the first process writes there.
        shard: each process keeps a share of the drafter (FSDP2), instead of all of it (DDP).
        keep: features that several trainings share; by default this one has its own, as ``config.features`` says.

    Raises:
        HSpecError: the processes have different data, targets or drafters.
    """

    def __init__(
        self, config: TrainConfig, target: Target, drafter: Drafter, examples: Sequence[Example],
        held_out: Sequence[Example], folder: Path, processes: Processes = ALONE, shard: bool = False,
        keep: Keep | None = None,
    ):  # fmt: skip
        config = config.for_block(drafter.config.max_draft)
        self.config, self.target, self.drafter, self.folder, self.processes = config, target, drafter, folder, processes
        self.slots = max(stage.slots for stage in config.growth)
        drafter.check_k(self.slots)
        self.stream = ExampleStream(examples, config.batch_tokens, config.seed)
        self._facts = self._known_facts()
        processes.agree(self._facts | {"the drafter": drafter.config.model_dump(mode="json")})
        self._streamed = FeatureSource(target, drafter.config)
        self._streams = target.streams if isinstance(target, PartialTarget) else None
        self._expected = 0
        """Up to this step the target's layers know what will be asked of them, if they run elsewhere."""
        self.features = self._features(keep)
        self.validation = Validation(held_out, config, self._streamed, self.slots) if held_out else None
        if self.validation is not None and keep is not None:
            self.validation.source = keep(drafter.config, self.validation.stream.examples)
        self.trackers = Trackers(folder, config.trackers, config.model_dump(mode="json"))
        self.checkpoints = Checkpoints(folder, config.keep)
        self.step = 0
        self.blocks_seen = 0
        self.seconds = 0.0
        self.core_seconds = 0.0
        """Of processor time that this process has spent on training steps: what else runs on the machine hardly changes it."""
        self.best = 0.0
        """The highest held-out tau so far (estimated, sampling)."""
        self.meter = Meter()
        """Of this process, since the last report."""
        self._saved: int | None = None
        drafter.train()
        self.loss = BlockLoss(drafter, target, config)
        self.learner = Learner(drafter, self.loss, config, processes, shard)

    def _features(self, keep: Keep | None) -> FeatureSource:
        """A file is of one process, which fills in the documents that it sees; unless trainings share it."""
        if keep is not None:
            return keep(self.drafter.config, self.stream.examples)
        if self.config.features == "stream":
            return self._streamed
        name = FEATURES_FILE if self.processes.count == 1 else f"{self.processes.rank}-{FEATURES_FILE}"
        file = self.folder / name if self.config.features == "disk" else None
        examples = self.stream.examples
        return self.processes.together(lambda: KeptFeatures(self.target, self.drafter.config, examples, file))

    def _known_facts(self) -> dict[str, Any]:
        """What decides a run beside its settings: all processes must have the same, and so must those that resume it."""
        draft_ids = self.drafter.draft_ids.cpu().numpy().astype("<i8").tobytes()
        return {
            "the hash of the training data": self.stream.fingerprint(),
            "the hash of the target's weights": self.target.weight_hash(),
            "the hash of the draft vocabulary": hashlib.sha256(draft_ids).hexdigest()[:16],
            PROCESSES: self.processes.count,
        } | self._arithmetic()

    def _arithmetic(self) -> dict[str, str]:
        """A fact only where the target is run in another type elsewhere than it would be here."""
        other = self.target.streams.arithmetic if isinstance(self.target, PartialTarget) else None
        return {} if other is None else {"the type in which the target's layers are run": other}

    # -- one step ------------------------------------------------------------------------------------------------

    def train_step(self) -> tuple[LossSums, int]:
        """One optimiser step; returns what the loss of this process's blocks was made of, and how many they were.

        The step's loss is that of all processes' blocks, their sums by their common normaliser: the same as one process with the
        joined batch.

        Raises:
            HSpecError: loss or gradients are not finite, or a feature server is lost; the weights are as before, and in the second case
            they are saved.
        """
        stage, processes = self.config.stage(self.step), self.processes
        batch = self.stream.batch(self.step)
        blocks = self._present(lambda: self._blocks(batch, stage.slots, stage.density, self.step, self.features))
        self._announce()
        total, sums = self.learner.loss(blocks, self.config.weights(self.step), self.step / self.config.steps)
        count = int(blocks.weight[..., 0].sum())
        ids = tuple(self.stream.examples[i].id for i in batch.documents[processes.rank :: processes.count])
        tallies = processes.gather(Tally(float(total.detach()), float(sums.normaliser), count, ids))
        if not all(tally.finite for tally in tallies):
            self._stop("losses", tallies)
        norm = self.learner.gradients(total, sum(tally.normaliser for tally in tallies))
        if not math.isfinite(norm):
            self._stop("gradients", tallies)
        self.learner.update(self.step)
        self.step += 1
        self.blocks_seen += sum(tally.blocks for tally in tallies)
        return sums, count

    def _blocks(self, batch: Batch, slots: int, density: float, key: int, source: FeatureSource) -> BlockBatch:
        """This process's share of the blocks of a batch."""
        generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + key)
        anchors = draw_anchors(batch, density, generator, self.config.anchor_cap)
        batch, anchors = share_of(batch, anchors, self.processes.rank, self.processes.count)
        return cut_blocks(source(batch), batch, anchors, slots)

    # -- features from elsewhere ---------------------------------------------------------------------------------

    def _announce(self) -> None:
        """Have the features of the next steps begun, while this one's are worked on."""
        ahead = 0 if self._streams is None else self._streams.ahead
        for step in range(max(self._expected, self.step) + 1, min(self.step + ahead, self.config.steps - 1) + 1):
            self.features.expect(documents_of(self.stream.batch(step), self.processes.rank, self.processes.count))
            self._expected = step

    def _present(self, act: Callable[[], T]) -> T:
        """What all processes make of the target's features.

        Raises:
            FeatureError: of one of them they are lost; the state is saved.
        """
        return self._unless_lost(self._attempted(act))

    def _attempted(self, act: Callable[[], T]) -> T | FeatureError:
        def attempt() -> T | FeatureError:
            try:
                return act()
            except FeatureError as error:
                return error

        return self.processes.together(attempt)

    def _unless_lost(self, outcome: T | FeatureError) -> T:
        lost = outcome if isinstance(outcome, FeatureError) else None
        if self._streams is not None and any(self.processes.gather(lost is not None)):
            if self._saved != self.step:
                self.save()
            self.processes.together(lambda: _give_up(lost, self.step))
        assert not isinstance(outcome, FeatureError)
        return outcome

    def _stop(self, what: str, tallies: Sequence[Tally]) -> None:
        def fail() -> None:
            raise diverged(what, self.step, tallies, self.folder)

        self.processes.on_main(fail)

    # -- the run -------------------------------------------------------------------------------------------------

    def run(
        self, report: Callable[[dict[str, Any]], None], stop: Callable[[], bool] = lambda: False, agenda: Agenda | None = None
    ) -> None:
        """Train to the end, or until ``stop`` says so to any of the processes; saves when it is due, at the end and when stopped."""
        agenda = agenda or Agenda.of(self.config)
        if self._streams is not None:
            self._streams.asked_to_stop = stop
        going = True
        at_end = self.step == self.config.steps  # resumed there: only what was logged may be missing
        if at_end and self.validation is not None and self.processes.gather(measured_at_end(self.folder))[0] != self.step:
            report(self.validate())
        while going and self.step < self.config.steps:
            began, spent = time.monotonic(), time.process_time()
            self.meter.add(*self.train_step())
            self.seconds += time.monotonic() - began
            self.core_seconds += time.process_time() - spent
            # The first process's clock decides for all.
            wishes = self.processes.gather((stop(), agenda.due(self.step)))
            going, due = not any(wish for wish, _ in wishes), wishes[0][1]
            last = self.step == self.config.steps
            if "report" in due or last:
                report(self._report(agenda.since("report")))
                agenda.done("report")
            if self.validation is not None and ("validate" in due or last):
                report(self.validate())
                agenda.done("validate")
            if "save" in due and not last:
                self.save()
                agenda.done("save")
        if self._saved != self.step:
            self.save()
        self.trackers.close()

    def _report(self, seconds: float) -> dict[str, Any]:
        meter = self._pooled(self.meter)
        self.meter = Meter()
        return self._log("train", meter, meter.blocks / seconds)

    def _pooled(self, meter: Meter) -> Meter:
        """What all processes have measured."""
        first, *others = self.processes.gather(meter)
        for other in others:
            first.merge(other)
        return first

    def validate(self) -> dict[str, Any]:
        """Statistics of the averaged weights on held-out documents, at the drafter's full block; anchors are always the same. The
        best average so far is kept as a drafter of its own."""
        if self.validation is None:
            return {}
        validation = self.validation
        with self.learner.averaged():
            meter = self._attempted(lambda: validation(self.loss, self.processes.rank, self.processes.count))
        record = self._log("held-out", self._pooled(self._unless_lost(meter)), 0.0)
        if record["tau_sampling"] > self.best:
            self.best = record["tau_sampling"]
            self._save_average(self.folder / BEST)
        return record

    def _log(self, kind: str, meter: Meter, rate: float) -> dict[str, Any]:
        record = {
            "kind": kind, "step": self.step, "steps": self.config.steps, "blocks": self.blocks_seen,
            "seconds": round(self.seconds, 1), "core_seconds": round(sum(self.processes.gather(self.core_seconds)), 1),
            "blocks_per_second": round(rate, 1),
            "slots": self.config.stage(min(self.step, self.config.steps - 1)).slots, **meter.report(),
        }  # fmt: skip
        self.processes.on_main(lambda: self.trackers.log(record))
        return record

    # -- state ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """The averaged weights as a drafter that can be used, and the state to go on from; each appears whole or not at all.

        Raises:
            HSpecError: the disk does not take it; the last state is whole.
        """
        self._save_average(self.folder)
        state = self._state()
        self.processes.on_main(lambda: self.checkpoints.write(self.step, state))
        self._saved = self.step

    def _save_average(self, folder: Path) -> None:
        weights = self.learner.average()
        self.processes.on_main(lambda: save_drafter(self.drafter, folder, state=weights))

    def _state(self) -> dict[str, Any]:
        """All that the rest of the run depends on. Nothing draws from a global random generator: order and anchors are functions of
        seed and step."""
        return {
            **self.learner.state(),
            "config": self.config.model_dump(mode="json"),
            "facts": self._facts,
            "step": self.step,
            "blocks": self.blocks_seen,
            "seconds": self.seconds,
            "core_seconds": self.processes.gather(self.core_seconds),
            "best": self.best,
            "meters": [asdict(meter) for meter in self.processes.gather(self.meter)],
        }

    def resume(self) -> None:
        """Go on from the last whole state that :meth:`save` wrote; every later step is the same as if the run had not stopped. What was
        logged after it is taken out of the log.

        Raises:
            UsageError: nothing to resume from.
            HSpecError: no state is whole, or it is of another configuration, drafter, data or number of processes.
        """
        found = self.processes.together(lambda: self.checkpoints.newest() if self.processes.main else 0)
        step = self.processes.gather(found)[0]
        self.processes.together(lambda: self._restore(step))
        self.processes.on_main(lambda: self._tidy(step))

    def _tidy(self, step: int) -> None:
        """Take away what is later than the state, or was to be taken away when the run was ended."""
        cut_log(self.folder, step)
        self.checkpoints.prune(step)

    def _restore(self, step: int) -> None:
        state, where = self.checkpoints.read(step), str(self.checkpoints.place(step))
        check_settings(state["config"], self.config, where)
        check_same(state["facts"], dict.fromkeys(state["facts"]) | self._facts, where)
        try:
            self.learner.restore(state)
        except (RuntimeError, KeyError, ValueError) as error:
            raise HSpecError(
                f"{where} does not fit the drafter in {self.folder} ({error}): start anew in another folder"
            ) from error
        self.step, self.blocks_seen, self.seconds = state["step"], state["blocks"], state["seconds"]
        self.best, self._saved = state["best"], state["step"]
        self.core_seconds = state["core_seconds"][self.processes.rank]
        meter = state["meters"][self.processes.rank]
        self.meter = Meter(**meter | {"calibration": Calibration(**meter["calibration"])})


def _give_up(lost: FeatureError | None, step: int) -> None:
    if lost is not None:
        raise FeatureError(f"{lost}. The state of step {step} is saved: --resume goes on from it") from lost
