"""A drafter's shape for any target, from its own sizes, a preset or a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import Gemma3TextConfig, LlamaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from hspec.drafters.config import ParallelConfig
from hspec.drafters.presets import PRESETS
from hspec.errors import UsageError
from hspec.targets.target import Target
from hspec.training.initialise import initialise
from hspec.training.shape import choose_shape, default_taps, layer_rope, preset_for
from tests.tiny import tiny_target

SIZES: dict[str, Any] = {
    "vocab_size": 70_000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 2,
}  # fmt: skip
CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 77_000.0}),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=40),
    "mistral": MistralConfig(**SIZES, sliding_window=100),
    "gemma3_text": Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=128),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_every_family_gets_a_drafter_of_its_own_sizes(family: str) -> None:
    target = CONFIGS[family]
    config = choose_shape("auto", "it", target)
    assert (config.target.name, config.target.family) == ("it", family)
    assert (config.hidden_size, config.target.vocab_size, config.target.layers) == (256, 70_000, 12)
    assert config.attention is not None and config.mamba is not None
    assert (config.attention.heads, config.attention.kv_heads) == (8, 2)
    assert config.attention.head_dim == {"qwen3": 40, "gemma3_text": 64}.get(family, 32)
    assert config.mamba.inner == 256
    assert config.attention.rope == [layer_rope(target, layer) for layer in config.kv_layers]
    assert config.draft_vocab_size == 32_000 and config.taps == [1, 3, 5, 7, 10]


def test_rope_and_window_are_those_of_the_reused_layers() -> None:
    llama, mistral, gemma = (choose_shape("auto", "it", CONFIGS[f]).attention for f in ("llama", "mistral", "gemma3_text"))
    assert llama is not None and mistral is not None and gemma is not None
    assert [r["rope_theta"] for r in llama.rope] == [77_000.0] * 2 and llama.window == 2048
    assert mistral.window == 100  # never more than the target itself sees there
    config = choose_shape("auto", "it", CONFIGS["gemma3_text"])
    assert config.kv_layers == [5, 11]  # of Gemma's layers, every sixth has full attention
    assert gemma.window == 2048 and [r["rope_theta"] for r in gemma.rope] == [1_000_000.0] * 2


@pytest.mark.parametrize(
    ("layers", "taps"), [(36, [1, 9, 17, 25, 34]), (32, [1, 8, 15, 22, 30]), (4, [1, 2]), (1, [0]), (2, [1])]
)
def test_taps(layers: int, taps: list[int]) -> None:
    assert default_taps(layers) == taps


@pytest.mark.parametrize("layers", [1, 2, 3, 5])
def test_targets_of_few_layers_and_odd_sizes(layers: int) -> None:
    target = tiny_target(layers=layers, hidden=40, heads=5, kv_heads=1, head_dim=6)
    config = preset_for(target.config, target.name)
    drafter = initialise(config, target, torch.arange(config.draft_vocab_size), 0)
    assert drafter.max_draft == 4 and config.draft_vocab_size == 211


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_made_drafter_starts_from_the_targets_layers(family: str) -> None:
    target = tiny_target(family)  # type: ignore[arg-type]
    config = preset_for(target.config, target.name)
    drafter = initialise(config, target, torch.arange(config.draft_vocab_size), 0)
    attention = drafter.layers[config.pattern.index("attention")]
    weights = target.layer_weights(config.kv_layers[0])
    assert torch.equal(attention.q_proj.weight, weights["self_attn.q_proj.weight"])
    mlp = drafter.layers[config.pattern.index("attention") + 1]
    assert torch.equal(mlp.up_proj.weight, weights["mlp.up_proj.weight"])


@pytest.mark.parametrize("method", ["attention-only", "mamba-only"])
def test_a_widened_mlp_begins_as_the_targets(method: str) -> None:
    """An ablation that widens must not begin behind one that does not."""
    target = tiny_target()
    base = preset_for(target.config, target.name)
    config = choose_shape("auto", target.name, target.config, method)
    assert isinstance(config, ParallelConfig) and config.intermediate_size > base.intermediate_size
    drafter = initialise(config, target, torch.arange(config.draft_vocab_size), 0)
    whole = initialise(base, target, torch.arange(base.draft_vocab_size), 0)
    x = torch.randn(2, 3, config.hidden_size, generator=torch.Generator().manual_seed(0))
    wide, plain = drafter.layers[config.pattern.index("mlp")], whole.layers[base.pattern.index("mlp")]
    torch.testing.assert_close(wide(x), plain(x))
    wide(x).sum().backward()
    units = wide.down_proj.weight.grad[:, base.intermediate_size :]
    assert (units != 0).all()  # they can learn


def gemma(layers: int = 3) -> Target:
    from transformers import Gemma3ForCausalLM

    from hspec.targets.template import ChatTemplate
    from tests.tiny import randomise, tiny_tokenizer

    config = Gemma3TextConfig(
        vocab_size=211, hidden_size=48, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, eos_token_id=0, pad_token_id=None, bos_token_id=None,
    )  # fmt: skip
    model = Gemma3ForCausalLM(config)
    randomise(model, 0)
    return Target(model, ChatTemplate(tiny_tokenizer()), "tiny-gemma").prepare()


def test_gemmas_norms_are_stored_less_one() -> None:
    target = gemma()
    config = preset_for(target.config, target.name)
    drafter = initialise(config, target, torch.arange(config.draft_vocab_size), 0)
    index = config.pattern.index("attention")
    weights = target.layer_weights(config.kv_layers[0])
    assert torch.allclose(drafter.norms[index].weight, weights["input_layernorm.weight"] + 1)
    assert torch.allclose(drafter.layers[index].k_norm.weight, weights["self_attn.k_norm.weight"] + 1)
    assert torch.allclose(drafter.norms[index + 1].weight, weights["pre_feedforward_layernorm.weight"] + 1)


def test_a_known_target_gets_its_preset() -> None:
    c = PRESETS["qwen3-8b"]
    known = Qwen3Config(
        vocab_size=c.target.vocab_size, hidden_size=4096, intermediate_size=12288, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
        rope_parameters={"rope_type": "default", "rope_theta": 5_000_000.0},
    )  # fmt: skip
    for name in ("auto", "qwen3-8b"):
        config = choose_shape(name, "mine", known)
        assert config.pattern == c.pattern and config.fusion_rank == 4096 and config.target.name == "mine"
        assert config.attention is not None
        assert [r["rope_theta"] for r in config.attention.rope] == [5_000_000.0] * 3  # as the target really has it
    with pytest.raises(UsageError, match=r"preset qwen3-4b is for Qwen/Qwen3-4B, not for mine \(hidden size 2560 against 4096"):
        choose_shape("qwen3-4b", "mine", known)


def test_a_file_changes_what_it_names(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    changes = {"pattern": ["mamba", "attention", "mlp", "attention", "attention"], "block_size": 9, "mamba": {"state_dim": 8}}
    path.write_text(yaml.safe_dump({**changes, "attention": {"window": None}, "head": {"kind": "markov", "rank": 3}}))
    config = choose_shape(str(path), "it", CONFIGS["llama"])
    assert config.pattern == changes["pattern"] and config.max_draft == 8 and config.markov_rank == 3
    assert config.mamba is not None and (config.mamba.state_dim, config.mamba.heads) == (8, 4)
    assert config.attention is not None and config.attention.window is None
    assert config.kv_layers == [5, 7, 10] and len(config.attention.rope) == 3
    path.write_text("taps: [2, 4]\n")
    assert choose_shape(str(path), "it", CONFIGS["llama"]).kv_layers == [2, 4]


def test_a_drafters_own_configuration_is_a_preset(tmp_path: Path) -> None:
    config = preset_for(CONFIGS["llama"], "it", {"head": {"rank": 7}})
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.model_dump()))
    assert choose_shape(str(path), "it", CONFIGS["llama"]) == config
    with pytest.raises(UsageError, match=r"config\.json is for it \(layers 12\), other has 6"):
        choose_shape(str(path), "other", LlamaConfig(**{**SIZES, "num_hidden_layers": 6}))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("blok_size: 4", "unknown key 'blok_size'; known are format, method, target"),
        ("block_size: 40", "block_size: Input should be less than or equal to 17"),
        ("mamba: {heds: 4}", "mamba.heds: unknown key"),
        ("taps: [5, 3]", "taps [5, 3] must ascend"),
        ("kv_layers: [1]", "kv_layers has 1 entries for 2 attention sub-layers"),
        ("kv_layers: [1, 99]", "attention.rope has 1 entries for 2"),
        ("attention: {kv_heads: 4}", "does not fit it: K/V heads 4 against 2"),
        ("hidden_size: 12", "hidden_size 12 must be the target's"),
        ("- a\n- b", "must have keys and values, it is list"),
        ("a: [", "neither YAML nor JSON"),
    ],
)
def test_wrong_files_name_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        choose_shape(str(path), "it", CONFIGS["llama"])
    assert message in str(caught.value) and str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_no_such_preset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no preset 'nope': choose auto, .*smollm2-135m.*or a YAML or JSON file"):
        choose_shape("nope", "it", CONFIGS["llama"])
    with pytest.raises(UsageError, match=r"cannot read the preset .*: No such file or directory"):
        choose_shape(str(tmp_path / "none.yaml"), "it", CONFIGS["llama"])
