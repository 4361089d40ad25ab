"""Runs inside an agent's sandbox: listens there, and carries every connection over descriptors 3 and 4 to the host.

A frame is a kind (R ready, O opened, D data, C closed), the number of a connection, a length, and that many bytes.
Standard library of any Python 3 alone; the agent may end or change this process, and harms nobody but itself.
"""

import os
import selectors
import socket
import struct
from typing import Dict, Set  # noqa: UP035 (old interpreters)

HEADER = struct.Struct(">cII")
FRAME = 65536
PORT = 8400
ready = selectors.DefaultSelector()
connections: Dict[int, socket.socket] = {}  # noqa: UP006
unsent: Dict[int, bytearray] = {}  # noqa: UP006
closing: Set[int] = set()  # noqa: UP006


def send(kind: bytes, number: int, data: bytes = b"") -> None:
    """Write a frame to the host."""
    view = memoryview(HEADER.pack(kind, number, len(data)) + data)
    while view:
        view = view[os.write(4, view) :]


def close(number: int) -> None:
    """Forget a connection."""
    connection = connections.pop(number, None)
    if connection is not None:
        del unsent[number]
        closing.discard(number)
        ready.unregister(connection)
        connection.close()


def flush(number: int) -> None:
    """Write what a connection takes of what the host sent for it."""
    connection, data = connections[number], unsent[number]
    try:
        while data:
            del data[: connection.send(data[:FRAME])]
    except BlockingIOError:
        pass
    except OSError:
        send(b"C", number)
        close(number)
        return
    if not data and number in closing:
        close(number)
        return
    ready.modify(connection, selectors.EVENT_READ | (selectors.EVENT_WRITE if data else 0), number)


def hear(buffer: bytearray) -> None:
    """Take the whole frames of what the host has sent."""
    while len(buffer) >= HEADER.size:
        kind, number, length = HEADER.unpack_from(buffer)
        if len(buffer) < HEADER.size + length:
            return
        data = buffer[HEADER.size : HEADER.size + length]
        del buffer[: HEADER.size + length]
        if number in connections:
            if kind == b"C":
                closing.add(number)
            unsent[number] += data
            flush(number)


def speak(number: int) -> None:
    """Send on what has come over a connection."""
    try:
        data = connections[number].recv(FRAME)
    except BlockingIOError:
        return
    except OSError:
        data = b""
    send(b"D" if data else b"C", number, data)
    if not data:
        close(number)


def main() -> None:
    """Listen and carry until the host closes its end."""
    try:
        tcp = socket.create_server(("127.0.0.1", PORT))
    except OSError:
        tcp = socket.create_server(("127.0.0.1", 0))
    listeners = [tcp]
    try:
        listeners.append(socket.socket(socket.AF_UNIX))
        listeners[1].bind(os.path.join(os.environ["HOME"], ".agentrl.sock"))
        listeners[1].listen(64)
    except (OSError, KeyError):
        del listeners[1:]
    for listener in listeners:
        listener.setblocking(False)
        ready.register(listener, selectors.EVENT_READ, -1)
    ready.register(3, selectors.EVENT_READ, 0)
    send(b"R", tcp.getsockname()[1])
    number, buffer = 0, bytearray()
    while True:
        for key, mask in ready.select():
            if key.data == 0:
                part = os.read(3, FRAME)
                if not part:
                    return
                buffer += part
                hear(buffer)
            elif key.data == -1:
                try:
                    connection, _ = key.fileobj.accept()  # type: ignore[union-attr]
                except OSError:
                    continue
                connection.setblocking(False)
                number += 1
                connections[number], unsent[number] = connection, bytearray()
                ready.register(connection, selectors.EVENT_READ, number)
                send(b"O", number)
            else:
                if mask & selectors.EVENT_WRITE and key.data in connections:
                    flush(key.data)
                if mask & selectors.EVENT_READ and key.data in connections:
                    speak(key.data)


if __name__ == "__main__":
    main()
