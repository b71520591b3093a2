"""Conversations to fine-tune a target with (``finetune_target.py``): Python's standard library, or a file in Alpaca's layout.

    python benchmarks/finetune_data.py code code.jsonl
    python benchmarks/finetune_data.py alpaca alpaca_en_demo.json instructions.jsonl --without tasks/*.jsonl

``code`` takes functions of the standard library of the Python that runs: the name and what the documentation string says are asked
for, the source is the answer. ``alpaca`` takes a JSON list of ``{"instruction", "input", "output"}``. Prompts of the task files given
with ``--without`` are left out, since what is measured on must not be trained on.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

from hspec.training.prompts import prompt_id

SKIPPED = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3", "__pycache__", "ensurepip", "turtledemo"}
CHARACTERS = range(120, 1400)
"""Of a function's source."""

Pair = tuple[str, str]
"""What the user says, and the answer."""


def functions(library: Path) -> Iterator[Pair]:
    """The documented functions of all modules below a folder, in the order of their paths."""
    for path in sorted(library.rglob("*.py")):
        if SKIPPED & set(path.relative_to(library).parts):
            continue
        source = path.read_text(encoding="utf-8", errors="replace")
        try:
            tree = ast.parse(source)
        except SyntaxError:  # some files are bad on purpose
            continue
        for node in tree.body:
            documented = ast.get_docstring(node) if isinstance(node, ast.FunctionDef) else None
            written = ast.get_source_segment(source, node)
            if isinstance(node, ast.FunctionDef) and documented and written and len(written) in CHARACTERS:
                asked = " ".join(documented.split("\n\n")[0].split())
                yield f"Write the Python function {node.name}({ast.unparse(node.args)}). {asked}", f"```python\n{written}\n```"


def instructions(path: Path) -> Iterator[Pair]:
    """The records of a file in Alpaca's layout."""
    for record in json.loads(path.read_text(encoding="utf-8")):
        asked = "\n\n".join(part for part in (record["instruction"], record.get("input")) if part)
        yield asked, record["output"]


def measured(paths: Sequence[Path]) -> set[str]:
    """The ids of all first turns of task files."""
    # Lines of the file, not of str.splitlines, which also ends them at characters that JSON strings may have as they are.
    lines = (line for path in paths for line in path.read_text(encoding="utf-8").split("\n") if line.strip())
    return {prompt_id(json.loads(line)["turns"][0]) for line in lines}


def write(pairs: Iterator[Pair], out: Path, without: set[str]) -> tuple[int, int]:
    """One conversation a line; returns how many were written, and how many were left out."""
    written = left_out = 0
    with out.open("w", encoding="utf-8") as file:
        for asked, answer in pairs:
            if prompt_id(asked) in without:
                left_out += 1
                continue
            messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": messages}) + "\n")
            written += 1
    return written, left_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True)
    for kind in ("code", "alpaca"):
        own = kinds.add_parser(kind)
        if kind == "alpaca":
            own.add_argument("file", type=Path)
        own.add_argument("out", type=Path)
        own.add_argument("--without", type=Path, nargs="*", default=[], metavar="TASKS.jsonl")
    given = parser.parse_args()
    try:
        pairs = functions(Path(sysconfig.get_path("stdlib"))) if given.kind == "code" else instructions(given.file)
        written, left_out = write(pairs, given.out, measured(given.without))
    except (OSError, ValueError, KeyError, TypeError) as error:
        sys.exit(f"finetune_data: cannot be read or written, or not in the layout that is expected ({error!r})")
    print(f"{given.out}: {written:,} conversations, {left_out} left out as they are measured on")


if __name__ == "__main__":
    main()
