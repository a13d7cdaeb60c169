"""Where the time went: arithmetic on the spans of a run, real or simulated.

Two kinds of spans matter. *Compute* is forward, backward and optimizer. *Communication* is whatever lies in
the link's lane, such as the buckets' all-reduces. Communication is hidden while compute goes on, and exposed
where nothing is computed: only exposed communication makes a step longer.

A transfer begins when the last rank launches it. What a rank that was earlier spends until then is no
communication but waiting for other ranks; `effective` tells the two apart.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from .intervals import Interval, intersect, merge, subtract, total
from .spans import INPUT, LINK, Span

# The autograd thread sits in "wait" until the buckets have arrived: it occupies the compute lane, idle.
COMPUTE_NAMES = ("forward", "backward", "optimizer")
WAIT = "wait"

EXPOSED = "exposed communication"
WAITING = "waiting for other ranks"
OTHER = "other"
BREAKDOWN = ("input", "forward", "backward", WAITING, EXPOSED, "optimizer")
WAITING_LANE = "waiting"
# One end of a message each: a send does not begin when the receiver does.
_POINT_TO_POINT = ("send", "recv")


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


def waiting(spans: Iterable[Span]) -> float:
    """Seconds without compute, spent on exposed communication or on waiting for other ranks.

    Spans of one rank, as `effective` gave them.
    """
    spans = list(spans)
    return total([*exposed_intervals(spans), *_in_lane(spans, WAITING_LANE)])


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


def median_step(spans: Iterable[Span]) -> int | None:
    """The step of median length over all ranks that `spans` hold; None where no steps were recorded.

    Steps 0 and 1 are left out where two later ones exist, else the first where there are others: in step 0
    all of DDP's gradients share one bucket, so nothing can overlap, and in step 1 DDP rebuilds its buckets.
    Of an even number the shorter of the middle two.
    """
    # One pass: a run holds thousands of spans, and a slider redraws at each move.
    bounds: dict[int, Interval] = {}
    for span in spans:
        if span.step is not None:
            start, end = bounds.get(span.step, (span.start, span.end))
            bounds[span.step] = min(start, span.start), max(end, span.end)
    recorded = sorted(bounds)
    if not recorded:
        return None
    settled = [step for step in recorded if step >= 2]
    candidates = settled if len(settled) >= 2 else recorded[1:] or recorded
    by_length = sorted(candidates, key=lambda step: bounds[step][1] - bounds[step][0])
    return by_length[(len(by_length) - 1) // 2]


def last_ranks(spans: Iterable[Span]) -> dict[int | None, int]:
    """For each step the rank whose backward ended last: the one that the others wait for."""
    latest: dict[int | None, tuple[float, int]] = {}
    for span in spans:
        if span.name == "backward":
            latest[span.step] = max(latest.get(span.step, (span.end, span.rank)), (span.end, span.rank))
    return {step: rank for step, (_, rank) in latest.items()}


def effective(spans: Iterable[Span]) -> list[Span]:
    """The same spans, each transfer from when it really began, and the waiting for other ranks before it.

    spans: those of all ranks, of one step (`of_step`). A collective begins at its latest start over the
    ranks. Where a rank had launched it before, or sits in "wait" for it, and neither computes nor
    communicates nor fetches data, a span named `WAITING` is added, in a lane of its own, whose detail says
    for whom ("rank 1"; empty where that is not known). Spans of a single rank come back as they are.
    """
    spans = list(spans)
    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append(span)
    if len(by_rank) < 2:
        return spans
    late = _late(spans)
    last = last_ranks(spans)
    result = []
    for rank, raw in by_rank.items():
        moved = [replace(s, start=late[id(s)][0]) if id(s) in late else s for s in raw]
        result += [*moved, *_waits(rank, raw, moved, late, last)]
    return result


def _late(spans: Sequence[Span]) -> dict[int, tuple[float, int]]:
    """For each transfer (by `id`) that another rank launched later: when that was, and which rank."""
    calls: dict[tuple, dict[int, list[Span]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.lane == LINK and span.name not in _POINT_TO_POINT:
            calls[span.step, span.name, span.detail][span.rank].append(span)
    late: dict[int, tuple[float, int]] = {}
    for of_ranks in calls.values():
        of_each = [sorted(of_rank, key=lambda span: span.start) for of_rank in of_ranks.values()]
        if len({len(of_rank) for of_rank in of_each}) > 1:
            continue
        for together in zip(*of_each, strict=True):
            last = max(together, key=lambda span: span.start)
            # What does not overlap are different transfers, of groups of some ranks.
            if last.start < min(span.end for span in together):
                late |= {id(s): (last.start, last.rank) for s in together if s.start < last.start}
    return late


def _waits(
    rank: int,
    raw: Sequence[Span],
    moved: Sequence[Span],
    late: Mapping[int, tuple[float, int]],
    last: Mapping[int | None, int],
) -> list[Span]:
    """The waiting of one rank for others. raw: its spans; moved: the same from when transfers began."""
    launched = [(s.start, *late[id(s)]) for s in raw if id(s) in late]
    sent = [span for span in moved if span.lane == LINK]
    taken = merge([*compute(moved), *communication(moved), *_in_lane(moved, INPUT)])
    found = []
    for step in {span.step for span in raw}:
        idle = [(s.start, late[id(s)][0]) for s in raw if id(s) in late and s.step == step]
        for span in raw:
            if span.name == WAIT and span.step == step:
                # After the last transfer a rank waits for nobody: DDP hands out what has arrived.
                arrived = max((s.end for s in sent if s.start < span.end), default=span.start)
                idle.append((span.start, min(span.end, arrived)))
        for start, end in subtract(idle, taken):
            begun = [(begins, by) for since, begins, by in launched if since <= start and end <= begins]
            whom = min(begun)[1] if begun else last.get(step, rank)
            detail = f"rank {whom}" if whom != rank else ""
            found.append(Span(rank, WAITING, start, end, None, WAITING_LANE, step, detail))
    return found


def step_breakdown(spans: Iterable[Span], rank: int = 0, step: int | None = None) -> dict[str, float]:
    """Where the seconds of a rank's step went; the values add up to the step.

    spans: of all ranks, so that waiting for others can be told from communication. Keys: "input",
    "forward", "backward", "waiting for other ranks", "exposed communication", "optimizer", then spans of
    your own, then "other", which nothing accounts for. A moment that several claim counts once: compute
    first, then exposed communication, input, waiting, then your own spans, inner ones first. step: None
    for the step of median length.
    """
    spans = list(spans)
    step = median_step(spans) if step is None else step
    start, end = window(_of_rank(spans, rank, step))
    chosen = [span for span in effective(of_step(spans, step)) if span.rank == rank]
    waiting = named(chosen, WAIT)
    claims: list[tuple[str, list[Interval]]] = [
        *((name, subtract(named(chosen, name), waiting)) for name in COMPUTE_NAMES),
        (EXPOSED, exposed_intervals(chosen)),
        ("input", _in_lane(chosen, INPUT)),
        (WAITING, _in_lane(chosen, WAITING_LANE)),
    ]
    claims += [(s.name, [(s.start, s.end)]) for s in reversed(own_spans(chosen))]
    seconds = dict.fromkeys(BREAKDOWN, 0.0)
    claimed: list[Interval] = []
    for name, intervals in claims:
        seconds[name] = seconds.get(name, 0.0) + total(subtract(intervals, claimed))
        claimed = merge([*claimed, *intervals])
    seconds[OTHER] = max(0.0, (end - start) - total(claimed))
    return seconds


def own_spans(spans: Iterable[Span]) -> list[Span]:
    """The spans that the learner named, longest first."""
    known = (*COMPUTE_NAMES, WAIT)
    elsewhere = (LINK, INPUT, WAITING_LANE)
    own = (span for span in spans if span.lane not in elsewhere and span.name not in known)
    return sorted(own, key=lambda span: -span.seconds)


def _in_lane(spans: Iterable[Span], lane: str) -> list[Interval]:
    return merge((span.start, span.end) for span in spans if span.lane == lane)


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
