"""A rank that stays: it runs one cell after another, and keeps its variables in between.

`serve` is the function that such a rank runs. It takes the launcher's orders over the rank's own line (see
`wire`): run a cell, say what an expression is worth, take values, leave the process group or join it anew,
end. Before the first cell the namespace holds `torch`, `dist`, `rank` and `world_size`.
"""

from __future__ import annotations

import ast
import contextlib
import json
import linecache
import os
import pprint
import signal
import socket
import sys
import time
import types
from typing import Any

from course_lib import clock, pace, results, spans, travel, wire
from course_lib import rank as this_rank

SHOWN_CHARACTERS = 20_000
SHOWN_WIDTH = 60
# What a collective is not: these concern two ranks, and may differ in number from rank to rank.
POINT_TO_POINT = ("send", "recv")


def serve() -> None:
    """Take orders until the last one, or until the launcher is gone."""
    assert this_rank.line is not None
    session = Session(this_rank.line)
    while (order := this_rank.line.receive()) is not None and order[0] != wire.END:
        session.obey(*order)


def values(**named: Any) -> dict[str, Any]:
    """What travels to the ranks when the notebook sends them values."""
    return named


class Session:
    """The variables of one rank, and what is done with them."""

    def __init__(self, sender: wire.Sender) -> None:
        import torch
        import torch.distributed as dist

        self._sender = sender
        self._busy = False
        self._backend: str | None = None
        self._store: Any = None
        self._store_port = os.environ["MASTER_PORT"]
        # A module of its own, which takes the place of the program's: classes are looked up there.
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self.names = vars(module)
        self.names.update(
            torch=torch, dist=dist, rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
        )

    def obey(self, kind: bytes, body: bytes) -> None:
        """Carry out one order, and answer it with a result or an error."""
        orders = {wire.RUN: self._run, wire.SAY: self._say, wire.TAKE: self._take}
        orders |= {wire.LEAVE: self._leave, wire.REGROUP: self._regroup}
        signal.signal(signal.SIGINT, self._interrupt)
        failure: dict | None = None
        answer = b""
        before = _counts()
        try:
            try:
                self._busy = True
                answer = orders[kind](body)
            finally:
                self._busy = False
        except BaseException as error:
            failure = this_rank.describe(error, "running")
            if isinstance(error, results.CannotReturn):
                failure |= {"text": str(error), "frames": [], "causes": []}
        if kind == wire.LEAVE and not body:
            return  # Asked while others still wait: the launcher listens to those.
        this_rank.flush()
        self._sender.send_json(wire.BEAT, {"spans": [span.to_row() for span in spans.drain()]})
        counts = {**_since(before, _counts()), "paced_compute": clock.anything_paced()}
        self._sender.send_json(wire.REPORT, counts)
        if failure is not None:
            self._sender.send_json(wire.ERROR, failure)
        else:
            self._sender.send(wire.RESULT, answer)

    def _interrupt(self, *_: Any) -> None:
        """An interrupt ends the cell that runs; one that comes too late does nothing."""
        if self._busy:
            self._busy = False
            raise KeyboardInterrupt

    def _run(self, body: bytes) -> bytes:
        """Run a cell; the answer is its last expression, as text."""
        cell = json.loads(body)
        source, file = cell["source"], cell["file"]
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        tree = ast.parse(source, file)
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr) and not source.rstrip().endswith(";"):
            last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, file, "exec", dont_inherit=True), self.names)
        if last is None:
            return b""
        value = eval(compile(last, file, "eval", dont_inherit=True), self.names)
        return b"" if value is None else _as_text(value).encode(errors="backslashreplace")

    def _say(self, body: bytes) -> bytes:
        expression = body.decode()
        code = compile(expression.strip(), "<asked for>", "eval", dont_inherit=True)
        return results.pack(eval(code, self.names), expression)

    def _take(self, body: bytes) -> bytes:
        function, args, kwargs = travel.unpack_call(body)
        self.names.update(function(*args, **kwargs))
        return b""

    def _leave(self, body: bytes) -> bytes:
        """Close this rank's connections, so that no other rank waits for it any longer."""
        self._backend, self._store = _leave_group(self._store_port) or (self._backend, self._store)
        return b""

    def _regroup(self, body: bytes) -> bytes:
        """Join a new process group; `body` names its place in the store, the same on every rank."""
        import torch
        import torch.distributed as dist

        self._leave(b"")
        device = torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else None
        dist.init_process_group(
            self._backend,
            store=dist.PrefixStore(body.decode(), self._store),
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
            device_id=device,
        )
        return b""


def _leave_group(store_port: str) -> tuple[str, Any] | None:
    """Destroy the process group; return its backend and its store, or None where there is none."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return None
    kept = dist.get_backend(), dist.distributed_c10d._get_default_store()
    _hang_up(int(store_port))
    dist.destroy_process_group()
    return kept


def _hang_up(store_port: int) -> None:
    """Close this rank's connections to other ranks, as its end would.

    Destroying the group does not, as long as a variable of the learner's (a DDP model) holds it; nor does
    gloo's abort.
    """
    import psutil

    for connection in psutil.Process().net_connections("tcp"):
        ends = [end for end in (connection.laddr, connection.raddr) if end]
        if len(ends) == 2 and all(_is_loopback(end.ip) and end.port != store_port for end in ends):
            with contextlib.suppress(OSError):
                with socket.socket(fileno=os.dup(connection.fd)) as end:
                    end.shutdown(socket.SHUT_RDWR)


def _is_loopback(address: str) -> bool:
    return address.removeprefix("::ffff:").startswith("127.") or address == "::1"


def _as_text(value: Any) -> str:
    """A value as a cell shows it."""
    text = pprint.pformat(value, width=SHOWN_WIDTH, sort_dicts=False)
    return text if len(text) <= SHOWN_CHARACTERS else text[:SHOWN_CHARACTERS] + " …"


def _counts() -> dict[str, Any]:
    """What this rank has done so far: collective calls, and on a paced link what it sent."""
    report = pace.report() if pace.installed() else {}
    if report:
        calls = {name: row["calls"] for name, row in report["traffic"].items() if name not in POINT_TO_POINT}
        return {"time": time.monotonic(), "collectives": sum(calls.values()), **report}
    dist = sys.modules.get("torch.distributed")
    count = None
    if dist is not None and dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            count = dist.group.WORLD._get_sequence_number_for_group()
    return {"time": time.monotonic(), "collectives": count}


def _since(before: Any, now: Any) -> Any:
    """What was added to the counts: numbers are subtracted, whatever they are nested in."""
    if isinstance(now, dict):
        earlier = before if isinstance(before, dict) else {}
        # The worst there was cannot be subtracted: it stands as it is.
        return {
            key: value if key.startswith("worst") else _since(earlier.get(key, 0), value)
            for key, value in now.items()
        }
    if isinstance(now, (int, float)) and isinstance(before, (int, float)):
        return now - before
    return now
