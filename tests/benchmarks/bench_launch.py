"""How long a job takes from call to results, ours against its peers, in one run on one machine.

Every job is the same: 4 ranks, one all_reduce of one number. Each peer runs as its users run it.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from peers import peers_python

NPROC = 4
# Host names need not resolve on this machine; ours sets this by itself.
ENVIRONMENT = {**os.environ, "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
SCRIPT = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
ones = torch.ones(1)
dist.all_reduce(ones)
assert ones.item() == dist.get_world_size()
dist.destroy_process_group()
"""
NOTEBOOK_LAUNCHER = """
import contextlib, io, json, time
from accelerate import notebook_launcher

def job():
    # Imported inside: this launcher refuses a kernel in which it finds torch's accelerators in use.
    import torch, torch.distributed as dist
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()

times = []
for repeat in range({repeats}):
    began = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()):
        notebook_launcher(job, num_processes={nproc}, use_port=str(29500 + repeat))
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""
OURS = """
import json, time
import torch, torch.distributed as dist
from course_lib import launch

def job():
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()

times = []
for _ in range({repeats}):
    began = time.perf_counter()
    launch(job, {nproc}, progress=False)
    times.append(time.perf_counter() - began)
print(json.dumps(times))
"""


def timed_in(python: str | Path, code: str, repeats: int) -> list[float]:
    """The seconds that each repetition took, as `code` prints them."""
    filled = code.replace("{repeats}", str(repeats)).replace("{nproc}", str(NPROC))
    done = subprocess.run(
        [str(python), "-c", filled], capture_output=True, text=True, timeout=120, env=ENVIRONMENT
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def torchrun(script: Path, repeats: int) -> list[float]:
    """Seconds of a whole torchrun, on numeric loopback so that no name has to be looked up."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        subprocess.run(
            [
                *(sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={NPROC}"),
                *("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"),
                str(script),
            ],
            check=True,
            capture_output=True,
            timeout=300,
            env=ENVIRONMENT,
        )
        times.append(time.perf_counter() - began)
    return times


def run(build: Path) -> dict[str, float]:
    """Measure; print one line each; return seconds by name."""
    script = build / "all_reduce.py"
    script.write_text(SCRIPT)
    ours = timed_in(sys.executable, OURS, 21)
    figures = {
        "ours, first launch (its server starts)": ours[0],
        "ours, later launches": statistics.median(ours[1:]),
        "torchrun": statistics.median(torchrun(script, 3)),
    }
    figures["accelerate notebook_launcher"] = statistics.median(
        timed_in(peers_python(), NOTEBOOK_LAUNCHER, 10)[1:]
    )
    print(f"Launch, {NPROC} ranks, whole job with one all_reduce (seconds, medians):")
    for name, seconds in figures.items():
        print(f"  {name:<42}{seconds:8.3f}")
    later, first = figures["ours, later launches"], figures["ours, first launch (its server starts)"]
    checks = {
        "later launches at least 40 times faster than torchrun": figures["torchrun"] / later >= 40,
        "later launches faster than notebook_launcher": later < figures["accelerate notebook_launcher"],
        "the first launch at most half of torchrun": first <= figures["torchrun"] / 2,
    }
    for what, holds in checks.items():
        print(f"  {'holds' if holds else 'DOES NOT HOLD'}: {what}")
    print(f"  torchrun / later launches: {figures['torchrun'] / later:.0f}")
    return figures
