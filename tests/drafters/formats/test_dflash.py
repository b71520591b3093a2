"""The types dflash, dspark and dflash2 against the library ``speculators``: the same folder, the same logits.

Compared are, for every drafting slot of blocks behind prefixes of several lengths: logits with what the causal head adds,
confidence logits, and a selector's scores over its candidates; once through all blocks in one pass, as in training, and once
slot by slot, as in decoding. Inputs are random hidden states and tokens.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hspec.drafters.checkpoint import load_drafter
from hspec.drafters.config import ParallelConfig
from hspec.drafters.drafter import Drafter
from hspec.drafters.formats.dflash import dflash_config, weight_names
from hspec.drafters.formats.speculators import write_speculators
from hspec.drafters.heads.selector import PathSelector
from hspec.drafters.parallel import ParallelDrafter
from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from tests.drafters.formats.oracle_case import (
    PREFIXES,
    TOLERANCE,
    decoded,
    difference,
    load_same,
    predicted,
    sequence_for,
    target_of,
)
from tests.drafters.speculators_oracle import (
    MASK_TOKEN,
    TARGET_LAYERS,
    VOCABULARY,
    Kind,
    Oracle,
    make_drafter,
    run,
    save_target,
)
from tests.drafters.speculators_oracle import load_drafter as load_oracle
from tests.tiny import tiny_config, tiny_drafter

FULL, SLIDING, MIXED = ("full",), ("sliding", "sliding"), ("full", "sliding", "full")


def compare(oracle: Oracle, drafter: Drafter | None = None) -> float:
    """Both paths against the library; gives the largest difference of any number.

    Args:
        drafter: by default the oracle's folder, read.
    """
    drafter, sequence = drafter or load_same(oracle), sequence_for(oracle)
    expected = run(oracle, sequence.tokens, sequence.taps, list(PREFIXES))
    logits, confidence = predicted(drafter, sequence, PREFIXES)
    found = [difference(logits, expected.logits)]
    assert (confidence is None) == (expected.confidence is None)
    if confidence is not None:
        found.append(difference(confidence, expected.confidence))
    k = drafter.max_draft
    assert k == expected.logits.shape[1]
    for row, anchor in enumerate(PREFIXES):
        chain = decoded(drafter, sequence, anchor, k)
        if isinstance(drafter.causal, PathSelector):
            assert expected.candidates is not None and expected.scores is not None
            chosen = expected.candidates[row].sort(-1)
            assert torch.equal((chain > -torch.inf).nonzero()[:, 1].view_as(chosen.values), chosen.values)
            found.append(difference(chain.gather(-1, expected.candidates[row]), expected.scores[row]))
        else:
            found.append(difference(chain, expected.logits[row]))
    return max(found)


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("block_size", [3, 5, 8])
@pytest.mark.parametrize("layers", [FULL, SLIDING, MIXED])
@pytest.mark.parametrize("non_causal", [True, False])
def test_layers_windows_and_block_sizes(kind: Kind, block_size: int, layers: Any, non_causal: bool, tmp_path: Path) -> None:
    oracle = make_drafter(
        kind, tmp_path, block_size=block_size, layer_types=layers, sliding_window_non_causal=non_causal, seed=block_size
    )
    assert compare(oracle) < TOLERANCE


@pytest.mark.parametrize("block_size", [3, 8])
@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize(
    ("head", "confidence"),
    # without a Markov head there is none for the confidence head to see: an error in the library too
    [(h, c) for h in ("vanilla", "gated", "rnn", None) for c in ("with Markov", "alone", None) if h or c != "with Markov"],
)
def test_heads_of_dspark(block_size: int, head: str | None, from_anchor: bool, confidence: str | None, tmp_path: Path) -> None:
    oracle = make_drafter(
        "dspark", tmp_path, block_size=block_size, markov_head_type=head or "vanilla", markov_rank=8 if head else 0,
        sample_from_anchor=from_anchor, enable_confidence_head=confidence is not None,
        confidence_head_with_markov=confidence == "with Markov",
    )  # fmt: skip
    assert compare(oracle) < TOLERANCE


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("from_anchor", [True, False, None])
def test_which_slot_drafts(kind: Kind, from_anchor: bool | None, tmp_path: Path) -> None:
    """Left out, each type has a default of its own."""
    fields = {} if from_anchor is None else {"sample_from_anchor": from_anchor}
    assert compare(make_drafter(kind, tmp_path, **fields)) < TOLERANCE


# -- traps of the layout -----------------------------------------------------------------------------------------


ROPES: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "partial, which the library does not honour": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    "nested": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "default", "rope_theta": 5000.0},
    },
}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_rope(rope: str, tmp_path: Path) -> None:
    assert compare(make_drafter("dflash", tmp_path, transformer={"rope_parameters": ROPES[rope]})) < TOLERANCE


def test_layers_of_llama(tmp_path: Path) -> None:
    """Only the configuration is Llama's: norms of queries and keys are there all the same."""
    assert compare(make_drafter("dspark", tmp_path, family="llama")) < TOLERANCE


