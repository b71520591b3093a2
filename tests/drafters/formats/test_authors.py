"""Checkpoints in the authors' layout: every switch is read or refused, none is dropped."""

from __future__ import annotations

import copy
import json
import operator
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hspec.drafters.checkpoint import load_drafter, read_config
from hspec.drafters.config import ParallelConfig
from hspec.drafters.context import DraftContext
from hspec.drafters.formats.authors import authors_config, is_authors, weight_names
from hspec.drafters.formats.speculators import read_speculators, read_weights, write_authors
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from tests.drafters.golden_case import FOLDER, LAYERS, GoldenCase, load_case
from tests.tiny import randomise, tiny_config, tiny_drafter, tiny_target

RAW = {case: json.loads((FOLDER / f"case_{case}.json").read_text(encoding="utf-8")) for case in "AB"}
Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def golden() -> GoldenCase:
    return load_case("A")


@pytest.fixture(scope="module")
def target8() -> Target:
    """A target of the shape that the golden drafters are for."""
    return tiny_target("qwen3", layers=LAYERS)


def changed(change: Change, case: str = "A") -> dict[str, Any]:
    raw = copy.deepcopy(RAW[case])
    change(raw)
    return raw


def write(folder: Path, raw: dict[str, Any], weights: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    save_file({name: w.contiguous() for name, w in weights.items()}, folder / "model.safetensors")
    return folder


def layout_of(drafter: ParallelDrafter, vocabulary: int, mask_token: int) -> dict[str, Tensor]:
    """A drafter's weights as the layout has them."""
    state = drafter.state_dict()
    tensors = {theirs: state[ours].clone() for theirs, ours in weight_names(drafter.config).items()}
    for name, weight in tensors.items():
        if name.endswith("conv1d.weight"):
            tensors[name] = weight[:, None]
    embedding = torch.randn(vocabulary, drafter.config.hidden_size)
    embedding[mask_token] = drafter.mask_embedding
    return tensors | {"embed_tokens.weight": embedding, "lm_head.weight": torch.randn(drafter.head.shape)}


# -- the configuration -------------------------------------------------------------------------------------------


def test_case_a() -> None:
    config = authors_config(RAW["A"], LAYERS)
    assert config.attention is not None and config.mamba is not None
    assert (config.attention.window, config.attention.causal_block, config.attention.qk_norm) == (24, True, True)
    assert (config.attention.heads, config.attention.kv_heads, config.attention.head_dim) == (4, 2, 16)
    assert config.attention.rope == [{"rope_type": "default", "rope_theta": 10000.0}] * 3
    assert (config.mamba.heads, config.mamba.head_dim, config.mamba.state_dim, config.mamba.groups) == (4, 16, 4, 2)
    assert (config.taps, config.kv_layers, config.fusion_rank) == ([1, 3, 5, 6, 7], [3, 5, 7], 64)
    assert (config.seed_mode, config.markov_rank, config.draft_vocab_size) == ("shared", 8, 128)
    assert (
        config.confidence_head and config.confidence_with_markov and config.use_state and config.attention.context == "target"
    )
    assert (config.target.family, config.target.layers, config.target.vocab_size) == ("qwen3", LAYERS, 211)


def test_case_b() -> None:
    config = authors_config(RAW["B"], LAYERS)
    assert config.attention is not None
    assert (config.attention.window, config.attention.causal_block) == (None, False)
    assert (config.seed_mode, config.markov_rank, config.confidence_head) == ("per_layer", 0, False)


@pytest.mark.parametrize("mode", ["shared", "per_layer", "once"])
def test_seed_modes(mode: str) -> None:
    config = authors_config(changed(lambda r: r.update(mamba_seed_mode=mode)), LAYERS)
    assert config.seed_mode == mode
    projections = [name for name in weight_names(config) if name.startswith("seed_projs")]
    assert len(projections) == (4 if mode == "per_layer" else 1)


def full_layers(raw: dict[str, Any]) -> None:
    raw["transformer_layer_config"]["layer_types"] = ["full_attention"] * 3


@pytest.mark.parametrize(
    ("change", "window", "causal"),
    [
        (lambda r: None, 24, True),
        (lambda r: r.update(sliding_window_non_causal=True), 24, False),
        (full_layers, None, False),
        # the window of the target layer is the fallback, and makes the block causal too
        (lambda r: [full_layers(r), [e.update(sliding_window=9) for e in r["attn_rope"]]], 9, True),
        (lambda r: [e.update(sliding_window=9) for e in r["attn_rope"]], 24, True),
        (lambda r: r["transformer_layer_config"].update(per_layer_sliding_window={"0": 7, "1": 7, "2": 7}), 7, True),
        (lambda r: r["transformer_layer_config"].update(use_sliding_window=False), None, False),
    ],
)
def test_window_and_block_rule(change: Change, window: int | None, causal: bool) -> None:
    attention = authors_config(changed(change), LAYERS).attention
    assert attention is not None
    assert (attention.window, attention.causal_block) == (window, causal)


@pytest.mark.parametrize(
    ("change", "field", "value"),
    [
        (lambda r: r.update(disable_mamba_init_state_injection=True), "use_state", False),
        (lambda r: r.update(disable_target_kv_reuse=True), "attention.context", "none"),
        (lambda r: r.update(fc_norm=True), "fusion_norm", True),
        (lambda r: r.update(confidence_head_with_markov=False), "confidence_with_markov", False),
        (lambda r: r.update(enable_confidence_head=False), "confidence_head", False),
        (lambda r: r.update(block_size=16), "block_size", 16),
        (lambda r: r.update(block_pattern=" ".join(r["block_pattern"]).upper()), "pattern", RAW["A"]["block_pattern"]),
        (lambda r: r.update(attn_kv_layer_ids=[7, 3, 3]), "kv_layers", [7, 3, 3]),
        (lambda r: r.pop("latent_fusion_layer_ids"), "taps", [3, 5, 7]),
        (lambda r: r.pop("markov_rank") and r.update(confidence_head_with_markov=False), "markov_rank", 0),
        (lambda r: r.update(unheard_of=False, other=None, prefix=0), "block_size", 8),  # a switch that is off
        (lambda r: r.update(_name_or_path="x", output_hidden_states=True), "block_size", 8),  # any configuration's
    ],
)
def test_fields(change: Change, field: str, value: Any) -> None:
    assert operator.attrgetter(field)(authors_config(changed(change), LAYERS)) == value


def test_defaults_of_the_layout() -> None:
    raw = changed(lambda r: [r.pop(k) for k in list(r) if k.startswith(("mamba_", "enable", "confidence", "use_qk"))])
    config = authors_config(raw, LAYERS)
    assert config.mamba is not None and config.attention is not None
    assert config.mamba.model_dump() == {"heads": 64, "head_dim": 64, "state_dim": 16, "groups": 1, "conv_kernel": 4}
    assert (config.seed_mode, config.confidence_head, config.attention.qk_norm) == ("per_layer", False, True)


def test_nested_defaults_are_those_of_transformers() -> None:
    """The layout stores the nested configuration as its difference from the defaults."""
    raw = changed(lambda r: [r["transformer_layer_config"].pop(k) for k in ("head_dim", "rms_norm_eps", "hidden_act")])
    config = authors_config(raw, LAYERS)
    assert config.attention is not None
    assert (config.attention.head_dim, config.rms_norm_eps) == (128, 1e-6)


def test_rope_of_each_layer() -> None:
    ropes = [
        {"rope_type": "default", "rope_theta": 5.0},
        {"rope_type": "linear", "rope_theta": 6.0, "factor": 2.0},
        {"rope_type": "default", "rope_theta": 7.0, "partial_rotary_factor": 0.5},
    ]
    raw = changed(lambda r: [e.update(rope_parameters=p) for e, p in zip(r["attn_rope"], ropes, strict=True)])
    attention = authors_config(raw, LAYERS).attention
    assert attention is not None and attention.rope == ropes


def test_rope_without_entries_is_the_nested_one() -> None:
    attention = authors_config(changed(lambda r: r.update(attn_rope=None)), LAYERS).attention
    assert attention is not None and attention.rope == [{"rope_type": "default", "rope_theta": 10000.0}] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(speculators_model_type="dflash"), "the type 'dflash', not 'mamba_attn_hybrid'"),
        (lambda r: r.update(markov_head_type="rnn"), "markov_head_type 'rnn' is not supported"),
        (lambda r: r.update(sliding_window_prefix=4), "sliding_window_prefix = 4 is not supported"),
        (lambda r: r.update(layer_mapping=[[1, 2]]), "layer_mapping = .* is not supported"),
        (lambda r: r.update(no_mlp_layer_indices=[1]), "no_mlp_layer_indices = .* is not supported"),
        (lambda r: r.update(quantization_config={"bits": 4}), "quantization_config"),
        (lambda r: r.update(some_new_gate=True), "some_new_gate = True is not supported"),
        (lambda r: r.update(gate=1, sample_from_anchor=True), "gate = 1, sample_from_anchor = True is not supported"),
        (lambda r: r["transformer_layer_config"].update(hidden_act="gelu"), "hidden_act = 'gelu' is not supported"),
        (lambda r: r["transformer_layer_config"].update(attention_bias=True), "attention_bias = True is not supported"),
        (
            lambda r: r["transformer_layer_config"]["layer_types"].__setitem__(1, "full_attention"),
            r"different windows \(\[24, None, 24\]\)",
        ),
        (lambda r: r.update(latent_fusion_layer_ids=[7, 3]), "do not ascend"),
        (lambda r: r.update(latent_fusion_layer_ids=[3, 8]), "last layer's output"),
        (lambda r: r.update(latent_fusion_layer_ids=[3, 9]), r"taps \[3, 9\] must ascend within 0..8"),
        (lambda r: r.update(attn_kv_layer_ids=[3, 5, 8]), r"kv_layers \[3, 5, 8\] must lie in 0..7"),
        (lambda r: r.update(block_size=32), "block_size"),
        (lambda r: r.update(mamba_n_groups=3), "multiple of mamba.groups"),
        (lambda r: r.update(block_pattern=["mamba", "conv", "attention", "attention", "attention"]), "pattern.1"),
    ],
)
def test_refused(change: Change, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        authors_config(changed(change), LAYERS)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.pop("block_pattern"), "no block_pattern"),
        (lambda r: r.pop("transformer_layer_config"), "no transformer_layer_config"),
        (lambda r: r.update(attn_kv_layer_ids=None), "attn_kv_layer_ids must be a list"),
        (lambda r: r.update(attn_kv_layer_ids=[3, 5]), "3 attention sub-layers, attn_kv_layer_ids 2 entries"),
        (lambda r: r["transformer_layer_config"].update(num_hidden_layers=2, layer_types=None), "2 layers; they must be"),
        (lambda r: r["attn_rope"].pop(), "attn_rope must have rope_parameters for each of 3"),
        (lambda r: r["transformer_layer_config"].update(model_type="nothing"), "model_type 'nothing'.* cannot be read"),
    ],
)
def test_damaged(change: Change, message: str) -> None:
    with pytest.raises(HSpecError, match=message):
        authors_config(changed(change), LAYERS)


