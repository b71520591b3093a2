"""The command line: what it prints, and one clear line and an exit code for everything that can go wrong."""

from __future__ import annotations

import io
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from hspec import cli
from hspec.api import make_request
from hspec.decoding.engine import Engine
from hspec.decoding.params import SamplingParams
from hspec.decoding.session import Session
from hspec.drafters.methods import METHODS
from hspec.drafters.parameters import parameters_by_part
from hspec.drafters.presets import PRESETS
from hspec.locks import alone
from hspec.training.checkpoints import Checkpoints
from hspec.training.job import read_job
from hspec.training.trainer import Trainer
from tests.remote.helpers import serving
from tests.saved import loaded, save_drafter_for, save_target, write_exchanges
from tests.tiny import tiny_target


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Run = Callable[..., Outcome]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Targets, drafters and data that all tests read."""
    place = tmp_path_factory.mktemp("cli")
    target = loaded(save_target(place / "target", max_positions=160))
    save_drafter_for(target, place / "drafter")
    save_drafter_for(tiny_target(vocab=190, layers=3, hidden=48), place / "other-vocabulary")
    save_drafter_for(tiny_target(layers=3, hidden=48, kv_heads=4), place / "other-heads")
    save_target(place / "no-template", chat_template=False)
    write_exchanges(place / "data.jsonl", 60)
    (place / "tiny.yaml").write_text("{fusion_rank: 16, intermediate_size: 32, block_size: 3, head: {kind: markov, rank: 4}}")

    for name, file, change in (
        ("truncated-drafter", "drafter/drafter.safetensors", lambda b: b[: len(b) // 2]),
        ("corrupt-drafter", "drafter/drafter.safetensors", lambda b: b"\x00" * 100),
        ("unknown-key", "drafter/config.json", lambda b: b.replace(b'"format"', b'"frobnicate": 1, "format"')),
        ("broken-config", "drafter/config.json", lambda b: b[:-20]),
        ("truncated-target", "target/model.safetensors", lambda b: b[: len(b) // 2]),
        ("broken-target-config", "target/config.json", lambda b: b[:-20]),
    ):
        shutil.copytree(place / Path(file).parent, place / name)
        path = place / name / Path(file).name
        path.write_bytes(change(path.read_bytes()))
    return place


@pytest.fixture
def hspec(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Run:
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)

    def run(*arguments: Any, stdin: str | bytes = "") -> Outcome:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["hspec", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), out, err)

    return run


@pytest.fixture
def model(place: Path) -> list[str]:
    return ["-t", str(place / "target"), "-d", str(place / "drafter")]


# -- bad input ---------------------------------------------------------------------------------------------------

GENERATE = ["generate", "hi", "-t", "{place}/target"]
TRAIN = [
    "train", "-t", "{place}/target", "--data", "{place}/data.jsonl", "--preset", "{place}/tiny.yaml", "--given-answers",
    "-o", "{tmp}/run",
]  # fmt: skip
BAD: dict[str, tuple[list[str], int, str]] = {
    "no such command": (["frobnicate"], 2, "No such command 'frobnicate'"),
    "no such option": (["generate", "--frob"], 2, "No such option: --frob"),
    "option without value": (["generate", "hi", "-k"], 2, "Option '-k' requires an argument"),
    "too many arguments": (["generate", "hi", "there"], 2, "unexpected extra argument"),
    "unknown model": (["generate", "hi", "-t", "no-such", "--no-draft"], 2, "no target 'no-such': it is no folder"),
    "no model's name": (["generate", "hi", "-t", "", "--no-draft"], 2, "the target's name is empty"),
    "gguf that is not there": (["generate", "hi", "-t", "{tmp}/x.gguf", "--no-draft"], 2, "no file {tmp}/x.gguf"),
    "wrong folder": (["generate", "hi", "-t", "{tmp}", "--no-draft"], 2, "{tmp} is no model's folder"),
    "a file as a model": (["generate", "hi", "-t", "{place}/data.jsonl", "--no-draft"], 2, "is a file, but not a GGUF one"),
    "a drafter as a target": (["generate", "hi", "-t", "{place}/drafter", "--no-draft"], 2, "holds a drafter, not a target"),
    "truncated target": (["generate", "hi", "-t", "{place}/truncated-target", "--no-draft"], 1, "damaged or incomplete"),
    "broken target config": (["generate", "hi", "-t", "{place}/broken-target-config", "--no-draft"], 1, "config.json is damaged"),
    "no drafter ships": (GENERATE, 2, "no drafter ships for"),
    "no such drafter": ([*GENERATE, "-d", "{tmp}/none"], 2, "no drafter at {tmp}/none"),
    "wrong drafter folder": ([*GENERATE, "-d", "{tmp}"], 2, "{tmp} is not a drafter: it has no config.json"),
    "a target as a drafter": ([*GENERATE, "-d", "{place}/target"], 2, "is {place}/target a target's folder?"),
    "drafter for another vocabulary": (
        [*GENERATE, "-d", "{place}/other-vocabulary"], 2, "made for tiny-llama (vocab_size 190), not for {place}/target (vocab_size 211)",
    ),
    "drafter for other heads": ([*GENERATE, "-d", "{place}/other-heads"], 2, "reads K/V of 4 heads x 16"),
    "truncated drafter": ([*GENERATE, "-d", "{place}/truncated-drafter"], 1, "drafter.safetensors is damaged or cut short"),
    "corrupt drafter": ([*GENERATE, "-d", "{place}/corrupt-drafter"], 1, "drafter.safetensors is damaged or cut short"),
    "unknown config key": ([*GENERATE, "-d", "{place}/unknown-key"], 1, "config.json: frobnicate: Extra inputs"),
    "broken config": ([*GENERATE, "-d", "{place}/broken-config"], 1, "config.json is damaged"),
    "k above the trained one": ([*GENERATE, "-d", "{place}/drafter", "-k", "6"], 2, "trained for 1 to 5"),
    "k of zero": ([*GENERATE, "-k", "0"], 2, "Invalid value for '-k'"),
    "k without a drafter": ([*GENERATE, "--no-draft", "-k", "2"], 2, "--no-draft drafts none"),
    "both drafter and none": ([*GENERATE, "--no-draft", "-d", "{place}/drafter"], 2, "contradict each other"),
    "empty prompt": (["generate", "", "-t", "{place}/target"], 2, "the prompt is empty"),
    "blank prompt": (["generate", " \n", "-t", "{place}/target"], 2, "the prompt is empty"),
    "nothing on stdin": (["generate", "-t", "{place}/target"], 2, "the prompt is empty"),
    "prompt longer than the context": (
        ["generate", "word " * 100, "-t", "{place}/target", "--no-draft"], 2, "context",
    ),
    "no chat template": (["generate", "hi", "-t", "{place}/no-template", "--no-draft"], 2, "no chat template: pass a plain prompt"),
    "raw with a system message": ([*GENERATE, "--raw", "--system", "x"], 2, "no place for --system"),
    "negative temperature": ([*GENERATE, "--temperature", "-1"], 2, "--temperature: it must be greater than or equal to 0"),
    "infinite temperature": ([*GENERATE, "--temperature", "inf"], 2, "--temperature: a finite number is needed"),
    "no number": ([*GENERATE, "--top-p", "nan"], 2, "--top-p: a finite number is needed"),
    "top-p above 1": ([*GENERATE, "--top-p", "1.5"], 2, "--top-p: it must be less than or equal to 1"),
    "empty stop": ([*GENERATE, "--stop", ""], 2, "--stop: a stop string must not be empty"),
    "no tokens": ([*GENERATE, "-n", "0"], 2, "Invalid value for '--max-tokens'"),
    "words for a number": ([*GENERATE, "--top-k", "many"], 2, "Invalid value for '--top-k'"),
    "unknown type": ([*GENERATE, "--dtype", "int4"], 2, "--dtype int4: choose one of float32"),
    "unknown device": ([*GENERATE, "--device", "abacus"], 2, "--device abacus cannot be used here"),
    "no real device": ([*GENERATE, "--device", "meta"], 2, "--device meta cannot be used here"),
    "absent device": ([*GENERATE, "--device", "cuda:99"], 2, "--device cuda:99 cannot be used here"),
    "no threads": ([*GENERATE, "--threads", "0"], 2, "Invalid value for '--threads'"),
    "info of nothing": (["info", "no-such"], 2, "no target 'no-such'"),
    "info of an unknown config key": (["info", "{place}/unknown-key"], 1, "frobnicate: Extra inputs"),
    "info of a folder": (["info", "{tmp}"], 2, "is no model's folder"),
    "no training data": ([*TRAIN, "--data", "{tmp}/none"], 2, "no data file at {tmp}/none"),
    "data with bad lines": ([*TRAIN[:4], "{place}/tiny.yaml", *TRAIN[5:]], 1, "usable conversations"),
    "no settings": (["train", "-c", "{tmp}/none.yaml"], 2, "cannot read the settings in {tmp}/none.yaml"),
    "unknown preset": ([*TRAIN, "--preset", "huge"], 2, "no preset 'huge'"),
    "preset for another target": ([*TRAIN, "--preset", "qwen3-8b"], 2, "preset qwen3-8b is for Qwen/Qwen3-8B"),
    "no steps": ([*TRAIN, "--steps", "0"], 2, "--steps: Input should be greater than 0, not 0"),
    "unknown precision": ([*TRAIN, "--precision", "fp4"], 2, "--precision: Input should be 'fp32' or 'bf16'"),
    "nothing to resume": (["train", "-o", "{tmp}", "--resume"], 2, "nothing to resume"),
    "resume with settings": (
        ["train", "-o", "{tmp}", "--resume", "--steps", "3", "--precision", "fp32", "--given-answers"], 2,
        "leave out --own-answers, --steps, --precision",
    ),
    "an address that is none": ([*TRAIN, "--feature-server", "here"], 2, "--feature-server: 'here' is no address of a feature"),
    "answers by nobody": (
        [*TRAIN[:-3], "--feature-server", "here:1", "-o", "{tmp}/run"], 2, "at a feature server, which writes no answers",
    ),
    "nobody at an address": ([*TRAIN, "--feature-server", "127.0.0.1:1"], 1, "no feature server at 127.0.0.1:1 (Connection refused)"),
    "a server nowhere": (["serve-features", "{place}/target", "--listen", "7700"], 2, "'7700' is no address of a feature server"),
    "a server of a strange type": (["serve-features", "{place}/target", "--dtype", "int8"], 2, "choose one of float32, bfloat16"),
    "a server of two precisions": (
        ["serve-features", "{place}/target", "--dtype", "float16", "--precision", "bf16"], 2, "choose fp32, or bf16 products of a",
    ),
    "a server where nobody may listen": (
        ["serve-features", "{place}/target", "--listen", "unix:{place}/data.jsonl"], 2, "there is a file that is no socket",
    ),
    "training into a file": ([*TRAIN, "-o", "{place}/data.jsonl"], 2, "is a file, a folder is needed"),
    "training without a template": ([*TRAIN, "-t", "{place}/no-template"], 2, "has no chat template"),
    "measuring nothing": (["measure", "-t", "{place}/target", "-d", "{place}/drafter", "--limit", "0"], 2, "'--limit'"),
    "measuring into other data": (
        ["measure", "-t", "{place}/target", "-d", "{place}/drafter", "-o", "{place}/data.jsonl"], 2, "not a measured answer",
    ),
    "measuring into a folder": (["measure", "-t", "{place}/target", "-o", "{tmp}"], 2, "{tmp} is no file"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_a_code(case: str, hspec: Run, place: Path, tmp_path: Path) -> None:
    arguments, code, message = BAD[case]

    def fill(text: str) -> str:
        return text.replace("{place}", str(place)).replace("{tmp}", str(tmp_path))

    before = sorted(place.rglob("*"))
    done = hspec(*map(fill, arguments))
    lines = done.err.splitlines()
    assert done.code == code, done.err
    assert len(lines) == 1 and lines[0].startswith("hspec: "), done.err
    assert fill(message) in lines[0]
    assert "Traceback" not in done.out + done.err
    assert sorted(place.rglob("*")) == before and not (tmp_path / "run").exists()  # nothing half-written


def test_debug_adds_the_traceback(hspec: Run, tmp_path: Path) -> None:
    done = hspec("--debug", "info", tmp_path)
    assert done.code == 2
    assert "Traceback (most recent call last)" in done.err and "UsageError" in done.err
    assert done.err.splitlines()[-1] == f"hspec: {tmp_path} is no model's folder: it has neither a config.json nor a .gguf file"
    assert hspec("info", tmp_path, "--debug").err == done.err  # wherever it stands


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device", "/some/where"), "/some/where: No space left on device; free some space there"),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
        (MemoryError(), "out of memory: no message; take a smaller batch"),
        (RuntimeError("not enough memory: you tried to allocate 5 GB"), "out of memory: not enough memory"),
        (ValueError("odd\nthing"), "unexpected ValueError: odd (--debug shows where; please report it)"),
    ],
)
def test_errors_that_nobody_foresaw(
    hspec: Run, place: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, message: str
) -> None:
    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("hspec.evaluation.describe.describe", fail)
    done = hspec("info", "x")
    assert done.code == 1 and done.err.startswith(f"hspec: {message}") and len(done.err.splitlines()) == 1
    assert "Traceback" in hspec("info", "x", "--debug").err


def test_interruption(hspec: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hspec.evaluation.describe.describe", interrupted)
    assert hspec("info", "x") == Outcome(130, "", "")


def test_text_on_stdin_must_be_text(hspec: Run, model: list[str]) -> None:
    done = hspec("generate", *model, stdin=b"\xff\xfe")
    assert done.code == 2 and done.err.startswith("hspec: the prompt on stdin is not UTF-8 text")


@pytest.mark.parametrize("arguments", [[], ["--help"], ["generate", "--help"], ["train", "--help"]])
def test_help(hspec: Run, arguments: list[str]) -> None:
    done = hspec(*arguments)
    assert done.code == 0 and "Usage:" in done.out and not done.err


def test_warnings_are_one_line_each(hspec: Run, place: Path, tmp_path: Path) -> None:
    other = save_drafter_for(tiny_target(layers=3, hidden=48, seed=5), tmp_path / "d")
    done = hspec("generate", "hi", "-t", place / "target", "-d", other, "-n", 2, "--json")
    assert done.code == 0 and json.loads(done.out)
    assert done.err.startswith("hspec: warning: the drafter was trained on other weights") and len(done.err.splitlines()) == 1


# -- generate ----------------------------------------------------------------------------------------------------


def test_generate_json_is_one_object_and_nothing_else(hspec: Run, place: Path, model: list[str]) -> None:
    done = hspec("generate", "hello there", *model, "-n", 12, "--json", "-k", 3)
    assert (done.code, done.err) == (0, "")
    answer = json.loads(done.out)
    assert done.out.count("\n") == 1
    assert {"text", "token_ids", "steps", "tau", "finish_reason"} <= answer.keys()
    target = loaded(place / "target")
    expected = Engine(target).generate([make_request(target, "hello there", SamplingParams(max_tokens=12))])[0]
    assert answer["token_ids"] == expected.tokens and answer["text"] == expected.text
    assert answer["finish_reason"] == expected.finish_reason == "length"
    assert 1 <= answer["steps"] <= 11 and answer["tau"] == pytest.approx(11 / answer["steps"])


@pytest.mark.parametrize("extra", [[], ["--temperature", "0.8", "--seed", "3"], ["--repetition-penalty", "1.3"]])
def test_drafting_changes_no_text(hspec: Run, place: Path, model: list[str], extra: list[str]) -> None:
    drafted = json.loads(hspec("generate", "hello", *model, "-n", 10, "--json", *extra).out)
    plain = json.loads(hspec("generate", "hello", *model[:2], "--no-draft", "-n", 10, "--json", *extra).out)
    if "--temperature" not in extra:
        assert drafted["token_ids"] == plain["token_ids"]
    assert drafted == json.loads(hspec("generate", "hello", *model, "-n", 10, "--json", *extra).out)
    assert plain["tau"] == 1.0


def test_the_prompt_may_come_from_stdin(hspec: Run, model: list[str]) -> None:
    direct = hspec("generate", "hello\n", *model, "-n", 5).out
    assert (
        hspec("generate", *model, "-n", 5, stdin="hello\n").out
        == direct
        == hspec("generate", "-", *model, "-n", 5, stdin="hello\n").out
    )
    assert direct.strip()


def test_raw_continues_the_prompt(hspec: Run, place: Path) -> None:
    done = hspec("generate", "hello", "-t", place / "no-template", "--no-draft", "--raw", "-n", 5, "--json")
    assert done.code == 0 and len(json.loads(done.out)["token_ids"]) <= 5
    system = hspec("generate", "hello", "-t", place / "target", "--no-draft", "--system", "be brief", "-n", 5, "--json").out
    assert json.loads(system) != json.loads(
        hspec("generate", "hello", "-t", place / "target", "--no-draft", "-n", 5, "--json").out
    )


# -- info --------------------------------------------------------------------------------------------------------


def test_info(hspec: Run, place: Path) -> None:
    for source, kind in ((place / "target", "target"), (place / "drafter", "drafter"), ("smollm2-135m", "preset")):
        done = hspec("info", source, "--json")
        facts = json.loads(done.out)
        assert (done.code, done.err, done.out.count("\n")) == (0, "", 1)
        assert facts["kind"] == kind and facts["parameters"] == sum(facts["parameters_by_part"].values())
    table = hspec("info", place / "target").out
    assert "hidden size" in table and "kv bytes per token fp32" in table


# -- chat --------------------------------------------------------------------------------------------------------


class Watched(Session):
    """Remembers itself and how much of its cache every turn kept."""

    last: Watched
    kept: list[int]

    def __init__(self, *args: Any, **settings: Any):
        super().__init__(*args, **settings)
        self.kept = []
        Watched.last = self

    def _room(self, tokens: int, keep: int) -> Any:
        self.kept.append(keep)
        return super()._room(tokens, keep)


def test_chat_keeps_its_cache_over_turns(hspec: Run, place: Path, model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hspec.decoding.session.Session", Watched)
    done = hspec(
        "chat", *model, "-n", 8, "--temperature", 0, "--system", "brief", stdin="hello\n\n  \nand more\n/exit\nnever\n"
    )
    assert (done.code, done.err) == (0, "")
    session = Watched.last
    assert [m["role"] for m in session.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in session.messages if m["role"] == "user"] == ["hello", "and more"]
    target = loaded(place / "target")
    first = target.template.encode(session.messages[:2])
    assert session.kept[0] == 0 and session.kept[1] >= len(first) - 1  # the first turn's prompt was not run again
    second = target.template.encode(session.messages[:4])
    assert session.cached[: len(second)] == second and len(session.cached) > len(second)
    assert done.out.count("tokens cached") == 2 and f"{len(session.cached)} tokens cached" in done.out
    assert session.messages[2]["content"] in done.out.replace("«", "").replace("»", "")


def test_chat_ends_with_the_input(hspec: Run, model: list[str]) -> None:
    assert hspec("chat", *model, "-n", 3, stdin="hello").code == 0
    assert hspec("chat", *model, stdin="").code == 0


def test_chat_says_when_the_context_is_full(hspec: Run, model: list[str]) -> None:
    """And goes on with the conversation as it was."""
    done = hspec("chat", *model, "-n", 3, stdin="hello\n" + "word " * 100 + "\nhello\n")
    assert done.code == 0 and done.out.count("shorten it by at least") == 1 and done.out.count("tokens cached") == 2


def test_arguments_must_be_text(hspec: Run, model: list[str]) -> None:
    """A shell may hand over any bytes; Python has lone surrogates for those that are no text."""
    for arguments, what in ((["a\udcff"], "the prompt"), (["a", "--system", "b\udcff"], "--system")):
        done = hspec("generate", *model, *arguments)
        assert done.code == 2 and done.err.startswith(f"hspec: {what} is not UTF-8 text"), done.err


def test_ctrl_c_in_a_chat_stops_the_answer_only(hspec: Run, model: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Interrupted(Session):
        def ask(self, text: str, params: Any) -> Any:
            asked.append(text)
            for step in super().ask(text, params):
                yield step
                if text == "one":
                    raise KeyboardInterrupt

    monkeypatch.setattr("hspec.decoding.session.Session", Interrupted)
    done = hspec("chat", *model, "-n", 6, stdin="one\ntwo\n")
    assert done.code == 0 and asked == ["one", "two"] and "(stopped)" in done.out


# -- demo and measure --------------------------------------------------------------------------------------------


@pytest.fixture
def roomy(place: Path, tmp_path: Path) -> list[Any]:
    folder = save_target(tmp_path / "roomy", max_positions=512)
    return ["-t", folder, "-d", save_drafter_for(loaded(folder), tmp_path / "roomy-drafter")]


def test_demo(hspec: Run, roomy: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    done = hspec("demo", *roomy, "-n", 6, "-k", 2, "--json")
    numbers = json.loads(done.out)
    assert done.code == 0 and numbers["identical"] is True and numbers["k"] == 2
    assert {"tau", "acceptance", "ms_per_token", "ms_per_token_ar", "speedup", "cycle"} <= numbers.keys()
    shown = hspec("demo", *roomy, "-n", 2).out
    assert "yes, token for token" in shown and "with H-Spec" in shown and "without drafting" in shown

    from hspec.evaluation import demo

    monkeypatch.setattr(demo, "time_reference", lambda *_: ([1, 2, 3, 4, 5, 6, 7], 1.0))
    broken = hspec("demo", *roomy, "-n", 6, "--json")
    assert broken.code == 1 and json.loads(broken.out)["identical"] is False and "the texts differ" in broken.err


def test_measure(hspec: Run, place: Path, roomy: list[Any], tmp_path: Path) -> None:
    common = ["measure", *roomy, "--data", place / "data.jsonl", "-n", 4, "-o", tmp_path / "m.jsonl", "--limit", 2]
    done = hspec(*common, "--json")
    summary = json.loads(done.out)
    assert done.code == 0 and {"greedy", "T=1", "k", "target"} <= summary.keys()
    assert summary["greedy"]["prompts"] >= 1
    size = (tmp_path / "m.jsonl").stat().st_size
    assert json.loads(hspec(*common, "--json").out) == summary and (tmp_path / "m.jsonl").stat().st_size == size
    assert "without looping answers" in hspec(*common).out
    other = hspec(*common, "-k", 1)
    assert other.code == 2 and "holds measurements of something else" in other.err


# -- convert -----------------------------------------------------------------------------------------------------


def test_convert(hspec: Run, place: Path, tmp_path: Path) -> None:
    """There and back; what comes back answers as the drafter that went."""
    target = ["-t", place / "target"]
    done = hspec("convert", place / "drafter", tmp_path / "theirs", "--to", "authors", "--mask-token", 5, *target, "--json")
    report = json.loads(done.out)
    assert (done.code, done.err) == (0, "") and report["max_difference"] == 0.0
    assert (report["method"], report["source"], report["layout"]) == ("hspec", "hspec", "authors")
    back = hspec("convert", tmp_path / "theirs", tmp_path / "ours", "--to", "hspec", *target)
    assert back.code == 0 and "from the layout of authors to that of hspec" in back.out
    assert "the logits of 4 blocks differ by at most 0.0e+00" in back.out.replace("\n", " ")
    answers = [
        json.loads(hspec("generate", "hello", *target, "-d", folder, "-n", 6, "--json").out)
        for folder in (place / "drafter", tmp_path / "theirs", tmp_path / "ours")
    ]
    assert answers[0] == answers[1] == answers[2]
    shown = hspec("info", tmp_path / "theirs", "--json")
    assert json.loads(shown.out) == json.loads(hspec("info", place / "drafter", "--json").out)


@pytest.mark.parametrize(
    ("source", "to", "message"),
    [
        ("drafter", "onnx", "no layout 'onnx': choose one of hspec, speculators, authors"),
        ("drafter", "authors", "names none (None): name one below"),
        ("drafter", "speculators", "which has no place for: its pattern"),
        ("nowhere", "hspec", "no drafter at"),
        ("target", "hspec", "does not describe a drafter"),
    ],
)
def test_conversions_that_fail(hspec: Run, place: Path, tmp_path: Path, source: str, to: str, message: str) -> None:
    done = hspec("convert", place / source, tmp_path / "out", "--to", to, "-t", place / "target")
    assert done.code == 2 and message in done.err and len(done.err.splitlines()) == 1
    assert not (tmp_path / "out").exists()
    taken = hspec("convert", place / "drafter", place / "target", "--to", "hspec", "-t", place / "target")
    assert taken.code == 2 and "is there already" in taken.err


# -- train -------------------------------------------------------------------------------------------------------


def training(place: Path, out: Path, *more: Any) -> list[Any]:
    filled = [a.replace("{place}", str(place)) for a in TRAIN[:-2]]
    return [*filled, "-c", place / "train.yaml", "-o", out, *more]


@pytest.fixture(autouse=True, scope="module")
def _train_settings(place: Path) -> None:
    (place / "train.yaml").write_text("train: {batch_tokens: 400, max_tokens: 120, objective_chunk: 256, steps: 4}\n")


def test_train_end_to_end(hspec: Run, place: Path, tmp_path: Path) -> None:
    done = hspec(*training(place, tmp_path / "run"))
    assert (done.code, done.err) == (0, "")
    assert "done, step 4 of 4" in done.out.replace("\n", " ") and "held-out" in done.out
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        "best",
        "checkpoints",
        "config.json",
        "drafter.safetensors",
        "log.jsonl",
        "run.lock",
        "run.yaml",
    }
    answer = hspec("generate", "hello", "-t", place / "target", "-d", tmp_path / "run", "-n", 8, "--json")
    assert answer.code == 0 and answer.err == "" and json.loads(answer.out)["steps"] >= 1
    too_far = hspec("generate", "hello", "-t", place / "target", "-d", tmp_path / "run", "-k", 3)
    assert too_far.code == 2 and "trained for 1 to 2" in too_far.err
    again = hspec(*training(place, tmp_path / "run"))
    assert again.code == 2 and "already holds a run: go on with --resume" in again.err


def test_training_on_features_of_a_server(hspec: Run, place: Path, tmp_path: Path) -> None:
    """Which is another process, ended by SIGTERM; the resumed run finds another one."""
    command = [sys.executable, "-m", "hspec.cli", "serve-features", str(place / "target"), "--listen", f"unix:{tmp_path / 's'}"]
    with subprocess.Popen([*command, "--threads", "1"], stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None and "features of" in server.stdout.readline()
            done = hspec(*training(place, tmp_path / "run", "--feature-server", f"unix:{tmp_path / 's'}", "--threads", 1))
        finally:
            server.terminate()
        assert server.wait(20) == 0 and not (tmp_path / "s").exists()
    assert (done.code, done.err) == (0, "")
    assert hspec(*training(place, tmp_path / "here", "--threads", 1)).code == 0
    one, two = (Checkpoints(tmp_path / run).read(4) for run in ("run", "here"))
    assert all(torch.equal(one["drafter"][name], two["drafter"][name]) for name in two["drafter"])
    with serving(loaded(place / "target")) as other:
        again = hspec("train", "-o", tmp_path / "run", "--resume", "--feature-server", other.address, "--dry-run")
        assert again.code == 0 and str(other.address) in again.out
        assert hspec("train", "-o", tmp_path / "run", "--resume", "--feature-server", other.address).code == 0


def test_a_dry_run_writes_nothing(hspec: Run, place: Path, tmp_path: Path) -> None:
    done = hspec(*training(place, tmp_path / "run", "--dry-run"))
    assert (done.code, done.err) == (0, "")
    assert "trainable parameters" in done.out and "1 -> 2 slots" in done.out
    assert list(tmp_path.iterdir()) == []


def test_one_process_has_nobody_to_share_with(hspec: Run, place: Path, tmp_path: Path) -> None:
    done = hspec(*training(place, tmp_path / "run", "--shard"))
    assert done.code == 2 and "--shard: there is one process" in done.err and not (tmp_path / "run").exists()


def test_any_target_can_be_trained_for_without_a_preset(hspec: Run, place: Path, tmp_path: Path) -> None:
    arguments = training(place, tmp_path / "run", "--steps", 1)
    at = arguments.index("--preset")
    done = hspec(*arguments[:at], *arguments[at + 2 :])
    assert (done.code, done.err) == (0, "")
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["target"]["name"] == str(place / "target") and config["block_size"] == 5


def test_two_do_not_train_into_one_folder(hspec: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second finds out before it prepares anything, or before its first step if both prepared at once."""
    with monkeypatch.context() as patch:
        patch.setattr("hspec.cli.training._check_alone", lambda _: None)
        (tmp_path / "run").mkdir()
        with alone(tmp_path / "run" / "run"):
            done = hspec(*training(place, tmp_path / "run"))
    assert done.code == 2 and "another process trains in" in done.err and not (tmp_path / "run" / "log.jsonl").exists()
    monkeypatch.setattr("hspec.training.build.prepare_data", lambda *_: pytest.fail("it is known already"))
    with alone(tmp_path / "run" / "run"):
        done = hspec(*training(place, tmp_path / "run"))
    assert done.code == 2 and "another process trains in" in done.err


