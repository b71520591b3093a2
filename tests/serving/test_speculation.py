"""Which of vLLM's options a drafter becomes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hspec.drafters.checkpoint import load_drafter, save_drafter
from hspec.errors import UsageError
from hspec.serving.schedule import Schedule
from hspec.serving.speculation import Speculation, speculation, speculators_folder
from hspec.targets.sources import describe
from tests.methods import trained
from tests.saved import loaded, save_drafter_for, save_target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    target = loaded(save_target(folder / "target"))
    save_drafter_for(target, folder / "hspec")
    for method in ("dflash", "dspark", "dflash-kv", "redrafter"):
        # A mask token, as training names one: the layout that servers load has no mask vector of its own.
        save_drafter(trained(target, method, mask_token_id=2), folder / method)
    return folder


@pytest.fixture
def spoken(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Speculation of a drafter of ``place``."""
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path / "cache"))
    target = str(place / "target")

    def of(
        drafter: str,
        k: int | None = None,
        gpu: bool = False,
        source: str | None = None,
        ranks: int = 1,
        schedule: Schedule | None = None,
    ) -> Speculation:
        source = source or (drafter if drafter == "ngram" else str(place / drafter))
        return speculation(source, target, target, describe(target), k, gpu, ranks, schedule)

    return of


def option(made: Speculation, name: str) -> Any:
    return json.loads(made.arguments[made.arguments.index(name) + 1])


@pytest.mark.parametrize("method", ["hspec", "dflash-kv"])
def test_what_reads_the_pages_is_the_plugins(spoken, place: Path, method: str) -> None:
    made = spoken(method, 2)
    assert made.by_plugin
    assert option(made, "--speculative-config") == {
        "method": "custom_class", "model": "hspec.serving.proposer.HSpecProposer", "num_speculative_tokens": 2,
    }  # fmt: skip
    assert option(made, "--additional-config") == {"hspec_drafter": str(place / method)}


@pytest.mark.parametrize("method", ["hspec", "dspark", "dflash"])
def test_lookup_first_is_the_plugins(spoken, place: Path, method: str) -> None:
    """Also of what vLLM would serve itself, without lookup."""
    for before in ("", "plugin:"):
        made = spoken(method, 2, source=f"{before}{place / method}+ngram")
        assert made.by_plugin
        assert option(made, "--additional-config") == {"hspec_drafter": str(place / method), "hspec_lookup": True}


def test_doubts_are_the_plugins(spoken, place: Path) -> None:
    made = spoken("dspark", 2, source=f"{place / 'dspark'}+sure0.3+ngram", gpu=True)
    assert made.by_plugin
    told = option(made, "--additional-config")
    assert told == {"hspec_drafter": str(place / "dspark"), "hspec_lookup": True, "hspec_sure": 0.3}
    with pytest.raises(UsageError, match=r"dflash: this drafter \(dflash\) has no confidence head, .*: leave \+sure out"):
        spoken("dflash", 2, source=f"{place / 'dflash'}+sure0.3")


@pytest.mark.parametrize("drafter", ["hspec", "dflash", "ngram"])
def test_fewer_drafts_under_load(spoken, drafter: str) -> None:
    """Whoever serves it, by vLLM's own setting; k counts below the schedule's first number."""
    told = option(spoken(drafter, 2, schedule=Schedule.of("3:1,5:0")), "--speculative-config")
    assert told["num_speculative_tokens"] == 2
    assert told["num_speculative_tokens_per_batch_size"] == [[1, 2, 2], [3, 4, 1], [5, 5, 0]]
    with pytest.raises(UsageError, match="3 drafts are more than -k 2"):
        spoken(drafter, 2, schedule=Schedule.of("1:3"))


def test_what_vllm_knows_is_converted_once(spoken, place: Path, tmp_path: Path) -> None:
    made = spoken("dflash")
    told = option(made, "--speculative-config")
    folder = Path(told["model"])
    target = loaded(place / "target")
    original, converted = (load_drafter(where, target) for where in (place / "dflash", folder))
    assert not made.by_plugin and "--additional-config" not in made.arguments
    assert told["num_speculative_tokens"] == original.max_draft
    assert json.loads((folder / "config.json").read_text())["speculators_model_type"] == "dflash"
    assert converted.config.method == "dflash"
    stamp = (folder / "config.json").stat().st_mtime_ns
    assert option(spoken("dflash"), "--speculative-config") == told and (folder / "config.json").stat().st_mtime_ns == stamp
    assert speculators_folder(folder, str(place / "target")) == folder  # it is in that layout already
    assert not list((tmp_path / "cache").rglob("*.partial"))


def test_a_drafter_that_was_trained_on_is_converted_again(spoken, place: Path) -> None:
    before = option(spoken("dflash"), "--speculative-config")["model"]
    (place / "dflash" / "config.json").touch()
    assert option(spoken("dflash"), "--speculative-config")["model"] != before


def test_prompt_lookup(spoken) -> None:
    told = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
    assert option(spoken("ngram", 3), "--speculative-config") == told


def test_dspark_is_the_plugins_where_there_is_no_gpu(spoken, place: Path) -> None:
    made = spoken("dspark")
    assert made.by_plugin and option(made, "--additional-config") == {"hspec_drafter": str(place / "dspark")}
    made = spoken("dspark", gpu=True)
    assert not made.by_plugin and option(made, "--speculative-config")["num_speculative_tokens"] >= 1


def test_the_plugin_can_be_asked_for(spoken, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    made = spoken("dflash", source="plugin:dflash")
    assert made.by_plugin and option(made, "--additional-config") == {"hspec_drafter": str(place / "dflash")}
    assert spoken("dspark", gpu=True, source=f"plugin:{place / 'dspark'}").by_plugin


@pytest.mark.parametrize(
    "drafter, k, why",
    [
        ("redrafter", None, "of the method 'redrafter', which this plugin does not serve"),
        ("hspec", 99, "99 drafts a step, but the drafter at .*hspec was trained for 1 to"),
        ("nowhere", None, "nowhere"),
    ],
)
def test_what_cannot_be_served(spoken, drafter: str, k: int | None, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        spoken(drafter, k)


def test_ranks(spoken) -> None:
    for drafter in ("hspec", "dspark"):  # of 4 query heads and 2 KV heads
        assert spoken(drafter, ranks=2) == spoken(drafter)
        assert spoken(drafter, ranks=4).by_plugin  # two ranks for each KV head
        why = (
            r"has 4 query heads and 2 KV heads, which 3 ranks cannot share: choose another .* \(these heads allow 1, 2 or 4\)$"
        )
        with pytest.raises(UsageError, match=why):
            spoken(drafter, ranks=3)
    assert not spoken("dflash", ranks=3).by_plugin  # vLLM's own method, and its own matter


def test_another_targets_drafter(place: Path, tmp_path: Path) -> None:
    other = save_target(tmp_path / "other", hidden=64)
    with pytest.raises(UsageError):
        speculation(str(place / "hspec"), str(other), str(other), describe(str(other)), None, False)
