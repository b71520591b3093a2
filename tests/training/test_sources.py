"""Files, tables and data sets give the same conversations, one by one."""

from __future__ import annotations

import itertools
import json
import sys
import tracemalloc
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from hspec.errors import HSpecError, UsageError
from hspec.training.conversations import Conversation, ReadReport, stream_conversations
from hspec.training.job import Job
from hspec.training.sources import SourceConfig, check_source, describe_sources, stream_sources

MAGPIE = {
    "uuid": "u1",
    "conversations": [{"from": "human", "value": "What is a tide?"}, {"from": "gpt", "value": "The sea that rises."}],
    "messages": None,
    "instruction": "What is a tide?",
}
ULTRACHAT = {
    "prompt": "What is a prime?",
    "prompt_id": "p1",
    "conversations": None,
    "messages": [{"role": "user", "content": "What is a prime?"}, {"role": "assistant", "content": "A number."}],
}


def read(*sources: str | dict[str, Any]) -> list[Conversation]:
    return list(stream_sources([SourceConfig.model_validate(source) for source in sources]))


# -- in the job --------------------------------------------------------------------------------------------------


def test_sources_are_named_or_described() -> None:
    described = {"source": "HuggingFaceH4/ultrachat_200k", "weight": 40, "split": "train_sft"}
    job = Job.model_validate({"data": [{"source": "magpie.jsonl", "weight": 60}, described]})
    assert job.weights == (60, 40) and job.data[1].split == "train_sft"
    saved = json.loads(job.model_dump_json())["data"]
    assert saved == [{"source": "magpie.jsonl", "weight": 60}, described]
    assert Job.model_validate({"data": saved}) == job
    plain = Job.model_validate({"data": ["sharegpt", "a.jsonl"]})
    assert plain.weights is None and json.loads(plain.model_dump_json())["data"] == ["sharegpt", "a.jsonl"]
    assert "magpie.jsonl (60 %), HuggingFaceH4/ultrachat_200k:train_sft (40 %)" in describe_sources(job.data)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([{"source": "a", "weight": 1}, "b"], "give a weight to every source, or to none"),
        ([{"source": "a", "weight": 0}], "greater than 0"),
        ([{"source": ""}], "at least 1 character"),
        ([{"weight": 1}], "Field required"),
        ([{"source": "a", "wait": 1}], "Extra inputs"),
        ([3], "valid dictionary"),
    ],
)
def test_sources_that_make_no_sense(data: list[Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Job.model_validate({"data": data})


def test_what_is_there_is_known_without_reading(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    for good in ("sharegpt", str(tmp_path / "a.jsonl"), "owner/name", str(tmp_path)):
        check_source(SourceConfig(source=good))
    for bad in ("gone.jsonl", "gone", "data/gone.jsonl", "data/gone.parquet", "../gone/there", "a/b/c"):
        with pytest.raises(UsageError, match=f"no data file at {bad}"):
            check_source(SourceConfig(source=bad))
    with pytest.raises(UsageError, match="has no split or subset"):
        check_source(SourceConfig(source=str(tmp_path / "a.jsonl"), split="train"))


# -- reading -----------------------------------------------------------------------------------------------------


def test_sources_follow_each_other_with_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\nTwo.\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(ULTRACHAT) + "\n" + json.dumps({"turns": ["Three."]}) + "\n")
    said: list[str] = []
    configs = [SourceConfig(source=str(tmp_path / name)) for name in ("a.txt", "b.jsonl")]
    found = list(stream_sources(configs, said.append))
    assert [(c.source, c.first_user_turn) for c in found] == [(0, "One."), (0, "Two."), (1, "What is a prime?"), (1, "Three.")]
    assert len(said) == 2 and "a.txt: 2 conversations" in said[0]


def test_a_missing_source_is_found_before_the_first_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("One.\n")
    with pytest.raises(UsageError, match="no data file at gone"):
        next(stream_sources([SourceConfig(source=str(tmp_path / "a.txt")), SourceConfig(source="gone.txt")]))


@pytest.mark.parametrize("layout", ["lines", "array"])
def test_a_large_file_is_not_held(layout: str, tmp_path: Path) -> None:
    path, count, size = tmp_path / "a.json", 300, 40_000
    records = (json.dumps({"id": n, "messages": [{"role": "user", "content": "x" * size}]}) for n in range(count))
    with path.open("w") as file:
        file.write("[" * (layout == "array"))
        for n, record in enumerate(records):
            file.write(("," if layout == "array" and n else "") + record + "\n")
        file.write("]" * (layout == "array"))
    tracemalloc.start()
    found = sum(1 for _ in stream_conversations(path, ReadReport("")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == count and peak < path.stat().st_size / 2


def test_an_array_is_read_alike_whatever_is_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records, damage and the file's end may lie anywhere in what is read at once."""
    records = [{"id": str(n), "messages": [{"role": "user", "content": f'{n}: \\ " \U0001f642 [{{'}]} for n in range(6)]
    texts = [json.dumps(records), json.dumps(records)[:-30], json.dumps(records).replace('"3", "messages"', '"3", messages')]
    for text in texts:
        path = tmp_path / "a.json"
        path.write_text(text)
        results = []
        for chunk in (1 << 20, 1, 2, 3, 7, 40, 101):
            monkeypatch.setattr("hspec.training.conversations._CHUNK", chunk)
            report = ReadReport("")
            found = [c.id for c in stream_conversations(path, report)]
            results.append((found, report.bad, report.cut_at))
        assert all(result == results[0] for result in results)
        assert len(results[0][0]) >= 5


def test_a_hopeless_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("x\n" * 100 + '{"text": 1}\n' * 5000)
    report = ReadReport("a")
    with pytest.raises(HSpecError, match="0 usable conversations and 1000 bad records; first: line 1: not JSON"):
        list(stream_conversations(path, report))


# -- data sets ---------------------------------------------------------------------------------------------------


class Rows:
    """As much of a data set as is used."""

    def __init__(self, rows: list[dict[str, Any]]):
        self.rows = rows
        self.column_names = list(rows[0])

    def select_columns(self, names: list[str]) -> Rows:
        rows = Rows([{name: row[name] for name in names} for row in self.rows]) if names else Rows([{}])
        return rows

    def __iter__(self) -> Any:
        return iter(self.rows)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """A package ``datasets`` with some data sets; what was asked for."""
    asked: list[tuple[Any, ...]] = []
    known = {"org/magpie": [MAGPIE] * 3, "org/chat": [ULTRACHAT], "org/other": [{"text": "x"}]}

    def load_dataset(path: str, name: str | None = None, *, split: str) -> Rows:
        asked.append((path, name, split))
        if split == "gone":
            raise ValueError('Unknown split "gone". Should be one of ["train"].\nAnd more.')
        return Rows(known[path])

    module = ModuleType("datasets")
    module.__spec__ = ModuleSpec("datasets", None)
    module.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)
    return asked


def test_data_sets_of_the_hub(hub: list[tuple[Any, ...]]) -> None:
    found = read({"source": "org/magpie"}, {"source": "org/chat", "split": "train_sft", "subset": "en"})
    assert hub == [("org/magpie", None, "train"), ("org/chat", "en", "train_sft")]
    assert [(c.source, c.first_user_turn) for c in found] == [(0, "What is a tide?")] * 3 + [(1, "What is a prime?")]
    assert found[0].messages[1] == {"role": "assistant", "content": "The sea that rises."}


def test_data_sets_that_cannot_be_used(hub: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'cannot load the data set org/magpie:gone: Unknown split "gone"\. .*\]\.$'):
        read({"source": "org/magpie", "split": "gone"})
    with pytest.raises(UsageError, match="cannot load the data set org/none"):
        read("org/none")
    with pytest.raises(HSpecError, match="org/other has none of the columns"):
        read("org/other")
    monkeypatch.setitem(sys.modules, "datasets", None)
    for source in ("org/magpie", str(tmp_path)):
        with pytest.raises(UsageError, match=r"datasets is needed .*pip install 'hspec\[data\]'"):
            read(source)


# -- Parquet -----------------------------------------------------------------------------------------------------


def test_parquet_without_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(UsageError, match=r"needs the package pyarrow .*pip install 'hspec\[data\]'"):
        read(str(tmp_path / "a.parquet"))


def test_parquet(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet as parquet

    path = tmp_path / "a.parquet"
    rows = [{**MAGPIE, "id": str(n)} for n in range(300)] + [{**ULTRACHAT, "id": None, "uuid": None, "instruction": None}]
    names = sorted(set(itertools.chain(*rows)))
    parquet.write_table(pyarrow.Table.from_pylist([{name: row.get(name) for name in names} for row in rows]), path)
    found = read(str(path))
    assert [c.id for c in found[:300]] == [str(n) for n in range(300)]
    assert found[-1].first_user_turn == "What is a prime?" and len(found) == 301
    # The same rows as JSON lines are the same conversations.
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({k: v for k, v in r.items() if v}) + "\n" for r in rows))
    assert read(str(tmp_path / "a.jsonl")) == found
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(HSpecError, match=r"cannot read .*a\.parquet as Parquet, after 0 rows"):
        read(str(path))
    parquet.write_table(pyarrow.table({"text": ["x"]}), path)
    with pytest.raises(HSpecError, match=r"has the columns text\. Expected a table"):
        read(str(path))


def test_a_folder_is_read_by_datasets(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text(json.dumps({"id": "1", "messages": ULTRACHAT["messages"], "n": 1}) + "\n")
    (found,) = read(str(tmp_path / "set"))
    assert found.id == "1" and found.has_answer
