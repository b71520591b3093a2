"""The processes of a run, and what they do together: one alone, several on CPUs (gloo), or one a GPU on any number of nodes (NCCL).

They are started from outside, by ``accelerate launch`` or torchrun; here they find each other. What matters most is how they end:
an error that one of them meets is told to all, so that none waits for ever and one message says what happened.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from hspec.errors import HSpecError, UsageError

T = TypeVar("T")

PATIENCE = timedelta(hours=24)
"""How long a process waits for the others. The first one may let the target answer for hours while they wait; a process that is gone is
noticed by its connection, or by the launcher, which then ends the others."""


@dataclass(frozen=True)
class _Failure:
    message: str
    exit_code: int


@dataclass(frozen=True)
class Processes:
    """This process among those of its run; as it stands here, one alone."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    rank: int = 0
    count: int = 1
    local_rank: int = 0
    """Its place among those on the same node."""

    @staticmethod
    def launched(device: str = "cpu") -> Processes:
        """As the launcher's environment has it (``WORLD_SIZE`` and the like); alone without one.

        Args:
            device: where this process works. With several, ``cuda`` gives each the GPU of its local rank.

        Raises:
            UsageError: several processes are to share one GPU, or there are none of that kind.
            HSpecError: the others cannot be reached.
        """
        try:
            kind = torch.device(device)
        except RuntimeError as error:
            raise UsageError(f"--device {device} is none: cpu, cuda or cuda:1, say") from error
        if int(os.environ.get("WORLD_SIZE", "1")) == 1:
            return Processes(kind)
        from accelerate import PartialState  # only here: importing it takes a second

        if kind.index is not None:
            raise UsageError(f"--device {device}: of several processes each takes the GPU of its rank; give --device cuda")
        try:
            state = PartialState(cpu=device == "cpu", timeout=PATIENCE)
        except (RuntimeError, ValueError, OSError) as error:
            raise HSpecError(
                f"the processes of this run do not find each other ({_first_line(error)}): check the launcher's address and port"
            ) from error
        if state.device.type != kind.type:
            raise UsageError(f"--device {device}: the processes that were launched have {state.device.type}")
        return Processes(state.device, state.process_index, state.num_processes, state.local_process_index)

    @property
    def main(self) -> bool:
        """Whether this is the one that writes and speaks."""
        return self.rank == 0

    # -- talking -------------------------------------------------------------------------------------------------

    def gather(self, value: T) -> list[T]:
        """Everyone's value (anything that can be pickled), by rank."""
        if self.count == 1:
            return [value]
        values: list[Any] = [None] * self.count
        with self.connected():
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def connected(self) -> Iterator[None]:
        """Around whatever needs the others: if one of them is gone, this process ends too, and the first one says so."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            if self.count == 1:
                raise
            self._end(
                _Failure(
                    f"another process of the run is gone ({_first_line(error)}); its own message or the launcher's says why. The last "
                    f"saved state is whole: --resume goes on from it",
                    HSpecError.exit_code,
                ),
                error,
            )

    def _end(self, failure: _Failure, cause: BaseException | None = None) -> None:
        """One message for all: the first process says it, the others leave quietly."""
        if not self.main:
            raise SystemExit(failure.exit_code) from cause
        error = HSpecError(failure.message)
        error.exit_code = failure.exit_code
        raise error from cause

    def close(self) -> None:
        """Let go of the others, when all is done.

        Not on CPUs: gloo's threads need the interpreter's lock to let go of what they have just sent, and to end them while this thread
        has it can take for ever (seen in one run of fifteen). There the end of the process does it.
        """
        if self.count > 1 and self.device.type != "cpu":
            dist.destroy_process_group()

    # -- acting together -----------------------------------------------------------------------------------------

    def together(self, act: Callable[[], T]) -> T:
        """Everyone does it; if one fails, all end.

        Raises:
            HSpecError: one failed; on the first process, with the failed one's message. The others exit quietly.
        """
        if self.count == 1:
            return act()
        failed: Exception | None = None
        try:
            result = act()
        except Exception as error:
            failed = error
        self._compare_notes(failed)
        return result

    def on_main(self, act: Callable[[], None]) -> None:
        """The first process does it, the others wait; if it fails, all end."""
        self.together(lambda: act() if self.main else None)

    def in_turn(self, act: Callable[[], T]) -> T:
        """The first process does it alone, then the first of every node, then the rest: what is fetched or written once is then found by
        the others, on disks that nodes share and on disks of their own."""
        if self.count == 1:
            return act()
        mine = 0 if self.main else 1 if self.local_rank == 0 else 2
        results = [self.together(lambda turn=turn: act() if turn == mine else None) for turn in range(3)]  # type: ignore[misc]
        return results[mine]  # type: ignore[return-value]

    def _compare_notes(self, failed: Exception | None) -> None:
        note = None
        if failed is not None:
            known = isinstance(failed, HSpecError)
            text = str(failed) if known else f"unexpected {type(failed).__name__}: {_first_line(failed)}"
            note = _Failure(text, failed.exit_code if isinstance(failed, HSpecError) else HSpecError.exit_code)
        notes = self.gather(note)
        if failed is not None and (self.main or not isinstance(failed, HSpecError)):
            raise failed  # what is unexpected keeps its traceback
        for rank, other in enumerate(notes):
            if other is not None:
                self._end(_Failure(f"process {rank} of {self.count}: {other.message}", other.exit_code), failed)

    def agree(self, facts: Mapping[str, Any]) -> None:
        """Whether all processes have the same facts, by name; nested ones are compared key by key.

        Raises:
            HSpecError: they have not; the message names the first difference.
        """
        everyone = self.gather(flat(facts))
        for rank, theirs in enumerate(everyone):
            for name in [*everyone[0], *(n for n in theirs if n not in everyone[0])]:
                one, two = everyone[0].get(name, "nothing"), theirs.get(name, "nothing")
                if one != two:
                    self._end(
                        _Failure(
                            f"the processes of this run disagree: {name} is {one} for process 0, and {two} for process {rank}: start all "
                            f"of them with the same command, software and files",
                            HSpecError.exit_code,
                        )
                    )


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with names such as ``train.steps``."""
    out: dict[str, Any] = {}
    for key, value in values.items():
        out |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return out


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
