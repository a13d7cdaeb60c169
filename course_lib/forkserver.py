"""The launcher's hold on its server process: started at the first job, kept for the next ones.

One server belongs to one process (the notebook kernel). It is replaced when it died, when the library's
code on disk changed, or when this process is a fork of the one that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

STARTING_METHOD = "COURSE_LIB_START"
LIBRARY = Path(__file__).parent


class ServerDied(RuntimeError):
    """The server process ended before it could do its work."""


def starting_method() -> str:
    """How ranks are started here: "fork" on Linux, "spawn" elsewhere.

    The environment variable COURSE_LIB_START overrides it. Forking a process that uses the system's
    frameworks is unsafe on macOS.
    """
    method = os.environ.get(STARTING_METHOD) or ("fork" if sys.platform == "linux" else "spawn")
    if method not in ("fork", "spawn"):
        raise ValueError(f"{STARTING_METHOD}={method!r} is neither 'fork' nor 'spawn'; unset it")
    return method


def _fingerprint() -> tuple:
    """What changes when the library's code on disk does."""
    stats = ((path.name, path.stat()) for path in sorted(LIBRARY.glob("*.py")))
    return tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)


class Server:
    """A running server process and the socket to it."""

    def __init__(self) -> None:
        self.owner_pid = os.getpid()
        self.method = starting_method()
        self.fingerprint = _fingerprint()
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
        # Threads that spin while they wait are ten times slower than none where ranks share the cores.
        environment.setdefault("OMP_WAIT_POLICY", "passive")
        environment["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(LIBRARY.parent), os.environ.get("PYTHONPATH", "")])
        )
        with theirs:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "course_lib.server",
                    str(theirs.fileno()),
                    str(self.owner_pid),
                    self.method,
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=self.errors,
                stderr=self.errors,
                env=environment,
                start_new_session=True,
            )
        self.control = ours
        self._lock = threading.Lock()

    def usable(self) -> bool:
        """Whether this server can take the next job."""
        return (
            self.owner_pid == os.getpid()
            and self.process.poll() is None
            and self.method == starting_method()
            and self.fingerprint == _fingerprint()
        )

    def submit(self, channel: socket.socket) -> None:
        """Hand over the server's end of a job's socket. Raises ServerDied where nobody takes it."""
        try:
            with self._lock:
                socket.send_fds(self.control, [b"J"], [channel.fileno()])
        except OSError as error:
            raise ServerDied(self.last_words()) from error

    def last_words(self) -> str:
        """The end of what the server printed: nothing, unless something is wrong with it."""
        with contextlib.suppress(OSError, ValueError):
            self.errors.seek(0)
            return self.errors.read()[-4000:].decode(errors="replace").strip()
        return ""

    def retire(self) -> None:
        """Let the server end as soon as its last job has."""
        self.control.close()
        self.process.wait()
        self.errors.close()

    def close(self) -> None:
        """End the server, and with it any job still running."""
        with contextlib.suppress(OSError):
            self.control.send(b"Q")
        self.control.close()
        if self.owner_pid == os.getpid():
            try:
                self.process.wait(timeout=3)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.errors.close()


_current: Server | None = None
_lock = threading.Lock()


def current_server() -> Server:
    """The server of this process, started if need be."""
    global _current
    with _lock:
        if _current is not None and not _current.usable():
            stale, _current = _current, None
            # Jobs that other threads or sessions still run on it go on: it ends when they do.
            if stale.owner_pid == os.getpid():
                if stale.process.poll() is None:
                    threading.Thread(target=stale.retire, daemon=True).start()
                else:
                    stale.retire()
        if _current is None:
            _current = Server()
        return _current


def close_server() -> None:
    """End this process's server, if it has one. The next launch starts a new one."""
    global _current
    with _lock:
        if _current is not None:
            server, _current = _current, None
            server.close()


atexit.register(close_server)
