"""A trainer's side of the connection to a feature server: patient with one that is gone, strict with what it says."""

from __future__ import annotations

import socket
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from hspec.errors import HSpecError
from hspec.files import reason
from hspec.remote.address import Address
from hspec.remote.facts import Facts
from hspec.remote.wire import DTYPES, PROTOCOL, Message, WireError, receive, send

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 15.0
"""Seconds between attempts; each pause is twice the one before."""
HELLO_SECONDS = 20.0
"""As long may a server take to say what it serves."""


class FeatureError(HSpecError):
    """The target's features cannot be had: a server is gone for good, is of another target, or answers nonsense."""


@dataclass(frozen=True)
class Patience:
    """Seconds."""

    gone: float = 600.0
    """A server that is gone is tried again for so long."""
    silent: float = 600.0
    """A server that is connected may take so long for one batch."""


Place = TypeVar("Place")


class PatientClient(ABC, Generic[Place]):
    """Asks one server, and when that is gone the next, again and again as long as patience lasts.

    Args:
        addresses: of servers with the same target; the first is asked as long as it is there.
        facts: what they must serve.
    """

    def __init__(self, addresses: Sequence[Place], facts: Facts, patience: Patience):
        self.addresses, self.facts, self.patience = list(addresses), facts, patience
        self.lost = False
        """Whether a server is gone, and none was found yet."""

    @property
    def address(self) -> Place:
        """Of the server that is asked now."""
        return self.addresses[0]

    @abstractmethod
    def open(self) -> None:
        """See whether a server is there, and has this run's target; without patience.

        Raises:
            FeatureError: nobody answers there, or another target.
        """

    def close(self) -> None:
        """Let go of a server that is gone."""

    @abstractmethod
    def _ask(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """As :meth:`streams`, once.

        Raises:
            OSError: the server is gone, and may come back.
        """

    def streams(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        """As :class:`hspec.targets.partial.ResidualStreams`, in the type that the server computes in.

        Raises:
            FeatureError: no server answers as long as patience lasts, or one answers what cannot be.
        """
        began, pause = 0.0, FIRST_PAUSE
        while True:
            try:
                streams = self._ask(tokens, layers)
                self.lost = False
                return streams
            except OSError as error:
                self.close()
                where, why = self.address, reason(error)
                if not self.lost:
                    self.lost, began = True, time.monotonic()
                    warnings.warn(f"the feature server at {where} is gone ({why}); it is tried again", stacklevel=2)
                self.addresses = [*self.addresses[1:], where]
                left = began + self.patience.gone - time.monotonic()
                if left <= 0:
                    self.lost = False
                    raise FeatureError(
                        f"the feature server at {where} is gone ({why}), and was tried again for {self.patience.gone:g} seconds"
                    ) from error
                time.sleep(min(pause, left))
                pause = min(2 * pause, LONGEST_PAUSE)

    def _checked(self, streams: Tensor | None, shape: Sequence[int]) -> Tensor:
        dtype = DTYPES[self.facts.dtype]
        if streams is None or streams.shape != torch.Size(shape) or streams.dtype != dtype:
            what = "nothing" if streams is None else f"{list(streams.shape)} in {streams.dtype}"
            raise self._error(f"answers {what} where {list(shape)} in {dtype} was asked for")
        if not bool(torch.isfinite(streams).all()):
            raise self._error(
                "answers numbers that are not finite: has its target overflowed? float32 or bfloat16 have more room"
            )
        return streams

    def _error(self, what: str) -> FeatureError:
        self.close()
        return FeatureError(f"the feature server at {self.address} {what}")


class FeatureClient(PatientClient[Address]):
    """Asks servers of ``hspec serve-features``; see there."""

    def __init__(self, addresses: Sequence[Address], facts: Facts, patience: Patience):
        super().__init__(addresses, facts, patience)
        self._connection: socket.socket | None = None

    def open(self) -> None:
        try:
            self._connect()
        except OSError as error:
            raise FeatureError(
                f"no feature server at {self.address} ({reason(error)}): start one there with 'hspec serve-features', or name the "
                f"right address"
            ) from error

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _connect(self) -> socket.socket:
        connection = self.address.connect(min(HELLO_SECONDS, self.patience.silent))
        try:
            send(connection, {"protocol": PROTOCOL, "version": self.facts.version})
            served = self._heard(receive(connection, 0))
        except WireError as error:
            connection.close()
            raise self._error(f"{error}: is it one of 'hspec serve-features', of the same version?") from error
        except BaseException:
            connection.close()
            raise
        if (difference := self.facts.difference(served.header)) is not None:
            connection.close()
            raise self._error(difference)
        connection.settimeout(self.patience.silent)
        self._connection = connection
        return connection

    def _ask(self, tokens: Tensor, layers: Sequence[int]) -> Tensor:
        connection = self._connection or self._connect()
        dtype, shape = DTYPES[self.facts.dtype], (*tokens.shape, len(layers), self.facts.hidden_size)
        size = dtype.itemsize * torch.Size(shape).numel()
        send(connection, {"layers": list(layers)}, tokens.int())
        try:
            answer = self._heard(receive(connection, size))
        except WireError as error:
            raise self._error(str(error)) from error
        return self._checked(answer.tensor, shape)

    def _heard(self, message: Message | None) -> Message:
        if message is None:
            raise ConnectionResetError("it has closed the connection")
        if (error := message.text("error")) is not None:
            raise self._error(f"says: {error}")
        return message
