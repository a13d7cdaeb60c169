"""What the launching process knows of one rank: its stage, output, result, failure and where it stands."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field

from course_lib import stacks, wire
from course_lib.failures import RankFailure, exit_failure, signal_failure
from course_lib.logs import Log
from course_lib.spans import Span, from_rows

STAGES = ["starting", "importing", "rendezvous", "running", "finished", "teardown"]


@dataclass
class RankState:
    """What is known of one rank."""

    rank: int
    log: Log = field(default_factory=Log)
    receiver: wire.Receiver = field(default_factory=wire.Receiver)
    dump: bytearray = field(default_factory=bytearray)
    stage: str = "starting"
    result: bytes | None = None
    failure: RankFailure | None = None
    pace_report: dict | None = None
    exited: bool = False
    step: int | None = None

    @property
    def reported(self) -> bool:
        """Whether the rank has said how its call ended, or can say nothing any more."""
        return self.result is not None or self.failure is not None

    @property
    def standing(self) -> stacks.Standing | None:
        """Where the rank stood when its stack was last asked for."""
        return stacks.parse(self.dump.decode(errors="replace"))

    def start_over(self) -> None:
        """Forget how the last call ended: the rank is given another."""
        self.log = Log()
        self.dump.clear()
        self.result = self.failure = self.pace_report = self.step = None

    def hear(self, data: bytes) -> list[Span]:
        """Take what came over the rank's channel; return the spans that were in it."""
        spans: list[Span] = []
        for kind, body in self.receiver.feed(data):
            if kind == wire.RESULT:
                self.result = body
                continue
            message = json.loads(body)
            if kind == wire.STAGE:
                self.stage = message["stage"]
            elif kind == wire.REPORT:
                self.pace_report = message
            elif kind == wire.ERROR:
                self._fail(message)
            elif kind == wire.BEAT:
                spans += from_rows(message["spans"])
        steps = [span.step for span in spans if span.step is not None]
        self.step = max(steps, default=self.step)
        return spans

    def _fail(self, message: dict) -> None:
        how = "result" if message["stage"] == "result" else "exception"
        if message["type"] == "SystemExit":
            how = "exit"
            message["text"] = f"called sys.exit ({message['text']}) before the function returned"
        self.failure = RankFailure(self.rank, how, **message)

    def end(self, status: int, stopped_by_us: bool) -> None:
        """Take note that the process ended, with this status of `os.waitpid`."""
        self.exited = True
        if self.reported or stopped_by_us:
            return
        now = time.monotonic()
        if os.WIFSIGNALED(status):
            standing = self.standing
            frames = [[f, n, name, ""] for f, n, name in reversed(standing.frames)] if standing else []
            self.failure = signal_failure(self.rank, os.WTERMSIG(status), now, frames)
        else:
            self.failure = exit_failure(self.rank, os.waitstatus_to_exitcode(status), self.stage, now)