@pytest.mark.parametrize("drop", [{"use_sliding_window": False}, {"sliding_window": None}])
def test_layer_without_the_window_that_it_names(drop: dict[str, Any], tmp_path: Path) -> None:
    """Layers that say "sliding_attention" see everything, and are bidirectional, if there is no window to slide."""
    oracle = make_drafter("dflash", tmp_path, layer_types=SLIDING, transformer=drop)
    config = load_same(oracle).config
    assert isinstance(config, ParallelConfig) and config.attention is not None
    assert (config.attention.window, config.attention.causal_block) == (None, False)
    assert compare(oracle) < TOLERANCE


@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
def test_keys_left_out_have_the_types_own_defaults(kind: Kind, tmp_path: Path) -> None:
    made = make_drafter(kind, tmp_path, block_size=8)
    path = made.folder / "config.json"
    defaults = {"block_size", "sample_from_anchor", "sliding_window_non_causal", "markov_head_type", "enable_confidence_head"}
    path.write_text(json.dumps({key: value for key, value in made.raw.items() if key not in defaults}))
    oracle = load_oracle(made.folder, made.target_folder)
    attention = dflash_config(oracle.raw, TARGET_LAYERS, None, "here").attention
    assert attention is not None and attention.causal_block == (False if kind == "dflash2" else [False, True])
    assert compare(oracle) < TOLERANCE


def test_head_dim_of_qwen3_when_absent(tmp_path: Path) -> None:
    raw = make_drafter("dflash", tmp_path).raw
    raw["transformer_layer_config"].pop("head_dim")
    assert dflash_config(raw, TARGET_LAYERS, None, "here").attention.head_dim == 128  # type: ignore[union-attr]
    raw["transformer_layer_config"]["model_type"] = "llama"
    assert dflash_config(raw, TARGET_LAYERS, None, "here").attention.head_dim == 16  # type: ignore[union-attr]


@pytest.mark.parametrize("last", [TARGET_LAYERS, TARGET_LAYERS - 1])
def test_tap_of_the_last_output(last: int, tmp_path: Path) -> None:
    """Before the final norm, as here."""
    oracle = make_drafter("dflash", tmp_path, aux_hidden_state_layer_ids=[0, 2, last])
    assert load_same(oracle).config.taps == [0, 2, last]


def test_without_a_verifier_the_target_is_the_given_one(tmp_path: Path) -> None:
    oracle = make_drafter("dflash", tmp_path)
    expected = compare(oracle)
    raw = oracle.raw
    for value in ({"name_or_path": None, "architectures": []}, None):
        raw["speculators_config"]["verifier"] = value
        (oracle.folder / "config.json").write_text(json.dumps(raw))
        drafter = load_same(oracle)
        assert drafter.config.target.name == "an unnamed target" and drafter.config.target.family == "qwen3"
        assert compare(oracle, drafter) == expected


# -- what is refused, and what is damaged ------------------------------------------------------------------------

