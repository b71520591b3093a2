"""Rows become prompts, and every bad one is named, however many there are."""

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hspec.errors import UsageError
from hspec.evaluation.tasks.rows import gather, json_schema, parse_prompt


@given(st.sets(st.integers(1, 300), min_size=1, max_size=80), st.sampled_from(["{", '"text"']))
def test_every_bad_row_is_named(bad: set[int], text: str) -> None:
    rows = [(n, text if n in bad else json.dumps({"id": n, "turns": ["x"]})) for n in range(1, 302)]
    with pytest.raises(UsageError) as refused:
        gather("mine", "line", rows, lambda _, line: parse_prompt(json.loads(line)), False)
    places = re.search(r"lines? ([\d, -]+):", str(refused.value))
    assert places is not None
    named: list[int] = []
    for run in places[1].split(", "):
        first, _, last = run.partition("-")
        named += range(int(first), int(last or first) + 1)
    assert named == sorted(bad)
    prompts, said = gather("mine", "line", rows, lambda _, line: parse_prompt(json.loads(line)), True)
    assert {int(p.id) for p in prompts} == set(range(1, 302)) - bad
    assert said == (said[0],) and said[0] in str(refused.value)


def test_nothing_left() -> None:
    with pytest.raises(UsageError, match="mine has no prompt; left out: row 0: a JSON object is expected"):
        gather("mine", "row", [(0, 5)], lambda _, row: parse_prompt(row), True)


def test_too_deep() -> None:
    with pytest.raises(UsageError, match="line 1: nested too deeply"):
        gather("mine", "line", [(1, "[" * 200_000)], lambda _, line: parse_prompt(json.loads(line)), False)


def test_half_a_character_is_refused() -> None:
    for record in (
        {"id": 1, "turns": ["\ud83d"]},
        {"id": "\ud83d", "turns": ["x"]},
        {"id": 1, "turns": ["x"], "tools": [{"name": "\ud83d"}]},
        {"id": 1, "turns": ["x"], "system": "\ud83d"},
    ):
        with pytest.raises(ValueError, match="half of a surrogate pair"):
            parse_prompt(record)


def test_a_system_prompt() -> None:
    assert parse_prompt({"id": 1, "turns": ["x"], "system": "Be brief."}).system == "Be brief."
    with pytest.raises(ValueError, match='"system" must be a text'):
        parse_prompt({"id": 1, "turns": ["x"], "system": ["Be brief."]})


def test_types_are_named_as_json_schema_names_them() -> None:
    given_ = {"type": "dict", "properties": {"type": {"type": "float"}, "b": {"type": "array", "items": {"type": "tuple"}}}}
    assert json_schema(given_) == {
        "type": "object",
        "properties": {"type": {"type": "number"}, "b": {"type": "array", "items": {"type": "array"}}},
    }
    assert parse_prompt({"id": 1, "turns": ["x"], "tools": [{"parameters": given_}]}).tools[0]["parameters"]["type"] == "object"
