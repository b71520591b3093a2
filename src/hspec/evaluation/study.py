"""What a study is asked for: one target, one recipe, several methods and seeds, and what their drafters answer.

Every drafter sees the same documents, the same anchors and as many blocks as the others with its seed; what differs is the method, or
what an entry changes of the recipe. Entries that cost more or less a block may be given as many operations instead (``equal: compute``).
All are compared by the same held-out documents.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import Field, NonNegativeFloat, PositiveInt, ValidationError, field_validator, model_validator

from hspec.drafters.config import Strict
from hspec.drafters.methods import METHODS
from hspec.errors import UsageError
from hspec.files import reason, write_text
from hspec.training.job import Job
from hspec.training.plan import run_flops
from hspec.training.shape import explain

STUDY_FILE = "study.yaml"
TrainingSeed = Annotated[int, Field(ge=0, lt=2**40)]
"""As a training takes it."""


class Entry(Strict):
    """A method, the seeds that it is trained with, and what it has otherwise than the study's job."""

    method: str = "hspec"
    name: str = Field("", pattern=r"^[\w.,+-]*$")
    """By default the method's."""
    seeds: tuple[TrainingSeed, ...] = Field((0,), min_length=1)
    job: dict[str, Any] = Field(default_factory=dict)
    """Keys of the job that are other; sections may be given in part."""

    @field_validator("job")
    @classmethod
    def _sections(cls, job: dict[str, Any]) -> dict[str, Any]:
        for name in ("train", "drafter", "answers"):
            if not isinstance(job.get(name, {}), dict):
                raise ValueError(f"{name}: its keys are needed, not {job[name]!r}")
        return job

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
    batch: PositiveInt = 1
    """Above 1 tau is told from answers in batches, and speed from others: of the first seeds, under the first temperature, to ..."""
    timed_limit: PositiveInt = 2
    """... so many prompts of each task."""

    def timed(self) -> Measurement:
        """What is answered one at a time."""
        fewer = self.timed_limit if self.limit is None else min(self.limit, self.timed_limit)
        return self.model_copy(update={"batch": 1, "limit": fewer, "temperatures": self.temperatures[:1]})

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
    share_features: bool = False
    """The target runs over each document once, in some 10 KB a token of disk, and not anew for every training; its time is then not
    in those of trainings."""
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

    def extends(self, other: Study) -> bool:
        """Whether all that the other one trains is trained alike here."""
        if self.model_copy(update={"entries": other.entries, "measure": other.measure}) != other:
            return False
        own = set(self.pieces())
        return all(piece in own and self.job_of(piece) == other.job_of(piece) for piece in other.pieces())

    def first_seed(self, label: str) -> int:
        """Of an entry."""
        return next(entry.seeds[0] for entry in self.entries if entry.label == label)

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
    """Note in a folder which study is done there; it may have become one of more trainings, or with another measurement.

    Raises:
        UsageError: it is another one.
    """
    path = folder / STUDY_FILE
    own = yaml.safe_dump(json.loads(study.model_dump_json()), sort_keys=False)
    if path.exists() and not study.extends(read_study(path)):
        raise UsageError(f"{folder} holds another study (see {path}): go on with that one, or choose another --out")
    write_text(path, own)
