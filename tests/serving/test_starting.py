"""Starting a server that does not start; those that do are started in test_server.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hspec.errors import HSpecError
from hspec.serving import server as module
from hspec.serving.server import cause, server


@pytest.mark.parametrize(
    "said, why",
    [
        ("INFO fine\nhspec: cannot listen on a:1\n", "hspec: cannot listen on a:1"),
        ("(Core) ERROR ValueError: no such layer\n(Api) RuntimeError: see root cause above\n", "ValueError: no such layer"),
        ("a.b.SomeException: told\nmore", "a.b.SomeException: told"),
        ("Killed\n", "Killed"),
        ("", ""),
    ],
)
def test_the_first_error_is_the_cause(said: str, why: str) -> None:
    assert cause(said) == why


def test_a_server_that_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "logs" / "a.log"
    with (
        pytest.raises(HSpecError, match=r"did not start \(all it said is in .*a\.log\): hspec: ") as told,
        server(["nowhere"], log),
    ):
        pass
    assert log.read_text().strip().splitlines()[-1] in str(told.value)


def test_a_server_that_is_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sleeper = tmp_path / "python"
    sleeper.write_text("#!/bin/sh\nexec sleep 60\n")
    sleeper.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(sleeper))
    monkeypatch.setattr(module, "START_SECONDS", 0.2)
    with pytest.raises(HSpecError, match="did not start within"), server(["a"], tmp_path / "a.log"):
        pass
