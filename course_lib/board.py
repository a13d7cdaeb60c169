"""The board: where ranks of one machine read when each of them came to a collective.

A paced collective starts when the last rank has come to it. Each rank writes the logical time at which it
came (its *stamp*) into its own row of a piece of shared memory before it takes part, and reads the others'
once the real transfer is done; by then they are there. Rows are found by rank, slots by group and by the
collective's number in the group. Each row has room for `SLOTS` collectives of each of `REGIONS` groups; ranks
are never more than a few collectives apart, and a slot names what it is for, so a stale one is noticed.

The memory is a file which the parent of the ranks makes, of `board_bytes` zeroed bytes, and they inherit; its
descriptor's number is in the environment as COURSE_LIB_BOARD_FD. Without one the ranks send each other their
stamps.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from typing import NamedTuple

FD_VARIABLE = "COURSE_LIB_BOARD_FD"
SLOTS = 64
REGIONS = 1024
SLOT_BYTES = 32
WORDS = SLOT_BYTES // 8


class Stamp(NamedTuple):
    """When a rank came to a collective, in logical and in real seconds of CLOCK_MONOTONIC."""

    logical: float
    real: float


def board_bytes(world_size: int) -> int:
    """The size of the shared memory for `world_size` ranks; only pages that are written take memory."""
    return world_size * REGIONS * SLOTS * SLOT_BYTES


class Board:
    """This rank's view of the board."""

    def __init__(self, fd: int, world_size: int, rank: int) -> None:
        self._rank = rank
        memory = memoryview(mmap.mmap(fd, board_bytes(world_size)))
        self._keys = memory.cast("Q")
        self._times = memory.cast("d")

    @classmethod
    def from_environment(cls, world_size: int, rank: int) -> Board | None:
        """The board whose descriptor this rank inherited, or None where there is none that fits."""
        try:
            fd = int(os.environ[FD_VARIABLE])
            if os.fstat(fd).st_size < board_bytes(world_size):
                return None
            return cls(fd, world_size, rank)
        except (KeyError, ValueError, OSError):
            return None

    def write(self, group: int, number: int, stamp: Stamp) -> None:
        """Say when this rank came to collective `number` of `group` (a `group_key`)."""
        slot = self._slot(self._rank, group, number)
        self._times[slot + 1] = stamp.logical
        self._times[slot + 2] = stamp.real
        self._keys[slot] = group ^ number

    def read(self, rank: int, group: int, number: int) -> Stamp | None:
        """When `rank` came to that collective; None where it has not, or the slot was used again since."""
        slot = self._slot(rank, group, number)
        if self._keys[slot] != group ^ number:
            return None
        return Stamp(self._times[slot + 1], self._times[slot + 2])

    def _slot(self, rank: int, group: int, number: int) -> int:
        return ((rank * REGIONS + group % REGIONS) * SLOTS + number % SLOTS) * WORDS


def group_key(name: str, ranks: list[int]) -> int:
    """A 64-bit number for a group, the same on all of its ranks."""
    digest = hashlib.blake2b(f"{name}:{ranks}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") | 1 << 63
