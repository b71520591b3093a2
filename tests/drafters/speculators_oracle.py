"""Tiny random drafters of the public library ``speculators``, and what it computes with them: the oracle for ours.

Every number comes out of the library's own forward passes. Those are training passes over many blocks at once; here they run
on chosen blocks, and what they hand to their objective is taken down. docs/speculators-format.md says what they compute.

One convention for all types: ``tokens`` [1, T] and ``taps`` [1, T, F, H] are one sequence, an *anchor* is the position of the
last known token, which the target has not run. ``tokens`` behind it are the block's own previous tokens (the drafted ones, or
the true ones in training). Rows of ``taps`` at an anchor or behind it must not matter, nor tokens behind a block.
"""

from __future__ import annotations

import inspect
import json
import sys
import types
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from loguru import logger
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, Qwen3Config, Qwen3ForCausalLM

# The model classes import one type alias from the library's training data, and with it an HTTP client, a data set library and
# 30 more packages that no model uses.
_training_data = types.ModuleType("speculators.train.data")
_training_data.__dict__["BatchType"] = dict
sys.modules.setdefault("speculators.train.data", _training_data)

import speculators.models.dflash.core as dflash_core  # noqa: E402
import speculators.models.dflash2.core as dflash2_core  # noqa: E402
import speculators.models.dspark.core as dspark_core  # noqa: E402
import speculators.models.eagle3.core as eagle3_core  # noqa: E402
import speculators.models.peagle.core as peagle_core  # noqa: E402
from speculators import SpeculatorModel, SpeculatorsConfig, VerifierConfig  # noqa: E402
from speculators.losses import resolve_loss_config  # noqa: E402
from speculators.models import (  # noqa: E402
    DFlash2DraftModel,
    DFlash2SpeculatorConfig,
    DFlashDraftModel,
    DFlashSpeculatorConfig,
    DSparkDraftModel,
    DSparkSpeculatorConfig,
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
    PEagleDraftModel,
    PEagleSpeculatorConfig,
)
from speculators.models.eagle3.data import shift_batch  # noqa: E402
from speculators.proposals.greedy import GreedyTokenProposalConfig  # noqa: E402

Kind = Literal["dflash", "dspark", "dflash2", "eagle3", "peagle"]
Family = Literal["qwen3", "llama"]

BLOCKS: tuple[Kind, ...] = ("dflash", "dspark", "dflash2")
CHAINS: tuple[Kind, ...] = ("eagle3", "peagle")
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 64, 4, 2, 16, 96
VOCABULARY, DRAFT_VOCABULARY = 97, 61
MASK_TOKEN = 3
WINDOW = 6
TAPS = (1, 3, 5)
"""Hidden states of the target that a drafter reads: i is the input of decoder layer i."""
TARGET_LAYERS = 6

logger.disable("speculators")

_CORES: dict[str, Any] = {
    "dflash": dflash_core,
    "dspark": dspark_core,
    "dflash2": dflash2_core,
    "eagle3": eagle3_core,
    "peagle": peagle_core,
}
_CLASSES: dict[str, tuple[type, type]] = {
    "dflash": (DFlashSpeculatorConfig, DFlashDraftModel),
    "dspark": (DSparkSpeculatorConfig, DSparkDraftModel),
    "dflash2": (DFlash2SpeculatorConfig, DFlash2DraftModel),
    "eagle3": (Eagle3SpeculatorConfig, Eagle3DraftModel),
    "peagle": (PEagleSpeculatorConfig, PEagleDraftModel),
}


