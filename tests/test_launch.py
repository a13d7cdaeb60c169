"""Real jobs: what a launched function can rely on, and what is left when it is over."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import rank_processes, wait_until_gone

import course_lib
from course_lib import JobTimeout, Pace, RankError, last_run, launch, span
from course_lib.forkserver import ServerDied, close_server, current_server

pytestmark = pytest.mark.usefixtures("nothing_left")
# A host name need not resolve on this machine: torchrun is told to use the numeric loopback address.
TORCHRUN_HERE = ("--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1")
ROOT = Path(course_lib.__file__).parents[1]


def in_notebook(code: str, tmp_path: Path) -> subprocess.Popen:
    """Start `code` as a main program of its own, as a notebook kernel is."""
    script = tmp_path / "notebook.py"
    script.write_text(textwrap.dedent(code))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-u", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path,
        env=environment,
    )


@pytest.mark.parametrize("nproc", [1, 2, 4, 8])
def test_a_closure_runs_on_every_rank_and_its_results_logs_and_spans_come_back(nproc):
    weights = torch.arange(3.0)

    def work(scale):
        rank = dist.get_rank()
        with span("mine"):
            total = weights * scale * (rank + 1)
            dist.all_reduce(total)
        print(f"python says {rank}")
        ctypes.CDLL(None).puts(f"C says {rank}".encode())
        ctypes.CDLL(None).fflush(None)
        return {"rank": rank, "total": total}

    run = launch(work, nproc, args=(2.0,))
    expected = weights * 2 * sum(range(1, nproc + 1))
    assert [result["rank"] for result in run.results] == list(range(nproc))
    assert all(torch.equal(result["total"], expected) for result in run.results)
    for rank in range(nproc):
        assert f"python says {rank}" in run.logs[rank]
        assert f"C says {rank}" in run.logs[rank]
    assert sorted(s.rank for s in run.spans if s.name == "mine") == list(range(nproc))
    assert run.kind == "measured" and run.backend == "gloo" and run.ok


def test_a_plain_init_process_group_finds_the_job():
    def work():
        dist.init_process_group()
        ones = torch.ones(1)
        dist.all_reduce(ones)
        dist.destroy_process_group()
        return ones.item()

    assert launch(work, 3, backend=None).results == [3.0, 3.0, 3.0]


def test_the_same_file_gives_the_same_numbers_under_torchrun(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist
            from torch.nn.parallel import DistributedDataParallel

            def train():
                torch.manual_seed(0)
                model = DistributedDataParallel(torch.nn.Linear(5, 3))
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                generator = torch.Generator().manual_seed(dist.get_rank())
                for _ in range(3):
                    optimizer.zero_grad()
                    model(torch.randn(4, 5, generator=generator)).square().mean().backward()
                    optimizer.step()
                return [p.tolist() for p in model.module.parameters()]

            if __name__ == "__main__":
                dist.init_process_group()
                numbers = train()
                if dist.get_rank() == 0:
                    print(numbers)
                dist.destroy_process_group()
            """
        )
    )
    torchrun = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *TORCHRUN_HERE, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        start_new_session=True,
    )
    try:
        output = torchrun.communicate(timeout=120)[0]
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(torchrun.pid, signal.SIGKILL)
    namespace: dict = {"__name__": "cell"}
    exec(script.read_text(), namespace)
    run = launch(namespace["train"], 2)
    assert run.results[0] == run.results[1]
    assert output.strip().splitlines()[-1] == str(run.results[0])


def test_each_rank_gets_its_share_of_the_cores():
    from course_lib.machine import threads_per_rank

    assert launch(torch.get_num_threads, 2).results == [threads_per_rank(2)] * 2


def test_what_other_jobs_left_in_the_environment_does_not_reach_the_ranks(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "SLURM_JOB_ID", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "7777")
    monkeypatch.setenv("MY_OWN", "kept")

    def work():
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item(), os.environ.get("SLURM_JOB_ID"), os.environ["MY_OWN"], os.environ["MASTER_ADDR"]

    assert launch(work, 2).results == [(2.0, None, "kept", "127.0.0.1")] * 2


