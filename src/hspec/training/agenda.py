"""What is to be done beside training, and when: by the clock, since a step may take a millisecond or a minute."""

from __future__ import annotations

import time
from typing import Literal

from hspec.training.config import TrainConfig

Task = Literal["report", "validate", "save"]

REPORT_SECONDS = 20.0


class Agenda:
    """Each task is due when so many seconds have passed since it was done.

    Args:
        seconds: of each task.
    """

    def __init__(self, seconds: dict[Task, float]):
        self.seconds = seconds
        self._done = dict.fromkeys(seconds, time.monotonic())

    @staticmethod
    def of(config: TrainConfig) -> Agenda:
        return Agenda({"report": REPORT_SECONDS, "validate": config.validate_minutes * 60, "save": config.save_minutes * 60})

    def due(self, step: int) -> frozenset[Task]:
        """After so many steps of the run, these."""
        return frozenset(task for task, limit in self.seconds.items() if self.since(task) > limit)

    def since(self, task: Task) -> float:
        """Seconds since it was done, or since this process began."""
        return time.monotonic() - self._done[task]

    def done(self, task: Task) -> None:
        self._done[task] = time.monotonic()
