"""Chapter 04's experiment: DDP's own reducer on the paced lab, against the simulator."""

from __future__ import annotations

import statistics
import time

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from course_lib import Pace, launch, probe
from course_lib.buckets import assign_buckets, bucket_bytes
from course_lib.ddp_log import ddp_log
from course_lib.paced_layers import paced_mlp
from course_lib.simulate import Layer, best, sweep_bucket_caps
from course_lib.spans import select

pytestmark = pytest.mark.usefixtures("nothing_left")

RANKS, LAYERS, WIDTH, FORWARD_MS, BACKWARD_MS = 4, 12, 384, 8, 16
CAPS = [0.5, 2, 4, 25]
SIZES = [WIDTH * WIDTH * 4] * LAYERS


def train(cap, steps=6, model=None):
    model = model or paced_mlp(LAYERS, WIDTH, FORWARD_MS, BACKWARD_MS)
    model = probe(DistributedDataParallel(model, bucket_cap_mb=cap))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    inputs = torch.randn(8, WIDTH)
    seconds = []
    for _ in range(steps):
        start = time.monotonic()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        seconds.append(time.monotonic() - start)
    return seconds, ddp_log(model)


@pytest.mark.timing
@pytest.mark.parametrize(
    ("pace", "expected_best"),
    [(Pace(0.25, 50), 0.5), (Pace(1, 6000), 2)],
    ids=["bandwidth-bound", "latency-bound"],
)
def test_the_simulator_predicts_each_cap_and_names_the_best_on_either_link(pace, expected_best):
    layers = [Layer("linear", (WIDTH * WIDTH * 4,), FORWARD_MS / 1e3, BACKWARD_MS / 1e3)] * LAYERS
    modelled = sweep_bucket_caps(layers, CAPS, RANKS, pace.gbps, pace.latency_us)
    runs = [launch(train, RANKS, args=(cap,), pace=pace) for cap in CAPS]
    # The first step has one bucket and the second rebuilds them: neither is counted.
    measured = [statistics.median(run.results[0][0][2:]) for run in runs]
    for cap, seconds, simulation in zip(CAPS, measured, modelled, strict=True):
        assert seconds == pytest.approx(simulation.step_seconds, rel=0.08), (cap, pace, runs[0].warnings)
    assert best(modelled).bucket_cap_mb == expected_best
    assert CAPS[measured.index(min(measured))] == expected_best


@pytest.mark.parametrize("cap", [0.02, 0.1, 1, 25, None])
def test_ddp_makes_the_buckets_that_the_model_of_it_says(cap):
    def work():
        layers = (torch.nn.Linear(a, b) for a, b in ((64, 512), (512, 900), (900, 700), (700, 64)))
        model = torch.nn.Sequential(*layers)
        sizes = [p.nbytes for p in model.parameters()]
        model = DistributedDataParallel(model, bucket_cap_mb=cap)
        for _ in range(3):
            model(torch.ones(2, 64)).sum().backward()
        return sizes, ddp_log(model)["rebuilt_buckets"]

    sizes, made = launch(work, 2).results[0]
    # Once rebuilt, buckets follow the order in which gradients were ready: weights before biases or not.
    assert sum(made) == sum(sizes)
    assert len(made) == len(bucket_bytes(sizes, assign_buckets(sizes, cap)))


def test_the_first_step_has_one_bucket_and_the_next_ones_those_of_the_cap():
    run = launch(train, 2, args=(2, 3, paced_mlp(LAYERS, WIDTH, 1, 1)), pace=Pace(gbps=5))
    by_step = [
        [s.bytes for s in select(run.spans, rank=0, step=step, name="all_reduce")] for step in range(3)
    ]
    assert by_step[0] == [sum(SIZES)]
    assert by_step[1] == by_step[2] == bucket_bytes(SIZES, assign_buckets(SIZES, 2))


def test_the_log_of_a_plain_model_is_refused():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        ddp_log(torch.nn.Linear(1, 1))
