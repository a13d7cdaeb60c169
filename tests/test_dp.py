"""Data parallel by hand: the gradients of one process, books that add up, a main device that stands out."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import nn

from course_lib.dp import DataParallelByHand
from course_lib.dp_ledger import (
    APPLY,
    BACKWARD,
    GATHER,
    IN_ORDER,
    MOVEMENTS,
    REDUCE,
    REPLICATE,
    SCATTER,
    SCATTER_GRADIENTS,
    Memory,
    movement_bytes,
    parts_of,
    peak_bytes,
)
from course_lib.pace import Pace
from course_lib.paced_layers import paced_mlp
from course_lib.tasks import transformer


class Nested(nn.Module):
    """Nested inputs, keywords, a buffer, a frozen, a tied and an unused parameter; nested outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7), nn.Linear(7, 7)
        self.second.weight.requires_grad_(False)
        self.again = nn.Linear(7, 7)
        self.again.bias = self.first.bias
        self.unused = nn.Linear(2, 2)
        self.register_buffer("scale", torch.linspace(1, 2, 7))
        self.double()

    def forward(self, pair, *, options, factor=1.0):
        left, (right, names) = pair
        hidden = torch.tanh(self.first(left)) * self.scale + self.first(right) * factor
        hidden = self.again(self.second(hidden)) + options["shift"]
        return {"hidden": hidden, "pair": (hidden.square().sum(1), [left, names]), "count": 3}


def nested_inputs(rows):
    generator = torch.Generator().manual_seed(rows)
    left, right = (torch.randn(rows, 5, dtype=torch.float64, generator=generator) for _ in range(2))
    shift = torch.randn(rows, 1, dtype=torch.float64, generator=generator)
    return ((left, (right, "names")),), {"options": {"shift": shift, "mode": None}, "factor": 0.5}


def nested_loss(output):
    return output["hidden"].square().mean() + output["pair"][0].tanh().mean() + output["pair"][1][0].mean()


def gradients(model):
    return {name: p.grad for name, p in model.named_parameters()}


def same(ours, expected):
    assert ours.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert ours[name] is None, name
        else:
            torch.testing.assert_close(ours[name], gradient, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("rows", [1, 2, 5, 8, 13, 24])
def test_gradients_are_those_of_one_process_on_the_whole_batch(devices, rows):
    torch.manual_seed(0)
    alone = Nested()
    net = copy.deepcopy(alone)
    args, kwargs = nested_inputs(rows)
    nested_loss(alone(*args, **kwargs)).backward()
    model = DataParallelByHand(net, devices)
    output = model(*args, **kwargs)
    nested_loss(output).backward()
    same(gradients(net), gradients(alone))
    assert output["count"] == 3 and output["pair"][1][1] == "names"
    assert model.step.rows == parts_of(rows, devices) and sum(model.step.rows) == rows


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_five_steps_of_a_transformer_end_in_the_weights_of_one_process(devices):
    alone = transformer().double()
    net = copy.deepcopy(alone)
    model = DataParallelByHand(net, devices)
    for step in range(5):
        batch = torch.randint(12, (7, 6), generator=torch.Generator().manual_seed(step))
        for each, forward in ((alone, alone), (net, model)):
            each.zero_grad()
            forward(batch).log_softmax(-1)[..., 0].mean().backward()
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter -= 0.1 * parameter.grad
    for name, value in alone.state_dict().items():
        torch.testing.assert_close(net.state_dict()[name], value, rtol=1e-10, atol=1e-12)


def test_gradients_reach_what_lies_before_the_model_and_accumulate_over_passes():
    torch.manual_seed(0)
    before, net = nn.Linear(4, 6).double(), nn.LSTM(6, 3, batch_first=True).double()
    batch = torch.randn(6, 2, 4, dtype=torch.float64)
    wanted = []
    for model in (net, DataParallelByHand(net, 3)):
        before.zero_grad()
        net.zero_grad()
        for _ in range(2):
            output, _ = model(before(batch))
            output.square().mean().backward()
        wanted.append({**gradients(before), **gradients(net)})
    same(wanted[1], wanted[0])


def test_a_number_from_each_device_becomes_a_vector():
    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 1).double()

        def forward(self, x):
            return self.layer(x).sum()

    net = Loss()
    batch = torch.randn(7, 3, dtype=torch.float64)
    losses = DataParallelByHand(net, 4)(batch)
    assert losses.shape == (4,)
    losses.sum().backward()
    torch.testing.assert_close(net.layer.weight.grad, batch.sum(0, keepdim=True), rtol=1e-10, atol=1e-12)


def test_without_gradients_only_the_first_four_movements_happen_and_replicas_go():
    model = DataParallelByHand(nn.Linear(3, 2), 4)
    with torch.no_grad():
        output = model(torch.ones(8, 3))
    assert [m.name for m in model.step.movements] == [SCATTER, REPLICATE, APPLY, GATHER]
    assert not output.requires_grad
    assert all(device.memory.snapshot() == {} for device in model.fleet.devices[1:])


