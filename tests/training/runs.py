"""Runs of a tiny trainer in processes of their own, one or several together, which may be killed at any moment.

They are forked from a server that has imported everything, so that one takes a second and not five.
"""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from hspec.errors import HSpecError
from hspec.remote.address import Address
from hspec.remote.server import FeatureServer
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from hspec.training.agenda import Agenda, Task
from hspec.training.config import GrowthStage, TrainConfig
from hspec.training.feature_server import FeatureServerConfig, served_target
from hspec.training.processes import Processes
from hspec.training.trainer import Trainer
from tests.tiny import tiny_target
from tests.training.helpers import settings, trainer_for

ROOT = Path(__file__).parents[2]
STEPS = 8
TARGET = tiny_target(layers=2, hidden=32, heads=2, kv_heads=1)
TIME_LIMIT = 120
KILLED = -signal.SIGKILL
PLACES = ("write", "_save_average", "validate", "train_step", "_restore")
"""Functions of interest for where a run was killed."""


def config(**changes: Any) -> TrainConfig:
    stages = tuple(GrowthStage(start=s, slots=k, density=d) for s, k, d in ((0.0, 1, 1.0), (0.25, 2, 0.7), (0.6, 3, 0.5)))
    return settings(**({"steps": STEPS, "growth": stages, "batch_tokens": 100} | changes))


@dataclass
class Course:
    """Of a process that came to its end."""

    calls: int = 0
    """Calls and returns of functions, in Python or not."""
    ends: dict[str, list[int]] = field(default_factory=dict)
    """At which of them each of :data:`PLACES` began and ended, in turn."""

    def anywhere(self, generator: random.Random, share: float = 1.0) -> int:
        return generator.randrange(1, int(self.calls * share))

    def inside(self, place: str, generator: random.Random) -> int:
        ends = self.ends[place]
        begin = generator.randrange(0, len(ends), 2)
        return generator.randrange(ends[begin], ends[begin + 1])


def course(folder: Path, rank: int = 0) -> Course:
    """Of the last process of this rank that came to its end there."""
    return Course(**json.loads((folder / f"course-{rank}.json").read_text()))


class BySteps(Agenda):
    """Due at every so many steps, so that runs of any speed do the same."""

    def __init__(self, every: dict[Task, int]):
        super().__init__(dict.fromkeys(every, 0.0))
        self.every = every

    def due(self, step: int) -> frozenset[Task]:
        return frozenset(task for task, count in self.every.items() if step % count == 0)


@dataclass(frozen=True)
class Served:
    """A target in a folder, and where its layers run; nowhere else if no address is given."""

    folder: Path
    at: tuple[str, ...] = ()
    patience: float = 0.0

    def target(self, processes: Processes) -> Target:
        if not self.at:
            return load_target(str(self.folder))
        config = FeatureServerConfig(at=self.at, patience=self.patience)
        return served_target(str(self.folder), config, "fp32", "cpu", processes.rank, processes.count)


# -- in the processes --------------------------------------------------------------------------------------------


def _serve(folder: Path, address: str) -> None:
    torch.set_num_threads(1)
    FeatureServer(load_target(str(folder)), Address.parse(address)).run()


def trainer(folder: Path, shard: bool = False, served: Served | None = None, **changes: Any) -> Trainer:
    processes, pattern = Processes.launched(), ("mamba", "attention", "mlp")
    target = TARGET if served is None else served.target(processes)
    new = trainer_for(target, folder, config(**changes), processes=processes, shard=shard, pattern=pattern, taps=[0, 1])
    if new.checkpoints.steps():
        new.resume()
    return new


def train(folder: Path, shard: bool, kill_at: int | None, served: Served | None, changes: dict[str, Any]) -> None:
    """To the end, or to the ``kill_at``-th function that is called."""
    course = _kill_at(kill_at, folder)
    one = trainer(folder, shard, served, **changes)
    one.run(lambda _: None, agenda=BySteps({"report": 3, "validate": 4, "save": 2}))
    sys.setprofile(None)
    (folder / f"course-{one.processes.rank}.json").write_text(json.dumps(asdict(course)))
    one.processes.close()


def _kill_at(moment: int | None, folder: Path) -> Course:
    course = Course()

    def on_call(frame: Any, event: str, _: Any) -> None:
        course.calls += 1
        if event in ("call", "return") and frame.f_code.co_name in PLACES:
            course.ends.setdefault(frame.f_code.co_name, []).append(course.calls)
        if course.calls == moment:
            sys.setprofile(None)
            _note_where(frame, folder)
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(on_call)
    return course


def _note_where(frame: Any, folder: Path) -> None:
    inside: list[str] = []
    step = None
    while frame is not None:
        inside += [p for p in PLACES if p == frame.f_code.co_name]
        if frame.f_code is Trainer.run.__code__:
            step = frame.f_locals["self"].step
        frame = frame.f_back
    with (folder / "killed.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "inside": inside}) + "\n")


def _begin(rank: int, count: int, port: int, tell: Connection, act: Callable[..., None], arguments: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1"}
    os.environ |= {"LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        act(*arguments)
    except HSpecError as error:
        tell.send(str(error))
        sys.exit(error.exit_code)


# -- in the test -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class End:
    code: int
    message: str = ""
    """Of the error that it ended with."""


def _forks() -> Any:
    context = mp.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def together(act: Callable[..., None], *arguments: Sequence[Any]) -> list[End]:
    """Call it in as many processes as there are lists of arguments, which are ranks of one run."""
    context = _forks()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    count, processes, pipes = len(arguments), [], []
    for rank, given in enumerate(arguments):
        hear, tell = context.Pipe(duplex=False)
        processes.append(context.Process(target=_begin, args=(rank, count, port, tell, act, given)))
        pipes.append((hear, tell))
    # The server, which starts with the first process, is to find the same modules.
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, sys.path)])):
        for process in processes:
            process.start()
    for process in processes:
        process.join(TIME_LIMIT)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert None not in codes, "a process waits for ever"
    return [End(code, hear.recv() if hear.poll() else "") for code, (hear, _) in zip(codes, pipes, strict=True)]


def run(
    folder: Path, kill_at: Sequence[int | None] = (None,), shard: bool = False, served: Served | None = None, **changes: Any
) -> list[End]:
    """Train in as many processes as there are moments to kill them at, from where the folder stands."""
    folder.mkdir(exist_ok=True)
    return together(train, *((folder, shard, moment, served, changes) for moment in kill_at))


@contextmanager
def serving(folder: Path, address: str) -> Iterator[mp.Process]:
    """A process that serves features of the target in a folder at a unix socket; killed at the end."""
    process = _forks().Process(target=_serve, args=(folder, address))
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join([str(ROOT), *filter(None, sys.path)])):
        process.start()
    end = time.monotonic() + TIME_LIMIT
    while not Path(address.removeprefix("unix:")).exists():
        assert process.is_alive() and time.monotonic() < end
        time.sleep(0.01)
    try:
        yield process
    finally:
        process.kill()
        process.join()
