"""What this machine has, what a job may ask of it, and what that means for you.

`inspect` looks. `max_ranks`, `threads_per_rank`, `choose_backend` and `device_for` decide. `preflight` says
it in words. None of them initialises CUDA or imports torch, so that a kernel which has only looked can still
do anything.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from dataclasses import dataclass
from html import escape

from course_lib import hardware

BYTES_PER_RANK = 120_000_000  # what a rank adds to memory before it holds any data of its own
FILES_PER_RANK = 8  # what the parent of a job keeps open for each rank
MOST_RANKS = 128  # on any machine: beyond this, start-up is the experiment
USUAL_RANKS = 8  # what the chapters go up to
OLDEST_TORCH = (2, 13)
BACKENDS = ("auto", "gloo", "nccl")


@dataclass(frozen=True)
class Machine:
    """What this process can use of the machine it runs on.

    system: "Linux", "Darwin" or "Windows". torch: its version, None where it is not installed. cores: how
    many this process may use at once. memory_bytes, memory_available_bytes: limits of a container are counted
    in. shared_memory_bytes: free in /dev/shm, None where there is none. gpus: the names of those that PyTorch
    can use; gpus_missing: why there are no more. loopback: its interface's name, None where there is none.
    loopback_works: whether a socket can listen on 127.0.0.1. start_method: how ranks start, "fork" or
    "spawn". open_files_left: how many more files this process may open. namespaces_missing: why network
    namespaces cannot be made without further rights, "" where they can.
    """

    system: str
    python: str
    torch: str | None
    cores: int
    memory_bytes: int
    memory_available_bytes: int
    shared_memory_bytes: int | None
    gpus: tuple[str, ...]
    gpus_missing: str
    loopback: str | None
    loopback_works: bool
    start_method: str
    open_files_left: int
    namespaces_missing: str

    @property
    def network_namespaces(self) -> bool:
        """Whether several "machines" can be made on this one."""
        return not self.namespaces_missing


def inspect() -> Machine:
    """Look at this machine. Takes milliseconds; where there are GPUs, the first look can take a second."""
    system = platform.system()
    memory_bytes, memory_available_bytes = hardware.memory()
    gpus, gpus_missing = hardware.usable_gpus()
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = None
    return Machine(
        system=system,
        python=platform.python_version(),
        torch=torch,
        cores=hardware.usable_cores(),
        memory_bytes=memory_bytes,
        memory_available_bytes=memory_available_bytes,
        shared_memory_bytes=hardware.shared_memory(),
        gpus=gpus,
        gpus_missing=gpus_missing,
        loopback=hardware.loopback_interface(),
        loopback_works=hardware.loopback_works(),
        start_method="fork" if system == "Linux" else "spawn",
        open_files_left=hardware.open_files_left(),
        namespaces_missing=hardware.namespaces_missing(),
    )


def _rank_limit(machine: Machine) -> tuple[int, str]:
    """How many ranks a job may have, and the reason."""
    free, files = machine.memory_available_bytes, machine.open_files_left
    memory = (
        f"each rank needs about {BYTES_PER_RANK // 1_000_000} MB, and {free / 1e9:.1f} GB of memory are free"
    )
    descriptors = f"each rank takes {FILES_PER_RANK} open files, and this process may open {files} more"
    return min(
        (max(1, free // BYTES_PER_RANK), memory),
        # The usual ranks need few files: a process near its limit should still run every chapter.
        (max(USUAL_RANKS, files // FILES_PER_RANK), f"{descriptors} (`ulimit -n` sets how many)"),
        (MOST_RANKS, "the workbook stops there on any machine"),
    )


def max_ranks(machine: Machine | None = None) -> int:
    """How many ranks a job may have here: at least 1, at most 128."""
    return _rank_limit(machine or inspect())[0]


def explain_max_ranks(machine: Machine | None = None) -> str:
    """The number that `max_ranks` gives and the reason for it, in one sentence."""
    most, why = _rank_limit(machine or inspect())
    return f"A job can have at most {_count(most, 'rank')} here: {why}."


def threads_per_rank(nproc: int, cores: int | None = None) -> int:
    """How many compute threads each of `nproc` ranks gets, so that ranks do not fight over cores.

    cores: how many there are to share; as many as this process may use, where it is not given.
    """
    return max(1, (hardware.usable_cores() if cores is None else cores) // nproc)


def choose_backend(nproc: int, requested: str, gpus: int) -> str:
    """The backend of a job of `nproc` ranks on a machine with `gpus` GPUs: "nccl" or "gloo".

    "auto" is nccl where each rank can have a GPU of its own, gloo elsewhere. Raises ValueError for a backend
    that is not known, and for nccl with fewer GPUs than ranks.
    """
    if requested not in BACKENDS:
        allowed = ", ".join(f'"{name}"' for name in BACKENDS)
        raise ValueError(
            f"backend={requested!r} is not known here. Allowed are {allowed}. "
            'Use "auto": it takes nccl where there is one GPU a rank, and gloo elsewhere.'
        )
    if requested == "auto":
        return "nccl" if nproc <= gpus else "gloo"
    # NCCL itself says "duplicate GPU" only late, at a rank's first collective (pytorch PR#68666).
    if requested == "nccl" and nproc > gpus:
        fewer = f"Use nproc={gpus} or fewer, or" if gpus else "Use"
        raise ValueError(
            f'backend="nccl" with nproc={nproc} needs {_count(nproc, "GPU")}, one for each rank. '
            f'GPUs that can be used here: {gpus}. {fewer} backend="gloo", which runs on CPUs.'
        )
    return requested


def device_for(local_rank: int, backend: str, gpus: int) -> str:
    """The device of a rank: "cuda:2" for local rank 2 with nccl, "cpu" with gloo."""
    if backend != "nccl":
        return "cpu"
    if not 0 <= local_rank < gpus:
        raise ValueError(
            f"Local rank {local_rank} has no GPU of its own: {gpus} can be used. Start at most {gpus} ranks."
        )
    return f"cuda:{local_rank}"


READY, INSTEAD, TO_MEND = "ready", "something else instead", "to mend"


@dataclass(frozen=True)
class Finding:
    """One line of the preflight: what was looked at, what is here, what follows, and whether it will do."""

    what: str
    here: str
    follows: str
    state: str = READY


@dataclass(frozen=True)
class Preflight:
    """What this machine has and what follows from it; shows itself as a table."""

    machine: Machine
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing has to be mended before you go on."""
        return all(finding.state != TO_MEND for finding in self.findings)

    def summary(self) -> str:
        """The whole table in one or two sentences."""
        mend = [finding.what for finding in self.findings if finding.state == TO_MEND]
        other = [finding.what for finding in self.findings if finding.state == INSTEAD]
        if mend:
            return f"Before you go on, mend: {', '.join(mend)}."
        if other:
            return f"Everything runs here. Something else is done instead for: {', '.join(other)}."
        return "Everything runs here, with nothing replaced."

    def __repr__(self) -> str:
        lines = [f"{f.what} ({f.state}): {f.here}\n    {f.follows}" for f in self.findings]
        return "\n".join([*lines, self.summary()])

    def _repr_html_(self) -> str:
        left = ' style="text-align: left; vertical-align: top"'
        titles = ("what", "here", "what follows", "state")
        heads = "".join(f'<th scope="col"{left}>{title}</th>' for title in titles)
        rows = "".join(
            f'<tr><th scope="row"{left}>{escape(f.what)}</th>'
            + "".join(f"<td{left}>{escape(cell)}</td>" for cell in (f.here, f.follows, f.state))
            + "</tr>"
            for f in self.findings
        )
        table = f"<table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table>"
        return f"{table}<p>{escape(self.summary())}</p>"


