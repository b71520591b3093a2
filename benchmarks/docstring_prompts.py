"""Long prompts with free answers, for ``hspec eval --tasks FILE``: the documentation of Python's own modules, with a request.

    python benchmarks/docstring_prompts.py docs-1500.jsonl --tokens 1500 --prompts 6

The long tasks that ship (``long-cite``, ``long-qa``) are answered by copying from texts that nobody could guess. These are as long and
are answered in the model's own words, so that the two tell length from copying. What the modules say depends on the Python that runs.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType

from hspec.errors import HSpecError
from hspec.targets.sources import load_target

_LIBRARY = (
    "argparse asyncio calendar collections concurrent.futures configparser contextlib csv ctypes datetime decimal difflib dis "
    "email.message enum fileinput fractions functools gettext html.parser http.client http.cookies imaplib inspect io itertools json "
    "logging mailbox math mimetypes multiprocessing.pool optparse os pathlib pickle pickletools pprint random re selectors shelve shlex "
    "shutil smtplib socket sqlite3 ssl statistics string subprocess tarfile tempfile textwrap threading timeit tokenize traceback types "
    "typing unittest urllib.parse urllib.request uuid weakref zipfile"
)
MODULES = _LIBRARY.split()
REQUESTS = (
    "Summarize the documentation above in a few sentences.",
    "Explain to a beginner what the module above is for, and show a short example.",
    "List the most important functions of the module above and say what each does.",
    "Write a short tutorial about the module above.",
)


def documentation(module: ModuleType) -> str:
    """What a module, its functions and its classes say of themselves, each below its name."""
    return "\n\n".join(f"{name}\n{said}" for name, said in _parts(module))


def _parts(module: ModuleType) -> Iterator[tuple[str, str]]:
    for name, thing in [(module.__name__, module), *sorted(vars(module).items())]:
        if thing is not module and not (inspect.isroutine(thing) or inspect.isclass(thing)):
            continue
        if said := inspect.getdoc(thing):
            yield name, said
        if inspect.isclass(thing):
            methods = sorted((m, f) for m, f in vars(thing).items() if inspect.isfunction(f) and not m.startswith("_"))
            yield from ((f"{name}.{method}", inspect.getdoc(f) or "") for method, f in methods if f.__doc__)


def prompts(
    modules: Sequence[str], tokens: int, count: int, seed: int, encode: Callable[[str], list[int]], decode: Callable[[list[int]], str]
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Names of modules and prompts: documentation cut to so many tokens, and a request behind it. Modules that say less are passed over.

    Args:
        count: of prompts, as far as there are modules. seed: of their order.
    """
    order = random.Random(seed).sample(list(modules), len(modules))
    made = 0
    for name in order:
        try:
            ids = encode(documentation(importlib.import_module(name)))
        except ImportError:  # a part of the library that this system lacks
            continue
        if len(ids) >= tokens and made < count:
            yield name, f"{decode(ids[:tokens])}\n\n{REQUESTS[made % len(REQUESTS)]}"
            made += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", default="smollm2", help="whose tokenizer counts")
    parser.add_argument("--tokens", type=int, default=1500)
    parser.add_argument("--prompts", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    try:
        tokenizer = load_target(given.target).tokenizer
        made = list(prompts(MODULES, given.tokens, given.prompts, given.seed, tokenizer.encode, tokenizer.decode))
        lines = (json.dumps({"id": name, "turns": [prompt]}) + "\n" for name, prompt in made)
        given.out.write_text("".join(lines), encoding="utf-8")
    except (OSError, HSpecError) as error:
        sys.exit(f"docstring_prompts: {error}")
    print(f"{given.out}: {len(made)} prompts of {given.tokens:,} tokens: {', '.join(name for name, _ in made)}")


if __name__ == "__main__":
    main()
