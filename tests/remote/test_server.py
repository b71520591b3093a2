"""A feature server gives every trainer what the target gives, and refuses the rest without harm to the others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hspec.errors import UsageError
from hspec.remote.address import Address
from hspec.remote.client import FeatureClient, FeatureError, Patience
from hspec.remote.facts import Facts
from hspec.remote.server import FeatureServer
from hspec.remote.wire import PROTOCOL, Message, receive, send
from hspec.targets.target import Target
from tests.remote.helpers import LOCAL, serving

SOON = Patience(gone=5, silent=20)


def tokens(seed: int, rows: int = 2, count: int = 9) -> Tensor:
    return torch.randint(3, 150, (rows, count), generator=torch.Generator().manual_seed(seed))


def exact(target: Target, ids: Tensor, layers: list[int]) -> Tensor:
    return target.forward(ids, target.new_cache(*ids.shape), layers).taps


def client(target: Target, address: Address, precision: str = "fp32") -> FeatureClient:
    return FeatureClient([address], Facts.of(target, torch.float32, precision), SOON)


@pytest.mark.parametrize("kind", ["tcp", "unix", "tcp6"])
def test_it_gives_what_the_target_gives(target: Target, tmp_path: Path, kind: str) -> None:
    address = {"tcp": LOCAL, "unix": Address(path=str(tmp_path / "s")), "tcp6": Address("::1", 0)}[kind]
    said: list[str] = []
    with serving(target, address, said) as server:
        one = client(target, server.address)
        one.open()
        for seed, layers in enumerate(([0], [1, 4], [2, 3, 5, 6])):
            assert torch.equal(one.streams(tokens(seed), layers), exact(target, tokens(seed), layers))
        one.close()
        assert Address.parse(str(server.address)) == server.address
    assert any("has come" in line for line in said)
    assert not (tmp_path / "s").exists()


def test_several_trainers_at_once(target: Target) -> None:
    wrong: list[int] = []

    def ask(seed: int) -> None:
        one = client(target, server.address)
        for i in range(6):
            ids = tokens(100 * seed + i, 1 + i % 3, 5 + seed)
            if not torch.equal(one.streams(ids, [1, 3, 6]), expected[seed, i]):
                wrong.append(seed)
        one.close()

    expected = {
        (seed, i): exact(target, tokens(100 * seed + i, 1 + i % 3, 5 + seed), [1, 3, 6]) for seed in range(4) for i in range(6)
    }
    with serving(target) as server:
        threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    assert not wrong


@pytest.fixture
def talk(target: Target) -> Iterator[Any]:
    """One request to a server as it comes from the wire, and what it says."""
    with serving(target) as server, server.address.connect(5) as connection:
        send(connection, {"protocol": PROTOCOL})
        assert receive(connection, 0).header["layers"] == 6  # type: ignore[union-attr]

        def ask(header: dict[str, Any], tensor: Tensor | None) -> Message:
            send(connection, header, tensor)
            answer = receive(connection, 1 << 20)
            assert answer is not None
            return answer

        yield ask


def test_requests_that_are_refused(talk: Any) -> None:
    fine = tokens(0).int()
    for layers in (None, [], "1", [7], [-1], [True], [1.0]):
        assert "layers must be a list of 0 to 6" in talk({"layers": layers}, fine).text("error")
    assert "layers must ascend, not be [3, 1]" in talk({"layers": [3, 1]}, fine).text("error")
    for bad in (None, fine[0], fine.float(), fine[:0]):
        assert "a request needs token ids, int32" in talk({"layers": [1]}, bad).text("error")
    assert "longer than its context of 512" in talk({"layers": [1]}, torch.ones(1, 513).int()).text("error")
    assert "token ids must be 0 to 210, and there are 3 and 211" in talk(
        {"layers": [1]}, torch.tensor([[3, 211]], dtype=torch.int32)
    ).text("error")
    assert talk({"layers": [1]}, fine).tensor.shape == (2, 9, 1, 64)  # and it goes on


def test_a_forward_that_fails_does_not_end_the_server(target: Target, talk: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for 3 GiB")

    with monkeypatch.context() as patched:
        patched.setattr(target, "forward", fail)
        said = talk({"layers": [1]}, tokens(0).int()).text("error")
    assert said == "it could not run [2, 9] tokens (OutOfMemoryError: no room for 3 GiB)"
    assert talk({"layers": [1]}, tokens(0).int()).tensor is not None


def test_visitors_who_speak_something_else(target: Target) -> None:
    said: list[str] = []
    with serving(target, said=said) as server:
        with server.address.connect(5) as connection:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\n\r\n")
            assert "does not speak this protocol" in (receive(connection, 0) or Message({})).header["error"]
        with server.address.connect(5) as connection:
            send(connection, {"protocol": 99})
            assert "speaks protocol 99, and 1 is spoken here" in (receive(connection, 0) or Message({})).header["error"]
        with server.address.connect(5) as connection:
            connection.sendall(b"hspec")  # and leaves
        server.address.connect(5).close()
        one = client(target, server.address)
        assert one.streams(tokens(0), [2]).shape == (2, 9, 1, 64)
    assert any("does not speak this protocol" in line for line in said)


def test_places_that_are_taken(target: Target, tmp_path: Path) -> None:
    with (
        serving(target) as server,
        pytest.raises(UsageError, match=r"cannot listen at 127.0.0.1:\d+ \(Address already in use\)"),
    ):
        FeatureServer(target, server.address)
    with pytest.raises(UsageError, match="choose another address with --listen"):
        FeatureServer(target, Address("no-such-host.invalid", 1))
    path = Address(path=str(tmp_path / "s"))
    with serving(target, path), pytest.raises(UsageError, match="another server listens there"):
        FeatureServer(target, path)
    (tmp_path / "s").write_text("a letter")
    with pytest.raises(UsageError, match="there is a file that is no socket"):
        FeatureServer(target, path)
    (tmp_path / "s").unlink()
    with socket.socket(socket.AF_UNIX) as old:
        old.bind(path.path or "")  # of a server that was killed
    with serving(target, path):
        client(target, path).open()


def test_addresses() -> None:
    assert Address.parse("gpu-node:7700") == Address("gpu-node", 7700) and Address.parse("[::1]:80") == Address("::1", 80)
    assert Address.parse("unix:/tmp/s") == Address(path="/tmp/s")
    for text in ("gpu-node", ":7700", "gpu-node:", "host:port", "host:65536", "http://host:80", "unix:", ""):
        with pytest.raises(UsageError, match="give host:port, as in gpu-node:7700, or unix:PATH"):
            Address.parse(text)


def test_a_server_of_another_kind(target: Target, qwen_target: Target) -> None:
    with serving(target) as server:
        for one, says in (
            (
                client(qwen_target, server.address),
                r"has a target whose weights have the hash .*: start it on this run's target",
            ),
            (
                client(target, server.address, "bf16"),
                "has products of the precision 'fp32', and this run 'bf16': start it with --prec",
            ),
            (
                FeatureClient([server.address], Facts.of(target, torch.bfloat16, "fp32"), SOON),
                "has weights of the type 'float32', and this run 'bfloat16': start it with --dtype bfloat16, or set",
            ),
        ):
            with pytest.raises(FeatureError, match=f"the feature server at {server.address} {says}"):
                one.open()