Change = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def dspark(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_drafter("dspark", tmp_path_factory.mktemp("dspark"), layer_types=("sliding",))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda r: r.update(some_gate=True, mode="x"), UsageError, "some_gate = True, mode = 'x' is not supported"),
        (lambda r: r.update(selector_rank=8), UsageError, "selector_rank = 8 is not supported"),  # another type's
        (lambda r: r.update(markov_head_type="lstm"), UsageError, "'lstm' is not known, vanilla, gated, rnn are"),
        (lambda r: r.update(markov_rank=0), UsageError, "confidence_with_markov needs a Markov head"),
        (lambda r: r.update(block_size=32), UsageError, "block_size: Input should be less than or equal to 17"),
        (lambda r: r["transformer_layer_config"].update(attention_bias=True), UsageError, "attention_bias = True"),
        (lambda r: r["transformer_layer_config"].update(hidden_act="gelu"), UsageError, "hidden_act = 'gelu'"),
        (
            lambda r: r["transformer_layer_config"].update(rope_parameters=ROPES["linear"] | {"partial_rotary_factor": 0.5}),
            UsageError, "partial_rotary_factor = 0.5 of rope_type 'linear' is not supported",
        ),
        (lambda r: r.update(aux_hidden_state_layer_ids=[5, 1]), UsageError, "do not ascend"),
        (lambda r: r.update(aux_hidden_state_layer_ids=[5, 7]), UsageError, r"taps \[5, 7\] must ascend within 0..6"),
        (lambda r: r.update(aux_hidden_state_layer_ids=None), HSpecError, "must be a list of layer numbers, not None"),
        (lambda r: r.update(aux_hidden_state_layer_ids=[]), UsageError, "taps: List should have at least 1 item"),
        (lambda r: r.pop("transformer_layer_config"), HSpecError, "no transformer_layer_config"),
        (lambda r: r["transformer_layer_config"].update(layer_types=["full_attention"] * 2), HSpecError, "cannot be read"),
        (lambda r: r.update(mask_token_id=None), HSpecError, "mask_token_id None is not a token"),
        (lambda r: r.update(mask_token_id=97), HSpecError, "mask_token_id 97 is not a token"),
    ],
)  # fmt: skip
def test_refused(dspark: Oracle, change: Change, error: type[HSpecError], message: str) -> None:
    raw = copy.deepcopy(dspark.raw)
    change(raw)
    with pytest.raises(error, match=message):
        dflash_config(raw, TARGET_LAYERS, None, "here")


def test_pruned_dflash2_is_damaged(tmp_path: Path) -> None:
    raw = make_drafter("dflash2", tmp_path).raw | {"draft_vocab_size": 61}
    with pytest.raises(HSpecError, match="dflash2 drafts the whole vocabulary"):
        dflash_config(raw, TARGET_LAYERS, None, "here")


def with_weights(oracle: Oracle, place: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    place.mkdir()
    tensors = oracle.tensors
    change(tensors)
    save_file(tensors, place / "model.safetensors")
    (place / "config.json").write_text(json.dumps(oracle.raw))
    return place


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda w: [w.pop("fc.weight"), w.pop("layers.0.mlp.up_proj.weight"), w.update(bias=torch.ones(1))],
            "fc.weight is missing; layers.0.mlp.up_proj.weight is missing; bias is not expected",
        ),
        (lambda w: w.update({"norm.weight": torch.ones(63)}), r"norm.weight is \[63\], its config.json asks for \[64\]"),
        (lambda w: w.pop("lm_head.weight"), "lm_head.weight is missing"),
        (lambda w: w.pop("d2t"), "has no d2t for its draft vocabulary of 61 in 97"),
        (lambda w: w.update(t2d=~w["t2d"]), "t2d and d2t name different"),
        (lambda w: w["fc.weight"].fill_(float("nan")), "fusion.fc.weight has values that are not finite"),
        (lambda w: w.update({"embed_tokens.weight": torch.randn(97, 64)}), "another embed_tokens.weight than"),
    ],
)
def test_weights_that_do_not_fit(
    dspark: Oracle, tmp_path: Path, change: Callable[[dict[str, Tensor]], Any], message: str
) -> None:
    folder = with_weights(dspark, tmp_path / "changed", change)
    with pytest.raises(HSpecError, match=message):
        load_drafter(folder, target_of(dspark.target_folder))


