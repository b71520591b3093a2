"""From what a user types to a target, and what is said when there is none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from hspec.errors import HSpecError, UsageError
from hspec.targets import sources
from hspec.targets.sources import ALIASES, SMOLLM2_NAME, describe, load_reference, load_target
from tests.saved import save_drafter_for, save_target
from tests.tiny import tiny_target


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("sources") / "t")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def copy(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


@pytest.mark.parametrize("linears", ["packed", "plain"])
def test_a_folder(folder: Path, linears: Any) -> None:
    target = load_target(str(folder), linears=linears)
    made = tiny_target(layers=3, hidden=48)
    assert target.weight_hash() == made.weight_hash() and target.template.hash == made.template.hash
    assert target.name == str(folder) and target.provenance == {"source": "t"} and target.eos_ids == frozenset([0])
    tokens = torch.tensor([[5, 6, 7]])
    mine, theirs = (t.forward(tokens, t.new_cache(1, 3)).hidden for t in (target, made))
    assert torch.allclose(mine, theirs, atol=1e-4)


def test_the_reference_is_the_same_model_as_transformers_runs_it(folder: Path) -> None:
    model, tokenizer = load_reference(str(folder))
    target = load_target(str(folder))
    tokens = torch.tensor([[5, 6, 7]])
    logits = target.logits(target.forward(tokens, target.new_cache(1, 3)).hidden)
    with torch.no_grad():
        assert torch.allclose(model(tokens).logits, logits, atol=1e-5)
    assert not model.training and tokenizer.eos_token_id == 0


def test_the_type_of_its_weights(folder: Path) -> None:
    assert load_target(str(folder), dtype=torch.bfloat16).dtype == torch.bfloat16


def test_the_configuration_alone(folder: Path) -> None:
    (folder / "notes.txt").write_text("other files do not matter")
    assert describe(str(folder)).num_hidden_layers == 3


def test_all_ids_that_end_a_turn_are_known(folder: Path, tmp_path: Path) -> None:
    other = copy(folder, tmp_path / "t")
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 5]}))
    assert load_target(str(other)).eos_ids == {0, 2, 5}


# -- what is not there -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("load", [load_target, describe, load_reference])
def test_names_that_are_no_model(load: Any, folder: Path, tmp_path: Path) -> None:
    cases = {
        "no-such": r"no target 'no-such': it is no folder or \.gguf file here, not one of the packaged names \(smollm2, ",
        "a/b": "no target 'a/b'",
        " ": "the target's name is empty",
        str(tmp_path / "x.gguf"): r"no file .*x\.gguf",
        str(tmp_path): "is no model's folder",
        str(folder / "config.json"): "is a file, but not a GGUF one",
    }
    for name, message in cases.items():
        with pytest.raises(UsageError, match=message):
            load(name)


def test_a_folder_of_gguf_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.gguf").write_bytes(b"")
    asked: list[Path] = []
    monkeypatch.setattr(sources, "_load_gguf", lambda path, _: asked.append(path) or (None, None))
    sources._load(str(tmp_path), torch.float32)
    assert asked == [tmp_path / "a.gguf"]
    (tmp_path / "b.gguf").write_bytes(b"")
    with pytest.raises(UsageError, match=r"several GGUF files \(a\.gguf, b\.gguf"):
        load_target(str(tmp_path))


def test_drafters_and_unsupported_families(folder: Path, tmp_path: Path) -> None:
    drafter = save_drafter_for(load_target(str(folder)), tmp_path / "d")
    with pytest.raises(UsageError, match="holds a drafter, not a target"):
        load_target(str(drafter))
    (tmp_path / "g").mkdir()
    (tmp_path / "g" / "config.json").write_text('{"model_type": "gpt2"}')
    for load in (load_target, describe):
        with pytest.raises(UsageError, match="of the family 'gpt2'; supported are llama"):
            load(str(tmp_path / "g"))


# -- what is damaged ---------------------------------------------------------------------------------------------


def test_damaged_files(folder: Path, tmp_path: Path) -> None:
    for index, (name, damage, message) in enumerate(
        (
            ("model.safetensors", lambda b: b[: len(b) // 2], "damaged or incomplete"),
            ("model.safetensors", lambda b: b"\x00" * 50, "damaged or incomplete"),
            ("config.json", lambda b: b[:30], r"config\.json is damaged"),
            ("config.json", lambda b: b"{}", "damaged or incomplete"),
            ("tokenizer.json", lambda b: b[: len(b) // 2], "damaged or incomplete"),
        )
    ):
        other = copy(folder, tmp_path / str(index))
        (other / name).write_bytes(damage((other / name).read_bytes()))
        with pytest.raises(HSpecError, match=message) as caught:
            load_target(str(other))
        assert caught.value.exit_code == 1 and str(other) in str(caught.value)
    other = copy(folder, tmp_path / "without")
    (other / "model.safetensors").unlink()
    with pytest.raises(HSpecError, match="damaged or incomplete"):
        load_target(str(other))
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + bytes(40))
    with pytest.raises(HSpecError, match=r"cannot load a model from .*x\.gguf"):
        load_target(str(tmp_path / "x.gguf"))


def test_weights_that_are_missing_are_not_made_up(folder: Path, tmp_path: Path) -> None:
    other = copy(folder, tmp_path / "t")
    weights = load_file(other / "model.safetensors")
    for name in ("model.layers.1.mlp.up_proj.weight", "model.layers.2.mlp.up_proj.weight"):
        del weights[name]
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(HSpecError, match=r"lacks 2 weights of its model, model\.layers\.1\.mlp\.up_proj\.weight the first"):
        load_target(str(other))


# -- the packaged model ------------------------------------------------------------------------------------------


@pytest.fixture
def packaged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    """A tiny model in place of the packaged one; counts how often it is converted."""
    conversions: list[int] = []

    def load(*_: Any) -> tuple[Any, Any]:
        conversions.append(1)
        tiny = tiny_target(layers=2, hidden=32, linears="plain")
        return tiny.model, tiny.tokenizer

    monkeypatch.setattr(sources, "fetch", lambda _: tmp_path / "packaged.gguf")
    monkeypatch.setattr(sources, "_load_gguf", load)
    return conversions


def test_the_packaged_model_is_converted_once(packaged: list[int], tmp_path: Path) -> None:
    for name in (*ALIASES, SMOLLM2_NAME):
        target = load_target(name)
        assert target.name == SMOLLM2_NAME and "not the original" in target.provenance["format"]
    assert describe("smollm2").num_hidden_layers == 2
    assert len(packaged) == 1
    assert [p.name for p in (tmp_path / "cache" / "targets").iterdir()] == [SMOLLM2_NAME]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left")])
def test_a_full_disk_leaves_no_half_converted_model(
    packaged: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from transformers import LlamaForCausalLM

    def partly(self: Any, to: Path, **_: Any) -> None:
        Path(to).mkdir(parents=True)
        (Path(to) / "model.safetensors").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(LlamaForCausalLM, "save_pretrained", partly)
        with pytest.raises(HSpecError, match=r"cannot write the converted model to .*No space left.*it takes 540 MB"):
            load_target("smollm2")
    assert list((tmp_path / "cache" / "targets").iterdir()) == []
    assert load_target("smollm2").name == SMOLLM2_NAME and len(packaged) == 2


def test_a_conversion_that_was_interrupted_is_done_again(packaged: list[int], tmp_path: Path) -> None:
    half = tmp_path / "cache" / "targets" / SMOLLM2_NAME
    half.mkdir(parents=True)
    (half / "model.safetensors").write_bytes(b"half")
    half.with_name(half.name + ".partial").mkdir()
    assert load_target("smollm2").name == SMOLLM2_NAME
    (half / "model.safetensors").write_bytes(b"damaged later")
    with pytest.raises(HSpecError, match=r"the converted model in .* is damaged .*: delete that folder, it is made again"):
        load_target("smollm2")
