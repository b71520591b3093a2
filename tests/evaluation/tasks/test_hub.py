"""Hub datasets through a stand-in for the library: no network here."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from hspec.errors import UsageError
from hspec.evaluation.tasks.catalogue import load_tasks
from hspec.evaluation.tasks.hub import hub_task

ROWS: list[dict[str, Any]] = [
    {"id": 7, "turns": ["A?", "B?"]},
    {"prompt": "C?"},
    {"instruction": "D?", "input": "e", "id": "d"},
    {"instruction": "F?", "input": ""},
    {
        "messages": [
            {"role": "system", "content": "S"},
            {"role": "user", "content": "G?"},
            {"role": "assistant", "content": "no"},
        ]
    },
    {"prompt": [{"role": "user", "content": "H?"}]},
    {"question": "I?", "tools": [{"name": "f", "parameters": {"type": "dict"}}]},
]


class Hub:
    """Notes what is asked for."""

    def __init__(self, rows: list[dict[str, Any]], splits: list[str]):
        self.rows, self.splits, self.asked = rows, splits, list[tuple[str, str | None, str]]()

    def get_dataset_split_names(self, name: str, config: str | None) -> list[str]:
        if name.startswith("gone/"):
            raise FileNotFoundError("no such set\nand a long tail")
        return self.splits

    def load_dataset(self, name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        self.asked.append((name, config, split))
        return self.rows


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(ROWS, ["train", "test"])
    library = SimpleNamespace(get_dataset_split_names=hub.get_dataset_split_names, load_dataset=hub.load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", library)
    return hub


def test_kinds_of_rows(hub: Hub) -> None:
    task = hub_task("someone/some-set")
    assert (task.name, task.source, hub.asked) == ("some-set", "someone/some-set:test", [("someone/some-set", None, "test")])
    assert [(p.id, p.turns, p.system) for p in task.prompts] == [
        ("7", ("A?", "B?"), None),
        ("1", ("C?",), None),
        ("d", ("D?\n\ne",), None),
        ("3", ("F?",), None),
        ("4", ("G?",), "S"),
        ("5", ("H?",), None),
        ("6", ("I?",), None),
    ]
    assert task.prompts[6].tools == ({"name": "f", "parameters": {"type": "object"}},)


def test_which_split(hub: Hub) -> None:
    assert hub_task("a/b/main:train").source == "a/b/main:train"
    hub.splits = ["odd", "train"]
    hub_task("a/b")
    hub.splits = ["odd"]
    hub_task("a/b")
    assert hub.asked == [("a/b", "main", "train"), ("a/b", None, "train"), ("a/b", None, "odd")]


def test_alpaca_is_a_hub_dataset(hub: Hub) -> None:
    (task,) = load_tasks(["alpaca"], limit=2)
    assert task.name == "alpaca" and len(task.prompts) == 2
    assert hub.asked[0][0].endswith("/alpaca")


def test_bad_rows(hub: Hub) -> None:
    hub.rows = [{"text": "x"}, {"prompt": "A?"}, {"messages": ["x"]}, {"prompt": "B?", "id": 1}]
    with pytest.raises(
        UsageError, match=r"3 bad rows \(row 0: none of turns, .* only text; row 2: .*; row 3: its id '1' is that of row 1"
    ):
        load_tasks(["a/b"])
    (task,) = load_tasks(["a/b"], skip_bad=True)
    assert [p.turns for p in task.prompts] == [("A?",)] and len(task.bad_lines) == 3


def test_not_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no dataset 'gone/set': no such set$"):
        load_tasks(["gone/set"])
    with pytest.raises(UsageError, match="'just-a-name' is no hub dataset: give owner/name"):
        hub_task("just-a-name")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="needs the package datasets: pip install datasets"):
        load_tasks(["a/b"])
