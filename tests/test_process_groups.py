"""Chapter 02's own claims at length: who holds what, DDP from nothing, and where DDP is not one process."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from course_lib import Pace, Ranks, launch
from course_lib.collective_picture import CollectiveStepper, promise, show
from course_lib.provenance import COLLECTIVES, blocks, expected, read
from course_lib.tasks import digits, next_token_loss, tokens, transformer

cloudpickle.register_pickle_by_value(sys.modules[__name__])
pytestmark = pytest.mark.usefixtures("nothing_left")
NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "02_process_groups.ipynb"


def from_the_notebook(*names: str) -> list:
    """Functions as the chapter's cells define them."""
    namespace: dict = {"dist": dist, "nn": nn, "torch": torch}
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "code" and any(f"def {name}(" in source for name in names):
            exec(source, namespace)
    return [namespace[name] for name in names]


def held_after(name: str) -> tuple:
    """In a rank: what it holds before and after a collective."""
    n, rank = dist.get_world_size(), dist.get_rank()
    before = blocks(n if name in ("scatter", "reduce_scatter", "all_to_all") else 1)
    mine = before.clone()
    room = [torch.zeros_like(mine) for _ in range(n)]
    if name == "broadcast":
        dist.broadcast(mine, 0)
    elif name == "reduce":
        dist.reduce(mine, 0)
        mine = mine if rank == 0 else None
    elif name == "all_reduce":
        dist.all_reduce(mine)
    elif name == "scatter":
        mine = torch.zeros_like(before[0])
        dist.scatter(mine, list(before) if rank == 0 else None, 0)
        before = before if rank == 0 else None
    elif name == "gather":
        dist.gather(before, room if rank == 0 else None, 0)
        mine = room if rank == 0 else None
    elif name == "all_gather":
        dist.all_gather(room, before)
        mine = room
    elif name == "reduce_scatter":
        mine = torch.zeros_like(before[:1])
        dist.reduce_scatter_single(mine, before)
    else:
        mine = torch.zeros_like(before)
        dist.all_to_all_single(mine, before)
    return before, mine


@pytest.mark.parametrize("nproc", [2, 3, 4, 8])
def test_each_picture_is_what_the_collective_really_does(nproc):
    def work():
        return {name: held_after(name) for name in COLLECTIVES}

    results = launch(work, nproc, backend="gloo").results
    for name in COLLECTIVES:
        before, after = ([read(result[name][i]) for result in results] for i in (0, 1))
        assert (before, after) == expected(name, nproc), name
        drawn = show([r[name][0] for r in results], [r[name][1] for r in results], name)
        assert repr(drawn).splitlines()[1:] == repr(promise(name, nproc)).splitlines()[1:]


def test_a_sum_that_holds_a_piece_twice_is_no_collective_s_result():
    twice = torch.zeros(1, 2, 8)
    twice[0, 1, 0] = 2
    with pytest.raises(ValueError, match="more than once"):
        read(twice)
    with pytest.raises(ValueError, match="choose one of broadcast"):
        expected("shuffle", 4)


def test_the_stepper_shows_one_sender_after_the_other_and_leaves_a_static_picture():
    stepper = CollectiveStepper("all_reduce", 4)
    assert "a+b+c+d" in repr(stepper)
    stepper.step.value = 2
    assert "a+b\n" in repr(stepper) and "a+b+c" not in repr(stepper)
    stepper.ranks.value = 8
    assert stepper.step.value == stepper.step.max == 8 and "a+b+c+d+e+f+g+h" in repr(stepper)
    stepper.collective.value = "all_to_all"
    bundle = stepper._repr_mimebundle_()
    assert bundle["text/html"].count("<svg") == 1 and "all_to_all on 8 ranks" in bundle["text/plain"]


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        return self.last(self.second(self.first(x).relu()).relu())


class Frozen(Tied):
    def __init__(self):
        super().__init__()
        self.first.bias.requires_grad_(False)
        self.last.weight.requires_grad_(False)


class Language(nn.Module):
    """A transformer with tied embeddings."""

    def __init__(self):
        super().__init__()
        self.inner = transformer(seed=None)

    def forward(self, x):
        return self.inner(x)


