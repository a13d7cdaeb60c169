"""What every test of a job can count on: a way to see that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import psutil
import pytest

GONE_SECONDS = 3


def pytest_collection_modifyitems(items):
    import torch

    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no GPU on this machine"))


def rank_processes() -> list[psutil.Process]:
    """Every process below this one that is not the server itself."""
    below = []
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if "course_lib.server" in " ".join(child.cmdline()):
                below += child.children(recursive=True)
    return below


def wait_until_gone(pids: list[int], seconds: float = GONE_SECONDS) -> list[int]:
    """Wait until none of `pids` exists; return those that still do after `seconds`."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        alive = [pid for pid in pids if psutil.pid_exists(pid) and not _zombie(pid)]
        if not alive:
            return []
        time.sleep(0.02)
    return alive


def _zombie(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def nothing_left():
    """Fails the test when it leaves a process, a descriptor or a signal handler changed."""
    from course_lib import launch

    launch(int, 1, progress=False)
    descriptors = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0
    handler = signal.getsignal(signal.SIGINT)
    yield
    assert wait_until_gone([p.pid for p in rank_processes()]) == []
    assert signal.getsignal(signal.SIGINT) is handler
    if descriptors:
        assert len(os.listdir("/proc/self/fd")) <= descriptors
