"""Formulas against messages sent one by one, buckets against torch, the step against hand arithmetic."""

from __future__ import annotations

import heapq
import math
import random
import subprocess
import sys
import time

import pytest

from course_lib import analysis, cost, simulate
from course_lib.buckets import assign_buckets, bucket_bytes
from course_lib.simulate import Layer, simulate_step
from course_lib.spans import COMPUTE, INPUT, LINK

MIB = 1024 * 1024


class Network:
    """An oracle: messages between ranks, one at a time, each rank with one full-duplex link.

    A message enters the network when it is ready and its sender's egress is free, and the first byte is
    there a latency later; it is received once the receiver's ingress has been free for its length.
    """

    def __init__(self, ranks: int, bandwidth: float, latency: float):
        self.bandwidth, self.latency = bandwidth, latency
        self.egress = [0.0] * ranks
        self.ingress = [0.0] * ranks

    def send(self, source: int, target: int, size: float, ready: float) -> float:
        seconds = size / self.bandwidth
        start = max(ready, self.egress[source])
        self.egress[source] = start + seconds
        self.ingress[target] = max(start + self.latency, self.ingress[target]) + seconds
        return self.ingress[target]


def ring_phase(network, ranks, chunk, have, add):
    """n-1 rounds in which every rank passes one chunk on to its neighbour and adds what it receives."""
    for _ in range(ranks - 1):
        arrived = [0.0] * ranks
        for rank in range(ranks):
            target = (rank + 1) % ranks
            arrived[target] = network.send(rank, target, chunk, have[rank]) + chunk * add
        have = arrived
    return have


def ring_by_messages(size, ranks, bandwidth, latency, add):
    network = Network(ranks, bandwidth, latency)
    have = ring_phase(network, ranks, size / ranks, [0.0] * ranks, add)
    return max(ring_phase(network, ranks, size / ranks, have, 0.0))


def star_by_messages(size, ranks, bandwidth, latency, add):
    network = Network(ranks, bandwidth, latency)
    arrived = [network.send(rank, 0, size, 0.0) for rank in range(1, ranks)]
    # The hub adds once it has everything, as DP's reduce_add does.
    ready = max(arrived, default=0.0) + (ranks - 1) * size * add
    return max([network.send(0, rank, size, ready) for rank in range(1, ranks)], default=0.0)


def tree_by_messages(size, ranks, bandwidth, latency, add):
    network = Network(ranks, bandwidth, latency)
    ready = [0.0] * ranks
    distance = 1
    while distance < ranks:
        for parent in range(0, ranks - distance, 2 * distance):
            child = parent + distance
            arrived = network.send(child, parent, size, ready[child])
            ready[parent] = max(ready[parent], arrived) + size * add
        distance *= 2
    return max(broadcast_from(network, size, ranks, ready[0]))


def broadcast_from(network, size, ranks, start):
    ready = {0: start}
    distance = 1 << (ranks - 1).bit_length()
    while distance > 1:
        distance //= 2
        for holder in list(ready):
            if holder + distance < ranks and holder + distance not in ready:
                ready[holder + distance] = network.send(holder, holder + distance, size, ready[holder])
                ready[holder] = max(ready[holder], ready[holder + distance])
    return ready.values()


def halving_doubling_by_messages(size, ranks, bandwidth, latency, add):
    network = Network(ranks, bandwidth, latency)
    ready = [0.0] * ranks
    distance, part, halving = ranks // 2, size / 2, []
    while distance:
        halving.append((distance, part))
        distance, part = distance // 2, part / 2
    for rounds, cost_of_adding in ((halving, add), (halving[::-1], 0.0)):
        for distance, part in rounds:
            ready = [
                network.send(rank ^ distance, rank, part, ready[rank ^ distance]) + part * cost_of_adding
                for rank in range(ranks)
            ]
    return max(ready)


def random_networks(count, seed, powers_of_two=False):
    draw = random.Random(seed)
    for _ in range(count):
        ranks = draw.choice([2, 4, 8, 16, 32]) if powers_of_two else draw.randint(2, 33)
        yield (
            draw.uniform(1, 1e8),
            ranks,
            draw.uniform(0.01, 100),
            draw.uniform(0, 500),
            draw.uniform(0, 1e-9),
        )


