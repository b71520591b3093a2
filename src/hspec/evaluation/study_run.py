"""Training drafters alike and measuring them beside each other, as a :class:`Study` has it.

The work is done in pieces, a training each and then the measurement, so that it can run over many evenings: what is finished stays,
what was begun goes on from its last checkpoint. Several processes may work on one study: each takes pieces that no other one has.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from functools import partial, reduce
from operator import or_
from pathlib import Path
from typing import Any

import numpy as np

from hspec.api import load_drafter
from hspec.decoding.params import SamplingParams
from hspec.drafters.checkpoint import WEIGHTS_FILE
from hspec.drafters.config import DrafterConfig
from hspec.drafters.parameters import parameters_by_part
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.harness import AR, Contender, evaluate, identity
from hspec.evaluation.harness import claim as claim_evaluation
from hspec.evaluation.records import Record
from hspec.evaluation.report import write_report
from hspec.evaluation.setup import longest_prompt, machine, settings_of, write_summary
from hspec.evaluation.study import STUDY_FILE, Measurement, Piece, Study, claim
from hspec.evaluation.tasks.catalogue import check_tasks, load_tasks
from hspec.files import write_text
from hspec.locks import alone
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.build import new_drafter, training_target
from hspec.training.checkpoints import Checkpoints, holds_run
from hspec.training.corpus import Corpus, Example
from hspec.training.data import Data, Say, prepare_data
from hspec.training.features import KeptFeatures, Needs
from hspec.training.job import Job, shape
from hspec.training.log import measured_at_end
from hspec.training.trackers import LOG_FILE
from hspec.training.trainer import Trainer

RESULT_FILE = "study.json"
Interruptible = Callable[[], AbstractContextManager[Callable[[], bool]]]
EVALUATION, TIMING, FEATURES = "evaluation", "timing", "features"


def run_study(
    study: Study,
    folder: Path,
    say: Say,
    report: Callable[[Piece, dict[str, Any]], None] = lambda *_: None,
    on_answer: Callable[[int, int, Record], None] = lambda *_: None,
    interruptible: Interruptible = lambda: nullcontext(lambda: False),
) -> dict[str, Any] | None:
    """Train what is not trained yet, then measure; None if it was stopped before the end, or another process has the rest.

    Args:
        report: gets the log records of the trainings.
        interruptible: entered for each training, which saves itself and ends when what it gives says so. Answers need no such care.

    Raises:
        UsageError: the folder holds another study, or a task is unknown.
        HSpecError: data, checkpoints or answers cannot be read or written.
    """
    check_tasks(study.measure.tasks, study.measure.folder)
    with alone(folder / STUDY_FILE, wait=True):
        claim(study, folder)
    if not _train_pending(study, folder, say, report, interruptible):
        return None
    elsewhere = [piece.name for piece in study.pieces() if not is_done(piece.folder(folder))]
    with alone(folder / EVALUATION) as free:
        if elsewhere or not free:
            say(f"another process is at work: {', '.join(elsewhere) or 'it measures'}; the last one to finish measures all")
            return None
        return _measure(study, folder, on_answer)


def _train_pending(
    study: Study, folder: Path, say: Say, report: Callable[[Piece, dict[str, Any]], None], interruptible: Interruptible
) -> bool:
    """False if it was stopped."""
    texts: _Texts | None = None
    keep: _Kept | None = None
    for number, piece in enumerate(study.pieces(), 1):
        own = piece.folder(folder)
        with alone(own) as free:
            if not free or is_done(own):
                continue
            if texts is None:
                _check_shapes(study)
                texts = _Texts(study.job, say)
                keep = _Kept(study, folder, texts.target) if study.share_features else None
            say(f"training {piece.name} ({number} of {len(study.pieces())})")
            with interruptible() as stop:
                _train(study.job_of(piece), own, texts, keep, partial(report, piece), stop)
                if stop():
                    return False
    return True


def is_done(folder: Path) -> bool:
    """Whether a training has come to its end: its last weights were measured, and are saved. Its states may have been removed since."""
    steps, states = measured_at_end(folder), Checkpoints(folder).steps()
    return steps is not None and (states[-1] == steps if states else (folder / WEIGHTS_FILE).exists())


def _check_shapes(study: Study) -> None:
    """
    Raises:
        UsageError: a drafter that does not fit the target; before anything is trained.
    """
    for piece in study.pieces():
        shape(study.job_of(piece))


class _Kept:
    """What the target leaves of the documents, for all trainings of a study: its forward is a third of a training's step, and the same
    whoever is trained. Processes share the files."""

    def __init__(self, study: Study, folder: Path, target: Target):
        self._target, self._folder = target, folder / FEATURES
        self._all = reduce(or_, (Needs.of(shape(study.job_of(piece))) for piece in study.pieces()))

    def __call__(self, config: DrafterConfig, examples: Sequence[Example]) -> KeptFeatures:
        corpus = Corpus.of(examples)
        file = self._folder / f"{corpus.fingerprint()}.bin"
        with alone(file, wait=True):
            return KeptFeatures(self._target, config, corpus, file, self._all)


def _fill(trainer: Trainer, stop: Callable[[], bool]) -> None:
    """Have the target seen every document of a training before its clock runs; processes go about it each in an order of its own."""
    steps = list(range(trainer.step, trainer.config.steps))
    random.Random(os.getpid()).shuffle(steps)
    for step in steps:
        if stop():
            return
        assert isinstance(trainer.features, KeptFeatures)
        trainer.features.fill(trainer.stream.batch(step))


class _Texts:
    """The target, and the documents of a job: read once where several jobs have the same, and held out for all as the study's own.

    Raises:
        HSpecError: nothing is held out.
    """

    def __init__(self, job: Job, say: Say):
        self.target = training_target(job)
        self._say = say
        self._known: dict[str, Data] = {}
        self._held_out = self._read(job).held_out
        if not self._held_out:
            raise HSpecError(
                "no document is held out (3 % of the prompts are, by hash), and trainings are compared by those: give more data"
            )

    def of(self, job: Job) -> Data:
        return Data(self._read(job).train, self._held_out)

    def _read(self, job: Job) -> Data:
        deciding = job.model_dump_json(include={"data", "own_answers", "max_prompts", "answers"}) + str(job.train.max_tokens)
        if deciding not in self._known:
            self._known[deciding] = prepare_data(job, self.target, self._say)
        return self._known[deciding]


def _train(
    job: Job, own: Path, texts: _Texts, keep: _Kept | None, report: Callable[[dict[str, Any]], None], stop: Callable[[], bool]
) -> None:  # fmt: skip
    data, begun = texts.of(job), holds_run(own)
    drafter = new_drafter(job, texts.target, data)
    trainer = Trainer(job.train, texts.target, drafter, data.train, data.held_out, own, keep=keep)
    if begun:
        trainer.resume()
    if keep is not None:
        _fill(trainer, stop)
    trainer.run(report, stop)


def _measure(study: Study, folder: Path, on_answer: Callable[[int, int, Record], None]) -> dict[str, Any]:
    """All drafters, and how long they take: in the same answers, or in fewer of their own if those ran in batches."""
    target = load_target(study.job.target)
    drafters = {piece: load_drafter(piece.folder(folder), target) for piece in study.pieces()}
    summary = _evaluate(study.measure, target, drafters, folder / EVALUATION, on_answer)
    timing = summary
    if study.measure.batch > 1:
        first = {piece: drafter for piece, drafter in drafters.items() if piece.seed == study.first_seed(piece.label)}
        timing = _evaluate(study.measure.timed(), target, first, folder / TIMING, on_answer)
        write_report(folder / TIMING, folder / "timing.html")
    result = {"trainings": trainings(study, folder, drafters, timing), "evaluation": summary, "timing": timing}
    write_text(folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")
    write_report(folder / EVALUATION, folder / "report.html", training=[piece.folder(folder) for piece in study.pieces()])
    return result


def _evaluate(
    m: Measurement, target: Target, drafters: dict[Piece, Any], place: Path, on_answer: Callable[[int, int, Record], None]
) -> dict[str, Any]:  # fmt: skip
    contenders = [Contender(AR)] if m.batch == 1 else []
    for piece, drafter in drafters.items():
        for k in m.k or (drafter.max_draft,):
            name = piece.name if len(m.k) < 2 else f"{piece.name} k={k}"
            contenders.append(Contender(name, drafter, k, piece.label, piece.seed))
    tasks = load_tasks(
        m.tasks, m.folder, m.limit, m.seed, count_tokens=lambda text: len(target.tokenizer(text).input_ids),
        longest=longest_prompt(target, m.max_tokens),
    )  # fmt: skip
    settings = settings_of([SamplingParams(temperature=t, max_tokens=m.max_tokens, seed=m.seed) for t in m.temperatures])
    _set_aside(place, identity(target, contenders, settings, m.batch))
    evaluate(target, contenders, tasks, settings, place, on_answer, m.batch)
    return write_summary(place, m.seed, measured_on=machine(target.device.type))


def _set_aside(place: Path, own: dict[str, Any]) -> None:
    """A measurement of other drafters, or under other settings, stays under another name: a study may have grown since."""
    try:
        claim_evaluation(place, own)
    except UsageError:
        number = next(n for n in itertools.count(1) if not place.with_name(f"{place.name}-{n}").exists())
        place.rename(place.with_name(f"{place.name}-{number}"))


def trainings(study: Study, folder: Path, drafters: dict[Piece, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """What each training took and came to, and what the methods had come to after the time that the quickest one took.

    A cycle is drafting and verifying, as the measurement found it, in steps without drafts; of the longest k. The estimated tau over it
    is what the drafter would speed up text by that is like the held-out answers. Time on a CPU is the processor's, which other work on
    the machine hardly changes, and else by the clock.

    Raises:
        HSpecError: a log cannot be read.
    """
    clock = "core_seconds" if all(drafter.head.device.type == "cpu" for drafter in drafters.values()) else "seconds"
    found = {piece: validations(piece.folder(folder), clock) for piece in study.pieces()}
    shortest = min(own[-1]["spent"] for own in found.values())
    cycles = _cycles(summary)
    rows = {}
    for piece, own in found.items():
        last, cycle = own[-1], cycles.get(piece.label)
        rows[piece.name] = {
            **asdict(piece),
            "method": drafters[piece].config.method,
            "parameters": sum(parameters_by_part(drafters[piece].config).values()),
            "blocks": last["blocks"],
            clock: last["spent"],
            "blocks_per_second": last["blocks"] / max(last["spent"], 1e-9),
            "held_out_loss": last["loss"],
            "estimated_tau": last["tau_sampling"],
            "estimated_tau_at_equal_time": _at_time(own, shortest),
            "cycle": cycle,
            "estimated_tau_by_cycle": None if cycle is None else last["tau_sampling"] / cycle,
        }
    return {"clock": clock, "equal_time_seconds": shortest, "runs": rows}


def _cycles(summary: dict[str, Any]) -> dict[str, float]:
    """By label, under the first setting."""
    entrants = next(iter(summary["settings"].values()))["entrants"]
    step = entrants[AR]["ms_per_token"]
    found = sorted(
        (e["k"], e["method"], (e["draft_ms"] + e["verify_ms"]) / step) for e in entrants.values() if e["method"] != AR
    )
    return {label: cycle for _, label, cycle in found}


def validations(folder: Path, clock: str) -> list[dict[str, Any]]:
    """Those of a log, with the seconds ``spent`` until then by one of its clocks.

    Raises:
        HSpecError: it cannot be read.
    """
    path = folder / LOG_FILE
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        return [record | {"spent": float(record[clock])} for record in records if record["kind"] == "held-out"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise HSpecError(f"cannot read {path}: {error!r}: a line of it is damaged") from error


def _at_time(records: Sequence[dict[str, Any]], seconds: float) -> float:
    """Linear between the validations before and after; before the first one, from 1, a drafter that is never right."""
    times = [0.0, *(r["spent"] for r in records)]
    return float(np.interp(seconds, times, [1.0, *(r["tau_sampling"] for r in records)]))
