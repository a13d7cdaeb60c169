"""How DDP packs gradients into buckets.

assign_buckets([parameter.nbytes for parameter in model.parameters()], bucket_cap_mb=25)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

MIB = 1024 * 1024
DEFAULT_BUCKET_CAP_MB = 25.0
DEFAULT_FIRST_BUCKET_MB = 1.0


def assign_buckets(
    parameter_bytes: Sequence[int],
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float = DEFAULT_FIRST_BUCKET_MB,
    *,
    order: Sequence[int] | None = None,
) -> list[list[int]]:
    """The parameters of each DDP bucket, as positions in `parameter_bytes`; bucket 0 is sent first.

    parameter_bytes: the gradient's bytes of each parameter, in the order of `model.parameters()`, all of
    one dtype and device (DDP never mixes those in a bucket). order: the order in which gradients became
    ready, as positions; without it, the reverse of `model.parameters()`. A bucket closes when it reaches
    its cap, and a parameter is never split, so a bucket may be larger than its cap. Caps are in MiB: with
    `bucket_cap_mb=None`, 25 and, for the first bucket, `first_bucket_mb`; a number is the cap of all.

    This is what DDP uses from the second iteration on (torch's `_compute_bucket_assignment_by_size`);
    in the first, all gradients share one bucket.
    """
    sizes = [int(size) for size in parameter_bytes]
    if any(size < 0 for size in sizes):
        raise ValueError(f"parameter_bytes must be from 0 up, not {min(sizes)}")
    caps = [bucket_cap_mb] if bucket_cap_mb is not None else [first_bucket_mb, DEFAULT_BUCKET_CAP_MB]
    limits = [_cap_bytes(cap) for cap in caps]
    positions = list(range(len(sizes)))[::-1] if order is None else list(order)
    if sorted(positions) != list(range(len(sizes))):
        raise ValueError(f"order must name each of the {len(sizes)} parameters once, by position from 0")
    buckets: list[list[int]] = []
    filling: list[int] = []
    filled = 0
    for position in positions:
        filling.append(position)
        filled += sizes[position]
        if filled >= limits[min(len(buckets), len(limits) - 1)]:
            buckets.append(filling)
            filling, filled = [], 0
    return [*buckets, filling] if filling else buckets


def bucket_bytes(parameter_bytes: Sequence[int], buckets: Sequence[Sequence[int]]) -> list[int]:
    """The bytes of each bucket that `assign_buckets` made of `parameter_bytes`."""
    return [sum(parameter_bytes[position] for position in bucket) for bucket in buckets]


def _cap_bytes(cap_mb: float) -> int:
    if isinstance(cap_mb, bool) or not 0 <= cap_mb < math.inf:
        raise ValueError(f"a bucket's cap must be a number of MiB from 0 up, not {cap_mb!r}")
    return int(cap_mb * MIB)
