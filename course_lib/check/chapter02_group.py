"""Exercise 2.1: make the process group, use it, and clean up whatever happens."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.check.lab import Lab, Outcome
from course_lib.check.registry import Hint, exercise

SECONDS = 7


class OnPurpose(Exception):
    """What the work raises where the check wants it to."""


def _picture() -> str:
    """The life of a process group, as SVG."""
    boxes = (
        (10, "#0072B2", "init_process_group"),
        (170, "#009E73", "work()"),
        (330, "#0072B2", "destroy_process_group"),
    )
    parts = []
    for left, colour, name in boxes:
        parts.append(f"<rect x='{left}' y='30' width='150' height='30' fill='{colour}'/>")
        parts.append(f"<text x='{left + 75}' y='50' text-anchor='middle' fill='white'>{name}</text>")
    parts.append("<text x='10' y='18'>every rank</text>")
    parts.append(
        "<path d='M245 62 v22 h160 v-18' fill='none' stroke='#D55E00' stroke-width='2'/>"
        "<path d='M401 68 h8 l-4 -7 z' fill='#D55E00'/>"
        "<text x='250' y='102' fill='#D55E00'>also when work() raises; the error goes on to the caller</text>"
    )
    return (
        "<svg viewBox='0 0 620 112' width='620' height='112' font-family='sans-serif' font-size='12'>"
        "<title>Every rank joins, works, and leaves, also after an error</title>" + "".join(parts) + "</svg>"
    )


@exercise(
    "2.1",
    "Set up and clean up",
    hints=(
        Hint(
            "There is no group, or not the one that is asked for",
            "`dist.init_process_group()` finds rank, world size and address in the environment: give it none "
            "of them. It takes the time limit as `timeout=timedelta(seconds=seconds)`.",
            fits=(
                "no process group",
                "another time limit",
                "deadlock",
                "another world",
                "the environment changed",
            ),
        ),
        Hint(
            "It is left behind, or an error is lost",
            "What stands in a `finally:` is run in any case, and lets an error pass on. All ranks have to "
            "leave: no `if rank == 0`.",
            fits=(
                "not cleaned up",
                "only rank 0 cleans up",
                "not cleaned up after an error",
                "the error is swallowed",
                "the result is lost",
            ),
        ),
        Hint("What it should look like", "The life of a group, on every rank.", picture=_picture),
    ),
)
def judge_in_group(lab: Lab, in_group: Callable) -> None:
    """A group of all ranks with its time limit; gone afterwards, also after an error; and a second one."""
    for nproc in (3, 2, 4):
        outcome = lab.call(in_group, (1, False), nproc, via=lives, backend=None, tried="once")
        _judge_life(lab, outcome, nproc, 0)
    lab.note(f"2, 3 and 4 ranks: a group with a limit of {SECONDS} s, and nothing left of it")
    outcome = lab.call(in_group, (1, True), 3, via=lives, backend=None, tried="with work that raises")
    _judge_error(lab, outcome)
    lab.note("work that raises: the error comes through, and the group is gone")
    outcome = lab.call(in_group, (3, False), 2, via=lives, backend=None, tried="three times in a row")
    for number in range(3):
        _judge_life(lab, outcome, 2, number)
    lab.note("three times in a row")


def lives(in_group: Callable, times: int, fails: bool) -> list[dict[str, Any]]:
    """In a rank without a group: what there is during and after each call of the answer."""
    return [_life(in_group, fails) for _ in range(times)]


def _life(in_group: Callable, fails: bool) -> dict[str, Any]:
    seen: dict[str, Any] = {"calls": 0, "group": False, "raised": False, "value": None}
    environment = dict(os.environ)

    def work() -> float | None:
        seen["calls"] += 1
        seen["group"] = dist.is_initialized()
        if not seen["group"]:
            return None
        seen["ranks"], seen["seconds"] = dist.get_world_size(), _time_limit()
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        # Nobody leaves before all have what they came for.
        dist.barrier()
        if fails:
            raise OnPurpose("raised by the check, on purpose")
        return total.item()

    try:
        seen["value"] = in_group(work, SECONDS)
    except OnPurpose:
        seen["raised"] = True
    seen["left"] = dist.is_initialized()
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    seen["changed"] = [name for name in names if os.environ.get(name) != environment.get(name)]
    return seen


def _time_limit() -> float | None:
    """The time limit of the process group, in seconds; None where it cannot be told."""
    try:
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
        return backend.options._timeout.total_seconds()
    except (AttributeError, RuntimeError):
        return None


def _judge_work(lab: Lab, outcome: Outcome, nproc: int, number: int) -> None:
    """What the work found."""
    for rank, result in enumerate(outcome.results):
        seen = result[number]
        lab.require(
            seen["calls"] == 1,
            "the work is not done" if not seen["calls"] else "the work is done twice",
            "`work()` is to be called once, on every rank.",
            expected="1 call",
            got=f"{seen['calls']} calls",
            rank=rank,
        )
        lab.require(
            seen["group"],
            "no process group",
            "When `work()` ran, there was no process group: `dist.is_initialized()` was False.",
            rank=rank,
        )
        lab.require(
            seen["ranks"] == nproc,
            "another world",
            "The group has not all ranks. The environment knows how many there are: leave it to that.",
            expected=f"{nproc} ranks",
            got=f"{seen['ranks']}",
            rank=rank,
        )
        lab.require(
            seen["seconds"] in (None, float(SECONDS)),
            "another time limit",
            "The group's time limit is not the one that was asked for. The default is half an hour, which is "
            "how long a mistake then hangs.",
            expected=f"{SECONDS} s",
            got=f"{seen['seconds']} s",
            rank=rank,
        )
        lab.require(
            not seen["changed"],
            "the environment changed",
            "The address of the rendezvous is given. A fixed port is the one that somebody else already has.",
            got=f"other values in {', '.join(seen['changed'])}",
            rank=rank,
        )


def _judge_life(lab: Lab, outcome: Outcome, nproc: int, number: int) -> None:
    _judge_work(lab, outcome, nproc, number)
    expected = nproc * (nproc + 1) / 2
    for rank, result in enumerate(outcome.results):
        got = result[number]["value"]
        lab.require(
            isinstance(got, float) and got == expected,
            "the result is lost" if got is None else "another result",
            "What `work()` returned is to be returned.",
            expected=f"{expected}",
            got=f"{got!r}",
            rank=rank,
        )
    _judge_left(lab, outcome, number, "not cleaned up", "")


def _judge_left(lab: Lab, outcome: Outcome, number: int, diagnosis: str, when: str) -> None:
    """Whether the group is gone, on all ranks."""
    left = [rank for rank, result in enumerate(outcome.results) if result[number]["left"]]
    if left and 0 not in left:
        diagnosis = "only rank 0 cleans up"
    lab.require(
        not left,
        diagnosis,
        f"The process group is still there{when}. Every rank has to call `dist.destroy_process_group()`.",
        expected="no process group afterwards",
        got=f"one on ranks {', '.join(map(str, left))}",
        rank=left[0] if left else None,
    )


def _judge_error(lab: Lab, outcome: Outcome) -> None:
    _judge_work(lab, outcome, 3, 0)
    for rank, result in enumerate(outcome.results):
        lab.require(
            result[0]["raised"],
            "the error is swallowed",
            "`work()` raised an error, and the caller never heard of it. Clean up, and let it pass on.",
            expected="the error of `work()`",
            got=f"returned {result[0]['value']!r}",
            rank=rank,
        )
    _judge_left(lab, outcome, 0, "not cleaned up after an error", " after `work()` raised an error")