# -- the weights -------------------------------------------------------------------------------------------------


def without_vocabulary(raw: dict[str, Any]) -> None:
    raw.update(draft_vocab_size=211)


@pytest.mark.parametrize(
    "change",
    [
        lambda r: None,
        lambda r: r.update(mamba_seed_mode="once"),
        lambda r: r.update(mamba_seed_mode="per_layer"),
        lambda r: r.update(fc_norm=True),
        lambda r: r.update(use_qk_norm=False),
        lambda r: r.update(disable_mamba_init_state_injection=True),
        lambda r: r.update(disable_target_kv_reuse=True),
        lambda r: r.update(confidence_head_with_markov=False),
        lambda r: r.update(markov_rank=0, confidence_head_with_markov=False),
        lambda r: r.update(enable_confidence_head=False),
        without_vocabulary,
    ],
)
def test_every_tensor_finds_its_place(change: Change, tmp_path: Path) -> None:
    """A random drafter, written in the layout, read, is the same drafter."""
    raw = changed(change)
    config = authors_config(raw, LAYERS)
    ids = torch.arange(config.draft_vocab_size)
    drafter = ParallelDrafter(config, torch.zeros(211, 64), torch.zeros(len(ids), 64), ids)
    randomise(drafter, 5)
    tensors = layout_of(drafter, 211, raw["mask_token_id"])
    if config.draft_vocab_size < 211:
        tensors["d2t"] = torch.full((128,), 83)  # the last 128 of the target's
    read = read_speculators(write(tmp_path, raw, tensors), LAYERS)
    assert read.config == config
    assert read.weights.keys() == drafter.state_dict().keys()
    for name, weight in drafter.state_dict().items():
        assert torch.equal(read.weights[name], weight), name
    assert read.embedding is not None
    assert torch.equal(read.embedding, tensors["embed_tokens.weight"]) and torch.equal(read.head, tensors["lm_head.weight"])
    assert read.draft_ids.tolist() == list(range(211 - config.draft_vocab_size, 211))