def test_what_is_the_targets_may_be_stored(tmp_path: Path) -> None:
    """Older versions of the library stored the embedding."""
    oracle = make_drafter("dflash", tmp_path, draft_vocabulary=VOCABULARY)
    target = target_of(oracle.target_folder)
    shared = {"embed_tokens.weight": target.embedding_weight.bfloat16(), "lm_head.weight": target.head_weight.bfloat16()}
    drafter = load_drafter(with_weights(oracle, tmp_path / "more", lambda w: w.update(shared)), target)
    assert drafter.embedding is target.embedding_weight or torch.equal(drafter.embedding, target.embedding_weight)
    assert torch.equal(drafter.head, target.head_weight)
    other = {"lm_head.weight": torch.randn(97, 64)}
    with pytest.raises(UsageError, match=r"another lm_head.weight than .* servers take what is stored"):
        load_drafter(with_weights(oracle, tmp_path / "other", lambda w: w.update(other)), target)


# -- writing -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target_of(save_target(tmp_path_factory.mktemp("target"), "qwen3", 9))


def own(target: Target, seed: int = 3, attention: dict[str, Any] | None = None, **fields: Any) -> ParallelDrafter:
    """A random drafter of this project's that has a place in the layout, unless the fields say otherwise."""
    settings: dict[str, Any] = {
        "method": "dflash", "pattern": ["attention", "mlp"] * 2, "context": "features", "draft_vocab": 61, "markov_rank": 0,
        "mask_token_id": MASK_TOKEN, "mamba": None, "use_state": False, "confidence_head": False,
        "confidence_with_markov": False,
    } | fields  # fmt: skip
    config = tiny_config(target, **settings)
    assert config.attention is not None
    changed = config.attention.model_copy(update={"window": 6, "causal_block": False} | (attention or {}))
    return tiny_drafter(target, seed, ParallelConfig.model_validate({**config.model_dump(), "attention": changed.model_dump()}))


DSPARK = {"method": "dspark", "head": {"kind": "markov", "rank": 8}}
DFLASH2 = {
    "method": "dflash2", "draft_vocab": VOCABULARY, "head": {"kind": "selector", "rank": 8, "candidates": 5},
    "convolution": {"kernel": 2, "group": 16},
}  # fmt: skip
CONFIDENT = {"confidence_head": True, "confidence_with_markov": True}
OURS: list[dict[str, Any]] = [
    {},
    {"draft_vocab": VOCABULARY, "sample_from_anchor": True},
    {"attention": {"window": None}, "taps": [0, 4, TARGET_LAYERS]},
    {"attention": {"causal_block": True}, "block_size": 3},
    {"attention": {"window": [None, 5], "causal_block": [False, True]}, "block_size": 8},
    {"attention": {"window": [5, None]}},
    DSPARK | CONFIDENT | {"sample_from_anchor": True},
    DSPARK | CONFIDENT | {"confidence_with_markov": False},
    DSPARK | {"head": {"kind": "markov", "rank": 8, "variant": "gated"}},
    DSPARK | {"head": {"kind": "markov", "rank": 8, "variant": "recurrent"}},
    DSPARK | {"head": None, "confidence_head": True},
    DFLASH2,
    DFLASH2 | {"convolution": {"kernel": 3, "group": 8}, "sample_from_anchor": True},
]


