"""Drafter checkpoints: a folder with ``config.json`` (strict schema) and ``drafter.safetensors``.

The target's embedding and LM head are not stored: they are taken from the target when the two meet. Checkpoints in other
layouts are read too (:mod:`hspec.drafters.formats`).
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hspec.drafters.config import SCHEMAS, DrafterConfig, ParallelConfig
from hspec.drafters.drafter import Drafter
from hspec.drafters.family import make_drafter
from hspec.drafters.formats.envelope import Checkpoint, is_speculators, same_rows
from hspec.drafters.formats.speculators import described_config, read_speculators
from hspec.drafters.host import DrafterHost
from hspec.drafters.upgrade import upgrade_config, upgrade_weights
from hspec.errors import HSpecError, UsageError
from hspec.files import beside

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "drafter.safetensors"
DRAFT_IDS = "draft_ids"


def save_drafter(
    drafter: Drafter, folder: Path, dtype: torch.dtype | None = None, state: dict[str, Tensor] | None = None
) -> None:
    """Write a checkpoint; it appears whole or not at all.

    Args:
        dtype: store floating weights in this type (fp16 for a drafter that ships); None keeps them.
        state: weights to store instead of the drafter's own (an average of them, say).

    Raises:
        HSpecError: the disk does not take it; what was there before stays.
    """
    folder = folder.absolute()
    temporary = beside(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        weights = {name: w.detach().cpu().contiguous() for name, w in (state or drafter.state_dict()).items()}
        if dtype is not None:
            weights = {name: w.to(dtype) if w.is_floating_point() else w for name, w in weights.items()}
        weights[DRAFT_IDS] = drafter.draft_ids.cpu().to(torch.int32)
        save_file(weights, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        text = json.dumps(drafter.config.model_dump(), indent=2) + "\n"
        (temporary / CONFIG_FILE).write_text(text, encoding="utf-8")
        folder.mkdir(parents=True, exist_ok=True)
        for name in (WEIGHTS_FILE, CONFIG_FILE):
            (temporary / name).replace(folder / name)
        temporary.rmdir()
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise HSpecError(f"cannot write the drafter to {folder}: {error}. Nothing was changed there") from error


def read_config(folder: Path) -> DrafterConfig:
    """The checked configuration of a checkpoint folder.

    Raises:
        UsageError: no such folder, or not a drafter's.
        HSpecError: the configuration is damaged, or has keys that this version does not know.
    """
    return _parse_config(folder, read_raw(folder))


def known_config(folder: Path) -> DrafterConfig:
    """The configuration of a checkpoint of any layout, as far as it is known without its target (see
    :func:`hspec.drafters.formats.speculators.described_config`); raises as :func:`read_config`."""
    raw = read_raw(folder)
    return described_config(raw, str(folder / CONFIG_FILE)) if is_speculators(raw) else _parse_config(folder, raw)


def read_raw(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of a folder.

    Raises:
        UsageError: no such folder, or no configuration in it.
        HSpecError: it is damaged.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UsageError(f"no drafter at {folder}: give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a hub id")
    if not path.is_file():
        raise UsageError(f"{folder} is not a drafter: it has no {CONFIG_FILE}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HSpecError(f"{path} is damaged ({error}): fetch or train the drafter again") from error
    return raw if isinstance(raw, dict) else {}


def _parse_config(folder: Path, raw: dict[str, Any]) -> DrafterConfig:
    path = folder / CONFIG_FILE
    if is_speculators(raw):
        raise UsageError(
            f"{path} is in the layout of speculators, which does not say all that a drafter needs: load it with its target"
        )
    if "method" not in raw:
        raise UsageError(f'{path} does not describe a drafter of this project (no "method"): is {folder} a target\'s folder?')
    schema = SCHEMAS.get(raw["method"])
    if schema is None:
        raise UsageError(f"{path}: unknown method {raw['method']!r}; known are {', '.join(SCHEMAS)}")
    try:
        return schema.model_validate(upgrade_config(raw))
    except ValidationError as error:
        first, more = error.errors()[0], error.error_count() - 1
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        others = f" (and {more} more)" if more else ""
        raise HSpecError(
            f"{path}: {where}: {first['msg']}{others}: the file is damaged, or made by a newer version of hspec"
        ) from error


def load_drafter(folder: Path, target: DrafterHost) -> Drafter:
    """Load a checkpoint of any layout and join it to its target, in fp32 on the target's device.

    Raises:
        UsageError: the drafter is for another target or vocabulary.
        HSpecError: files are damaged.
    """
    raw = read_raw(folder)
    if is_speculators(raw):
        target_config: Any = target.config
        checkpoint = read_speculators(folder, len(target.layers), target_config.model_type)
        return _join(checkpoint, target, str(folder)).eval().requires_grad_(False)
    config = _parse_config(folder, raw)
    check_target(config, target)
    path = folder / WEIGHTS_FILE
    try:
        weights = load_file(path)
    except FileNotFoundError as error:
        raise HSpecError(f"{folder} has no {WEIGHTS_FILE}: the checkpoint is incomplete, fetch it again") from error
    except (SafetensorError, OSError) as error:
        raise HSpecError(f"{path} is damaged or cut short ({error}): fetch or train the drafter again") from error
    if DRAFT_IDS not in weights:
        raise HSpecError(f"{path} has no {DRAFT_IDS!r}: it is not the weight file of this checkpoint")
    drafter = build_drafter(config, target, _check_ids(weights.pop(DRAFT_IDS).long(), config, str(path)))
    load_weights(drafter, upgrade_weights(weights), str(path))
    return drafter.eval().requires_grad_(False)


def _check_ids(ids: Tensor, config: DrafterConfig, where: str) -> Tensor:
    size, vocabulary = config.draft_vocab_size, config.target.vocab_size
    if ids.shape != (size,) or int(ids.min()) < 0 or int(ids.max()) >= vocabulary or not bool((ids.diff() > 0).all()):
        raise HSpecError(
            f"{where}: {DRAFT_IDS} must be {size} ascending ids below {vocabulary}: the file is damaged, "
            f"fetch or train the drafter again"
        )
    return ids


def _join(checkpoint: Checkpoint, target: DrafterHost, where: str) -> Drafter:
    """A checkpoint of another layout on its target; an embedding equal to the target's is not kept twice."""
    config, weights = checkpoint.config, dict(checkpoint.weights)
    check_target(config, target)
    if checkpoint.own_vocabulary:
        embedding = _own_embedding(checkpoint, target, weights, where)
    else:
        embedding = target.embedding_weight
        _check_shared(checkpoint, target, where)
    pruned = len(checkpoint.draft_ids) != target.vocab_size
    own_head = checkpoint.head is not None and (pruned or checkpoint.own_vocabulary)
    ids = checkpoint.draft_ids.to(target.device)
    head = checkpoint.head if own_head and checkpoint.head is not None else target.head_weight[ids]
    drafter = make_drafter(config, embedding, head.float(), ids).to(target.device)
    load_weights(drafter, weights, where)
    return drafter


