"""A target without its layers gives what the whole one gives, in every bit, from the residual streams of the whole one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hspec.errors import HSpecError, UsageError
from hspec.serving.targets import folder_hash
from hspec.targets import sources
from hspec.targets.partial import PartialTarget, load_partial_target
from hspec.targets.sources import load_target
from hspec.targets.target import Target
from tests.saved import save_target
from tests.targets.reference import CASES, reference_model
from tests.tiny import tiny_tokenizer

TOKENS = torch.randint(3, 150, (3, 21), generator=torch.Generator().manual_seed(2))


class Beside:
    """Runs the layers by the whole target, in this process."""

    ahead, arithmetic = 1, None
    asked_to_stop = staticmethod(lambda: False)

    def __init__(self, target: Target):
        self.target = target
        self.asked: list[list[int]] = []
        self.expected: list[list[int]] = []

    def __call__(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        self.asked.append(list(layers))
        return self.target.forward(tokens, self.target.new_cache(*tokens.shape), layers).taps

    def expect(self, tokens: Tensor, layers: Sequence[int]) -> None:
        self.expected.append(list(layers))


def pair(folder: Path, linears: str = "packed") -> tuple[Target, PartialTarget]:
    whole = load_target(str(folder), linears=linears)  # type: ignore[arg-type]
    return whole, load_partial_target(str(folder), lambda _: Beside(whole), linears=linears)  # type: ignore[arg-type]


def alike(whole: Target, partial: PartialTarget, taps: list[int], layers: list[int]) -> None:
    partial.read_kv(layers)
    outputs = []
    for target in (whole, partial):
        cache = target.new_cache(*TOKENS.shape)
        output = target.forward(TOKENS, cache, taps)
        cache.advance([TOKENS.shape[1]] * len(TOKENS))
        outputs.append((output, cache.view()))
    (one, kv), (two, own) = outputs
    assert torch.equal(one.hidden, two.hidden) and torch.equal(one.taps, two.taps)
    assert torch.equal(whole.logits(one.hidden), partial.logits(two.hidden))
    for layer in layers:
        for mine, theirs in zip(own.layer(layer), kv.layer(layer), strict=True):
            assert mine.shape == theirs.shape and float(mine.abs().max()) > 0 and torch.equal(mine, theirs), layer


@pytest.mark.parametrize("case", CASES)
def test_every_family(case: str, tmp_path: Path) -> None:
    """The cases have every kind of RoPE, biases, q/k norms, windows with a RoPE of their own, and soft caps."""
    reference_model(case).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    whole, partial = pair(tmp_path)
    alike(whole, partial, [1, 3], [0, 1, 2, 3])
    assert partial.weight_hash() == whole.weight_hash() == folder_hash(tmp_path, whole.config)
    assert partial.parameters == whole.parameters and partial.eos_ids == whole.eos_ids
    for layer in range(len(whole.layers)):
        mine, theirs = partial.layer_weights(layer), whole.layer_weights(layer)
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert torch.equal(partial.model.model.norm.weight, whole.model.model.norm.weight)


@pytest.mark.parametrize("linears", ["bf16", "plain"])
@pytest.mark.parametrize("tied", [True, False])
def test_every_precision(linears: str, tied: bool, tmp_path: Path) -> None:
    whole, partial = pair(save_target(tmp_path, tie_word_embeddings=tied), linears)
    alike(whole, partial, [0, 2, 3], [1])
    assert torch.equal(partial.embedding_weight, whole.embedding_weight)
    assert torch.equal(partial.head_weight, whole.head_weight)
    assert (partial.name, partial.template.hash, partial.dtype) == (whole.name, whole.template.hash, whole.dtype)


def test_it_has_little_and_asks_for_little(tmp_path: Path) -> None:
    whole, partial = pair(save_target(tmp_path, layers=5))
    streams = partial.streams
    assert isinstance(streams, Beside)
    partial.read_kv([3])
    held = sum(p.numel() for p in partial.model.parameters())
    linears = 2 * 48 * 2 * 16  # k_proj and v_proj lie in oneDNN's layout
    assert held + linears < 48 * 211 * 2 + linears + 200 < whole.parameters
    cache = partial.new_cache(*TOKENS.shape)
    assert [k.shape[2] for k in cache.keys] == [0, 0, 0, 21, 0]
    partial.expect(TOKENS, [1])
    partial.forward(TOKENS, cache, [1])
    assert streams.asked == streams.expected == [[1, 3, 5]]
    assert partial.forward(TOKENS, partial.new_cache(*TOKENS.shape)).taps.shape == (3, 21, 0, 48)


def test_it_cannot_decode(tmp_path: Path) -> None:
    partial = pair(save_target(tmp_path))[1]
    cache = partial.new_cache(3, 40)
    partial.forward(TOKENS, cache)
    cache.advance([21] * 3)
    with pytest.raises(UsageError, match=r"the layers of .* run elsewhere, over whole documents only"):
        partial.forward(TOKENS[:, :1], cache)
    with pytest.raises(UsageError, match="it cannot decode here"):
        partial.forward(TOKENS[:1, :2], partial.new_cache(1, 9), tree=[[0, 1]])


def test_weights_in_several_files(tmp_path: Path) -> None:
    whole = load_target(str(save_target(tmp_path)))
    weights = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    parts = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(parts.values()):
        save_file({name: w for name, w in weights.items() if parts[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": parts}))
    alike(whole, load_partial_target(str(tmp_path), lambda _: Beside(whole)), [1], [0, 2])


def test_a_hub_id_that_was_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_target(tmp_path)
    asked = []

    def snapshot(name: str, **_: object) -> str:
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr(sources, "snapshot_download", snapshot)
    whole = load_target(str(tmp_path))
    partial = load_partial_target("someone/something", lambda _: Beside(whole))
    assert asked == ["someone/something"] and partial.name == "someone/something"
    alike(whole, partial, [1], [2])


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    whole = load_target(str(save_target(tmp_path)))
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: w for name, w in weights.items() if "layers.1.self_attn.v" not in name}, tmp_path / "model.safetensors")
    partial = load_partial_target(str(tmp_path), lambda _: Beside(whole))
    with pytest.raises(HSpecError, match=r"has no weight model.layers.1.self_attn.v_proj.weight: the checkpoint is incomplete"):
        partial.read_kv([1])
    (tmp_path / "model.safetensors").write_bytes(b"\x00" * 50)
    with pytest.raises(HSpecError, match=r"the weights in .* cannot be read: .*; fetch the model again"):
        load_partial_target(str(tmp_path), lambda _: Beside(whole))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(
        UsageError, match=r"neither model.safetensors nor .*: single weights can be read from safetensors files only"
    ):
        load_partial_target(str(tmp_path), lambda _: Beside(whole))
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    with pytest.raises(UsageError, match="is a GGUF file"):
        load_partial_target(str(tmp_path / "a.gguf"), lambda _: Beside(whole))
