"""What a `%%ranks` cell costs beyond its own work, in IPython, and a step of the collectives' pictures."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

CELLS = """
import json, time
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils import io
shell = InteractiveShell.instance()
shell.run_cell("from course_lib import Ranks")

def timed(cell):
    began = time.perf_counter()
    with io.capture_output():
        done = shell.run_cell(cell)
    done.raise_error()
    return time.perf_counter() - began

figures = {}
for ranks in (2, 4, 8):
    start = timed(f"world = Ranks({ranks})")
    first = timed("%%ranks\\nx = torch.ones(1)\\ndist.all_reduce(x)\\nx")
    later = [timed("%%ranks\\ny = x + 1\\nprint(y)\\ny") for _ in range(50)]
    # The cell's own work is what its slowest rank took.
    shell.run_cell("own = world.last.seconds")
    figures[ranks] = (start, first, [seconds - shell.user_ns["own"] for seconds in later])
    timed("world.close()")
print(json.dumps(figures))
"""


def run(build: Path) -> dict[str, float]:
    """Measure; print one line for each number of ranks; return seconds by name."""
    done = subprocess.run([sys.executable, "-c", CELLS], capture_output=True, text=True, timeout=300)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    measured = json.loads(done.stdout.strip().splitlines()[-1])
    print("A %%ranks cell that prints and shows a tensor, beyond its own work (milliseconds):")
    figures = {}
    for ranks, (start, first, later) in measured.items():
        figures[f"{ranks} ranks"] = statistics.median(later)
        print(
            f"  {ranks} ranks: median {figures[f'{ranks} ranks'] * 1e3:.1f}, worst of {len(later)} "
            f"{max(later) * 1e3:.1f}; the first cell {first * 1e3:.0f}; making the ranks {start:.1f} s"
        )
    holds = all(max(later) < 0.05 for _, _, later in measured.values())
    verdict = "holds" if holds else "DOES NOT HOLD"
    print(f"  {verdict}: a cell after the first takes under 50 ms beyond its own work")
    figures["stepper"] = step_of_the_pictures()
    return figures


def step_of_the_pictures() -> float:
    """Print and return the seconds that the largest picture of the stepper takes, worst of many."""
    from course_lib.collective_picture import CollectiveStepper

    stepper = CollectiveStepper("all_to_all", 8)
    took = []
    for step in [*range(8)] * 10:
        began = time.perf_counter()
        stepper.step.value = step
        took.append(time.perf_counter() - began)
    verdict = "holds" if max(took) < 0.1 else "DOES NOT HOLD"
    print(
        f"A step of the collective stepper, 8 ranks: median {statistics.median(took) * 1e3:.1f} ms, "
        f"worst {max(took) * 1e3:.1f}"
    )
    print(f"  {verdict}: a step takes under 100 ms")
    return max(took)
