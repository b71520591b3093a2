"""Every contender answers every prompt, in turn; runs go on from what is there; other things are refused."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.sequence import Request
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.harness import AR, Contender, Setting, evaluate, identity, pieces
from hspec.evaluation.origin import origins
from hspec.evaluation.records import Record, RecordFile, whole_groups
from hspec.evaluation.setup import write_summary
from hspec.evaluation.summary import summarise
from hspec.evaluation.tasks.task import Task, TaskPrompt
from hspec.locks import alone
from hspec.targets.target import Target
from tests.methods import drafting

TASKS = [
    Task("talk", (TaskPrompt("1", ("one two", "and more")), TaskPrompt("2", ("three",)))),
    Task("tools", (TaskPrompt("1", ("call it",), ({"name": "f"},)),)),
]
SETTINGS = [Setting("greedy", SamplingParams(max_tokens=9)), Setting("T=1", SamplingParams(max_tokens=9, temperature=1.0))]


@pytest.fixture
def contenders(target: Target, drafter: ParallelDrafter) -> list[Contender]:
    kept = drafting(target, "dflash")
    return [Contender(AR), Contender("mine", drafter, 3, "hspec"), Contender("other", kept, 2, "dflash")]


def test_all_answers(target: Target, contenders: list[Contender], tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    records = evaluate(target, contenders, TASKS, SETTINGS, tmp_path, lambda *a: seen.append((a[0], a[1], a[2].contender)))
    assert len(records) == 3 * 2 * 3 and [s[0] for s in seen] == list(range(1, 19)) and {s[1] for s in seen} == {18}
    assert [name for _, _, name in seen[:6]] == ["ar", "mine", "other", "mine", "other", "ar"], "who begins changes"
    by = {(r.task, r.id, r.setting, r.contender): r for r in records}
    for task, id in (("talk", "1"), ("talk", "2"), ("tools", "1")):
        own = [by[task, id, "greedy", c.name] for c in contenders]
        assert own[0].turns[0].tokens == own[1].turns[0].tokens == own[2].turns[0].tokens, "lossless"
        assert all(len(r.turns) == (2 if (task, id) == ("talk", "1") else 1) for r in own)
    for record in records:
        for turn in record.turns:
            assert sum(turn.runs) == len(turn.tokens) - 1 == len(turn.drafted) - 1
            assert len(turn.refused) == len(turn.refused_text) == len(turn.runs)
            assert "".join(turn.pieces) == target.tokenizer.decode(turn.tokens)
            assert sum(turn.accepted) == turn.drafted.count("1")
            assert turn.verify_seconds > 0 and turn.prefill_seconds > 0
        if record.task == "talk":
            asked = [{"role": "user", "content": record.turns[0].question}]
            assert record.turns[0].origins == origins(target.template.encode(asked), record.turns[0].tokens)
        assert record.seconds > 0
        assert record.counters.emitted == sum(sum(t.runs) for t in record.turns)
        assert (record.drafter_kv_bytes > 0) == (record.contender == "other")
        assert record.k == {"ar": 0, "mine": 3, "other": 2}[record.contender]
    assert RecordFile(tmp_path / "records.jsonl").read() != [] and json.loads((tmp_path / "evaluation.json").read_text())


def test_the_second_turn_sees_the_first_answer(target: Target, tmp_path: Path) -> None:
    record = evaluate(target, [Contender(AR)], TASKS[:1], SETTINGS[:1], tmp_path)[0]
    first, second = record.turns
    messages = [
        {"role": "user", "content": "one two"},
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "and more"},
    ]
    prompt = tuple(target.template.encode(messages))
    assert second.prompt_tokens == len(prompt)
    assert second.tokens == Engine(target).generate([Request(prompt, SamplingParams(max_tokens=9))])[0].tokens


def test_tools_are_told_in_words(target: Target, tmp_path: Path) -> None:
    record = evaluate(target, [Contender(AR)], TASKS[1:], SETTINGS[:1], tmp_path)[0]
    bare = len(target.template.encode([{"role": "user", "content": "call it"}]))
    assert record.turns[0].prompt_tokens > bare + 50


def test_an_interrupted_run_goes_on(target: Target, contenders: list[Contender], tmp_path: Path) -> None:
    """Stopped in the middle of a group, or killed while writing it: the group is measured again as a whole."""

    def stop(done: int, total: int, record: Record) -> None:
        if done == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        evaluate(target, contenders, TASKS, SETTINGS, tmp_path / "a", stop)
    path = tmp_path / "a" / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    path.write_text("".join(lines[:5]) + lines[5][:40])  # a kill: one line is cut, its group has two of three
    again: list[int] = []
    resumed = evaluate(target, contenders, TASKS, SETTINGS, tmp_path / "a", lambda done, *_: again.append(done))
    assert again[0] == 4 and len(again) == 15
    whole = evaluate(target, contenders, TASKS, SETTINGS, tmp_path / "b")

    def answers(records: list[Record]) -> dict[tuple[str, ...], list[list[int]]]:
        return {(r.task, r.id, r.setting, r.contender): [t.tokens for t in r.turns] for r in records}

    assert answers(resumed) == answers(whole) == answers(RecordFile(path).read())
    assert evaluate(target, contenders, TASKS, SETTINGS, tmp_path / "a", lambda *_: pytest.fail("all is there"))


@pytest.mark.parametrize("batch", [2, 64])
def test_answers_in_batches_are_those_one_at_a_time(
    target: Target, contenders: list[Contender], tmp_path: Path, batch: int
) -> None:
    alone = evaluate(target, contenders[1:], TASKS, SETTINGS, tmp_path / "alone")
    seen: list[int] = []
    together = evaluate(target, contenders[1:], TASKS, SETTINGS, tmp_path / "many", lambda n, *_: seen.append(n), batch)
    assert seen == list(range(1, 13)) and len(together) == len(alone)
    by = {(r.task, r.id, r.setting, r.contender): r for r in alone}
    for record in together:
        one = by[record.task, record.id, record.setting, record.contender]
        assert [t.tokens for t in record.turns] == [t.tokens for t in one.turns]
        assert [t.runs for t in record.turns] == [t.runs for t in one.turns]
        assert record.drafter_kv_bytes == one.drafter_kv_bytes and record.peak_bytes is None
        assert math.isnan(record.seconds) and record.turns[0].prefill_seconds is None, "nobody's time alone"
    assert [r.contender for r in RecordFile(tmp_path / "many" / "records.jsonl").read()] == ["mine", "other"] * 6
    with pytest.raises(UsageError, match=r"something else \(batch: "):
        evaluate(target, contenders[1:], TASKS, SETTINGS, tmp_path / "many")
    found = summarise(together, identity(target, contenders[1:], SETTINGS)["contenders"])["greedy"]
    assert found["entrants"]["mine"]["speedup"] is None and found["entrants"]["mine"]["tau"]["value"] >= 1
    assert found["pairs"][0]["speed_ratio"] is None and found["pairs"][0]["tau_ratio"]["value"] > 0


def test_more_prompts_and_settings_may_come(target: Target, contenders: list[Contender], tmp_path: Path) -> None:
    evaluate(target, contenders[:2], TASKS[:1], SETTINGS[:1], tmp_path)
    records = evaluate(target, contenders[:2], TASKS, SETTINGS[1:], tmp_path)
    assert {r.setting for r in records} == {"greedy", "T=1"} and len(records) == 4 + 6


def test_something_else_is_refused(target: Target, contenders: list[Contender], tmp_path: Path) -> None:
    evaluate(target, contenders[:2], TASKS[1:], SETTINGS[:1], tmp_path)
    with pytest.raises(UsageError, match=r"holds an evaluation of something else \(contenders.mine.k: 3, now 2\)"):
        evaluate(target, [contenders[0], replace(contenders[1], k=2)], TASKS, SETTINGS, tmp_path)
    with pytest.raises(UsageError, match=r"contenders.other: None, now"):
        evaluate(target, contenders, TASKS, SETTINGS, tmp_path)
    with pytest.raises(UsageError, match="setting 'greedy' with other values"):
        evaluate(target, contenders[:2], TASKS, [Setting("greedy", SamplingParams(max_tokens=5))], tmp_path)
    with pytest.raises(UsageError, match="two contenders have one name"):
        evaluate(target, [contenders[1], contenders[1]], TASKS, SETTINGS, tmp_path)
    (tmp_path / "records.jsonl").write_text('{"id": 1}\n')
    with pytest.raises(UsageError, match="line 1: not an answer of an evaluation"):
        evaluate(target, contenders[:2], TASKS, SETTINGS[:1], tmp_path)


def test_one_process_at_a_time_writes_answers(target: Target, contenders: list[Contender], tmp_path: Path) -> None:
    evaluate(target, contenders[:1], TASKS[1:], SETTINGS[:1], tmp_path)
    before = (tmp_path / "records.jsonl").read_bytes()
    with alone(tmp_path / "records.jsonl"), pytest.raises(UsageError, match="another process writes answers to"):
        evaluate(target, contenders[:1], TASKS, SETTINGS[:1], tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_answers_of_nobody_knows_what_are_not_taken_over(target: Target, contenders: list[Contender], tmp_path: Path) -> None:
    evaluate(target, contenders[:2], TASKS[1:], SETTINGS[:1], tmp_path)
    whole = json.loads((tmp_path / "evaluation.json").read_text())
    for left in (None, [], {}, {**whole, "contenders": None}, {**whole, "settings": []}, {**whole, "target": {}}):
        (tmp_path / "evaluation.json").write_text(json.dumps(left))
        for act in (
            lambda: evaluate(target, contenders[:2], TASKS[1:], SETTINGS[:1], tmp_path),
            lambda: write_summary(tmp_path),
        ):
            with pytest.raises(HSpecError, match=r"evaluation\.json is not what an evaluation notes there: .*choose another"):
                act()
    (tmp_path / "evaluation.json").unlink()
    with pytest.raises(UsageError, match=r"holds answers, and no evaluation\.json says of what: choose another --out"):
        evaluate(target, contenders[:2], TASKS[1:], SETTINGS[:1], tmp_path)


def test_answers_to_a_text_that_was_changed_are_not_taken_over(
    target: Target, contenders: list[Contender], tmp_path: Path
) -> None:
    evaluate(target, contenders[:1], TASKS, SETTINGS[:1], tmp_path)
    before = (tmp_path / "records.jsonl").read_bytes()
    task = TASKS[0]
    changed = replace(task, prompts=(replace(task.prompts[0], turns=("something else",)), *task.prompts[1:]))
    with pytest.raises(UsageError, match=r"another text than prompt '1' of talk has now: choose another --out"):
        evaluate(target, contenders[:1], [changed, *TASKS[1:]], SETTINGS[:1], tmp_path)
    assert (tmp_path / "records.jsonl").read_bytes() == before


def test_a_damaged_line_says_what_to_do(target: Target, contenders: list[Contender], tmp_path: Path) -> None:
    evaluate(target, contenders[:1], TASKS, SETTINGS[:1], tmp_path)
    path = tmp_path / "records.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1][:50] + "\n", *lines[2:]]))
    with pytest.raises(UsageError, match=r"line 2: .*damaged: remove that line, and its prompt is answered again"):
        evaluate(target, contenders[:1], TASKS, SETTINGS[:1], tmp_path)
    path.write_text("".join([lines[0], *lines[2:]]))
    assert len(evaluate(target, contenders[:1], TASKS, SETTINGS[:1], tmp_path)) == len(lines)


def test_a_full_disk(target: Target, contenders: list[Contender], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object, **__: object) -> object:
        raise OSError(28, "No space left on device")

    evaluate(target, contenders[:1], TASKS[1:], SETTINGS[:1], tmp_path)
    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(HSpecError, match="No space left on device; what was measured is kept"):
        RecordFile(tmp_path / "records.jsonl").append(_record("x", "1", "a"))


def _record(task: str, id: str, contender: str) -> Record:
    return Record(task=task, id=id, contender=contender, setting="greedy", k=1, turns=[], peak_bytes=None, drafter_kv_bytes=0)


def test_whole_groups() -> None:
    records = [
        _record("t", "1", "a"),
        _record("t", "1", "b"),
        _record("t", "2", "a"),
        _record("t", "3", "b"),
        _record("t", "3", "a"),
    ]
    assert whole_groups(records, ["a", "b"]) == [records[i] for i in (0, 1, 3, 4)]
    assert whole_groups(records, ["a"]) == [records[i] for i in (0, 2, 4)]


def test_pieces_of_characters_that_take_several_tokens(target: Target) -> None:
    tokens = target.tokenizer("a\N{LATIN SMALL LETTER E WITH ACUTE}b \N{SLIGHTLY SMILING FACE}!").input_ids
    found = pieces(tokens, target.tokenizer.decode)
    assert len(found) == len(tokens) and "" in found
    assert "".join(found) == target.tokenizer.decode(tokens)
    cut = pieces(tokens[:2], target.tokenizer.decode)  # an answer that ends inside a character
    assert "".join(cut) == target.tokenizer.decode(tokens[:2])
