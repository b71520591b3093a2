"""Work that only one process at a time may do; a lock goes with the process that holds it, however that ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hspec.errors import HSpecError
from hspec.files import reason


@contextmanager
def alone(path: Path, wait: bool = False) -> Iterator[bool]:
    """Hold the lock of ``path``, a file ``.lock`` beside it, which stays; whether it was free.

    Args:
        wait: until it is.

    Raises:
        HSpecError: it cannot be made.
    """
    lock = FileLock(path.with_name(path.name + ".lock"), timeout=-1 if wait else 0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        yield False
        return
    except OSError as error:
        raise HSpecError(f"cannot lock {lock.lock_file}: {reason(error)}") from error
    try:
        yield True
    finally:
        lock.release()
