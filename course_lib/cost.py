"""What communication costs: closed forms for the collectives.

The formulas share one model of a network (Hockney's): a message of S bytes takes latency + S / bandwidth,
and each rank has one full-duplex link, so that it can send one message and receive another at once, but
what it sends queues, and so does what it receives. Adding received bytes to one's own may cost time too.

    seconds = ring_all_reduce(25e6, ranks=4, gbps=1, latency_us=50)

Every function takes the bandwidth as `gbps` (1e9 bits a second) or as `bytes_per_second`, one of the two,
and returns seconds. One rank alone has nothing to send: 0 seconds.
"""

from __future__ import annotations

import math

# Bytes that cross each rank's link, over the bytes of the message (nccl-tests, doc/PERFORMANCE.md).
_BUS_FACTORS = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "broadcast": lambda ranks: 1.0,
    "reduce": lambda ranks: 1.0,
}


def point_to_point(
    message_bytes: float,
    gbps: float | None = None,
    latency_us: float = 0.0,
    *,
    bytes_per_second: float | None = None,
) -> float:
    """Seconds until a message of `message_bytes` has arrived: latency + S / B."""
    size = _checked_bytes(message_bytes)
    return _checked_latency(latency_us) + size / _bandwidth(gbps, bytes_per_second)


def ring_all_reduce(
    message_bytes: float,
    ranks: int,
    gbps: float | None = None,
    latency_us: float = 0.0,
    *,
    bytes_per_second: float | None = None,
    reduction_seconds_per_byte: float = 0.0,
) -> float:
    """Seconds of an all-reduce around a ring: reduce-scatter, then all-gather.

    2(n-1) latency + 2(n-1)/n S/B + (n-1)/n S gamma. Every link carries the same bytes, and no algorithm
    can send fewer (Patarasuk and Yuan, 2009); the price is a latency that grows with the ranks.
    """
    size, alpha, bandwidth, gamma = _checked(
        message_bytes, ranks, gbps, latency_us, bytes_per_second, reduction_seconds_per_byte
    )
    share = (ranks - 1) / ranks * size
    return 2 * (ranks - 1) * alpha + 2 * share / bandwidth + share * gamma


def star_all_reduce(
    message_bytes: float,
    ranks: int,
    gbps: float | None = None,
    latency_us: float = 0.0,
    *,
    bytes_per_second: float | None = None,
    reduction_seconds_per_byte: float = 0.0,
) -> float:
    """Seconds of an all-reduce through one hub, as in DP: everyone sends to it, it adds and sends back.

    2 latency + 2(n-1) S/B + (n-1) S gamma. The hub's link carries n-1 whole messages each way, one after
    the other; latencies of messages that queue run side by side, so that each way costs one.
    """
    size, alpha, bandwidth, gamma = _checked(
        message_bytes, ranks, gbps, latency_us, bytes_per_second, reduction_seconds_per_byte
    )
    if ranks == 1:
        return 0.0
    return 2 * alpha + (ranks - 1) * size * (2 / bandwidth + gamma)


def tree_all_reduce(
    message_bytes: float,
    ranks: int,
    gbps: float | None = None,
    latency_us: float = 0.0,
    *,
    bytes_per_second: float | None = None,
    reduction_seconds_per_byte: float = 0.0,
) -> float:
    """Seconds of an all-reduce up and down a binomial tree, whole messages in rounds.

    ceil(log2 n) rounds up and as many down: 2 ceil(log2 n) (latency + S/B) + ceil(log2 n) S gamma. Few
    latencies, many bytes: good for small messages (Thakur, Rabenseifner and Gropp, 2005). NCCL's trees
    pipeline chunks and do better than this for large ones.
    """
    size, alpha, bandwidth, gamma = _checked(
        message_bytes, ranks, gbps, latency_us, bytes_per_second, reduction_seconds_per_byte
    )
    rounds = _rounds(ranks)
    return 2 * rounds * (alpha + size / bandwidth) + rounds * size * gamma


def halving_doubling_all_reduce(
    message_bytes: float,
    ranks: int,
    gbps: float | None = None,
    latency_us: float = 0.0,
    *,
    bytes_per_second: float | None = None,
    reduction_seconds_per_byte: float = 0.0,
) -> float:
    """Seconds of Rabenseifner's all-reduce: halve the message each round, then double it back.

    2 log2(n) latency + 2(n-1)/n S/B + (n-1)/n S gamma: the ring's bytes with a tree's latency.
    ValueError unless the number of ranks is a power of two.
    """
    size, alpha, bandwidth, gamma = _checked(
        message_bytes, ranks, gbps, latency_us, bytes_per_second, reduction_seconds_per_byte
    )
    if ranks & (ranks - 1):
        raise ValueError(
            f"halving-doubling pairs ranks off round by round: ranks must be a power of two (2, 4, 8 …), "
            f"not {ranks}. ring_all_reduce takes any number."
        )
    share = (ranks - 1) / ranks * size
    return 2 * _rounds(ranks) * alpha + 2 * share / bandwidth + share * gamma


