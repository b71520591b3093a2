"""Runs that are killed at any moment, again and again, end bit for bit as if nothing had been."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.training.checkpoints import Checkpoints
from tests.training.runs import KILLED, STEPS, End, config, course, run

KILLS = 20
TIMINGS = ("seconds", "core_seconds", "blocks_per_second")


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(inner, f"{name}/{key}")
    else:
        yield name, value


def ended_alike(one: Path, two: Path) -> None:
    """Weights, averages, optimiser, what was measured, drafters, the best one and the log."""
    a, b = (dict(leaves(Checkpoints(folder).read(STEPS))) for folder in (one, two))
    assert a.keys() == b.keys() and len(a) > 200
    for name in (name for name in a if name != "/seconds" and not name.startswith("/core_seconds/")):
        same = torch.equal(a[name], b[name]) if isinstance(a[name], Tensor) else a[name] == b[name]
        assert same, name
    for file in ("drafter.safetensors", "config.json", "best/drafter.safetensors", "best/config.json"):
        assert (one / file).read_bytes() == (two / file).read_bytes(), file
    logs = [[json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()] for folder in (one, two)]
    assert [{k: v for k, v in r.items() if k not in TIMINGS} for r in logs[0]] == [
        {k: v for k, v in r.items() if k not in TIMINGS} for r in logs[1]
    ]
    assert [(r["kind"], r["step"]) for r in logs[0]] == [
        ("train", 3), ("held-out", 4), ("train", 6), ("train", 8), ("held-out", 8),
    ]  # fmt: skip
    assert Checkpoints(one).steps() == Checkpoints(two).steps() == [6, 8]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run(folder) == [End(0)]
    return folder


def test_twenty_kills(undisturbed: Path, tmp_path: Path) -> None:
    """Each run is killed at a random moment, most of them once more after they were resumed, and then left to its end. Some of the
    moments are anywhere, some lie where states, drafters and logs are written and read."""
    generator = random.Random(3)
    whole, resumed = course(undisturbed), None
    moments = [whole.inside(place, generator) for place in ("write", "_save_average", "validate", "train_step")]
    kills: list[dict[str, Any]] = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        assert run(folder, [moments.pop() if moments else whole.anywhere(generator)]) == [End(KILLED)]
        if resumed is not None:  # how a resumed run goes is known from the one before
            again = resumed.inside("_restore", generator) if number % 4 == 1 else resumed.anywhere(generator, 0.5)
            (end,) = run(folder, [again])
            assert end in (End(KILLED), End(0))  # it may have been nearer to its end than the one before
        assert run(folder) == [End(0)]
        ended_alike(folder, undisturbed)
        if "_restore" in course(folder).ends:
            resumed = course(folder)
        kills += [json.loads(line) for line in (folder / "killed.jsonl").read_text().splitlines()]
        if len(kills) >= KILLS:
            break
    inside = {name for kill in kills for name in kill["inside"]}
    assert {"train_step", "validate", "write", "_save_average", "_restore"} <= inside, kills
    stages = {config().stage(kill["step"]).slots for kill in kills if kill["step"] in range(STEPS)}
    assert stages == {1, 2, 3}, kills


def test_a_broken_state_costs_steps_and_nothing_else(undisturbed: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert run(folder, [course(undisturbed).calls * 19 // 20]) == [End(KILLED)]
    last = Checkpoints(folder).newest()
    state = Checkpoints(folder).place(last) / "state.pt"
    state.write_bytes(state.read_bytes()[:1000])
    assert run(folder) == [End(0)]
    ended_alike(folder, undisturbed)


def test_an_end_just_before_an_old_state_was_taken_away(undisturbed: Path, tmp_path: Path) -> None:
    """All is saved then, and nothing is left to train."""
    folder = tmp_path / "run"
    shutil.copytree(undisturbed, folder)
    states = Checkpoints(folder)
    shutil.copytree(states.place(6), states.place(4))
    assert run(folder) == [End(0)]
    ended_alike(folder, undisturbed)


@pytest.mark.parametrize("victim", [0, 1])
def test_one_of_two_processes_is_killed(tmp_path: Path, victim: int) -> None:
    assert run(tmp_path / "whole", [None, None]) == [End(0), End(0)]
    whole = course(tmp_path / "whole", victim)
    kills: list[int | None] = [None, None]
    kills[victim] = random.Random(victim).randrange(whole.calls // 2, whole.calls)
    ends = run(tmp_path / "run", kills)
    assert ends[victim] == End(KILLED)
    other = ends[1 - victim]
    assert other.code == 1
    # The first process says it; the second leaves quietly.
    assert ("another process of the run is gone" in other.message) == (victim == 1)
    assert run(tmp_path / "run", [None, None]) == [End(0), End(0)]
    ended_alike(tmp_path / "run", tmp_path / "whole")
