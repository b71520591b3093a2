"""How a server is told about its drafter: one key of vLLM's ``--additional-config``, the rest is ``--speculative-config``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hspec.errors import UsageError

PROPOSER = "hspec.serving.proposer.HSpecProposer"
"""What vLLM imports as the method ``custom_class``."""

DRAFTER = "hspec_drafter"
"""Key of ``--additional-config``: a drafter's folder."""

LOOKUP = "hspec_lookup"
"""Key of ``--additional-config``: true for prompt lookup before the drafter."""


def speculative_config(k: int) -> dict[str, Any]:
    """For ``--speculative-config``.

    Args:
        k: drafted tokens a step.
    """
    return {"method": "custom_class", "model": PROPOSER, "num_speculative_tokens": k}


def additional_config(drafter: Path, lookup: bool = False) -> dict[str, Any]:
    """For ``--additional-config``."""
    return {DRAFTER: str(drafter)} | ({LOOKUP: True} if lookup else {})


def lookup_of(additional: Any) -> bool:
    """Whether prompt lookup comes before the drafter, from a server's ``additional_config``.

    Raises:
        UsageError: neither true nor false.
    """
    said = additional.get(LOOKUP, False) if isinstance(additional, Mapping) else False
    if not isinstance(said, bool):
        raise UsageError(f"{LOOKUP} in --additional-config is {said!r}: give true or false")
    return said


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