def test_ranks_listen_on_loopback_only():
    def work():
        dist.new_group()
        dist.barrier()
        own = psutil.Process().net_connections(kind="inet")
        return [c.laddr.ip for c in own if c.status == psutil.CONN_LISTEN]

    listening = [ip for ips in launch(work, 3).results for ip in ips]
    assert listening
    assert all(ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for ip in listening), listening


def test_the_server_forks_from_a_single_thread_without_cuda():
    launch(int, 1)
    status = Path(f"/proc/{current_server().process.pid}/status")
    if not status.exists():
        pytest.skip("needs /proc")
    assert "Threads:\t1\n" in status.read_text()
    assert launch(torch.cuda.is_initialized, 1).results == [False]


def test_the_error_of_a_rank_is_shown_with_its_line_and_the_others_in_one_line_each():
    def work():
        if dist.get_rank() == 1:
            raise ValueError("the learning rate is a string")
        dist.all_reduce(torch.ones(1))

    with pytest.raises(RankError) as caught:
        launch(work, 3)
    text = str(caught.value)
    assert text.startswith("rank 1 of 3 failed")
    assert "ValueError: the learning rate is a string" in text
    assert 'raise ValueError("the learning rate is a string")' in text
    assert "ranks 0 and 2: in all_reduce" in text and "dist.all_reduce(torch.ones(1))" in text
    assert "losed by peer" not in text


def test_ranks_that_fail_alike_share_one_line():
    text = str(launch(lambda: 1 / 0, 4, check=False).failure)
    assert text.startswith("rank 0 of 4 failed")
    assert text.endswith("ranks 1, 2 and 3: failed in the same way")


def test_a_killed_rank_is_the_cause_and_not_the_lost_connections_of_the_others():
    def work():
        dist.barrier()
        if dist.get_rank() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(100))

    run = launch(work, 4, check=False)
    text = str(run.failure)
    assert text.startswith("rank 2 of 4 failed")
    assert "SIGKILL" in text and "memory" in text
    assert "losed by peer" not in text


def test_a_crash_in_compiled_code_names_the_signal_and_the_line():
    def work():
        ctypes.string_at(0)

    text = str(launch(work, 1, check=False).failure)
    assert "SIGSEGV" in text and "ctypes.string_at(0)" in text


def test_an_endless_recursion_is_told_in_short():
    def work(depth=0):
        return work(depth + 1)

    text = str(launch(work, 1, check=False).failure)
    assert "RecursionError" in text and "more calls" in text
    assert len(text) < 10_000


def test_leaving_without_returning_is_a_failure():
    assert "exit status 3" in str(launch(lambda: os._exit(3), 1, check=False).failure)
    assert "sys.exit" in str(launch(lambda: sys.exit(0), 1, check=False).failure)


def test_a_rank_that_never_arrives_ends_in_a_stall_report():
    def work():
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(1))

    began = time.monotonic()
    with pytest.raises(JobTimeout) as caught:
        launch(work, 2, timeout=1)
    assert time.monotonic() - began < 1 + 2
    text = str(caught.value)
    assert "rank 0: in all_reduce" in text and "dist.all_reduce(torch.ones(1))" in text
    assert "rank 1: finished" in text
    assert "Rank 1 returned while rank 0 waited in all_reduce" in text


def test_a_rank_missing_at_the_rendezvous_is_named():
    def work():
        if os.environ["RANK"] == "0":
            dist.init_process_group()
        else:
            time.sleep(60)

    text = str(launch(work, 2, backend=None, timeout=1.5, check=False).failure)
    assert "rank 0 waited for the others to join the process group" in text.replace("Rank", "rank")
    assert "Rank 1 never called it" in text


def test_a_collective_that_gives_up_by_itself_is_reported_as_a_stall():
    def work():
        from datetime import timedelta

        group = dist.new_group(timeout=timedelta(seconds=1))
        if dist.get_rank() == 0:
            dist.barrier(group=group)
        else:
            time.sleep(30)

    run = launch(work, 2, timeout=20, check=False)
    assert isinstance(run.failure, JobTimeout)
    assert "time.sleep(30)" in str(run.failure)
    assert run.seconds < 10


