"""The prompts that ship: all of our own, a small set for each of the eight families."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from hspec.evaluation.tasks.files import read_task
from hspec.evaluation.tasks.task import Task

ASSETS = Path(str(files("hspec"))) / "assets" / "tasks"


def built_in(name: str) -> Task:
    """One of the eight families, prompts of our own."""
    return read_task(ASSETS / f"{name}.jsonl", name, source="built in")