@pytest.mark.parametrize(
    ("formula", "messages", "powers_of_two"),
    [
        (cost.ring_all_reduce, ring_by_messages, False),
        (cost.star_all_reduce, star_by_messages, False),
        (cost.tree_all_reduce, tree_by_messages, True),
        (cost.halving_doubling_all_reduce, halving_doubling_by_messages, True),
    ],
)
def test_a_closed_form_equals_its_messages_one_by_one(formula, messages, powers_of_two):
    for size, ranks, gbps, latency_us, add in random_networks(40, 1, powers_of_two):
        expected = messages(size, ranks, gbps * 1e9 / 8, latency_us * 1e-6, add)
        got = formula(size, ranks, gbps, latency_us, reduction_seconds_per_byte=add)
        assert got == pytest.approx(expected, rel=1e-9), (size, ranks, gbps, latency_us, add)


def test_reduce_scatter_and_all_gather_are_the_halves_of_a_ring():
    for size, ranks, gbps, latency_us, add in random_networks(40, 2):
        network = Network(ranks, gbps * 1e9 / 8, latency_us * 1e-6)
        scattered = max(ring_phase(network, ranks, size / ranks, [0.0] * ranks, add))
        half = cost.reduce_scatter(size, ranks, gbps, latency_us, reduction_seconds_per_byte=add)
        assert half == pytest.approx(scattered, rel=1e-9)
        both = half + cost.all_gather(size, ranks, gbps, latency_us)
        whole = cost.ring_all_reduce(size, ranks, gbps, latency_us, reduction_seconds_per_byte=add)
        assert both == pytest.approx(whole, rel=1e-9)


def test_a_broadcast_needs_a_trees_rounds_and_the_message_once():
    for size, ranks, gbps, latency_us, _ in random_networks(40, 3, powers_of_two=True):
        bandwidth, latency = gbps * 1e9 / 8, latency_us * 1e-6
        first_byte = max(broadcast_from(Network(ranks, bandwidth, latency), 0.0, ranks, 0.0))
        expected = first_byte + size / bandwidth
        assert cost.broadcast(size, ranks, gbps, latency_us) == pytest.approx(expected, rel=1e-9)
        # Whole messages in rounds are slower.
        whole = max(broadcast_from(Network(ranks, bandwidth, latency), size, ranks, 0.0))
        assert expected <= whole * (1 + 1e-9)


def test_hand_computed_seconds():
    # 1 MB on 4 ranks at 0.8 Gbit/s (1e8 bytes a second, so 10 ms for the message) with 100 us of latency.
    given = {"ranks": 4, "gbps": 0.8, "latency_us": 100}
    assert cost.ring_all_reduce(1e6, **given) == pytest.approx(6 * 0.0001 + 1.5 * 0.010)
    assert cost.star_all_reduce(1e6, **given) == pytest.approx(2 * 0.0001 + 6 * 0.010)
    assert cost.tree_all_reduce(1e6, **given) == pytest.approx(4 * 0.0101)
    assert cost.halving_doubling_all_reduce(1e6, **given) == pytest.approx(4 * 0.0001 + 1.5 * 0.010)
    assert cost.point_to_point(1e6, 0.8, 100) == pytest.approx(0.0101)
    assert cost.broadcast(1e6, **given) == pytest.approx(2 * 0.0001 + 0.010)
    assert cost.ring_all_reduce(1e6, 4, bytes_per_second=1e8) == pytest.approx(0.015)


COLLECTIVES = [
    cost.ring_all_reduce,
    cost.star_all_reduce,
    cost.tree_all_reduce,
    cost.halving_doubling_all_reduce,
    cost.reduce_scatter,
    cost.all_gather,
    cost.broadcast,
]


@pytest.mark.parametrize("formula", COLLECTIVES)
def test_one_rank_alone_costs_nothing(formula):
    assert formula(1e9, 1, 0.1, 1000) == 0


@pytest.mark.parametrize("formula", COLLECTIVES)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((-1, 4, 1, 0), "bytes must be"),
        ((math.inf, 4, 1, 0), "bytes must be"),
        ((1, 0, 1, 0), "ranks must be"),
        ((1, 2.5, 1, 0), "ranks must be"),
        ((1, True, 1, 0), "ranks must be"),
        ((1, 4, 0, 0), "gbps must be"),
        ((1, 4, math.nan, 0), "gbps must be"),
        ((1, 4, None, 0), "one of the two"),
        ((1, 4, 1, -5), "latency_us must be"),
    ],
)
def test_bad_input_is_named(formula, arguments, message):
    with pytest.raises(ValueError, match=message):
        formula(*arguments)


