"""What the probe records: the parts of a step in their order, the buckets with their bytes, and no change."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from course_lib import Pace, launch, probe
from course_lib.spans import LINK, select

pytestmark = pytest.mark.usefixtures("nothing_left")

LAYERS, WIDTH = 4, 64


def model_of_layers(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def train(model, steps=3, watch=True, hook=None, batch=8):
    if watch:
        probe(model)
    if hook is not None:
        model.register_comm_hook(None, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(steps * batch, WIDTH, generator=generator))
    for (inputs,) in torch.utils.data.DataLoader(data, batch_size=batch):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("pace", [None, Pace(gbps=0.02)])
def test_a_step_is_recorded_in_its_order_on_every_rank(pace):
    def work():
        train(DistributedDataParallel(model_of_layers(), bucket_cap_mb=0.02))

    run = launch(work, 2, pace=pace)
    for rank in range(2):
        for step in range(3):
            of_step = {s.name: s for s in select(run.spans, rank=rank, step=step) if s.lane != LINK}
            assert set(of_step) == {"input", "forward", "backward", "wait", "optimizer"}
            order = [of_step[n] for n in ("input", "forward", "backward", "wait", "optimizer")]
            assert all(a.end <= b.start + 1e-9 for a, b in itertools.pairwise(order))
            transfers = select(run.spans, rank=rank, step=step, lane=LINK, name="all_reduce")
            assert all(of_step["forward"].end <= t.end <= of_step["wait"].end + 0.005 for t in transfers)


@pytest.mark.parametrize("pace", [None, Pace(), Pace(gbps=1)])
def test_bytes_of_buckets_add_up_to_the_parameters(pace):
    def work():
        train(DistributedDataParallel(model_of_layers(), bucket_cap_mb=0.02))

    run = launch(work, 2, pace=pace)
    parameters = sum(p.numel() * 4 for p in model_of_layers().parameters())
    for step in range(3):
        buckets = [
            s for s in run.spans if s.rank == 0 and s.step == step and s.lane == LINK and "bucket" in s.detail
        ]
        assert sum(s.bytes for s in buckets) == parameters
        assert len(buckets) == (1 if step == 0 else len(buckets))
    assert len([s for s in run.spans if s.rank == 0 and s.step == 2 and "bucket" in s.detail]) > 1


def test_a_watched_job_learns_exactly_what_an_unwatched_one_does():
    def work(watch):
        return train(DistributedDataParallel(model_of_layers()), watch=watch)

    watched, unwatched = (launch(work, 2, args=(watch,)).results[0] for watch in (True, False))
    assert all(torch.equal(a, b) for a, b in zip(watched, unwatched, strict=True))


def test_the_learners_own_hook_still_runs_inside_the_probe():
    def work():
        def double(state, bucket):
            future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
            return future.then(lambda done: done.value()[0] * 2)

        model = DistributedDataParallel(model_of_layers())
        train(model, steps=1, hook=double)
        return [p.grad.clone() for p in model.parameters()]

    def plain():
        model = DistributedDataParallel(model_of_layers())
        train(model, steps=1, watch=False)
        return [p.grad.clone() for p in model.parameters()]

    hooked, averaged = launch(work, 2), launch(plain, 2)
    assert all(torch.allclose(a, 4 * b) for a, b in zip(hooked.results[0], averaged.results[0], strict=True))
    assert [s for s in hooked.spans if s.name == "all_reduce"]


def test_a_hook_registered_before_the_probe_is_refused_with_what_to_do():
    def work():
        model = DistributedDataParallel(model_of_layers())
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        model.register_comm_hook(None, allreduce_hook)
        probe(model)

    with pytest.raises(Exception, match=r"call probe\(model\) before"):
        launch(work, 2)


def test_a_plain_model_is_watched_too_and_evaluation_is_no_step():
    def work():
        model = model_of_layers()
        train(model)
        model.eval()
        model(torch.zeros(1, WIDTH))

    run = launch(work, 1)
    assert sorted({s.step for s in run.spans if s.name == "backward"}) == [0, 1, 2]
    assert not select(run.spans, lane=LINK)


def test_ranks_share_one_clock():
    def work():
        from course_lib import span

        with span("together"):
            dist.barrier()

    run = launch(work, 4)
    together = select(run.spans, name="together")
    assert max(s.start for s in together) <= min(s.end for s in together)


def test_probing_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        probe(3)


def test_explain_adds_up_and_gives_advice():
    def work():
        train(DistributedDataParallel(model_of_layers()))

    run = launch(work, 2, pace=Pace(gbps=0.02))
    explanation = run.explain()
    spans = select(run.spans, rank=0, step=explanation.step)
    assert explanation.step_seconds == pytest.approx(
        max(s.end for s in spans) - min(s.start for s in spans), rel=1e-6
    )
    assert "one bucket" in explanation.advice
    assert "exposed communication" in repr(explanation)
    with pytest.raises(ValueError, match="probe"):
        launch(os.getpid, 1).explain()
