"""docs/methods.md says what the code does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.main import get_command

from hspec.cli import app
from hspec.drafters.methods import METHODS
from hspec.evaluation.compare import PAPER_TARGETS, compare, methods_table

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


def rows(heading: str) -> dict[str, list[str]]:
    """The cells of the first table of a section, by their first one."""
    section = TEXT.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    table = re.search(r"((?:^\|.*\n)+)", section, re.MULTILINE)
    assert table is not None
    cells = [[c.strip().strip("`") for c in line.strip("|").split("|")] for line in table.group(1).splitlines()[2:]]
    return {first: rest for first, *rest in cells}


def test_every_method_is_in_the_table_as_it_is() -> None:
    shown = rows("The table")
    assert list(shown) == list(METHODS)
    for row in methods_table("qwen3-8b"):
        passes, kept = shown[row["name"]][-2:]
        autoregressive = row["passes"] == 7
        assert passes == ("k" if autoregressive else str(row["passes"]))
        assert kept == (f"{row['kv_bytes_per_token'] // 1024} KiB" if row["kv_bytes_per_token"] else "0")


def test_the_parameters() -> None:
    shown = rows("Parameters")
    for column, target in enumerate(PAPER_TARGETS):
        found = {row["method"]: row for row in compare(target)}
        assert shown.keys() == found.keys()
        for name, cells in shown.items():
            row = found[name]
            difference = "" if name == "hspec" else f" ({row['difference_percent']:+.2f} %)"
            assert cells[column] == f"{row['parameters'] / 1e6:,.1f}{difference}"


def test_the_arithmetic() -> None:
    found = {row["method"]: row["parameters"] for row in compare("qwen3-8b")}
    assert f"{found['hspec']:,} / {found['dspark']:,} = {found['hspec'] / found['dspark']:.5f}" in TEXT
    parts = re.findall(r"^\| (?!all|part)[^|]*\| ([\d,-]+) \| ([\d,]+) \|$", TEXT, re.MULTILINE)
    assert len(parts) == 6
    for column, name in ((0, "dspark"), (1, "hspec")):
        assert sum(int(row[column].replace(",", "").replace("-", "0")) for row in parts) == found[name]


def test_the_files_are_there() -> None:
    named = [file for cells in rows("Which file has which part").values() for file in re.findall(r"[\w/]+(?:\.py|/)", cells[0])]
    assert len(named) > 15
    assert all((ROOT / "src" / "hspec" / "drafters" / file).exists() for file in named)


@pytest.mark.parametrize(
    "line", [line for block in re.findall(r"```sh\n(.*?)```", TEXT, re.DOTALL) for line in block.splitlines()]
)
def test_the_commands(line: str) -> None:
    command, *words = line.split("#")[0].split()[1:]
    known = {name for parameter in get_command(app).commands[command].params for name in parameter.opts}  # type: ignore[attr-defined]
    assert {w for w in words if w.startswith("--")} <= known
