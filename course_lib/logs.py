"""What a rank prints, kept within bounds: the beginning and the end of it, however much comes between."""

from __future__ import annotations

from collections import deque

HEAD_BYTES = 128 * 1024
TAIL_BYTES = 128 * 1024


class Log:
    """The output of one rank, C++ text included, at most HEAD_BYTES + TAIL_BYTES of it."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail: deque[bytes] = deque()
        self._tail_size = 0
        self.total = 0

    def feed(self, data: bytes) -> None:
        """Take more output."""
        self.total += len(data)
        room = HEAD_BYTES - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data:
            self._tail.append(data)
            self._tail_size += len(data)
            while self._tail_size - len(self._tail[0]) >= TAIL_BYTES:
                self._tail_size -= len(self._tail.popleft())

    def text(self) -> str:
        """The output as text, with a note where its middle was left out. Undecodable bytes show as \\x.."""
        head = self._head.decode(errors="backslashreplace")
        tail = b"".join(self._tail)[-TAIL_BYTES:]
        left_out = self.total - len(self._head) - len(tail)
        if not tail:
            return head
        note = f"\n[… {left_out:,} bytes left out …]\n" if left_out else ""
        return head + note + tail.decode(errors="backslashreplace")

    def last_line(self) -> str:
        """The last complete line so far, for the progress display."""
        recent = (self._tail[-1] if self._tail else bytes(self._head[-4096:]))[-4096:]
        lines = recent.decode(errors="backslashreplace").rstrip("\n").splitlines()
        return lines[-1] if lines else ""
