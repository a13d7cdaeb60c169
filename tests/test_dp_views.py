"""What is seen of data parallel: the stepper, the figures, the GIL experiment, and the real thing on GPUs."""

from __future__ import annotations

import os
import re
import time
import xml.etree.ElementTree as ET

import pytest

os.environ.setdefault("MPLBACKEND", "agg")

import torch
from matplotlib import pyplot
from torch import nn

from course_lib import dp_gpu, dp_plots, gil, launch
from course_lib.dp import DataParallelByHand
from course_lib.dp_ledger import IN_ORDER, MOVEMENTS, REPLICATE, peak_bytes
from course_lib.dp_stepper import DPStepper, picture
from course_lib.gil import PROCESSES, PYTHON, THREADS, C, Gain, GilResult, gil_experiment
from course_lib.pace import Pace


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 50))


@pytest.fixture(scope="module")
def stepper():
    return DPStepper(net(), torch.randn(32, 32))


def step_on(devices, rows=16, pace=None):
    model = DataParallelByHand(net(), devices, pace)
    output = model(torch.randn(rows, 32))
    output.square().mean().backward()
    return model.step


def words(svg):
    return " ".join(text for text in ET.fromstring(svg).itertext())


def test_each_picture_of_the_stepper_is_well_formed_and_names_its_movement(stepper):
    for devices in range(1, 9):
        stepper.devices.value = devices
        for position, name in enumerate(("Before", *IN_ORDER)):
            stepper.go(position)
            assert name in words(stepper.picture.value)
            assert f"device {devices - 1}" in words(stepper.picture.value)


def test_the_buttons_go_forth_and_back_and_stop_at_the_ends(stepper):
    stepper.devices.value = 4
    stepper.go(0)
    assert stepper.previous.disabled and not stepper.next.disabled
    stepper.next.click()
    stepper.next.click()
    assert stepper.position == 2 and REPLICATE in stepper.picture.value
    stepper.previous.click()
    assert stepper.position == 1
    for _ in range(20):
        stepper.next.click()
    assert stepper.position == len(IN_ORDER) and stepper.next.disabled


def test_an_arrow_for_each_other_device_carries_what_the_books_say(stepper):
    stepper.devices.value = 5
    stepper.go(2)
    copies = stepper.step()[REPLICATE].copies
    assert len(copies) == 4
    assert stepper.picture.value.count("<polygon") == 4
    assert (
        len(set(re.findall(r"fill='(#\w+)'/>", "".join(re.findall("<polygon.*?/>", stepper.picture.value)))))
        == 4
    )
    assert f"{net()[0].weight.nbytes // 1024}" in "".join(words(stepper.picture.value))


def test_the_memory_bars_lie_inside_the_picture_on_one_scale(stepper):
    for devices in (2, 8):
        stepper.devices.value = devices
        for position in range(8):
            stepper.go(position)
            for bar in re.findall(r"<rect x='([\d.]+)' y='\d+' width='([\d.]+)'", stepper.picture.value):
                assert float(bar[0]) + float(bar[1]) <= 900


def test_the_stepper_leaves_the_learners_module_alone_and_a_picture_without_a_front_end():
    module = net()
    stepper = DPStepper(module, torch.randn(16, 32), devices=3)
    assert all(parameter.grad is None for parameter in module.parameters())
    bundle = stepper._repr_mimebundle_()
    assert bundle["text/html"].startswith("<svg") and "3 devices before the step" in bundle["text/plain"]


def test_devices_without_rows_are_called_unused():
    assert "device 3 (unused)" in words(picture(step_on(4, rows=5), 1))


@pytest.mark.timing
def test_a_click_is_hundreds_of_times_quicker_than_running_the_step(stepper):
    stepper.devices.value = 8
    began = time.perf_counter()
    for position in range(8):
        stepper.go(position)
    click = (time.perf_counter() - began) / 8
    began = time.perf_counter()
    DPStepper(net(), torch.randn(32, 32))
    assert click < (time.perf_counter() - began) / 5


def texts(ax):
    return " ".join(
        [text.get_text() for text in ax.texts]
        + [ax.get_title(loc) for loc in ("left", "right")]
        + [label.get_text() for label in ax.get_yticklabels()]
    )


def test_the_figure_of_movements_shows_both_directions_of_the_link_and_names_its_kind():
    ax = dp_plots.movements(step_on(3, pace=Pace(gbps=0.01)))
    shown = texts(ax)
    assert all(name in shown for name in MOVEMENTS) and "paced" in shown
    assert "device 0's link, out" in shown and "device 2 computes" in shown
    assert "measured" in texts(dp_plots.movements(step_on(2)))


def test_the_figure_of_memory_has_bars_as_long_as_the_peaks():
    step = step_on(4)
    ax = dp_plots.memory(step)
    for device in range(4):
        bars = [bar for bar in ax.patches if abs(bar.get_y() + bar.get_height() / 2 - device) < 0.1]
        assert sum(bar.get_width() for bar in bars) == step.peak(device)
    assert step.peak(0) > step.peak(1)
    assert "unused" in texts(dp_plots.memory(step_on(4, rows=3)))


