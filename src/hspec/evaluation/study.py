"""Training drafters alike and measuring them beside each other: one target, one recipe, several methods and seeds.

Every drafter sees the same documents, the same anchors and as many blocks as the others with its seed; what differs is the method, or
what an entry changes of the recipe. Entries that cost more or less a block may be given as many operations instead (``equal: compute``).
All are compared by the same held-out documents.
The work is done in pieces, a training each and then the measurement, so that it can run over many evenings: what is finished stays,
what was begun goes on from its last checkpoint. The first seed of all methods comes before the second of any.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationError, model_validator

from hspec.api import load_drafter
from hspec.decoding.params import SamplingParams
from hspec.drafters.config import Strict
from hspec.drafters.methods import METHODS
from hspec.drafters.parameters import parameters_by_part
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.harness import AR, Contender, evaluate
from hspec.evaluation.records import Record
from hspec.evaluation.report import write_report
from hspec.evaluation.setup import longest_prompt, machine, settings_of, write_summary
from hspec.evaluation.tasks.catalogue import check_tasks, load_tasks
from hspec.files import reason, write_text
from hspec.targets.sources import load_target
from hspec.training.build import new_drafter, training_target
from hspec.training.checkpoints import holds_run
from hspec.training.data import Data, Say, prepare_data
from hspec.training.job import Job, shape
from hspec.training.plan import run_flops
from hspec.training.shape import explain
from hspec.training.trackers import LOG_FILE
from hspec.training.trainer import Trainer

STUDY_FILE, RESULT_FILE = "study.yaml", "study.json"
EVALUATION = "evaluation"


class Entry(Strict):
    """A method, the seeds that it is trained with, and what it has otherwise than the study's job."""

    method: str = "hspec"
    name: str = Field("", pattern=r"^[\w.,+-]*$")
    """By default the method's."""
    seeds: tuple[int, ...] = Field((0,), min_length=1)
    job: dict[str, Any] = Field(default_factory=dict)
    """Keys of the job that are other; sections may be given in part."""

    @model_validator(mode="after")
    def _known(self) -> Entry:
        trained = [name for name, method in METHODS.items() if method.derive is not None]
        if self.method not in trained:
            raise ValueError(f"no method {self.method!r} that is trained; there are {', '.join(trained)}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"{self.label}: a seed is there twice: {list(self.seeds)}")
        own = sorted({"target", "method"} & self.job.keys())
        own += [f"train.{key}" for key in ("seed", "precision") if key in self.job.get("train", {})]
        if own:
            raise ValueError(f"{self.label}: job.{own[0]} is the study's, or stands beside job as the entry's own")
        return self

    @property
    def label(self) -> str:
        return self.name or self.method


class Measurement(Strict):
    """What the trained drafters answer; as ``hspec eval`` has it."""

    tasks: tuple[str, ...] = ("families",)
    data: str | None = None
    limit: PositiveInt | None = None
    temperatures: tuple[NonNegativeFloat, ...] = Field((0.0, 1.0), min_length=1)
    k: tuple[PositiveInt, ...] = ()
    """Empty: the longest block that is trained."""
    max_tokens: PositiveInt = 128
    seed: int = 0

    @property
    def folder(self) -> Path | None:
        """Of task files, as ``--data`` names it."""
        return None if self.data is None else Path(self.data).expanduser()


class Study(Strict):
    """Everything that decides a study. ``job`` is as for ``hspec train``; its method and seed are those of the entries."""

    job: Job = Job()
    entries: tuple[Entry, ...] = Field(min_length=1)
    equal: Literal["blocks", "compute"] = "blocks"
    """All have the job's steps; or as many steps as make, by the plan's count, the operations that the job's own drafter needs."""
    measure: Measurement = Measurement()

    @model_validator(mode="after")
    def _distinct(self) -> Study:
        names = [entry.label for entry in self.entries]
        twice = {name for name in names if names.count(name) > 1}
        if twice:
            raise ValueError(f"two entries are called {min(twice)!r}: give one of them a name")
        for entry in self.entries:
            job = self._job(entry, 0)
            if job.init_from is not None:
                raise ValueError("job.init_from: a study trains every drafter from its target's layers")
            if self.equal == "compute" and "steps" in entry.job.get("train", {}):
                raise ValueError(f"{entry.label}: job.train.steps follow from equal: compute")
        return self

    def _job(self, entry: Entry, seed: int) -> Job:
        values = self.job.model_dump()
        for key, value in entry.job.items():
            part = isinstance(value, dict) and isinstance(values.get(key), dict)
            values[key] = {**values[key], **value} if part else value
        values["train"] = {**values["train"], "seed": seed}
        return Job.model_validate({**values, "method": entry.method})

    def job_of(self, piece: Piece) -> Job:
        """What a training is asked for, its number of steps included.

        Raises:
            UsageError: a drafter that does not fit the target.
        """
        entry = next(entry for entry in self.entries if entry.label == piece.label)
        job = self._job(entry, piece.seed)
        if self.equal == "blocks":
            return job
        steps = round(job.train.steps * run_flops(self.job) / run_flops(job))
        return job.model_copy(update={"train": job.train.model_copy(update={"steps": max(1, steps)})})

    def pieces(self) -> list[Piece]:
        """Trainings in their order: first seeds first."""
        longest = max(len(entry.seeds) for entry in self.entries)
        return [Piece(e.label, e.seeds[i]) for i in range(longest) for e in self.entries if i < len(e.seeds)]


@dataclass(frozen=True)
class Piece:
    """One training."""

    label: str
    """Of its entry."""
    seed: int

    @property
    def name(self) -> str:
        return f"{self.label}-{self.seed}"

    def folder(self, study: Path) -> Path:
        return study / "drafters" / self.name


SHIPPED = ("study", "recipe")
"""Studies of the package: the paper's comparison at a laptop's size, and what of a recipe makes a block count."""


def read_study(path: Path | None) -> Study:
    """A study from a YAML file, or one of :data:`SHIPPED` by its name; None takes the first.

    Raises:
        UsageError: not there, not YAML, or a key that is unknown or wrong.
    """
    path = path or Path(SHIPPED[0])
    packaged = not path.exists() and str(path) in SHIPPED
    source = files("hspec") / "assets" / f"{path}.yaml" if packaged else path
    try:
        return Study.model_validate(yaml.safe_load(source.read_text(encoding="utf-8")))
    except OSError as error:
        raise UsageError(
            f"cannot read the study in {path}: {reason(error)}; {' and '.join(SHIPPED)} come with hspec"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {explain(error)}") from error


def claim(study: Study, folder: Path) -> None:
    """Note in a folder which study is done there.

    Raises:
        UsageError: it is another one.
    """
    path = folder / STUDY_FILE
    own = yaml.safe_dump(json.loads(study.model_dump_json()), sort_keys=False)
    if path.exists() and read_study(path) != study:
        raise UsageError(f"{folder} holds another study (see {path}): go on with that one, or choose another --out")
    write_text(path, own)


def run_study(
    study: Study,
    folder: Path,
    say: Say,
    report: Callable[[Piece, dict[str, Any]], None] = lambda *_: None,
    on_answer: Callable[[int, int, Record], None] = lambda *_: None,
    stop: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Train what is not trained yet, then measure; None if it was stopped before the end.

    Args:
        report: gets the log records of the trainings.

    Raises:
        UsageError: the folder holds another study, or a task is unknown.
        HSpecError: data, checkpoints or answers cannot be read or written.
    """
    check_tasks(study.measure.tasks, study.measure.folder)
    claim(study, folder)
    pending = [piece for piece in study.pieces() if not is_done(piece.folder(folder))]
    if pending:
        _check_shapes(study)
        texts = _Texts(study.job, say)
        for piece in pending:
            say(f"training {piece.name} ({study.pieces().index(piece) + 1} of {len(study.pieces())})")
            _train(study.job_of(piece), piece, folder, texts, report, stop)
            if stop():
                return None
        del texts
    return _measure(study, folder, on_answer)


def is_done(folder: Path) -> bool:
    """Whether a training has come to its end; told by its log."""
    try:
        last = json.loads((folder / LOG_FILE).read_text(encoding="utf-8").splitlines()[-1])
        return last["step"] == last["steps"] and last["kind"] == "held-out"
    except (OSError, ValueError, IndexError, KeyError):
        return False


def _check_shapes(study: Study) -> None:
    """
    Raises:
        UsageError: a drafter that does not fit the target; before anything is trained.
    """
    for piece in study.pieces():
        shape(study.job_of(piece))


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
    job: Job,
    piece: Piece,
    folder: Path,
    texts: _Texts,
    report: Callable[[Piece, dict[str, Any]], None],
    stop: Callable[[], bool],
) -> None:
    own, data = piece.folder(folder), texts.of(job)
    begun = holds_run(own)
    trainer = Trainer(job.train, texts.target, new_drafter(job, texts.target, data), data.train, data.held_out, own)
    if begun:
        trainer.resume()
    trainer.run(lambda record: report(piece, record), stop)


def _measure(study: Study, folder: Path, on_answer: Callable[[int, int, Record], None]) -> dict[str, Any]:
    m = study.measure
    target = load_target(study.job.target)
    contenders = [Contender(AR)]
    drafters = {piece: load_drafter(piece.folder(folder), target) for piece in study.pieces()}
    for piece, drafter in drafters.items():
        for k in m.k or (drafter.max_draft,):
            name = piece.name if len(m.k) < 2 else f"{piece.name} k={k}"
            contenders.append(Contender(name, drafter, k, piece.label, piece.seed))
    tasks = load_tasks(
        m.tasks, m.folder, m.limit, m.seed, count_tokens=lambda text: len(target.tokenizer(text).input_ids),
        longest=longest_prompt(target, m.max_tokens),
    )  # fmt: skip
    settings = settings_of([SamplingParams(temperature=t, max_tokens=m.max_tokens, seed=m.seed) for t in m.temperatures])
    place = folder / EVALUATION
    evaluate(target, contenders, tasks, settings, place, on_answer)
    summary = write_summary(place, m.seed, measured_on=machine(target.device.type))
    result = {"trainings": trainings(study, folder, drafters, summary), "evaluation": summary}
    write_text(folder / RESULT_FILE, json.dumps(result, indent=2) + "\n")
    write_report(place, folder / "report.html", training=[piece.folder(folder) for piece in study.pieces()])
    return result


def trainings(study: Study, folder: Path, drafters: dict[Piece, Any], summary: dict[str, Any]) -> dict[str, Any]:
    """What each training took and came to, and what the methods had come to after the time that the quickest one took.

    A cycle is drafting and verifying, as the measurement found it, in steps without drafts; of the longest k. The estimated tau over it
    is what the drafter would speed up text by that is like the held-out answers.

    Raises:
        HSpecError: a log cannot be read.
    """
    found = {piece: _held_out(piece.folder(folder)) for piece in study.pieces()}
    shortest = min(own[-1]["seconds"] for own in found.values())
    cycles = _cycles(summary)
    rows = {}
    for piece, own in found.items():
        last, cycle = own[-1], cycles.get(piece.label)
        rows[piece.name] = {
            **asdict(piece),
            "method": drafters[piece].config.method,
            "parameters": sum(parameters_by_part(drafters[piece].config).values()),
            "blocks": last["blocks"],
            "seconds": last["seconds"],
            "blocks_per_second": last["blocks"] / max(last["seconds"], 1e-9),
            "held_out_loss": last["loss"],
            "estimated_tau": last["tau_sampling"],
            "estimated_tau_at_equal_time": _at_time(own, shortest),
            "cycle": cycle,
            "estimated_tau_by_cycle": None if cycle is None else last["tau_sampling"] / cycle,
        }
    return {"equal_time_seconds": shortest, "runs": rows}


def _cycles(summary: dict[str, Any]) -> dict[str, float]:
    """By label, under the first setting."""
    entrants = next(iter(summary["settings"].values()))["entrants"]
    step = entrants[AR]["ms_per_token"]
    found = sorted(
        (e["k"], e["method"], (e["draft_ms"] + e["verify_ms"]) / step) for e in entrants.values() if e["method"] != AR
    )
    return {label: cycle for _, label, cycle in found}


def _held_out(folder: Path) -> list[dict[str, Any]]:
    path = folder / LOG_FILE
    try:
        records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise HSpecError(f"cannot read {path}: {error}") from error
    return [record for record in records if record["kind"] == "held-out"]


def _at_time(records: Sequence[dict[str, Any]], seconds: float) -> float:
    """Linear between the validations before and after; before the first one, from 1, a drafter that is never right."""
    times = [0.0, *(r["seconds"] for r in records)]
    return float(np.interp(seconds, times, [1.0, *(r["tau_sampling"] for r in records)]))