def test_halving_doubling_says_which_ranks_it_takes():
    with pytest.raises(ValueError, match=r"power of two.*not 6"):
        cost.halving_doubling_all_reduce(1e6, 6, 1)


def test_both_bandwidths_at_once_are_refused():
    with pytest.raises(ValueError, match="one of the two"):
        cost.ring_all_reduce(1e6, 4, 1, bytes_per_second=1e9)


def test_a_ring_without_latency_has_the_links_bandwidth_as_bus_bandwidth():
    for ranks in (2, 3, 8, 100):
        seconds = cost.ring_all_reduce(1e6, ranks, bytes_per_second=1e8)
        assert cost.bus_bandwidth(1e6, seconds, ranks) == pytest.approx(1e8)
        seconds = cost.all_gather(1e6, ranks, bytes_per_second=1e8)
        assert cost.bus_bandwidth(1e6, seconds, ranks, "all_gather") == pytest.approx(1e8)
    assert cost.algorithm_bandwidth(1e6, 0.5) == 2e6
    with pytest.raises(ValueError, match="collective must be one of all_reduce"):
        cost.bus_bandwidth(1e6, 1, 4, "all_redcue")
    with pytest.raises(ValueError, match="seconds must be above 0"):
        cost.algorithm_bandwidth(1e6, 0)


# Buckets


def torch_buckets(sizes, caps, order):
    """What DDP's own function makes of gradients of these bytes, handed over in the order they were ready."""
    torch = pytest.importorskip("torch")
    from torch.distributed import _compute_bucket_assignment_by_size

    tensors = [torch.empty(sizes[position], dtype=torch.uint8) for position in order]
    return _compute_bucket_assignment_by_size(tensors, caps, [False] * len(sizes), list(order))[0]


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("cap", [None, 0, 0.001, 0.5, 1, 4, 25])
def test_buckets_are_torchs_own(seed, cap):
    draw = random.Random(seed)
    sizes = [
        draw.choice([0, 4, 400, MIB, 4 * MIB, draw.randint(1, 9 * MIB)]) for _ in range(draw.randint(1, 40))
    ]
    order = list(range(len(sizes)))[::-1]
    if seed % 2:
        draw.shuffle(order)
    caps = [MIB, 25 * MIB] if cap is None else [int(cap * MIB)]
    got = assign_buckets(sizes, cap, order=order)
    assert got == torch_buckets(sizes, caps, order)
    assert sum(bucket_bytes(sizes, got)) == sum(sizes)


def test_published_and_measured_bucket_sizes():
    # FACTS of a real run: 8 matrices of 4.2 MB. An explicit 25 is not the default 25.
    sizes = [1024 * 1024 * 4] * 8
    assert [round(size / 1e6, 1) for size in bucket_bytes(sizes, assign_buckets(sizes))] == [4.2, 29.4]
    assert [round(size / 1e6, 1) for size in bucket_bytes(sizes, assign_buckets(sizes, 25))] == [29.4, 4.2]


def test_resnet18_has_the_buckets_that_pytorch_issue_48880_shows():
    def block(inputs, outputs, stride):
        sizes = [outputs * inputs * 9, outputs, outputs, outputs * outputs * 9, outputs, outputs]
        return sizes + ([outputs * inputs, outputs, outputs] if stride else [])

    sizes = [64 * 3 * 49, 64, 64]
    for inputs, outputs in ((64, 64), (64, 128), (128, 256), (256, 512)):
        sizes += block(inputs, outputs, inputs != outputs) + block(outputs, outputs, False)
    sizes = [4 * size for size in [*sizes, 512 * 1000, 1000]]
    assert bucket_bytes(sizes, assign_buckets(sizes)) == [2052000, 28852224, 15853824]


def test_bad_caps_and_orders_are_named():
    with pytest.raises(ValueError, match="MiB from 0 up, not -1"):
        assign_buckets([4], -1)
    with pytest.raises(ValueError, match="each of the 2 parameters once"):
        assign_buckets([4, 4], order=[0, 0])
    with pytest.raises(ValueError, match="from 0 up, not -4"):
        assign_buckets([-4])
    assert assign_buckets([]) == []


# The step


