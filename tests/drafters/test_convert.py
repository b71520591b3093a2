"""Conversion between layouts: the same drafter on the other side, or nothing there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hspec.drafters import convert as job
from hspec.drafters.checkpoint import load_drafter, save_drafter
from hspec.drafters.convert import block_logits, convert, layout_name
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from tests.tiny import tiny_drafter, tiny_target

MASK = 209
DSPARK: dict[str, Any] = {
    "method": "dspark", "pattern": ["attention", "mlp"] * 2, "context": "features", "mamba": None, "use_state": False,
    "mask_token_id": MASK,
}  # fmt: skip
"""Beside the causal blocks with a window that :func:`tests.tiny.tiny_config` makes."""


def saved(drafter: ParallelDrafter, folder: Path) -> Path:
    save_drafter(drafter, folder)
    return folder


@pytest.fixture
def dspark(target: Target, tmp_path: Path) -> Path:
    return saved(tiny_drafter(target, **DSPARK), tmp_path / "dspark")


@pytest.fixture
def hybrid(drafter: ParallelDrafter, tmp_path: Path) -> Path:
    return saved(drafter, tmp_path / "hybrid")


def same(a: ParallelDrafter, b: ParallelDrafter, target: Target) -> None:
    """In their logits, bit for bit, and in what is stored."""
    for anchor in (1, 20):
        assert torch.equal(block_logits(a, target, anchor), block_logits(b, target, anchor))
    for name, weight in a.state_dict().items():
        assert torch.equal(b.state_dict()[name], weight), name


@pytest.mark.parametrize(("kind", "there"), [("dspark", "speculators"), ("hybrid", "authors")])
def test_there_and_back(kind: str, there: str, target: Target, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)
    first = convert(source, tmp_path / "there", there, target, MASK)
    second = convert(tmp_path / "there", tmp_path / "back", "hspec", target)
    third = convert(tmp_path / "there", tmp_path / "again", there, target)
    layouts = [(done.source, done.layout) for done in (first, second, third)]
    assert layouts == [("hspec", there), (there, "hspec"), (there, there)]
    for done in (first, second, third):
        assert done.max_difference == 0.0 and done.max_logit > 1 and done.blocks == 4
        assert done.parameters == first.parameters and done.method == load_drafter(source, target).config.method
    for place in ("there", "back", "again"):
        same(load_drafter(source, target), load_drafter(tmp_path / place, target), target)  # type: ignore[arg-type]
        assert layout_name(tmp_path / place) == ("hspec" if place == "back" else there)
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "there" / file).read_bytes() == (tmp_path / "again" / file).read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([kind, "there", "back", "again"])


def test_logits_that_are_compared_depend_on_everything(target: Target) -> None:
    """On the context, the anchor, the tokens drafted before, and every weight."""
    drafter = tiny_drafter(target, **DSPARK)
    logits = block_logits(drafter, target, 9)
    assert logits.shape == (5, 160)
    for other in (block_logits(drafter, target, 10), block_logits(drafter, target, 9, seed=1)):
        assert (logits - other).abs().amax(-1).min() > 0.1
    for name, weight in drafter.state_dict().items():
        if name.startswith("confidence"):
            continue
        before = weight.clone()
        weight.add_(0.1 * torch.randn(weight.shape))
        assert not torch.allclose(block_logits(drafter, target, 9), logits, atol=1e-5), name
        weight.copy_(before)


@pytest.mark.parametrize(
    ("kind", "layout", "message"),
    [
        (
            "hybrid",
            "speculators",
            r"cannot be written as dspark of speculators, .* its pattern .*the authors' layout.*attention.context: target",
        ),
        ("dspark", "authors", r"cannot be written as mamba_attn_hybrid.*K/V of its own of every context token"),
        ("hybrid", "authors", "names none"),
        ("hybrid", "vllm", "no layout 'vllm': choose one of hspec, speculators, authors"),
        ("nowhere", "hspec", "no drafter at"),
    ],
)
def test_what_cannot_be_converted(
    kind: str, layout: str, message: str, target: Target, hybrid: Path, dspark: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=message):
        convert(tmp_path / kind, tmp_path / "out", layout, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dspark", "hybrid"]


def test_neighbours_are_left_alone(target: Target, dspark: Path, tmp_path: Path) -> None:
    """Also those that are called as temporary folders often are."""
    source = Path(shutil.copytree(dspark, tmp_path / "x.partial"))
    before = {p.name: p.read_bytes() for p in source.iterdir()}
    convert(source, tmp_path / "x", "speculators", target)
    assert {p.name: p.read_bytes() for p in source.iterdir()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dspark", "x", "x.partial"]


def test_a_place_that_is_taken(target: Target, dspark: Path, hybrid: Path, tmp_path: Path) -> None:
    before = {p: p.read_bytes() for p in hybrid.iterdir()}
    (tmp_path / "file").write_text("x")
    for out in (hybrid, dspark, tmp_path / "file"):
        with pytest.raises(UsageError, match=f"{out.name} is there already"):
            convert(dspark, out, "speculators", target)
    assert {p: p.read_bytes() for p in hybrid.iterdir()} == before
    (tmp_path / "empty").mkdir()
    convert(dspark, tmp_path / "empty", "speculators", target)
    assert layout_name(tmp_path / "empty") == "speculators"


def test_another_vocabulary_is_not_lost(target: Target, hybrid: Path, tmp_path: Path) -> None:
    """Our layout has the target's embedding and head; a checkpoint with others cannot become one."""
    convert(hybrid, tmp_path / "theirs", "authors", target, MASK)
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].flip(0) for name in ("embed_tokens.weight", "lm_head.weight")}, path)
    with (
        pytest.warns(UserWarning, match="another embedding"),
        pytest.raises(
            UsageError, match=r"cannot be written as hspec, .* an embedding other than the target's; LM-head rows other"
        ),
    ):
        convert(tmp_path / "theirs", tmp_path / "out", "hspec", target)
    assert not (tmp_path / "out").exists()


