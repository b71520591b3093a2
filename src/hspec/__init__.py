"""H-Spec: parallel speculative decoding without a drafter-side KV cache."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hspec.api import generate, load_drafter, stream
    from hspec.decoding.params import SamplingParams
    from hspec.errors import HSpecError, UsageError
    from hspec.targets.sources import load_target

__version__ = "0.1.0"
__all__ = ["HSpecError", "SamplingParams", "UsageError", "generate", "load_drafter", "load_target", "stream"]

_PLACES = {
    "HSpecError": "errors", "SamplingParams": "decoding.params", "UsageError": "errors", "generate": "api", "load_drafter": "api",
    "load_target": "targets.sources", "stream": "api",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """The names above are imported when they are asked for: torch takes seconds, and the command line answers without it."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