def step_by_events(layers, ranks, gbps, latency_us, cap, optimizer_seconds):
    """An oracle: the step as a queue of events, buckets by torch's function, transfers by messages."""
    sizes = [size for layer in layers for size in layer.parameter_bytes]
    owner = [index for index, layer in enumerate(layers) for _ in layer.parameter_bytes]
    order = list(range(len(sizes)))[::-1]
    buckets = torch_buckets(sizes, [MIB, 25 * MIB] if cap is None else [int(cap * MIB)], order)
    events = [(sum(layer.forward_seconds for layer in layers), 0, "backward", len(layers) - 1)]
    missing = [set(owner[position] for position in bucket) for bucket in buckets]
    waiting, link_busy, sent, now, computed = [], False, 0, 0.0, 0.0
    next_bucket = 0
    while events:
        now, _, event, which = heapq.heappop(events)
        if event == "backward":
            heapq.heappush(events, (now + layers[which].backward_seconds, 1, "gradients", which))
        elif event == "gradients":
            computed = now
            for owners in missing:
                owners.discard(which)
            while next_bucket < len(buckets) and not missing[next_bucket]:
                waiting.append(next_bucket)
                next_bucket += 1
            if which:
                heapq.heappush(events, (now, 0, "backward", which - 1))
        else:
            link_busy = False
            sent += 1
        if waiting and not link_busy:
            size = sum(sizes[position] for position in buckets[waiting.pop(0)])
            took = ring_by_messages(size, ranks, gbps * 1e9 / 8, latency_us * 1e-6, 0.0)
            heapq.heappush(events, (now + took, 0, "sent", 0))
            link_busy = True
    assert sent == len(buckets)
    return max(now, computed) + optimizer_seconds


def random_layers(draw):
    return [
        Layer(
            f"layer {index}",
            tuple(draw.choice([64, 4096, MIB, draw.randint(1, 8 * MIB)]) for _ in range(draw.randint(0, 3))),
            draw.uniform(0, 0.02),
            draw.uniform(0, 0.04),
        )
        for index in range(draw.randint(1, 15))
    ] + [Layer("head", (4,), 0.001, 0.001)]


@pytest.mark.parametrize("seed", range(30))
def test_a_step_equals_its_events_one_by_one(seed):
    draw = random.Random(seed)
    layers = random_layers(draw)
    ranks, gbps, latency_us = draw.randint(2, 9), draw.uniform(0.1, 10), draw.uniform(0, 500)
    cap = draw.choice([None, 0, 1, 5, 25, 1000])
    simulation = simulate_step(layers, ranks, gbps, latency_us, cap, optimizer_seconds=0.01)
    expected = step_by_events(layers, ranks, gbps, latency_us, cap, 0.01)
    assert simulation.step_seconds == pytest.approx(expected, rel=1e-9)


# Two layers of 1 MB at 0.8 Gbit/s on 2 ranks: each all-reduce takes 10 ms.
TWO = [Layer("first", (1_000_000,), 0.004, 0.006), Layer("last", (1_000_000,), 0.002, 0.008)]


def test_a_step_by_hand():
    # forward 0-6; backward 6-20, the last layer's gradient at 14; its bucket 14-24, the other's 24-34.
    simulation = simulate_step(TWO, 2, 0.8, bucket_cap_mb=0.1, optimizer_seconds=0.003)
    assert simulation.step_seconds == pytest.approx(0.037)
    assert simulation.overlap_seconds == pytest.approx(0.006)
    assert simulation.exposed_seconds == pytest.approx(0.014)
    assert simulation.buckets == [1_000_000, 1_000_000]
    assert simulation.kind == "modelled"
    rows = [
        (s.name, s.detail, s.lane, round(s.start * 1e3, 6), round(s.end * 1e3, 6)) for s in simulation.spans
    ]
    assert rows == [
        ("forward", "", COMPUTE, 0, 6),
        ("backward", "", COMPUTE, 6, 20),
        ("all_reduce", "bucket 0", LINK, 14, 24),
        ("all_reduce", "bucket 1", LINK, 20, 34),
        ("wait", "", COMPUTE, 20, 34),
        ("optimizer", "", COMPUTE, 34, 37),
    ]


def test_without_overlap_communication_starts_when_backward_ends():
    simulation = simulate_step(TWO, 2, 0.8, bucket_cap_mb=0.1, overlap=False)
    assert simulation.step_seconds == pytest.approx(0.020 + 0.020)
    assert simulation.overlap_seconds == 0
    assert simulation.exposed_seconds == pytest.approx(0.020)


