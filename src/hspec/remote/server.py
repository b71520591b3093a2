"""A server that runs a target's layers for trainers: token ids in, residual streams out."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import stat
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import torch
from torch import Tensor

from hspec.errors import UsageError
from hspec.files import reason
from hspec.remote.address import Address, keep_alive
from hspec.remote.facts import Facts
from hspec.remote.wire import PROTOCOL, Message, WireError, receive, send
from hspec.targets.target import Target

MAX_TOKENS = 1 << 20
"""Of one request."""


class _RefusedError(Exception):
    """A request that cannot be served; the message says why."""


@dataclass
class _Request:
    tokens: Tensor
    layers: list[int]
    answer: SimpleQueue[Tensor | str] = field(default_factory=SimpleQueue)
    """The streams, or why there are none."""


class FeatureServer:
    """Listens from the beginning, and answers once :meth:`run` is called.

    Every trainer has a thread that talks to it; all forwards are made by the thread that calls :meth:`run`, one after the other in the
    order in which they were asked for, so that they are computed as in a process without a server.

    Args:
        address: port 0 takes one that is free; :attr:`address` then says which.
        say: told who comes and goes.

    Raises:
        UsageError: the address cannot be listened to.
    """

    def __init__(self, target: Target, address: Address, precision: str = "fp32", say: Callable[[str], None] = lambda _: None):
        self.target, self.say = target, say
        self.facts = Facts.of(target, target.dtype, precision)
        self._requests: SimpleQueue[_Request | None] = SimpleQueue()
        self._connections: set[socket.socket] = set()
        self._listener = _listener(address, self._talk)
        taken: Any = self._listener.server_address
        self.address = address if address.path else Address(address.host, taken[1])

    def run(self) -> None:
        """Until :meth:`stop`."""
        threading.Thread(target=self._listener.serve_forever, args=(0.1,), daemon=True).start()
        try:
            while (request := self._requests.get()) is not None:
                request.answer.put(self._answer(request))
        finally:
            self._listener.shutdown()
            self._listener.server_close()
            self._hang_up()
            if self.address.path:
                Path(self.address.path).unlink(missing_ok=True)

    def stop(self) -> None:
        """From any thread: after the forward that is under way."""
        self._requests.put(None)

    def _hang_up(self) -> None:
        """Trainers see a connection that ends, and try again, here or elsewhere."""
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(Empty):
            while True:
                if (request := self._requests.get_nowait()) is not None:
                    request.answer.put("it is ending")

    # -- computing -----------------------------------------------------------------------------------------------

    def _answer(self, request: _Request) -> Tensor | str:
        try:
            tokens = request.tokens.to(self.target.device)
            cache = self.target.new_cache(*tokens.shape)
            return self.target.forward(tokens, cache, request.layers).taps.cpu()
        except Exception as error:  # one trainer's request must not end the others'
            self.say(f"a request of {list(request.tokens.shape)} tokens failed: {reason(error)}")
            return f"it could not run {list(request.tokens.shape)} tokens ({type(error).__name__}: {reason(error)})"

    # -- talking -------------------------------------------------------------------------------------------------

    def _talk(self, connection: socket.socket, who: str) -> None:
        """With one trainer, until it goes."""
        self._connections.add(connection)
        try:
            if not self._greet(connection, who):
                return
            while (message := receive(connection, 4 * MAX_TOKENS)) is not None:
                self._serve(connection, message)
            self.say(f"{who} is done")
        except WireError as error:
            self.say(f"{who} {error}")
            with contextlib.suppress(OSError):
                send(connection, {"error": f"the other side {error}"})
        except OSError as error:
            self.say(f"{who} is gone ({reason(error)})")
        finally:
            self._connections.discard(connection)

    def _greet(self, connection: socket.socket, who: str) -> bool:
        """Tell what is served; whether it is what the trainer needs is for the trainer to say."""
        hello = receive(connection, 0)
        if hello is None:
            return False
        if hello.header.get("protocol") != PROTOCOL:
            raise WireError(f"speaks protocol {hello.header.get('protocol')!r}, and {PROTOCOL} is spoken here")
        send(connection, {"protocol": PROTOCOL, **asdict(self.facts)})
        self.say(f"{who} has come")
        return True

    def _serve(self, connection: socket.socket, message: Message) -> None:
        try:
            request = self._request(message)
        except _RefusedError as error:
            send(connection, {"error": str(error)})
            return
        self._requests.put(request)
        answer = request.answer.get()
        if isinstance(answer, str):
            send(connection, {"error": answer})
        else:
            send(connection, {"layers": request.layers}, answer)

    def _request(self, message: Message) -> _Request:
        tokens, layers, facts = message.tensor, message.header.get("layers"), self.facts
        known = range(facts.layers + 1)
        if not isinstance(layers, list) or not layers or any(type(i) is not int or i not in known for i in layers):
            raise _RefusedError(f"layers must be a list of 0 to {facts.layers}, not {str(layers)[:80]}")
        if layers != sorted(set(layers)):
            raise _RefusedError(f"layers must ascend, not be {layers}")
        if tokens is None or tokens.dtype != torch.int32 or tokens.dim() != 2 or tokens.numel() == 0:
            raise _RefusedError("a request needs token ids, int32 of the shape [documents, tokens]")
        if tokens.shape[1] > self.target.max_positions:
            raise _RefusedError(
                f"documents of {tokens.shape[1]} tokens are longer than its context of {self.target.max_positions}"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= facts.vocab_size:
            raise _RefusedError(
                f"token ids must be 0 to {facts.vocab_size - 1}, and there are {int(tokens.min())} and {int(tokens.max())}"
            )
        return _Request(tokens.long(), layers)


def _listener(address: Address, talk: Callable[[socket.socket, str], None]) -> socketserver.BaseServer:
    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            if address.path is None:
                keep_alive(self.request)
            talk(self.request, "a trainer" if address.path else f"{self.client_address[0]}:{self.client_address[1]}")

    class Tcp(socketserver.ThreadingTCPServer):
        allow_reuse_address = daemon_threads = True
        block_on_close = False
        address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET

    class Unix(socketserver.ThreadingUnixStreamServer):
        daemon_threads = True
        block_on_close = False

    try:
        if address.path is None:
            return Tcp((address.host, address.port), Handler)
        _remove_old(Path(address.path))
        return Unix(address.path, Handler)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen at {address} ({reason(error)}): choose another address with --listen") from error


def _remove_old(path: Path) -> None:
    """A socket that an ended server left; another that still answers is not touched.

    Raises:
        OSError: it answers, or is no socket.
    """
    if not path.exists():
        return
    if not stat.S_ISSOCK(path.stat().st_mode):
        raise FileExistsError(0, "there is a file that is no socket")
    with contextlib.suppress(ConnectionRefusedError):
        Address(path=str(path)).connect(1.0).close()
        raise FileExistsError(0, "another server listens there")
    path.unlink()
