"""The types eagle3 and peagle against the library ``speculators``: the same folder, the same logits.

Compared are the logits of every step behind prefixes of several lengths, once through all blocks in one pass, as in training,
and once step by step, as in decoding. Inputs are random hidden states and tokens.
"""

from __future__ import annotations

import contextlib
import copy
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from hspec.drafters.checkpoint import build_drafter, load_drafter
from hspec.drafters.config import EagleConfig
from hspec.drafters.convert import convert
from hspec.drafters.drafter import Drafter
from hspec.drafters.formats.eagle import eagle_config, weight_names
from hspec.drafters.formats.speculators import described_config, write_speculators
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
from tests.tiny import randomise, tiny_config

# The library's random drafters have embeddings of their own, as far as it can train them.
pytestmark = pytest.mark.filterwarnings("ignore:.*comes with another embedding")

FULL, SLIDING, MIXED = ("full",), ("sliding",), ("full", "sliding")
WIDE = 40
"""A window that no prefix of the tests fills."""


def compare(oracle: Oracle, drafter: Drafter | None = None, slots: int | None = None) -> float:
    """Both paths against the library; gives the largest difference of any of the first ``slots`` logits."""
    drafter, sequence = drafter or load_same(oracle), sequence_for(oracle)
    k = drafter.max_draft
    expected = run(oracle, sequence.tokens, sequence.taps, list(PREFIXES), k).logits[:, :slots]
    found = [difference(predicted(drafter, sequence, PREFIXES)[0].view(len(PREFIXES), k, -1)[:, :slots], expected)]
    found += [difference(decoded(drafter, sequence, anchor, k)[:slots], expected[row]) for row, anchor in enumerate(PREFIXES)]
    return max(found)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("layers", [FULL, SLIDING, MIXED])
@pytest.mark.parametrize("steps", [3, 5, 8])
def test_layers_and_windows_of_eagle3(family: Any, layers: Any, steps: int, tmp_path: Path) -> None:
    oracle = make_drafter("eagle3", tmp_path, family=family, layer_types=layers, block_size=steps, seed=steps)
    assert compare(oracle) < TOLERANCE


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("layers", [FULL, SLIDING, MIXED])
@pytest.mark.parametrize("steps", [3, 8])
def test_layers_of_peagle(family: Any, layers: Any, steps: int, tmp_path: Path) -> None:
    """A window that a prefix does not fill: it moves with the slot there, and stands still here."""
    oracle = make_drafter("peagle", tmp_path, family=family, layer_types=layers, block_size=steps, window=WIDE)
    warned = pytest.warns(UserWarning, match="moves with the slot") if "sliding" in layers else contextlib.nullcontext()
    with warned:
        drafter = load_same(oracle)
    assert compare(oracle, drafter) < TOLERANCE


@pytest.mark.filterwarnings("ignore:.*moves with the slot")
def test_first_slot_of_peagle_has_the_same_window(tmp_path: Path) -> None:
    oracle = make_drafter("peagle", tmp_path, layer_types=MIXED)
    assert compare(oracle, slots=1) < TOLERANCE < compare(oracle, slots=2)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize(
    "flags",
    [
        {"norm_before_residual": True},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True},
        {"norm_output": True, "norm_before_residual": True},
    ],
)
def test_flags(kind: Kind, flags: dict[str, bool], tmp_path: Path) -> None:
    assert compare(make_drafter(kind, tmp_path, layer_types=("full", "full"), **flags)) < TOLERANCE


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_whole_vocabulary(kind: Kind, tmp_path: Path) -> None:
    oracle = make_drafter(kind, tmp_path, layer_types=FULL, draft_vocabulary=VOCABULARY)
    assert "d2t" not in oracle.tensors and compare(oracle) < TOLERANCE


def rewritten(oracle: Oracle, place: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], Any]) -> Path:
    raw, tensors = oracle.raw, oracle.tensors
    change(raw, tensors)
    place.mkdir()
    (place / "config.json").write_text(json.dumps(raw))
    save_file(tensors, place / "model.safetensors")
    return place


