"""What the user asks of a training run: one strict schema, from a YAML file and the command line."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, NonNegativeFloat, ValidationError, model_validator

from hspec.api import drafter_folder
from hspec.drafters.checkpoint import known_config
from hspec.drafters.config import DrafterConfig, Strict
from hspec.drafters.methods import configuration
from hspec.drafters.presets import PRESETS
from hspec.errors import UsageError
from hspec.files import reason
from hspec.targets.sources import ALIASES, describe
from hspec.training.answers import AnswerSettings, Thinking
from hspec.training.config import GrowthStage, TrainConfig
from hspec.training.shape import AUTO, choose_shape, explain
from hspec.training.sources import PACKAGED_DATA, SourceConfig

TEMPLATE_TOKENS = 40
"""What a chat template adds to a user turn, at most."""


class AnswerConfig(Strict):
    """How the target's own answers are drawn."""

    temperatures: tuple[NonNegativeFloat, ...] = Field((1.0, 0.8, 1.0, 0.5), min_length=1)
    max_tokens: int = Field(256, gt=0)
    max_prompt_tokens: int = Field(192, gt=TEMPLATE_TOKENS)
    seed: int = 0
    batch: int = Field(128, gt=0)
    """How many the embedded engine draws at once."""
    thinking: Thinking = "default"
    """Told to a chat template that has ``enable_thinking``."""
    server: str | None = None
    """Where an OpenAI-compatible server has the target; by default it answers in this process."""
    model: str | None = None
    """The target's name at the server; not needed if it has no other model."""
    concurrency: int = Field(16, gt=0)
    """Prompts that the server has at once."""
    api_key_env: str | None = None
    """The environment variable with the server's key."""
    timeout: float = Field(600.0, gt=0)
    """Seconds that the server may stay silent."""

    @model_validator(mode="after")
    def _asked_somewhere(self) -> AnswerConfig:
        if self.server is None and (self.model is not None or self.api_key_env is not None):
            raise ValueError("model and api_key_env are a server's: give server (http://...) too")
        if self.server is not None and not self.server.startswith(("http://", "https://")):
            raise ValueError(f"server must begin with http:// or https://, not be {self.server!r}")
        return self

    def settings(self) -> AnswerSettings:
        names = ("temperatures", "max_tokens", "max_prompt_tokens", "seed", "batch", "thinking", "model")
        return AnswerSettings(**{name: getattr(self, name) for name in names})


class Job(Strict):
    """Everything that ``hspec train`` was asked for; saved beside the weights, and read back by ``--resume``."""

    target: str = "smollm2"
    method: str = "hspec"
    """One of :data:`hspec.drafters.methods.METHODS`."""
    preset: str = AUTO
    """A preset's name, ``auto`` for one that fits the target, or a file (see :mod:`hspec.training.shape`)."""
    data: tuple[SourceConfig, ...] = Field((SourceConfig(source=PACKAGED_DATA),), min_length=1)
    """Names, or sources with weights (see :mod:`hspec.training.sources`)."""
    own_answers: bool = True
    """Let the target answer the prompts; otherwise the data's own answers are trained on."""
    max_prompts: int | None = Field(None, gt=0)
    init_from: str | None = None
    drafter: dict[str, Any] = Field(default_factory=dict)
    """Keys of the drafter's configuration that are to be otherwise than ``auto`` has them, as in a preset's file."""
    match_parameters: bool = False
    """Give a method that would have fewer parameters than H-Spec more layers, and wider MLPs (see
    :func:`hspec.drafters.methods.configuration`)."""
    copy_layers: bool = True
    """Start from the target's layers where sizes agree; otherwise all weights are random."""
    answers: AnswerConfig = AnswerConfig()
    train: TrainConfig = TrainConfig()

    @model_validator(mode="after")
    def _one_shape(self) -> Job:
        if self.drafter and (self.preset != AUTO or self.init_from is not None):
            raise ValueError("drafter: its keys change what preset auto gives; leave preset and init_from out, or these keys")
        return self

    @model_validator(mode="after")
    def _all_weigh(self) -> Job:
        if len({source.weight is None for source in self.data}) == 2:
            raise ValueError("data: give a weight to every source, or to none")
        return self

    @property
    def weights(self) -> tuple[float, ...] | None:
        """Of the sources, if they have any."""
        given = [source.weight for source in self.data if source.weight is not None]
        return tuple(given) or None


