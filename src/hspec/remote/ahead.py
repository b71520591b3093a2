"""Residual streams that are fetched before they are needed, from one server or several in turn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence
from queue import SimpleQueue
from typing import Protocol

from torch import Tensor

_Key = tuple[tuple[int, ...], bytes, tuple[int, ...]]


class StreamClient(Protocol):
    """A connection to who runs the layers; only one thread uses it."""

    def open(self) -> None: ...
    def streams(self, tokens: Tensor, layers: Sequence[int]) -> Tensor: ...


class _Work:
    def __init__(self, tokens: Tensor, layers: Sequence[int]):
        self.tokens, self.layers = tokens, layers
        self.outcome: SimpleQueue[Tensor | BaseException] = SimpleQueue()


class StreamsAhead:
    """A :class:`hspec.targets.partial.ResidualStreams`: every client has a thread, and what is expected is dealt to them in turn.

    What comes does not depend on which of them is asked, or when: they run the same target. The threads do not keep the program from
    ending.

    Args:
        arithmetic: see there.

    Raises:
        HSpecError: a client cannot be opened.
    """

    def __init__(self, clients: Sequence[StreamClient], arithmetic: str | None = None):
        for client in clients:
            client.open()
        queues = [SimpleQueue[_Work]() for _ in clients]
        for client, queue in zip(clients, queues, strict=True):
            threading.Thread(target=_run, args=(client, queue), daemon=True).start()
        self.ahead, self.arithmetic = len(clients), arithmetic
        self._turn = itertools.cycle(queues)
        self._under_way: dict[_Key, _Work] = {}

    def expect(self, tokens: Tensor, layers: Sequence[int]) -> None:
        key = _key(tokens, layers)
        if key not in self._under_way:
            self._under_way[key] = work = _Work(tokens, layers)
            next(self._turn).put(work)

    def __call__(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """
        Raises:
            HSpecError: what the client raised, also if it was when nobody had asked yet.
        """
        self.expect(tokens, layers)
        outcome = self._under_way.pop(_key(tokens, layers)).outcome.get()
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome


def _run(client: StreamClient, queue: SimpleQueue[_Work]) -> None:
    while True:
        work = queue.get()
        try:
            work.outcome.put(client.streams(work.tokens, work.layers))
        except BaseException as error:
            work.outcome.put(error)


def _key(tokens: Tensor, layers: Sequence[int]) -> _Key:
    return tuple(tokens.shape), tokens.contiguous().numpy().tobytes(), tuple(layers)
