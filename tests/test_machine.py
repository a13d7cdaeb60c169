"""What the machine is found to have, and what is decided from it. GPUs are pretended: none is needed."""

from __future__ import annotations

import dataclasses
import os
import stat
import subprocess
import sys
import types

import pytest

from course_lib import hardware
from course_lib.machine import (
    Machine,
    choose_backend,
    device_for,
    explain_max_ranks,
    inspect,
    max_ranks,
    preflight,
    threads_per_rank,
)

GB = 10**9
LAPTOP = Machine(
    system="Linux",
    python="3.12.1",
    torch="2.13.0+cpu",
    cores=2,
    memory_bytes=16 * GB,
    memory_available_bytes=8 * GB,
    shared_memory_bytes=4 * GB,
    gpus=(),
    gpus_missing="",
    loopback="lo",
    loopback_works=True,
    start_method="fork",
    open_files_left=1000,
    namespaces_missing="",
)
LISTING = (
    "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa1111)\n"
    "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbb2222)\n"
    "  MIG 3g.20gb     Device  0: (UUID: MIG-cccc3333)\n"
    "GPU 2: Tesla T4 (UUID: GPU-bbbb4444)\n"
)
A100, T4 = "NVIDIA A100-SXM4-40GB", "Tesla T4"


def like_laptop(**changes: object) -> Machine:
    return dataclasses.replace(LAPTOP, **changes)  # type: ignore[arg-type]


# Looking


def test_looking_at_this_machine_gives_sensible_numbers():
    machine = inspect()
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 0 < machine.memory_available_bytes <= machine.memory_bytes
    assert machine.loopback in ("lo", "lo0")
    assert machine.loopback_works
    assert machine.start_method == ("fork" if sys.platform == "linux" else "spawn")


def test_looking_neither_imports_torch_nor_leaves_a_process():
    code = (
        "import sys, psutil; from course_lib.machine import inspect, preflight; inspect(); preflight();"
        "print('torch' in sys.modules, len(psutil.Process().children()))"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.split() == ["False", "0"]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="affinity is Linux only")
def test_cores_are_those_that_this_process_may_use():
    code = (
        "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))});"
        "from course_lib.hardware import usable_cores; print(usable_cores())"
    )
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "1"


def test_a_container_quota_lowers_the_cores_and_is_rounded_down(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    for quota, cores in ((2.9, 2), (0.5, 1), (64.0, 16), (None, 16)):
        monkeypatch.setattr(hardware, "cgroup_cores", lambda quota=quota: quota)
        assert hardware.usable_cores() == cores


def write(root, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_cgroup_version_2_limits_are_read_and_the_tightest_ancestor_counts(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "sys/fs/cgroup/cgroup.controllers": "cpu memory\n",
            "sys/fs/cgroup/pod/cpu.max": "150000 100000\n",
            "sys/fs/cgroup/pod/memory.max": "5000\n",
            "sys/fs/cgroup/pod/memory.current": "4000\n",
            "sys/fs/cgroup/pod/memory.stat": "anon 1\ninactive_file 300\nslab 2\n",
            "sys/fs/cgroup/cpu.max": "max 100000\n",
            "sys/fs/cgroup/pod/box/cpu.max": "900000 100000\n",
            "sys/fs/cgroup/pod/box/memory.max": "9000\n",
            "sys/fs/cgroup/pod/box/memory.current": "100\n",
        },
    )
    assert hardware.cgroup_cores(tmp_path) == 1.5
    assert hardware.cgroup_memory(tmp_path) == (5000, 1300)


def test_cgroup_version_1_limits_are_read_where_the_path_is_the_hosts(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n1:name=systemd:/\n0::/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "7000\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000\n",
            "sys/fs/cgroup/memory/memory.stat": "inactive_file 1\ntotal_inactive_file 500\n",
        },
    )
    assert hardware.cgroup_cores(tmp_path) == 3.0
    assert hardware.cgroup_memory(tmp_path) == (7000, 5500)


