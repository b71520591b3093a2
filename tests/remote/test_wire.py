"""Messages arrive as they were sent; what is no message is refused before it is read."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hspec.remote.wire import DTYPES, MAGIC, MAX_HEADER, Message, WireError, receive, send

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    one, two = socket.socketpair()
    with one, two:
        two.settimeout(5)
        yield one, two


def there(header: dict[str, object], tensor: Tensor | None) -> Message:
    one, two = socket.socketpair()
    with one, two:
        sender = threading.Thread(target=send, args=(one, header, tensor))
        sender.start()
        message = receive(two, 1 << 24)
        sender.join()
    assert message is not None
    return message


@given(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 4), max_size=4), st.text(max_size=9))
def test_there_and_back(dtype: str, shape: list[int], text: str) -> None:
    tensor = torch.arange(torch.Size(shape).numel()).view(shape).to(DTYPES[dtype])
    message = there({"a": text}, tensor)
    assert message.header["a"] == text
    assert message.tensor is not None and message.tensor.dtype == tensor.dtype
    assert message.tensor.shape == tensor.shape and torch.equal(message.tensor, tensor)


def test_a_large_one_and_one_that_lies_scattered() -> None:
    large = torch.randn(3, 1 << 18)
    assert torch.equal(there({}, large.T).tensor, large.T)  # type: ignore[arg-type]
    assert there({"b": [1]}, None) == Message({"b": [1]})


def message(header: bytes, payload: bytes = b"", magic: bytes = MAGIC, sizes: tuple[int, int] | None = None) -> bytes:
    lengths = sizes or (len(header), len(payload))
    return struct.pack("<8sIQ", magic, *lengths) + header + payload


FOUR = json.dumps({"tensor": {"dtype": "float32", "shape": [1]}}).encode()


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", "does not speak this protocol"),
        (message(b"{}", sizes=(MAX_HEADER + 1, 0)), "announces 1,048,577"),
        (message(b"{}", sizes=(2, 1 << 60)), r"\+ 1,152,921,504,606,846,976 bytes, and at most"),
        (message(b"{"), "a header that is not JSON"),
        (message(b"\xff\xff"), "a header that is not JSON"),
        (message(b"[1]"), r"a header that is no JSON object but '\[1\]'"),
        (message(b"{}", b"1234"), "4 bytes as a tensor None, which they are not"),
        (message(FOUR, b"12345678"), "8 bytes as a tensor"),
        (message(FOUR.replace(b"float32", b"float64"), b"12345678"), "which they are not"),
        (message(FOUR.replace(b"[1]", b"[-1, -1]"), b"1234"), "which they are not"),
        (message(FOUR.replace(b"[1]", b"[true]"), b"1234"), "which they are not"),
        (message(FOUR.replace(b"[1]", b"null"), b"1234"), "which they are not"),
        (message(b'{"tensor": "__reduce__"}', b"1234"), "which they are not"),
    ],
)
def test_what_is_no_message(ends: Ends, sent: bytes, says: str) -> None:
    ends[0].sendall(sent)
    with pytest.raises(WireError, match=says):
        receive(ends[1], 64)


def test_an_end_between_messages_and_one_in_the_midst(ends: Ends) -> None:
    send(ends[0], {"last": True})
    ends[0].sendall(message(FOUR, b"1234")[:-1])
    ends[0].close()
    assert receive(ends[1], 64) == Message({"last": True})
    with pytest.raises(ConnectionResetError, match="in the midst of a message"):
        receive(ends[1], 64)
    assert receive(ends[1], 64) is None