def test_mask_row_is_the_checkpoints_own(golden: GoldenCase) -> None:
    weights = golden.weights()
    weights["embed_tokens.weight"] = weights["embed_tokens.weight"].clone()
    weights["embed_tokens.weight"][209] = 3.0
    read = read_weights(golden.raw, weights, golden.drafter.config, "a folder")
    assert torch.equal(read.weights["mask_embedding"], torch.full((64,), 3.0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.pop("fc.weight"), "a folder does not fit its config.json: fc.weight is missing: the file is damaged"),
        (lambda w: w.pop("lm_head.weight"), "lm_head.weight is missing"),
        (
            lambda w: w.update({"layers.3.self_attn.q_proj.bias": torch.ones(64)}),
            "layers.3.self_attn.q_proj.bias is not expected",
        ),
        (  # all at once
            lambda w: [w.pop("norm.weight"), w.pop("fc.weight"), w.update(a=torch.ones(1), D=torch.ones(2), d2t=torch.ones(3))],
            r"fc.weight is missing; norm.weight is missing; D is not expected; a is not expected; d2t is \[3\], .*\[128\]",
        ),
        (lambda w: w.pop("d2t"), "no d2t for its draft vocabulary of 128 in 211"),
        (lambda w: w.update(d2t=w["d2t"] + 200), "d2t does not give ascending ids below 211"),
        (lambda w: w.update(d2t=w["d2t"].flip(0)), "d2t does not give ascending ids"),
        (lambda w: w.update(d2t=w["d2t"][:-1]), r"d2t is \[127\]"),
        (lambda w: w.update(t2d=~w["t2d"]), "t2d and d2t name different"),
        (lambda w: w.update({"lm_head.weight": torch.ones(211, 64)}), r"lm_head.weight is \[211, 64\].*\[128, 64\]"),
        (lambda w: w.update({"embed_tokens.weight": torch.ones(211, 63)}), "embed_tokens.weight is"),
    ],
)
def test_weights_that_do_not_fit(golden: GoldenCase, change: Callable[[dict[str, Tensor]], Any], message: str) -> None:
    weights = golden.weights()
    change(weights)
    with pytest.raises(HSpecError, match=message):
        read_weights(golden.raw, weights, golden.drafter.config, "a folder")