def preflight(machine: Machine | None = None) -> Preflight:
    """What you have here, what follows from it, and what happens instead of what is not possible."""
    machine = machine or inspect()
    parts = (_versions, _cores, _memory, _shared_memory, _gpus, _loopback, _starting, _several_machines)
    return Preflight(machine, tuple(part(machine) for part in parts))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _versions(machine: Machine) -> Finding:
    what, here = "Python and PyTorch", f"Python {machine.python}, PyTorch {machine.torch or 'not installed'}"
    if machine.system not in ("Linux", "Darwin"):
        return Finding(what, f"{here}, {machine.system}", "Use Linux, macOS, or WSL 2 on Windows.", TO_MEND)
    found = re.match(r"(\d+)\.(\d+)", machine.torch or "")
    if not found or (int(found[1]), int(found[2])) < OLDEST_TORCH:
        return Finding(what, here, "PyTorch 2.13 or later is needed. `make lab` installs it.", TO_MEND)
    return Finding(what, here, "The workbook was tested with PyTorch 2.13.0.")


def _cores(machine: Machine) -> Finding:
    most = min(USUAL_RANKS, max_ranks(machine))
    follows = f"Jobs of up to {_count(most, 'rank')} run"
    if machine.cores < most:
        follows += (
            f", but real compute does not speed up beyond {_count(machine.cores, 'rank')}. "
            "That is why chapters use the paced lab: there each rank behaves like a device of its own."
        )
    else:
        follows += (
            ", each on a core of its own. Chapters still use the paced lab, since loopback is no network."
        )
    return Finding("Cores", _count(machine.cores, "core"), follows)