def test_rounding_is_reported(target: Target, hybrid: Path, tmp_path: Path) -> None:
    """Vocabulary weights stored in bf16 become the target's own fp32 ones again."""
    convert(hybrid, tmp_path / "theirs", "authors", target, MASK)
    path = tmp_path / "theirs" / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"].bfloat16()}, path)
    done = convert(tmp_path / "theirs", tmp_path / "out", "hspec", target)
    assert 0 < done.max_difference < 0.005 * done.max_logit


def test_result_that_is_another_drafter_is_not_kept(
    target: Target, dspark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = job.write_speculators

    def broken(drafter: ParallelDrafter, *rest: Any) -> None:
        drafter.norm.weight.mul_(1.1)
        write(drafter, *rest)
        drafter.norm.weight.div_(1.1)

    monkeypatch.setattr(job, "write_speculators", broken)
    with pytest.raises(HSpecError, match="read back gives other logits: they differ by up to"):
        convert(dspark, tmp_path / "out", "speculators", target)
    assert [p.name for p in tmp_path.iterdir()] == ["dspark"]


def test_failed_write_leaves_nothing(target: Target, dspark: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(tensors: Any, path: Path, **_: Any) -> None:
        Path(path).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hspec.drafters.formats.files.save_file", full)
    with pytest.raises(HSpecError, match=r"cannot write the drafter to .*: No space left on device"):
        convert(dspark, tmp_path / "out", "speculators", target)
    assert [p.name for p in tmp_path.iterdir()] == ["dspark"]


def test_what_the_target_is_used_for(dspark: Path, target: Target, tmp_path: Path) -> None:
    """Its name, sizes and weights; another one of the same sizes is not the drafter's target."""
    convert(dspark, tmp_path / "out", "speculators", target)
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["speculators_config"]["verifier"] == {"name_or_path": "tiny-llama", "architectures": ["LlamaForCausalLM"]}
    assert raw["transformer_layer_config"]["max_position_embeddings"] == 512
    with pytest.raises(UsageError, match="made for tiny-llama"):
        convert(dspark, tmp_path / "other", "speculators", tiny_target("llama", hidden=96))
