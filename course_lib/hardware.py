"""Looking at the machine, one question a function: cores, memory, GPUs, loopback, namespaces.

Nothing here imports torch, initialises CUDA or leaves anything behind. Limits of a container count as limits
of the machine. `course_lib.machine` puts the answers together.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import shutil
import socket
import subprocess
from pathlib import Path


def usable_cores() -> int:
    """How many cores this process may use at once: its affinity, and the quota of its container."""
    affinity = getattr(os, "sched_getaffinity", None)
    cores = len(affinity(0)) if affinity else os.cpu_count() or 1
    quota = cgroup_cores()
    # A quota of 2.5 cores carries 2 busy ranks, not 3.
    return cores if quota is None else max(1, min(cores, int(quota)))


def memory() -> tuple[int, int]:
    """Memory that this process may use, and how much of it is free, in bytes."""
    import psutil

    seen = psutil.virtual_memory()
    limit, left = cgroup_memory()
    return min(seen.total, limit or seen.total), min(seen.available, seen.available if left is None else left)


def shared_memory() -> int | None:
    """Bytes free in /dev/shm; None where there is no such thing (macOS)."""
    try:
        state = os.statvfs("/dev/shm")
    except (OSError, AttributeError):
        return None
    return state.f_bavail * state.f_frsize


def open_files_left() -> int:
    """How many more files this process may open."""
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return 2**20
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if limit == resource.RLIM_INFINITY:
        return 2**20
    try:
        in_use = len(os.listdir("/dev/fd"))
    except OSError:
        in_use = 0
    return max(0, limit - in_use)


def _cgroup_directories(controller: str, root: Path) -> list[Path]:
    """The directories that hold this process's limits, its own first; `root` stands for "/"."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        version_1 = controller in controllers.split(",")
        base = root / "sys/fs/cgroup" / (controller if version_1 else "")
        if not version_1 and (controllers or not (base / "cgroup.controllers").exists()):
            continue
        own = base / path.lstrip("/")
        # In a container the path is often that of the host, which does not exist here: its parents do.
        return [d for d in (own, *own.parents) if d.is_relative_to(base) and d.is_dir()]
    return []


def _numbers(path: Path) -> list[int]:
    """The numbers in a limit's file; none where it is absent or says "max"."""
    try:
        return [int(word) for word in path.read_text().split()]
    except (OSError, ValueError):
        return []