@pytest.mark.parametrize("token", [None, -1, 211])
def test_mask_token_that_is_none(golden: GoldenCase, token: int | None) -> None:
    with pytest.raises(HSpecError, match="mask_token_id"):
        read_weights(golden.raw | {"mask_token_id": token}, golden.weights(), golden.drafter.config, "a folder")


# -- folders, joined to a target ---------------------------------------------------------------------------------


@pytest.fixture
def folder(golden: GoldenCase, tmp_path: Path) -> Path:
    return write(tmp_path / "theirs", golden.raw, golden.weights())


def test_loading_gives_the_golden_numbers(golden: GoldenCase, folder: Path, target8: Target) -> None:
    with pytest.warns(UserWarning, match="another embedding than tiny-qwen3's"):
        drafter = load_drafter(folder, target8)
    hidden = drafter.backbone(golden.context([30]), 8)[0, 0]
    assert torch.allclose(hidden, golden.expected(30, "hidden"), atol=1e-4)
    assert torch.allclose(drafter.base_logits(hidden), golden.expected(30, "base_logits"), atol=1e-4)
    assert not drafter.training and not any(p.requires_grad for p in drafter.parameters())


def joined(golden: GoldenCase, folder: Path, target: Target, change: Callable[[dict[str, Tensor]], Any]) -> ParallelDrafter:
    """Load the golden drafter with the target's own embedding, changed."""
    weights = golden.weights() | {"embed_tokens.weight": target.embedding_weight.clone()}
    change(weights)
    write(folder, golden.raw, weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_drafter(folder, target)


def test_embedding_of_the_target_is_shared(golden: GoldenCase, folder: Path, target8: Target) -> None:
    """Even if the mask row differs, or rounding to bf16 does."""

    def change(weights: dict[str, Tensor]) -> None:
        weights["embed_tokens.weight"][209] = 0.5
        weights["embed_tokens.weight"] = weights["embed_tokens.weight"].bfloat16()

    drafter = joined(golden, folder, target8, change)
    assert drafter.embedding.data_ptr() == target8.embedding_weight.data_ptr()
    assert torch.equal(drafter.mask_embedding, torch.full((64,), 0.5))


def test_without_embedding_the_mask_row_is_the_targets(golden: GoldenCase, folder: Path, target8: Target) -> None:
    drafter = joined(golden, folder, target8, lambda w: w.pop("embed_tokens.weight"))
    assert torch.equal(drafter.mask_embedding, target8.embedding_weight[209])


def test_without_embedding_a_dead_mask_row_is_refused(golden: GoldenCase, folder: Path) -> None:
    target = tiny_target("qwen3", layers=LAYERS)
    target.embedding_weight[209] = 0.0
    with pytest.raises(UsageError, match="zeros for its mask token 209"):
        joined(golden, folder, target, lambda w: w.pop("embed_tokens.weight"))


def test_proposes_on_a_real_cache(golden: GoldenCase, folder: Path, target8: Target) -> None:
    drafter = joined(golden, folder, target8, lambda w: None)
    cache = target8.new_cache(1, 60)
    taps = target8.prefill(torch.arange(3, 50)[None], cache, drafter.taps).taps
    draft = drafter.propose(DraftContext(torch.tensor([[9]]), torch.tensor([[47]]), taps, cache.view()), 7)
    assert draft.tokens.shape == (1, 7)
    assert set(draft.tokens[0].tolist()) <= set(drafter.draft_ids.tolist())


def test_shards(golden: GoldenCase, folder: Path, target8: Target) -> None:
    weights = golden.weights()
    names = sorted(weights)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    (folder / "model.safetensors").unlink()
    for file, some in parts.items():
        save_file({name: weights[name].contiguous() for name in some}, folder / file)
    index = {"weight_map": {name: file for file, some in parts.items() for name in some}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert read_speculators(folder, LAYERS).weights.keys() == golden.drafter.state_dict().keys()
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(HSpecError, match=r"has no model-00002-of-00002\.safetensors"):
        load_drafter(folder, target8)


def test_index_may_not_leave_the_folder(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../elsewhere.safetensors"}}))
    with pytest.raises(HSpecError, match="outside of the drafter's folder"):
        read_speculators(folder, LAYERS)


def test_truncated_file(folder: Path, target8: Target) -> None:
    path = folder / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(HSpecError, match=r"model.safetensors is damaged or cut short"):
        load_drafter(folder, target8)


def test_weights_that_are_not_finite(golden: GoldenCase, folder: Path, target8: Target) -> None:
    weights = golden.weights()
    weights["fc.weight"] = weights["fc.weight"] * float("nan")
    write(folder, golden.raw, weights)
    with pytest.warns(UserWarning), pytest.raises(HSpecError, match="not finite"):
        load_drafter(folder, target8)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layers": 7}, "kv_layers|last layer's output"),
        ({"hidden": 96, "layers": LAYERS}, "hidden_size 64.*hidden_size 96"),
        ({"vocab": 220, "layers": LAYERS}, "vocab_size 211.*vocab_size 220"),
        ({"kv_heads": 4, "layers": LAYERS}, "K/V of 2 heads x 16"),
    ],
)
def test_target_of_another_shape(folder: Path, other: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_drafter(folder, tiny_target("qwen3", **other))  # type: ignore[arg-type]


def test_configuration_alone_is_not_enough(folder: Path) -> None:
    assert is_authors(RAW["A"])
    with pytest.raises(UsageError, match=r"layout of speculators.*load it with its target"):
        read_config(folder)


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no drafter at"):
        read_speculators(tmp_path / "nowhere", LAYERS)


def test_unknown_type(tmp_path: Path, target8: Target) -> None:
    folder = write(tmp_path / "other", {"speculators_model_type": "mtp"}, {})
    with pytest.raises(
        UsageError, match=r"the type 'mtp'; of the layout of speculators mamba_attn_hybrid, dflash, .* can be read"
    ):
        load_drafter(folder, target8)


def test_our_own_configuration_is_not_theirs(golden: GoldenCase) -> None:
    config: ParallelConfig = golden.drafter.config
    assert not is_authors(config.model_dump())


# -- writing -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["A", "B"])
def test_golden_checkpoints_come_back(case: str, tmp_path: Path, target8: Target) -> None:
    """Read and written: every tensor in every bit, and every key that is read."""
    golden = load_case(case)
    write_authors(golden.drafter, target8, tmp_path / "out", golden.raw["mask_token_id"])
    written = load_file(tmp_path / "out" / "model.safetensors")
    stored = golden.weights()
    assert written.keys() == stored.keys() - {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert all(torch.equal(tensor, stored[name]) and tensor.dtype == stored[name].dtype for name, tensor in written.items())
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    anyhow = {"transformer_layer_config", "speculators_config"}
    assert {k: v for k, v in raw.items() if k not in anyhow} == {k: golden.raw[k] for k in raw if k not in anyhow}
    nested = raw["transformer_layer_config"]
    assert nested == {k: golden.raw["transformer_layer_config"][k] for k in nested}
    proposal, theirs = raw["speculators_config"], golden.raw["speculators_config"]
    assert {**proposal, "verifier": None} == {**theirs, "verifier": None}
    assert proposal["verifier"] == {"name_or_path": "an unnamed target", "architectures": ["Qwen3ForCausalLM"]}
    unwritten = {k: v for k, v in golden.raw.items() if k not in raw and v not in (None, False, 0)}
    assert unwritten.keys() <= {  # how it was trained
        "agg_mode", "auto_map", "init_k_norm", "init_kv_proj", "init_q_norm", "init_q_proj", "mamba_expand", "max_anchors",
        "trainable_kv_proj", "trainable_q_proj", "transformers_version", "verifier_layer_prefix",
    }  # fmt: skip


HYBRID = ["mamba", "mlp", "mamba", "attention", "mlp", "attention", "mlp"]
OURS: list[dict[str, Any]] = [
    {},
    {"seed_mode": "per_layer"},
    {"seed_mode": "once", "fusion_norm": True},
    {"use_state": False, "method": "hspec-no-state"},
    {"context": "none", "method": "hspec-no-kv"},
    {"window": None, "causal": False},
    {"causal": False},
    {"qk_norm": False},
    {"markov_rank": 0, "confidence_head": False, "confidence_with_markov": False},
    {"confidence_with_markov": False, "block_size": 17},
    {"draft_vocab": 211},
    {"mask_token_id": 5},
    {"pattern": ["mamba", "mlp"], "attention": None, "method": "mamba-only"},
    {"pattern": ["attention", "mlp"], "mamba": None, "use_state": False, "method": "attention-only"},
]


def ours(target: Target, fields: dict[str, Any]) -> ParallelDrafter:
    """A random drafter; ``causal`` and ``qk_norm`` are its attention's, the rest goes to :func:`tests.tiny.tiny_config`."""
    fields = {"pattern": HYBRID, "rms_norm_eps": 1e-5} | fields
    causal, qk_norm = fields.pop("causal", True), fields.pop("qk_norm", True)
    config, update = tiny_config(target, **fields), {}
    if config.attention is not None:
        rope = [{"rope_type": "default", "rope_theta": 10.0**i, "partial_rotary_factor": 0.5} for i in range(2, 4)]
        changed = {"causal_block": causal, "qk_norm": qk_norm, "rope": rope[: len(config.attention.rope)]}
        update["attention"] = config.attention.model_copy(update=changed).model_dump()
    return tiny_drafter(target, 4, ParallelConfig.model_validate({**config.model_dump(), **update}))


@pytest.mark.parametrize("fields", OURS)
def test_what_is_written_is_read_again(target8: Target, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Bit for bit, but for the hashes of the target; a mask that is the target's row comes back as a vector of its own."""
    drafter = ours(target8, dict(fields))
    write_authors(drafter, target8, tmp_path / "out", 209)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_drafter(tmp_path / "out", target8)
    target = drafter.config.target.model_copy(update={"weight_hash": None, "template_hash": None})
    assert again.config == drafter.config.model_copy(update={"target": target, "mask_token_id": None})
    assert again.state_dict().keys() == drafter.state_dict().keys() | {"mask_embedding"}
    for name, weight in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    for name in ("head", "draft_ids", "mask_embedding", "embedding"):
        assert torch.equal(getattr(again, name), getattr(drafter, name)), name
    stored = load_file(tmp_path / "out" / "model.safetensors")["embed_tokens.weight"]
    assert torch.equal(stored[209], drafter.mask_embedding)
    assert torch.equal(stored[:209], target8.embedding_weight[:209])


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"convolution": {"group": 16}}, ["its convolution"]),
        ({"head": {"kind": "gru", "size": 8, "rank": 4}, "confidence_with_markov": False}, ["its causal head (gru;"]),
        ({"head": {"kind": "markov", "rank": 4, "variant": "gated"}}, ["its causal head (gated;"]),
        ({"context": "features"}, ["attention.context: features"]),
        ({"sample_from_anchor": True}, ["sample_from_anchor"]),
        ({"fusion_rank": 32}, ["fusion_rank 32"]),
        ({"taps": [1, 8]}, ["its tap 8, the target's last output"]),
        ({"window": None}, ["causal blocks without a window"]),
        ({"window": [4, None], "causal": False}, ["different windows"]),
        ({"convolution": {"group": 16}, "sample_from_anchor": True}, ["its convolution", "sample_from_anchor"]),
    ],
)
def test_what_has_no_place_is_named(target8: Target, tmp_path: Path, fields: dict[str, Any], reasons: list[str]) -> None:
    drafter = ours(target8, dict(fields))
    with pytest.raises(UsageError, match="cannot be written as mamba_attn_hybrid, the authors' layout") as caught:
        write_authors(drafter, target8, tmp_path / "out", 209)
    assert all(reason in str(caught.value) for reason in reasons), caught.value
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("token", [None, 211])
def test_a_mask_token_must_be_named(target8: Target, tmp_path: Path, token: int | None) -> None:
    with pytest.raises(UsageError, match=r"names none .* below 211 that never occurs in text"):
        write_authors(ours(target8, {}), target8, tmp_path / "out", token)
