"""Drafter checkpoints: a folder with ``config.json`` (strict schema) and ``drafter.safetensors``.

The target's embedding and LM head are not stored: they are taken from the target when the two meet.
"""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hspec.drafters.config import DrafterConfig
from hspec.drafters.hspec import HSpecDrafter
from hspec.errors import HSpecError, UsageError

if TYPE_CHECKING:
    from hspec.targets.target import Target

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "drafter.safetensors"
DRAFT_IDS = "draft_ids"


def save_drafter(
    drafter: HSpecDrafter, folder: Path, dtype: torch.dtype | None = None, state: dict[str, Tensor] | None = None
) -> None:
    """Write a checkpoint; it appears whole or not at all.

    Args:
        dtype: store floating weights in this type (fp16 for a drafter that ships); None keeps them.
        state: weights to store instead of the drafter's own (an average of them, say).
    """
    temporary = folder.with_name(folder.name + ".partial")
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
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise HSpecError(f"cannot write the drafter to {folder}: {error}. Nothing was changed there") from error


def read_config(folder: Path) -> DrafterConfig:
    """The checked configuration of a checkpoint folder.

    Raises:
        UsageError: no such folder, or not a drafter's.
        HSpecError: the configuration is damaged, or has keys that this version does not know.
    """
    path = folder / CONFIG_FILE
    if not folder.is_dir():
        raise UsageError(f"no drafter at {folder}: give a folder with {CONFIG_FILE} and {WEIGHTS_FILE}, or a hub id")
    if not path.is_file():
        raise UsageError(f"{folder} is not a drafter: it has no {CONFIG_FILE}")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HSpecError(f"{path} is damaged ({error}): fetch or train the drafter again") from error
    if not isinstance(raw, dict) or "method" not in raw:
        raise UsageError(f'{path} does not describe a drafter of this project (no "method"): is {folder} a target\'s folder?')
    try:
        return DrafterConfig.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "the whole"
        raise HSpecError(f"{path}: {where}: {first['msg']} (and {error.error_count() - 1} more)") from error


def load_drafter(folder: Path, target: Target) -> HSpecDrafter:
    """Load a checkpoint and join it to its target, in fp32 on the target's device.

    Raises:
        UsageError: the drafter is for another target or vocabulary.
        HSpecError: files are damaged.
    """
    config = read_config(folder)
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
    drafter = build_drafter(config, target, weights.pop(DRAFT_IDS).long())
    load_weights(drafter, weights, str(path))
    return drafter.eval().requires_grad_(False)


def build_drafter(config: DrafterConfig, target: Target, draft_ids: Tensor) -> HSpecDrafter:
    """A drafter with random trainable weights on the target's frozen ones."""
    draft_ids = draft_ids.to(target.device)
    head = target.head_weight[draft_ids].float()
    return HSpecDrafter(config, target.embedding_weight, head, draft_ids).to(target.device)


def load_weights(drafter: HSpecDrafter, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights in; every parameter must be there, with its shape.

    Raises:
        HSpecError: a tensor is missing, surplus, of another shape, or not finite.
    """
    own = drafter.state_dict()
    missing, surplus = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or surplus:
        raise HSpecError(f"{where} does not fit its config: missing {missing[:3]}, not expected {surplus[:3]}")
    for name, weight in weights.items():
        if weight.shape != own[name].shape:
            raise HSpecError(f"{where}: {name} is {list(weight.shape)}, the config asks for {list(own[name].shape)}")
        if not torch.isfinite(weight).all():
            raise HSpecError(f"{where}: {name} has values that are not finite: the file is damaged")
        own[name].copy_(weight)


def check_target(config: DrafterConfig, target: Target) -> None:
    """Refuse what cannot work, warn about what works worse.

    Raises:
        UsageError: shapes or vocabulary differ.
    """
    made = config.target
    here = {"vocab_size": target.vocab_size, "hidden_size": target.hidden_size, "layers": len(target.layers)}
    for what, value in here.items():
        if getattr(made, what) != value:
            raise UsageError(
                f"this drafter was made for {made.name} ({what} {getattr(made, what)}), not for {target.name} ({what} {value}): "
                f"choose a drafter trained for this target"
            )
    attention, shape = config.attention, target.cache_shape
    if attention is not None and (attention.kv_heads, attention.head_dim) != (shape.kv_heads, shape.head_dim):
        raise UsageError(
            f"this drafter reads K/V of {attention.kv_heads} heads x {attention.head_dim}, {target.name} has "
            f"{shape.kv_heads} x {shape.head_dim}: choose a drafter trained for this target"
        )
    if made.weight_hash and made.weight_hash != target.weight_hash():
        warnings.warn(
            f"the drafter was trained on other weights of {made.name} (hash {made.weight_hash}, here {target.weight_hash()}): "
            f"the text stays exact, but fewer drafts will be accepted",
            stacklevel=3,
        )
    if made.template_hash and made.template_hash != target.template.hash:
        warnings.warn(
            f"the drafter was trained under another chat template (hash {made.template_hash}, here {target.template.hash}): "
            f"the text stays exact, but fewer drafts will be accepted",
            stacklevel=3,
        )
