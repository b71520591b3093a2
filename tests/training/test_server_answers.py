"""Answers from a server: a real one in this process, that answers well, badly or not at all."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from hspec.errors import HSpecError, UsageError
from hspec.targets.target import Target
from hspec.training import server_answers as module
from hspec.training.answers import AnswerSettings, thinking_template, write_answers
from hspec.training.conversations import Conversation
from hspec.training.data import prepare_data
from hspec.training.job import Job
from hspec.training.prompts import Prompt, clean_prompts
from hspec.training.server_answers import Server, ServerAnswers
from tests.saved import held_out_numbers, question
from tests.tiny import CHAT_TEMPLATE, tiny_target

Reply = tuple[int, bytes] | tuple[int, bytes, dict[str, str]]
SETTINGS = AnswerSettings(temperatures=(1.0, 0.0), max_tokens=40, max_prompt_tokens=200, seed=3, model="tiny")


def reply(text: Any = "a plain answer", finish: Any = "stop", status: int = 200, **message: Any) -> Reply:
    choice = {"index": 0, "message": {"role": "assistant", "content": text, **message}, "finish_reason": finish}
    return status, json.dumps({"id": "x", "choices": [choice], "usage": {}}).encode()


class FakeServer:
    """Answers every POST by ``answer(body, number)``; keeps what it was asked."""

    def __init__(self, answer: Callable[[dict[str, Any], int], Reply], models: Reply):
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.busy = self.most_busy = 0
        lock, outer = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_: Any) -> None:
                pass

            def do_GET(self) -> None:
                self._send(models if self.path == "/v1/models" else (404, b"no such page"))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    outer.bodies.append(body)
                    outer.headers.append(dict(self.headers))
                    number = len(outer.bodies)
                    outer.busy += 1
                    outer.most_busy = max(outer.most_busy, outer.busy)
                said = answer(body, number) if self.path == "/v1/chat/completions" else (404, b"no such page")
                with lock:
                    outer.busy -= 1  # before the reply is out: the next request may be here before this thread goes on
                self._send(said)

            def _send(self, reply: Reply) -> None:
                status, data, *headers = reply
                self.send_response(status)
                for name, value in (headers[0] if headers else {}).items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, *_: Any) -> None:
                """A client that has given up is no news."""

        self.server = Quiet(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()


Start = Callable[..., FakeServer]
MODELS = (200, json.dumps({"object": "list", "data": [{"id": "tiny"}]}).encode())


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(module, "BACKOFF", 0.001)
    started: list[FakeServer] = []

    def begin(answer: Callable[[dict[str, Any], int], Reply] = lambda *_: reply(), models: Reply = MODELS) -> FakeServer:
        started.append(FakeServer(answer, models))
        return started[-1]

    yield begin
    for fake in started:
        fake.server.shutdown()
        fake.server.server_close()


@pytest.fixture(scope="module")
def target() -> Target:
    return tiny_target(layers=1, hidden=32, heads=2, kv_heads=1)


PROMPTS: list[Prompt] = clean_prompts([Conversation.of([{"role": "user", "content": question(n)}]) for n in range(30)], len)[0]


def write(target: Target, url: str, path: Path, prompts: list[Prompt] = PROMPTS, **server: Any) -> list[dict[str, Any]]:
    write_answers(ServerAnswers(target, Server(url, **server)), prompts, path, SETTINGS)
    return records(path)


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# -- what is asked, and what becomes of it -----------------------------------------------------------------------


def test_answers_become_records_with_the_targets_own_tokens(target: Target, start: Start, tmp_path: Path) -> None:
    fake = start(lambda body, _: reply(f"about {body['messages'][0]['content']}", "length" if body["temperature"] else "stop"))
    found = {r["id"]: r for r in write(target, fake.url, tmp_path / "a.jsonl")}
    assert found.keys() == {p.id for p in PROMPTS}
    for prompt in PROMPTS:
        record = found[prompt.id]
        text = f"about {prompt.text}"
        assert record["prompt_tokens"] == target.template.encode([{"role": "user", "content": prompt.text}])
        assert record["messages"][1] == {"role": "assistant", "content": text}
        assert record["temperature"] == SETTINGS.temperature(prompt)
        ends = record["finish"] == "stop"
        assert ends == (record["temperature"] == 0)
        assert target.tokenizer.decode(record["tokens"]) == text + "<|end|>" * ends  # the end of the turn is not in the text
    first = next(b for b in fake.bodies if b["messages"][0]["content"] == PROMPTS[0].text)
    assert first["model"] == "tiny" and first["max_tokens"] == 40 and first["top_p"] == 1.0 and not first["stream"]
    assert "chat_template_kwargs" not in first
    assert len({b["seed"] for b in fake.bodies}) == len(PROMPTS)


def test_how_answers_were_drawn_is_kept_beside_them(target: Target, start: Start, tmp_path: Path) -> None:
    fake = start()
    write(target, fake.url, tmp_path / "a.jsonl")
    kept = json.loads((tmp_path / "a.json").read_text())
    assert kept["model"] == "tiny" and kept["temperatures"] == [1.0, 0.0] and kept["max_tokens"] == 40 and kept["seed"] == 3
    assert kept["thinking"] == "default" and kept["template"] == target.template.hash
    answerer = ServerAnswers(target, Server(fake.url))
    with pytest.raises(HSpecError, match=r"were drawn otherwise \(seed 3, now 4\)"):
        write_answers(answerer, PROMPTS, tmp_path / "a.jsonl", replace(SETTINGS, seed=4))
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(HSpecError, match="cannot read how the answers"):
        write_answers(answerer, PROMPTS, tmp_path / "a.jsonl", SETTINGS)
    assert AnswerSettings().key != SETTINGS.key != replace(SETTINGS, model="other").key
    assert replace(SETTINGS, thinking="off").key != SETTINGS.key


@pytest.mark.parametrize("concurrency", [1, 4])
def test_so_many_are_asked_at_once(concurrency: int, target: Target, start: Start, tmp_path: Path) -> None:
    def slow(*_: Any) -> Reply:
        time.sleep(0.02)
        return reply()

    fake = start(slow)
    assert len(write(target, fake.url, tmp_path / "a.jsonl", concurrency=concurrency)) == len(PROMPTS)
    assert fake.most_busy <= concurrency and (fake.most_busy > 1) == (concurrency > 1)


def test_thinking_is_told_to_the_template_and_to_the_server(start: Start, tmp_path: Path) -> None:
    target = tiny_target(layers=1, hidden=32, heads=2, kv_heads=1)
    with pytest.raises(UsageError, match=r"answers\.thinking: off, but the target's chat template has no enable_thinking"):
        thinking_template(target.template, "off")
    target.tokenizer.chat_template = CHAT_TEMPLATE.replace(
        "<|start|>assistant\n{% endif %}",
        "<|start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}think none\n{% endif %}{% endif %}",
    )
    fake, path = start(), tmp_path / "a.jsonl"
    template = thinking_template(target.template, "off")
    write_answers(ServerAnswers(target, Server(fake.url), template), PROMPTS[:3], path, replace(SETTINGS, thinking="off"))
    assert all(b["chat_template_kwargs"] == {"enable_thinking": False} for b in fake.bodies)
    assert all(target.tokenizer.decode(r["prompt_tokens"]).endswith("assistant\nthink none\n") for r in records(path))
    assert json.loads((tmp_path / "a.json").read_text())["thinking"] == "off"
    assert thinking_template(target.template, "default") is target.template
    assert thinking_template(target.template, "on").options == {"enable_thinking": True}


def test_the_key_comes_from_the_environment(
    target: Target, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = start()
    with pytest.raises(UsageError, match="there is no TEST_KEY in the environment"):
        ServerAnswers(target, Server(fake.url, api_key_env="TEST_KEY"))
    monkeypatch.setenv("TEST_KEY", "s3cret")
    write(target, fake.url + "/v1/", tmp_path / "a.jsonl", PROMPTS[:2], api_key_env="TEST_KEY")
    assert {h["Authorization"] for h in fake.headers} == {"Bearer s3cret"}
    assert "s3cret" not in (tmp_path / "a.json").read_text() + (tmp_path / "a.jsonl").read_text()


def test_the_only_model_need_not_be_named(target: Target, start: Start) -> None:
    assert ServerAnswers(target, Server(start().url)).only_model() == "tiny"
    two = start(models=(200, json.dumps({"data": [{"id": "a"}, {"id": "b"}]}).encode()))
    with pytest.raises(UsageError, match=r"has 2 models \(a, b\): name one"):
        ServerAnswers(target, Server(two.url)).only_model()
    for nonsense in (b"<html>", b"[]", b'{"data": 3}', b'{"data": [3]}', b"\xff"):
        with pytest.raises(HSpecError, match=r"/v1/models does not list models"):
            ServerAnswers(target, Server(start(models=(200, nonsense)).url)).only_model()


# -- what passes, and is tried again -----------------------------------------------------------------------------


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_busy_server_is_asked_again(status: int, target: Target, start: Start, tmp_path: Path) -> None:
    fake = start(
        lambda _, number: reply() if number % 3 == 0 else (status, b"busy", {"Retry-After": "0"} if number % 3 == 1 else {})
    )
    assert len(write(target, fake.url, tmp_path / "a.jsonl", PROMPTS[:5], concurrency=1)) == 5
    assert len(fake.bodies) == 15


def test_a_server_that_hangs_is_asked_again_and_then_given_up(target: Target, start: Start, tmp_path: Path) -> None:
    release = threading.Event()

    def hang(_: Any, number: int) -> Reply:
        if number == 2 or number > 5:
            release.wait(20)
        return reply()

    fake, path = start(hang), tmp_path / "a.jsonl"
    try:
        with pytest.raises(HSpecError, match=r"no reply from .*chat/completions.*(timed out|timeout)") as caught:
            write(target, fake.url, path, concurrency=1, timeout=0.15)
    finally:
        release.set()
    assert "The answers so far are kept" in str(caught.value)
    assert len(records(path)) == 4  # the one that hung was asked again, and answered


def test_nobody_there(target: Target, start: Start, tmp_path: Path) -> None:
    fake = start()
    fake.server.server_close()
    with pytest.raises(HSpecError, match=r"no reply from http://127.*refused.*is the server there\?"):
        write(target, fake.url, tmp_path / "a.jsonl")


def test_an_interrupted_run_goes_on_with_what_is_missing(target: Target, start: Start, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    dying = start(lambda _, number: reply() if number <= 7 else (500, b"out of memory"))
    with pytest.raises(
        HSpecError, match=r"answers 500, and so after every retry: 'out of memory'\. The answers so far are kept"
    ):
        write(target, dying.url, path, concurrency=1)
    assert len(records(path)) == 7
    fake = start()
    assert {r["id"] for r in write(target, fake.url, path)} == {p.id for p in PROMPTS}
    assert len(fake.bodies) == len(PROMPTS) - 7


# -- what makes no sense -----------------------------------------------------------------------------------------

NONSENSE: dict[str, tuple[Reply, str]] = {
    "not JSON": ((200, b"hello"), "its reply is not JSON but 'hello'"),
    "a page": ((200, b"<html><title>Login</title>"), "not JSON but '<html>"),
    "nothing": ((200, b""), "not JSON but ''"),
    "bytes": ((200, b"\xff\xfe\x00"), "not JSON"),
    "nested": ((200, b"[" * 100_000), "not JSON"),
    "a number": ((200, b"3"), "no choices with a message but is '3'"),
    "a list": ((200, b"[]"), "no choices with a message"),
    "empty choices": ((200, b'{"choices": []}'), "no choices with a message"),
    "choices of a wrong type": ((200, b'{"choices": {"0": 1}}'), "no choices with a message"),
    "an error as 200": ((200, b'{"error": {"message": "no"}}'), "no choices with a message"),
    "no message": ((200, b'{"choices": [{"text": "x", "finish_reason": "stop"}]}'), "no choices with a message"),
    "content null": (reply(None), "no text that ends with stop or length"),
    "content a list": (reply([{"text": "x"}]), "no text that ends"),
    "finish null": (reply(finish=None), "no text that ends"),
    "a tool call": (reply(finish="tool_calls"), "no text that ends"),
    "empty": (reply(" "), "its answer is empty"),
    "an end in the middle": (reply("a <|end|> b"), "an end of turn in the middle"),
    "half a character": (reply("caf\ufffd"), "does not give its text back"),
    "characters that it has not": (reply("\u0416"), "does not give its text back"),
    "thoughts apart": (reply(reasoning_content="hm"), "tells its thoughts apart"),
    "a refusal": ((400, b"too long"), r"refuses the prompt \(400: 'too long'\)"),
    "no such model": (
        (404, b'{"message": "The model does not exist"}'),
        "answers 404, there is no such page or model.*does not exist",
    ),
    "a wrong key": ((401, b"no"), "answers 401, the key was not accepted"),
    "elsewhere": ((302, b"", {"Location": "http://127.0.0.1:1/"}), "answers 302, a redirect"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_is_refused_at_the_first_prompt(name: str, target: Target, start: Start, tmp_path: Path) -> None:
    bad, message = NONSENSE[name]
    fake, path = start(lambda *_: bad), tmp_path / "a.jsonl"
    with pytest.raises(HSpecError, match=message):
        write(target, fake.url, path)
    assert len(fake.bodies) == 1 and records(path) == []


@pytest.mark.parametrize("name", ["not JSON", "empty choices", "content null", "a refusal"])
def test_nonsense_later_is_counted_until_it_is_all_there_is(name: str, target: Target, start: Start, tmp_path: Path) -> None:
    bad, message = NONSENSE[name]
    path = tmp_path / "a.jsonl"
    sometimes = start(lambda _, number: bad if number % 5 == 0 else reply())
    answerer = ServerAnswers(target, Server(sometimes.url, concurrency=1))
    assert write_answers(answerer, PROMPTS, path, SETTINGS) == 24
    assert answerer.left_out.total() == 6 and len(answerer.left_out) == 1
    broken = start(lambda _, number: bad)
    with pytest.raises(HSpecError, match=message):
        write(target, broken.url, path)
    assert len(records(path)) == 24
    path.unlink()
    failing = start(lambda _, number: bad if number > 10 else reply())
    with pytest.raises(HSpecError, match=r"gives no usable answers.*The answers so far are kept"):
        write(target, failing.url, path, concurrency=1)
    assert len(records(path)) == 10 and len(failing.bodies) <= 10 + module.BAD_IN_A_ROW + 1


def test_the_end_of_a_turn_where_the_template_prints_none(start: Start, tmp_path: Path) -> None:
    target = tiny_target(layers=1, hidden=32, heads=2, kv_heads=1)
    for text in (
        "{% for m in messages %}{{ m['content'] }}\n{% endfor %}",
        "{{ messages | length }}{{ messages[0]['content'] }}",
    ):
        target.tokenizer.chat_template = text
        (record,) = write(target, start().url, tmp_path / f"{len(text)}.jsonl", PROMPTS[:1])
        assert record["tokens"][-1] == min(target.eos_ids) and torch.tensor(record["tokens"]).ne(0).sum() > 3


def test_a_job_takes_its_answers_from_a_server(
    target: Target, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSPEC_CACHE", str(tmp_path / "cache"))
    (tmp_path / "a.txt").write_text("\n".join(question(n) for n in range(60)))
    fake = start(lambda body, number: reply(" " if number == 5 else body["messages"][0]["content"][:7]))
    answers = {"server": fake.url, "max_tokens": 9, "concurrency": 1}
    job = Job.model_validate({"data": [str(tmp_path / "a.txt")], "answers": answers})
    said: list[str] = []
    data = prepare_data(job, target, said.append)
    held = held_out_numbers(60)
    assert len(data.train) == 59 - len(held) and len(data.held_out) == len(held)
    assert any("1 prompts have no usable answer by the server, most often because its answer is empty" in line for line in said)
    assert {b["model"] for b in fake.bodies} == {"tiny"}  # which the server was asked for
    held_bodies = [b for b in fake.bodies if int(b["messages"][0]["content"].split(":")[0]) in held]
    assert {(b["temperature"], b["max_tokens"]) for b in held_bodies} == {(1.0, 256)}  # whatever the settings
    before = len(fake.bodies)
    again = prepare_data(job, target, lambda _: None)
    assert len(again.train) == len(data.train) + 1 and len(fake.bodies) == before + 1  # only what was missing
    assert [e.tokens for e in again.train][:3] == [e.tokens for e in data.train][:3]
