"""Exercises 3.3 and 3.4: where two algorithms cross, and a ring whose segments do not wait."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from course_lib import cost
from course_lib.check import chapter03_pictures as pictures
from course_lib.check.chapter03_ring import SEND_FIRST, by_send_and_recv
from course_lib.check.lab import Lab
from course_lib.check.registry import Hint, exercise
from course_lib.launch import launch
from course_lib.pace import Pace
from course_lib.rings import ring_all_reduce, slowest, star_all_reduce, time_all_reduces

CASES = ((8, 0.05, 10_000.0), (3, 1.0, 200.0), (16, 10.0, 20.0), (64, 0.4, 1000.0))
WITHIN = 0.02
MEASURED_ON = (6, 0.05, 20_000.0)

# A chunk takes 20 ms, a latency 15: the plain ring's link idles nearly half of the time.
FAR, FAR_RANKS, FAR_BYTES = Pace(gbps=0.05, latency_us=15_000), 4, 500_000
GAIN = 0.85


@exercise(
    "3.3",
    "The crossing point of star and ring",
    hints=(
        Hint(
            "Off by a power of ten, or by 8",
            "Work in seconds and bytes: `latency_us * 1e-6` seconds, and `gbps * 1e9 / 8` bytes a second.",
            fits=("bits, not bytes", "microseconds, not seconds", "milliseconds, not microseconds"),
        ),
        Hint(
            "How do I find the size?",
            "Write both times down: 2 a + 2 (n - 1) S / B for the star, 2 (n - 1) a + 2 (n - 1) / n S / B "
            "for the ring. Set them equal: all S on one side, all a on the other.",
            fits=(
                "the rule of thumb",
                "another formula",
                "one way only",
                "the star pays once",
                "the ring's latency alone",
            ),
        ),
        Hint("What it should look like", "Two lines that cross once.", picture=pictures.crossing),
    ),
)
def judge_crossing(lab: Lab, crossing_bytes: Callable) -> None:
    """The size at which star and ring take the same time, within 2 %."""
    outcome = lab.call(crossing_bytes, (CASES,), 1, via=for_each, tried=f"{len(CASES)} links")
    answers = outcome.results[0]
    lab.require(
        isinstance(answers, list) and len(answers) == len(CASES), "wrong type", "One number is asked for."
    )
    numbers = [lab.number(answer, what="the crossing point") for answer in answers]
    ratios = [number / crossing(*case) for number, case in zip(numbers, CASES, strict=True)]
    for ratio, number, case in zip(ratios, numbers, CASES, strict=True):
        ranks, gbps, latency_us = case
        key, says = _misread_crossing(ratios)
        lab.require(
            abs(ratio - 1) <= WITHIN,
            key,
            says,
            expected=f"{crossing(*case):,.0f} bytes for {ranks} ranks, {gbps:g} Gbit/s, {latency_us:g} µs",
            got=f"{number:,.0f} bytes, where the star takes "
            f"{_ratio_at(number, case):.3g} times as long as the ring",
        )
    lab.note(f"{len(CASES)} links: within {WITHIN:.0%} of the place where the two formulas meet")
    lab.note(_measured_around(for_each(crossing_bytes, (MEASURED_ON,))[0]))


def for_each(answer: Callable, cases: Sequence[tuple]) -> list[Any]:
    """What the answer gives for each case."""
    return [answer(*case) for case in cases]


def crossing(ranks: int, gbps: float, latency_us: float) -> float:
    """The bytes at which star and ring take the same time: 2(n-2) a = 2(n-1)(1 - 1/n) S/B."""
    return latency_us * 1e-6 * gbps * 1e9 / 8 * ranks * (ranks - 2) / (ranks - 1) ** 2


def _ratio_at(size: float, case: tuple[int, float, float]) -> float:
    size = max(0.0, size)
    return cost.star_all_reduce(size, *case) / cost.ring_all_reduce(size, *case)


def _misread_crossing(ratios: Sequence[float]) -> tuple[str, str]:
    """What the answers, over the right ones, look like: one factor, or one that depends on the ranks."""

    def like(factors: Sequence[float]) -> bool:
        return all(abs(r / f - 1) <= WITHIN for r, f in zip(ratios, factors, strict=True) if f)

    ranks = [case[0] for case in CASES]
    exact = [n * (n - 2) / (n - 1) ** 2 for n in ranks]
    known = (
        ("bits, not bytes", "8 times too large: `gbps` is gigabits, and the answer is in bytes.", [8.0] * 4),
        ("microseconds, not seconds", "A million times too large: latency is in microseconds.", [1e6] * 4),
        ("milliseconds, not microseconds", "A thousand times too large: 1000 µs are 1 ms.", [1e3] * 4),
        (
            "the rule of thumb",
            "This is latency times bandwidth, the rule of thumb. The exact place depends on the ranks as "
            "well.",
            [1 / e for e in exact],
        ),
        (
            "one way only",
            "The star's bytes are counted one way only. They go to the hub, and the sum comes back.",
            [_solved(n, star_bytes=n - 1) / e for n, e in zip(ranks, exact, strict=True)],
        ),
        (
            "the star pays once",
            "The star pays its latency once here. A message goes to the hub, and one comes back: twice.",
            [_solved(n, star_latency=1) / e for n, e in zip(ranks, exact, strict=True)],
        ),
        (
            "the ring's latency alone",
            "The star's own two latencies are missing: it pays them too.",
            [_solved(n, star_latency=0) / e for n, e in zip(ranks, exact, strict=True)],
        ),
    )
    for key, says, factors in known:
        if like(factors):
            return key, says
    return "another formula", "At this size the two do not take the same time. Put it into both formulas."


def _solved(n: int, star_latency: float = 2, star_bytes: float = 0) -> float:
    """The crossing over latency times bandwidth, with these numbers of latencies and messages in the star."""
    return (2 * (n - 1) - star_latency) / ((star_bytes or 2 * (n - 1)) - 2 * (n - 1) / n)


def _measured_around(size: float) -> str:
    """Both algorithms, paced, at half and at twice the size: a sentence on who was first."""
    ranks, gbps, latency_us = MEASURED_ON
    sizes = [int(size / 2), int(size * 2)]
    call = ({"star": star_all_reduce, "ring": ring_all_reduce}, sizes, 1)
    pace = Pace(gbps, latency_us)
    took = slowest(launch(time_all_reduces, ranks, args=call, pace=pace, progress=False).results)
    star, ring = ([1e3 * repeats[0] for repeats in took[name]] for name in ("star", "ring"))
    return (
        f"paced, {ranks} ranks, {gbps:g} Gbit/s, {latency_us / 1e3:g} ms: at half of your size star "
        f"{star[0]:.0f} ms, ring {ring[0]:.0f} ms; at twice your size star {star[1]:.0f} ms, ring "
        f"{ring[1]:.0f} ms"
    )


@exercise(
    "3.4",
    "Stretch: a pipelined ring",
    limit=60.0,
    hints=(
        SEND_FIRST,
        Hint(
            "It is right, but no faster than the plain ring",
            "Look at who waits for what. A segment can be passed on as soon as it has been added; it need "
            "not wait for the rest of its chunk. Post all receives of a phase before you wait for the first, "
            "in the order in which the segments come, each into memory of its own; then, for each: wait, "
            "add, `isend`. Wait for your own sends at the very end.",
            fits=("nothing ahead", "no segments", "whole tensors travel", "uneven bytes"),
        ),
        Hint("What it should look like", "The link does not idle any more.", picture=pictures.pipeline),
    ),
)
def judge_pipelined(lab: Lab, pipelined_all_reduce: Callable) -> None:
    """The sum in place, by the ring's bytes in more messages, faster than a plain ring on a far link."""
    for nproc, length, dtype in ((3, 24, torch.float64), (4, 1001, torch.float32), (2, 37, torch.float64)):
        inputs = [(rank, length, dtype) for rank in range(nproc)]
        outcome = lab.call(
            pipelined_all_reduce, inputs, nproc, via=in_place, tried=f"{length} numbers in place"
        )
        mine = [filled(rank, length, dtype) for rank in range(nproc)]
        lab.same(outcome, [torch.stack(mine).sum(0)] * nproc, what="the sum", local=mine)
    lab.note("2, 3 and 4 ranks: the sum, in place, on every rank")
    counted = lab.call(
        pipelined_all_reduce,
        [(rank, FAR_BYTES // 4, torch.float32) for rank in range(FAR_RANKS)],
        FAR_RANKS,
        via=in_place,
        pace=Pace(),
        tried="counting",
    )
    by_send_and_recv(lab, counted)
    sent, share = counted.bytes_sent("send"), 2 * (FAR_RANKS - 1) * FAR_BYTES // FAR_RANKS
    lab.require(
        max(sent) <= share * 1.01,
        "whole tensors travel",
        "A pipelined ring sends the same bytes as a plain one, in more messages.",
        expected=f"{share} bytes from each rank",
        got=f"by rank: {sent}",
    )
    messages = counted.messages("send")
    lab.require(
        min(messages) > 2 * (FAR_RANKS - 1),
        "no segments",
        "Each chunk travels in one piece. Cut it into segments, so that a part of it can go on while the "
        "rest is still coming.",
        expected=f"more than {2 * (FAR_RANKS - 1)} messages from each rank",
        got=f"by rank: {messages}",
    )
    lab.note(f"each rank sends {share} bytes, in {messages[0]} messages")
    ratio = _against_plain(lab, pipelined_all_reduce)
    lab.note(f"paced, {FAR}: {ratio:.2f} of the plain ring's time (target: {GAIN:g} or less)")
    lab.note(_against_gloo(lab, pipelined_all_reduce))


def filled(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers that differ from rank to rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-50, 51, (length,), generator=generator).to(dtype)


def in_place(answer: Callable, rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """What an all-reduce leaves in its tensor."""
    tensor = filled(rank, length, dtype)
    answer(tensor)
    return tensor


def race(answers: tuple[Callable, Callable], size: int, repeats: int) -> list[list[float]]:
    """Seconds of two all-reduces in turn, so that both meet the same machine."""
    from course_lib.rings import time_all_reduces

    both = dict(zip(("first", "second"), answers, strict=True))
    rounds = [time_all_reduces(both, [size], 1) for _ in range(repeats)]
    return [[one[name][0][0] for one in rounds] for name in both]


def _medians(results: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """For each of the two, the median over repeats of the slowest rank."""
    return [
        statistics.median(max(one) for one in zip(*(rank[i] for rank in results), strict=True))
        for i in (0, 1)
    ]


def _against_plain(lab: Lab, answer: Callable) -> float:
    """The answer's time over the plain ring's, on the far link; the better of two tries."""
    ratio = float("inf")
    for _ in range(2):
        outcome = lab.call(
            (answer, ring_all_reduce), (FAR_BYTES, 3), FAR_RANKS, via=race, pace=FAR, tried="on a far link"
        )
        mine, plain = _medians(outcome.results)
        ratio = min(ratio, mine / plain)
        if ratio <= GAIN:
            return ratio
    lab.require(
        False,
        "nothing ahead",
        "There are segments, but they gain nothing: something still waits that need not.",
        expected=f"at most {GAIN:g} of the plain ring's time on a link of {FAR}",
        got=f"{ratio:.2f} of it",
    )
    return ratio


def _against_gloo(lab: Lab, answer: Callable) -> str:
    """Bus bandwidth over that of gloo's own all_reduce, unpaced. Reported; nothing depends on it."""
    from torch.distributed import all_reduce

    size = 25_000_000
    outcome = lab.call((answer, all_reduce), (size, 5), FAR_RANKS, via=race, tried="against gloo", timeout=20)
    mine, theirs = _medians(outcome.results)
    bus = cost.bus_bandwidth(size, mine, FAR_RANKS) / 1e9
    own = f"{bus:.2f} GB/s of bus bandwidth, {theirs / mine:.2f} of gloo's own all_reduce"
    return f"unpaced, 25 MB on {FAR_RANKS} ranks: {own}"