def test_one_huge_bucket_has_nothing_to_overlap():
    huge = simulate_step(TWO, 2, 0.8, bucket_cap_mb=1000)
    assert huge.buckets == [2_000_000]
    assert huge.overlap_seconds == pytest.approx(0)
    assert huge.step_seconds == simulate_step(TWO, 2, 0.8, overlap=False).step_seconds


def test_no_sync_sends_nothing():
    simulation = simulate_step(TWO, 2, 0.8, synchronise=False, input_seconds=0.005)
    assert simulation.step_seconds == pytest.approx(0.025)
    assert simulation.exposed_seconds == 0
    assert [(span.name, span.lane) for span in simulation.spans] == [
        ("input", INPUT),
        ("forward", COMPUTE),
        ("backward", COMPUTE),
    ]


def test_compression_sends_fewer_bytes_and_casts_cost_time():
    # Half the bytes: 5 ms each, at 14-19 and 20-25.
    simulation = simulate_step(TWO, 2, 0.8, bucket_cap_mb=0.1, compression=0.5)
    assert simulation.step_seconds == pytest.approx(0.025)
    assert [span.bytes for span in simulation.spans if span.lane == LINK] == [500_000, 500_000]
    # 2 ms there and 2 back for each bucket: backward 6-24, buckets 16-21 and 24-29, restored at 31.
    simulation = simulate_step(TWO, 2, 0.8, bucket_cap_mb=0.1, compression=0.5, cast_seconds_per_byte=4e-9)
    assert simulation.step_seconds == pytest.approx(0.031)
    assert simulation.exposed_seconds == pytest.approx(0.005)


def test_another_all_reduce_can_be_priced():
    star = simulate_step(TWO, 4, 0.8, bucket_cap_mb=1000, all_reduce=cost.star_all_reduce)
    assert star.step_seconds == pytest.approx(0.020 + 6 * 0.020)


def test_a_shared_parameter_of_the_first_layer_is_ready_last():
    tied = [Layer("embedding", (8_000_000,), 0.001, 0.001), *TWO, Layer("head, tied", (), 0.001, 0.001)]
    launches = [
        span.start for span in simulate_step(tied, 2, 0.8, bucket_cap_mb=0.1).spans if span.lane == LINK
    ]
    assert launches[-1] == pytest.approx(0.008 + 0.016)


def test_caps_have_a_best_between_too_small_and_too_large():
    layers = [Layer(f"layer {index}", (256 * 1024,) * 4, 0.002, 0.004) for index in range(8)]
    caps = [0.1, 1, 2, 4, 1000]
    simulations = simulate.sweep_bucket_caps(layers, caps, 4, 2, 300)
    assert [simulation.bucket_cap_mb for simulation in simulations] == caps
    assert simulate.best(simulations).bucket_cap_mb in (1, 2, 4)
    with pytest.raises(ValueError, match="no simulations"):
        simulate.best([])


def test_spans_are_given_for_as_many_ranks_as_asked():
    simulation = simulate_step(TWO, 4, 0.8, emit_ranks=3)
    assert analysis.ranks(simulation.spans) == [0, 1, 2]
    with pytest.raises(ValueError, match="emit_ranks must be"):
        simulate_step(TWO, 2, 0.8, emit_ranks=3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: simulate_step([], 2, 1), "layers is empty"),
        (lambda: simulate_step(TWO, 0, 1), "ranks must be"),
        (lambda: simulate_step(TWO, 2, 0), "gbps must be"),
        (lambda: simulate_step(TWO, 2, 1, compression=0), "fraction of bytes"),
        (lambda: simulate_step(TWO, 2, 1, optimizer_seconds=-1), "optimizer_seconds must be"),
        (lambda: Layer("a", 4, 0, 0), r"must be a tuple .* such as \(4,\)"),
        (lambda: Layer("a", (4,), -1, 0), "forward_seconds of layer 'a'"),
    ],
)
def test_bad_steps_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_a_large_step_is_fast_enough_for_a_slider():
    layers = [Layer(f"layer {index}", (2 * MIB,), 0.001, 0.002) for index in range(100)]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        simulation = simulate_step(layers, 1024, 100, 5, 1)
        seconds.append(time.perf_counter() - start)
    assert len(simulation.buckets) == 100
    assert min(seconds) < 0.010


def test_the_cost_model_needs_no_torch():
    code = "import course_lib.simulate, course_lib.analysis, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
