"""Tasks by name: those that ship, a folder's, a file's; and which prompts a limit leaves."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspec.errors import UsageError
from hspec.evaluation.tasks.built_in import built_in
from hspec.evaluation.tasks.catalogue import check_tasks, chosen, load_tasks
from hspec.evaluation.tasks.families import DEEPSPEC, FAMILIES
from hspec.evaluation.tasks.task import Task, TaskPrompt


def folder_of(path: Path, **tasks: int) -> Path:
    for name, count in tasks.items():
        file = path / f"{name}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps({"id": i, "turns": [f"{name} {i}?"]}) + "\n" for i in range(count)))
    return path


def words(text: str) -> int:
    return len(text.split())


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40), st.integers(0, 9), st.integers(0, 30))
def test_a_limit_is_the_beginning_of_a_larger_one(count: int, small: int, large: int, seed: int, longest: int) -> None:
    small, large = min(small, large), max(small, large)
    task = Task("mine", tuple(TaskPrompt(str(i), ("word " * i,)) for i in range(count)))
    few = chosen(task, small, seed, words, longest).prompts
    assert (
        few
        == chosen(task, large, seed, words, longest).prompts[:small]
        == chosen(task, None, seed, words, longest).prompts[:small]
    )
    assert len(few) == min(small, count, longest + 1) and all(int(p.id) <= longest for p in few)
    moved = Task("mine", task.prompts[::-1])
    assert chosen(moved, small, seed, words, longest).prompts == few, "the order in the file does not matter"


def test_the_seed_chooses() -> None:
    ids = [[p.id for p in t.prompts] for t in load_tasks(["math", "qa"], limit=3)]
    assert [[p.id for p in t.prompts] for t in load_tasks(["math"], limit=3)] == ids[:1], "company changes nothing"
    assert [[p.id for p in t.prompts] for t in load_tasks(["math"], limit=3, seed=1)] != ids[:1]


def test_groups_and_a_folder(tmp_path: Path) -> None:
    data = folder_of(tmp_path, **{"spec/math": 5, "deep/gsm8k": 3, "mine": 2})
    tasks = load_tasks(["families", "deepspec", "mine", "math"], data)
    assert [t.name for t in tasks] == [*FAMILIES, "gsm8k", "mine"], "each once, and of DeepSpec's those that are there"
    sizes = {t.name: len(t.prompts) for t in tasks}
    assert (sizes["math"], sizes["qa"]) == (5, len(built_in("qa").prompts)), "a folder's come before those that ship"
    assert load_tasks([str(data / "mine.jsonl")])[0].name == "mine"
    assert len(DEEPSPEC) == 9


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"no task 'maths': there are math, qa, .*long-qa.*humaneval.*groups families.*; in .*: mine"
    ):
        load_tasks(["maths"], folder_of(tmp_path / "data", mine=1))
    with pytest.raises(UsageError, match=r"do not ship: name the folder .*without one there are humaneval, mt-bench, alpaca"):
        load_tasks(["deepspec"])
    with pytest.raises(UsageError, match=r"'gsm8k' of DeepSpec comes in no package: name the folder that has gsm8k\.jsonl"):
        load_tasks(["gsm8k"])
    with pytest.raises(UsageError, match="no task is asked for"):
        load_tasks([])
    with pytest.raises(UsageError, match="0 prompts a task: give 1 at least"):
        load_tasks(["qa"], limit=0)
    with pytest.raises(UsageError, match="is a folder: give it with --data"):
        load_tasks([str(tmp_path)])
    with pytest.raises(UsageError, match="not a folder"):
        load_tasks(["math"], tmp_path / "gone")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no \.jsonl file in it"):
        load_tasks(["math"], tmp_path / "empty")


def test_names_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    data = folder_of(tmp_path / "data", mine=1)
    check_tasks(["families", "long", "mmath", "mine", "alpaca", "someone/some-set:test", "other.jsonl"], data)
    for names, said in [(["qa", "maths"], "no task 'maths'"), (["deepspec"], "do not ship"), ([], "no task is asked for")]:
        with pytest.raises(UsageError, match=said):
            check_tasks(names, data)


def test_one_name_for_two(tmp_path: Path) -> None:
    data = folder_of(tmp_path, **{"a/math": 1, "b/math": 1})
    with pytest.raises(UsageError, match="two tasks are called 'math'"):
        load_tasks(["math"], data)
    with pytest.raises(UsageError, match=r"two tasks are called 'math': built in and .*a/math\.jsonl; rename a file"):
        load_tasks(["math", str(data / "a" / "math.jsonl")])


def test_bad_lines_only_if_told(tmp_path: Path) -> None:
    (folder_of(tmp_path, mine=2) / "mine.jsonl").open("a").write("nonsense\n")
    with pytest.raises(UsageError, match=r"1 bad line \(line 3: not JSON"):
        load_tasks(["mine"], tmp_path)
    (task,) = load_tasks(["mine"], tmp_path, skip_bad=True)
    assert len(task.prompts) == 2 and task.bad_lines[0].startswith("line 3: not JSON")


def test_long_tasks_by_length() -> None:
    tasks = load_tasks(["long"], limit=2, count_tokens=words, lengths=(512, 700))
    assert [t.name for t in tasks] == ["long-cite-512", "long-cite-700", "long-qa-512", "long-qa-700"]
    assert all(len(t.prompts) == 2 for t in tasks)
    upwards = load_tasks(["long-qa"], limit=1, count_tokens=words, lengths=None, longest=2500)
    assert [t.name for t in upwards] == ["long-qa-1024", "long-qa-2048", "long-qa-2500"]
    with pytest.raises(UsageError, match="prompts of 4,096 tokens are asked for, but there is room for 2,500"):
        load_tasks(["long-qa"], count_tokens=words, lengths=[4096], longest=2500)
    with pytest.raises(UsageError, match="give its lengths, or the longest"):
        load_tasks(["long-qa"], count_tokens=words, lengths=None)
    with pytest.raises(UsageError, match="made to a length in tokens: give count_tokens"):
        load_tasks(["long-qa"])


def test_prompts_that_do_not_fit_are_told() -> None:
    task = Task("mine", tuple(TaskPrompt(str(i), ("word " * 10 * i,)) for i in range(1, 4)))
    cut = chosen(task, None, 0, words, 25)
    assert {p.id for p in cut.prompts} == {"1", "2"} and cut.bad_lines == ("prompts of more than 25 tokens: 3",)
    assert chosen(task, None, 0, words, 30).bad_lines == ()
    with pytest.raises(UsageError, match=r"mine: no prompt has room in the target's context \(prompts of more than 5 tokens"):
        chosen(task, None, 0, words, 5)
