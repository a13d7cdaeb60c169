"""The child's side of a job: what happens in one rank, from its first instruction to its last.

`main` is called in a process that the server has just forked (or spawned). It takes over the pipes that
the launcher made, sets the environment up as torchrun would, calls the learner's function and sends back
what it returned, when each thing happened, and what went wrong.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import socket
import sys
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

from course_lib import rendezvous, spans, wire

BEAT_SECONDS = 0.2
# The line to the launcher, for a function that is a session: it answers orders until the last.
line: wire.Sender | None = None
INSIDE_A_RANK = "COURSE_LIB_RANK"
BOARD_FD = "COURSE_LIB_BOARD_FD"


@dataclass
class RankSpec:
    """All that one rank needs to know. The `_fd` fields are file descriptors that it inherits."""

    rank: int
    world_size: int
    channel_fd: int
    output_fd: int
    dump_fd: int
    payload_fd: int
    listen_fd: int
    board_fd: int
    parent_pid: int
    environment: dict[str, str]
    path: list[str]
    argv: list[str]
    directory: str
    port: int
    threads: int
    backend: str | None
    device: str
    pace: dict | None
    recursion_limit: int = 1000


def main(spec: RankSpec) -> None:
    """Run one rank from start to end. Never returns: the process ends here."""
    status = 70
    try:
        sender = wire.Sender(socket.socket(fileno=spec.channel_fd))
        status = _run(spec, sender)
    except BaseException:
        traceback.print_exc()
    finally:
        flush()
        os._exit(status)


def _run(spec: RankSpec, sender: wire.Sender) -> int:
    global line
    line = sender
    stage = "starting"

    def enter(name: str) -> None:
        nonlocal stage
        stage = name
        sender.send_json(wire.STAGE, {"stage": name, "time": time.monotonic()})

    try:
        _take_over_process(spec)
        _Beat(sender, spec.parent_pid).start()
        enter("importing")
        import torch

        torch.set_num_threads(spec.threads)
        function, args, kwargs = _load_call(spec.payload_fd)
        store = _serve_store(spec)
        rendezvous.allow_rejoining()
        _prepare_device(spec)
        paced = _install_pace(spec)
        if spec.backend is not None:
            enter("rendezvous")
            _join_group(spec)
        enter("running")
        value = function(*args, **kwargs)
        _send_result(sender, value)
        sender.send_json(wire.REPORT, {**(paced() if paced else {}), "paced_compute": _computes_paced()})
        del value, function, args, kwargs
        flush()
        sender.send_json(wire.STAGE, {"stage": "finished", "time": time.monotonic()})
        if not sender.wait_for_release():
            return 1
        stage = "teardown"
        _leave_group()
        del store
        return 0
    except BaseException as error:
        flush()
        sender.send_json(wire.BEAT, {"spans": [s.to_row() for s in spans.drain()]})
        sender.send_json(wire.ERROR, describe(error, stage))
        sender.wait_for_release()
        return 1


def _take_over_process(spec: RankSpec) -> None:
    """Make this process the rank's own: output, environment, directory, signals, random state."""
    os.dup2(spec.output_fd, 1)
    os.dup2(spec.output_fd, 2)
    os.close(spec.output_fd)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace", line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=spec.dump_fd, all_threads=True)
    faulthandler.register(signal.SIGUSR1, file=spec.dump_fd, all_threads=True)
    os.environ.clear()
    os.environ.update(spec.environment)
    os.environ[BOARD_FD] = str(spec.board_fd)
    sys.path[:] = spec.path
    sys.argv[:] = spec.argv
    os.chdir(spec.directory)
    _unshare_random_state()
    spans.set_rank(spec.rank)


def _unshare_random_state() -> None:
    """Reseed what forked ranks would otherwise share, as separately started processes do not."""
    import random

    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def _load_call(payload_fd: int) -> tuple[Any, tuple, dict]:
    from course_lib.travel import unpack_call

    with open(os.dup(payload_fd), "rb") as payload:
        size = os.fstat(payload.fileno()).st_size
        data = os.pread(payload.fileno(), size, 0)
        while len(data) < size:
            data += os.pread(payload.fileno(), size - len(data), len(data))
    return unpack_call(data)


