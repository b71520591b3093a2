"""How a server is told about its drafter: one key of vLLM's ``--additional-config``, the rest is ``--speculative-config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hspec.drafters.source import NOTHING, Around
from hspec.errors import UsageError

PROPOSER = "hspec.serving.proposer.HSpecProposer"
"""What vLLM imports as the method ``custom_class``."""

DRAFTER = "hspec_drafter"
"""Key of ``--additional-config``: a drafter's folder."""

LOOKUP = "hspec_lookup"
"""Key of ``--additional-config``: true for prompt lookup before the drafter."""

SURE = "hspec_sure"
"""Key of ``--additional-config``: the least chance with which a draft must stand."""


def speculative_config(k: int) -> dict[str, Any]:
    """For ``--speculative-config``.

    Args:
        k: drafted tokens a step.
    """
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": k}


def additional_config(drafter: Path, around: Around = NOTHING) -> dict[str, Any]:
    """For ``--additional-config``."""
    said = {DRAFTER: str(drafter), LOOKUP: around.lookup or None, SURE: around.least}
    return {key: value for key, value in said.items() if value is not None}


def around_of(additional: Any) -> Around:
    """What is put around the drafter, from a server's ``additional_config``.

    Raises:
        UsageError: lookup is neither true nor false, or a chance is none.
    """
    said = additional if isinstance(additional, Mapping) else {}
    lookup, least = said.get(LOOKUP, False), said.get(SURE)
    if not isinstance(lookup, bool):
        raise UsageError(f"{LOOKUP} in --additional-config is {lookup!r}: give true or false")
    if least is not None and not (isinstance(least, float) and 0 < least < 1):
        raise UsageError(f"{SURE} in --additional-config is {least!r}: give a chance above 0 and below 1, as 0.4")
    return Around(lookup, least)


def drafter_of(additional: Any) -> Path:
    """The drafter's folder, from a server's ``additional_config``.

    Raises:
        UsageError: it names none.
    """
    folder = additional.get(DRAFTER) if isinstance(additional, Mapping) else None
    if not isinstance(folder, str) or not folder:
        example = json.dumps({DRAFTER: "FOLDER"})
        raise UsageError(
            f"no drafter is named: start vLLM with --additional-config '{example}', or through 'hspec serve', which knows the ones "
            f"that ship"
        )
    return Path(folder).expanduser()
