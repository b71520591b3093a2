"""The scripts of ``benchmarks`` that make fine-tuned targets and compare what drafters are worth on them."""

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from hspec.errors import HSpecError, UsageError
from hspec.evaluation.records import RecordFile
from hspec.training.conversations import Conversation
from hspec.training.prompts import Prompt, clean_prompts, prompt_id
from hspec.training.sources import SourceConfig, stream_sources
from tests.evaluation.test_summary import record
from tests.saved import loaded, save_target, write_exchanges
from tests.tiny import tiny_target

SCRIPTS = Path(__file__).parent.parent / "benchmarks"
TEMPLATE = SCRIPTS / "templates" / "question_answer.jinja"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def settings(tmp_path: Path) -> Any:
    return script("finetune_target").Settings(
        target=str(save_target(tmp_path / "target")), data=str(write_exchanges(tmp_path / "data.jsonl", 200)), template=None,
        steps=12, batch_tokens=512, max_tokens=128, learning_rate=0.003, warmup=1, precision="fp32", seed=0, held_out=2,
    )  # fmt: skip


def test_a_fine_tune(settings: Any, tmp_path: Path) -> None:
    """It learns what the held-out conversations have too, is loaded by its folder, and has the template that it was trained with."""
    tune = script("finetune_target")
    about = tune.run(replace(settings, template=str(TEMPLATE)), tmp_path / "tuned")
    assert about["held_out_loss_after"] < about["held_out_loss_before"] - 0.2
    assert about["held_out"] == 2 and about["conversations"] == 197, "three of the 200 are held out, of which two are looked at"
    tuned, before = loaded(tmp_path / "tuned"), loaded(tmp_path / "target")
    assert tuned.weight_hash() != before.weight_hash()
    assert tuned.template.text([{"role": "user", "content": "Why?"}]) == "### Question\nWhy?\n\n### Answer\n"
    assert json.loads((tmp_path / "tuned" / "finetune.json").read_text()) == about
    with pytest.raises(UsageError, match="is there already: choose another --out"):
        tune.run(settings, tmp_path / "tuned")


def test_what_a_fine_tune_refuses(settings: Any, tmp_path: Path) -> None:
    tune = script("finetune_target")
    with pytest.raises(UsageError, match="no template at gone"):
        tune.run(replace(settings, template="gone"), tmp_path / "tuned")
    rewriting = tmp_path / "rewriting.jinja"
    rewriting.write_text("{{ messages[-1]['content'] }}")
    with pytest.raises(HSpecError, match="a template that only appends"):
        tune.run(replace(settings, template=str(rewriting)), tmp_path / "tuned")
    few = write_exchanges(tmp_path / "few.jsonl", 1)
    with pytest.raises(HSpecError, match="0 held out: give more"):
        tune.run(replace(settings, data=str(few)), tmp_path / "tuned")
    assert not (tmp_path / "tuned").exists()


def test_the_template_appends_only(tmp_path: Path) -> None:
    """Two turns, as the document that is trained on: the answers and the tokens that end them are the assistant's, the rest is not."""
    target = loaded(save_target(tmp_path / "target"))
    template = target.template
    template.tokenizer.chat_template = TEMPLATE.read_text()
    turns = [("system", "s t"), ("user", "a b"), ("assistant", "c d"), ("user", "e f"), ("assistant", "g h")]
    tokens, mask = template.encode_supervised([{"role": role, "content": content} for role, content in turns])
    end = template.tokenizer.eos_token
    supervised = template.tokenizer.decode([t for t, own in zip(tokens, mask, strict=True) if own])
    assert supervised == f"c d{end}g h{end}"


def test_data(tmp_path: Path) -> None:
    data = script("finetune_data")
    (tmp_path / "alpaca.json").write_text(
        json.dumps(
            [{"instruction": "Add.", "input": "1, 2", "output": "3"}, {"instruction": "Sing.", "input": "", "output": "La."}]
        )
    )
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text('{"id": 1, "turns": ["  SING. "]}\n{"id": 2, "turns": ["a line\u2028of its own"]}\n', encoding="utf-8")
    out = tmp_path / "out.jsonl"
    assert data.write(data.instructions(tmp_path / "alpaca.json"), out, data.measured([tasks])) == (1, 1)
    messages = [{"role": "user", "content": "Add.\n\n1, 2"}, {"role": "assistant", "content": "3"}]
    assert [json.loads(line) for line in out.read_text().splitlines()] == [{"messages": messages}]
    body = "    total = 0\n    for x in values:\n        total += x * x\n    return total"
    (tmp_path / "module.py").write_text(
        f'def squares(values, start=0):\n    """Sum of\n    squares.\n\n    Of numbers."""\n{body}\n\n\ndef silent():\n    pass\n'
    )
    (tmp_path / "bad.py").write_text("def (")
    ((asked, answer),) = data.functions(tmp_path)
    assert asked == "Write the Python function squares(values, start=0). Sum of squares."
    assert answer.startswith("```python\ndef squares(") and answer.endswith("return total\n```")


