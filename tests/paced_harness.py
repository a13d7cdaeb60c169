"""Runs a function in real ranks on the paced backend, without the launcher, and returns what each returned.

Ranks are forked from a fresh server that has imported torch and done nothing else, so that a job of 8 takes
a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from course_lib.board import FD_VARIABLE, board_bytes
from course_lib.pace import Pace

_context = multiprocessing.get_context("forkserver")
# Optimizers, DDP and sharding import much of torch when first used, in every rank if not here.
_context.set_forkserver_preload(
    [
        "torch",
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.optim",
        "torch.nn.parallel.distributed",
        "course_lib.paced_backend",
        "pytest",
    ]
)


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


def run_ranks(
    function: Callable[..., Any],
    nproc: int,
    *args: Any,
    pace: Pace | None,
    board: bool = True,
    limit: float = 60.0,
    reports: bool = False,
) -> list[Any]:
    """Call `function(*args)` in `nproc` ranks of a job that is paced (or plain gloo, where `pace` is None).

    board: whether the ranks have the shared board. reports: return (result, report) for each rank.
    """
    with tempfile.TemporaryDirectory() as folder:
        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        # Kept until the ranks are gone: they meet through it. It listens on loopback only.
        store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        if board:
            with open(Path(folder, "board"), "wb") as file:
                file.truncate(board_bytes(nproc))
        ranks = []
        for rank in range(nproc):
            ours, theirs = _context.Pipe()
            job = (function, args, rank, nproc, folder, port, pace, theirs)
            process = _context.Process(target=_rank_main, args=job, daemon=True)
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _collect(ranks, time.monotonic() + limit, reports)
        finally:
            for process, ours in ranks:
                process.join(3.0)
                if process.is_alive():
                    process.kill()
                    process.join()
                ours.close()
            del store


def _collect(ranks: list[Any], until: float, reports: bool) -> list[Any]:
    answers = []
    for rank, (_, ours) in enumerate(ranks):
        try:
            kind, value, report = (
                pickle.loads(ours.recv_bytes())
                if ours.poll(max(0.0, until - time.monotonic()))
                else ("late", "no answer", None)
            )
        except EOFError:
            kind, value, report = "gone", "ended without an answer", None
        if kind != "result":
            raise RankFailed(f"rank {rank}: {value}")
        answers.append((value, report) if reports else value)
    return answers


def _rank_main(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    rank: int,
    nproc: int,
    folder: str,
    port: int,
    pace: Pace | None,
    answer: Any,
) -> None:
    import torch
    import torch.distributed as dist

    from course_lib import pace as pace_module

    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo0" if sys.platform == "darwin" else "lo"
        torch.set_num_threads(1)
        path = Path(folder, "board")
        if path.exists():
            os.environ[FD_VARIABLE] = str(os.open(path, os.O_RDWR))
        if pace is not None:
            pace_module.install(pace)
        dist.init_process_group(
            "gloo" if pace is None else "paced",
            store=dist.TCPStore("127.0.0.1", port, is_master=False),
            rank=rank,
            world_size=nproc,
            timeout=timedelta(seconds=30),
        )
        value = function(*args)
        report = None if pace is None else pace_module.report()
        dist.destroy_process_group()
        # Plain pickle: torch's own way of sending tensors needs the sender to live on.
        answer.send_bytes(pickle.dumps(("result", value, report)))
    except BaseException:
        answer.send_bytes(pickle.dumps(("error", traceback.format_exc(), None)))
