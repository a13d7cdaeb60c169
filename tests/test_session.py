"""Ranks that stay: their variables, their output, how they fail, and what is left of them."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import nbformat
import psutil
import pytest
import torch
import torch.distributed as dist
from conftest import rank_processes, wait_until_gone

import course_lib
from course_lib import JobTimeout, Pace, RankError, Ranks, launch
from course_lib.failures import JobInterrupted
from course_lib.forkserver import close_server, current_server
from course_lib.magic import _parse
from course_lib.results import CannotReturn
from course_lib.session import CellError, latest

pytestmark = pytest.mark.usefixtures("nothing_left")
ROOT = Path(course_lib.__file__).parents[1]
GONE = "ALL THEIR VARIABLES ARE GONE"
KEEP = "keep their variables"


@pytest.fixture
def world():
    with Ranks(3) as ranks:
        yield ranks


def test_variables_stay_from_cell_to_cell_and_come_back_by_rank(world):
    world.run("x = torch.ones(2) * rank")
    world.run("dist.all_reduce(x)")
    world.run("y = {'sum': x, 'rank': rank, 'of': world_size}")
    assert [y["rank"] for y in world["y"]] == [0, 1, 2]
    assert all(torch.equal(y["sum"], torch.full((2,), 3.0)) and y["of"] == 3 for y in world["y"])
    assert world["x.sum().item() + rank"] == [6, 7, 8]


def test_chosen_ranks_run_and_the_others_do_not(world):
    world.run("x = 0")
    shown = world.run("x = 1; print('here')\nrank * 10", [0, 2])
    assert world["x"] == [1, 0, 1]
    assert list(shown.by_rank()) == [0, 2]
    assert shown.by_rank()[2] == "here\n20"
    assert world.run("rank", 1).by_rank() == {1: "1"}


def test_functions_and_classes_of_a_cell_serve_the_next(world):
    world.run(
        "import dataclasses\n@dataclasses.dataclass\nclass Point:\n    x: 'int'\n"
        "def total():\n    t = torch.tensor(Point(rank).x)\n    dist.all_reduce(t)\n    return t.item()"
    )
    assert world["total()"] == [3, 3, 3]
    # This library's own `from __future__ import annotations` is none of the cell's.
    assert world.run("def f(x: int): pass\nf.__annotations__['x'] is int").results == ["True"] * 3
    assert world.run("import inspect\nprint(inspect.getsource(total))").logs[0].startswith("def total():")


def test_what_ranks_print_and_their_last_expression_stand_by_rank(world):
    run = world.run(
        "import ctypes\nprint(f'python {rank}')\nctypes.CDLL(None).puts(f'C {rank}'.encode())\n[rank, 'last']"
    )
    for rank in range(3):
        assert run.by_rank()[rank] == f"python {rank}\nC {rank}\n[{rank}, 'last']"
        assert f"rank {rank}: C {rank}" in repr(run)
        assert f"<div style='color:#707070'>rank {rank}</div>" in run._repr_html_()
    assert ctypes  # the ranks' own import is what counts
    assert world.run("5;").silent and world.run("None").silent and world.run("x = 1").silent


def test_what_c_still_holds_back_is_shown_under_its_own_cell(monkeypatch):
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    close_server()
    with Ranks(1) as world:
        assert world.run("import ctypes\nctypes.CDLL(None).puts(b'from C');").logs[0] == "from C\n"
    close_server()


def test_output_is_escaped_and_kept_within_bounds(world):
    run = world.run("print('<b>' * 3)\nfor i in range(50_000): print('x' * 99)")
    assert "<b><b>" not in run._repr_html_() and "&lt;b&gt;" in run._repr_html_()
    assert len(repr(run)) < 20_000 and "lines left out" in repr(run)
    assert len(run.logs[0]) < 400_000


def test_ddp_and_the_paced_link_work_on_ranks_that_stay():
    with Ranks(2, pace=Pace(gbps=0.1)) as world:
        world.run(
            "from torch.nn.parallel import DistributedDataParallel\n"
            "from course_lib import probe, span\n"
            "torch.manual_seed(rank)\nmodel = DistributedDataParallel(torch.nn.Linear(100, 100))"
        )
        run = world.run("model(torch.ones(1, 100)).sum().backward()")
        assert run.kind == "paced" and run.traffic[0]["all_reduce"]["payload_bytes"] == 100 * 101 * 4
        assert any(s.name == "all_reduce" and s.rank == 1 for s in run.spans)
        assert world.run("x = 1").traffic[0].get("all_reduce", {"calls": 0})["calls"] == 0
        first, second = world["model.module.weight"]
        assert torch.equal(first, second)


def test_values_go_in_and_come_out(world):
    scale = 3.0

    def scaled(x):
        return x * scale + dist.get_rank()

    world["w"] = torch.arange(3.0)
    world.push(a=1, f=scaled)
    assert world["f(w)[1].item() + a"] == [4.0, 5.0, 6.0]
    with pytest.raises(TypeError, match=r"argument handle is a _io.*cannot be sent"):
        world.push(handle=sys.__stderr__)
    with pytest.raises(ValueError, match="no name of a variable"):
        world["a b"] = 1
    assert world["a"] == [1, 1, 1]


def test_what_cannot_come_back_is_refused_by_name(world):
    world.run("model = torch.nn.Linear(2, 2)\nonly = [1] if rank == 1 else [print]")
    with pytest.raises(CannotReturn, match=r"model is a torch.*Linear.*ask for its state_dict"):
        world["model"]
    assert set(world["model.state_dict()"][0]) == {"weight", "bias"}
    first, second, _ = world["only"]
    assert second == [1] and not first and "only[0] is a builtin_function" in repr(first)
    with pytest.raises(NameError, match="no rank has a variable for 'missing'"):
        world["missing"]
    with pytest.raises(TypeError, match=r'world\["x"\]\[0\]'):
        world[0]
    world.run("if rank: some = rank")
    none, one, two = world["some"]
    assert not none and "name 'some' is not defined" in repr(none) and (one, two) == (1, 2)


def test_an_error_on_one_rank_shows_its_lines_and_keeps_the_group(world):
    world.run("x = torch.ones(1)")
    with pytest.raises(RankError) as caught:
        world.run("y = 1\n\ndef broken():\n    raise ValueError('no')\n\nif rank == 1:\n    broken()")
    text = str(caught.value)
    assert text.startswith("rank 1 of 3 failed")
    assert "line 7, in <module>\n    broken()" in text
    assert "line 4, in broken\n    raise ValueError('no')" in text
    assert "ranks 0 and 2: finished" in text and KEEP in text and "anew" not in text
    world.run("dist.all_reduce(x)")
    assert world["x.item() + y"] == [4.0] * 3


@pytest.mark.parametrize("pace", [None, Pace(), Pace(gbps=1)], ids=["gloo", "counted", "paced"])
def test_ranks_that_wait_for_a_failed_one_are_freed_and_keep_their_variables(pace):
    with Ranks(4, pace=pace) as world:
        world.run("x = torch.ones(1)")
        with pytest.raises(RankError) as caught:
            world.run("if rank == 2:\n    x.nothing\ndist.all_reduce(x.clone())")
        text = str(caught.value)
        assert text.startswith("rank 2 of 4 failed") and "AttributeError" in text
        assert "ranks 0, 1 and 3: in all_reduce" in text and "dist.all_reduce(x.clone())" in text
        assert KEEP in text and "made anew" in text
        assert "losed by peer" not in text
        world.run("dist.all_reduce(x)")
        assert world["x.item()"] == [4.0] * 4


def test_a_group_whose_ranks_made_different_calls_is_made_anew(world):
    """Rank 0's broadcast has ended, rank 2's never began: the next collective would take it for its own."""
    world.run("x = torch.full((1,), float(rank))")
    failed = world.run("if rank == 2: 1 / 0\nwork = dist.all_reduce(x.clone(), async_op=True);", check=False)
    assert "ZeroDivisionError" in str(failed.failure) and "made anew" in str(failed.failure)
    world.run("dist.all_reduce(x)")
    assert world["x.item()"] == [3.0] * 3


def test_a_stall_ends_with_the_report_and_the_ranks_start_anew(world):
    world.run("x = torch.ones(1)")
    before = world["__import__('os').getpid()"]
    began = time.monotonic()
    with pytest.raises(JobTimeout) as caught:
        world.run("\nif rank != 1:\n    dist.all_reduce(x)", timeout=1)
    assert time.monotonic() - began < 1 + 4
    text = str(caught.value)
    assert "did not end within 1 s" in text
    assert "ranks 0 and 2: in all_reduce" in text and "line 3:  dist.all_reduce(x)" in text
    assert "rank 1: finished" in text and "Rank 1 returned while ranks 0 and 2 waited" in text.replace(
        "\n", " "
    )
    assert GONE in " ".join(text.split())
    assert wait_until_gone(before) == []
    with pytest.raises(NameError):
        world["x"]
    world.run("x = torch.ones(1); dist.all_reduce(x)")
    assert world["x.item()"] == [3.0] * 3


def test_a_collective_on_chosen_ranks_names_those_that_did_not_run_the_cell(world):
    text = " ".join(
        str(world.run("dist.all_reduce(torch.ones(1))", 0, timeout=1, check=False).failure).split()
    )
    assert "rank 0: in all_reduce" in text and "ranks 1 and 2: did not run this cell" in text
    assert "all_reduce needs every rank of its group, and 2 ranks of 3 did not run this cell" in text


def test_an_endless_loop_ends_at_the_time_limit(world):
    run = world.run(
        "while True:\n    try:\n        pass\n    except BaseException:\n        pass",
        timeout=0.5,
        check=False,
    )
    assert (
        isinstance(run.failure, JobTimeout)
        and "running, " in str(run.failure)
        and GONE in " ".join(str(run.failure).split())
    )
    assert world["rank"] == [0, 1, 2]


@pytest.mark.parametrize("end", ["os._exit(3)", "os.kill(os.getpid(), 9)", "ctypes.string_at(0)"])
def test_a_rank_whose_process_ends_is_named_and_the_ranks_start_anew(world, end):
    run = world.run(f"import os, ctypes\nprint('last words')\nif rank == 1:\n    {end}", check=False)
    text = " ".join(str(run.failure).split())
    assert text.startswith("rank 1 of 3 failed") and GONE in text and "last words" in text
    assert {"os._exit(3)": "exit status 3", "os.kill(os.getpid(), 9)": "SIGKILL"}.get(end, "SIGSEGV") in text
    assert world["rank"] == [0, 1, 2]


def test_a_rank_that_died_between_cells_is_noticed(world):
    os.kill(world["__import__('os').getpid()"][2], signal.SIGKILL)
    time.sleep(0.3)
    text = str(world.run("x = 1", check=False).failure)
    assert text.startswith("rank 2 of 3 failed before this cell began") and "SIGKILL" in text
    assert world["rank"] == [0, 1, 2]


def test_sys_exit_in_a_cell_is_an_error_and_the_rank_stays(world):
    world.run("x = 1")
    assert "sys.exit" in str(world.run("import sys\nif rank == 0: sys.exit(2)", check=False).failure)
    assert world["x"] == [1, 1, 1]


def test_a_chatty_thread_between_cells_does_not_stop_the_next(world):
    world.run(
        "import threading, time\ngo = True\ndef chat():\n    while go: print('x' * 1000)\n"
        "threading.Thread(target=chat, daemon=True).start()"
    )
    time.sleep(0.3)
    assert world["rank"] == [0, 1, 2]
    world.run("go = False")


def test_the_server_may_be_replaced_while_ranks_stay(world):
    """A library that changed on disk gets a new server at the next launch; ranks that stay do stay."""
    world.run("x = 1")
    old = current_server()
    module = ROOT / "course_lib" / "spans.py"
    stat = module.stat()
    try:
        os.utime(module, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        assert launch(int, 1, progress=False).results == [0]
        assert current_server() is not old
        assert world["x"] == [1, 1, 1]
    finally:
        os.utime(module, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    world.close()
    assert wait_until_gone([old.process.pid]) == []


def test_closing_a_world_leaves_nothing_and_says_so_afterwards():
    world = Ranks(2)
    pids = world["__import__('os').getpid()"]
    world.run("import subprocess\nchild = subprocess.Popen(['sleep', '100'], start_new_session=True).pid")
    pids += world["child"]
    world.close()
    world.close()
    assert world.closed and "closed" in repr(world)
    assert wait_until_gone(pids) == []
    with pytest.raises(RuntimeError, match=r"closed; make new ones with Ranks"):
        world.run("1")


def test_a_forgotten_world_ends():
    world = Ranks(2)
    pids = world["__import__('os').getpid()"]
    del world
    gc.collect()
    assert wait_until_gone(pids) == []


def test_several_worlds_live_side_by_side_and_the_latest_is_the_magic_s():
    with Ranks(1) as one, Ranks(2) as two:
        one["x"], two["x"] = 1, 2
        assert one["x"] == [1] and two["x"] == [2, 2]
        assert launch(int, 1, progress=False).results == [0]
        assert latest() is two
        assert _parse("", {})[0] is two
        assert _parse("one", {"one": one})[0] is one
        two.close()
        assert latest() is one
    assert latest() is None


def test_the_magic_s_line_is_read_and_its_mistakes_explained(world):
    from IPython.core.error import UsageError

    assert _parse("0,2", {})[1:] == ([0, 2], {})
    assert _parse("0, 2", {})[1] == [0, 2]
    assert _parse("0-1", {})[1] == [0, 1]
    assert _parse("timeout=2.5 check=False 1", {})[1:] == ([1], {"timeout": 2.5, "check": False})
    with pytest.raises(UsageError, match="'all' is not known: %%ranks takes ranks"):
        _parse("all", {})
    with pytest.raises(ValueError, match="rank 3 does not exist: there are ranks 0 to 2"):
        world.run("1", [0, 3])
    world.close()
    with pytest.raises(UsageError, match="there are no ranks yet"):
        _parse("", {})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"nproc": 0}, ValueError, "pass 1 or more"),
        ({"nproc": True}, TypeError, "not a whole number"),
        ({"nproc": 2.5}, TypeError, "not a whole number"),
        ({"nproc": 100_000}, ValueError, "more than this machine can carry"),
        ({"pace": 1}, TypeError, "is not a Pace"),
        ({"timeout": 0}, ValueError, "must be more than 0"),
        ({"backend": "smoke-signals"}, ValueError, "smoke-signals"),
    ],
)
def test_bad_input_is_refused_before_anything_starts(arguments, error, message):
    with pytest.raises(error, match=message):
        Ranks(**arguments)


def test_a_cell_that_is_no_python_says_where(world):
    with pytest.raises(CellError, match=r"line 2\n.*def f\(:"):
        world.run("x = 1\ndef f(:")
    with pytest.raises(CellError, match="% and ! commands do not run on ranks"):
        world.run("!ls")


def test_ranks_cannot_be_made_on_a_rank(world):
    text = str(world.run("from course_lib import Ranks\nRanks(1)", check=False).failure)
    assert "Ranks was called inside rank 0" in text


def test_without_a_backend_the_group_is_the_learner_s_own():
    with Ranks(2, backend=None) as world:
        for _ in range(3):  # set-up and clean-up, more than once
            world.run(
                "dist.init_process_group()\nx = torch.ones(1)\n"
                "dist.all_reduce(x)\ndist.destroy_process_group()"
            )
            assert world["x.item()"] == [2.0, 2.0]
        world.run("dist.init_process_group()")
        failed = world.run("if rank: 1 / 0\ndist.barrier()", check=False)
        assert "make it anew with init_process_group" in " ".join(str(failed.failure).split())
        world.run("dist.init_process_group()\nx = torch.ones(1)\ndist.all_reduce(x)")
        assert world["x.item()"] == [2.0, 2.0]


def test_a_function_may_make_its_process_group_more_than_once():
    """One store serves the job: a second group must not find the addresses that the first left there."""

    def work():
        sums = []
        for _ in range(8):
            dist.init_process_group()
            ones = torch.ones(1)
            dist.all_reduce(ones)
            sums.append(ones.item())
            dist.destroy_process_group()
        return sums

    assert launch(work, 2, backend=None, timeout=20).results == [[2.0] * 8] * 2


def test_ranks_listen_on_loopback_only(world):
    world.run("import psutil\nown = psutil.Process().net_connections(kind='inet')")
    listening = world["[c.laddr.ip for c in own if c.status == psutil.CONN_LISTEN]"]
    assert any(listening)
    assert all(ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for ips in listening for ip in ips)


def interrupted(world: Ranks, source: str, after: float = 0.5) -> str:
    """What is told when an interrupt comes `after` seconds into a cell."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(JobInterrupted) as caught:
            world.run(source)
    finally:
        timer.join()
    return " ".join(str(caught.value).split())