def test_its_own_embedding_wins(tmp_path: Path) -> None:
    made = make_drafter("eagle3", tmp_path, layer_types=FULL)
    other = torch.randn(VOCABULARY, 64)
    folder = rewritten(made, tmp_path / "other", lambda r, w: w.update({"embed_tokens.weight": other}))
    oracle = load_oracle(folder, made.target_folder)
    drafter = load_same(oracle)
    assert torch.equal(drafter.embedding, other) and compare(oracle, drafter) < TOLERANCE


def test_what_the_layout_does_not_say(tmp_path: Path) -> None:
    raw = make_drafter("eagle3", tmp_path, layer_types=FULL).raw
    raw.pop("speculators_config")
    raw["eagle_aux_hidden_state_layer_ids"] = None
    config = eagle_config(raw, 12, "qwen3", "here")
    assert (config.taps, config.max_draft) == ([2, 6, 9], 5)
    assert described_config(raw, "here").method == "eagle3"


# -- what is refused, and what is damaged ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_drafter("eagle3", tmp_path_factory.mktemp("eagle3"), layer_types=FULL, family="llama")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r: r.update(mask_token_id=3), "mask_token_id = 3 is not supported"),  # another type's
        (lambda r: r.update(norm_before_fc=True, fc_norm=True), "exclude each other"),
        (lambda r: r["transformer_layer_config"].update(mlp_bias=True), "mlp_bias = True is not supported"),
        (lambda r: r["transformer_layer_config"].update(attention_bias=True), "attention_bias = True is not supported"),
        (
            lambda r: r["transformer_layer_config"].update(sliding_window=1, layer_types=["sliding_attention"]),
            "sliding_window = 1 is not supported",
        ),
        (lambda r: r.update(eagle_aux_hidden_state_layer_ids=[1, 3, 9]), r"taps \[1, 3, 9\] must ascend within 0..6"),
    ],
)
def test_refused(eagle3: Oracle, change: Callable[[dict[str, Any]], Any], message: str) -> None:
    raw = copy.deepcopy(eagle3.raw)
    change(raw)
    with pytest.raises(UsageError, match=message):
        eagle_config(raw, TARGET_LAYERS, None, "here")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda r, w: w.pop("embed_tokens.weight"), "embed_tokens.weight is missing"),
        (
            lambda r, w: [w.pop("lm_head.weight"), w.pop("layers.0.hidden_norm.weight")],
            "layers.0.hidden_norm.weight is missing; lm_head.weight is missing",
        ),
        (lambda r, w: r.update(norm_before_fc=True), "input_norm.weight is missing"),
    ],
)
def test_damaged(eagle3: Oracle, tmp_path: Path, change: Any, message: str) -> None:
    with pytest.raises(HSpecError, match=message):
        load_drafter(rewritten(eagle3, tmp_path / "changed", change), target_of(eagle3.target_folder))


# -- writing -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return target_of(save_target(tmp_path_factory.mktemp("target"), "qwen3", 9))


def own(target: Target, layers: int = 1, attention: dict[str, Any] | None = None, **fields: Any) -> Drafter:
    like = tiny_config(target, pattern=["attention"] * layers, context="features", window=None, draft_vocab=61)
    assert like.attention is not None
    common = {name: getattr(like, name) for name in ("target", "hidden_size", "intermediate_size", "rms_norm_eps", "taps")}
    values = common | {
        "layers": layers, "block_size": 4, "draft_vocab_size": 61, "kv_layers": like.kv_layers,
        "attention": like.attention.model_copy(update=attention or {}).model_dump(),
    } | fields  # fmt: skip
    config = EagleConfig.model_validate(values | {"target": like.target.model_dump()})
    drafter = build_drafter(config, target, torch.arange(20, 20 + config.draft_vocab_size))
    randomise(drafter, 3)
    return drafter.eval().requires_grad_(False)


OURS: Sequence[dict[str, Any]] = [
    {},
    {"layers": 2, "attention": {"window": [None, 5]}, "norm_before_residual": True},
    {"attention": {"window": 5, "qk_norm": False}, "norm_output": True, "fc_norm": True},
    {"method": "peagle", "norm_before_fc": True},
    {"method": "peagle", "layers": 2, "attention": {"qk_norm": False}, "taps": [0, 2, TARGET_LAYERS]},
]


