"""`%%ranks`: a notebook cell that runs on ranks that stay.

%%ranks                     on every rank of the world that was made last
%%ranks 0,2                 on some; also 0-2
%%ranks other 1             on rank 1 of the world called `other`
%%ranks timeout=60          with another time limit, in seconds
%%ranks check=False         shows a failure without stopping the notebook
"""

from __future__ import annotations

import re
import sys
from typing import Any

from course_lib.failures import JobError, JobInterrupted
from course_lib.session import Ranks, latest

USAGE = (
    "%%ranks takes ranks (%%ranks 0,2 or 0-2), the name of a world (%%ranks world), timeout=SECONDS and "
    "check=False"
)
NO_WORLD = "there are no ranks yet: make some first, in a cell of its own, with  world = Ranks(nproc=4)"


def register() -> None:
    """Make `%%ranks` known, in a notebook or in IPython; does nothing elsewhere."""
    shell = _shell()
    if shell is not None and shell.find_cell_magic("ranks") is not ranks:
        shell.register_magic_function(ranks, "cell", "ranks")


def ranks(line: str, cell: str) -> Any:
    """Run this cell on ranks that stay; each keeps its variables. See `course_lib.magic`."""
    shell = _shell()
    world, chosen, options = _parse(line, shell.user_ns)
    # The magic's own line counts, so that line numbers are those that the reader sees.
    source = "\n" + cell
    number = len(shell.user_ns.get("In", " ")) - 1
    file = shell.compile.cache(source, number=number, raw_code=source)
    try:
        run = world.run(source, chosen, file=file, **options)
    except (JobError, JobInterrupted) as error:
        told, error.run.failure = error.run.failure, None
        if not error.run.silent:  # type: ignore[attr-defined]
            from IPython.display import display

            display(error.run)
        error.run.failure = told
        raise
    return None if run.silent else run


def _parse(line: str, names: dict[str, Any]) -> tuple[Ranks, list[int] | None, dict[str, Any]]:
    """The world, the ranks and the options that the magic's line asks for."""
    from IPython.core.error import UsageError

    world: Ranks | None = None
    chosen: list[int] | None = None
    options: dict[str, Any] = {}
    for word in re.sub(r"\s*,\s*", ",", line).split():
        if re.fullmatch(r"\d+(-\d+)?(,\d+(-\d+)?)*", word):
            chosen = [*(chosen or [])]
            for part in word.split(","):
                first, _, last = part.partition("-")
                chosen += range(int(first), int(last or first) + 1)
        elif re.fullmatch(r"timeout=\d+(\.\d+)?", word):
            options["timeout"] = float(word.partition("=")[2])
        elif word in ("check=False", "check=True"):
            options["check"] = word == "check=True"
        elif isinstance(names.get(word), Ranks):
            world = names[word]
        else:
            raise UsageError(f"{word!r} is not known: {USAGE}")
    world = world or latest()
    if world is None:
        raise UsageError(NO_WORLD)
    return world, chosen, options


def _shell() -> Any:
    if "IPython" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()
