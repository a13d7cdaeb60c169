"""`make bench`: every figure that the project states about its own speed, measured on this machine.

python tests/benchmarks/run.py [launch|memory|probe|figures|pace|session|ring ...]
"""

from __future__ import annotations

import importlib
import platform
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from course_lib.machine import inspect

BENCHMARKS = ("launch", "memory", "probe", "figures", "pace", "session", "ring")
BUILD = Path(__file__).parents[2] / "build"


def main(names: list[str]) -> None:
    """Run the benchmarks named, or all."""
    unknown = set(names) - set(BENCHMARKS)
    if unknown:
        sys.exit(f"unknown benchmark {', '.join(sorted(unknown))}; there are {', '.join(BENCHMARKS)}")
    BUILD.mkdir(exist_ok=True)
    found = inspect()
    print(f"{found.cores} cores, {platform.machine()}, Python {found.python}, torch {found.torch}\n")
    for name in names or BENCHMARKS:
        importlib.import_module(f"bench_{name}").run(BUILD)
        print()


if __name__ == "__main__":
    main(sys.argv[1:])
