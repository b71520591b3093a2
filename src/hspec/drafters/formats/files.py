"""Folders with ``config.json`` and ``model.safetensors`` (or shards with an index): read, and written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hspec.errors import HSpecError, UsageError
from hspec.files import beside, reason

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def read_json(path: Path) -> dict[str, Any]:
    """Raises:
    HSpecError: not there, or not a JSON object.
    """
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise HSpecError(f"{path} is damaged ({error}): fetch the drafter again") from error
    if not isinstance(raw, dict):
        raise HSpecError(f"{path} is damaged (not a JSON object): fetch the drafter again")
    return raw


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder, in the types of the files.

    Raises:
        HSpecError: a file is missing, damaged, or outside of the folder.
    """
    index = folder / INDEX_FILE
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise HSpecError(f"{index} has no weight_map: it is damaged, fetch the drafter again")
        files = [folder / name for name in sorted(set(listed.values()))]
    else:
        files = [folder / WEIGHTS_FILE]
    tensors: dict[str, Tensor] = {}
    for path in files:
        if path.parent != folder:  # an index names files of its own folder, nothing outside it
            raise HSpecError(f"{index} names {path}, which is outside of the drafter's folder")
        try:
            tensors |= load_file(path)
        except FileNotFoundError as error:
            raise HSpecError(f"{folder} has no {path.name}: the checkpoint is incomplete, fetch it again") from error
        except (SafetensorError, OSError) as error:
            raise HSpecError(f"{path} is damaged or cut short ({error}): fetch the drafter again") from error
    return tensors


def check_free(folder: Path) -> None:
    """Raises:
    UsageError: ``folder`` is there and holds something.
    """
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"{folder} is there already, and is not an empty folder: choose another place, or remove it first")


def write_folder(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a new folder under a temporary name, then rename it.

    Raises:
        UsageError: ``folder`` is there and holds something.
        HSpecError: the disk does not take it; nothing is left of it.
    """
    folder = folder.absolute()
    check_free(folder)
    temporary = beside(folder)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        save_file(plain, temporary / WEIGHTS_FILE, metadata={"format": "pt"})
        (temporary / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise HSpecError(f"cannot write the drafter to {folder}: {reason(error)}. Nothing was changed there") from error
