"""What vLLM calls in each of its processes (entry point ``vllm.general_plugins``)."""

from __future__ import annotations

import logging
import os

from hspec.errors import HSpecError
from hspec.serving import expand_fix, versions

logger = logging.getLogger("vllm.hspec")
"""Below vLLM's own logger, whose format and level it takes."""


def register() -> None:
    """Repair the CPU backend's sampling; the hooks wait until a proposer is made (:mod:`hspec.serving.proposer`).

    On a vLLM that is not known nothing is touched, so that people who serve without H-Spec are not disturbed; a proposer then
    refuses with the reason.
    """
    message = versions.problem(versions.installed(), has_native(), versions.forced())
    if message is not None:
        logger.warning("H-Spec's plugin does not load: %s", message)
        return
    import vllm.utils.cpu_triton_utils as kernels

    expand_fix.install(kernels)


def require_registered() -> None:
    """
    Raises:
        HSpecError: vLLM has not called :func:`register` in this process, so its CPU backend would sample wrongly.
    """
    import vllm.utils.cpu_triton_utils as kernels

    if not expand_fix.installed(kernels):
        raise HSpecError(
            f"vLLM has not loaded H-Spec's plugin (VLLM_PLUGINS is {os.environ.get('VLLM_PLUGINS')!r}): unset VLLM_PLUGINS or add hspec "
            f"to it, and see what 'hspec doctor' says"
        )


def has_native() -> bool:
    """Whether the vLLM that is installed has H-Spec of its own."""
    if versions.installed() is None:
        return False
    from vllm.config import speculative

    return versions.native_method(getattr(speculative, "SpeculativeMethod", None))
