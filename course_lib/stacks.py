"""Where each rank stands: the stacks that faulthandler wrote, read and told in a learner's words."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from course_lib.failures import is_learners, place, source_line

FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
RANK_FILE = str(Path(__file__).with_name("rank.py"))
COMMUNICATION_FILES = ("torch/distributed/", "course_lib/paced_group.py", "course_lib/link.py")
PLUMBING = {"wrapper", "inner", "_wrapper", "decorate_context"}


@dataclass
class Standing:
    """Where one rank stood. `frames`: (file, line, function), innermost first."""

    frames: list[tuple[str, int, str]]

    @property
    def collective(self) -> str | None:
        """The torch.distributed call that the rank was waiting in, such as "all_reduce"."""
        outermost = None
        for file, number, function in self.frames:
            if is_learners(file):
                # A collective's handle waits in compiled code, which has no Python frame of its own.
                if outermost is None and ".wait(" in source_line(file, number):
                    return "wait"
                break
            if any(part in file for part in COMMUNICATION_FILES) and function not in PLUMBING:
                outermost = function
        return outermost

    @property
    def backward(self) -> bool:
        """Whether the rank was inside a backward pass."""
        return any(function == "backward" and "torch/" in file for file, _, function in self.frames)

    def line(self) -> tuple[str, str]:
        """The learner's innermost line: where it is, and its text."""
        for file, number, _ in self.frames:
            if is_learners(file):
                return place(file, number), source_line(file, number)
        return "", ""

    def __str__(self) -> str:
        where, text = self.line()
        if self.collective:
            doing = f"in {self.collective}"
        elif self.backward:
            doing = "in backward"
        elif self.frames and not is_learners(self.frames[0][0]):
            doing = f"in {self.frames[0][2]}"
        else:
            doing = "running"
        return doing + (f", {where}" if where else "") + (f":  {text}" if text else "")


def parse(dump: str) -> Standing | None:
    """The stack of the thread that runs the learner's function, from one faulthandler dump.

    faulthandler lists all threads; the one wanted is the one that `rank.main` is on.
    """
    found = None
    for block in re.split(r"^(?:Current thread|Thread) 0x.*$", dump, flags=re.MULTILINE):
        frames = []
        for text in block.splitlines():
            match = FRAME.match(text)
            if match:
                frames.append((match["file"], int(match["line"]), match["function"]))
        inside = [i for i, (file, _, name) in enumerate(frames) if file == RANK_FILE and name == "main"]
        if inside:
            found = Standing(frames[: inside[0]])
    return found
