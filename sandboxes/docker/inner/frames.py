"""How the host and the agent in a container speak: frames over one stream each way, and what they carry.

A frame is a header (length, kind, stream, number of the request) and its payload. A payload that is not just bytes of a
pipe is a JSON head, with its length before it, and a blob behind it.
"""

from __future__ import annotations

import json
import struct
from typing import Any

HEADER = struct.Struct("<IBBI")
REQUEST, DATA, GRANT, END, ANSWER = range(1, 6)
WINDOW = 1 << 16
"""Bytes that may be on their way to a command which has not taken them yet."""


def pack(head: Any, blob: bytes = b"") -> bytes:
    encoded = json.dumps(head).encode()
    return b"".join((struct.pack("<I", len(encoded)), encoded, blob))


def unpack(payload: bytes) -> tuple[Any, memoryview]:
    (length,) = struct.unpack_from("<I", payload)
    return json.loads(payload[4 : 4 + length]), memoryview(payload)[4 + length :]


def text(data: bytes) -> str:
    """Bytes as a string that JSON can carry."""
    return data.decode("latin-1")


def raw(string: str) -> bytes:
    return string.encode("latin-1")