def test_copying_data() -> None:
    """Every word of an answer that is not of its frame stands in the prompt, in the same order; held-out conversations give none."""
    copying = script("copying_data")
    lines = [f"Sentence number {n} says {n * n} and nothing else." for n in range(40)]
    pairs = list(copying.copying(lines, 50, 500, 3))
    assert pairs == list(copying.copying(lines, 50, 500, 3)) != list(copying.copying(lines, 50, 500, 4))
    for asked, answer in pairs:
        copied = [line for line in lines if line in answer]
        assert copied and all(line in asked for line in copied)
        assert len(answer) <= sum(map(len, copied)) + 3 * len(copied) + len('The sentence is: ""')
        assert len(asked) < 500 + 70 + 150 + 14 * 12  # sentences, the last of them, the question, numbers
    assert len(list(copying.copying(lines[:5], 5, 10_000, 0))) == 5  # fewer sentences than there is room for

    said = "This one is free for the training of drafters! Short one.\n\n* A third one, as long as the first one is."
    asked = {
        held: next(t for t in map("Say {}.".format, range(1000)) if Prompt(prompt_id(t), t).held_out is held)
        for held in (True, False)
    }
    chats = {h: Conversation.of([{"role": "user", "content": asked[h]}, {"role": "assistant", "content": said}]) for h in asked}
    assert list(copying.sentences([chats[True]])) == []
    expected = ["This one is free for the training of drafters!", "* A third one, as long as the first one is."]
    assert list(copying.sentences([chats[False], chats[True], chats[False]])) == expected


def test_induction_heads() -> None:
    """Of two heads the first attends to the token behind the first saying, the second to that itself; random ones do neither."""
    heads, tiny = script("induction_heads"), tiny_target("llama", layers=3)
    assert float(heads.induction(tiny, length=20).max()) < 0.5 and heads.induction(tiny, length=20).shape == (3, 4)

    class Known:
        set_attn_implementation = staticmethod(lambda name: None)

        def __call__(self, ids: torch.Tensor, output_attentions: bool) -> SimpleNamespace:
            weights = torch.zeros(len(ids), 2, 20, 20)
            assert torch.equal(ids[:, :10], ids[:, 10:])
            for here in range(10, 20):
                weights[:, 0, here, here - 9] = weights[:, 1, here, here - 10] = 1
            return SimpleNamespace(attentions=[weights])

    assert heads.induction(SimpleNamespace(vocab_size=99, model=Known()), length=10).tolist() == [[1.0, 0.0]]


def test_docstring_prompts() -> None:
    """Words for tokens: as many as asked, of modules that have so many; a part of the library that is missing is passed over."""
    script_ = script("docstring_prompts")
    names = ["json", "textwrap", "no_such_module", "token", "argparse"]
    made = list(script_.prompts(names, 200, 9, 1, str.split, " ".join))
    assert {name for name, _ in made} == {"json", "textwrap", "argparse"}
    for number, (_, prompt) in enumerate(made):
        text, request = prompt.split("\n\n")
        assert len(text.split()) == 200 and request == script_.REQUESTS[number]
    assert list(script_.prompts(names, 200, 2, 1, str.split, " ".join)) == made[:2]
    said = script_.documentation(sys.modules["textwrap"])
    assert said.startswith("textwrap\nText wrapping and filling.") and "\n\nTextWrapper.wrap\nwrap(text : string)" in said


def test_transfer(tmp_path: Path) -> None:
    """The second target lacks one prompt, which then counts for neither; of the two others it needs twice the steps."""
    transfer = script("transfer")
    folders = {"first": {"1": [4, 4], "2": [2, 2], "3": [4]}, "second": {"1": [2, 2, 2, 2], "2": [1, 1, 1, 1]}}
    for name, answers in folders.items():
        for id, runs in answers.items():
            for contender in ("ar", "a"):
                RecordFile(tmp_path / name / "records.jsonl").append(record("t", id, contender, runs, 0.1))
        target = {"name": name, "weights": f"weights of {name}", "template": "x"}
        contenders = {"ar": {"method": "ar"}, "a": {"method": "hspec"}}
        (tmp_path / name / "evaluation.json").write_text(json.dumps({"target": target, "contenders": contenders}))
    rows = transfer.compare([transfer.Answers(tmp_path / name) for name in folders], "greedy", "a")
    assert [(row["tau"]["value"], row["prompts"], row["steps"]) for row in rows] == [(3.0, 2, 4), (1.5, 2, 8)]
    assert [row["over_first"]["value"] for row in rows] == [1.0, 0.5]
    # Prompts are paired: whichever are drawn, the second is at half.
    assert (rows[1]["over_first"]["low"], rows[1]["over_first"]["high"], rows[1]["over_first"]["verdict"]) == (
        0.5,
        0.5,
        "behind",
    )
    assert rows[1]["weights"] == "weights of second" and rows[0]["tau"]["low"] == 2.0 and rows[0]["tau"]["high"] == 4.0
    with pytest.raises(UsageError, match="holds no evaluation"):
        transfer.Answers(tmp_path)


def test_the_prompts_that_are_packed_are_those_that_would_be_answered(tmp_path: Path) -> None:
    pack = script("gpu_pack")
    target = loaded(save_target(tmp_path / "target"))
    source = SourceConfig(source=str(write_exchanges(tmp_path / "data.jsonl", 60)))
    assert pack.write_prompts(target, stream_sources([source]), tmp_path / pack.FILE) == 60

    def ids(source: str) -> list[str]:
        conversations = stream_sources([SourceConfig(source=source)])
        return [p.id for p in clean_prompts(conversations, lambda text: len(target.tokenizer(text).input_ids))[0]]

    assert ids(str(tmp_path / pack.FILE)) == ids(source.source) and len(set(ids(source.source))) == 60
