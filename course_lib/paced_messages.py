"""Paced send and recv: each message follows a header that says when it started on its sender's egress.

Both are posted to gloo in the caller's thread at once, under two tags of their own; the wait happens in the
caller's thread too. gloo itself carries a message only once its receiver has asked for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist

from course_lib import clock, spans
from course_lib.paced_rank import PacedRank, total_bytes
from course_lib.paced_work import MessageWork

LARGEST_TAG = 2**30 - 1


class Messages:
    """The messages of one group.

    gloo: the group that carries them. ranks: the job's rank of each of the group's ranks.
    """

    def __init__(self, gloo: dist.ProcessGroup, shared: PacedRank, rank: int, ranks: list[int]) -> None:
        self._gloo, self._shared, self._rank, self._ranks = gloo, shared, rank, ranks
        self._undecided: dict[int, list[Callable[[], None]]] = {}

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> dist.Work:
        """Send a tensor; done when it has left this rank's egress and gloo has handed it over."""
        first, size = _first_tag(tag), total_bytes(tensors)
        self._shared.ledger.count("send", size, 1, size, 0)
        if not self._shared.link.holds_back:
            return self._gloo.send(tensors, destination, tag)
        start, due = self._shared.link.send(clock.current().now(), size)
        header = torch.tensor([start, time.monotonic()], dtype=torch.float64)
        head = self._gloo.send([header], destination, first)
        body = self._gloo.send(tensors, destination, first + 1)
        detail = spans.current_label() or f"to {self._ranks[destination]}"
        self._shared.record("send", start, due, size, detail, spans.current_step())

        # gloo keeps no reference to the header; the default argument does until it is sent.
        def finish(timeout: timedelta | None, _header: torch.Tensor = header) -> tuple[float, int]:
            _wait(head, timeout)
            _wait(body, timeout)
            return due, self._rank

        return MessageWork(tensors, finish)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        """Receive a tensor; done when it has come through this rank's ingress."""
        first = _first_tag(tag)
        self._shared.ledger.count("recv", 0, 0, 0, total_bytes(tensors))
        if not self._shared.link.holds_back:
            return self._gloo.recv(tensors, source, tag)
        header = torch.empty(2, dtype=torch.float64)
        head = self._gloo.recv([header], source, first)
        body = self._gloo.recv(tensors, source, first + 1)

        def finish(timeout: timedelta | None) -> tuple[float, int]:
            asked = time.monotonic()
            _wait(head, timeout)
            _wait(body, timeout)
            return self._arrived(header, tensors, source, asked), source

        return MessageWork(tensors, finish)

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> dist.Work:
        """Receive a tensor from whichever rank sends one with this tag."""
        first = _first_tag(tag)
        self._shared.ledger.count("recv", 0, 0, 0, total_bytes(tensors))
        if not self._shared.link.holds_back:
            return self._gloo.recv_anysource(tensors, tag)
        header = torch.empty(2, dtype=torch.float64)
        head = self._gloo.recv_anysource([header], first)
        undecided = self._undecided.setdefault(tag, [])
        found: list[tuple[dist.Work, int]] = []

        def decide() -> None:
            head.wait()
            source = head._source_rank()
            found.append((self._gloo.recv(tensors, source, first + 1), source))

        undecided.append(decide)

        def finish(timeout: timedelta | None) -> tuple[float, int]:
            asked = time.monotonic()
            # Two messages of one sender must go to the receives that took their headers, whichever of these
            # is waited for first; so the bodies are asked for in the order of the headers.
            while not found:
                undecided.pop(0)()
            body, source = found[0]
            _wait(body, timeout)
            return self._arrived(header, tensors, source, asked), source

        return MessageWork(tensors, finish)

    def _arrived(self, header: torch.Tensor, tensors: list[torch.Tensor], source: int, asked: float) -> float:
        """Take an arrived message in on the ingress: when it is due."""
        done, size = time.monotonic(), total_bytes(tensors)
        sent, really_sent = header.tolist()
        start, due = self._shared.link.receive(sent, size)
        self._shared.ledger.note_pace(due - sent, done - max(due, asked, really_sent + due - sent))
        detail = spans.current_label() or f"from {self._ranks[source]}"
        self._shared.record("recv", start, due, size, detail, spans.current_step())
        return due


def _first_tag(tag: int) -> int:
    """The tag under which gloo carries a message's header; the next one is the message's."""
    if not 0 <= tag <= LARGEST_TAG:
        raise ValueError(f"tag is {tag}; the paced backend takes 0 to {LARGEST_TAG}")
    return 2 * tag


def _wait(work: dist.Work, timeout: timedelta | None) -> None:
    """Wait for a gloo operation, for `timeout` or for as long as its group does."""
    if timeout is not None and timeout > timedelta(0):
        work.wait(timeout)
    else:
        work.wait()