def _own_embedding(checkpoint: Checkpoint, target: DrafterHost, weights: dict[str, Tensor], where: str) -> Tensor:
    """The embedding of a type that comes with one; ``weights`` get the mask's row if the file has none."""
    row = checkpoint.mask_token_id
    if checkpoint.embedding is None and row is not None:
        weights["mask_embedding"] = target.embedding_weight[row]
        if float(target.embedding_weight[row].float().norm()) < 1e-4:
            raise UsageError(
                f"{where} has no embed_tokens, and {target.name} has zeros for its mask token {row}: the row that it was "
                f"trained with is not known, fetch a checkpoint that has it"
            )
    if checkpoint.embedding is None or same_rows(checkpoint.embedding, target.embedding_weight, row):
        return target.embedding_weight
    warnings.warn(
        f"the drafter at {where} comes with another embedding than {target.name}'s, so it was trained on other weights, or "
        f"trained them too: the text stays exact, but fewer drafts may be accepted",
        stacklevel=4,
    )
    return checkpoint.embedding


def _check_shared(checkpoint: Checkpoint, target: DrafterHost, where: str) -> None:
    """Of a type that has the target's embedding and head: ones that are stored all the same must be these."""
    stored = {"embed_tokens.weight": (checkpoint.embedding, target.embedding_weight)}
    if len(checkpoint.draft_ids) == target.vocab_size:
        stored["lm_head.weight"] = (checkpoint.head, target.head_weight)
    others = [name for name, (own, theirs) in stored.items() if own is not None and not same_rows(own, theirs)]
    if others:
        raise UsageError(
            f"{where} comes with another {' and '.join(others)} than {target.name}'s; of this type the library takes the "
            f"target's, but servers take what is stored: not supported, choose the target that it was trained for"
        )


