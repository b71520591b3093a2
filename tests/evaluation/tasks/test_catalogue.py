"""Tasks by name: those that ship, a folder's, a file's; and which prompts a limit leaves."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hspec.errors import UsageError
from hspec.evaluation.tasks.catalogue import DEEPSPEC, FAMILIES, built_in, load_tasks, tasks_in
from hspec.evaluation.tasks.task import as_openai, takes_tools, tools_as_text
from hspec.targets.template import ChatTemplate
from hspec.training.prompts import normalised
from tests.tiny import tiny_tokenizer


def folder_of(path: Path, **tasks: int) -> Path:
    for name, count in tasks.items():
        file = path / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"id": i, "turns": [f"{name} {i}?"]}) + "\n" for i in range(count)))
    return path


@pytest.mark.parametrize("name", FAMILIES)
def test_what_ships(name: str) -> None:
    task = built_in(name)
    assert len(task.prompts) >= 12 and task.name == name
    assert all(bool(p.tools) == (name == "tool_calling") for p in task.prompts)
    assert all(len(p.turns) == (2 if name == "chat" else 1) for p in task.prompts)
    firsts = {normalised(p.turns[0]) for family in FAMILIES for p in built_in(family).prompts}
    assert len(firsts) == sum(len(built_in(family).prompts) for family in FAMILIES), "no prompt is there twice"


def test_a_limit_is_the_beginning_of_a_larger_one() -> None:
    ids = {n: [[p.id for p in t.prompts] for t in load_tasks(["math", "qa"], limit=n)] for n in (3, 7)}
    assert all(small == large[:3] for small, large in zip(ids[3], ids[7], strict=True))
    assert [[p.id for p in t.prompts] for t in load_tasks(["math"], limit=3)] == ids[3][:1], "company changes nothing"
    assert [[p.id for p in t.prompts] for t in load_tasks(["math"], limit=3, seed=1)] != ids[3][:1]


def test_groups_and_a_folder(tmp_path: Path) -> None:
    data = folder_of(tmp_path, **{"spec/math": 5, "deep/gsm8k": 3, "mine": 2})
    assert set(tasks_in(data)) == {"gsm8k", "math", "mine"}
    tasks = load_tasks(["families", "deepspec", "mine", "math"], data)
    assert [t.name for t in tasks] == [*FAMILIES, "gsm8k", "mine"], "each once, and of DeepSpec's those that are there"
    sizes = {t.name: len(t.prompts) for t in tasks}
    assert (sizes["math"], sizes["qa"]) == (5, len(built_in("qa").prompts)), "a folder's come before those that ship"
    assert load_tasks([str(data / "mine.jsonl")])[0].name == "mine"
    assert len(DEEPSPEC) == 9


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no task 'maths': there are math, qa, .*long-qa.*; in .*: mine"):
        load_tasks(["maths"], folder_of(tmp_path / "data", mine=1))
    with pytest.raises(UsageError, match="do not ship: name the folder"):
        load_tasks(["deepspec"])
    with pytest.raises(UsageError, match="no task is asked for"):
        load_tasks([])
    with pytest.raises(UsageError, match="not a folder"):
        load_tasks(["math"], tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \.jsonl file in it"):
        load_tasks(["math"], tmp_path / "empty")
    with pytest.raises(UsageError, match="two tasks are called 'math'"):
        load_tasks(["math"], folder_of(tmp_path / "twice", **{"a/math": 1, "b/math": 1}))


def test_a_hub_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": 7, "turns": ["A?", "B?"]}, {"prompt": "C?"}, {"instruction": "D?", "id": "d"}]
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name, split: rows))
    task = load_tasks(["someone/some-set"])[0]
    assert task.name == "some-set"
    assert {(p.id, p.turns) for p in task.prompts} == {("7", ("A?", "B?")), ("1", ("C?",)), ("d", ("D?",))}
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda name, split: [{"text": "x"}]))
    with pytest.raises(UsageError, match="row 0 of the dataset has none of"):
        load_tasks(["someone/some-set"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="needs the package datasets"):
        load_tasks(["someone/some-set"])


def test_tools_go_into_the_system_message_or_the_template() -> None:
    prompt = built_in("tool_calling").prompts[0]
    plain = ChatTemplate(tiny_tokenizer())
    assert not takes_tools(plain)
    opening = built_in("tool_calling").opening(prompt, plain)
    assert opening == [{"role": "system", "content": tools_as_text(prompt.tools)}]
    assert all(tool["name"] in opening[0]["content"] for tool in prompt.tools)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t['function']['name'] }} {% endfor %}" + tokenizer.chat_template
    able = ChatTemplate(tokenizer)
    assert takes_tools(able) and built_in("tool_calling").opening(prompt, able) == []
    text = able.text([{"role": "user", "content": "Hello"}], tools=as_openai(prompt.tools))
    assert text.startswith(f"{prompt.tools[0]['name']} ")
    assert built_in("qa").opening(built_in("qa").prompts[0], plain) == []