@dataclass
class Oracle:
    """A drafter of the library's, its checkpoint folder, and the target it was made for."""

    kind: Kind
    model: Any
    """The library's own model, loaded from ``folder``, in eval mode."""
    folder: Path
    """``config.json`` and ``model.safetensors`` as the library writes them."""
    target_folder: Path
    """A small real target of transformers. DFlash types keep no embedding of their own: it is this one's."""

    @property
    def raw(self) -> dict[str, Any]:
        """The checkpoint's config.json."""
        raw: dict[str, Any] = json.loads((self.folder / "config.json").read_text(encoding="utf-8"))
        return raw

    @property
    def tensors(self) -> dict[str, Tensor]:
        """What the checkpoint stores."""
        return load_file(self.folder / "model.safetensors")

    @property
    def draft_ids(self) -> Tensor:
        """The target's id of every draft id, [Vd]."""
        offsets = self.model.d2t
        ids = torch.arange(self.model.draft_vocab_size)
        return ids if offsets is None else ids + offsets

    @property
    def embedding(self) -> Tensor:
        """Of the input tokens, [V, H]; from the checkpoint where it has one, else from the target."""
        return self.model.embed_tokens.weight.detach()

    @property
    def head(self) -> Tensor:
        """Of the draft vocabulary, [Vd, H]; from the checkpoint where it has one, else from the target."""
        return self.model.lm_head.weight.detach()

    @property
    def block_size(self) -> int:
        """Slots of a block; a DFlash type's forward has no other than its configuration's."""
        return int(self.model.block_size)

    @property
    def first_slot(self) -> int:
        """The first slot of a block that drafts."""
        return 0 if self.kind in CHAINS or self.model.config.sample_from_anchor else 1


@dataclass
class Output:
    """What the library computed, one row of blocks per anchor: A anchors, S slots (or steps, or depths)."""

    logits: Tensor
    """[A, S, Vd], with everything that the type adds to them (not the selector of dflash2)."""
    hidden: Tensor | None = None
    """[A, S, H] after the final norm."""
    base_logits: Tensor | None = None
    """[A, S, Vd] before the Markov head."""
    confidence: Tensor | None = None
    """[A, S], before the sigmoid."""
    candidates: Tensor | None = None
    """[A, S, K]: draft ids of the best unary logits, best first (dflash2)."""
    scores: Tensor | None = None
    """[A, S, K]: of the candidates, with the selector's (dflash2)."""
    targets: Tensor | None = None
    """[A, S, Vd]: the target's logits that the slot is trained towards; of zeros unless ``last_hidden`` was given."""
    loss: Tensor | None = None
    """The library's own objective, every position of the sequence supervised: over these blocks; eagle3: over all rows;
    peagle: over all rows of depth 0 and the deeper ones of the anchors."""


def make_drafter(
    kind: Kind,
    folder: Path,
    *,
    seed: int = 0,
    family: Family = "qwen3",
    layer_types: Sequence[Literal["full", "sliding"]] = ("full", "sliding"),
    window: int | None = WINDOW,
    block_size: int = 5,
    draft_vocabulary: int | None = None,
    transformer: dict[str, Any] | None = None,
    **fields: Any,
) -> Oracle:
    """Build, save and load again a drafter with random weights; the same arguments give the same weights.

    Args:
        folder: gets ``drafter`` and ``target``.
        block_size: slots of the DFlash types; steps of the proposal of the others.
        draft_vocabulary: the default is smaller than the target's, but for dflash2, which has no other.
        transformer: further fields of the drafter's transformers configuration.
        fields: further fields of the library's configuration class (``markov_head_type``, ``norm_output``, ...).
    """
    if draft_vocabulary is None:
        draft_vocabulary = VOCABULARY if kind == "dflash2" else DRAFT_VOCABULARY
    target_folder = save_target(folder / "target", family, seed + 1)
    config_type, model_type = _CLASSES[kind]
    settings: dict[str, Any] = {
        "transformer_layer_config": _layer_config(family, layer_types, window, transformer or {}),
        "draft_vocab_size": draft_vocabulary,
    }
    if kind in BLOCKS:
        settings |= {"aux_hidden_state_layer_ids": list(TAPS), "mask_token_id": MASK_TOKEN, "block_size": block_size}
    else:
        settings["eagle_aux_hidden_state_layer_ids"] = list(TAPS)
    if kind == "dspark":
        settings["markov_rank"] = 8
    if kind == "dflash2":
        settings |= {"selector_rank": 8, "selector_top_k": 5}
    if kind == "peagle":
        settings["mask_token_id"] = MASK_TOKEN
    settings |= fields
    anchored = settings.get("sample_from_anchor", kind == "dspark") or kind in CHAINS
    settings["speculators_config"] = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=block_size if anchored else block_size - 1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(target_folder)),
    )
    model = model_type(config_type(**settings))
    randomise(model, seed)
    if draft_vocabulary != VOCABULARY:
        model.load_vocab_mappings(*vocabulary_maps(draft_vocabulary, seed + 2))
    model.save_pretrained(folder / "drafter")
    return load_drafter(folder / "drafter", target_folder)


