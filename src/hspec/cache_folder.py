"""Where downloads, converted targets, answers and training runs are kept."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``$HSPEC_CACHE``, else ``hspec`` in ``$XDG_CACHE_HOME`` or in ``~/.cache``."""
    if own := os.environ.get("HSPEC_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hspec"