def test_a_rank_deaf_to_sigterm_in_an_endless_loop_is_stopped():
    def work():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            pass

    assert isinstance(launch(work, 2, timeout=0.5, check=False).failure, JobTimeout)


def test_children_of_ranks_do_not_outlive_the_job():
    def work():
        ordinary = subprocess.Popen(["sleep", "100"]).pid
        daemon = subprocess.Popen(["sleep", "100"], start_new_session=True).pid
        return ordinary, daemon

    pids = [pid for pair in launch(work, 2).results for pid in pair]
    assert wait_until_gone(pids) == []


def test_partial_spans_and_logs_of_a_stopped_job_are_kept():
    def work():
        print("before")
        with span("first"):
            time.sleep(0.05)
        time.sleep(30)

    run = launch(work, 2, timeout=1, check=False)
    assert len([s for s in run.spans if s.name == "first"]) == 2
    assert run.logs[1] == "before\n"
    assert last_run() is run


def test_an_interrupt_stops_the_job_and_leaves_the_notebook_usable(tmp_path):
    notebook = in_notebook(
        """
        import os, time
        from course_lib import JobInterrupted, last_run, launch, span

        def work():
            with span("first"):
                pass
            print("running")
            open(f"running{os.environ['RANK']}", "w").close()
            time.sleep(60)

        print("go", flush=True)
        try:
            launch(work, 2)
        except JobInterrupted as stopped:
            print("stopped", len(stopped.run.spans), stopped.run.logs[0].strip(), last_run() is stopped.run)
        print("next", launch(int, 2).results)
        """,
        tmp_path,
    )
    assert notebook.stdout is not None and notebook.stdout.readline() == "go\n"
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("running*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1)  # spans come with the next beats
    sent = time.monotonic()
    notebook.send_signal(signal.SIGINT)
    output = notebook.communicate(timeout=30)[0]
    assert "stopped 2 running True" in output, output
    assert "next [0, 0]" in output
    assert time.monotonic() - sent < 8


@pytest.mark.parametrize("moment", [0.0, 0.3, 0.8, 1.3])
def test_an_interrupt_at_any_moment_leaves_nothing_running(tmp_path, moment):
    notebook = in_notebook(
        """
        import time
        from course_lib import launch
        print("go", flush=True)
        try:
            launch(time.sleep, 2, args=(60,))
        except KeyboardInterrupt:
            pass
        print("next", launch(int, 2).results)
        """,
        tmp_path,
    )
    assert notebook.stdout is not None
    notebook.stdout.readline()
    time.sleep(moment)
    notebook.send_signal(signal.SIGINT)
    assert "next [0, 0]" in notebook.communicate(timeout=60)[0]


def test_nothing_survives_a_notebook_that_is_killed(tmp_path):
    notebook = in_notebook(
        """
        import os, subprocess, time
        from course_lib import launch

        def work():
            child = subprocess.Popen(["sleep", "100"]).pid
            open(f"pids{os.environ['RANK']}", "w").write(f"{os.getpid()} {os.getppid()} {child}")
            time.sleep(100)

        launch(work, 2)
        """,
        tmp_path,
    )
    deadline = time.monotonic() + 30
    while len(list(tmp_path.glob("pids*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.2)
    pids = [int(pid) for path in tmp_path.glob("pids*") for pid in path.read_text().split()]
    assert len(pids) == 6
    notebook.kill()
    notebook.wait()
    assert wait_until_gone(pids) == []


def test_ranks_do_not_survive_their_server_and_the_next_launch_starts_a_new_one():
    def work():
        if os.environ["RANK"] == "0":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60)

    before = current_server().process.pid
    run = launch(work, 2, timeout=10, check=False)
    assert not run.ok
    assert run.seconds < 8
    assert wait_until_gone([p.pid for p in rank_processes()]) == []
    assert launch(int, 2).results == [0, 0]
    assert current_server().process.pid != before


def test_a_server_that_runs_old_code_is_replaced(tmp_path):
    launch(int, 1)
    old = current_server()
    module = ROOT / "course_lib" / "spans.py"
    stat = module.stat()
    try:
        os.utime(module, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        assert current_server() is not old
        assert launch(int, 1).results == [0]
    finally:
        os.utime(module, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert wait_until_gone([old.process.pid]) == []


def test_jobs_from_several_threads_run_side_by_side():
    results = {}

    def go(number):
        def work():
            total = torch.tensor(number)
            dist.all_reduce(total)
            return total.item()

        results[number] = launch(work, 2, progress=False).results

    threads = [threading.Thread(target=go, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {number: [2 * number] * 2 for number in range(4)}


@pytest.mark.parametrize(
    ("pace", "layers", "kind"),
    [
        (None, False, "measured"),
        (Pace(), False, "measured"),
        (Pace(gbps=1), False, "paced"),
        (Pace(latency_us=10), False, "paced"),
        (None, True, "paced"),
    ],
)
def test_a_run_says_whether_its_times_are_measured_or_paced(pace, layers, kind):
    def work():
        from course_lib.paced_layers import paced_mlp

        if layers:
            paced_mlp(1, 8, 1, 1)(torch.ones(1, 8))

    assert launch(work, 2, pace=pace).kind == kind


def test_a_job_with_a_pace_tells_what_each_rank_sent():
    def work():
        dist.all_reduce(torch.zeros(1000))

    traffic = launch(work, 4, pace=Pace()).traffic
    assert [rank["all_reduce"]["bytes_sent"] for rank in traffic] == [2 * 3 / 4 * 4000] * 4
    assert launch(work, 2).traffic == []


def test_with_the_group_left_to_the_learner_a_plain_group_is_paced_too():
    def work():
        dist.init_process_group()
        dist.all_reduce(torch.zeros(1000))
        return dist.get_backend()

    run = launch(work, 2, backend=None, pace=Pace())
    assert run.traffic[0]["all_reduce"]["calls"] == 1


def test_a_rank_cannot_launch():
    run = launch(lambda: launch(int, 1), 1, check=False)
    assert "launch was called inside rank 0 of a running job" in str(run.failure)


def test_a_rank_that_prints_without_end_neither_stops_nor_floods():
    def work():
        line = "x" * 999
        for _ in range(20_000):
            print(line)
        print("the end")
        return 1

    run = launch(work, 2, timeout=50)
    assert run.results == [1, 1]
    assert len(run.logs[0]) < 400_000
    assert "bytes left out" in run.logs[0] and run.logs[0].endswith("the end\n")


def test_a_rank_that_closes_its_output_still_returns():
    def work():
        os.close(1)
        os.close(2)
        return "fine"

    assert launch(work, 2).results == ["fine", "fine"]


def test_jobs_run_where_forking_is_unsafe(monkeypatch):
    monkeypatch.setenv("COURSE_LIB_START", "spawn")
    close_server()

    def work():
        ones = torch.ones(1)
        dist.all_reduce(ones)
        return ones.item()

    assert launch(work, 2).results == [2.0, 2.0]
    failed = launch(lambda: 1 / 0, 2, check=False)
    assert "ZeroDivisionError" in str(failed.failure)
    close_server()


def test_a_server_that_cannot_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('this torch is broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    close_server()
    with pytest.raises(ServerDied, match="this torch is broken"):
        launch(int, 1)
    monkeypatch.delenv("PYTHONPATH")
    close_server()
    assert launch(int, 1).results == [0]


@pytest.mark.gpu
def test_with_a_gpu_a_rank_gets_its_own_and_nccl():
    from course_lib.devices import device, device_ids

    def work():
        ones = torch.ones(1, device=device())
        dist.all_reduce(ones)
        return str(device()), device_ids(), dist.get_backend(), ones.item()

    run = launch(work, 1)
    assert run.backend == "nccl"
    assert run.results == [("cuda:0", [0], "nccl", 1.0)]
