"""Where a run's numbers go: the log file always, trackers as far as they work. They are played by modules made up here."""

from __future__ import annotations

import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import pytest

from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from hspec.training.config import TrainConfig
from hspec.training.job import Job
from hspec.training.plan import plan
from hspec.training.trackers import LOG_FILE, TRACKERS, Trackers, check_trackers, flatten
from tests.tiny import tiny_target
from tests.training.helpers import settings, trainer_for

RECORD: dict[str, Any] = {
    "kind": "held-out", "step": 3, "steps": 9, "loss": 0.5, "acceptance": [0.25, 0.125], "name": "x", "flag": True,
    "calibration": {"ece": 0.1, "confidence": [None, 0.75]},
}  # fmt: skip
NUMBERS = {
    "held-out/loss": 0.5, "held-out/acceptance/1": 0.25, "held-out/acceptance/2": 0.125, "held-out/calibration/ece": 0.1,
    "held-out/calibration/confidence/2": 0.75,
}  # fmt: skip


class Fake:
    """What was asked of a tracker's module."""

    def __init__(self, broken: bool = False):
        self.calls: list[Any] = []
        self.broken = broken

    def module(self, name: str) -> types.ModuleType:
        module = types.ModuleType(name)
        fake = self

        class SummaryWriter:
            def __init__(self, log_dir: str):
                fake.calls.append(("init", log_dir))

            def add_scalar(self, name: str, value: float, step: int) -> None:
                fake.log({name: value}, step)

            def flush(self) -> None:
                pass

            def close(self) -> None:
                fake.calls.append("close")

        module.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
        module.init = lambda **given: self.calls.append(("init", given["name"]))  # type: ignore[attr-defined]
        module.log = self.log  # type: ignore[attr-defined]
        module.finish = lambda: self.calls.append("close")  # type: ignore[attr-defined]
        return module

    def log(self, numbers: dict[str, float], step: int) -> None:
        if self.broken:
            raise ConnectionError("no route to host")
        self.calls.append((numbers, step))

    @property
    def logged(self) -> dict[str, float]:
        return {
            name: value
            for call in self.calls
            if isinstance(call, tuple) and call[0] != "init"
            for name, value in call[0].items()
        }


def install(monkeypatch: pytest.MonkeyPatch, name: str, broken: bool = False) -> Fake:
    fake, module = Fake(broken), TRACKERS[name][0]
    monkeypatch.setitem(sys.modules, module, fake.module(module))
    return fake


def test_records_become_flat_names() -> None:
    assert flatten(RECORD) == NUMBERS


@pytest.mark.parametrize("name", TRACKERS)
def test_each_tracker_gets_the_numbers_and_is_closed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, name)
    trackers = Trackers(tmp_path / "run", [name])
    assert fake.calls == []  # nothing is opened before there is something to say
    trackers.log(RECORD)
    trackers.log({**RECORD, "step": 4})
    trackers.close()
    assert fake.calls[0][0] == "init" and "run" in fake.calls[0][1] and fake.calls[-1] == "close"
    assert fake.logged == NUMBERS
    assert [c[1] for c in fake.calls[1:-1]] == sorted(c[1] for c in fake.calls[1:-1]) and fake.calls[-2][1] == 4
    assert [json.loads(line) for line in (tmp_path / "run" / LOG_FILE).read_text().splitlines()] == [
        RECORD,
        {**RECORD, "step": 4},
    ]


@pytest.mark.parametrize("name", TRACKERS)
def test_a_missing_tracker_is_an_error_before_the_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TRACKERS[name][0], None)
    for act in (
        lambda: check_trackers([name]),
        lambda: Trackers(tmp_path, [name]),
        lambda: plan(Job(train=TrainConfig(trackers=(name,))), tmp_path / "run"),  # type: ignore[arg-type]
    ):
        with pytest.raises(UsageError, match=f"trackers: {name} is asked for, but cannot be imported .*pip install {name}"):
            act()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_failing_tracker_warns_once_and_the_others_go_on(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fakes = {other: install(monkeypatch, other, broken=other == name) for other in TRACKERS}
    trackers = Trackers(tmp_path, list(TRACKERS))
    with pytest.warns(UserWarning, match=rf"{name} does not take the run's numbers \(ConnectionError: no route") as caught:
        for _ in range(3):
            trackers.log(RECORD)
    assert len(caught) == 1
    fakes[name].broken = False  # the network is back
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trackers.log(RECORD)
    assert all(fake.logged == NUMBERS for fake in fakes.values())
    assert len((tmp_path / LOG_FILE).read_text().splitlines()) == 4


def test_a_log_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(HSpecError, match=r"cannot write .*log\.jsonl: .*--resume"):
        Trackers(tmp_path / "run").log(RECORD)


def test_unknown_trackers_are_refused() -> None:
    with pytest.raises(ValueError, match="tensorboard"):
        TrainConfig(trackers=("tensorbord",))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=3, hidden=48)


def test_a_run_tells_its_tracker_what_it_reports(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "wandb")
    reports: list[dict[str, Any]] = []
    trainer_for(target, tmp_path, settings(steps=2, trackers=("wandb",))).run(reports.append)
    assert [r["kind"] for r in reports] == ["train", "held-out"]
    assert fake.logged == flatten(reports[0]) | flatten(reports[1])
    assert {"train/loss", "train/acceptance/1", "held-out/parts/tv", "held-out/tau_greedy"} <= fake.logged.keys()
    assert fake.calls[-1] == "close"
