"""Who is told the numbers of a run: log.jsonl always; TensorBoard, Weights & Biases and trackio when they are asked for.

A tracker is a convenience. One that is not installed is an error before the run starts; one that fails later (a network, a
full quota) is warned about once, and the run goes on.
"""

from __future__ import annotations

import importlib
import json
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hspec.errors import HSpecError, UsageError
from hspec.files import reason

LOG_FILE = "log.jsonl"
PROJECT = "hspec"
"""What runs are filed under."""


class Tracker(ABC):
    """A place that numbers go to."""

    @abstractmethod
    def log(self, numbers: dict[str, float], step: int) -> None:
        """Note the numbers of an optimiser step, by name."""

    @abstractmethod
    def close(self) -> None:
        """Send what is still held back."""


class TensorBoard(Tracker):
    """Event files in the run's folder, under ``tensorboard``."""

    def __init__(self, module: Any, folder: Path, settings: dict[str, Any]):
        self._writer = module.SummaryWriter(log_dir=str(folder / "tensorboard"))

    def log(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class OnlineRun(Tracker):
    """A run of Weights & Biases or trackio, whose interfaces are alike; named after the run's folder."""

    def __init__(self, module: Any, folder: Path, settings: dict[str, Any]):
        self._module = module
        module.init(project=PROJECT, name=folder.absolute().name, config=settings)

    def log(self, numbers: dict[str, float], step: int) -> None:
        self._module.log(numbers, step=step)

    def close(self) -> None:
        self._module.finish()


TRACKERS: dict[str, tuple[str, str, Callable[[Any, Path, dict[str, Any]], Tracker]]] = {
    "tensorboard": ("torch.utils.tensorboard", "tensorboard", TensorBoard),
    "wandb": ("wandb", "wandb", OnlineRun),
    "trackio": ("trackio", "trackio", OnlineRun),
}
"""By the name in the settings: the module, the package that brings it, and how it is used."""


def check_trackers(names: Sequence[str]) -> None:
    """Whether all that are asked for are there.

    Raises:
        UsageError: one is not installed.
    """
    for name in names:
        module, package, _ = TRACKERS[name]
        try:
            importlib.import_module(module)
        except ImportError as error:
            raise UsageError(
                f"trackers: {name} is asked for, but cannot be imported ({error}): pip install {package}, or leave it out"
            ) from error


class Trackers:
    """Where a run's records go.

    Args:
        folder: the run's. names: keys of :data:`TRACKERS`. settings: what the trackers show as the run's configuration.

    Raises:
        UsageError: a tracker is not installed.
    """

    def __init__(self, folder: Path, names: Sequence[str] = (), settings: dict[str, Any] | None = None):
        check_trackers(names)
        self.folder, self._names, self._settings = folder, tuple(names), settings or {}
        self._open: dict[str, Tracker] = {}
        self._failed: set[str] = set()

    def log(self, record: dict[str, Any]) -> None:
        """Append a record to log.jsonl, and tell the trackers its numbers.

        Raises:
            HSpecError: log.jsonl cannot be written.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with (self.folder / LOG_FILE).open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        except OSError as error:
            raise HSpecError(
                f"cannot write {self.folder / LOG_FILE}: {reason(error)}. The last saved state is whole: free some space and --resume"
            ) from error
        numbers = flatten(record)
        for name in self._names:
            self._guarded(name, lambda name=name: self._tracker(name).log(numbers, record["step"]))  # type: ignore[misc]

    def close(self) -> None:
        """Let every tracker finish."""
        for name, tracker in self._open.items():
            self._guarded(name, tracker.close)
        self._open.clear()

    def _tracker(self, name: str) -> Tracker:
        """Opened when it is first told something, so that a process that reports nothing opens none."""
        if name not in self._open:
            module, _, kind = TRACKERS[name]
            self._open[name] = kind(importlib.import_module(module), self.folder, self._settings)
        return self._open[name]

    def _guarded(self, name: str, act: Callable[[], None]) -> None:
        try:
            act()
        except Exception as error:  # trackers raise what their networks and services make of them
            if name not in self._failed:
                self._failed.add(name)
                warnings.warn(
                    f"{name} does not take the run's numbers ({type(error).__name__}: {error}); the run goes on, and {LOG_FILE} in "
                    f"{self.folder} has them all",
                    stacklevel=2,
                )


def flatten(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record by names such as ``train/loss`` and ``held-out/acceptance/1``: its kind, its keys, and places in lists
    from 1. What is no number, and the step, which trackers have beside them, is left out."""

    def walk(name: str, value: Any) -> Iterator[tuple[str, float]]:
        if isinstance(value, dict):
            for key, inner in value.items():
                yield from walk(f"{name}/{key}", inner)
        elif isinstance(value, list | tuple):
            for place, inner in enumerate(value, 1):
                yield from walk(f"{name}/{place}", inner)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)

    return dict(walk(record["kind"], {key: value for key, value in record.items() if key not in ("kind", "step", "steps")}))