def cgroup_cores(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota on this process, in cores; None where there is none."""
    quotas = []
    for directory in _cgroup_directories("cpu", root):
        version_1 = _numbers(directory / "cpu.cfs_quota_us") + _numbers(directory / "cpu.cfs_period_us")
        limit = _numbers(directory / "cpu.max") or version_1
        if len(limit) == 2 and limit[0] > 0 and limit[1] > 0:  # version 1 writes "no quota" as -1
            quotas.append(limit[0] / limit[1])
    return min(quotas, default=None)


def cgroup_memory(root: Path = Path("/")) -> tuple[int | None, int | None]:
    """The tightest memory limit on this process and what is left of it, in bytes; None for no limit."""
    limits, left = [], []
    for directory in _cgroup_directories("memory", root):
        limit = _numbers(directory / "memory.max") or _numbers(directory / "memory.limit_in_bytes")
        used = _numbers(directory / "memory.current") or _numbers(directory / "memory.usage_in_bytes")
        if not limit or not used or limit[0] >= 2**60:  # version 1 writes "no limit" as a huge number
            continue
        # The page cache counts as used, but is given back when memory is needed.
        statistics = (directory / "memory.stat").read_text() if (directory / "memory.stat").exists() else ""
        cache = re.findall(r"^(?:total_)?inactive_file (\d+)$", statistics, re.MULTILINE)
        limits.append(limit[0])
        left.append(max(0, limit[0] - used[0] + max(map(int, cache), default=0)))
    return min(limits, default=None), min(left, default=None)


@functools.lru_cache(maxsize=1)
def _nvidia_smi_list() -> str:
    """What `nvidia-smi -L` says: another process counts the GPUs, so that this one needs no CUDA context."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        answer = subprocess.run(
            [tool, "-L"], capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def visible_gpus(listing: str, visible: str | None) -> tuple[str, ...]:
    """The names of the GPUs of an `nvidia-smi -L` listing that CUDA_VISIBLE_DEVICES=`visible` lets through.

    As CUDA reads it: the first entry that is no GPU ends the list, an entry given twice empties it.
    """
    names = re.findall(r"^GPU \d+: (.*?) \(UUID", listing, re.MULTILINE)
    identifiers = re.findall(r"^GPU \d+: .*\(UUID: ([^)]+)\)", listing, re.MULTILINE)
    if visible is None:
        return tuple(names)
    if visible.startswith("MIG-"):  # CUDA gives a process one slice of a divided GPU, however many are named
        return ("MIG slice",) if visible.split(",")[0] in listing else ()
    chosen: list[int] = []
    for entry in (word.strip() for word in visible.split(",")):
        if entry.startswith("GPU-"):
            matching = [index for index, name in enumerate(identifiers) if name.startswith(entry)]
            index = matching[0] if len(matching) == 1 else -1
        else:
            digits = re.match(r"\d+", entry)
            index = int(digits[0]) if digits else -1
        if index in chosen:
            return ()
        if not 0 <= index < len(names):
            break
        chosen.append(index)
    return tuple(names[index] for index in chosen)


def torch_has_cuda() -> bool:
    """Whether the installed PyTorch was built with CUDA; read from its files, without importing it."""
    found = importlib.util.find_spec("torch")
    if found is None or not found.origin:
        return False
    try:
        text = (Path(found.origin).parent / "version.py").read_text()
    except OSError:
        return False
    return re.search(r"^cuda\b.*=\s*['\"]", text, re.MULTILINE) is not None


def usable_gpus() -> tuple[tuple[str, ...], str]:
    """The names of the GPUs that PyTorch can use in this process, and why there are no more, if so."""
    listing = _nvidia_smi_list()
    listed = visible_gpus(listing, None)
    setting = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = visible_gpus(listing, setting)
    if visible and not torch_has_cuda():
        return (), f"{len(visible)} found, but the installed PyTorch was built without CUDA"
    if len(visible) < len(listed):
        return visible, f"{len(listed)} found, CUDA_VISIBLE_DEVICES={setting!r} lets {len(visible)} through"
    return visible, ""


def loopback_interface() -> str | None:
    """The name of the loopback interface: "lo" on Linux, "lo0" on macOS; None where it is not found."""
    try:
        names = [name for _, name in socket.if_nameindex()]
    except OSError:
        return None
    return next((name for name in ("lo", "lo0") if name in names), None)


def loopback_works() -> bool:
    """Whether a socket of this machine can listen on 127.0.0.1."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(1)
    except OSError:
        return False
    return True


@functools.lru_cache(maxsize=1)
def namespaces_missing() -> str:
    """Why network namespaces cannot be made here without further rights; "" where they can.

    Makes one for a process that ends at once, since no setting tells what a container's rules allow.
    """
    if platform.system() != "Linux":
        return "network namespaces exist on Linux only"
    path = os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # where Debian keeps ip and tc
    missing = [tool for tool in ("unshare", "nsenter", "ip", "tc") if shutil.which(tool, path=path) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (packages util-linux and iproute2)"
    ways = (["-n"], ["-Urn"]) if os.geteuid() == 0 else (["-Urn"],)
    for way in ways:
        try:
            ended = subprocess.run(
                ["unshare", *way, "true"], capture_output=True, timeout=5, stdin=subprocess.DEVNULL
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        if ended.returncode == 0:
            return ""
    return "this system does not let you make a network namespace"
