"""Methods side by side, from configurations alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hspec.decoding.engine import Engine
from hspec.drafters.methods import METHODS
from hspec.drafters.presets import PRESETS, attention_layers
from hspec.errors import UsageError
from hspec.evaluation import compare as module
from hspec.evaluation.compare import PAPER_TARGETS, base_of, compare, methods_table
from hspec.evaluation.describe import describe, memory_bytes
from hspec.targets.target import Target
from tests.methods import TRAINED, trained
from tests.saved import save_target

KEYS = ["name", "context", "backbone", "head", "passes", "kv_bytes_per_token"]


@pytest.fixture(autouse=True)
def _nothing_is_fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path / "cache"))

    def fetched(source: str) -> None:
        raise AssertionError(f"{source} was looked up")

    monkeypatch.setattr(module, "target_config", fetched)


@pytest.mark.parametrize("target", ["smollm2", "qwen3-8b", "Qwen/Qwen3-8B", "qwen3.5-27b"])
def test_every_method_has_a_row(target: str) -> None:
    rows = methods_table(target)
    assert [row["name"] for row in rows] == list(METHODS)
    assert all(list(row) == KEYS for row in rows)
    json.dumps(rows)


def test_passes() -> None:
    passes = {row["name"]: row["passes"] for row in methods_table("qwen3-8b")}
    assert {name for name, count in passes.items() if count == 0} == {"ar", "ngram"}
    assert {name for name, count in passes.items() if count == 7} == {"eagle3", "redrafter"}, "k of them, k = 7"
    assert all(count == 1 for name, count in passes.items() if name not in ("ar", "ngram", "eagle3", "redrafter"))
    assert {row["passes"] for row in methods_table("smollm2") if row["name"] == "eagle3"} == {4}


def test_bytes_of_a_token() -> None:
    """Five layers of 8 heads x 128, K and V, two bytes each: the 20 KiB of the paper."""
    kept = {row["name"]: row["kv_bytes_per_token"] for row in methods_table("qwen3-8b")}
    five = 5 * 8 * 128 * 2 * 2
    assert five == 20 * 1024
    assert {name for name, size in kept.items() if size == five} == {"dspark", "dflash", "dflash2", "domino", "dblast"}
    assert (kept["eagle3"], kept["peagle"]) == (five // 5, five * 4 // 5)
    assert all(size == 0 for name, size in kept.items() if METHODS[name].context != "own KV")


@pytest.mark.parametrize("name", TRAINED)
def test_bytes_are_what_decoding_allocates(target: Target, name: str) -> None:
    """Of fp32, twice as many."""
    drafter = trained(target, name)
    memory = Engine(target, drafter).new_state(1, 100).memory
    assert memory is None or memory.nbytes == memory.capacity * 2 * memory_bytes(drafter.config)
    assert (memory is not None) == (METHODS[name].context == "own KV")


@pytest.mark.parametrize(
    ("preset", "kib", "share"),
    [("llama-3.1-8b", 128, 1.156), ("qwen3-4b", 144, 1.139), ("qwen3-8b", 144, 1.139), ("qwen3.5-27b", 64, None),
     ("qwen3.5-397b-a17b", 30, None)],
)  # fmt: skip
def test_what_the_target_keeps(preset: str, kib: int, share: float | None) -> None:
    """The paper's Tab. 1."""
    facts = describe(preset)
    assert facts["target_kv_bytes_per_token"] == kib * 1024
    assert facts["kv_bytes_per_token"] == 0
    if share is not None:
        dspark = next(row for row in methods_table(preset) if row["name"] == "dspark")
        assert round(1 + dspark["kv_bytes_per_token"] / (kib * 1024), 3) == share


def test_layers_that_keep_nothing() -> None:
    assert len(attention_layers(PRESETS["qwen3.5-27b"].target)) == 16
    assert len(attention_layers(PRESETS["qwen3.5-397b-a17b"].target)) == 15
    assert attention_layers(PRESETS["qwen3-8b"].target) == list(range(36))


def test_parameters_beside_hspec() -> None:
    rows = {row["method"]: row for row in compare("qwen3-8b")}
    assert list(rows) == TRAINED
    own = rows["hspec"]
    assert own["difference_percent"] == 0.0 and own["target"] == "Qwen/Qwen3-8B"
    for row in rows.values():
        assert row["parameters"] == sum(row["parameters_by_part"].values()) > 0
        assert row["difference_percent"] == pytest.approx(100 * (row["parameters"] / own["parameters"] - 1), abs=0.006)
        assert row["parameters_by_part"].keys() == own["parameters_by_part"].keys()
    assert rows["dspark"]["difference_percent"] == 3.02  # H-Spec has 2.94 % fewer
    assert rows["redrafter"]["parameters_by_part"]["cell"] > 0 == own["parameters_by_part"]["cell"]
    assert rows["eagle3"]["parameters_by_part"]["fusion"] == 3 * 4096**2
    json.dumps(list(rows.values()))
    assert [base_of(t)[0].target.layers for t in PAPER_TARGETS] == [32, 36, 36]


def test_a_target_without_a_preset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    folder = save_target(tmp_path / "t", layers=6, hidden=64)
    rows = methods_table(str(folder))
    assert [row["name"] for row in rows] == list(METHODS)
    assert {row["kv_bytes_per_token"] for row in rows if row["name"] == "eagle3"} == {2 * 16 * 2 * 2}
    assert compare(str(folder))[0]["target"] == str(folder)


def test_what_is_no_target(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    with pytest.raises(UsageError, match="neither a config"):
        methods_table(str(tmp_path))
