"""Memory of 8 idle ranks: ours, forked from one server, against torchrun's 8 separate processes.

The measure is the proportional set size (PSS): a page that k processes share counts 1/k for each.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

NPROC = 8
SCRIPT = """
import time, torch, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
time.sleep(60)
"""
OURS = """
import time
from course_lib import launch
launch(time.sleep, {nproc}, args=(60,), timeout=120, progress=False)
"""


def summed_pss(process: psutil.Process, ranks: int) -> float:
    """MB of PSS over the `ranks` leaf processes below `process`, waiting until they are there and idle."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        leaves = [p for p in process.children(recursive=True) if not p.children()]
        if len(leaves) == ranks and all(p.num_threads() > 3 for p in leaves):
            time.sleep(2)
            return sum(p.memory_full_info().pss for p in leaves) / 1e6
        time.sleep(0.2)
    raise TimeoutError(f"{ranks} ranks did not come up")


def measure(command: list[str]) -> float:
    """MB of PSS of the ranks that `command` starts."""
    parent = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    process = psutil.Process(parent.pid)
    try:
        return summed_pss(process, NPROC)
    finally:
        below = process.children(recursive=True)
        parent.kill()
        parent.wait()
        psutil.wait_procs(below, timeout=3)
        for child in below:
            if child.is_running():
                child.kill()


def run(build: Path) -> None:
    """Measure and print."""
    script = build / "idle.py"
    script.write_text(SCRIPT)
    ours = measure([sys.executable, "-c", OURS.replace("{nproc}", str(NPROC))])
    torchrun = measure(
        [
            *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NPROC}"),
            *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
            str(script),
        ]
    )
    print(f"Memory of {NPROC} idle ranks (MB of proportional set size, summed):")
    print(f"  ours      {ours:8.0f}\n  torchrun  {torchrun:8.0f}")
    print(f"  {'holds' if ours <= 0.4 * torchrun else 'DOES NOT HOLD'}: at most 40 % of torchrun's")
