"""A lock is one process's, is free again however that ends, and says where it cannot be made."""

import subprocess
import sys
from pathlib import Path

import pytest

from hspec.errors import HSpecError
from hspec.locks import alone

HOLD = """
import sys, time
from pathlib import Path
from hspec.locks import alone
with alone(Path(sys.argv[1])) as free:
    print(free, flush=True)
    time.sleep(60)
"""


def test_one_process_at_a_time(tmp_path: Path) -> None:
    place = tmp_path / "new" / "work"
    with subprocess.Popen([sys.executable, "-c", HOLD, place], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "True\n"
        with alone(place) as free:
            assert not free
        with alone(place, wait=True, on_wait=other.kill) as free:
            assert free, "a process that was killed holds nothing"
        assert other.wait() < 0, "it was waited for, and that was said"
    with alone(place, wait=True, on_wait=lambda: pytest.fail("nobody has it")) as free:
        assert free
    with alone(place) as free:
        assert free


def test_what_fails_inside_gives_the_lock_back(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="inside"), alone(tmp_path / "work"):
        raise ValueError("inside")
    with alone(tmp_path / "work") as free:
        assert free


def test_where_none_can_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HSpecError, match=r"cannot lock .*work\.lock"), alone(tmp_path / "file" / "work"):
        pytest.fail("not held")
