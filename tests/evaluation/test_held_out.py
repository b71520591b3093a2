"""Measuring on held-out prompts: counts, pools, intervals, and a file that never mixes two measurements."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from hspec.decoding.params import SamplingParams
from hspec.drafters.lookup_first import LookupFirst
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.held_out import Record, drafter_hash, is_looping, kind_of, label, measure, read_records, summarise
from hspec.targets.target import Target
from hspec.training.conversations import Conversation
from hspec.training.prompts import Prompt, clean_prompts
from tests.saved import question
from tests.tiny import tiny_drafter, tiny_target

OF = "this"
SETTINGS = {"greedy": SamplingParams(max_tokens=10), "T=1": SamplingParams(max_tokens=10, temperature=1.0)}


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=3, hidden=48)


def prompts(count: int) -> list[Prompt]:
    return clean_prompts([Conversation.of([{"role": "user", "content": question(n)}]) for n in range(count)], len)[0]


def record(**changes: Any) -> Record:
    base = Record("a", "code", "greedy", 10, 20, [10, 6], [6, 4], "stop", False, OF)
    return replace(base, **changes)


# -- looping -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "looping"),
    [
        ([1, 2, 3, 4] * 3, True),
        ([9, 9, 8, *[1, 2, 3, 4] * 3], True),
        ([7] * 12, True),
        ([7] * 11, False),  # too short to tell
        ([*[1, 2, 3, 4] * 3, 5], False),  # it got out of it
        ([1, 2, 3, 4] * 2, False),
        (list(range(48)) * 3, True),
        (list(range(49)) * 3, False),
        (list(range(200)), False),
        ([], False),
    ],
)
def test_looping(tokens: list[int], looping: bool) -> None:
    assert is_looping(tokens) == looping


@pytest.mark.parametrize(
    ("prompt", "kind"),
    [
        ("Write a Python function that adds", "code"),
        ("Write a poem about the sea", "writing"),
        ("Give me ideas for dinner", "list"),
        ("Why is the sky blue", "question"),
        ("The sea, then?", "question"),
        ("Hello there", "other"),
    ],
)
def test_kinds(prompt: str, kind: str) -> None:
    assert kind_of(prompt) == kind


# -- the summary -------------------------------------------------------------------------------------------------


def test_tau_is_pooled_over_tokens_and_not_averaged_over_prompts() -> None:
    records = [record(steps=10, emitted=30), record(id="b", steps=90, emitted=90, reached=[90, 10], accepted=[9, 5])]
    summary = summarise(records)["greedy"]
    assert summary["tau"] == pytest.approx(120 / 100)
    assert summary["acceptance"] == pytest.approx([15 / 100, 9 / 16])
    assert summary["prompts"] == 2
    low, high = summary["interval"]
    assert 1.0 <= low <= 1.2 <= high <= 3.0


def test_the_summary_separates_settings_kinds_and_looping_answers() -> None:
    records = [
        record(),
        record(id="b", kind="list", steps=10, emitted=40, looping=True),
        record(setting="T=1", steps=5, emitted=5),
    ]
    summary = summarise(records)
    assert list(summary) == ["greedy", "T=1"]
    assert summary["greedy"]["tau"] == 3.0 and summary["T=1"]["tau"] == 1.0
    assert summary["greedy"]["looping"] == 1 and summary["greedy"]["without_looping"]["tau"] == 2.0
    assert {kind: part["tau"] for kind, part in summary["greedy"]["by_kind"].items()} == {"code": 2.0, "list": 4.0}
    assert summary["greedy"]["without_looping"]["prompts"] == 1


def test_the_bootstrap_is_deterministic_and_over_prompts() -> None:
    same = [record(id=str(i)) for i in range(20)]
    assert summarise(same)["greedy"]["interval"] == [2.0, 2.0]  # prompts that are alike leave no doubt
    mixed = [record(id=str(i), emitted=10 + i) for i in range(20)]
    one, two = summarise(mixed), summarise(mixed)
    assert one == two
    low, high = one["greedy"]["interval"]
    assert low < one["greedy"]["tau"] < high
    wider = summarise(mixed[::5])["greedy"]["interval"]
    assert wider[1] - wider[0] > high - low


def test_nothing_to_divide_by() -> None:
    empty = summarise([record(steps=0, emitted=0, reached=[], accepted=[])])["greedy"]
    assert empty["tau"] == 0.0 and empty["acceptance"] == []
    assert summarise([record(looping=True)])["greedy"]["without_looping"] == {
        "prompts": 0,
        "tau": 0.0,
        "interval": [None, None],
    }


# -- measuring ---------------------------------------------------------------------------------------------------


def test_measuring_goes_on_where_it_stopped(target: Target, tmp_path: Path) -> None:
    drafter, some = tiny_drafter(target), prompts(4)
    path, again = tmp_path / "new" / "a.jsonl", tmp_path / "b.jsonl"
    seen: list[tuple[int, int]] = []
    records = measure(target, drafter, some, path, 3, SETTINGS, OF, batch=2, on_done=lambda n, m: seen.append((n, m)))
    assert seen == [(n, 8) for n in range(1, 9)]
    assert {(r.id, r.setting) for r in records} == {(p.id, s) for p in some for s in SETTINGS}
    assert read_records(path, OF) == records
    assert all(r.emitted == 9 or r.finish_reason == "stop" for r in records)
    lines = path.read_text().splitlines(keepends=True)
    for kept in ("".join(lines[:3]), "".join(lines[:3]) + lines[3][:25], "".join(lines)):
        again.write_text(kept)
        new: list[int] = []
        repeated = measure(target, drafter, some, again, 3, SETTINGS, OF, 2, lambda n, _, new=new: new.append(n))
        assert len(new) == 8 - kept.count("\n")
        assert sorted(map(str, repeated)) == sorted(map(str, records))
        assert sorted(again.read_text().splitlines()) == sorted(path.read_text().splitlines())


def test_only_the_prompts_that_were_asked_for_are_counted(target: Target, tmp_path: Path) -> None:
    drafter, some = tiny_drafter(target), prompts(4)
    measure(target, drafter, some, tmp_path / "a.jsonl", 3, SETTINGS, OF)
    part = measure(target, drafter, some[:1], tmp_path / "a.jsonl", 3, {"greedy": SETTINGS["greedy"]}, OF)
    assert [(r.id, r.setting) for r in part] == [(some[0].id, "greedy")]


def test_records_of_something_else_are_refused(target: Target, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(asdict(record())) + "\n")
    with pytest.raises(UsageError, match=r"holds measurements of something else \(this; now that\): choose another --out"):
        measure(target, tiny_drafter(target), prompts(1), path, 3, SETTINGS, "that")
    path.write_text("not a record\n")
    with pytest.raises(UsageError, match="line 1: not a measured answer"):
        read_records(path)
    with pytest.raises(UsageError, match="is no file"):
        read_records(tmp_path)
    assert read_records(tmp_path / "none.jsonl") == []


def test_a_label_tells_drafters_and_settings_apart(target: Target) -> None:
    one, two = tiny_drafter(target).prepare(), tiny_drafter(target, seed=1).prepare()
    assert drafter_hash(one) == drafter_hash(tiny_drafter(target).prepare()) != drafter_hash(two)
    assert len({label(target, one, 3, 10), label(target, two, 3, 10), label(target, one, 2, 10), label(target, one, 3, 9)}) == 4
    assert label(target, LookupFirst(one), 3, 10) != label(target, one, 3, 10) and drafter_hash(
        LookupFirst(one)
    ) == drafter_hash(one)


def test_a_full_disk(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(HSpecError, match=r"cannot write .*a\.jsonl: No space left on device; what was measured is kept"):
        measure(target, tiny_drafter(target), prompts(1), tmp_path / "a.jsonl", 3, SETTINGS, OF)
