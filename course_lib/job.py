"""One job, seen from the launching process: its pipes, its events, and how it is brought to an end.

The launcher makes every pipe and socket itself and hands the ranks' ends to the server. It then listens
to the server (which rank started, which ended), to each rank's channel (stages, spans, results, errors)
and to each rank's output, all in the thread that called `launch`.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import time
from typing import Any

from course_lib import wire
from course_lib.forkserver import Server, ServerDied, current_server
from course_lib.pipes import memory_file, readable_pipe
from course_lib.progress import Progress
from course_lib.rank_state import STAGES, RankState
from course_lib.spans import Span

START_SECONDS = 90
GRACE_SECONDS = 0.3
STACK_SECONDS = 0.5
TEARDOWN_SECONDS = 5
CLEAN_SECONDS = 3


class Job:
    """A job from its start to the moment when nothing is left of it."""

    def __init__(self, payload: bytes, description: dict, board_bytes: int, progress: Progress) -> None:
        self.payload = payload
        self.description = description
        self.board_bytes = board_bytes
        self.progress = progress
        self.ranks = [RankState(rank) for rank in range(description["world_size"])]
        self.spans: list[Span] = []
        self.interrupted = False
        self.timed_out = False
        self.clean = False
        self.killing = False
        self.started_at: float | None = None
        self.killed_in_teardown = False
        self.selector = selectors.DefaultSelector()
        self.channels: dict[int, socket.socket] = {}
        self.server: Server | None = None
        self._events = bytearray()
        self._broken = ""

    def run(self, timeout: float) -> None:
        """Run the job; return when it is over, however it ended. Raises ServerDied where it cannot start."""
        try:
            try:
                self._start()
                self._wait_until_started()
                self._wait_for_reports(timeout)
            except KeyboardInterrupt:
                self.interrupted = True
            self._bring_to_an_end()
        finally:
            self._close()

    def _start(self) -> None:
        world_size = len(self.ranks)
        self.server = current_server()
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.ExitStack() as ours_to_close:
            ours_to_close.enter_context(theirs)
            payload_fd = memory_file(self.payload, len(self.payload))
            ours_to_close.callback(os.close, payload_fd)
            board_fd = memory_file(b"", self.board_bytes)
            ours_to_close.callback(os.close, board_fd)
            listener = ours_to_close.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            listener.bind(("127.0.0.1", 0))
            listener.listen(world_size + 16)
            port = listener.getsockname()[1]
            self.description["common"]["port"] = port
            for environment in self.description["environments"]:
                environment["MASTER_PORT"] = str(port)
            fds = [(payload_fd, listener.fileno(), board_fd)]
            for rank in range(world_size):
                channel, their_channel = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
                ours_to_close.enter_context(their_channel)
                output, their_output = readable_pipe(ours_to_close)
                dump, their_dump = readable_pipe(ours_to_close)
                channel.setblocking(False)
                self.channels[rank] = channel
                self.selector.register(channel, selectors.EVENT_READ, ("channel", rank))
                self.selector.register(output, selectors.EVENT_READ, ("output", rank))
                self.selector.register(dump, selectors.EVENT_READ, ("dump", rank))
                fds.append((their_channel.fileno(), their_output, their_dump))
            self.server.submit(theirs)
            self._send_description(fds)
        self.socket.setblocking(False)
        self.selector.register(self.socket, selectors.EVENT_READ, ("server", -1))

    def _send_description(self, fds: list[tuple[int, int, int]]) -> None:
        body = json.dumps(self.description).encode()
        self.socket.settimeout(START_SECONDS)
        try:
            self.socket.sendall(wire.LENGTH.pack(len(body)) + body)
            for group in fds:
                socket.send_fds(self.socket, [b"F"], group)
        except OSError as error:
            raise ServerDied(self._last_words()) from error

    def _last_words(self) -> str:
        words = self.server.last_words() if self.server else ""
        return f"the process that starts ranks ended unexpectedly. Its last words: {words or '(none)'}"

    def _wait_until_started(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while self.started_at is None:
            if self._broken:
                raise ServerDied(self._broken)
            if self.clean:
                raise ServerDied(self._last_words())
            if time.monotonic() > deadline:
                raise ServerDied(f"no rank started within {START_SECONDS} s: the machine is too busy")
            self._pump(deadline, "starting")

    def _wait_for_reports(self, timeout: float) -> None:
        assert self.started_at is not None
        deadline = self.started_at + timeout
        while not all(state.reported for state in self.ranks):
            if any(state.failure for state in self.ranks) or self.clean:
                return
            if time.monotonic() >= deadline:
                self.timed_out = True
                return
            self._pump(deadline, "running")

    def _bring_to_an_end(self) -> None:
        """Release the ranks or stop them; an interrupt only makes this quicker."""
        while not self.clean:
            try:
                if self.interrupted:
                    self._kill()
                elif all(state.result is not None for state in self.ranks):
                    self._release()
                else:
                    self._stop_failed()
            except KeyboardInterrupt:
                self.interrupted = True

    def _release(self) -> None:
        for channel in self.channels.values():
            with contextlib.suppress(OSError):
                channel.send(wire.RELEASE)
        deadline = time.monotonic() + TEARDOWN_SECONDS
        while not self.clean and time.monotonic() < deadline:
            self._pump(deadline, "teardown")
        if not self.clean:
            self.killed_in_teardown = True
            self._kill()

    def _stop_failed(self) -> None:
        if not self.timed_out:
            self._pump_for(GRACE_SECONDS, lambda: all(state.reported for state in self.ranks))
        waiting = [state for state in self.ranks if not state.reported and not state.exited]
        if waiting:
            self._order(b"d")
            self._pump_for(STACK_SECONDS, lambda: all(state.standing or state.exited for state in waiting))
        self._kill()

    def _kill(self) -> None:
        """Have the server kill the ranks; wait until it says that nothing is left."""
        if not hasattr(self, "socket"):
            self.clean = True
        self.killing = True
        self._order(b"k")
        self._pump_for(CLEAN_SECONDS, lambda: self.clean)
        # A server that does not answer is past helping: when its socket closes, it kills the job itself.
        self.clean = True

    def _order(self, order: bytes) -> None:
        with contextlib.suppress(OSError, AttributeError):
            self.socket.send(order)

    def _pump_for(self, seconds: float, done: Any) -> None:
        deadline = time.monotonic() + seconds
        while not done() and time.monotonic() < deadline:
            self._pump(deadline, "stopping")

    def _pump(self, deadline: float, phase: str) -> None:
        """Handle whatever has come, waiting for it at most until `deadline` or the next progress line."""
        wait = max(0.0, min(deadline - time.monotonic(), 0.25))
        for key, _ in self.selector.select(wait):
            source, rank = key.data
            try:
                data = os.read(key.fd, 1 << 18)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                self.selector.unregister(key.fileobj)
            if source == "server":
                self._hear_server(data)
            elif source == "channel":
                self.spans += self.ranks[rank].hear(data)
            elif source == "output":
                self.ranks[rank].log.feed(data)
            else:
                self.ranks[rank].dump += data
        if self.progress.due():
            self._show_progress(phase)

    def _hear_server(self, data: bytes) -> None:
        if not data:
            self.clean = True
            return
        self._events += data
        *lines, rest = self._events.split(b"\n")
        self._events = bytearray(rest)
        for line in lines:
            event = json.loads(line)
            if event["event"] == "started":
                self.started_at = time.monotonic()
            elif event["event"] == "broken":
                self._broken = event["text"]
            elif event["event"] == "clean":
                self.clean = True
            elif event["event"] == "exit":
                self._rank_ended(event["rank"], event["status"])

    def _rank_ended(self, rank: int, status: int) -> None:
        self._drain(rank)
        self.ranks[rank].end(status, stopped_by_us=self.killing)

    def _drain(self, rank: int) -> None:
        """Read what a dead rank had still sent."""
        for key in [k for k in self.selector.get_map().values() if k.data[1] == rank]:
            while True:
                try:
                    data = os.read(key.fd, 1 << 18)
                except OSError:
                    break
                if not data:
                    break
                if key.data[0] == "channel":
                    self.spans += self.ranks[rank].hear(data)
                elif key.data[0] == "output":
                    self.ranks[rank].log.feed(data)
                else:
                    self.ranks[rank].dump += data

    def _show_progress(self, phase: str) -> None:
        stages = [state.stage for state in self.ranks]
        steps = [state.step for state in self.ranks if state.step is not None]
        where = phase if phase != "running" else min(stages, key=STAGES.index)
        if where == "running" and steps:
            where = f"step {min(steps)}"
        elapsed = f", {time.monotonic() - self.started_at:.1f} s" if self.started_at else ""
        lines = [f"rank {r}: {line}" for r, s in enumerate(self.ranks) if (line := s.log.last_line())]
        self.progress.show(f"{len(self.ranks)} ranks: {where}{elapsed}", lines[:8])

    def _close(self) -> None:
        self.progress.close()
        for key in list(self.selector.get_map().values()):
            with contextlib.suppress(OSError):
                key.fileobj.close()  # type: ignore[union-attr]
        for channel in self.channels.values():
            channel.close()
        self.selector.close()
        if hasattr(self, "socket"):
            self.socket.close()