def test_ctrl_c_saves_and_resume_goes_on(hspec: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, before = Trainer.train_step, signal.getsignal(signal.SIGINT)

    def interrupted(self: Trainer) -> Any:
        if self.step == 1:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "train_step", interrupted)
        done = hspec(*training(place, tmp_path / "run"))
    assert done.code == 130 and "stopped at step 2 of 4" in done.out.replace("\n", " ")
    assert signal.getsignal(signal.SIGINT) is before  # the default's, or ignored where the tests run in the background
    resumed = hspec("train", "-o", tmp_path / "run", "--resume")
    assert resumed.code == 0 and "done, step 4 of 4" in resumed.out.replace("\n", " ")
    hspec(*training(place, tmp_path / "whole"))
    one, two = (Checkpoints(tmp_path / run).read(4) for run in ("run", "whole"))
    assert all(torch.equal(one["drafter"][name], two["drafter"][name]) for name in two["drafter"])


def test_ctrl_c_while_the_data_is_prepared(hspec: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("hspec.training.build.prepare_data", interrupted)
    done = hspec(*training(place, tmp_path / "run"))
    assert done.code == 130 and done.err.startswith("hspec: interrupted before training") and not (tmp_path / "run").exists()


def test_data_with_bad_lines_is_used_and_reported(hspec: Run, place: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text((place / "data.jsonl").read_text() + "not json\n")
    done = hspec(*training(place, tmp_path / "run", "--data", data, "--steps", 1))
    assert done.code == 0 and "1 bad records left out (first: line 61: not JSON" in " ".join(done.out.split())


def test_a_full_disk_in_training(hspec: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("torch.save", full)
    done = hspec(*training(place, tmp_path / "run", "--steps", 1))
    lines = done.err.splitlines()
    assert done.code == 1 and len(lines) == 1 and "No space left on device" in lines[0] and "Traceback" not in done.err
    assert not list(tmp_path.rglob("state.pt")) and not list(tmp_path.rglob("*.partial"))


# -- methods, comparison, recipes --------------------------------------------------------------------------------


def test_methods(hspec: Run, tmp_path: Path) -> None:
    """Without a network, and before anything was fetched."""
    table = hspec("methods")
    assert (table.code, table.err) == (0, "")
    assert all(name in table.out for name in METHODS) and "3,072" in table.out
    rows = json.loads(hspec("methods", "--json").out)
    assert [row["name"] for row in rows] == list(METHODS)
    assert {tuple(row) for row in rows} == {("name", "context", "backbone", "head", "passes", "kv_bytes_per_token")}
    large = json.loads(hspec("methods", "--target", "Qwen/Qwen3-8B", "--json").out)
    assert {row["kv_bytes_per_token"] for row in large if row["name"] == "dflash"} == {20480}
    assert not (tmp_path / "cache").exists()


def test_comparison(hspec: Run, place: Path) -> None:
    rows = json.loads(hspec("info", "--compare", "--json").out)
    assert list(dict.fromkeys(row["target"] for row in rows)) == [
        "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-4B", "Qwen/Qwen3-8B",
    ]  # fmt: skip
    table = hspec("info", "--compare", "--target", "qwen3-8b", "-t", place / "target")
    assert table.code == 0 and "qwen3-8b: trainable parameters" in table.out and "+3.02 %" in table.out
    assert table.out.count("dflash-kv") == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["methods", "-t", "no-such"], "no target 'no-such'"),
        (["info"], "name what to describe"),
        (["info", "qwen3-8b", "--compare"], "name their target with --target qwen3-8b"),
        (["info", "--target", "qwen3-8b"], "--target goes with --compare"),
        (["info", "--compare", "--target", "no-such"], "no target 'no-such'"),
    ],
    ids=str,
)
def test_comparisons_of_nothing(hspec: Run, arguments: list[str], message: str) -> None:
    done = hspec(*arguments)
    assert done.code == 2 and message in done.err and done.err.count("\n") == 1