def data_for(kind):
    if kind is Language:
        return *tokens(24), next_token_loss
    images, labels = digits("train")
    return images[:24].double(), labels[:24], cross_entropy


def trained(how, kind, broadcast_parameters, average_gradients, steps=5):
    """In a rank: the weights after some steps on reshuffled data, and whether rank 0's start was used."""
    torch.manual_seed(10 + dist.get_rank())
    model = kind().double()
    inputs, targets, loss = data_for(kind)
    if how == "by hand":
        broadcast_parameters(model)
    wrapped = DistributedDataParallel(model) if how == "DDP" else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    for step in range(steps):
        order = torch.randperm(24, generator=torch.Generator().manual_seed(step))
        mine = order.chunk(dist.get_world_size())[dist.get_rank()]
        optimizer.zero_grad()
        loss(wrapped(inputs[mine]), targets[mine]).backward()
        if how == "by hand":
            average_gradients(model)
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("kind", [Tied, Frozen, Language])
@pytest.mark.parametrize("nproc", [2, 3, 4])
def test_ddp_from_nothing_equals_one_process_and_ddp(kind, nproc):
    ours = from_the_notebook("broadcast_parameters", "average_gradients")
    alone = launch(trained, 1, args=("alone", kind, *ours), backend="gloo").results[0]
    start = launch(trained, 1, args=("alone", kind, *ours, 0), backend="gloo").results[0]
    assert max((alone[name] - start[name]).abs().max() for name in alone) > 1e-3
    for how in ("by hand", "DDP"):
        for state in launch(trained, nproc, args=(how, kind, *ours), backend="gloo").results:
            for name, value in alone.items():
                torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-11)


def test_without_the_broadcast_or_the_average_it_does_not():
    """The test above can fail: the ranks really start differently, and really see different rows."""
    broadcast, average = from_the_notebook("broadcast_parameters", "average_gradients")

    def nothing(model):
        pass

    alone = launch(trained, 1, args=("alone", Tied, nothing, nothing), backend="gloo").results[0]
    for pair in ((nothing, average), (broadcast, nothing)):
        first, second = launch(trained, 2, args=("by hand", Tied, *pair), backend="gloo").results
        assert (first["last.weight"] - second["last.weight"]).abs().max() > 1e-3
        assert (first["last.weight"] - alone["last.weight"]).abs().max() > 1e-3


def test_ddp_sends_the_model_once_and_then_only_gradients():
    with Ranks(3, pace=Pace()) as world:
        world.run(
            "from torch.nn.parallel import DistributedDataParallel\n"
            "model = DistributedDataParallel(torch.nn.Linear(100, 50))"
        )
        size = (100 * 50 + 50) * 4
        assert size <= world.last.traffic[0]["broadcast"]["payload_bytes"] < size + 1000
        for _ in range(3):
            world.run("model(torch.ones(2, 100)).sum().backward()")
            traffic = world.last.traffic[0]
            assert traffic["all_reduce"]["payload_bytes"] == size
            assert traffic["broadcast"]["payload_bytes"] < 1000


def test_batch_norm_takes_its_own_rows_and_ddp_then_rank_0_s_statistics():
    images = digits("train")[0][:32].double()

    def work():
        model = DistributedDataParallel(nn.BatchNorm1d(64).double())
        model(images.chunk(dist.get_world_size())[dist.get_rank()])
        own = model.module.running_mean.clone()
        model.eval()
        model(images)
        return own, model.module.running_mean

    results = launch(work, 4, backend="gloo").results
    for rank, (own, after) in enumerate(results):
        torch.testing.assert_close(own, images.chunk(4)[rank].mean(0) * 0.1)
        assert torch.equal(after, results[0][0])
    assert not torch.equal(results[1][0], results[0][0])


def test_sync_batch_norm_refuses_the_cpu():
    """The chapter says so."""

    def work():
        return nn.SyncBatchNorm(4)(torch.ones(2, 4))

    assert "SyncBatchNorm expected input tensor to be on GPU" in str(launch(work, 2, check=False).failure)
