from __future__ import annotations

from pathlib import Path

import pytest

from hspec.errors import HSpecError
from hspec.files import drop_cut_line, write_text


def test_a_file_appears_whole(tmp_path: Path) -> None:
    path = tmp_path / "new" / "a.txt"
    write_text(path, "one")
    write_text(path, "two")
    assert path.read_text() == "two" and [p.name for p in path.parent.iterdir()] == ["a.txt"]


def test_a_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("something")
    with pytest.raises(HSpecError, match=r"cannot write .*taken/below/a\.txt: .*choose another place"):
        write_text(tmp_path / "taken" / "below" / "a.txt", "text")
    assert (tmp_path / "taken").read_text() == "something"


def test_what_was_there_stays(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    with pytest.raises(HSpecError, match="cannot write"):
        write_text(tmp_path / "a.txt", "text")
    assert (tmp_path / "a.txt").is_dir() and [p.name for p in tmp_path.iterdir()] == ["a.txt"]


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert drop_cut_line(path) == b""
    path.write_bytes(b'{"a": 1}\n{"a": ')
    assert drop_cut_line(path) == path.read_bytes() == b'{"a": 1}\n'