def test_prompt_lookup(hspec: Run, place: Path) -> None:
    target = ["-t", place / "target", "--raw", "-n", 24, "--json"]
    prompt = "again and again and again and"
    plain = json.loads(hspec("generate", prompt, *target, "--no-draft").out)
    looked_up = json.loads(hspec("generate", prompt, *target, "--drafter", "ngram").out)
    assert looked_up["token_ids"] == plain["token_ids"] and looked_up["finish_reason"] == plain["finish_reason"]
    assert looked_up["acceptance"], "some drafts were tested"
    both = json.loads(hspec("generate", prompt, *target, "--drafter", f"{place / 'drafter'}+ngram").out)
    assert both["token_ids"] == plain["token_ids"] and both["acceptance"]
    refused = hspec("train", "--out", place / "new", "--init-from", f"{place / 'drafter'}+ngram")
    assert refused.code == 2 and "leave +ngram out here" in refused.err


@pytest.mark.parametrize(
    "recipe", sorted((Path(cli.__file__).parent.parent / "assets" / "recipes").glob("*.yaml")), ids=lambda p: p.stem
)
def test_recipes(hspec: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: Path) -> None:
    """The paper's three targets are known without a network; any method can be planned by the same file."""
    room = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: room._replace(free=10**12))
    plan = hspec("train", "--config", recipe, "--out", tmp_path / "run", "--dry-run")
    assert (plan.code, plan.err) == (0, "")
    own = sum(parameters_by_part(PRESETS[recipe.stem]).values())
    assert f"{own / 1e6:.1f} M" in plan.out
    steps = "27,086" if recipe.stem.startswith("llama") else "104,032"
    assert f"{steps} of 8,192 tokens" in plan.out and "7 slots" in plan.out
    other = hspec("train", "--config", recipe, "--method", "dflash", "--out", tmp_path / "run", "--dry-run")
    assert other.code == 0 and steps in other.out and "mamba" not in other.out


def test_the_recipes_are_the_papers_three() -> None:
    """0.1 CE + 0.9 TV at every step, gamma 4, peak 6e-4."""
    folder = Path(cli.__file__).parent.parent / "assets" / "recipes"
    names = {path.stem for path in folder.glob("*.yaml")}
    assert names == {"llama-3.1-8b", "qwen3-4b", "qwen3-8b"}
    for name in names:
        job = read_job(folder / f"{name}.yaml")
        assert (job.target, job.method, job.max_prompts) == (PRESETS[name].target.name, "hspec", 100_000)
        c = job.train
        assert (c.learning_rate, c.ce, c.gamma, c.kl_share(0), c.slots) == (6e-4, 0.1, 4.0, 0.0, 7)
        assert (job.target.startswith("Qwen")) == (c.steps == 104_032)
