"""Prompts inside wheels: a few rows of our own in each file's layout stand for the download."""

import gzip
import json
from pathlib import Path

import pytest

from hspec.errors import HSpecError
from hspec.evaluation.tasks import packages
from hspec.evaluation.tasks.catalogue import load_tasks
from hspec.evaluation.tasks.packages import PACKAGED, packaged_task
from hspec.targets.packaged import WheelFile

CALL = {
    "id": "simple_0",
    "question": [
        [{"role": "system", "content": "S"}, {"role": "user", "content": "Area of a disc?"}],
        [{"role": "user", "content": "And?"}],
    ],
    "function": [{"name": "area", "parameters": {"type": "dict", "properties": {"r": {"type": "float"}}}}],
}
PARAGRAPH = {
    "context": "Oats grow here.",
    "qas": [
        {"id": "q1", "question": "What grows?", "is_impossible": False},
        {"id": "q2", "question": "Who?", "is_impossible": True},
    ],
}
ROWS = {
    "humaneval": json.dumps({"task_id": "HumanEval/0", "prompt": "def f():\n"}) + "\n",
    "mt-bench": json.dumps({"question_id": 81, "turns": ["One?", "Two?"]}) + "\n",
    "bfcl-parallel": json.dumps(CALL) + "\n",
    "mmath-fr": json.dumps([{"question": "Un et un ?", "answer": "2"}]),
    "squad": json.dumps({"data": [{"paragraphs": [PARAGRAPH]}]}),
    "hotpotqa": json.dumps(
        [{"_id": "h", "question": "Which?", "context": [["First", ["One. ", "Two."]], ["Second", ["Three."]]]}]
    ),
    "aa-lcr": 'question,answer,context\r\nWhy?,x,"' + 'BEGIN ""DOCUMENT"" 1\n' * 20_000 + '"\r\n',
}


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as :func:`fetch` would give them."""
    by_file = {PACKAGED[name].file: text for name, text in ROWS.items()}

    def fetch(file: WheelFile) -> Path:
        path = tmp_path / Path(file.member).name
        if not path.exists():
            data = by_file[file].encode()
            path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        return path

    monkeypatch.setattr(packages, "fetch", fetch)
    return tmp_path


def test_every_layout(downloads: Path) -> None:
    got = {name: packaged_task(name).prompts for name in ROWS}
    assert {len(prompts) for prompts in got.values()} == {1}, "questions that a paragraph does not answer are left out"
    prompts = {name: prompts[0] for name, prompts in got.items()}
    assert {name: p.id for name, p in prompts.items()} == {
        "humaneval": "HumanEval/0", "mt-bench": "81", "bfcl-parallel": "simple_0", "mmath-fr": "1",
        "squad": "q1", "hotpotqa": "h", "aa-lcr": "1",
    }  # fmt: skip
    assert prompts["humaneval"].turns[0].endswith("```python\ndef f():\n\n```")
    assert prompts["mt-bench"].turns == ("One?", "Two?")
    assert prompts["bfcl-parallel"].turns == ("Area of a disc?", "And?") and prompts["bfcl-parallel"].system == "S"
    assert prompts["bfcl-parallel"].tools[0]["parameters"]["properties"]["r"]["type"] == "number"
    assert prompts["mmath-fr"].turns == ("Un et un ?",)
    assert prompts["squad"].turns[0].startswith("Oats grow here.") and prompts["squad"].turns[0].endswith("What grows?")
    assert "[1] First\nOne. Two.\n\n[2] Second\nThree.\n\nQuestion: Which?" in prompts["hotpotqa"].turns[0]
    assert prompts["aa-lcr"].turns[0].startswith('BEGIN "DOCUMENT" 1\n') and prompts["aa-lcr"].turns[0].endswith(
        "Question: Why?"
    )


def test_by_name(downloads: Path) -> None:
    task, other = load_tasks(["humaneval", "bfcl-parallel"])
    assert (task.name, other.name) == ("humaneval", "bfcl-parallel")
    assert task.source == f"{PACKAGED['humaneval'].file.requirement}, {PACKAGED['humaneval'].file.member}"


@pytest.mark.parametrize("damage", [b"", b"{", b"[]x", b'[{"_id": 1}]', b"\xff"])
@pytest.mark.parametrize("name", ["hotpotqa", "humaneval"])
def test_a_damaged_file(downloads: Path, name: str, damage: bytes) -> None:
    (downloads / Path(PACKAGED[name].file.member).name).write_bytes(damage)
    with pytest.raises(HSpecError, match=r"is damaged .*: delete it, and it is fetched again"):
        packaged_task(name)


def test_the_files_have_names_and_digests_of_their_own() -> None:
    """The cache keeps a file by its last name alone."""
    names = [Path(task.file.member).name for task in PACKAGED.values()]
    assert len(set(names)) == len(names) == len({task.file.sha256 for task in PACKAGED.values()})
    assert all(len(bytes.fromhex(task.file.sha256)) == 32 and "==" in task.file.requirement for task in PACKAGED.values())
