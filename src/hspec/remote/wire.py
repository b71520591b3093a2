"""What feature server and trainer send each other: a JSON object, and behind it a tensor's bytes if there is one.

A message is 8 bytes of magic, the lengths of header and payload (u32, u64, little-endian), the header in UTF-8, the payload. A header
with a payload has ``tensor: {dtype, shape}``. Nothing that is received is run or unpickled, and nothing larger than was agreed is read.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAGIC = b"hspec-f\x01"
PROTOCOL = 1
MAX_HEADER = 1 << 20
"""Bytes."""
DTYPES = {"int32": torch.int32, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEAD = struct.Struct("<8sIQ")


class WireError(Exception):
    """What came is no message, or one that must not be read; the message completes a sentence about the other side."""


@dataclass(frozen=True)
class Message:
    header: dict[str, Any]
    tensor: Tensor | None = None
    """On the CPU."""

    def text(self, key: str) -> str | None:
        value = self.header.get(key)
        return value if isinstance(value, str) else None


def name_of(dtype: torch.dtype) -> str:
    return _NAMES[dtype]


def send(connection: socket.socket, header: dict[str, Any], tensor: Tensor | None = None) -> None:
    """
    Args:
        tensor: of one of :data:`DTYPES`, on the CPU.

    Raises:
        OSError: the other side is gone.
    """
    payload: Any = b""
    if tensor is not None:
        header = header | {"tensor": {"dtype": name_of(tensor.dtype), "shape": list(tensor.shape)}}
        payload = tensor.contiguous().flatten().view(torch.uint8).numpy().data
    text = json.dumps(header).encode()
    connection.sendall(_HEAD.pack(MAGIC, len(text), len(payload)) + text)
    connection.sendall(payload)


def receive(connection: socket.socket, limit: int) -> Message | None:
    """The next message, or None if the other side has nothing more to say.

    Args:
        limit: bytes of a payload, at most.

    Raises:
        WireError: it is no message, or too large.
        OSError: the connection broke, also in the midst of a message, or nothing came in time.
    """
    head = _read(connection, _HEAD.size, may_end=True)
    if head is None:
        return None
    magic, header_bytes, payload_bytes = _HEAD.unpack(head)
    if magic != MAGIC:
        raise WireError(f"does not speak this protocol (it sent {bytes(head[:16])!r})")
    if header_bytes > MAX_HEADER or payload_bytes > limit:
        raise WireError(
            f"announces {header_bytes:,} + {payload_bytes:,} bytes, and at most {MAX_HEADER:,} + {limit:,} are taken"
        )
    text, payload = _read(connection, header_bytes), _read(connection, payload_bytes)
    try:
        header = json.loads(bytes(text or b""))
    except ValueError as error:
        raise WireError(f"sent a header that is not JSON ({' '.join(str(error).split())})") from error
    if not isinstance(header, dict):
        raise WireError(f"sent a header that is no JSON object but {str(header)[:80]!r}")
    return Message(header, _tensor(header.get("tensor"), payload) if payload or "tensor" in header else None)


def _read(connection: socket.socket, count: int, may_end: bool = False) -> bytearray | None:
    """Exactly so many bytes."""
    buffer = bytearray(count)
    view, done = memoryview(buffer), 0
    while done < count:
        came = connection.recv_into(view[done:])
        if came == 0:
            if may_end and done == 0:
                return None
            raise ConnectionResetError("the connection ended in the midst of a message")
        done += came
    return buffer


def _tensor(what: Any, payload: bytearray | None) -> Tensor:
    told: dict[str, Any] = what if isinstance(what, dict) else {}
    dtype, shape = DTYPES.get(str(told.get("dtype"))), told.get("shape")
    sizes = shape if isinstance(shape, list) and all(type(n) is int and n >= 0 for n in shape) else None
    if dtype is None or sizes is None or payload is None or math.prod(sizes) * dtype.itemsize != len(payload):
        raise WireError(f"sent {len(payload or b''):,} bytes as a tensor {str(what)[:120]}, which they are not")
    return torch.frombuffer(payload, dtype=dtype).view(sizes) if payload else torch.empty(sizes, dtype=dtype)
