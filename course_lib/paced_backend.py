"""The torch.distributed backend "paced" in this process: `register` it, and `report` what it did.

`init_process_group("paced")` and `new_group` then make a `PacedGroup` each.
"""

from __future__ import annotations

import atexit
import math
import sys
from typing import Any

import torch.distributed as dist

from course_lib import clock, spans
from course_lib.board import Board
from course_lib.link import Link
from course_lib.paced_group import BACKEND, PacedGroup, live
from course_lib.paced_rank import PacedRank

SWITCH_SECONDS = 0.0005

_shared = PacedRank()


def register(
    bytes_per_second: float = math.inf, latency: float = 0.0, record_spans: bool | None = None
) -> None:
    """Make the backend known in this process, with a link of that bandwidth and latency (seconds).

    record_spans: whether each transfer is recorded as a span; None for where the link holds back. Groups
    that were made before keep the link they have.
    """
    global _shared
    link = Link(bytes_per_second, latency)
    _shared = PacedRank(link, record_spans=link.holds_back if record_spans is None else record_spans)
    clock.reset()
    spans.set_links_record_themselves(_shared.record_spans)
    # Compute and transfers belong on one timeline, and transfers are timed in threads' logical time.
    spans.set_time_source(_logical_time)
    if link.holds_back:
        # Threads hand over to each other at every transfer; the default of 5 ms would be seen.
        sys.setswitchinterval(SWITCH_SECONDS)
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _make_group, extended_api=True, devices=["cpu"])
        atexit.register(_close_all)


def _logical_time(waited: bool) -> float:
    thread = clock.current()
    if waited:
        thread.pay()
    return thread.now()


def report() -> dict[str, Any]:
    """What this rank has sent and whether the machine kept the pace, as JSON can carry it."""
    return _shared.ledger.report()


def _make_group(made: Any, options: Any) -> PacedGroup:
    """What torch.distributed calls to make a group; `made` has the store, the ranks and the time limit."""
    if options is not None:
        raise ValueError(f"the paced backend takes no pg_options, got {options!r}")
    ranks = list(made.global_ranks_in_group)
    if not ranks:
        ranks = list(range(made.group_size))
        _shared.rank = made.group_rank
        _shared.board = Board.from_environment(made.group_size, made.group_rank)
    return PacedGroup(made.store, made.group_rank, ranks, made.timeout, made.group_id, _shared)


def _close_all() -> None:
    """End the threads of groups that nobody destroyed, since a thread inside gloo must not outlive Python."""
    for group in list(live):
        group.close(patience=0.5)
