"""Where the time went: arithmetic on the spans of a run, real or simulated.

Two kinds of spans matter. *Compute* is forward, backward and optimizer. *Communication* is whatever lies in
the link's lane, such as the buckets' all-reduces. Communication is hidden while compute goes on, and exposed
where nothing is computed: only exposed communication makes a step longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .spans import INPUT, LINK, Span

# The autograd thread sits in "wait" until the buckets have arrived: it occupies the compute lane, idle.
COMPUTE_NAMES = ("forward", "backward", "optimizer")
WAIT = "wait"

EXPOSED = "exposed communication"
OTHER = "other"
BREAKDOWN = ("input", "forward", "backward", EXPOSED, "optimizer")

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


def named(spans: Iterable[Span], *names: str) -> list[Interval]:
    """When the spans of these names took place."""
    return merge((span.start, span.end) for span in spans if span.name in names)


def communication(spans: Iterable[Span]) -> list[Interval]:
    """When the link was in use: the spans of the link's lane. Spans of one rank."""
    return merge((span.start, span.end) for span in _of_one_rank(spans) if span.lane == LINK)


def compute(spans: Iterable[Span]) -> list[Interval]:
    """When the device computed: forward, backward and optimizer, less any waiting. Spans of one rank."""
    spans = _of_one_rank(spans)
    return subtract(named(spans, *COMPUTE_NAMES), named(spans, WAIT))


def exposed_intervals(spans: Iterable[Span]) -> list[Interval]:
    """When there was communication and no compute. Spans of one rank."""
    spans = list(spans)
    return subtract(communication(spans), compute(spans))


def hidden_intervals(spans: Iterable[Span]) -> list[Interval]:
    """When there was communication behind compute. Spans of one rank."""
    spans = list(spans)
    return intersect(communication(spans), compute(spans))


def exposed(spans: Iterable[Span]) -> float:
    """Seconds of communication that no compute covers. Spans of one rank."""
    return total(exposed_intervals(spans))


def hidden(spans: Iterable[Span]) -> float:
    """Seconds of communication that compute covers. Spans of one rank."""
    return total(hidden_intervals(spans))


def steps(spans: Iterable[Span]) -> list[int]:
    """The numbers of the training steps that were recorded, in order."""
    return sorted({span.step for span in spans if span.step is not None})


def ranks(spans: Iterable[Span]) -> list[int]:
    """The ranks that recorded anything, in order."""
    return sorted({span.rank for span in spans})


def window(spans: Iterable[Span]) -> Interval:
    """From the first start to the last end. ValueError where there are no spans."""
    spans = list(spans)
    if not spans:
        raise ValueError("there are no spans: run with probe(model), or with span(...) around your code")
    return min(span.start for span in spans), max(span.end for span in spans)


def of_step(spans: Iterable[Span], step: int | None) -> list[Span]:
    """The spans of a step, with spans of your own that lie within it; all spans where `step` is None.

    ValueError for a step that was not recorded, naming those that were.
    """
    spans = list(spans)
    if step is None:
        return spans
    inside = [span for span in spans if span.step == step]
    if not inside:
        raise ValueError(f"step {step!r} was not recorded; recorded: {_listed(steps(spans))}")
    bounds = {rank: window(s for s in inside if s.rank == rank) for rank in ranks(inside)}
    for span in spans:
        if span.step is None and span.rank in bounds:
            start, end = bounds[span.rank]
            if start <= span.start and span.end <= end:
                inside.append(span)
    return inside


def step_seconds(spans: Iterable[Span], rank: int, step: int | None) -> float:
    """Seconds from the first start to the last end of a rank's step."""
    start, end = window(_of_rank(spans, rank, step))
    return end - start


def median_step(spans: Iterable[Span], rank: int | None = None) -> int | None:
    """The step of median length, of one rank or of all; None where no steps were recorded.

    The first recorded step is left out where there are others: in DDP's first iteration all gradients share
    one bucket, so nothing can overlap. Of an even number the shorter of the middle two.
    """
    # One pass: a run holds thousands of spans, and a slider redraws at each move.
    bounds: dict[int, Interval] = {}
    for span in spans:
        if span.step is not None and (rank is None or span.rank == rank):
            start, end = bounds.get(span.step, (span.start, span.end))
            bounds[span.step] = min(start, span.start), max(end, span.end)
    recorded = sorted(bounds)
    if not recorded:
        return None
    candidates = recorded[1:] or recorded
    by_length = sorted(candidates, key=lambda step: bounds[step][1] - bounds[step][0])
    return by_length[(len(by_length) - 1) // 2]


def step_breakdown(spans: Iterable[Span], rank: int = 0, step: int | None = None) -> dict[str, float]:
    """Where the seconds of a rank's step went; the values add up to the step.

    Keys: "input", "forward", "backward", "exposed communication", "optimizer", then spans of your own, then
    "other", which nothing accounts for. A moment that several claim counts once: compute first, then
    exposed communication, then input, then your own spans, inner ones first. step: None for the step of
    median length.
    """
    spans = list(spans)
    chosen = _of_rank(spans, rank, median_step(spans, rank) if step is None else step)
    start, end = window(chosen)
    waiting = named(chosen, WAIT)
    claims: list[tuple[str, list[Interval]]] = [
        *((name, subtract(named(chosen, name), waiting)) for name in COMPUTE_NAMES),
        (EXPOSED, exposed_intervals(chosen)),
        ("input", [(s.start, s.end) for s in chosen if s.lane == INPUT]),
    ]
    own = (s for s in chosen if s.lane not in (LINK, INPUT) and s.name not in (*COMPUTE_NAMES, WAIT))
    claims += [(s.name, [(s.start, s.end)]) for s in sorted(own, key=lambda span: span.seconds)]
    seconds = dict.fromkeys(BREAKDOWN, 0.0)
    claimed: list[Interval] = []
    for name, intervals in claims:
        seconds[name] = seconds.get(name, 0.0) + total(subtract(intervals, claimed))
        claimed = merge([*claimed, *intervals])
    seconds[OTHER] = max(0.0, (end - start) - total(claimed))
    return seconds


def _of_rank(spans: Iterable[Span], rank: int, step: int | None) -> list[Span]:
    spans = list(spans)
    of_rank = [span for span in spans if span.rank == rank]
    if not of_rank:
        raise ValueError(f"rank {rank!r} recorded no spans; those that did: {_listed(ranks(spans))}")
    return of_step(of_rank, step)


def _of_one_rank(spans: Iterable[Span]) -> list[Span]:
    spans = list(spans)
    found = ranks(spans)
    if len(found) > 1:
        raise ValueError(
            f"these spans are of ranks {_listed(found)}; give those of one, such as select(spans, rank=0)"
        )
    return spans


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(number) for number in numbers) or "none"
