"""Which targets can be served, and what a drafter must know of one that vLLM runs."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hspec.drafters.config import DrafterConfig, ParallelConfig
from hspec.errors import UsageError
from hspec.targets.cache import CacheShape
from hspec.targets.weight_files import WeightFiles

FAMILIES = ("llama", "qwen3")
"""transformers' model types whose pages and hidden states vLLM gives as the embedded engine has them."""

CACHE_TYPES = ("auto", "float32", "bfloat16", "float16")
"""Values of ``--kv-cache-dtype`` under which pages hold what the target computed."""


def model_refusal(text: Any) -> str | None:
    """Why a model cannot have H-Spec, as the end of a sentence; None if it can.

    Args:
        text: transformers' configuration of the language model.
    """
    sliding = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if text.model_type not in FAMILIES:
        return f"its family is {text.model_type!r}, and the plugin supports {' and '.join(FAMILIES)}"
    if sliding or "sliding_attention" in (getattr(text, "layer_types", None) or ()):
        return "it has layers with a sliding window, which the plugin does not support"
    if getattr(text, "quantization_config", None) is not None:
        return "its weights are quantised, which the plugin does not support"
    return None


def refusal(config: Any) -> str | None:
    """Why a target, as vLLM is configured to run it, cannot have H-Spec, in one sentence; None if it can.

    Args:
        config: ``vllm.config.VllmConfig``, or anything with these fields.
    """
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    checks = (
        (bool(getattr(model, "use_mla", False)), "its attention is MLA, whose pages hold no keys and values"),
        (bool(getattr(model, "is_hybrid", False)), "it is a hybrid of attention and recurrent layers"),
        (bool(getattr(model, "is_multimodal_model", False)), "it is multimodal"),
        (model.quantization is not None, f"its weights are quantised ({model.quantization})"),
        (cache.cache_dtype not in CACHE_TYPES, f"its KV cache is quantised ({cache.cache_dtype})"),
        (parallel.pipeline_parallel_size > 1, f"it is cut into {parallel.pipeline_parallel_size} pipeline stages"),
        (getattr(parallel, "decode_context_parallel_size", 1) > 1, "its context is spread over devices"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "its prompts are spread over devices"),
        (config.kv_transfer_config is not None, "its K/V are transferred to another server"),
    )
    reasons = [f"{why}, which the plugin does not support" for holds, why in checks if holds]
    own = model_refusal(model.hf_text_config)
    reasons += [] if own is None else [own]
    return cannot_serve(model.model, reasons[0]) if reasons else None


def cannot_serve(name: str, why: str) -> str:
    return f"H-Spec cannot serve {name}: {why}; serve it with vLLM alone"


def require_supported(config: Any) -> None:
    """
    Raises:
        UsageError: the target, or how it is run, is not supported.
    """
    message = refusal(config)
    if message is not None:
        raise UsageError(message)


def require_servable(config: DrafterConfig, k: int, where: str) -> None:
    """The plugin serves drafters that read the target's K/V, and those that keep K/V which follow from a token's hidden states alone.
    What EAGLE keeps follows from the next token too, and from what it keeps of the tokens before.

    Raises:
        UsageError: another kind of drafter, or one that was trained for fewer drafts.
    """
    if not isinstance(config, ParallelConfig):
        raise UsageError(
            f"the drafter at {where} is of the method {config.method!r}, which this plugin does not serve: docs/serving.md says which "
            f"it does, and which vLLM serves by itself"
        )
    check_drafts(config, k, where)


def check_drafts(config: DrafterConfig, k: int, where: str) -> None:
    """
    Raises:
        UsageError: more drafts a step than a drafter was trained for, or none.
    """
    if not 1 <= k <= config.max_draft:
        raise UsageError(
            f"{k} drafts a step, but the drafter at {where} was trained for 1 to {config.max_draft}: choose in that range"
        )


@dataclass(frozen=True)
class TemplateHash:
    hash: str


@dataclass(frozen=True)
class ServedTarget:
    """What :func:`hspec.drafters.checkpoint.load_drafter` asks of a target (:class:`hspec.drafters.host.DrafterHost`).

    ``embedding_weight`` and ``head_weight`` are vLLM's own tensors, or joined from those of all ranks, ``[vocabulary, hidden]``. The
    drafter shares the first, and copies the second's rows of its draft vocabulary.
    """

    name: str
    config: Any
    """transformers' configuration."""
    template: TemplateHash
    embedding_weight: Tensor
    head_weight: Tensor

    @property
    def layers(self) -> Sized:
        return range(self.config.num_hidden_layers)

    @property
    def hidden_size(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape.of(self.config)

    @property
    def device(self) -> torch.device:
        return self.embedding_weight.device

    @cached_property
    def _hash(self) -> str | None:
        return folder_hash(Path(self.name), self.config)

    def weight_hash(self) -> str | None:
        return self._hash


def folder_hash(folder: Path, config: Any) -> str | None:
    """:meth:`hspec.targets.target.Target.weight_hash` from a folder's safetensors, reading some rows of each weight only.

    Returns:
        None where the weights are not in such files here.

    Raises:
        HSpecError: a file is damaged, or a weight missing.
    """
    try:
        return WeightFiles(folder, config).hash()
    except UsageError:
        return None
