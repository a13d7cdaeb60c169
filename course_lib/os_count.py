"""What the operating system counted: the bytes that this process has written, sockets included.

A second opinion on what was sent, from outside of torch: gloo writes what it sends to sockets.
"""

from __future__ import annotations

from pathlib import Path

_COUNTS = Path("/proc/self/io")


def bytes_written() -> int | None:
    """All bytes this process has written so far, to files, pipes and sockets; None where nobody counts.

    Linux counts them ("wchar" in /proc/self/io). Differences are what is of use: they hold what was sent
    between two calls, and some hundred bytes of gloo's own for each message.
    """
    try:
        lines = _COUNTS.read_text().splitlines()
    except OSError:
        return None
    counts = dict(line.split(": ") for line in lines if ": " in line)
    return int(counts["wchar"]) if "wchar" in counts else None
