"""Reading conversations from whole, damaged and cut files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hspec.errors import HSpecError, UsageError
from hspec.training.conversations import read_conversations

USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def sharegpt(count: int) -> list[dict[str, object]]:
    return [
        {"id": f"c{i}", "conversations": [{"from": "human", "value": f"Q{i}"}, {"from": "gpt", "value": f'A{i} {{"id": 1}}'}]}
        for i in range(count)
    ]


def test_jsonl_messages(tmp_path: Path) -> None:
    lines = [{"messages": [USER, ANSWER]}, {"id": 7, "messages": [{"role": "system", "content": "S"}, USER]}]
    found, report = read_conversations(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)) + "\n\n"))
    assert [c.messages for c in found] == [(USER, ANSWER), ({"role": "system", "content": "S"}, USER)]
    assert found[1].id == "7" and found[1].first_user_turn == "Hi"
    assert [c.has_answer for c in found] == [True, False]
    assert report.conversations == 2 and not report.bad and report.cut_at is None


def test_ids_come_from_the_messages_when_none_is_given(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", json.dumps({"messages": [USER]}) + "\n" + json.dumps({"messages": [ANSWER, USER]}))
    first, second = (c.id for c in read_conversations(path)[0])
    assert first != second
    assert [c.id for c in read_conversations(path)[0]] == [first, second]


def test_sharegpt_whole(tmp_path: Path) -> None:
    found, report = read_conversations(write(tmp_path / "a.json", json.dumps(sharegpt(3), indent=1)))
    assert [c.id for c in found] == ["c0", "c1", "c2"]
    assert found[1].messages == ({"role": "user", "content": "Q1"}, {"role": "assistant", "content": 'A1 {"id": 1}'})
    assert report.cut_at is None


@pytest.mark.parametrize("layout", [None, 2])
def test_sharegpt_cut_off_anywhere_keeps_its_whole_records(tmp_path: Path, layout: int | None) -> None:
    text = json.dumps(sharegpt(4), indent=layout)
    third = text.index('"c2"')
    for end in range(third, text.index('"c3"'), 7):
        whole = 3 if text[:end].count('"c2"') and end > text.index("A2") + 20 else 2
        found, report = read_conversations(write(tmp_path / "a.json", text[:end]))
        assert [c.id for c in found][:2] == ["c0", "c1"] and len(found) in (whole, 2, 3)
        assert report.cut_at is not None and "ends in the middle of a record" in report.summary()
        assert not report.bad


@pytest.mark.parametrize("with_ids", [True, False])
def test_a_damaged_record_in_the_middle_costs_only_itself(tmp_path: Path, with_ids: bool) -> None:
    records = sharegpt(5)
    if not with_ids:
        records = [{"conversations": r["conversations"]} for r in records]
    parts = [json.dumps(r) for r in records]
    parts[2] = parts[2].replace('"from": "gpt"', '"from" "gpt"')
    text = "[" + ",\n".join(parts) + "]"
    found, report = read_conversations(write(tmp_path / "a.json", text))
    assert [c.first_user_turn for c in found] == ["Q0", "Q1", "Q3", "Q4"]
    assert len(report.bad) == 1 and report.bad[0].startswith(f"character {text.index(parts[2]):,}:")
    assert report.cut_at is None


def test_plain_prompts(tmp_path: Path) -> None:
    text, _ = read_conversations(write(tmp_path / "a.txt", "[INST] First\n\n  Second  \n"))
    assert [c.first_user_turn for c in text] == ["[INST] First", "Second"]
    lines = [{"prompt": "One"}, {"turns": ["Two", "Then"]}]
    records, _ = read_conversations(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines))))
    assert [len(c.messages) for c in records] == [1, 2] and not any(c.has_answer for c in records)


def test_unusual_line_separators_inside_strings_do_not_break_a_record(tmp_path: Path) -> None:
    content = "one\u2028two\x85three\x0bfour"
    line = json.dumps({"messages": [{"role": "user", "content": content}]}, ensure_ascii=False)
    found, report = read_conversations(write(tmp_path / "a.jsonl", "\ufeff" + line.replace("\x0b", "\\u000b") + "\r\n"))
    assert found[0].first_user_turn == content and not report.bad


BAD = {
    "not json": "{oops",
    "no known key": json.dumps({"text": "x"}),
    "a list": "[1]",
    "empty messages": json.dumps({"messages": []}),
    "unknown role": json.dumps({"messages": [{"role": "wizard", "content": "x"}]}),
    "content is no string": json.dumps({"messages": [{"role": "user", "content": None}]}),
    "half a surrogate pair": '{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    "half a surrogate pair in a prompt": '{"prompt": "\\ud83d"}',
    "turns that are no strings": '{"turns": [1]}',
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD.keys())
def test_bad_lines_are_left_out_and_reported(tmp_path: Path, bad: str) -> None:
    good = json.dumps({"messages": [USER]})
    found, report = read_conversations(write(tmp_path / "a.jsonl", f"{good}\n{bad}\n{good}\n"))
    assert len(found) == 2
    assert len(report.bad) == 1 and report.bad[0].startswith("line 2: ")
    assert "1 bad records left out (first: line 2: " in report.summary()


def test_mostly_bad_files_are_refused(tmp_path: Path) -> None:
    good = json.dumps({"messages": [USER]})
    path = write(tmp_path / "a.jsonl", "\n".join([good, "x", "y", "z"]))
    with pytest.raises(HSpecError, match=r"a\.jsonl has 1 usable conversations and 3 bad records; first: line 2: not JSON"):
        read_conversations(path)
    assert len(read_conversations(path, max_bad_fraction=0.9)[0]) == 1


@pytest.mark.parametrize("text", ["", "\n \n", "[]", "[", '{"text": 1}'])
def test_nothing_usable_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(HSpecError, match="has 0 usable conversations"):
        read_conversations(write(tmp_path / "a.json", text))


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"no data file at .*gone"):
        read_conversations(tmp_path / "gone.jsonl")
    with pytest.raises(HSpecError, match="not a UTF-8 text file"):
        read_conversations(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HSpecError, match="not a UTF-8 text file"):
        read_conversations(tmp_path / "b.jsonl")

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(HSpecError, match=r"cannot read the data file .*b\.jsonl: Permission denied"):
        read_conversations(tmp_path / "b.jsonl")