def test_no_limit_is_told_from_a_limit_in_both_versions(tmp_path):
    write(
        tmp_path,
        {
            "proc/self/cgroup": "4:memory:/\n3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "2000\n",
        },
    )
    assert hardware.cgroup_cores(tmp_path) is None
    assert hardware.cgroup_memory(tmp_path) == (None, None)
    assert hardware.cgroup_cores(tmp_path / "nothing") is None


@pytest.mark.parametrize(
    ("visible", "names"),
    [
        (None, (A100, A100, T4)),
        ("", ()),
        ("-1", ()),
        ("2,0", (T4, A100)),
        ("0,7,1", (A100,)),
        ("1,1", ()),
        ("GPU-aaaa", (A100,)),
        ("GPU-bbbb4444, GPU-aaaa1111", (T4, A100)),
        ("GPU-bbbb", ()),
        ("MIG-cccc3333,MIG-dddd", ("MIG slice",)),
        ("MIG-unknown", ()),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(visible, names):
    assert hardware.visible_gpus(LISTING, visible) == names


@pytest.fixture
def three_gpus(tmp_path, monkeypatch):
    """A machine whose nvidia-smi lists three GPUs."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTING}END\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    hardware._nvidia_smi_list.cache_clear()
    yield
    hardware._nvidia_smi_list.cache_clear()


def test_gpus_are_listed_and_hidden_ones_are_named(three_gpus, monkeypatch):
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: True)
    assert hardware.usable_gpus() == ((A100, A100, T4), "")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2")
    names, why = hardware.usable_gpus()
    assert names == (T4,)
    assert "CUDA_VISIBLE_DEVICES='2'" in why


def test_gpus_that_this_pytorch_cannot_use_do_not_count(three_gpus, monkeypatch):
    monkeypatch.setattr(hardware, "torch_has_cuda", lambda: False)
    names, why = hardware.usable_gpus()
    assert names == ()
    assert "3 found" in why and "without CUDA" in why


def test_whether_pytorch_has_cuda_is_read_from_its_files(tmp_path, monkeypatch):
    import torch

    assert hardware.torch_has_cuda() == (torch.version.cuda is not None)
    installed = types.SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(hardware.importlib.util, "find_spec", lambda name: installed)
    for line, has_cuda in (("cuda: Optional[str] = '13.0'", True), ("cuda: Optional[str] = None", False)):
        (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{line}\nhip: Optional[str] = '6.4'\n")
        assert hardware.torch_has_cuda() == has_cuda


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_missing_tools_for_network_namespaces_are_named(monkeypatch):
    monkeypatch.setattr(hardware.shutil, "which", lambda tool, path=None: None if tool == "tc" else tool)
    assert hardware.namespaces_missing.__wrapped__() == "not installed: tc (packages util-linux and iproute2)"


# Deciding


def test_memory_bounds_the_ranks():
    machine = like_laptop(memory_available_bytes=1_250_000_000)
    assert max_ranks(machine) == 10
    assert "at most 10 ranks" in explain_max_ranks(machine)
    assert "1.2 GB of memory are free" in explain_max_ranks(machine)


def test_open_files_bound_the_ranks_but_not_below_eight():
    assert max_ranks(like_laptop(open_files_left=240)) == 30
    assert "ulimit -n" in explain_max_ranks(like_laptop(open_files_left=240))
    assert max_ranks(like_laptop(open_files_left=10)) == 8


def test_ranks_are_bounded_on_any_machine_and_never_below_one():
    server = like_laptop(memory_available_bytes=2000 * GB, open_files_left=10**6)
    assert max_ranks(server) == 128
    assert "at most 128 ranks" in explain_max_ranks(server)
    assert max_ranks(like_laptop(memory_available_bytes=1)) == 1
    assert "at most 1 rank here" in explain_max_ranks(like_laptop(memory_available_bytes=1))


def test_cores_are_shared_among_ranks_with_at_least_one_thread_each():
    assert [threads_per_rank(nproc, cores=8) for nproc in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert threads_per_rank(1) == hardware.usable_cores()


@pytest.mark.parametrize(
    ("nproc", "requested", "gpus", "backend"),
    [
        (2, "auto", 0, "gloo"),
        (2, "auto", 1, "gloo"),
        (2, "auto", 2, "nccl"),
        (2, "auto", 8, "nccl"),
        (2, "gloo", 8, "gloo"),
        (2, "nccl", 2, "nccl"),
    ],
)
def test_nccl_is_chosen_where_each_rank_has_a_gpu_and_gloo_elsewhere(nproc, requested, gpus, backend):
    assert choose_backend(nproc, requested, gpus) == backend


def test_nccl_with_fewer_gpus_than_ranks_is_refused_with_what_to_do():
    with pytest.raises(ValueError, match=r"nproc=4 needs 4 GPUs.*here: 2\. Use nproc=2 or fewer"):
        choose_backend(4, "nccl", 2)
    with pytest.raises(ValueError, match=r'here: 0\. Use backend="gloo"'):
        choose_backend(1, "nccl", 0)


@pytest.mark.parametrize("wrong", ["NCCL", "mpi", None, 3])
def test_an_unknown_backend_is_refused_with_those_allowed(wrong):
    with pytest.raises(ValueError, match='"auto", "gloo", "nccl"'):
        choose_backend(2, wrong, 8)


def test_each_local_rank_gets_its_own_device():
    assert [device_for(rank, "nccl", 3) for rank in range(3)] == ["cuda:0", "cuda:1", "cuda:2"]
    assert device_for(2, "gloo", 0) == device_for(2, "gloo", 8) == "cpu"
    with pytest.raises(ValueError, match="Local rank 3 has no GPU"):
        device_for(3, "nccl", 3)


# Saying


def test_preflight_says_that_compute_stops_scaling_at_the_cores():
    text = repr(preflight(LAPTOP))
    assert "Jobs of up to 8 ranks run, but real compute does not speed up beyond 2 ranks" in text
    assert "paced lab" in text
    assert "does not speed up" not in repr(preflight(like_laptop(cores=16)))


def test_preflight_says_what_happens_instead_of_what_is_not_possible():
    bare = preflight(like_laptop(start_method="spawn", namespaces_missing="not installed: tc"))
    assert bare.ok
    assert bare.summary().endswith("instead for: GPUs, Starting ranks, Several machines.")
    assert "not installed: tc" in repr(bare) and "side by side on loopback" in repr(bare)


def test_preflight_of_a_full_machine_replaces_nothing():
    full = preflight(like_laptop(gpus=(A100, A100), cores=16))
    assert full.summary() == "Everything runs here, with nothing replaced."
    assert "Jobs of up to 2 ranks run on GPUs with NCCL" in repr(full)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"torch": None}, "Python and PyTorch"),
        ({"torch": "2.9.1"}, "Python and PyTorch"),
        ({"system": "Windows"}, "Python and PyTorch"),
        ({"memory_available_bytes": 300_000_000}, "Memory"),
        ({"shared_memory_bytes": 1_000_000}, "Shared memory"),
        ({"loopback_works": False}, "Loopback"),
    ],
)
def test_preflight_names_what_has_to_be_mended(changes, what):
    found = preflight(like_laptop(**changes))
    assert not found.ok
    assert found.summary() == f"Before you go on, mend: {what}."


def test_preflight_shows_the_same_in_html_with_texts_escaped():
    found = preflight(like_laptop(gpus=("<b>odd</b>",)))
    page = found._repr_html_()
    assert page.count("<tr>") == len(found.findings) + 1
    assert "&lt;b&gt;odd&lt;/b&gt;" in page and "<b>odd" not in page
    assert 'scope="row"' in page and "something else instead" in page
