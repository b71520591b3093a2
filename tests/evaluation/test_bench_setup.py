from __future__ import annotations

from pathlib import Path

import pytest

from hspec.errors import UsageError
from hspec.evaluation.bench_setup import Servers, entrants_of, prompts_of
from hspec.evaluation.tasks.catalogue import load_tasks
from hspec.evaluation.throughput import Entrant
from hspec.serving import command, versions
from tests.evaluation.test_throughput import PLAN
from tests.saved import loaded, save_drafter_for, save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_target(tmp_path_factory.mktemp("bench") / "target"))


def test_what_each_server_is_told() -> None:
    assert entrants_of(["none", "ngram", "hspec", "mine"], ["mine=a/b=c"], 3) == [
        Entrant("none", ("--no-draft",)),
        Entrant("ngram", ("--drafter", "ngram", "-k", "3"), "prompt lookup"),
        Entrant("hspec", ("-k", "3"), "the one that ships"),
        Entrant("mine", ("--drafter", "a/b=c", "-k", "3"), "a/b=c"),
    ]
    none, fewer = entrants_of(["none", "hspec"], [], 3, "3:1")
    assert none.arguments == ("--no-draft",) and fewer.arguments == ("-k", "3", "--drafts-at", "3:1")
    (own,) = entrants_of(["hspec"], ["hspec=x"], 3)
    assert own.drafter == "x"
    (ours,) = entrants_of(["mine"], ["mine=plugin:a/b"], 3)
    assert ours.arguments == ("--drafter", "plugin:a/b", "-k", "3")


@pytest.mark.parametrize(
    "methods, drafters, why",
    [
        (["dflash"], [], "no drafter ships for 'dflash': train one .*--drafter dflash=FOLDER"),
        (["none"], ["dflash=x"], "no such method in --methods"),
        (["none", "none"], [], "twice"),
        (["a"], ["x"], "give a name and a folder"),
        (["a"], ["a="], "give a name and a folder"),
    ],
)
def test_methods_that_make_no_sense(methods: list[str], drafters: list[str], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        entrants_of(methods, drafters, 3)


def test_made_prompts_have_their_length_and_differ(target: str) -> None:
    found = prompts_of(target, None, 1500, 3, 5)
    assert len(set(found.texts)) == 3 and 1200 < found.mean <= 1500 and found.origin == "long-qa-1500, made from seed 5"
    fewer = prompts_of(target, None, 1500, 2, 5)
    assert fewer.texts == found.texts[:2] and fewer.hash != found.hash == prompts_of(target, None, 1500, 3, 5).hash


def test_built_in_prompts_come_in_turn(target: str) -> None:
    found = prompts_of(target, None, None, 17, 0)
    tasks = load_tasks(("families",))
    firsts = [task.prompts[n].turns[0] for n in (0, 1) for task in tasks]
    assert len(tasks) == 8 and found.texts == (*firsts, tasks[0].prompts[2].turns[0]) and "built-in" in found.origin
    with pytest.raises(UsageError, match="--requests 1000 needs as many"):
        prompts_of(target, None, None, 1000, 0)


@pytest.mark.parametrize("line", ['{{"prompt": "number {0}"}}', '{{"id": "{0}", "turns": ["number {0}", "later"]}}'])
def test_prompts_of_a_file(target: str, tmp_path: Path, line: str) -> None:
    file = tmp_path / "some.jsonl"
    file.write_text("".join(line.format(n) + "\n" for n in range(4)))
    found = prompts_of(target, file, None, 3, 0)
    assert found.texts == ("number 0", "number 1", "number 2") and found.origin == "some.jsonl"
    with pytest.raises(UsageError, match=r"some\.jsonl: 4 prompts, and --requests 5 needs as many"):
        prompts_of(target, file, None, 5, 0)


@pytest.mark.parametrize(
    "text, why", [("", "no prompt"), ('{"turns": 3}\n', "bad line"), ("{", "bad line"), (None, "no task file")]
)
def test_a_file_without_prompts(target: str, tmp_path: Path, text: str | None, why: str) -> None:
    file = tmp_path / "some.jsonl"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=why):
        prompts_of(target, file, None, 1, 0)


def test_all_servers_are_checked_before_the_first_is_started(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(versions, "installed", lambda: "0.32.0")
    monkeypatch.setattr(command.plugin, "has_native", lambda: False)
    monkeypatch.setattr(command, "on_gpu", lambda: False)
    monkeypatch.setattr(command, "available_memory", lambda: 64 * command.GIB)
    save_drafter_for(loaded(target), tmp_path / "mine")
    plan = PLAN.model_copy(update={"target": target, "server": ["--max-model-len", "64"]})
    servers = Servers(plan, tmp_path / "out")
    servers.check(entrants_of(["none", "ngram", "mine"], [f"mine={tmp_path / 'mine'}"], 2))
    with pytest.raises(UsageError, match=r"mine: .*(drafted|trained)"):
        servers.check(entrants_of(["none", "mine"], [f"mine={tmp_path / 'mine'}"], 99))
    with pytest.raises(UsageError, match="gone: "):
        servers.check(entrants_of(["none", "gone"], [f"gone={tmp_path / 'gone'}"], 2))
    cut = Servers(plan.model_copy(update={"server": ["--pipeline-parallel-size", "2"]}), tmp_path / "out")
    with pytest.raises(UsageError, match=r"mine: .*all layers and positions"):
        cut.check(entrants_of(["none", "mine"], [f"mine={tmp_path / 'mine'}"], 2))
    assert not (tmp_path / "out").exists()