def _memory(machine: Machine) -> Finding:
    here = f"{machine.memory_available_bytes / 1e9:.1f} GB free of {machine.memory_bytes / 1e9:.1f} GB"
    if max_ranks(machine) < USUAL_RANKS:
        return Finding("Memory", here, f"{explain_max_ranks(machine)} Close what you do not need.", TO_MEND)
    return Finding("Memory", here, explain_max_ranks(machine))


def _shared_memory(machine: Machine) -> Finding:
    if machine.shared_memory_bytes is None:
        return Finding("Shared memory", "no /dev/shm", "DataLoader workers use files instead.")
    here = f"{machine.shared_memory_bytes / 1e6:,.0f} MB free in /dev/shm"
    if machine.shared_memory_bytes < 32e6:
        follows = (
            "DataLoader workers hand over batches there, and end with `Bus error` when it is full. Make room."
        )
        return Finding("Shared memory", here, f"{follows} (Docker: --shm-size=1g.)", TO_MEND)
    return Finding("Shared memory", here, "Enough for DataLoader workers to hand over batches.")


def _gpus(machine: Machine) -> Finding:
    count = len(machine.gpus)
    here = (", ".join(machine.gpus) or "none") + (
        f" ({machine.gpus_missing})" if machine.gpus_missing else ""
    )
    if count >= 2:
        return Finding(
            "GPUs", here, f"Jobs of up to {count} ranks run on GPUs with NCCL, larger ones on CPUs."
        )
    only = "A job of 1 rank runs on the GPU. " if count else ""
    follows = f"{only}Jobs run on CPUs with gloo: the same code. Each chapter says what changes on GPUs."
    return Finding("GPUs", here, follows, INSTEAD)


def _loopback(machine: Machine) -> Finding:
    here = f"{machine.loopback or 'no known interface'}, 127.0.0.1"
    if machine.loopback is None or not machine.loopback_works:
        follows = "Ranks cannot talk to each other. A sandbox or firewall that forbids sockets can be why."
        return Finding("Loopback", f"{here} cannot be used", follows, TO_MEND)
    return Finding("Loopback", here, "Ranks talk over it. Nothing listens where other machines can reach it.")


def _starting(machine: Machine) -> Finding:
    if machine.start_method == "fork":
        return Finding(
            "Starting ranks", "a fork server", "From the second job on, ranks start in about 0.1 s."
        )
    follows = "Each rank imports PyTorch anew, so that a job takes some seconds to start."
    return Finding("Starting ranks", "no safe fork here; ranks are spawned", follows, INSTEAD)


def _several_machines(machine: Machine) -> Finding:
    if machine.network_namespaces:
        follows = "Several machines can be imitated on this one, joined by a link of a given speed."
        return Finding("Several machines", "network namespaces", follows)
    follows = "Several machines cannot be imitated here; their jobs would run side by side on loopback."
    return Finding("Several machines", machine.namespaces_missing, follows, INSTEAD)
