"""A step whose loss or gradients are not finite: what of it is worth knowing."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hspec.errors import HSpecError
from hspec.files import write_text

DIVERGED_FILE = "diverged.json"
SHOWN = 3
"""So many documents are named in the message; the file has all."""


@dataclass(frozen=True)
class Tally:
    """What a process tells the others of its step, before gradients are taken."""

    loss: float
    """The sum over its slots."""
    normaliser: float
    blocks: int
    documents: tuple[str, ...]
    """Their ids."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss)


def diverged(what: str, step: int, tallies: Sequence[Tally], folder: Path) -> HSpecError:
    """An error that names the batch, whose documents are written to ``diverged.json`` in the run's folder.

    Args:
        what: is not finite. tallies: of all processes, by rank; those with a finite loss are suspects only if all have one.
    """
    suspects = {rank: tally for rank, tally in enumerate(tallies) if not tally.finite} or dict(enumerate(tallies))
    record = {
        "step": step,
        "not finite": what,
        "processes": [{"rank": r, "loss": repr(t.loss), "documents": t.documents} for r, t in suspects.items()],
    }
    write_text(folder / DIVERGED_FILE, json.dumps(record, indent=2) + "\n")
    documents = [name for tally in suspects.values() for name in tally.documents]
    shown = ", ".join(documents[:SHOWN]) + (f" and {len(documents) - SHOWN} more" if len(documents) > SHOWN else "")
    ranks = "" if len(tallies) == 1 else f", process {', '.join(map(str, suspects))}"
    return HSpecError(
        f"step {step}{ranks}: the {what} of the documents {shown} are not finite ({folder / DIVERGED_FILE} names all), the run has "
        f"diverged. What {folder} holds is from before: look at these documents, or start again with a lower learning_rate, from there "
        f"if you like (--init-from)"
    )
