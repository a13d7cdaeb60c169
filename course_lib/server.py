"""The server: a fresh process with torch imported that forks the ranks of every job.

It is started with `python -m course_lib.server` and holds one socket to the process that owns it. It has
imported modules and nothing else: no threads, no CUDA, no autograd, so that forking it is safe. Whatever
ends it or its owner ends every rank.

A job arrives as a socket of its own. Over it come the job's description and the ranks' file descriptors;
over it go the events "started", "exit" and "clean". When the owner closes it, the job is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import asdict, dataclass, field

from course_lib.processes import (
    adopt_orphans,
    children,
    die_with_parent,
    kill_group,
    kill_until_none,
    nonblocking_pipe,
    session,
    start_python,
    watch,
)
from course_lib.rank import RankSpec
from course_lib.rank import main as run_rank
from course_lib.wire import LENGTH, receive_exactly


@dataclass
class Job:
    """One running job: its socket, and which of its ranks are still alive."""

    socket: socket.socket
    pids: dict[int, int] = field(default_factory=dict)
    sessions: set[int] = field(default_factory=set)
    ending: bool = False


BASICS = ("cloudpickle", "numpy", "torch", "torch.distributed", "torch.nn.parallel", "torch.optim")
OURS = ("course_lib.results", "course_lib.travel")
# What DDP imports when the first model is wrapped: over a second, here once instead of in each rank.
HEAVY = ("torch._dynamo", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks")
OURS_WITH_TORCH = ("course_lib.probe", "course_lib.paced_backend", "course_lib.tasks")


def import_all(*names: str) -> None:
    """Import modules that every rank needs, so that no rank has to, and keep their memory shared."""
    for name in names:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()


class Server:
    """The event loop. Single-threaded on purpose: a fork copies only the thread that calls it."""

    def __init__(self, control: socket.socket, owner_pid: int, forks: bool) -> None:
        self.control = control
        self.owner_pid = owner_pid
        self.forks = forks
        self.heavy_imported = not forks
        self.served = False
        self.retired = False
        self.jobs: dict[int, Job] = {}
        self.selector = selectors.DefaultSelector()
        self.selector.register(control, selectors.EVENT_READ, "control")
        self.wakeup_read, self.wakeup_write = nonblocking_pipe()
        self.selector.register(self.wakeup_read, selectors.EVENT_READ, "child")
        signal.set_wakeup_fd(self.wakeup_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self.owner_watch = watch(owner_pid)
        if self.owner_watch is not None:
            self.selector.register(self.owner_watch, selectors.EVENT_READ, "owner gone")

    def run(self) -> None:
        """Serve until the owner is gone."""
        while True:
            idle_import = not self.heavy_imported and not self.jobs and self.served
            events = self.selector.select(0.05 if idle_import else 2.0)
            if not events and idle_import:
                self._import_heavy()
            if os.getppid() != self.owner_pid and self.owner_watch is None:
                return
            for key, _ in events:
                if key.data == "owner gone":
                    return
                if key.data == "control":
                    if not self._accept():
                        return
                elif key.data == "child":
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.wakeup_read, 4096)
                elif isinstance(key.data, Job):
                    self._hear(key.data)
            self._reap()
            if self.retired and not self.jobs:
                return

    def _import_heavy(self) -> None:
        import_all(*HEAVY, *OURS_WITH_TORCH)
        self.heavy_imported = True

    def _accept(self) -> bool:
        """Take one job from the owner. False where the owner wants no more of this server."""
        data, fds, _, _ = socket.recv_fds(self.control, 1, 1)
        if not data and self.jobs:
            # Replaced by a newer server, or the owner is gone, which is noticed apart: jobs may end first.
            self.selector.unregister(self.control)
            self.retired = True
            return True
        if not fds:
            return False
        channel = socket.socket(fileno=fds[0])
        job = Job(channel)
        opened: list[int] = []
        try:
            description = self._receive_description(channel, opened)
            if self.forks and not self.heavy_imported and description["heavy"]:
                self._import_heavy()
            self._start(job, description, opened)
            self.jobs[id(job)] = job
            channel.setblocking(False)
            self.selector.register(channel, selectors.EVENT_READ, job)
            self.served = True
            self._tell(job, {"event": "started", "pids": {r: p for p, r in job.pids.items()}})
        except Exception as error:
            for pid in job.pids:
                kill_group(pid)
            self._tell(job, {"event": "broken", "text": f"{type(error).__name__}: {error}"})
            channel.close()
        finally:
            for fd in opened:
                with contextlib.suppress(OSError):
                    os.close(fd)
        return True

    @staticmethod
    def _receive_description(channel: socket.socket, opened: list[int]) -> dict:
        channel.settimeout(10)
        (length,) = LENGTH.unpack(receive_exactly(channel, LENGTH.size))
        description = json.loads(receive_exactly(channel, length))
        for _ in range(1 + description["world_size"]):
            data, fds, _, _ = socket.recv_fds(channel, 1, 4)
            if not data or len(fds) != 3:
                raise RuntimeError("the launcher went away before the job was complete")
            opened.extend(fds)
        return description

    def _start(self, job: Job, description: dict, fds: list[int]) -> None:
        payload_fd, listen_fd, board_fd = fds[:3]
        for rank in range(description["world_size"]):
            channel_fd, output_fd, dump_fd = fds[3 + 3 * rank : 6 + 3 * rank]
            spec = RankSpec(
                rank=rank,
                channel_fd=channel_fd,
                output_fd=output_fd,
                dump_fd=dump_fd,
                payload_fd=payload_fd,
                listen_fd=listen_fd,
                board_fd=board_fd,
                parent_pid=os.getpid(),
                environment=description["environments"][rank],
                device=description["devices"][rank],
                **description["common"],
            )
            pid = self._fork(spec, fds) if self.forks else _spawn(spec)
            job.pids[pid] = rank
            job.sessions.add(pid)

    def _fork(self, spec: RankSpec, fds: list[int]) -> int:
        server_pid = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            os.setsid()
            die_with_parent(server_pid)
            self._forget(spec, fds)
            run_rank(spec)
        finally:
            os._exit(70)

    def _forget(self, spec: RankSpec, fds: list[int]) -> None:
        """In a forked rank: let go of everything that is the server's or another rank's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.selector.close()
        self.control.close()
        for fd in (self.wakeup_read, self.wakeup_write, self.owner_watch):
            if fd is not None:
                os.close(fd)
        for job in self.jobs.values():
            job.socket.close()
        mine = {getattr(spec, name) for name in vars(spec) if name.endswith("_fd")}
        for fd in fds:
            if fd not in mine:
                with contextlib.suppress(OSError):
                    os.close(fd)

    def _hear(self, job: Job) -> None:
        try:
            orders = job.socket.recv(64)
        except BlockingIOError:
            return
        except OSError:
            orders = b""
        for order, number in ((b"d", signal.SIGUSR1), (b"i", signal.SIGINT)):
            for pid in job.pids if order in orders else ():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
        if b"k" in orders or not orders:
            for pid in job.pids:
                kill_group(pid)
        if not orders:
            self.selector.unregister(job.socket)
            job.socket.close()
            job.ending = True

    def _reap(self) -> None:
        """Collect the dead, tell their jobs, and leave nothing of a finished job alive."""
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                break
            if found is None:
                break
            pid = found.si_pid
            job = next((j for j in self.jobs.values() if pid in j.pids), None)
            if job is not None:
                # The dead leader still holds its group's number: nothing else can be hit.
                kill_group(pid)
            _, status = os.waitpid(pid, 0)
            if job is not None:
                self._tell(job, {"event": "exit", "rank": job.pids.pop(pid), "status": status})
        for job in [j for j in self.jobs.values() if not j.pids]:
            self._sweep(job)
            del self.jobs[id(job)]
            self._tell(job, {"event": "clean"})
            with contextlib.suppress(KeyError, ValueError):
                self.selector.unregister(job.socket)
            job.socket.close()

    def _sweep(self, job: Job) -> None:
        """Kill what the job's ranks left behind: orphans come to the server, which adopts them."""
        alive = {pid for other in self.jobs.values() for pid in other.pids}
        others = {s for other in self.jobs.values() if other is not job for s in other.sessions}
        kill_until_none(lambda: [p for p in children() if p not in alive and session(p) not in others])

    def _tell(self, job: Job, event: dict) -> None:
        if job.ending:
            return
        with contextlib.suppress(OSError):
            job.socket.sendall(json.dumps(event).encode() + b"\n")

    def end(self) -> None:
        """Kill every rank and whatever they left."""
        for job in self.jobs.values():
            for pid in job.pids:
                kill_group(pid)
        kill_until_none(children)


def _spawn(spec: RankSpec) -> int:
    """Start a rank as a fresh process, where forking is unsafe."""
    code = "import json,sys; from course_lib import rank; rank.main(rank.RankSpec(**json.loads(sys.argv[1])))"
    fds = [getattr(spec, name) for name in vars(spec) if name.endswith("_fd")]
    return start_python(code, json.dumps(asdict(spec)), fds)


def main() -> None:
    """Entry point of `python -m course_lib.server CONTROL_FD OWNER_PID fork|spawn`."""
    control_fd, owner_pid, method = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    adopt_orphans()
    if method == "fork":
        import_all(*BASICS, *OURS)
    server = Server(socket.socket(fileno=control_fd), owner_pid, method == "fork")
    try:
        server.run()
    finally:
        server.end()


if __name__ == "__main__":
    main()