def _serve_store(spec: RankSpec) -> Any:
    """Rank 0 serves the job's store on the loopback socket that the launcher bound.

    `multi_tenant` lets the learner's own `init_process_group()` find this server instead of opening a
    second one, which would listen on every interface.
    """
    if spec.rank != 0:
        os.close(spec.listen_fd)
        return None
    import torch.distributed as dist

    return dist.TCPStore(
        "127.0.0.1",
        spec.port,
        None,
        True,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=spec.listen_fd,
    )


def _prepare_device(spec: RankSpec) -> None:
    if spec.device.startswith("cuda"):
        import torch

        torch.cuda.set_device(torch.device(spec.device))


def _install_pace(spec: RankSpec) -> Any:
    """Register the paced backend where the job has a pace; return what reports on it at the end."""
    if spec.pace is None:
        return None
    from course_lib import pace

    pace.install(pace.Pace.from_dict(spec.pace))
    if spec.backend is None:
        # The learner calls init_process_group() without naming a backend: it is to find the paced one.
        import torch.distributed as dist

        dist.Backend.default_device_backend_map["cpu"] = "paced"
    return pace.report


def _computes_paced() -> bool:
    clock = sys.modules.get("course_lib.clock")
    return clock is not None and clock.anything_paced()


def _join_group(spec: RankSpec) -> None:
    import torch
    import torch.distributed as dist

    device = torch.device(spec.device) if spec.device.startswith("cuda") else None
    dist.init_process_group(spec.backend, device_id=device)


def _leave_group() -> None:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()
    gc.collect()


def _send_result(sender: wire.Sender, value: Any) -> None:
    from course_lib.results import CannotReturn, pack

    try:
        packed = pack(value)
    except CannotReturn as error:
        sender.send_json(wire.BEAT, {"spans": [s.to_row() for s in spans.drain()]})
        sender.send_json(
            wire.ERROR, {**describe(error, "result"), "text": str(error), "frames": [], "causes": []}
        )
        return
    sender.send_json(wire.BEAT, {"spans": [s.to_row() for s in spans.drain()]})
    sender.send(wire.RESULT, packed)


def describe(error: BaseException, stage: str) -> dict:
    """What went wrong, as plain data: type, message, the chain of tracebacks, stage and time."""
    summary = traceback.TracebackException.from_exception(error, capture_locals=False, lookup_lines=True)
    chain: list[dict] = []
    link: traceback.TracebackException | None = summary
    while link is not None and len(chain) < 5:
        chain.append(
            {
                "type": getattr(link, "exc_type_str", None)
                or getattr(link.exc_type, "__name__", "Exception"),
                "text": "".join(link.format_exception_only())[:20_000].rstrip(),
                "frames": [[f.filename, f.lineno or 0, f.name, f.line or ""] for f in link.stack],
            }
        )
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return {
        "type": type(error).__name__,
        "text": chain[0]["text"],
        "frames": chain[0]["frames"],
        "causes": chain[1:],
        "stage": stage,
        "time": time.monotonic(),
    }


def flush() -> None:
    """Hand over what Python and C still hold back of what was printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    with contextlib.suppress(Exception):
        ctypes.CDLL(None).fflush(None)


class _Beat(threading.Thread):
    """Sends the spans recorded so far every now and then, and ends the rank when its parent is gone."""

    def __init__(self, sender: wire.Sender, parent_pid: int) -> None:
        super().__init__(name="course_lib beat", daemon=True)
        self._sender = sender
        self._parent_pid = parent_pid

    def run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            if os.getppid() != self._parent_pid:
                os.killpg(0, signal.SIGKILL)
            recorded = spans.drain()
            if recorded:
                self._sender.send_json(wire.BEAT, {"spans": [s.to_row() for s in recorded]})