def test_an_interrupt_ends_the_cell_and_keeps_the_variables(world):
    world.run("x = 1")
    text = interrupted(world, "import time\nx = 2\nwhile True: time.sleep(0.01)")
    assert "You interrupted the cell" in text and "while True" in text and KEEP in text
    assert world["x"] == [2, 2, 2]
    assert world.run("dist.barrier()").failure is None


def test_an_interrupt_frees_ranks_that_wait_for_one_that_can_be_stopped(world):
    world.run("x = 1")
    text = interrupted(world, "import time\nif rank == 0: time.sleep(60)\ndist.barrier()")
    assert "ranks 1 and 2: in barrier" in text and KEEP in text
    world.run("y = torch.ones(1); dist.all_reduce(y)")
    assert world["y.item() + x"] == [4.0] * 3


def test_an_interrupt_of_ranks_that_cannot_be_stopped_starts_them_anew(world):
    text = interrupted(world, "if rank: dist.barrier()\nelse: dist.recv(torch.ones(1), 1)")
    assert GONE in text
    assert world["rank"] == [0, 1, 2]


def test_nothing_survives_a_notebook_that_is_killed(tmp_path):
    script = tmp_path / "notebook.py"
    script.write_text(
        textwrap.dedent(
            """
            import time
            from course_lib import Ranks
            world = Ranks(2)
            world.run("import os, subprocess as s\\nchild = s.Popen(['sleep', '100']).pid\\nme = os.getpid()")
            print(*world["me"], *world["child"], flush=True)
            world.run("while True: pass", timeout=100)
            """
        )
    )
    notebook = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert notebook.stdout is not None
    pids = [int(pid) for pid in notebook.stdout.readline().split()]
    assert len(pids) == 4 and all(psutil.pid_exists(pid) for pid in pids)
    notebook.kill()
    notebook.communicate()
    assert wait_until_gone(pids) == []


