"""Prompts from JSONL: what is wrong is named line by line, and nothing is left out silently."""

import json
from pathlib import Path

import pytest

from hspec.errors import HSpecError, UsageError
from hspec.evaluation.tasks.files import read_task, tasks_in

GOOD = [{"id": "a", "turns": ["One?"]}, {"id": 2, "turns": ["Two?", "And then?"], "tools": [{"name": "f"}], "source": "x"}]
BAD = [
    ("{", "line 3: not JSON"),
    ('"text"', "line 3: a JSON object is expected, this is str"),
    (json.dumps({"turns": ["x"]}), 'line 3: "id" must be a string or a number'),
    (json.dumps({"id": True, "turns": ["x"]}), 'line 3: "id" must be a string or a number'),
    (json.dumps({"id": "x", "turns": []}), 'line 3: "turns" must be a list of texts, none of them empty'),
    (json.dumps({"id": "x", "turns": ["  "]}), 'line 3: "turns" must be a list of texts'),
    (json.dumps({"id": "x", "turns": ["x"], "tools": ["f"]}), 'line 3: "tools" must be a list of function schemas'),
    (json.dumps({"id": "a", "turns": ["x"]}), "line 3: its id 'a' is that of line 1"),
    (json.dumps({"id": "2", "turns": ["x"]}), "line 3: its id '2' is that of line 2"),
]


def write(path: Path, *lines: str, mark: str = "") -> Path:
    path.write_text(mark + "\n".join([*map(json.dumps, GOOD), *lines]) + "\n", encoding="utf-8")
    return path


@pytest.mark.parametrize("mark", ["", "\ufeff"], ids=["plain", "byte order mark"])
def test_a_file(tmp_path: Path, mark: str) -> None:
    task = read_task(write(tmp_path / "mine.jsonl", "", "  ", mark=mark))
    assert (task.name, [p.id for p in task.prompts], task.bad_lines) == ("mine", ["a", "2"], ())
    assert task.prompts[1].turns == ("Two?", "And then?") and task.prompts[1].tools == ({"name": "f"},)


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    line = json.dumps({"id": "c", "turns": ["a\u2028b"]}, ensure_ascii=False)
    assert read_task(write(tmp_path / "mine.jsonl", line)).prompts[2].turns == ("a\u2028b",)


@pytest.mark.parametrize(("line", "said"), BAD, ids=[said for _, said in BAD])
def test_bad_lines_are_named(tmp_path: Path, line: str, said: str) -> None:
    path = write(tmp_path / "mine.jsonl", line)
    with pytest.raises(UsageError) as refused:
        read_task(path)
    assert said in str(refused.value) and "--skip-bad" in str(refused.value) and "1 bad line (" in str(refused.value)
    task = read_task(path, skip_bad=True)
    assert len(task.prompts) == 2 and len(task.bad_lines) == 1 and said in task.bad_lines[0]


def test_all_bad_lines_are_named_at_once(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.jsonl", *["{"] * 30, "5", "{", *["5"] * 2)
    with pytest.raises(UsageError, match=r"34 bad lines \(lines 3-32, 34: not JSON .*; lines 33, 35-36: a JSON object"):
        read_task(path)


def test_nothing_in_it(tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UsageError, match="has no prompt: give lines like"):
        read_task(tmp_path / "empty.jsonl")
    with pytest.raises(UsageError, match="no task file at"):
        read_task(tmp_path / "gone.jsonl")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HSpecError, match="not UTF-8"):
        read_task(tmp_path / "binary.jsonl")
    with pytest.raises(HSpecError, match=r"cannot read .*: Is a directory"):
        read_task(tmp_path)


def test_a_folder_of_tasks(tmp_path: Path) -> None:
    for name in ("top", "one/math", "two/qa", "two/deeper/no"):
        path = tmp_path / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path)
    (tmp_path / "one" / "notes.txt").write_text("no task")
    assert set(tasks_in(tmp_path)) == {"top", "math", "qa"}
