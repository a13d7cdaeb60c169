"""Stretches of time: joining them, taking some from others, and adding them up."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """The same stretches of time in order, overlapping ones joined, empty ones left out."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: Iterable[Interval], taken: Iterable[Interval]) -> list[Interval]:
    """What of `intervals` lies outside `taken`."""
    left: list[Interval] = []
    holes = merge(taken)
    for start, end in merge(intervals):
        for hole_start, hole_end in holes:
            if hole_end <= start:
                continue
            if hole_start >= end:
                break
            if hole_start > start:
                left.append((start, hole_start))
            start = hole_end
            if start >= end:
                break
        if start < end:
            left.append((start, end))
    return left


def intersect(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """What of `intervals` lies inside `others`."""
    first = merge(intervals)
    return subtract(first, subtract(first, others))


def total(intervals: Iterable[Interval]) -> float:
    """Seconds covered by `intervals`, overlaps counted once."""
    return sum(end - start for start, end in merge(intervals))