def build_drafter(config: DrafterConfig, target: DrafterHost, draft_ids: Tensor) -> Drafter:
    """A drafter with random trainable weights on the target's frozen ones."""
    draft_ids = draft_ids.to(target.device)
    head = target.head_weight[draft_ids].float()
    return make_drafter(config, target.embedding_weight, head, draft_ids).to(target.device)


def load_weights(drafter: Drafter, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights in; every parameter must be there, with its shape.

    Raises:
        HSpecError: tensors are missing, surplus, of another shape, or not finite; all of them are named.
    """
    own = drafter.state_dict()
    wrong = [f"{name} is missing" for name in sorted(own.keys() - weights.keys())]
    wrong += [f"{name} is not expected" for name in sorted(weights.keys() - own.keys())]
    for name in sorted(own.keys() & weights.keys()):
        if weights[name].shape != own[name].shape:
            wrong.append(f"{name} is {list(weights[name].shape)}, the config asks for {list(own[name].shape)}")
        elif not torch.isfinite(weights[name]).all():
            wrong.append(f"{name} has values that are not finite")
    if wrong:
        raise HSpecError(f"{where} does not fit its config: {'; '.join(wrong)}: fetch or train the drafter again")
    for name, weight in weights.items():
        own[name].copy_(weight)


def check_target(config: DrafterConfig, target: DrafterHost) -> None:
    """Refuse what cannot work, warn about what works worse.

    Raises:
        UsageError: shapes or vocabulary differ.
    """
    made = config.target
    here = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "layers": len(target.layers)}
    for what, value in here.items():
        if getattr(made, what) != value:
            raise UsageError(
                f"this drafter was made for {made.name} ({what} {getattr(made, what)}), not for {target.name} ({what} "
                f"{value}): choose a drafter trained for this target"
            )
    shape = target.cache_shape
    attention = config.attention if isinstance(config, ParallelConfig) else None
    reads = attention is not None and attention.context == "target"
    if attention is not None and reads and (attention.kv_heads, attention.head_dim) != (shape.kv_heads, shape.head_dim):
        raise UsageError(
            f"this drafter reads K/V of {attention.kv_heads} heads x {attention.head_dim}, {target.name} has "
            f"{shape.kv_heads} x {shape.head_dim}: choose a drafter trained for this target"
        )
    weights = target.weight_hash()
    if made.weight_hash and weights and made.weight_hash != weights:
        warnings.warn(
            f"the drafter was trained on other weights of {made.name} (hash {made.weight_hash}, here {weights}): "
            f"the text stays exact, but fewer drafts may be accepted",
            stacklevel=3,
        )
    if made.template_hash and made.template_hash != target.template.hash:
        warnings.warn(
            f"the drafter was trained under another chat template (hash {made.template_hash}, here {target.template.hash}): "
            f"the text stays exact, but fewer drafts may be accepted",
            stacklevel=3,
        )
