from __future__ import annotations

from pathlib import Path

import pytest

from hspec.errors import HSpecError, UsageError
from hspec.files import append_line, whole_lines, write_text


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


@pytest.mark.parametrize("cut", [b"", b"{", b'{"a', b'{"a": 2, "b'])
def test_a_line_that_was_cut_off_goes_when_another_is_written(tmp_path: Path, cut: bytes) -> None:
    path = tmp_path / "a.jsonl"
    assert whole_lines(path, '{"a"') == []
    append_line(path, '{"a": 1}')
    path.write_bytes(path.read_bytes() + cut)
    before = path.read_bytes()
    assert whole_lines(path, '{"a"') == [b'{"a": 1}'] and path.read_bytes() == before, "reading changes nothing"
    append_line(path, '{"a": "é"}')
    assert path.read_bytes() == '{"a": 1}\n{"a": "é"}\n'.encode()


def test_a_line_that_was_cut_off_may_be_the_only_one(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"a": ')
    assert whole_lines(path, '{"a"') == []
    append_line(path, '{"a": 1}')
    assert path.read_bytes() == b'{"a": 1}\n'


@pytest.mark.parametrize("other", [b"some text", b'{"a": 1}\nsome text', b"\x00\x01", b'{"other": 1}'])
def test_a_file_of_something_else_is_left_alone(tmp_path: Path, other: bytes) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(other)
    with pytest.raises(UsageError, match=r"a\.jsonl does not end in a record, .*: choose another file"):
        whole_lines(path, '{"a"')
    assert path.read_bytes() == other
