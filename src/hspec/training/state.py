"""Whether a saved state belongs to the run that is to go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from hspec.errors import HSpecError
from hspec.training.config import TrainConfig
from hspec.training.processes import flat

PROCESSES = "the number of processes"
"""A fact of a run: its documents and what was measured of them are dealt out to so many."""

MAY_CHANGE = ("save_minutes", "validate_minutes", "keep", "trackers")
"""Settings that decide when something is done beside training, and nothing of what is computed."""


def check_settings(saved: Mapping[str, Any], config: TrainConfig, where: str) -> None:
    """Whether a run can go on with these settings.

    Raises:
        HSpecError: what it computes would be another; the message shows each setting that differs.
    """
    try:
        # Through the schema, so that a key that is new since then has its default.
        before = TrainConfig.model_validate(saved)
    except ValidationError as error:
        raise HSpecError(
            f"{where} has settings that this version does not know ({error.errors()[0]['msg']}): start anew"
        ) from error
    one, two = (flat(c.model_dump(mode="json", exclude=set(MAY_CHANGE))) for c in (before, config))
    changed = [f"{key} was {one[key]}, is {two[key]}" for key in one if one[key] != two[key]]
    if changed:
        raise HSpecError(
            f"{where} belongs to a run with other settings: {'; '.join(changed)}. Put them back, or start another run (--init-from "
            f"takes its drafter); only {', '.join(MAY_CHANGE)} may change"
        )


def check_same(saved: Mapping[str, Any], facts: Mapping[str, Any], where: str) -> None:
    """Whether what a state was computed from is here again, by name.

    Raises:
        HSpecError: something differs.
    """
    for name, value in facts.items():
        if saved.get(name) != value:
            raise HSpecError(
                f"{where}: {name} was {saved.get(name)} when the run began, and is {value} now: bring it back, or start another run "
                f"with --init-from"
            )