def load_drafter(folder: Path, target_folder: Path, block_size: int | None = None) -> Oracle:
    """A checkpoint of any of the types, by the library's own loader (which reads the target's weights too).

    Args:
        block_size: slots of a block, where they are to be others than the configuration's.
    """
    config: Any = SpeculatorModel.config_class.from_pretrained(str(folder))
    if block_size is not None:
        config.block_size = block_size
    config.transformer_layer_config._attn_implementation = "eager"  # not kept in the file; the default needs a GPU
    model = SpeculatorModel.from_pretrained(str(folder), config=config)
    kind: Kind = config.speculators_model_type
    return Oracle(kind, model.eval().requires_grad_(False), folder, target_folder)


def save_target(folder: Path, family: Family, seed: int) -> Path:
    """A target of transformers with random weights."""
    config_type, model_type = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[family]
    model = model_type(config_type(**_dimensions(), num_hidden_layers=TARGET_LAYERS))
    randomise(model, seed)
    model.save_pretrained(folder)
    return folder


def vocabulary_maps(size: int, seed: int) -> tuple[Tensor, Tensor]:
    """``t2d`` [V] and ``d2t`` [size] of a draft vocabulary drawn at random."""
    ids = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(seed))[:size].sort().values
    mask = torch.zeros(VOCABULARY, dtype=torch.bool)
    mask[ids] = True
    return mask, ids - torch.arange(size)


