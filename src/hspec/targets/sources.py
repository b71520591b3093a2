"""From what a user types to a loaded target: a packaged name, a GGUF file, a folder, or a hub id."""

from __future__ import annotations

import copy
import json
import logging
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from huggingface_hub import snapshot_download
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils import logging as transformers_logging

from hspec.cache_folder import cache_folder
from hspec.errors import HSpecError, UsageError
from hspec.files import reason
from hspec.targets.packaged import SMOLLM2, fetch
from hspec.targets.target import FAMILIES, Target
from hspec.targets.template import ChatTemplate

SMOLLM2_NAME = "smollm2-135m-instruct-q4"
"""SmolLM2-135M-Instruct as the wheel has it: Q4_1, dequantised here. It is not the hub's original, and is never called so."""

ALIASES = {"smollm2": SMOLLM2_NAME, "smollm2-135m": SMOLLM2_NAME}
Linears = Literal["packed", "bf16", "plain"]
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
"""Of a hub's repository, what a folder in transformers' layout has."""


def load_target(
    source: str,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    linears: Linears = "packed",
) -> Target:
    """Load a frozen target.

    Args:
        source: ``smollm2`` (packaged), a ``.gguf`` file, a folder with a transformers model, or a hub id.
        linears: see :meth:`Target.prepare`.

    Raises:
        UsageError: there is no such model, or its family is not supported.
        HSpecError: files are damaged, or a download failed.
    """
    name = ALIASES.get(source, source)
    model, tokenizer, provenance = _load(name, dtype)
    template = ChatTemplate(tokenizer, prepend_bos=_missing_bos(tokenizer), extra_eos=_eos_ids(model.generation_config))
    return Target(model.to(device), template, name, provenance).prepare(linears)


def load_reference(source: str, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """The same model as transformers runs it, and its tokenizer: for comparisons."""
    model, tokenizer, _ = _load(ALIASES.get(source, source), dtype)
    return model.eval(), tokenizer


def model_folder(source: str) -> Path | str:
    """Where another engine finds the model in transformers' layout: a folder, or a hub id. The packaged one is converted first.

    Raises:
        UsageError: there is no such model, or it is a GGUF file.
    """
    name = ALIASES.get(source, source)
    place = _smollm2_folder() if name == SMOLLM2_NAME else _place(name)
    if isinstance(place, Path) and not place.is_dir():
        raise UsageError(
            f"{place} is a GGUF file, which is dequantised here only: give a folder in transformers' layout, or a hub id"
        )
    return place


def read_tokenizer(source: str) -> Any:
    """The model's tokenizer alone.

    Raises:
        UsageError: there is no such model.
    """
    place = str(model_folder(source))
    with _Explained(place):
        return AutoTokenizer.from_pretrained(place)


def read_folder(source: str) -> tuple[Path, Any, ChatTemplate, str]:
    """All of a model but its weights: its folder, its configuration, its chat template and its name. Of a hub id the safetensors files
    are fetched too, if they are not here yet.

    Raises:
        UsageError: there is no such model, it is a GGUF file, or its family is not supported.
        HSpecError: files are damaged.
    """
    place = model_folder(source)
    with _Explained(str(place)):
        folder = place if isinstance(place, Path) else Path(snapshot_download(place, allow_patterns=_MODEL_FILES))
        config = AutoConfig.from_pretrained(folder)
        _check_family(config, source)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        has_settings = (folder / "generation_config.json").is_file()
        settings = GenerationConfig.from_pretrained(folder) if has_settings else GenerationConfig.from_model_config(config)
    template = ChatTemplate(tokenizer, prepend_bos=_missing_bos(tokenizer), extra_eos=_eos_ids(settings))
    return folder, config, template, ALIASES.get(source, source)


def describe(source: str) -> Any:
    """The model's configuration alone, without its weights.

    Raises:
        UsageError: there is no such model.
    """
    name = ALIASES.get(source, source)
    place = _smollm2_folder() if name == SMOLLM2_NAME else _place(name)
    if isinstance(place, str) or place.is_dir():
        arguments = {"pretrained_model_name_or_path": str(place)}
    else:
        arguments = {"pretrained_model_name_or_path": str(place.parent), "gguf_file": place.name}
    with _Explained(str(place)):
        config = AutoConfig.from_pretrained(**arguments)
        _check_family(config, source)
        return config


def _load(name: str, dtype: torch.dtype) -> tuple[Any, Any, dict[str, Any]]:
    if name == SMOLLM2_NAME:
        folder = _smollm2_folder()
        return (*_load_folder(str(folder), dtype), json.loads((folder / "provenance.json").read_text()))
    place = _place(name)
    if isinstance(place, str):
        return (*_load_folder(place, dtype), {"source": place})
    if place.is_dir():
        return (*_load_folder(str(place), dtype), {"source": place.name})
    return (*_load_gguf(place, dtype), {"source": place.name, "format": "GGUF, dequantised"})


def _place(name: str) -> Path | str:
    """Where a model lies: a GGUF file, a folder with a ``config.json``, or, as a string, a hub id.

    Raises:
        UsageError: a file or folder that cannot be a model's, or no name at all.
    """
    if not name.strip():
        raise UsageError(
            f"the target's name is empty: give one of {', '.join(sorted(ALIASES))}, a folder, a .gguf file or a hub id"
        )
    path = Path(name).expanduser()
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UsageError(f"no file {path}: check the path given as the target")
        return path
    if path.is_dir():
        return _model_in(path)
    if path.exists():
        raise UsageError(f"{path} is a file, but not a GGUF one: give a folder, a .gguf file or a hub id")
    return name


def _model_in(folder: Path) -> Path:
    config, files = folder / "config.json", sorted(folder.glob("*.gguf"))
    if config.is_file():
        try:
            head = json.loads(config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise HSpecError(f"{config} is damaged ({' '.join(str(error).split())}): fetch the model again") from error
        if isinstance(head, dict) and ("method" in head or "speculators_model_type" in head):
            raise UsageError(
                f"{folder} holds a drafter, not a target: give it with --drafter, and the model it is for as the target"
            )
        return folder
    if len(files) == 1:
        return files[0]
    if files:
        raise UsageError(f"{folder} has several GGUF files ({', '.join(f.name for f in files[:3])} ...): name one of them")
    raise UsageError(f"{folder} is no model's folder: it has neither a config.json nor a .gguf file")


class _Explained:
    """Turns what transformers and the hub client raise into one message for the user."""

    def __init__(self, source: str):
        self.source = source

    def __enter__(self) -> None:
        self.verbosity = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)

    def __exit__(self, kind: Any, error: BaseException | None, _: Any) -> None:
        transformers_logging.set_verbosity(self.verbosity)
        if error is None or not isinstance(error, Exception) or isinstance(error, HSpecError):
            return
        short = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".:")
        if cache_folder() / "targets" in Path(self.source).parents:
            raise HSpecError(
                f"the converted model in {self.source} is damaged ({short}): delete that folder, it is made again"
            ) from error
        if Path(self.source).is_dir() or Path(self.source).is_file():
            raise HSpecError(
                f"cannot load a model from {self.source}: {short}. Its files are damaged or incomplete, or it is no causal "
                f"language model: fetch it again"
            ) from error
        raise UsageError(
            f"no target {self.source!r}: it is no folder or .gguf file here, not one of the packaged names "
            f"({', '.join(sorted(ALIASES))}), and as a hub id it could not be fetched ({short})"
        ) from error


