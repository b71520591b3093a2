"""Residual streams that are fetched before they are needed, from one server or several in turn."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Protocol

from torch import Tensor

from hspec.remote.client import FeatureError

GLANCE = 0.5
"""Seconds after which one who waits looks whether it should."""
_Key = tuple[tuple[int, ...], bytes, tuple[int, ...]]


class StreamClient(Protocol):
    """A connection to who runs the layers; only one thread uses it."""

    lost: bool
    """Whether it is trying to find a server again."""

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
        self._clients = clients
        self.asked_to_stop: Callable[[], bool] = lambda: False
        """If so, nobody waits any longer for a server that is gone."""
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
            FeatureError: the run is asked to stop while a server is gone.
            HSpecError: what the client raised, also if it was when nobody had asked yet.
        """
        self.expect(tokens, layers)
        work = self._under_way.pop(_key(tokens, layers))
        while True:
            try:
                outcome = work.outcome.get(timeout=GLANCE)
            except Empty:
                if self.asked_to_stop() and any(client.lost for client in self._clients):
                    raise FeatureError("the run was asked to stop while a feature server was gone") from None
                continue
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
