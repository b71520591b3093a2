"""What is said of targets, drafters and presets, counted from configurations alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hspec.drafters.convert import convert
from hspec.errors import HSpecError, UsageError
from hspec.evaluation.describe import describe
from tests.saved import loaded, save_drafter_for, save_target
from tests.tiny import tiny_drafter, tiny_target


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_target(tmp_path: Path, family: str) -> None:
    folder = save_target(tmp_path / "t", family=family)
    facts = describe(str(folder))
    assert facts["kind"] == "target" and facts["family"] == family
    assert (facts["layers"], facts["hidden_size"], facts["heads"], facts["kv_heads"], facts["head_dim"]) == (3, 48, 4, 2, 16)
    assert facts["kv_bytes_per_token_fp32"] == 3 * 2 * 16 * 2 * 4 == 2 * facts["kv_bytes_per_token_bf16"]
    matrices = sum(p.numel() for p in tiny_target(family, 3, hidden=48, linears="plain").model.parameters() if p.dim() == 2)  # type: ignore[arg-type]
    assert facts["parameters"] == matrices == sum(facts["parameters_by_part"].values())


def test_a_drafter(tmp_path: Path) -> None:
    target = loaded(save_target(tmp_path / "t"))
    facts = describe(str(save_drafter_for(target, tmp_path / "d")))
    assert facts["kind"] == "drafter" and facts["block"] == "anchor + 5" and facts["kv_bytes_per_token"] == 0
    assert facts["parameters"] == sum(p.numel() for p in tiny_drafter(target).parameters())


@pytest.mark.parametrize("layout", ["authors", "speculators"])
def test_a_drafter_in_another_layout(tmp_path: Path, layout: str) -> None:
    """The same as of the drafter that it was written from; where training began and a frozen mask are not in the layout."""
    target = loaded(save_target(tmp_path / "t"))
    fields: dict[str, Any] = {} if layout == "authors" else {
        "method": "dspark", "pattern": ["attention", "mlp"], "context": "features", "mamba": None, "use_state": False,
        "mask_token_id": 5,
    }  # fmt: skip
    folder = save_drafter_for(target, tmp_path / "d", **fields)
    convert(folder, tmp_path / layout, layout, target, 5)
    before, after = (describe(str(tmp_path / name)) for name in ("d", layout))
    assert after == before | {"kv_layers": after["kv_layers"]}
    assert layout == "speculators" or after["kv_layers"] == before["kv_layers"]


def test_presets_need_no_files() -> None:
    facts = describe("qwen3-8b")
    assert facts["kind"] == "preset" and facts["target"] == "Qwen/Qwen3-8B" and facts["block"] == "anchor + 7"
    json.dumps(facts)


def test_what_is_none_of_these(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"is no model's folder: it has neither a config\.json nor a \.gguf file"):
        describe(str(tmp_path / "empty"))
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(UsageError, match="is of the family 'gpt2'; supported are llama"):
        describe(str(folder))
    (folder / "config.json").write_text('{"method": "hspec", "format": 1}')
    with pytest.raises(HSpecError, match="target: Field required"):
        describe(str(folder))
    (folder / "config.json").write_text('{"speculators_model_type": "mamba_attn_hybrid"}')
    with pytest.raises(HSpecError, match="has no transformer_layer_config: the file is damaged"):
        describe(str(folder))
    (folder / "config.json").write_text('{"speculators_model_type": "mtp"}')
    with pytest.raises(UsageError, match=r"the type 'mtp'; of the layout of speculators mamba_attn_hybrid, .* can be read"):
        describe(str(folder))
    (folder / "config.json").write_bytes(b"\xff\xfe")
    with pytest.raises(HSpecError, match="is damaged"):
        describe(str(folder))
