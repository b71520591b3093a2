"""The states of a run that it can go on from: the last few, each with a digest, so that a broken one is noticed and passed over."""

from __future__ import annotations

import hashlib
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch

from hspec.errors import HSpecError, UsageError
from hspec.files import reason

CHECKPOINTS = "checkpoints"
STATE_FILE = "state.pt"
DIGEST_FILE = "state.sha256"
FORMAT = 2
"""Format 1 was a single ``state.pt`` at the top of the folder, without digest or number of processes."""


class Checkpoints:
    """``checkpoints/step-00001234/`` in the folder of a run, each with ``state.pt`` and the digest of it.

    Args:
        keep: how many; older ones are removed when a new one is whole.
    """

    def __init__(self, folder: Path, keep: int = 2):
        self.folder, self.keep = folder / CHECKPOINTS, keep

    def steps(self) -> list[int]:
        """Of those that are there, ascending."""
        names = (path.name.removeprefix("step-") for path in self.folder.glob("step-*"))
        return sorted(int(name) for name in names if name.isdigit())

    def place(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    # -- writing -------------------------------------------------------------------------------------------------

    def write(self, step: int, state: dict[str, Any]) -> None:
        """A state appears whole or not at all. Then all but the last ``keep`` go, and those of steps that are yet to come: the run was
        resumed from before them.

        Raises:
            HSpecError: the disk does not take it; what was there before stays.
        """
        temporary = self.folder / "new.partial"
        try:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
            with (temporary / STATE_FILE).open("wb") as file:
                torch.save({"format": FORMAT, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            (temporary / DIGEST_FILE).write_text(f"{_digest(temporary / STATE_FILE)}  {STATE_FILE}\n", encoding="ascii")
            shutil.rmtree(self.place(step), ignore_errors=True)
            temporary.replace(self.place(step))
        except (OSError, RuntimeError) as error:  # torch has its own error for a full disk
            shutil.rmtree(temporary, ignore_errors=True)
            raise HSpecError(
                f"cannot write the training state to {self.folder}: {reason(error)}. The last one is still whole: free some space "
                f"and --resume"
            ) from error
        self.prune(step)

    def prune(self, step: int) -> None:
        """Keep the last ones up to this step, which the run is at."""
        last = [other for other in self.steps() if other <= step][-self.keep :]
        for other in set(self.steps()) - set(last):
            shutil.rmtree(self.place(other), ignore_errors=True)

    # -- reading -------------------------------------------------------------------------------------------------

    def newest(self) -> int:
        """The last step whose state is whole; each that is not is warned about.

        Raises:
            UsageError: there is none at all.
            HSpecError: none is whole, or they are of an earlier version.
        """
        check_resumable(self.folder.parent)
        for step in reversed(self.steps()):
            fault = self._fault(step)
            if fault is None:
                return step
            warnings.warn(
                f"{self.place(step)} is damaged ({fault}) and passed over: the run goes on from the one before", stacklevel=2
            )
        run = self.folder.parent
        raise HSpecError(
            f"every state in {self.folder} is damaged: train on from the drafter in {run}, with --init-from {run} and another --out"
        )

    def _fault(self, step: int) -> str | None:
        place = self.place(step)
        try:
            noted = (place / DIGEST_FILE).read_text(encoding="ascii").split()[:1]
            found = _digest(place / STATE_FILE)
        except (OSError, UnicodeDecodeError) as error:
            return reason(error)
        return None if noted == [found] else f"{STATE_FILE} is not what {DIGEST_FILE} says"

    def read(self, step: int) -> dict[str, Any]:
        """The state of a step that :meth:`newest` has found whole, on the CPU.

        Raises:
            HSpecError: another version wrote it.
        """
        path = self.place(step) / STATE_FILE
        try:
            state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except Exception as error:  # torch raises many types
            raise HSpecError(f"{path} cannot be read ({reason(error)}): start anew in another folder") from error
        if not isinstance(state, dict) or state.get("format") != FORMAT:
            raise HSpecError(f"{path} is no training state that this version can read: start anew in another folder")
        return state


def holds_run(folder: Path) -> bool:
    """Whether any version of this program has left a state there."""
    return bool(Checkpoints(folder).steps()) or (folder / STATE_FILE).exists()


def check_resumable(folder: Path) -> None:
    """Whether there is a state to go on from, whole or not.

    Raises:
        UsageError: there is none, or it is of an earlier version.
    """
    if Checkpoints(folder).steps():
        return
    if (folder / STATE_FILE).exists():
        raise UsageError(
            f"{folder / STATE_FILE} was written by an earlier version, whose runs this one cannot resume: begin another run from its "
            f"drafter, with --init-from {folder} and another --out"
        )
    raise UsageError(f"nothing to resume: {folder} has no {CHECKPOINTS}; start without --resume")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