def reduce_scatter(
    message_bytes: float,
    ranks: int,
    gbps: float | None = None,
    latency_us: float = 0.0,
    *,
    bytes_per_second: float | None = None,
    reduction_seconds_per_byte: float = 0.0,
) -> float:
    """Seconds of a ring reduce-scatter of `message_bytes` on each rank, of which each keeps 1/n, summed.

    (n-1) latency + (n-1)/n S/B + (n-1)/n S gamma: the first half of `ring_all_reduce`.
    """
    size, alpha, bandwidth, gamma = _checked(
        message_bytes, ranks, gbps, latency_us, bytes_per_second, reduction_seconds_per_byte
    )
    return (ranks - 1) * alpha + (ranks - 1) / ranks * size * (1 / bandwidth + gamma)


def all_gather(
    message_bytes: float,
    ranks: int,
    gbps: float | None = None,
    latency_us: float = 0.0,
    *,
    bytes_per_second: float | None = None,
) -> float:
    """Seconds of a ring all-gather after which each rank holds `message_bytes`, having held 1/n of them.

    (n-1) latency + (n-1)/n S/B: the second half of `ring_all_reduce`.
    """
    size, alpha, bandwidth, _ = _checked(message_bytes, ranks, gbps, latency_us, bytes_per_second, 0.0)
    return (ranks - 1) * alpha + (ranks - 1) / ranks * size / bandwidth


def broadcast(
    message_bytes: float,
    ranks: int,
    gbps: float | None = None,
    latency_us: float = 0.0,
    *,
    bytes_per_second: float | None = None,
) -> float:
    """Seconds of a broadcast down pipelined trees: ceil(log2 n) latency + S/B.

    Each round doubles the ranks that hold the beginning of the message, and the rest follows in a pipeline.
    No broadcast can be faster; two trees, each with half of the message, come close (Sanders, Speck and
    Traff, 2009).
    """
    size, alpha, bandwidth, _ = _checked(message_bytes, ranks, gbps, latency_us, bytes_per_second, 0.0)
    return 0.0 if ranks == 1 else _rounds(ranks) * alpha + size / bandwidth


def algorithm_bandwidth(message_bytes: float, seconds: float) -> float:
    """Bytes a second as the caller sees them: the message's size over the time it took."""
    size = _checked_bytes(message_bytes)
    if not seconds > 0:
        raise ValueError(f"seconds must be above 0, not {seconds!r}")
    return size / seconds


def bus_bandwidth(message_bytes: float, seconds: float, ranks: int, collective: str = "all_reduce") -> float:
    """Bytes a second as a rank's link sees them, comparable with the hardware for any number of ranks.

    The algorithm bandwidth times the bytes that must cross each link for each byte of the message:
    2(n-1)/n for all_reduce, (n-1)/n for reduce_scatter and all_gather, 1 for broadcast and reduce
    (NVIDIA nccl-tests, doc/PERFORMANCE.md).
    """
    _check_ranks(ranks)
    if collective not in _BUS_FACTORS:
        raise ValueError(f"collective must be one of {', '.join(_BUS_FACTORS)}, not {collective!r}")
    return algorithm_bandwidth(message_bytes, seconds) * _BUS_FACTORS[collective](ranks)


def _rounds(ranks: int) -> int:
    """How often a group must double to reach `ranks`."""
    return (ranks - 1).bit_length()


def _check_ranks(ranks: int) -> None:
    if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
        raise ValueError(f"ranks must be a whole number from 1 up, not {ranks!r}")


def _checked_bytes(message_bytes: float) -> float:
    if not 0 <= message_bytes < math.inf:
        raise ValueError(f"bytes must be a finite number from 0 up, not {message_bytes!r}")
    return message_bytes


def _checked_latency(latency_us: float) -> float:
    if not 0 <= latency_us < math.inf:
        raise ValueError(f"latency_us must be a number of microseconds from 0 up, not {latency_us!r}")
    return latency_us * 1e-6


def _bandwidth(gbps: float | None, bytes_per_second: float | None) -> float:
    """Bytes a second, from whichever of the two was given; infinity stands for a link that costs nothing."""
    if (gbps is None) == (bytes_per_second is None):
        raise ValueError("give the bandwidth as gbps or as bytes_per_second, one of the two")
    if gbps is not None:
        if not gbps > 0:
            raise ValueError(f"gbps must be above 0, not {gbps!r}")
        return gbps * 1e9 / 8
    if not (bytes_per_second is not None and bytes_per_second > 0):
        raise ValueError(f"bytes_per_second must be above 0, not {bytes_per_second!r}")
    return bytes_per_second


def _checked(
    message_bytes: float,
    ranks: int,
    gbps: float | None,
    latency_us: float,
    bytes_per_second: float | None,
    reduction_seconds_per_byte: float,
) -> tuple[float, float, float, float]:
    """Size in bytes, latency in seconds, bandwidth in bytes a second, reduction in seconds a byte."""
    _check_ranks(ranks)
    if not 0 <= reduction_seconds_per_byte < math.inf:
        raise ValueError(
            f"reduction_seconds_per_byte must be a number from 0 up, not {reduction_seconds_per_byte!r}"
        )
    return (
        _checked_bytes(message_bytes),
        _checked_latency(latency_us),
        _bandwidth(gbps, bytes_per_second),
        reduction_seconds_per_byte,
    )
