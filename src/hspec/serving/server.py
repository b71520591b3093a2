"""``hspec serve`` as a process of its own on a free port of loopback, for as long as a block lasts."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import requests

from hspec.errors import HSpecError
from hspec.files import reason

START_SECONDS = 600
"""Longest that a server may take to start ..."""
STOP_SECONDS = 60
"""... and to stop, before it is killed."""
_SAID = 1000
"""Characters of the log that an error quotes at most."""
_CAUSE = re.compile(r"^hspec: .*|\b[\w.]*(?:Error|Exception): .*", re.MULTILINE)


@contextmanager
def server(arguments: Sequence[str], log: Path) -> Iterator[str]:
    """Start ``hspec serve`` with these arguments, wait until it answers, and stop it in the end; gives its URL.

    Args:
        log: what it says goes there.

    Raises:
        HSpecError: it does not start; its first error is in the message.
    """
    port = free_port()
    command = [sys.executable, "-m", "hspec.cli", "serve", *arguments, "--port", str(port)]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        out = log.open("wb")
    except OSError as error:
        raise HSpecError(f"cannot write {log}: {reason(error)}; free some space or choose another place") from error
    with out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(process, url, log)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def free_port() -> int:
    with socket.socket() as attempt:
        attempt.bind(("127.0.0.1", 0))
        return attempt.getsockname()[1]


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise HSpecError(f"the server did not start (all it said is in {log}): {_cause_in(log)}")
        try:
            if requests.get(f"{url}/health", timeout=10).ok:
                return
        except requests.RequestException:
            pass
        time.sleep(0.5)
    raise HSpecError(f"the server did not start within {START_SECONDS} seconds (all it said is in {log}): {_cause_in(log)}")


def cause(said: str) -> str:
    """What went wrong, from all that a server said: its first error, as those behind it follow from that; or its last words."""
    found = _CAUSE.search(said)
    return (found.group() if found else said.strip()[-_SAID:])[:_SAID]


def _cause_in(log: Path) -> str:
    return cause(log.read_text(encoding="utf-8", errors="replace"))
