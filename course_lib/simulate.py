"""One training step of DDP, simulated: what overlaps, what queues, what is exposed.

    layers = [Layer("embedding", (4_000_000,), 0.010, 0.020), Layer("head", (4_000_000,), 0.010, 0.020)]
    simulation = simulate_step(layers, ranks=4, gbps=1, latency_us=50, bucket_cap_mb=4)
    simulation.step_seconds, simulation.exposed_seconds

All ranks are alike, so one stands for all. It computes forward, then backward layer by layer from the last;
a bucket is ready when all of its gradients are; ready buckets queue on the one link, first come, first
served; the optimizer follows when both backward and the last transfer are done. The spans have the names
and lanes of a real run, so every picture and every sum serves both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from . import analysis
from .buckets import assign_buckets, bucket_bytes
from .cost import ring_all_reduce
from .spans import COMPUTE, INPUT, LINK, Span


@dataclass(frozen=True)
class Layer:
    """One layer, as the simulator sees it.

    parameter_bytes: the bytes of the gradient of each of its parameters, in the order of `parameters()`.
    A parameter that two layers share belongs to the earlier one: its gradient is ready when that one's
    backward is done. forward_seconds, backward_seconds: how long it computes on one rank.
    """

    name: str
    parameter_bytes: tuple[int, ...]
    forward_seconds: float
    backward_seconds: float

    def __post_init__(self) -> None:
        if isinstance(self.parameter_bytes, int | float):
            raise ValueError(
                f"parameter_bytes of layer {self.name!r} must be a tuple with the bytes of each parameter, "
                f"such as ({self.parameter_bytes},)"
            )
        object.__setattr__(self, "parameter_bytes", tuple(self.parameter_bytes))
        _check_seconds(f"forward_seconds of layer {self.name!r}", self.forward_seconds)
        _check_seconds(f"backward_seconds of layer {self.name!r}", self.backward_seconds)


@dataclass(frozen=True)
class Simulation:
    """A simulated step.

    spans: what happened when, from 0. step_seconds: how long the step took. exposed_seconds: communication
    that no compute covers. overlap_seconds: communication hidden behind compute. buckets: the bytes of each
    bucket's gradients. bucket_cap_mb: the cap it was given, None for DDP's default.
    """

    spans: list[Span] = field(repr=False)
    step_seconds: float
    exposed_seconds: float
    overlap_seconds: float
    buckets: list[int]
    ranks: int
    bucket_cap_mb: float | None
    kind: str = "modelled"


def simulate_step(
    layers: Sequence[Layer],
    ranks: int,
    gbps: float,
    latency_us: float = 0.0,
    bucket_cap_mb: float | None = None,
    overlap: bool = True,
    *,
    optimizer_seconds: float = 0.0,
    input_seconds: float = 0.0,
    synchronise: bool = True,
    compression: float = 1.0,
    cast_seconds_per_byte: float = 0.0,
    reduction_seconds_per_byte: float = 0.0,
    all_reduce: Callable[..., float] = ring_all_reduce,
    emit_ranks: int = 1,
) -> Simulation:
    """Simulate one step of `layers`, in forward order, on `ranks` alike ranks.

    bucket_cap_mb: as DDP's own (`buckets.assign_buckets`). overlap: False holds all transfers back until
    backward is done. input_seconds: how long the step waits for its batch. synchronise: False for a step
    inside `no_sync`, which sends nothing. compression: the fraction of each bucket's bytes that is sent.
    cast_seconds_per_byte: what compressing and restoring cost for each byte of gradient; half of it holds up
    backward before the transfer, half follows the transfer. all_reduce: the cost of one bucket, any of
    `cost`'s all-reduces. emit_ranks: for how many ranks to give spans (the same ones for each).
    """
    layers = list(layers)
    if not layers:
        raise ValueError("layers is empty: give at least one Layer")
    for name, seconds in (
        ("optimizer_seconds", optimizer_seconds),
        ("input_seconds", input_seconds),
        ("cast_seconds_per_byte", cast_seconds_per_byte),
    ):
        _check_seconds(name, seconds)
    if not 0 < compression <= 1:
        raise ValueError(
            f"compression is the fraction of bytes sent, above 0 and up to 1, not {compression!r}"
        )
    if (
        isinstance(emit_ranks, bool)
        or not isinstance(emit_ranks, int)
        or not 1 <= emit_ranks <= max(ranks, 1)
    ):
        raise ValueError(f"emit_ranks must be a whole number from 1 to ranks ({ranks!r}), not {emit_ranks!r}")

    sizes = [size for layer in layers for size in layer.parameter_bytes]
    assigned = assign_buckets(sizes, bucket_cap_mb)
    buckets = bucket_bytes(sizes, assigned)
    costs = [
        all_reduce(
            size * compression,
            ranks,
            gbps=gbps,
            latency_us=latency_us,
            reduction_seconds_per_byte=reduction_seconds_per_byte,
        )
        for size in buckets
    ]
    sent = synchronise and bool(buckets)
    cast = cast_seconds_per_byte / 2 if sent else 0.0

    spans: list[Span] = []
    clock = 0.0

    def spend(name: str, seconds: float, lane: str = COMPUTE) -> None:
        nonlocal clock
        if seconds > 0:
            spans.append(Span(0, name, clock, clock + seconds, lane=lane, step=0))
        clock += seconds

    spend("input", input_seconds, INPUT)
    spend("forward", sum(layer.forward_seconds for layer in layers))
    backward_start = clock
    launched, backward_end = _backward(layers, assigned, buckets, cast, backward_start)
    spend("backward", backward_end - backward_start)

    finished = backward_end
    if sent:
        link_free = restored = 0.0
        for index, (size, cost) in enumerate(zip(buckets, costs, strict=True)):
            launch = launched[index] if overlap else backward_end
            link_free = max(launch, link_free) + cost
            restored = max(restored, link_free) + size * cast
            spans.append(
                Span(
                    0, "all_reduce", launch, link_free, round(size * compression), LINK, 0, f"bucket {index}"
                )
            )
        finished = max(backward_end, restored)
    spend("wait", finished - backward_end)
    spend("optimizer", optimizer_seconds)

    return Simulation(
        spans=[_on_rank(span, rank) for rank in range(emit_ranks) for span in spans],
        step_seconds=clock,
        exposed_seconds=analysis.exposed(spans),
        overlap_seconds=analysis.hidden(spans),
        buckets=buckets,
        ranks=ranks,
        bucket_cap_mb=bucket_cap_mb,
    )


def sweep_bucket_caps(
    layers: Sequence[Layer],
    caps: Iterable[float | None],
    ranks: int,
    gbps: float,
    latency_us: float = 0.0,
    **options: object,
) -> list[Simulation]:
    """One simulated step for each cap, in MiB (None: DDP's default); options as for `simulate_step`."""
    return [
        simulate_step(layers, ranks, gbps, latency_us, bucket_cap_mb=cap, **options)  # type: ignore[arg-type]
        for cap in caps
    ]


def best(simulations: Iterable[Simulation]) -> Simulation:
    """The shortest step; of equal ones the first. ValueError where there is none."""
    simulations = list(simulations)
    if not simulations:
        raise ValueError("no simulations to choose from")
    return min(simulations, key=lambda simulation: simulation.step_seconds)


def _backward(
    layers: Sequence[Layer], assigned: list[list[int]], buckets: list[int], cast: float, start: float
) -> tuple[list[float], float]:
    """When each bucket is launched, and when backward ends, the casts it is held up by included."""
    first = 0
    first_of_layer = []
    for layer in layers:
        first_of_layer.append(first)
        first += len(layer.parameter_bytes)
    clock = start
    launched: list[float] = []
    for layer, first in zip(reversed(layers), reversed(first_of_layer), strict=True):
        clock += layer.backward_seconds
        # Gradients become ready from the back, so a bucket is complete once its foremost parameter is.
        while len(launched) < len(assigned) and min(assigned[len(launched)]) >= first:
            clock += buckets[len(launched)] * cast
            launched.append(clock)
    return launched, clock


def _on_rank(span: Span, rank: int) -> Span:
    return Span(rank, span.name, span.start, span.end, span.bytes, span.lane, span.step, span.detail)


def _check_seconds(name: str, seconds: float) -> None:
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{name} must be a number of seconds from 0 up, not {seconds!r}")