@pytest.mark.parametrize("fields", OURS)
def test_the_library_reads_what_is_written(target: Target, tmp_path: Path, fields: dict[str, Any]) -> None:
    """By its own loader, every tensor; its logits are those of the drafter that was written."""
    drafter = own(target, **copy.deepcopy(fields))
    write_speculators(drafter, target, tmp_path / "out")
    oracle = load_oracle(tmp_path / "out", Path(target.name))
    assert oracle.kind == drafter.config.method and compare(oracle, drafter) < TOLERANCE
    assert oracle.raw["architectures"] == [type(oracle.model).__name__]
    state = oracle.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in oracle.tensors.items())
    of_the_target = {"embed_tokens.weight", "lm_head.weight", "verifier_lm_head.weight", "verifier_norm.weight"}
    assert state.keys() - oracle.tensors.keys() <= of_the_target
    assert not any(tensor.isnan().any() for tensor in state.values())
    proposal = oracle.model.config.speculators_config
    assert proposal.proposal_methods[0].speculative_tokens == drafter.max_draft and proposal.algorithm == oracle.kind
    assert proposal.verifier.name_or_path == target.name and proposal.verifier.architectures == ["Qwen3ForCausalLM"]
    assert {"sample_from_anchor", "sliding_window_non_causal", "mask_token_id"} <= oracle.raw.keys()


