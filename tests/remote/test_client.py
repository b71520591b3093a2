"""A trainer's connection: patient with a server that is gone, strict with one that says nonsense."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hspec.remote import ahead
from hspec.remote import client as module
from hspec.remote.address import Address
from hspec.remote.ahead import StreamsAhead
from hspec.remote.client import FeatureClient, FeatureError, Patience
from hspec.remote.facts import Facts
from hspec.remote.wire import receive
from hspec.targets.target import Target
from tests.remote.helpers import greeting, pretending, serving

TOKENS = torch.arange(4, 12).view(2, 4)
NOBODY = Address("127.0.0.1", 1)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)


@pytest.fixture(scope="module")
def facts(target: Target) -> Facts:
    return Facts.of(target, torch.float32, "fp32")


def right(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[dict[str, Any], torch.Tensor]:
    return {"layers": [1]}, torch.ones(shape or (2, 4, 1, 64), dtype=dtype)


NOT_FINITE = right()
NOT_FINITE[1][1, 2, 0, 3] = float("nan")


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (({"error": "it is tired"},), "says: it is tired"),
        (({"layers": [1]},), r"answers nothing where \[2, 4, 1, 64\] in torch.float32 was asked for"),
        (right(2, 4, 64, 1), r"answers \[2, 4, 64, 1\] in torch.float32 where"),
        (right(2, 4, 1, 32), r"answers \[2, 4, 1, 32\] in"),
        (right(2, 4, 1, 64, dtype=torch.float16), "answers .* in torch.float16 where"),
        (right(3, 4, 1, 64), r"announces \d+ \+ 3,072 bytes, and at most"),
        (NOT_FINITE, "answers numbers that are not finite: has its target overflowed"),
        (b"HTTP/1.1 200 OK\r\n\r\nhello world", "does not speak this protocol"),
    ],
)
def test_nonsense_is_not_tried_again(facts: Facts, answer: Any, says: str) -> None:
    with pretending(greeting(facts, answer), greeting(facts, right())) as address:
        one = FeatureClient([address], facts, Patience())
        with pytest.raises(FeatureError, match=f"the feature server at {address} {says}"):
            one.streams(TOKENS, [1])


def test_the_greeting_is_looked_at(facts: Facts) -> None:
    for changes, says in (
        ({"version": "0.0.9"}, r"has the version of hspec '0.0.9', and this run .*: install the same on both sides"),
        ({"layers": 99}, "has a target whose layers number 99, and this run 6"),
        ({"hidden_size": None}, "has a target of the width None"),
        ({"vocab_size": "211"}, "has a target whose vocabulary is '211'"),
        ({"error": "no room for you"}, "says: no room for you"),
    ):
        with pretending(greeting(facts, **changes)) as address, pytest.raises(FeatureError, match=says):  # type: ignore[arg-type]
            FeatureClient([address], facts, Patience()).open()
    says = r"does not speak this protocol .*: is it one of 'hspec serve-features', of the same version"
    mail = b"220 mail.example ESMTP ready\r\n"

    def speak(connection: socket.socket) -> None:
        receive(connection, 0)  # a side that closes with something unread resets the connection, and what it said may be lost
        connection.sendall(mail)

    with pretending(speak) as address, pytest.raises(FeatureError, match=says):
        FeatureClient([address], facts, Patience()).open()


def test_nobody_there_at_the_beginning(facts: Facts) -> None:
    with pytest.raises(FeatureError, match=r"no feature server at 127.0.0.1:1 \(Connection refused\): start one there with"):
        FeatureClient([NOBODY], facts, Patience()).open()
    with pytest.raises(FeatureError, match=r"no feature server at nowhere.invalid:80"):
        StreamsAhead([FeatureClient([Address("nowhere.invalid", 80)], facts, Patience())])


def test_a_connection_that_breaks_is_made_again(facts: Facts) -> None:
    half = greeting(facts, b"hspec-f\x01")
    with pretending(greeting(facts), half, greeting(facts, right())) as address:
        one = FeatureClient([address], facts, Patience(gone=10))
        with pytest.warns(UserWarning, match=f"the feature server at {address} is gone .*; it is tried again") as warned:
            assert torch.equal(one.streams(TOKENS, [1]), right()[1])
        assert len(warned) == 1


def test_one_that_stays_away(facts: Facts) -> None:
    with pretending(greeting(facts)) as address:
        one = FeatureClient([address], facts, Patience(gone=0.1))
        one.open()
        began = time.monotonic()
        with pytest.warns(UserWarning), pytest.raises(FeatureError, match=r"is gone .*, and was tried again for 0.1 seconds"):
            one.streams(TOKENS, [1])
        assert 0.1 <= time.monotonic() - began < 5


def test_one_that_is_silent(facts: Facts) -> None:
    wait = threading.Event()
    with pretending(greeting(facts), lambda c: (greeting(facts)(c), wait.wait(5))) as address:  # type: ignore[arg-type,return-value]
        one = FeatureClient([address], facts, Patience(gone=0.0, silent=0.2))
        with pytest.warns(UserWarning), pytest.raises(FeatureError, match="is gone"):
            one.streams(TOKENS, [1])
    wait.set()


def test_another_comes_back_in_its_place(target: Target, qwen_target: Target, facts: Facts) -> None:
    with serving(target) as server:
        one = FeatureClient([server.address], facts, Patience(gone=10))
        one.streams(TOKENS, [1])
        address = server.address
    another = pytest.raises(FeatureError, match="a target whose weights have the hash")
    with serving(qwen_target, address), pytest.warns(UserWarning, match="gone"), another:
        one.streams(TOKENS, [1])


def test_the_next_server_is_asked_when_one_is_gone(target: Target, facts: Facts) -> None:
    with serving(target) as second:
        with serving(target) as first:
            one = FeatureClient([first.address, NOBODY, second.address], facts, Patience(gone=10))
            before = one.streams(TOKENS, [1, 2])
        with pytest.warns(UserWarning, match="gone"):
            assert torch.equal(one.streams(TOKENS, [1, 2]), before)
        assert one.address == second.address


# -- ahead -------------------------------------------------------------------------------------------------------


class Slow:
    """A client whose answers are let go one by one."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.lost = False
        self.go = threading.Semaphore(0)

    def open(self) -> None:
        self.asked = []

    def streams(self, tokens: torch.Tensor, layers: Any) -> torch.Tensor:
        self.asked.append(int(tokens[0, 0]))
        assert self.go.acquire(timeout=10)
        if tokens[0, 0] < 0:
            raise FeatureError("gone for good")
        return tokens * layers[0]


