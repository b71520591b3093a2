"""The prompts that ship: all of our own, a small set for each of the eight families."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from hspec.evaluation.tasks.families import FAMILIES
from hspec.evaluation.tasks.files import read_task
from hspec.evaluation.tasks.task import Task
from hspec.training.prompts import normalised

ASSETS = Path(str(files("hspec"))) / "assets" / "tasks"
COMPARED = 100
"""Normalised characters by which training tells prompts apart (:func:`hspec.training.prompts.clean_prompts`)."""


def built_in(name: str) -> Task:
    """One of the eight families, prompts of our own."""
    return read_task(ASSETS / f"{name}.jsonl", name, source="built in")


def beginnings() -> frozenset[str]:
    """How every turn of every prompt that ships begins, normalised and cut as training does it, so that it can leave such
    prompts out: what is measured on must not have been trained on."""
    return frozenset(
        normalised(turn)[:COMPARED] for name in FAMILIES for prompt in built_in(name).prompts for turn in prompt.turns
    )