def _load_folder(source: str, dtype: torch.dtype) -> tuple[Any, Any]:
    with _Explained(source):
        config = AutoConfig.from_pretrained(source)
        _check_family(config, source)
        loaded: Any = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, output_loading_info=True)
        model, report = loaded
        lacking = sorted(report["missing_keys"])
        if lacking:  # transformers would go on with random weights in their place
            raise HSpecError(
                f"{source} lacks {len(lacking)} weights of its model, {lacking[0]} the first: the checkpoint is incomplete, fetch it again"
            )
        return model, AutoTokenizer.from_pretrained(source)


def _load_gguf(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    with _Explained(str(path)):
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
        quantised = AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)
        _check_family(quantised.config, str(path))
        # transformers marks the model as quantised and then refuses to save or convert it: move the weights to a plain one.
        config = copy.deepcopy(quantised.config)
        del config.quantization_config
        model: Any = type(quantised)(config)
        model.to(dtype)
        model.load_state_dict(quantised.state_dict())
        model.tie_weights()
        model.generation_config = quantised.generation_config
        return model, AutoTokenizer.from_pretrained(**where)


def _check_family(config: Any, source: str) -> None:
    if config.model_type not in FAMILIES:
        raise UsageError(f"{source} is of the family {config.model_type!r}; supported are {', '.join(FAMILIES)}")


def _smollm2_folder() -> Path:
    """The packaged model as safetensors, dequantised the first time; complete or not there."""
    folder = cache_folder() / "targets" / SMOLLM2_NAME
    if (folder / "provenance.json").exists():
        return folder
    gguf = fetch(SMOLLM2)
    model, tokenizer = _load_gguf(gguf, torch.float32)
    temporary = folder.with_name(folder.name + ".partial")
    shutil.rmtree(temporary, ignore_errors=True)
    provenance = {
        "source": SMOLLM2.requirement,
        "file": SMOLLM2.member,
        "sha256": SMOLLM2.sha256,
        "format": "GGUF Q4_1, dequantised to fp32; not the original weights",
        "license": "Apache-2.0",
    }
    try:
        transformers_logging.disable_progress_bar()
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")
        shutil.rmtree(folder, ignore_errors=True)
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:  # safetensors has its own error for a full disk
        shutil.rmtree(temporary, ignore_errors=True)
        raise HSpecError(
            f"cannot write the converted model to {folder}: {reason(error)}; it takes 540 MB (HSPEC_CACHE moves it)"
        ) from error
    return folder


def _eos_ids(settings: Any) -> frozenset[int]:
    """Of a model's generation settings."""
    ids = getattr(settings, "eos_token_id", None)
    return frozenset() if ids is None else frozenset(ids if isinstance(ids, list) else [ids])


def _missing_bos(tokenizer: Any) -> int | None:
    """Gemma's tokenizer, read from a GGUF file, does not add the <bos> that the model needs."""
    bos = tokenizer.bos_token
    if bos != "<bos>":
        return None
    return None if tokenizer("a").input_ids[:1] == [tokenizer.bos_token_id] else tokenizer.bos_token_id
