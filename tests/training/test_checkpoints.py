"""The states of a run: whole or passed over, and no more of them than are wanted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hspec.errors import HSpecError, UsageError
from hspec.training.checkpoints import DIGEST_FILE, STATE_FILE, Checkpoints, holds_run
from hspec.training.log import cut_log
from hspec.training.trackers import LOG_FILE


def cut(place: Path) -> None:
    (place / STATE_FILE).write_bytes((place / STATE_FILE).read_bytes()[:-100])


def flip(place: Path) -> None:
    data = bytearray((place / STATE_FILE).read_bytes())
    data[len(data) // 2] ^= 1
    (place / STATE_FILE).write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "cut short": cut,
    "one bit": flip,
    "no digest": lambda place: (place / DIGEST_FILE).unlink(),
    "an empty digest": lambda place: (place / DIGEST_FILE).write_text(""),
    "a digest of bytes": lambda place: (place / DIGEST_FILE).write_bytes(b"\xff\xfe"),
    "no state": lambda place: (place / STATE_FILE).unlink(),
}


def three(folder: Path) -> Checkpoints:
    checkpoints = Checkpoints(folder, keep=3)
    for step in (2, 5, 9):
        checkpoints.write(step, {"weights": torch.full((64,), float(step))})
    return checkpoints


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_broken_one_is_passed_over_with_a_warning(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    checkpoints = three(tmp_path)
    assert checkpoints.newest() == 9
    damage(checkpoints.place(9))
    with pytest.warns(UserWarning, match=r"step-00000009 is damaged \(.+\) and passed over"):
        assert checkpoints.newest() == 5
    assert float(checkpoints.read(5)["weights"][0]) == 5
    damage(checkpoints.place(5))
    damage(checkpoints.place(2))
    with (
        pytest.warns(UserWarning),
        pytest.raises(HSpecError, match=r"every state in .* is damaged: train on .* with --init-from"),
    ):
        checkpoints.newest()


def test_what_is_written_after_a_broken_one_takes_its_place(tmp_path: Path) -> None:
    checkpoints = three(tmp_path)
    cut(checkpoints.place(9))
    checkpoints.write(7, {})  # the run went on from 5
    assert checkpoints.steps() == [2, 5, 7] and checkpoints.newest() == 7
    cut(checkpoints.place(7))
    checkpoints.write(7, {"again": 1})
    assert checkpoints.newest() == 7 and checkpoints.read(7)["again"] == 1


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 4), st.lists(st.integers(0, 30), min_size=1, max_size=7))
def test_the_last_ones_are_kept(tmp_path_factory: pytest.TempPathFactory, keep: int, steps: list[int]) -> None:
    checkpoints = Checkpoints(tmp_path_factory.mktemp("run"), keep)
    expected: set[int] = set()
    for step in steps:
        checkpoints.write(step, {})
        expected = set(sorted(s for s in expected | {step} if s <= step)[-keep:])
        assert checkpoints.steps() == sorted(expected)
    assert {p.name for p in checkpoints.folder.iterdir()} == {checkpoints.place(s).name for s in expected}


def test_the_digest_is_one_that_common_tools_check(tmp_path: Path) -> None:
    place = three(tmp_path).place(9)
    digest, name = (place / DIGEST_FILE).read_text().split()
    assert (digest, name) == (hashlib.sha256((place / STATE_FILE).read_bytes()).hexdigest(), STATE_FILE)


def test_what_is_no_state(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(UsageError, match="nothing to resume"):
        checkpoints.newest()
    assert not holds_run(tmp_path)
    checkpoints.write(1, {"format": 99})
    assert holds_run(tmp_path)
    with pytest.raises(HSpecError, match="no training state that this version can read"):
        checkpoints.read(1)
    (checkpoints.place(1) / STATE_FILE).write_text("hello")
    with pytest.raises(HSpecError, match="cannot be read"):
        checkpoints.read(1)


# -- the log -----------------------------------------------------------------------------------------------------


def lines(*steps: int) -> str:
    return "".join(json.dumps({"kind": "train", "step": s}) + "\n" for s in steps)


@pytest.mark.parametrize(
    ("before", "step", "after"),
    [
        (lines(1, 2, 3), 2, lines(1, 2)),
        (lines(1, 2, 3), 3, lines(1, 2, 3)),
        (lines(1, 2, 3), -1, ""),
        (lines(1, 2) + '{"kind": "tr', 2, lines(1, 2)),
        (lines(1, 2)[:-1], 2, lines(1)),
        ("", 2, ""),
        (lines(1) + "a note\n" + lines(4), 2, lines(1) + "a note\n"),
    ],
)
def test_the_log_is_cut_back(tmp_path: Path, before: str, step: int, after: str) -> None:
    (tmp_path / LOG_FILE).write_text(before)
    cut_log(tmp_path, step)
    assert (tmp_path / LOG_FILE).read_text() == after


def test_there_need_be_no_log_but_it_must_be_text(tmp_path: Path) -> None:
    cut_log(tmp_path, 3)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / LOG_FILE).write_bytes(b"\xff\n")
    with pytest.raises(HSpecError, match=r"cannot read .*log\.jsonl"):
        cut_log(tmp_path, 3)