def read_job(path: Path) -> Job:
    """A job from a YAML file, or from a recipe of the package by its name (the paper's: ``qwen3-8b`` and the like).

    Raises:
        UsageError: not there, not YAML, or a key that is unknown or wrong; the message names the key.
    """
    recipe = files("hspec") / "assets" / "recipes" / f"{path}.yaml"
    source = recipe if not path.exists() and path.parent == Path() and recipe.is_file() else path
    try:
        raw = yaml.safe_load(source.read_text(encoding="utf-8"))
        return Job.model_validate({} if raw is None else raw)
    except OSError as error:
        raise UsageError(f"cannot read the settings in {path}: {reason(error)}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        raise UsageError(f"{path}: {_with_known_keys(error)}") from error


def _with_known_keys(error: ValidationError) -> str:
    """The first complaint; for an unknown key also those that there are beside it."""
    first = error.errors()[0]
    if first["type"] != "extra_forbidden":
        return explain(error)
    schemas: dict[str, type[Strict]] = {
        "answers": AnswerConfig,
        "train": TrainConfig,
        "growth": GrowthStage,
        "data": SourceConfig,
    }
    section = next((str(part) for part in reversed(first["loc"][:-1]) if part in schemas), None)
    return f"{explain(error)}; known are {', '.join(schemas[section].model_fields if section else Job.model_fields)}"


def override(job: Job, train: dict[str, Any], **given: Any) -> Job:
    """The job with every option that was given; None leaves what is there.

    Raises:
        UsageError: a value that the schema refuses.
    """
    values = job.model_dump()
    values.update({name: value for name, value in given.items() if value is not None})
    values["train"].update({name: value for name, value in train.items() if value is not None})
    try:
        return Job.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(next((part for part in reversed(first["loc"]) if isinstance(part, str)), "settings"))
        message = first["msg"].removeprefix("Value error, ")
        raise UsageError(f"--{option.replace('_', '-')}: {message}, not {first['input']!r}") from error


def shape(job: Job) -> DrafterConfig:
    """The drafter that a job trains, from configurations alone.

    Raises:
        UsageError: target, preset or drafter to start from are not there, or do not fit together.
    """
    if job.init_from is not None:
        config = known_config(drafter_folder(job.init_from, job.target))
        if job.method not in ("hspec", config.method):
            raise UsageError(f"--init-from {job.init_from} is a {config.method} drafter, not {job.method}: leave --method out")
        return config if job.train.slots is None else with_block(config, max(config.max_draft, job.train.slots))
    name = ALIASES.get(job.target, job.target)
    shipped = next((p for p in PRESETS.values() if p.target.name == name), None)
    if job.preset == AUTO and not job.drafter and shipped is not None:
        # known without fetching the target
        config = shipped if job.method == "hspec" else configuration(job.method, shipped, matched=job.match_parameters)
    else:
        config = choose_shape(job.preset, name, describe(job.target), job.method, job.drafter, job.match_parameters)
    return config if job.train.slots is None else with_block(config, job.train.slots)


def with_block(config: DrafterConfig, slots: int) -> DrafterConfig:
    """A drafter may serve as many slots as it was trained for, and no more."""
    try:
        return type(config).model_validate({**config.model_dump(), "block_size": slots + config.block_size - config.max_draft})
    except ValidationError as error:
        raise UsageError(f"growth: {slots} slots: {explain(error)}") from error
