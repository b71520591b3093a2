"""Work that only one process at a time may do; a lock goes with the process that holds it, however that ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from hspec.errors import HSpecError
from hspec.files import reason


@contextmanager
def alone(path: Path, wait: bool = False, on_wait: Callable[[], None] = lambda: None) -> Iterator[bool]:
    """Hold the lock of ``path``, a file ``.lock`` beside it, which stays; gives whether it is held.

    Args:
        wait: until it is. on_wait: called once before, if it is not.

    Raises:
        HSpecError: it cannot be made.
    """
    lock = FileLock(path.with_name(path.name + ".lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            if wait:
                on_wait()
                lock.acquire()
    except OSError as error:
        raise HSpecError(f"cannot lock {lock.lock_file}: {reason(error)}") from error
    if not lock.is_locked:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()
