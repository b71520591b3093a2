"""Where a feature server is: ``host:port``, or ``unix:PATH`` on the same machine."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from hspec.errors import UsageError

KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 6}
"""After so many seconds of silence the other side is asked whether it is there, again after so many, so often: a machine that is gone says
nothing by itself."""


@dataclass(frozen=True)
class Address:
    host: str = ""
    port: int = 0
    path: str | None = None
    """Of a unix socket."""

    @staticmethod
    def parse(text: str) -> Address:
        """
        Raises:
            UsageError: it is neither ``host:port`` nor ``unix:PATH``.
        """
        if text.startswith("unix:") and len(text) > len("unix:"):
            return Address(path=text.removeprefix("unix:"))
        host, colon, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not colon or not host or "/" in host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
            raise UsageError(f"{text!r} is no address of a feature server: give host:port, as in gpu-node:7700, or unix:PATH")
        return Address(host, int(port))

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def connect(self, timeout: float) -> socket.socket:
        """
        Args:
            timeout: seconds until someone must have answered.

        Raises:
            OSError: nobody does.
        """
        if self.path is None:
            connection = socket.create_connection((self.host, self.port), timeout)
            keep_alive(connection)
            return connection
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.settimeout(timeout)
            connection.connect(self.path)
        except OSError:
            connection.close()
            raise
        return connection


def keep_alive(connection: socket.socket) -> None:
    """Of a TCP connection: notice a machine that is gone, and send small messages at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for name, value in KEEP_ALIVE.items():
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
