"""The target answers prompts in one refilled batch: the same answers as one by one, and none lost to an interruption."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hspec.api import make_request
from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.errors import HSpecError
from hspec.targets.target import Target
from hspec.training.answers import AnswerSettings, answered_ids, write_answers
from hspec.training.conversations import Conversation
from hspec.training.engine_answers import EngineAnswers
from hspec.training.prompts import Prompt, clean_prompts
from tests.saved import question
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def target() -> Target:
    """One that ends its turns with any of 20 tokens, so that some answers are short."""
    target = tiny_target(layers=3, hidden=48)
    target.template.extra_eos = frozenset(range(40, 60))
    return target


def prompts(count: int) -> list[Prompt]:
    talks = [Conversation.of([{"role": "user", "content": question(n) + " please" * (n % 3)}]) for n in range(count)]
    return clean_prompts(talks, len)[0]


PROMPTS = prompts(9)
SETTINGS = AnswerSettings(temperatures=(1.0, 0.0, 0.7), max_tokens=14, max_prompt_tokens=90, batch=3, seed=4)


def answer(target: Target, some: list[Prompt], path: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    settings = AnswerSettings(**{**SETTINGS.__dict__, **changes})
    write_answers(EngineAnswers(target), some, path, settings)
    return records(path)


def records(path: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({r["id"] for r in found}) == len(found)
    return {r["id"]: r for r in found}


def test_a_refilled_batch_answers_as_one_by_one(target: Target, tmp_path: Path) -> None:
    together = answer(target, PROMPTS, tmp_path / "a.jsonl")
    assert together.keys() == {p.id for p in PROMPTS}
    lengths = {len(r["tokens"]) for r in together.values()}
    assert len(lengths) > 1  # rows ended at different times, so rows were moved and refilled
    for batch in (1, 9):
        assert answer(target, PROMPTS, tmp_path / f"{batch}.jsonl", batch=batch) == together
    alone = answer(target, PROMPTS[4:5], tmp_path / "alone.jsonl")
    assert alone[PROMPTS[4].id] == together[PROMPTS[4].id]
    other = answer(target, PROMPTS, tmp_path / "seed.jsonl", seed=5)
    assert {i for i in other if other[i]["tokens"] != together[i]["tokens"]}
    assert all(other[i]["tokens"] == together[i]["tokens"] for i in other if other[i]["temperature"] == 0)


def test_greedy_answers_are_the_engines(target: Target, tmp_path: Path) -> None:
    found = answer(target, PROMPTS, tmp_path / "a.jsonl", temperatures=(0.0,))
    requests = [make_request(target, p.text, SamplingParams(max_tokens=14)) for p in PROMPTS]
    for prompt, request, result in zip(PROMPTS, requests, Engine(target).generate(requests), strict=True):
        record = found[prompt.id]
        assert record["prompt_tokens"] == list(request.prompt)
        assert record["tokens"] == result.tokens and record["finish"] == result.finish_reason


def test_an_answer_ends_with_its_end_of_turn(target: Target, tmp_path: Path) -> None:
    found = answer(target, prompts(40), tmp_path / "a.jsonl", temperatures=(1.0,), max_tokens=9, batch=16)
    ended = [r for r in found.values() if r["finish"] == "stop"]
    cut = [r for r in found.values() if r["finish"] == "length"]
    assert ended and cut
    for r in ended:
        assert r["tokens"][-1] in target.eos_ids and not target.eos_ids & set(r["tokens"][:-1])
        assert r["messages"][1]["content"] == target.tokenizer.decode(r["tokens"][:-1])
    assert all(len(r["tokens"]) == 9 for r in cut)


def test_an_interrupted_run_goes_on(target: Target, tmp_path: Path) -> None:
    whole = answer(target, PROMPTS, tmp_path / "whole.jsonl")
    path = tmp_path / "cut.jsonl"
    text = (tmp_path / "whole.jsonl").read_text()
    lines = text.splitlines(keepends=True)
    for kept in ("", "".join(lines[:4]), "".join(lines[:4]) + lines[4][:30], lines[0][:-1], text):
        path.write_text(kept)
        missing = len(PROMPTS) - kept.count("\n")
        assert write_answers(EngineAnswers(target), PROMPTS, path, SETTINGS) == missing
        assert records(path) == whole


def test_progress(target: Target, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_answers(EngineAnswers(target), PROMPTS, tmp_path / "a.jsonl", SETTINGS, lambda n, tokens: seen.append((n, tokens)))
    assert [n for n, _ in seen] == list(range(1, 10))
    assert seen[-1][1] == sum(len(r["tokens"]) for r in records(tmp_path / "a.jsonl").values())


def test_prompts_that_are_too_long_are_left_out(target: Target, tmp_path: Path) -> None:
    lengths = {p.id: len(target.template.encode([{"role": "user", "content": p.text}])) for p in PROMPTS}
    limit = sorted(lengths.values())[4]
    found = answer(target, PROMPTS, tmp_path / "a.jsonl", max_prompt_tokens=limit)
    assert found.keys() == {i for i, length in lengths.items() if length <= limit}


def test_answers_end_with_the_targets_context(target: Target, tmp_path: Path) -> None:
    lengths = sorted(len(target.template.encode([{"role": "user", "content": p.text}])) for p in PROMPTS)
    context = lengths[4] + 2
    small = tiny_target(layers=2, hidden=32, max_positions=context)
    found = answer(small, PROMPTS, tmp_path / "a.jsonl", max_tokens=200, max_prompt_tokens=500, temperatures=(0.0,))
    assert len(found) == sum(n + 2 <= context for n in lengths) < len(PROMPTS)  # the longest prompts leave no room
    for prompt in PROMPTS:
        if prompt.id in found:
            result = Engine(small).generate([make_request(small, prompt.text, SamplingParams(max_tokens=200))])[0]
            assert found[prompt.id]["tokens"] == result.tokens
            assert len(found[prompt.id]["prompt_tokens"]) + len(result.tokens) <= context


def test_settings_that_change_answers_change_the_key() -> None:
    assert AnswerSettings(batch=3).key == AnswerSettings(batch=64, max_prompt_tokens=10).key
    keys = {AnswerSettings(**change).key for change in ({}, {"seed": 1}, {"max_tokens": 9}, {"temperatures": (1.0,)})}
    assert len(keys) == 4


def test_damaged_and_unwritable_files(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": "x"}\nnot json\n')
    with pytest.raises(HSpecError, match=r"a\.jsonl, line 2: not an answer record"):
        answered_ids(path)
    with pytest.raises(HSpecError, match="cannot write answers to"):
        write_answers(EngineAnswers(target), PROMPTS, tmp_path / "a.jsonl" / "b.jsonl", SETTINGS)

    written: list[int] = []

    def full(answers: int, _: int) -> None:
        written.append(answers)
        if answers == 3:
            raise OSError(28, "No space left on device")

    with pytest.raises(HSpecError, match=r"No space left on device\. What was written is kept"):
        write_answers(EngineAnswers(target), PROMPTS, tmp_path / "b.jsonl", SETTINGS, full)
    assert len(records(tmp_path / "b.jsonl")) == 3
    assert write_answers(EngineAnswers(target), PROMPTS, tmp_path / "b.jsonl", SETTINGS) == len(PROMPTS) - 3
