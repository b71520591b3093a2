"""Checkpoint folders: what is written is what is read, and every kind of damage has an error that says so."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hspec.drafters import checkpoint
from hspec.drafters.checkpoint import CONFIG_FILE, WEIGHTS_FILE, load_drafter, read_config, save_drafter
from hspec.drafters.context import DraftContext
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import HSpecError, UsageError
from hspec.files import beside
from hspec.targets.target import Target
from tests.tiny import tiny_drafter, tiny_target


@pytest.fixture
def folder(drafter: ParallelDrafter, tmp_path: Path) -> Path:
    path = tmp_path / "drafter"
    save_drafter(drafter, path)
    return path


def edit_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / CONFIG_FILE
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    weights = load_file(folder / WEIGHTS_FILE)
    change(weights)
    save_file(weights, folder / WEIGHTS_FILE)


def proposal(drafter: ParallelDrafter, target: Target) -> list[list[int]]:
    tokens = torch.arange(5, 30)[None]
    cache = target.new_cache(1, 40)
    taps = target.prefill(tokens, cache, drafter.taps).taps
    return drafter.propose(DraftContext(torch.tensor([[7]]), torch.tensor([[25]]), taps, cache.view()), 5).tokens.tolist()


# -- the way there and back --------------------------------------------------------------------------------------


def test_round_trip_is_exact(drafter: ParallelDrafter, target: Target, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = load_drafter(folder, target)
    assert loaded.config == drafter.config == read_config(folder)
    for name, weight in drafter.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight), name
    assert torch.equal(loaded.draft_ids, drafter.draft_ids)
    assert torch.equal(loaded.head, target.head_weight[drafter.draft_ids])
    assert loaded.embedding.data_ptr() == target.embedding_weight.data_ptr()  # shared, not copied
    assert proposal(loaded, target) == proposal(drafter, target)


def test_loaded_drafter_is_frozen(target: Target, folder: Path) -> None:
    loaded = load_drafter(folder, target)
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())


def test_round_trip_in_half_precision(drafter: ParallelDrafter, target: Target, tmp_path: Path) -> None:
    save_drafter(drafter, tmp_path / "half", dtype=torch.float16)
    save_drafter(drafter, tmp_path / "full")
    stored = load_file(tmp_path / "half" / WEIGHTS_FILE)
    assert {w.dtype for w in stored.values()} == {torch.float16, torch.int32}
    sizes = [(tmp_path / name / WEIGHTS_FILE).stat().st_size for name in ("half", "full")]
    assert sizes[0] < 0.55 * sizes[1]
    loaded = load_drafter(tmp_path / "half", target)
    for name, weight in drafter.state_dict().items():
        assert loaded.state_dict()[name].dtype == torch.float32
        assert torch.equal(loaded.state_dict()[name], weight.half().float()), name


def test_stores_the_weights_that_it_is_given(drafter: ParallelDrafter, target: Target, tmp_path: Path) -> None:
    average = {name: weight + 1 for name, weight in drafter.state_dict().items()}
    save_drafter(drafter, tmp_path / "average", state=average)
    assert torch.equal(load_drafter(tmp_path / "average", target).mask_embedding, drafter.mask_embedding + 1)


def test_frozen_weights_of_the_target_are_not_stored(target: Target, folder: Path) -> None:
    assert all(w.shape[:1] != (target.vocab_size,) or "causal" in name for name, w in load_file(folder / WEIGHTS_FILE).items())


def test_relative_folder(drafter: ParallelDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save_drafter(drafter, Path())
    assert sorted(p.name for p in tmp_path.iterdir()) == [CONFIG_FILE, WEIGHTS_FILE]


# -- writing that fails ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: no space left")])
@pytest.mark.parametrize("before", [True, False])
def test_failed_write_changes_nothing(
    drafter: ParallelDrafter, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, before: bool
) -> None:
    folder = tmp_path / "drafter"
    if before:
        save_drafter(drafter, folder)
    old = {p.name: p.read_bytes() for p in folder.iterdir()} if before else {}

    def half_written(weights: dict[str, Tensor], path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise error

    monkeypatch.setattr(checkpoint, "save_file", half_written)
    with pytest.raises(HSpecError, match=r"cannot write the drafter to .*drafter.*[Nn]o space left"):
        save_drafter(drafter, folder)
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == old if before else not folder.exists()
    assert [p.name for p in tmp_path.iterdir()] == (["drafter"] if before else [])


def test_folder_that_cannot_be_made(drafter: ParallelDrafter, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(HSpecError, match="cannot write the drafter"):
        save_drafter(drafter, tmp_path / "file" / "drafter")
    with pytest.raises(HSpecError, match="cannot write the drafter"):
        save_drafter(drafter, tmp_path / "file")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_remains_of_an_earlier_failure_do_not_matter(drafter: ParallelDrafter, target: Target, tmp_path: Path) -> None:
    remains = beside(tmp_path / "drafter")
    remains.mkdir()
    (remains / "rubbish").write_text("x")
    save_drafter(drafter, tmp_path / "drafter")
    load_drafter(tmp_path / "drafter", target)
    assert [p.name for p in tmp_path.iterdir()] == ["drafter"]


# -- damaged folders ---------------------------------------------------------------------------------------------


def test_no_folder(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no drafter at .*nowhere"):
        load_drafter(tmp_path / "nowhere", target)


def test_empty_folder(target: Target, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a drafter: it has no config.json"):
        load_drafter(tmp_path, target)


def test_folder_of_a_target(target: Target, tmp_path: Path) -> None:
    (tmp_path / CONFIG_FILE).write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    with pytest.raises(UsageError, match="does not describe a drafter"):
        load_drafter(tmp_path, target)


@pytest.mark.parametrize("text", ["{", "", "\udcff", "[1]"])
def test_config_that_is_not_json(target: Target, folder: Path, text: str) -> None:
    (folder / CONFIG_FILE).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(HSpecError, match=r"config.json"):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(expand=1), "config.json: expand: Extra inputs are not permitted"),
        (lambda c: c["mamba"].update(conv=2), r"config.json: mamba.conv: Extra inputs"),
        (lambda c: c.pop("taps"), r"config.json: taps: Field required"),
        (lambda c: c.update(format=3), r"config.json: format: .*newer version"),
        (lambda c: c.update(block_size="eight", fusion_rank=0), r"block_size: .*\(and 1 more\)"),
    ],
)
def test_config_with_other_keys(target: Target, folder: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    edit_config(folder, change)
    with pytest.raises(HSpecError, match=message):
        load_drafter(folder, target)


def test_config_with_a_rope_that_is_not_supported(target: Target, folder: Path) -> None:
    edit_config(folder, lambda c: c["attention"].update(rope=[{"rope_type": "longrope", "rope_theta": 1.0}]))
    with pytest.raises(UsageError, match="'longrope' is not supported"):
        load_drafter(folder, target)


def test_no_weight_file(target: Target, folder: Path) -> None:
    (folder / WEIGHTS_FILE).unlink()
    with pytest.raises(HSpecError, match=r"has no drafter.safetensors: the checkpoint is incomplete"):
        load_drafter(folder, target)


@pytest.mark.parametrize("kept", [0, 6, 100, 0.5, -1])
def test_truncated_weight_file(target: Target, folder: Path, kept: float) -> None:
    path = folder / WEIGHTS_FILE
    size = path.stat().st_size
    os.truncate(path, int(kept if kept > 1 or kept == 0 else size + kept if kept < 0 else size * kept))
    with pytest.raises(HSpecError, match=r"drafter.safetensors is damaged or cut short"):
        load_drafter(folder, target)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("seed.fc.weight"), r"seed.fc.weight is missing"),
        (lambda w: w.update(other=torch.ones(1)), r"other is not expected"),
        (lambda w: w.update({"norm.weight": torch.ones(63)}), r"norm.weight is \[63\], the config asks for \[64\]"),
        (lambda w: w["layers.0.D"].fill_(float("nan")), "layers.0.D has values that are not finite"),
        (lambda w: w["causal.w2.weight"][3, 3].fill_(float("inf")), "causal.w2.weight has values that are not finite"),
        (lambda w: w.pop("draft_ids"), "has no 'draft_ids'"),
        (lambda w: w.update(draft_ids=torch.arange(159, dtype=torch.int32)), "draft_ids must be 160 ascending ids below 211"),
        (lambda w: w["draft_ids"].add_(100), "draft_ids must be"),
        (lambda w: w["draft_ids"][0].fill_(1), "draft_ids must be"),
        (lambda w: w.update(draft_ids=w["draft_ids"].flip(0)), "draft_ids must be"),
    ],
)
def test_weights_that_do_not_fit(
    target: Target, folder: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    edit_weights(folder, change)
    with pytest.raises(HSpecError, match=message):
        load_drafter(folder, target)


# -- meeting a target --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layers": 5}, r"made for tiny-llama \(layers 6\), not for other \(layers 5\)"),
        ({"hidden": 96}, r"hidden_size 64.*hidden_size 96"),
        ({"vocab": 220}, r"vocab_size 211.*vocab_size 220"),
        ({"kv_heads": 4}, r"reads K/V of 2 heads x 16, other has 4 x 16"),
        ({"head_dim": 8}, r"reads K/V of 2 heads x 16, other has 2 x 8"),
    ],
)
def test_target_of_another_shape(folder: Path, other: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_drafter(folder, tiny_target("llama", name="other", **other))  # type: ignore[arg-type]


def test_target_with_other_weights_warns(folder: Path) -> None:
    with pytest.warns(UserWarning, match=r"trained on other weights of tiny-llama .*stays exact"):
        load_drafter(folder, tiny_target("llama", seed=1))


def test_target_with_another_template_warns(folder: Path) -> None:
    other = tiny_target("llama")
    other.tokenizer.chat_template += " "
    with pytest.warns(UserWarning, match="another chat template"):
        load_drafter(folder, other)


def test_weights_of_a_drafter_without_optional_parts(target: Target, tmp_path: Path) -> None:
    plain = tiny_drafter(target, markov_rank=0, confidence_head=False, use_state=False)
    save_drafter(plain, tmp_path)
    names = load_file(tmp_path / WEIGHTS_FILE).keys()
    assert not any(name.startswith(("causal", "confidence", "seed")) for name in names)
    assert proposal(load_drafter(tmp_path, target), target) == proposal(plain, target)
