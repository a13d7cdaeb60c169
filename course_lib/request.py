"""What `launch` was asked for: checked before anything starts, and described for the server."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

from course_lib import freshness, machine
from course_lib.pace import Pace
from course_lib.rank import INSIDE_A_RANK
from course_lib.travel import large_variables

# What a rank must not inherit: another job's coordinates, another scheduler's, and this kernel's own
# (examples#458, distrifuser#11).
SCRUBBED = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "ROLE_RANK",
    "ROLE_WORLD_SIZE",
    "ROLE_NAME",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MPLBACKEND",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
)
SCRUBBED_PREFIXES = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "TORCHELASTIC_", "TORCH_DIST_INIT", "JPY_", "GLOO_")
# What makes a call worth importing more for in the server: without it, every rank would by itself.
HEAVY_MARKERS = (b"DistributedDataParallel", b"DDP", b"fully_shard", b"ZeroRedundancy")
MAX_TIMEOUT = 24 * 3600.0


@functools.lru_cache(maxsize=8)
def usable_gpus(visible_devices: str | None) -> int:
    """How many GPUs this process may use; looked up once for each CUDA_VISIBLE_DEVICES."""
    return len(machine.inspect().gpus)


def check(
    fn: Any, nproc: Any, args: Any, kwargs: Any, pace: Any, timeout: Any, caller: str = "launch"
) -> None:
    """Raise TypeError, ValueError or RuntimeError for a request that makes no sense."""
    if os.environ.get(INSIDE_A_RANK):
        raise RuntimeError(
            f"{caller} was called inside rank {os.environ[INSIDE_A_RANK]} of a running job. "
            "Call it from the notebook: a rank cannot start ranks of its own."
        )
    freshness.check()
    if not callable(fn):
        raise TypeError(f"launch needs a function to run, and was given {fn!r}: pass `train`, not `train()`")
    if inspect.iscoroutinefunction(fn) or inspect.isgeneratorfunction(fn):
        raise TypeError(
            f"{fn.__name__} is a generator or async function; launch runs ordinary functions only"
        )
    if isinstance(nproc, bool) or not isinstance(nproc, int):
        raise TypeError(f"nproc={nproc!r} is not a whole number of ranks; pass an int, such as nproc=4")
    if nproc < 1:
        raise ValueError(f"nproc={nproc} ranks cannot run; pass 1 or more")
    if nproc > 8 and nproc > machine.max_ranks():
        raise ValueError(f"nproc={nproc} is more than this machine can carry. {machine.explain_max_ranks()}")
    if not isinstance(args, (tuple, list)):
        raise TypeError(f"args={args!r} must be a tuple, such as args=(20,)")
    if not isinstance(kwargs, dict):
        raise TypeError(f'kwargs={kwargs!r} must be a dict, such as kwargs={{"steps": 20}}')
    if pace is not None and not isinstance(pace, Pace):
        raise TypeError(f"pace={pace!r} is not a Pace; pass one, such as Pace(gbps=1, latency_us=50)")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)):
        raise TypeError(f"timeout={timeout!r} is not a number of seconds")
    if not 0 < timeout <= MAX_TIMEOUT:
        raise ValueError(f"timeout={timeout} must be more than 0 and at most {MAX_TIMEOUT:.0f} seconds")
    try:
        os.getcwd()
    except FileNotFoundError:
        raise RuntimeError(
            "this notebook's working directory no longer exists; os.chdir() to one that does"
        ) from None


def choose_backend(nproc: int, backend: str | None, pace: Pace | None) -> tuple[str | None, int]:
    """The backend that a job gets, and how many GPUs there are. Raises ValueError where it cannot have it."""
    gpus = usable_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"))
    chosen = None if backend is None else machine.choose_backend(nproc, backend, gpus)
    if pace is not None and chosen == "nccl":
        if backend == "nccl":
            raise ValueError(
                'a paced job runs over gloo on CPUs: leave backend at "auto" or pass backend="gloo"'
            )
        chosen = "gloo"
    return chosen, gpus


def explain_unknown(fn: Any, unknown: dict[str, Any]) -> str:
    """What to say about arguments that launch does not have: most are the function's own."""
    name = getattr(fn, "__name__", "the function")
    inside = ", ".join(f'"{key}": {value!r}' for key, value in unknown.items())
    return (
        f"launch has no argument {', '.join(map(repr, unknown))}. "
        f"Arguments of {name} go into kwargs: launch({name}, kwargs={{{inside}}})"
    )


def describe(nproc: int, backend: str | None, gpus: int, pace: Pace | None, payload: bytes) -> dict:
    """The job as the server needs it: everything but the file descriptors."""
    threads = machine.threads_per_rank(nproc)
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in SCRUBBED and not key.startswith(SCRUBBED_PREFIXES)
    }
    environments = [
        {
            **kept,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(nproc),
            "LOCAL_WORLD_SIZE": str(nproc),
            "MASTER_ADDR": "127.0.0.1",
            "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
            "OMP_NUM_THREADS": str(threads),
            "MPLBACKEND": "Agg",
            INSIDE_A_RANK: str(rank),
        }
        for rank in range(nproc)
    ]
    paced = pace is not None and backend is not None
    return {
        "world_size": nproc,
        "heavy": any(marker in payload for marker in HEAVY_MARKERS),
        "environments": environments,
        "devices": [machine.device_for(rank, backend or "gloo", gpus) for rank in range(nproc)],
        "common": {
            "world_size": nproc,
            "path": [os.path.abspath(entry) if entry else os.getcwd() for entry in sys.path],
            "argv": list(sys.argv),
            "directory": os.getcwd(),
            "threads": threads,
            "backend": "paced" if paced else backend,
            "pace": pace.to_dict() if pace is not None else None,
        },
    }


def large_payload(payload: bytes, fn: Callable, args: tuple, kwargs: dict) -> str:
    """What to tell about a call that carries much data to every rank."""
    sizes = large_variables(fn, args, kwargs)
    named = ", ".join(f"{name} {size / 2**20:.0f} MiB" for name, size in sizes.items())
    return (
        f"the function carries {len(payload) / 2**20:.0f} MiB to every rank ({named}). "
        "Load large data inside the function instead."
    )