def make_inputs(length: int, seed: int = 0, taps: int = len(TAPS)) -> tuple[Tensor, Tensor]:
    """Tokens [1, length] and taps [1, length, F, H] of a sequence."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (1, length), generator=generator)
    scale = torch.linspace(0.5, 2.0, taps)[:, None]  # so that the order of the taps shows
    return tokens, scale * torch.randn(1, length, taps, HIDDEN, generator=generator)


def run_blocks(
    oracle: Oracle,
    tokens: Tensor,
    taps: Tensor,
    anchors: Sequence[int],
    *,
    documents: Tensor | None = None,
    last_hidden: Tensor | None = None,
    loss: str = "kl_div",
    **settings: Any,
) -> Output:
    """Blocks of a DFlash type: S = ``oracle.block_size`` slots at the positions from each anchor on.

    Args:
        anchors: ascending positions in the sequence, one block each.
        documents: [1, T], the number of the packed document of each position; positions count from its start.
        last_hidden: [1, T, H], the target's last hidden states before its final norm, for ``targets`` and ``loss``.
        loss: the library's name of a loss, or JSON of names and weights.
        settings: further arguments of the library's forward (``gamma``, ``confidence_head_alpha``, ...).
    """
    if oracle.kind not in BLOCKS:
        raise ValueError(f"{oracle.kind} has no blocks: run_steps")
    if not anchors or list(anchors) != sorted(set(anchors)) or anchors[0] < 0 or anchors[-1] >= tokens.shape[1]:
        raise ValueError(f"anchors must ascend within the sequence, not {list(anchors)}")
    model, A, S = oracle.model, len(anchors), oracle.block_size
    documents = torch.zeros_like(tokens) if documents is None else documents
    # The library takes no anchor from the last block_size positions.
    pad = S + 1
    tokens, documents = functional.pad(tokens, (0, pad)), functional.pad(documents, (0, pad), value=-1)
    taps = functional.pad(taps.flatten(2), (0, 0, 0, pad))
    T = tokens.shape[1]
    last = torch.zeros(1, T, HIDDEN) if last_hidden is None else functional.pad(last_hidden, (0, 0, 0, pad))
    # It draws them from the loss mask: as many as there are, so all of them, in order. The same mask would then leave nothing
    # of the loss but the anchors' own slots, so the objective gets the one of a sequence that is supervised throughout.
    length = T - pad
    settings = _eager_losses(oracle.kind, loss) | settings
    chosen = torch.zeros(1, T, dtype=torch.bool)
    chosen[0, list(anchors)] = True
    backbone: dict[str, Any] = {}
    run_backbone = model._backbone_forward

    def record_backbone(*args: Any, **kwargs: Any) -> Any:
        hidden, logits, targets, mask, indices = run_backbone(*args, **kwargs)
        mask = (indices < length)[None]  # [1, A * S]
        mask[:, ::S] &= oracle.first_slot == 0
        backbone.update(hidden=hidden, logits=logits, indices=indices)
        return hidden, logits, targets, mask, indices

    with torch.no_grad(), recorded(oracle) as calls, patch.object(model, "_backbone_forward", record_backbone):
        _, total, _ = model(
            hidden_states=taps,
            input_ids=tokens,
            loss_mask=chosen,
            verifier_last_hidden_states=last,
            document_ids=documents,
            position_ids=_positions(documents),
            max_anchors=A,
            **settings,
        )
    (call,) = calls
    logits = call["unary_logits" if oracle.kind == "dflash2" else "logits"]
    confidence = call.get("confidence_logits")
    output = Output(
        logits=logits.view(A, S, -1),
        hidden=backbone["hidden"].view(A, S, -1),
        base_logits=backbone["logits"].view(A, S, -1),
        confidence=None if confidence is None else confidence.view(A, S),
        targets=call["targets"].view(A, S, -1),
        loss=total,
    )
    if oracle.kind == "dflash2":
        # As it is served: in training the true token takes the place of the last candidate.
        assert output.hidden is not None
        previous = model._predecessor_ids(tokens, backbone["indices"])  # [A, S]
        with torch.no_grad():
            output.candidates, output.scores = model.candidate_selector.select(output.logits, output.hidden, previous)
    return output


def run_steps(
    oracle: Oracle,
    tokens: Tensor,
    taps: Tensor,
    anchors: Sequence[int],
    steps: int,
    *,
    last_hidden: Tensor | None = None,
    loss: str = "kl_div",
    **settings: Any,
) -> Output:
    """Steps of eagle3, or depths of peagle, from each anchor: step s predicts the token at anchor + 1 + s.

    Args:
        anchors: positions of 1 or more (the first token has no hidden state before it).
        last_hidden: as for :func:`run_blocks`, and so are ``loss`` and ``settings`` (``ttt_step_loss_decay``, say).
    """
    if oracle.kind not in CHAINS:
        raise ValueError(f"{oracle.kind} has no steps: run_blocks")
    if not all(1 <= a < tokens.shape[1] for a in anchors):
        raise ValueError(f"anchors must lie within the sequence and not be its first token, not {list(anchors)}")
    pad = steps + 1
    tokens = functional.pad(tokens, (0, pad))
    taps = functional.pad(taps.flatten(2), (0, 0, 0, pad))
    T = tokens.shape[1]
    last = torch.zeros(1, T, HIDDEN) if last_hidden is None else functional.pad(last_hidden, (0, 0, 0, pad))
    batch = shift_batch(
        {
            "input_ids": tokens[0],
            "hidden_states": taps[0],
            "verifier_last_hidden_states": last[0],
            "loss_mask": torch.arange(T) < T - pad,
            "lengths": torch.tensor([T]),
            "position_ids": torch.arange(T),
        }
    )
    inputs = {name: tensor[None] for name, tensor in batch.items() if name != "lengths"}
    inputs["document_ids"] = torch.zeros_like(inputs["input_ids"])
    settings = _eager_losses(oracle.kind, loss) | settings
    rows = torch.tensor(anchors) - 1  # token x[a] stands with hidden state a - 1
    if oracle.kind == "eagle3":
        with torch.no_grad(), recorded(oracle) as calls:
            _, total, _ = oracle.model(**inputs, ttt_steps=steps, **settings)
        logits = torch.stack([call["logits"][0, rows] for call in calls], dim=1)
        # The objective reads the targets of step s from s rows further on.
        targets = torch.stack([call["targets"][0, rows + s] for s, call in enumerate(calls)], dim=1)
        return Output(logits=logits, targets=targets, loss=total)
    # The context is depth 0 of all rows; the deeper rows stand behind it, one depth after the other.
    L, A = T - 1, len(anchors)
    depth = torch.cat((torch.zeros(L, dtype=torch.long), torch.arange(1, steps).repeat_interleave(A)))
    anchor_rows = torch.cat((torch.arange(L), rows.repeat(steps - 1)))
    index = torch.stack([rows, *(L + d * A + torch.arange(A) for d in range(steps - 1))], dim=1)  # [A, S]
    with (
        torch.no_grad(),
        recorded(oracle) as calls,
        patch.object(peagle_core, "generate_cod_sample_indices", lambda **_: (anchor_rows, depth)),
    ):
        _, total, _ = oracle.model(**inputs, num_depths=steps, **settings)
    (call,) = calls
    return Output(logits=call["logits"][0, index], targets=call["targets"][0, index], loss=total)


def run(oracle: Oracle, tokens: Tensor, taps: Tensor, anchors: Sequence[int], slots: int | None = None) -> Output:
    """:func:`run_blocks` or :func:`run_steps`, the slots before ``oracle.first_slot`` cut off.

    Slot s of what is left predicts the token at anchor + 1 + s, whatever the type.
    """
    if oracle.kind in CHAINS:
        return run_steps(oracle, tokens, taps, anchors, slots or 4)
    output = run_blocks(oracle, tokens, taps, anchors)
    stop = None if slots is None else oracle.first_slot + slots
    values = {n: v[:, oracle.first_slot : stop] for n, v in vars(output).items() if n != "loss" and v is not None}
    return Output(**values, loss=output.loss)


def draft_greedily(oracle: Oracle, tokens: Tensor, taps: Tensor, anchor: int, slots: int) -> list[int]:
    """The tokens (of the target's vocabulary) that the drafter proposes behind ``anchor``, each given those before it.

    Tokens of the sequence behind the anchor are not read.
    """
    tokens = functional.pad(tokens[:, : anchor + 1], (0, slots))
    taps = functional.pad(taps[:, :anchor], (0, 0, 0, 0, 0, slots + 1))
    for slot in range(slots):
        output = run(oracle, tokens, taps, [anchor], slots)
        best = output.logits[0, slot].argmax()
        if output.candidates is not None and output.scores is not None:
            best = output.candidates[0, slot, output.scores[0, slot].argmax()]
        tokens[0, anchor + 1 + slot] = oracle.draft_ids[best]
    return tokens[0, anchor + 1 :].tolist()


@contextmanager
def recorded(oracle: Oracle) -> Iterator[list[dict[str, Any]]]:
    """Take down the arguments of the objective by name, one dictionary a call; it still runs."""
    core = _CORES[oracle.kind]
    objective = core.compute_metrics
    signature = inspect.signature(objective)
    calls: list[dict[str, Any]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        calls.append(dict(signature.bind(*args, **kwargs).arguments))
        return objective(*args, **kwargs)

    with patch.object(core, "compute_metrics", record):
        yield calls


def randomise(module: nn.Module, seed: int) -> None:
    """Random values for every parameter, and none that hides an error: no zeros, no norm or filter that is an identity."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(module.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if p.dim() == 1:
                p.copy_(1 + 0.2 * noise if name.endswith("weight") else 0.3 * noise)
            elif name.endswith(("base_kernel", "mask_hidden")):
                p.copy_(0.7 * noise)
            else:
                p.copy_(1.5 * p.shape[-1] ** -0.5 * noise)


def _eager_losses(kind: Kind, loss: str) -> dict[str, Any]:
    """The library's losses without Triton, which only a GPU has."""
    settings: dict[str, Any] = {"loss_config": resolve_loss_config(loss, "eager")}
    if kind in ("dspark", "dflash2"):
        settings["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]
    return settings


def _positions(documents: Tensor) -> Tensor:
    """[1, T]: counted from the start of each run of one document."""
    at = torch.arange(documents.shape[1])
    starts = functional.pad(documents[0, 1:] != documents[0, :-1], (1, 0), value=True)
    return (at - torch.where(starts, at, 0).cummax(0).values)[None]


def _dimensions() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": 0,
        "pad_token_id": None,
    }


def _layer_config(family: Family, layer_types: Sequence[str], window: int | None, further: dict[str, Any]) -> PretrainedConfig:
    kinds = [f"{kind}_attention" for kind in layer_types]
    fields = _dimensions() | {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": window,
        "use_sliding_window": "sliding_attention" in kinds,  # without it a Qwen3 configuration forgets the window
    }
    config = {"qwen3": Qwen3Config, "llama": LlamaConfig}[family](**(fields | further))
    config._attn_implementation = "eager"
    return config