def run_notebook(*cells: str, **options) -> list:
    """The cells after they have run in a real kernel. A process of its own keeps its sockets to itself."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    code = (
        "import nbclient, nbformat, sys; notebook = nbformat.read(sys.stdin, 4);"
        f"nbclient.NotebookClient(notebook, timeout=60, kernel_name='python3', **{options}).execute();"
        "nbformat.write(notebook, sys.stdout)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=nbformat.writes(notebook),
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return nbformat.reads(done.stdout, 4).cells


def test_the_magic_works_in_a_real_kernel_without_a_front_end():
    cells = run_notebook(
        "from course_lib import Ranks\nworld = Ranks(nproc=2)",
        "%%ranks\nx = torch.ones(1) * rank\nprint('hello from', rank)\ndist.all_reduce(x)\nx",
        "%%ranks 1\nx += 10",
        "values = [x.item() for x in world['x']]\nassert values == [1.0, 11.0], values\nvalues",
        "%%ranks check=False\nif rank == 1:\n    x.missing",
        "del world",
    )
    shown = cells[1].outputs[0]["data"]
    assert shown["text/plain"].splitlines()[:2] == ["rank 0: hello from 0", "rank 0: tensor([1.])"]
    assert "rank 1" in shown["text/html"] and cells[2].outputs == []
    failed = cells[4].outputs[0]["data"]["text/plain"]
    assert "cell In[5], line 3, in <module>\n    x.missing" in failed, failed


def test_a_failing_cell_stops_the_notebook_with_its_own_story():
    cells = run_notebook(
        "from course_lib import Ranks\nworld = Ranks(nproc=2)",
        "%%ranks\nprint('before')\nif rank == 1:\n    1 / 0",
        "%%ranks\ndef f(:",
        "%%ranks nonsense\n1",
        allow_errors=True,
    )
    shown, error = cells[1].outputs
    assert "rank 0: before" in shown["data"]["text/plain"]
    assert error["ename"] == "RankError" and "cell In[2], line 4" in error["evalue"]
    assert "session.py" not in "".join(error["traceback"])
    assert cells[2].outputs[0]["ename"] == "CellError" and "line 2" in cells[2].outputs[0]["evalue"]
    assert "'nonsense' is not known" in str(cells[3].outputs)


def test_the_magic_without_a_world_says_what_to_do():
    (_, cell) = run_notebook("import course_lib", "%%ranks\n1", allow_errors=True)
    assert "there are no ranks yet: make some first" in str(cell.outputs)


def test_no_rank_outlives_these_tests():
    assert wait_until_gone([process.pid for process in rank_processes()]) == []