@pytest.fixture
def two() -> Iterator[tuple[Slow, Slow]]:
    yield Slow(), Slow()


def until(holds: Any) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_what_is_expected_is_begun_and_dealt_out(two: tuple[Slow, Slow]) -> None:
    streams = StreamsAhead(two)
    asked = [torch.full((1, 2), i) for i in range(5)]
    for tokens in asked[:4]:
        streams.expect(tokens, [3])
        streams.expect(tokens, [3])  # once is enough
    assert streams.ahead == 2
    until(lambda: [len(c.asked) for c in two] == [1, 1])
    for one in two:
        one.go.release(9)
    until(lambda: [c.asked for c in two] == [[0, 2], [1, 3]])
    for i in (3, 0, 4, 2, 1):  # 4 was not expected
        assert torch.equal(streams(asked[i], [3]), asked[i] * 3)
    assert two[0].asked == [0, 2, 4]
    assert torch.equal(streams(asked[0], [3]), asked[0] * 3) and two[1].asked == [1, 3, 0]  # nothing is kept


def test_an_error_waits_for_who_asks(two: tuple[Slow, Slow]) -> None:
    streams = StreamsAhead(two[:1])
    two[0].go.release(9)
    streams.expect(torch.tensor([[-1]]), [1])
    assert torch.equal(streams(torch.tensor([[1]]), [2]), torch.tensor([[2]]))
    with pytest.raises(FeatureError, match="gone for good"):
        streams(torch.tensor([[-1]]), [1])


def test_nobody_waits_for_one_that_is_gone_when_asked_to_stop(two: tuple[Slow, Slow], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "GLANCE", 0.01)
    streams = StreamsAhead(two[:1])
    stopped = threading.Event()
    streams.asked_to_stop = stopped.is_set
    threading.Timer(0.1, stopped.set).start()
    threading.Timer(0.2, two[0].go.release).start()
    tokens = torch.tensor([[3]])
    assert torch.equal(streams(tokens, [1]), tokens)  # it is only slow
    two[0].lost = True
    with pytest.raises(FeatureError, match="the run was asked to stop while a feature server was gone"):
        streams(tokens, [1])
