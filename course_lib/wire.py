"""The messages between a rank and the process that launched it.

A message is one byte that says what it is, eight bytes of length, and a body. It travels over a socket
pair that was made before the fork and has no name, so that no other process can reach it.
"""

from __future__ import annotations

import json
import socket
import struct
import threading
from typing import Any

HEADER = struct.Struct("!cQ")
LENGTH = struct.Struct("!Q")
STAGE = b"S"
BEAT = b"B"
RESULT = b"R"
ERROR = b"E"
REPORT = b"P"
RELEASE = b"q"
# What a session asks of a rank, one order after another: run a cell, say a value, take values, leave the
# process group, join it anew, end.
RUN, SAY, TAKE, LEAVE, REGROUP, END = b"c", b"g", b"v", b"l", b"n", b"z"


def receive_exactly(channel: socket.socket, count: int) -> bytes:
    """Block until `count` bytes have come. Raises ConnectionError where the other end is gone before."""
    data = bytearray()
    while len(data) < count:
        part = channel.recv(min(count - len(data), 1 << 20))
        if not part:
            raise ConnectionError("the other end went away before all was said")
        data += part
    return bytes(data)


class Sender:
    """The rank's end: sends whole messages, from any thread."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel
        self._lock = threading.Lock()

    def send(self, kind: bytes, body: bytes) -> None:
        """Send one message; does nothing where the other end is gone."""
        with self._lock:
            try:
                self._channel.sendall(HEADER.pack(kind, len(body)))
                self._channel.sendall(body)
            except OSError:
                pass

    def send_json(self, kind: bytes, body: Any) -> None:
        """Send one message whose body is JSON."""
        self.send(kind, json.dumps(body).encode())

    def receive(self) -> tuple[bytes, bytes] | None:
        """Block until the launcher's next order, as (kind, body). None where it is gone."""
        try:
            kind, length = HEADER.unpack(receive_exactly(self._channel, HEADER.size))
            return kind, receive_exactly(self._channel, length)
        except OSError:
            return None

    def wait_for_release(self) -> bool:
        """Block until the launcher lets go. False where it is gone."""
        try:
            return self._channel.recv(1) == RELEASE
        except OSError:
            return False


class Receiver:
    """The launcher's end: turns the bytes that come into whole messages."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bytes]]:
        """The messages completed by `data`, as (kind, body)."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= HEADER.size:
            kind, length = HEADER.unpack_from(self._buffer, start)
            end = start + HEADER.size + length
            if len(self._buffer) < end:
                break
            messages.append((kind, bytes(self._buffer[start + HEADER.size : end])))
            start = end
        del self._buffer[:start]
        return messages
