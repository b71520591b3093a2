"""What a machine has for serving, and what is wrong with it: each finding says what to do."""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hspec.drafters.config import SCHEMAS, ParallelConfig
from hspec.drafters.ngram import NAME as NGRAM
from hspec.errors import HSpecError
from hspec.serving import command, expand_fix, plugin, versions
from hspec.serving.pages import LAYOUTS
from hspec.serving.self_test import check_pages
from hspec.serving.speculation import NATIVE, NATIVE_ON_GPU


@dataclass(frozen=True)
class Finding:
    what: str
    fine: bool
    says: str


def examine() -> list[Finding]:
    """All checks in the order in which one thing needs another; those behind a broken one that they need are left out."""
    findings = [_vllm()]
    if not findings[0].fine:
        return findings
    findings += [_registered(), _imports()]
    if not findings[-1].fine:
        return findings
    findings += [_device(), _drafters(), _memory()]
    if not command.on_gpu():
        findings += [_expand(), _layout()]
    return findings


def _vllm() -> Finding:
    message = versions.problem(versions.installed(), False, versions.forced())
    return Finding("vLLM", message is None, message or f"{versions.installed()}, torch {torch.__version__}")


def _registered() -> Finding:
    points = importlib.metadata.entry_points(group="vllm.general_plugins")
    if not any(point.value.startswith("hspec.serving.plugin") for point in points):
        return Finding(
            "plugin", False, "not registered: install hspec again in this environment (pip install -e . or the wheel)"
        )
    allowed = os.environ.get("VLLM_PLUGINS")
    if allowed is not None and "hspec" not in allowed.split(","):
        return Finding("plugin", False, f"VLLM_PLUGINS is {allowed!r} and leaves hspec out: add it, or unset the variable")
    return Finding("plugin", True, "registered")


def _imports() -> Finding:
    try:
        import vllm.engine.arg_utils  # noqa: F401
    except Exception as error:  # whatever its many dependencies raise
        advice = (
            "; torchvision, torchaudio or torchcodec of another torch: pip uninstall them"
            if "torchvision" in str(error)
            else ""
        )
        return Finding("import", False, f"vLLM cannot be imported: {str(error).splitlines()[0]}{advice}")
    if plugin.has_native():
        return Finding("import", False, str(versions.problem(versions.installed(), native=True)))
    return Finding("import", True, "vLLM can be imported, and has no H-Spec of its own")


def _device() -> Finding:
    from vllm.platforms import current_platform

    name = current_platform.device_type
    if name == "cuda":
        return Finding(
            "device",
            True,
            f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)} (this plugin has not been run on a GPU yet: docs/serving.md)",
        )
    if name == "cpu":
        nodes = command.memory_nodes()
        return Finding("device", True, f"CPU, {torch.get_num_threads()} threads, {nodes} NUMA node{'s' if nodes > 1 else ''}")
    return Finding("device", False, f"vLLM found the platform {name!r}; the plugin is written for cuda and cpu")


def _drafters() -> Finding:
    """Which methods are served here, and by whom."""
    native = (*NATIVE, *(NATIVE_ON_GPU if command.on_gpu() else ()))
    ours = [name for name, schema in SCHEMAS.items() if schema is ParallelConfig and name not in native]
    return Finding("drafters", True, f"by the plugin {', '.join(ours)}; by vLLM itself {', '.join((*native, NGRAM))}")


def _memory() -> Finding:
    free, need = command.available_memory() / command.GIB, (command.OVERHEAD + 2 * command.GIB) / command.GIB
    says = f"{free:.1f} GiB free"
    return Finding(
        "memory", free >= need, says if free >= need else f"{says}, and even a small target takes {need:.0f}: close something"
    )


def _expand() -> Finding:
    import vllm.utils.cpu_triton_utils as kernels

    plugin.register()
    repaired = expand_fix.installed(kernels)
    return Finding(
        "sampling", repaired, "the CPU backend's fault is repaired" if repaired else "the CPU backend's fault is not repaired"
    )


def _layout() -> Finding:
    """Pages of a small cache, written by vLLM's kernel and read by ours."""
    try:
        isa, writer = _cpu_writer(pages := torch.zeros(5, 3, 32, 2 * 64))
        name = f"CPU_ATTN/{isa}"
        if name not in LAYOUTS:
            return Finding("KV layout", False, f"{name} is not one that the plugin reads ({', '.join(LAYOUTS)})")
        check_pages(pages, LAYOUTS[name], writer, pages.shape[1], "a trial layer")
    except (HSpecError, RuntimeError, AttributeError, ImportError) as error:
        return Finding("KV layout", False, str(error).splitlines()[0])
    return Finding("KV layout", True, f"{name}: what is read from the pages is what was written")


def _cpu_writer(pages: torch.Tensor) -> tuple[str, Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]]:
    from vllm import _custom_ops as ops
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    current_platform.import_kernels()
    blocks, heads, block, both = pages.shape
    isa = _get_attn_isa(pages.dtype, block, both // 2)
    keys, values = pages.view(blocks, heads, 2 * block, both // 2).chunk(2, dim=2)

    def write(k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor) -> None:
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, isa)

    return isa, write
