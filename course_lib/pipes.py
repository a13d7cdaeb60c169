"""What joins a job to its ranks: pipes, and files that live in memory and have no name."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import Any


def readable_pipe(closing: contextlib.ExitStack) -> tuple[Any, int]:
    """A pipe: the end to read, as a file that closes itself, and the end to hand over."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    closing.callback(os.close, write)
    return open(read, "rb", buffering=0), write


def memory_file(content: bytes, size: int) -> int:
    """A file without a name that holds `content` and is `size` bytes long."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create("course_lib")
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.truncate(fd, size)
    written = 0
    while written < len(content):
        written += os.pwrite(fd, content[written:], written)
    return fd
