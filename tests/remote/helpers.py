"""Feature servers for tests: real ones in this process, and others that misbehave."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from hspec.remote.address import Address
from hspec.remote.facts import Facts
from hspec.remote.server import FeatureServer
from hspec.remote.wire import PROTOCOL, receive, send
from hspec.targets.target import Target

LOCAL = Address("127.0.0.1", 0)


@contextmanager
def serving(target: Target, address: Address = LOCAL, said: list[str] | None = None) -> Iterator[FeatureServer]:
    server = FeatureServer(target, address, say=(said if said is not None else []).append)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(10)
        assert not thread.is_alive()


Talk = Callable[[socket.socket], None]


@contextmanager
def pretending(*talks: Talk) -> Iterator[Address]:
    """A server that says to its first visitor what the first function says, and so on; then it is gone."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = Address("127.0.0.1", listener.getsockname()[1])

        def run() -> None:
            with contextlib.suppress(OSError):  # the test is over, or the other side is gone
                for talk in talks:
                    connection, _ = listener.accept()
                    with connection:
                        talk(connection)
            listener.close()

        threading.Thread(target=run, daemon=True).start()
        yield address


def greeting(facts: Facts, *answers: Any, **changes: Any) -> Talk:
    """A proper greeting, then a header and a tensor for each request; bytes are sent as they are."""

    def talk(connection: socket.socket) -> None:
        receive(connection, 0)
        send(connection, {"protocol": PROTOCOL, **asdict(facts), **changes})
        for answer in answers:
            if receive(connection, 1 << 20) is None:
                return
            if isinstance(answer, bytes):
                connection.sendall(answer)
            else:
                send(connection, *answer)

    return talk
