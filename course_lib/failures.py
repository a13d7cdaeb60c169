"""What went wrong in a job, and how to say it: the cause first, then one line for each other rank."""

from __future__ import annotations

import linecache
import re
import signal
import sys
import sysconfig
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from course_lib.run import Run

MAX_MESSAGE = 4000
MAX_FRAMES = 40
LINE_CHARACTERS = 120
WRAP_CHARACTERS = 84
LIBRARY = str(Path(__file__).parent)
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"]

# What a rank reports when another one went away first. Never the cause (YOLOX#702, pytorch#60910).
SECONDARY = re.compile(
    r"connection closed by peer|connection reset by peer|broken pipe|connection refused"
    r"|application timeout caused pair closure|remote process exited|peer .*closed|socket .*closed"
    r"|failed to recv, got 0 bytes|sendbytes failed|recvvalue failed|read error|write error",
    re.IGNORECASE,
)
TIMED_OUT = re.compile(r"timed out|timeout|wait timeout", re.IGNORECASE)

SIGNAL_HINTS = {
    signal.SIGKILL: "killed from outside: often the system ran out of memory",
    signal.SIGSEGV: "a crash in compiled code",
    signal.SIGABRT: "compiled code gave up: its last message is in the rank's log",
    signal.SIGBUS: "often /dev/shm is full",
    signal.SIGTERM: "asked to end from outside",
}


@dataclass
class RankFailure:
    """What happened to one rank.

    kind: "exception", "exit" (left without returning), "signal", "result" (could not be sent back).
    frames: [file, line number, function, source line], outermost first.
    """

    rank: int
    kind: str
    type: str
    text: str
    stage: str
    time: float
    frames: list[list] = field(default_factory=list)
    causes: list[dict] = field(default_factory=list)
    status: int = 0

    @property
    def secondary(self) -> bool:
        """Whether this only says that another rank went away."""
        return self.kind == "exception" and bool(SECONDARY.search(self.text))

    @property
    def timed_out(self) -> bool:
        """Whether this rank gave up waiting for another."""
        return (
            self.kind == "exception"
            and self.type in ("RuntimeError", "DistBackendError", "DistStoreError", "DistNetworkError")
            and bool(TIMED_OUT.search(self.text))
        )


class JobError(RuntimeError):
    """A job that did not end well. `run` holds what was obtained before it failed."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run

    def _render_traceback_(self) -> list[str]:
        """What IPython shows: the job's own story, without the launcher's frames."""
        return [f"{type(self).__name__}: {self}"]


class RankError(JobError):
    """A rank failed. The message shows the first primary failure."""


class JobTimeout(JobError):
    """A job did not end in time. The message shows where each rank stood."""


class JobInterrupted(KeyboardInterrupt):
    """You stopped the job. `run` holds the spans and logs that it had produced."""

    def __init__(self, message: str, run: Run) -> None:
        super().__init__(message)
        self.run = run

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


def signal_failure(rank: int, number: int, time: float, frames: list[list]) -> RankFailure:
    """The failure of a rank that signal `number` ended."""
    try:
        name = signal.Signals(number).name
        hint = SIGNAL_HINTS.get(signal.Signals(number), "")
    except ValueError:
        name, hint = f"signal {number}", ""
    text = f"ended by {name}" + (f" ({hint})" if hint else "")
    return RankFailure(rank, "signal", name, text, "running", time, frames, status=-number)


def exit_failure(rank: int, status: int, stage: str, time: float) -> RankFailure:
    """The failure of a rank whose process ended before the function returned."""
    text = f"its process ended with exit status {status} before the function returned"
    return RankFailure(rank, "exit", "exit", text, stage, time, status=status)


def primary(failures: list[RankFailure]) -> RankFailure:
    """The failure to show: the earliest that does not merely report that another rank went away."""
    # Ranks that fail alike do so within an instant of each other: show the lowest.
    first = {failure.text: failure.time for failure in sorted(failures, key=lambda f: -f.time)}
    ordered = sorted(failures, key=lambda f: (first[f.text], f.rank))
    for wanted in (
        lambda f: not f.secondary and not f.timed_out,
        lambda f: not f.secondary,
        lambda f: True,
    ):
        for failure in ordered:
            if wanted(failure):
                return failure
    raise ValueError("no failure given")


def is_learners(filename: str) -> bool:
    """Whether a stack frame in `filename` is the learner's own code."""
    if filename.startswith(("<frozen", "<string>")) or filename.startswith(LIBRARY):
        return False
    return "site-packages" not in filename and not filename.startswith(STANDARD_LIBRARY)


def place(filename: str, line: int) -> str:
    """Where a line is, as a learner knows it: "cell In[3], line 5"."""
    ipython: Any = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    compiler = getattr(ipython, "compile", None)
    format_name = getattr(compiler, "format_code_name", None)
    name = format_name(filename) if format_name else None
    if name:
        return f"{' '.join(name).lower().replace('in[', 'In[')}, line {line}"
    if "ipykernel_" in filename:
        return f"a notebook cell, line {line}"
    return f"{filename}, line {line}"


def source_line(filename: str, line: int, known: str = "") -> str:
    """The text of a source line; the kernel knows its cells even where a rank did not."""
    text = (known or linecache.getline(filename, line)).strip()
    return text if len(text) <= LINE_CHARACTERS else text[:LINE_CHARACTERS] + " …"


def wrap(text: str) -> str:
    """Prose in lines that fit a notebook cell, which would break longer ones inside a word."""
    return textwrap.fill(text, WRAP_CHARACTERS, break_long_words=False, break_on_hyphens=False)


def shorten(text: str, limit: int = MAX_MESSAGE) -> str:
    """`text`, with its middle left out where it is longer than `limit` characters."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[… {len(text) - 2 * half:,} characters left out …]\n{text[-half:]}"


def format_frames(frames: list[list]) -> list[str]:
    """A traceback's lines: the learner's frames in full, runs of library frames as one line."""
    lines: list[str] = []
    hidden: list[str] = []

    def flush() -> None:
        if hidden:
            lines.append(f"    … in {hidden[-1]}")
            hidden.clear()

    if len(frames) > MAX_FRAMES:
        half = MAX_FRAMES // 2
        left_out = f"[… {len(frames) - MAX_FRAMES} more calls …]"
        return [*format_frames(frames[:half]), left_out, *format_frames(frames[-half:])]
    for filename, number, function, known in frames:
        if is_learners(filename):
            flush()
            lines.append(f"  {place(filename, number)}, in {function}")
            text = source_line(filename, number, known)
            if text:
                lines.append(f"    {text}")
        elif not filename.startswith(LIBRARY):
            short = "/".join(Path(filename).parts[-3:])
            hidden.append(f"{function} ({short}, line {number})")
    flush()
    return lines


def format_failure(failure: RankFailure) -> str:
    """The failure in full: its traceback, outermost call first, then the message."""
    parts = []
    for cause in reversed(failure.causes):
        parts += format_frames(cause["frames"])
        parts += [shorten(cause["text"]), "", "which led to:", ""]
    parts += format_frames(failure.frames)
    parts.append(shorten(failure.text))
    return "\n".join(parts)


def one_line(failure: RankFailure) -> str:
    """The failure in one line, for the ranks that are not the cause."""
    text = failure.text.strip().splitlines()[-1] if failure.kind == "exception" else failure.text
    where = next(
        (f" at {place(f, n)}" for f, n, _, _ in reversed(failure.frames) if is_learners(f)),
        "",
    )
    if failure.secondary:
        return f"lost its connection to another rank{where}"
    return f"{shorten(text, 200)}{where}"