@pytest.mark.parametrize("fields", OURS)
def test_what_is_written_is_read_again(target: Target, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Bit for bit, but for where training began and for the hashes of the target, which the layout does not have."""
    drafter = own(target, **copy.deepcopy(fields))
    write_speculators(drafter, target, tmp_path / "out")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_drafter(tmp_path / "out", target)
    lost = {"weight_hash": None, "template_hash": None}
    kept = {"kv_layers": again.config.kv_layers, "target": drafter.config.target.model_copy(update=lost)}  # type: ignore[attr-defined]
    assert again.config == drafter.config.model_copy(update=kept)
    assert again.state_dict().keys() == drafter.state_dict().keys() and "mask_embedding" not in again.state_dict()
    for name, weight in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    for name in ("head", "draft_ids", "mask_embedding", "embedding"):
        assert torch.equal(getattr(again, name), getattr(drafter, name)), name


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("dflash", {"layer_types": MIXED, "sample_from_anchor": True}),
        ("dspark", {"layer_types": SLIDING, "markov_head_type": "rnn", "sliding_window_non_causal": True}),
        ("dspark", {"layer_types": FULL, "markov_head_type": "gated", "sliding_window_non_causal": True}),
        ("dflash2", {"layer_types": MIXED, "sliding_window_non_causal": False}),
    ],
)
def test_the_librarys_own_comes_back(kind: Kind, fields: dict[str, Any], tmp_path: Path) -> None:
    """Read and written: the same tensors in every bit, and the same configuration in the library's eyes."""
    oracle = make_drafter(kind, tmp_path, **fields)
    drafter = load_same(oracle)
    write_speculators(drafter, target_of(oracle.target_folder), tmp_path / "out")
    again = load_oracle(tmp_path / "out", oracle.target_folder)
    assert again.tensors.keys() == oracle.tensors.keys()
    assert all(torch.equal(tensor, oracle.tensors[name]) for name, tensor in again.tensors.items())
    one, other = (o.model.config.to_dict() for o in (oracle, again))
    without = ("architectures", "dtype", "auto_map", "_name_or_path")  # not read; ours are the class's name
    assert {k: v for k, v in one.items() if k not in (*without, "transformer_layer_config")} == {
        k: v for k, v in other.items() if k not in (*without, "transformer_layer_config")
    }
    nested = [o.model.config.transformer_layer_config.to_dict() for o in (oracle, again)]
    differs = {k for k in nested[0].keys() | nested[1].keys() if nested[0].get(k) != nested[1].get(k)}
    assert differs <= {"eos_token_id", "max_window_layers", "use_sliding_window", "dtype", "_name_or_path"}


def test_frozen_mask_embedding(target: Target) -> None:
    """A drafter that is trained for this layout: nothing of the mask is trained, or stored."""
    drafter = own(target)
    assert "mask_embedding" not in dict(drafter.named_parameters()) and "mask_embedding" not in drafter.state_dict()
    assert torch.equal(drafter.mask_embedding, target.embedding_weight[MASK_TOKEN])
    free = own(target, mask_token_id=None)
    assert "mask_embedding" in dict(free.named_parameters())
    assert sum(p.numel() for p in free.parameters()) == sum(p.numel() for p in drafter.parameters()) + 64


def test_a_free_mask_embedding_may_be_a_tokens(target: Target, tmp_path: Path) -> None:
    drafter = own(target, mask_token_id=None)
    with pytest.raises(UsageError, match=r"a mask embedding of its own .* train with mask_token_id set"):
        write_speculators(drafter, target, tmp_path / "out")
    with pytest.raises(UsageError, match="a mask embedding of its own"):
        write_speculators(drafter, target, tmp_path / "out", 7)
    drafter.mask_embedding.copy_(target.embedding_weight[7])
    write_speculators(drafter, target, tmp_path / "out", 7)
    assert compare(load_oracle(tmp_path / "out", Path(target.name)), drafter) < TOLERANCE


@pytest.mark.parametrize(
    ("fields", "reasons"),
    [
        ({"fusion_norm": True}, ["a norm of each tap before the fusion (fusion_norm)"]),
        ({"pattern": ["attention", "mlp", "mlp"]}, ["its pattern (attention mlp mlp; they"]),
        ({"context": "target"}, ["attention.context: target"]),
        ({"context": "none"}, ["attention.context: none"]),
        ({"head": {"kind": "gru", "size": 8, "rank": 4}}, ["its causal head (gru;"]),
        ({"head": {"kind": "latent"}}, ["its causal head (latent;"]),
        ({"attention": {"window": None, "causal_block": True}}, ["causal blocks without a window"]),
        ({"attention": {"window": [5, 6]}}, ["layers with different windows"]),
        ({"attention": {"causal_block": [True, False]}}, ["layers with different windows, or of which some are causal"]),
        ({"attention": {"qk_norm": False}}, ["queries and keys without a norm"]),
        (
            {"attention": {"rope": [{"rope_theta": 1.5}, {"rope_theta": 2.5, "partial_rotary_factor": 0.5}]}},
            ["layers with different RoPE parameters", "a partial rotation"],
        ),
        (DFLASH2 | {"draft_vocab": 61}, ["over part of the vocabulary (draft_vocab_size 61)"]),
        (DFLASH2 | {"convolution": None}, ["without convolution"]),
        (DSPARK | {"convolution": {"group": 16}}, ["or one without the other", "over part of the vocabulary"]),
        (DFLASH2 | {"confidence_head": True}, ["a confidence head on a path selector"]),
        (
            {"fusion_norm": True, "mask_token_id": None, "attention": {"qk_norm": False}},
            ["fusion_norm", "qk_norm", "a mask embedding of its own"],
        ),
    ],
)
def test_what_has_no_place_is_named(target: Target, tmp_path: Path, fields: dict[str, Any], reasons: list[str]) -> None:
    """All reasons at once, and nothing is written."""
    drafter = own(target, **copy.deepcopy(fields))
    with pytest.raises(UsageError, match=r"cannot be written as .* of speculators") as caught:
        write_speculators(drafter, target, tmp_path / "out")
    assert all(reason in str(caught.value) for reason in reasons), caught.value
    assert list(tmp_path.iterdir()) == []


def test_vocabulary_other_than_the_targets_is_refused(target: Target, tmp_path: Path) -> None:
    drafter = own(target, draft_vocab=VOCABULARY)
    drafter.embedding, drafter.head = drafter.embedding.flip(0), drafter.head.flip(0)
    with pytest.raises(UsageError, match="an embedding other than the target's; an LM head over the whole vocabulary other"):
        write_speculators(drafter, target, tmp_path / "out")


def test_every_weight_has_a_name(target: Target) -> None:
    for fields in OURS:
        drafter = own(target, **copy.deepcopy(fields))
        assert sorted(weight_names(drafter.config).values()) == sorted(drafter.state_dict())


def test_mask_token_outside_of_the_vocabulary(target: Target) -> None:
    with pytest.raises(ValueError, match="mask_token_id 97 is not in the target's vocabulary of 97"):
        own(target, mask_token_id=VOCABULARY)