def test_figures_of_nothing_say_so():
    step = step_on(2)
    step.movements, step.peaks = [], []
    with pytest.raises(ValueError, match="call the model first"):
        dp_plots.movements(step)
    with pytest.raises(ValueError, match="call the model first"):
        dp_plots.memory(step)
    with pytest.raises(ValueError, match="kind"):
        dp_plots.over_devices([1], {"a": [1]}, {"a": [1]}, title="", kind="guessed")


def test_bytes_by_device_draws_sent_to_the_right_and_received_to_the_left():
    ax = dp_plots.bytes_by_device({"DP": [(300.0, 200.0)], "DDP": [(100.0, 150.0)]}, title="")
    assert [bar.get_width() for bar in ax.patches] == [300, -200, 100, -150]


# Of two threads with Python work, 1.0 can go on at once where nothing else runs, and up to 1.5 were seen on a
# machine with four times as many busy processes as cores: each hand-over of the GIL then queues for a core.
def test_the_gil_experiment_tells_python_work_from_c_work_and_threads_from_processes():
    result = gil_experiment(rounds=4)
    python = result[PYTHON, THREADS].at_once
    for key in ((PYTHON, PROCESSES), (C, THREADS), (C, PROCESSES)):
        assert result[key].at_once > python + 0.2, result
    assert python < 1.75 and "Python" in repr(result) and "<table>" in result._repr_html_()


def test_the_gil_experiment_leaves_this_process_as_it_was():
    import sys

    before = sys.getswitchinterval(), torch.get_num_threads()
    gil_experiment(rounds=1)
    assert (sys.getswitchinterval(), torch.get_num_threads()) == before


def test_on_one_core_the_gil_experiment_says_what_it_needs():
    gains = {(PYTHON, THREADS): Gain((10.0,), (10.0,), (1.0,))}
    alone = GilResult(gains, cores=1)
    assert "needs 2 cores" in alone.note and "needs 2 cores" in repr(alone)
    assert "needs 2 cores" in alone._repr_html_()
    assert GilResult(gains, cores=2).note == ""
    assert "speed-up 1.0" in texts(dp_plots.gil(alone))


@pytest.mark.parametrize("rounds", [0, True, 1.5])
def test_a_number_of_rounds_that_makes_no_sense_is_refused(rounds):
    with pytest.raises(ValueError, match="from 1 on"):
        gil_experiment(rounds)


def test_demand_counts_queueing_for_a_core_where_the_system_tells():
    assert gil._demand() >= 0


def test_on_a_cpu_nn_dataparallel_only_calls_the_module():
    if torch.cuda.is_available():
        pytest.skip("this machine has GPUs")
    calls = []

    class Noting(nn.Linear):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    nn.DataParallel(Noting(3, 2))(torch.ones(8, 3))
    assert calls == [8]


def test_with_fewer_than_two_gpus_the_real_thing_is_not_run_and_says_why():
    assert "needs 2 GPUs, and 1" in dp_gpu.missing(1) and dp_gpu.missing(2) == ""
    if dp_gpu.missing():
        with pytest.raises(RuntimeError, match="needs 2 GPUs"):
            dp_gpu.run_on_gpus(net(), torch.ones(4, 32), torch.sum)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="nn.DataParallel needs two GPUs")
def test_by_hand_is_what_nn_dataparallel_does_on_gpus():
    module, inputs = net(), torch.randn(64, 32)
    real = dp_gpu.run_on_gpus(module, inputs, lambda y: y.square().mean(), devices=2)
    DataParallelByHand(module, 2)(inputs).square().mean().backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(real.gradients[name], parameter.grad, rtol=1e-2, atol=1e-5)
    assert len(real.peaks) == 2 and real.peaks[0] > real.peaks[1] > 0


def ddp_traffic(steps):
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(net())
    for _ in range(steps):
        model(torch.randn(4, 32)).square().mean().backward()


@pytest.mark.parametrize("ranks", [2, 4])
def test_ddp_sends_the_model_once_and_then_gradients_evenly(ranks):
    size = sum(p.nbytes for p in net().parameters())
    few, more = (launch(ddp_traffic, ranks, args=(steps,), pace=Pace(), progress=False) for steps in (1, 5))
    for rank in range(ranks):
        # The second step also broadcasts in which order gradients were ready: a few bytes.
        again = more.traffic[rank]["broadcast"]["bytes_sent"] - few.traffic[rank]["broadcast"]["bytes_sent"]
        assert again < 0.01 * size
        sent = more.traffic[rank]["all_reduce"]["bytes_sent"] - few.traffic[rank]["all_reduce"]["bytes_sent"]
        assert sent == pytest.approx(4 * 2 * (ranks - 1) / ranks * size, abs=8)
    assert sum(row["broadcast"]["bytes_sent"] for row in few.traffic) == pytest.approx(
        (ranks - 1) * size, rel=0.01
    )


def test_peaks_refuse_counts_that_make_no_sense():
    with pytest.raises(ValueError, match="rows=0"):
        peak_bytes(0, 2, parameters=1, input_row=1, output_row=1)