@pytest.mark.parametrize("fields", OURS)
def test_the_library_reads_what_is_written(target: Target, tmp_path: Path, fields: dict[str, Any]) -> None:
    """By its own loader, every tensor; its logits are those of the drafter that was written."""
    drafter = own(target, **copy.deepcopy(fields))
    write_speculators(drafter, target, tmp_path / "out", MASK_TOKEN)
    oracle = load_oracle(tmp_path / "out", Path(target.name))
    state = oracle.model.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in oracle.tensors.items())
    assert state.keys() - oracle.tensors.keys() == {"verifier_lm_head.weight", "verifier_norm.weight"}
    assert oracle.raw["architectures"] == [type(oracle.model).__name__]
    assert ("mask_token_id" in oracle.raw) == (drafter.config.method == "peagle")
    proposal = oracle.model.config.speculators_config.proposal_methods[0]
    assert proposal.speculative_tokens == drafter.max_draft and compare(oracle, drafter) < TOLERANCE


@pytest.mark.parametrize("fields", OURS)
def test_what_is_written_is_read_again(target: Target, tmp_path: Path, fields: dict[str, Any]) -> None:
    """Bit for bit, but for where training began and for the hashes of the target, which the layout does not have."""
    drafter = own(target, **copy.deepcopy(fields))
    write_speculators(drafter, target, tmp_path / "out", MASK_TOKEN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = load_drafter(tmp_path / "out", target)
    lost = {"weight_hash": None, "template_hash": None}
    kept = {"kv_layers": again.config.kv_layers, "target": drafter.config.target.model_copy(update=lost)}  # type: ignore[attr-defined]
    assert again.config == drafter.config.model_copy(update=kept)
    assert again.state_dict().keys() == drafter.state_dict().keys()
    for name, weight in drafter.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name
    for name in ("head", "draft_ids", "embedding"):
        assert torch.equal(getattr(again, name), getattr(drafter, name)), name
    assert sorted(weight_names(drafter.config).values()) == sorted(drafter.state_dict().keys() - {"mask_embedding"})  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_the_librarys_own_comes_back(kind: Kind, tmp_path: Path) -> None:
    """Read and written, by way of our layout: the same tensors in every bit."""
    oracle = make_drafter(kind, tmp_path, layer_types=("full", "full"), norm_before_residual=True)
    target = target_of(oracle.target_folder)
    drafter = load_drafter(oracle.folder, target)
    write_speculators(drafter, target, tmp_path / "out", MASK_TOKEN if kind == "peagle" else None)
    again = load_oracle(tmp_path / "out", oracle.target_folder)
    assert again.tensors.keys() == oracle.tensors.keys()
    assert all(torch.equal(tensor, oracle.tensors[name]) for name, tensor in again.tensors.items())
    one, other = (o.model.config.to_dict() for o in (oracle, again))
    differs = {k for k in one.keys() | other.keys() if one.get(k) != other.get(k)}
    assert differs <= {"architectures", "dtype", "auto_map", "_name_or_path", "transformer_layer_config"}


def test_converted(target: Target, tmp_path: Path) -> None:
    """By way of our own layout, if the vocabulary is the target's."""
    write_speculators(own(target, method="peagle"), target, tmp_path / "theirs", MASK_TOKEN)
    done = convert(tmp_path / "theirs", tmp_path / "ours", "hspec", target)
    back = convert(tmp_path / "ours", tmp_path / "back", "speculators", target, MASK_TOKEN)
    assert (done.method, done.max_difference, back.max_difference) == ("peagle", 0.0, 0.0)
    assert (tmp_path / "theirs" / "model.safetensors").read_bytes() == (tmp_path / "back" / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layers": 2, "attention": {"window": [4, 5]}}, "layers with different windows"),
        ({"attention": {"causal_block": False}}, "slots that see later ones"),
        ({"attention": {"rope": [{"rope_theta": 5.0, "partial_rotary_factor": 0.5}]}}, "a partial rotation"),
        ({"method": "peagle"}, "names none"),
    ],
)
def test_what_has_no_place_is_named(target: Target, tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        write_speculators(own(target, **copy.deepcopy(fields)), target, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
