"""What the server asks of the operating system about processes: watching, adopting and killing them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def nonblocking_pipe() -> tuple[int, int]:
    """A pipe, as (end to read, end to write), neither of which blocks."""
    read, write = os.pipe()
    os.set_blocking(read, False)
    os.set_blocking(write, False)
    return read, write


def watch(pid: int) -> int | None:
    """A descriptor that becomes readable when process `pid` ends, where the system has one."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def prctl(option: int, value: int) -> None:
    """Call prctl(2), where there is one."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Become the parent of every orphan that descends from this process, so that it can be found."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Have the system kill this process when its parent ends."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(70)


def kill_group(pid: int) -> None:
    """Kill a rank and all that is still in its process group."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)


def children() -> list[int]:
    """The processes whose parent is this one."""
    try:
        with open(f"/proc/self/task/{os.getpid()}/children") as listing:
            return [int(pid) for pid in listing.read().split()]
    except OSError:
        import psutil

        return [child.pid for child in psutil.Process().children()]


def session(pid: int) -> int | None:
    """The session that a process belongs to; None where it is gone."""
    try:
        return os.getsid(pid)
    except OSError:
        return None


def kill_until_none(find: Callable[[], list[int]], seconds: float = 2) -> None:
    """Kill and collect the children that `find` lists, until it lists none: killing may orphan more."""
    deadline = time.monotonic() + seconds
    while (pids := find()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def start_python(code: str, argument: str, fds: Sequence[int]) -> int:
    """Start `python -c code argument` in a session of its own, with `fds` inherited; return its pid."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, argument],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    process.returncode = 0  # The caller's own loop collects it; Popen is not to.
    return process.pid
