"""The protocol between the host and the agent in a container: frames over one stream in each direction.

A frame is a header (length, kind, stream, number of the request) and a payload. A payload that is not just bytes of a
pipe is the length of a JSON head, the head, and a blob.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

HEADER = struct.Struct("<IBBI")
REQUEST, DATA, GRANT, END, ANSWER = range(1, 6)
WINDOW = 1 << 16
"""Bytes that may be on their way to a command that has not read them yet."""


def take_frames(received: bytearray) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield kind, stream, number and payload of every whole frame, and remove them all at the end."""
    at = 0
    while len(received) - at >= HEADER.size:
        length, kind, place, number = HEADER.unpack_from(received, at)
        begin = at + HEADER.size
        if len(received) - begin < length:
            break
        at = begin + length
        yield kind, place, number, bytes(memoryview(received)[begin:at])
    del received[:at]


def pack(head: Any, blob: bytes = b"") -> bytes:
    encoded = json.dumps(head).encode()
    return b"".join((struct.pack("<I", len(encoded)), encoded, blob))


def unpack(payload: bytes) -> tuple[Any, memoryview]:
    (length,) = struct.unpack_from("<I", payload)
    return json.loads(payload[4 : 4 + length]), memoryview(payload)[4 + length :]


def text(data: bytes) -> str:
    """Decode bytes into a string that JSON can carry; `raw` is the inverse."""
    return data.decode("latin-1")


def raw(string: str) -> bytes:
    return string.encode("latin-1")