def test_as_in_nn_dataparallel_buffers_follow_device_0_and_replicas_are_thrown_away():
    torch.manual_seed(0)
    net = nn.BatchNorm1d(3).double()
    batch = torch.randn(8, 3, dtype=torch.float64)
    DataParallelByHand(net, 4)(batch)
    torch.testing.assert_close(net.running_mean, 0.1 * batch[:2].mean(0))
    assert net.num_batches_tracked == 1


def test_the_modules_own_parameters_and_outputs_are_never_changed_by_adding_gradients():
    class Shift(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.zeros(1, 2, dtype=torch.float64)) for _ in range(2))

        def forward(self, x):
            return x + self.a + self.b

    net = Shift()
    output = DataParallelByHand(net, 2)(torch.ones(2, 2, dtype=torch.float64))
    given = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    output.backward(given)
    assert given.tolist() == [[1, 2], [3, 4]]
    assert net.a.grad.tolist() == net.b.grad.tolist() == [[4, 6]]


def books(devices, rows):
    """A pass of a plain model, and the sizes of everything that was in it."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 5)).double()
    net.eval()
    inputs = torch.randn(rows, 6, dtype=torch.float64)
    model = DataParallelByHand(net, devices)
    output = model(inputs)
    output.square().mean().backward()
    sizes = {
        "parameters": sum(p.nbytes for p in net.parameters()),
        "buffers": sum(b.nbytes for b in net.buffers()),
        "input_row": inputs[0].nbytes,
        "output_row": output[0].nbytes,
    }
    return model, inputs, output, net, sizes


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("rows", [1, 4, 5, 8, 13])
def test_the_books_are_what_the_tensors_add_up_to_and_what_the_formula_says(devices, rows):
    model, inputs, output, net, sizes = books(devices, rows)
    parts, whole_model = inputs.chunk(devices), sum(t.nbytes for t in net.state_dict().values())
    others = len(parts) - 1
    expected = {
        SCATTER: sum(part.nbytes for part in parts[1:]),
        REPLICATE: others * whole_model,
        APPLY: 0,
        GATHER: sum(part.nbytes for part in output.detach().chunk(devices)[1:]),
        SCATTER_GRADIENTS: sum(part.nbytes for part in output.detach().chunk(devices)[1:]),
        REDUCE: others * sum(p.grad.nbytes for p in net.parameters()),
    }
    step = model.step
    assert step.bytes_by_movement() == expected == movement_bytes(rows, devices, **sizes)
    assert [m.name for m in step.movements] == list(IN_ORDER)
    assert step.sent(0) == sum(expected[name] for name in (SCATTER, REPLICATE, SCATTER_GRADIENTS))
    assert step.received(0) == expected[GATHER] + expected[REDUCE]
    for device in range(1, devices):
        used = device < len(parts)
        assert step.received(device) == (
            whole_model + parts[device].nbytes + len(parts[device]) * sizes["output_row"] if used else 0
        )
    assert model.bytes_sent == [step.sent(device) for device in range(devices)]
    assert model.bytes_received == [step.received(device) for device in range(devices)]
    assert sum(model.bytes_sent) == sum(model.bytes_received)


@pytest.mark.parametrize("devices", range(1, 9))
@pytest.mark.parametrize("width", [2, 400])  # gradients, or activations, make the peak
def test_each_devices_peak_is_what_the_formula_says(devices, width):
    each = 6
    net = nn.Sequential(nn.Linear(3, 4), *(nn.Tanh() for _ in range(width // 2)), nn.Linear(4, 5))
    inputs = torch.randn(each * devices, 3)
    model = DataParallelByHand(net, devices)
    output = model(inputs)
    output.square().sum().backward()
    activations = model.step[APPLY].memory[devices - 1]["activations"]
    main, other = peak_bytes(
        each * devices,
        devices,
        parameters=sum(p.nbytes for p in net.parameters()),
        input_row=12,
        output_row=20,
        activation_row=activations // each,
    )
    assert model.step.peak(0) == main
    assert all(model.step.peak(device) == other for device in range(1, devices))


def test_device_0s_excess_grows_by_the_same_bytes_with_each_device():
    excess, traffic = [], []
    for devices in range(2, 9):
        step = books(devices, 4 * devices)[0].step
        excess.append(step.peak(0) - step.peak(1))
        traffic.append(step.sent(0) + step.received(0))
    assert len({b - a for a, b in itertools.pairwise(excess)}) == 1
    assert len({b - a for a, b in itertools.pairwise(traffic)}) == 1
    assert traffic[-1] == 7 * traffic[0]
    assert min(b - a for a, b in itertools.pairwise(excess)) == 4 * (48 + 2 * 40)


def test_nothing_is_held_once_a_step_is_over_and_its_outputs_are_gone():
    model, inputs, output, net, sizes = books(3, 9)
    assert all(not held for held in model.step[REDUCE].memory[1:])
    assert all(device.memory.snapshot() == {} for device in model.fleet.devices[1:])
    gc.disable()
    try:
        del output
        net.zero_grad()
        held = model.fleet.devices[0].memory.snapshot()
    finally:
        gc.enable()
    assert held == {"parameters": sizes["parameters"] + sizes["buffers"], "inputs": inputs.nbytes}


def test_memory_counts_a_storage_once_and_until_its_last_view_has_gone():
    memory = Memory()
    tensor = torch.ones(10)
    memory.hold("a", [tensor, tensor[2:]])
    view = tensor[:1]
    memory.hold("b", [view])
    assert memory.snapshot() == {"a": 40}
    del tensor
    assert memory.snapshot() == {"a": 40}
    del view
    assert memory.snapshot() == {} and memory.peak == {"a": 40}


@pytest.mark.parametrize("devices", [0, 9, True, 2.5, None])
def test_a_number_of_devices_that_cannot_be_is_refused(devices):
    with pytest.raises(ValueError, match="from 1 to 8"):
        DataParallelByHand(nn.Linear(1, 1), devices)


def test_inputs_that_cannot_be_cut_alike_are_refused_before_anything_runs():
    model = DataParallelByHand(nn.Bilinear(2, 2, 1), 2)
    with pytest.raises(ValueError, match="3 and 4 rows"):
        model(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match="without dimensions"):
        model(torch.ones(3, 2), torch.tensor(1.0))
    assert model.step is None or not model.step.movements


def test_an_error_on_a_device_names_the_device_and_leaves_the_model_usable():
    class Picky(nn.Linear):
        def forward(self, x):
            return super().forward(x.view(2, 3))

    model = DataParallelByHand(Picky(3, 1), 3)
    with pytest.raises(
        RuntimeError, match=r"device 2 of 3 failed in parallel apply, with 1 of the batch's 5"
    ) as e:
        model(torch.ones(5, 3))
    assert "invalid for input of size 3" in str(e.value.__cause__)
    assert model(torch.ones(6, 3)).shape == (6, 1)


def test_going_backward_twice_says_what_to_do():
    loss = DataParallelByHand(nn.Linear(3, 1), 2)(torch.ones(4, 3)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="go forward again"):
        loss.backward()


def test_one_inside_another_is_refused_instead_of_waiting_for_ever():
    model = DataParallelByHand(DataParallelByHand(nn.Linear(3, 1), 2), 2)
    with pytest.raises(RuntimeError, match="inside another"):
        model(torch.ones(4, 3))


def test_many_models_share_eight_threads_and_are_freed():
    gone = []
    for _ in range(20):
        model = DataParallelByHand(nn.Linear(3, 1), 8)
        model(torch.ones(8, 3)).sum().backward()
        gone.append(weakref.ref(model))
    del model
    gc.collect()
    assert sum(t.name.startswith("virtual-device") for t in threading.enumerate()) == 8
    assert all(reference() is None for reference in gone)


def test_an_empty_batch_and_a_batch_without_tensors_go_to_one_device():
    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.ones(2))

        def forward(self, times):
            return self.value * times

    model = DataParallelByHand(Constant(), 4)
    model(3).sum().backward()
    assert model.module.value.grad.tolist() == [3, 3] and model.step.used == 1
    assert DataParallelByHand(nn.Linear(3, 2), 4)(torch.ones(0, 3)).shape == (0, 2)


def test_a_step_shows_its_books_as_text_and_as_a_table():
    step = books(4, 8)[0].step
    for shown in (repr(step), step._repr_html_()):
        assert all(name in shown for name in MOVEMENTS)
        assert f"{step.bytes_by_movement()[REDUCE]:,} in" in shown
    with pytest.raises(KeyError, match="scatter inputs"):
        step["teleport"]


@pytest.mark.timing
def test_movements_take_what_device_0s_link_makes_them_take():
    pace = Pace(gbps=0.05, latency_us=2000)
    net = paced_mlp(layers=2, width=128, forward_ms=20, backward_ms=40)
    size = 2 * 128 * 128 * 4
    seconds = {}
    # The first backward pass of a process imports half of PyTorch.
    DataParallelByHand(net, 8)(torch.randn(64, 128)).square().mean().backward()
    for devices in (2, 8):
        model = DataParallelByHand(net, devices, pace)
        model(torch.randn(64, 128)).square().mean().backward()
        step = model.step
        seconds[devices] = {m.name: m.seconds for m in step.movements}
        formula = pace.latency + (devices - 1) * pace.seconds(size)
        assert formula <= step[REPLICATE].seconds + 1e-4
        assert step.kind == "paced"
    # Eight devices wait for seven copies of the model, two for one; they compute as long as two do.
    for name in (REPLICATE, REDUCE):
        assert 4 < seconds[8][name] / seconds[2][name] < 8.5
    for name in (APPLY, BACKWARD):
        assert 0.5 < seconds[8][name] / seconds[2][name] < 2
