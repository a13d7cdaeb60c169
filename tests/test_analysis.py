"""Where the time went: interval arithmetic against counting milliseconds."""

from __future__ import annotations

import random

import pytest

from course_lib import analysis, intervals
from course_lib.spans import COMPUTE, INPUT, LINK, Span


def by_ticks(spans):
    """An oracle: exposed milliseconds counted one by one. All spans start and end on whole milliseconds."""
    exposed = 0
    for tick in range(200):
        middle = (tick + 0.5) * 1e-3
        running = [span for span in spans if span.start < middle < span.end]
        talking = any(span.lane == LINK for span in running)
        waiting = any(span.name == "wait" for span in running)
        computing = not waiting and any(span.name in ("forward", "backward", "optimizer") for span in running)
        exposed += talking and not computing
    return exposed * 1e-3


@pytest.mark.parametrize("seed", range(30))
def test_exposed_equals_counting_milliseconds(seed):
    draw = random.Random(seed)
    spans = []
    for _ in range(draw.randint(1, 12)):
        start = draw.randint(0, 180)
        name = draw.choice(["forward", "backward", "optimizer", "wait", "all_reduce", "all_reduce", "mine"])
        lane = LINK if name == "all_reduce" else COMPUTE
        spans.append(Span(0, name, start * 1e-3, draw.randint(start, 199) * 1e-3, lane=lane, step=0))
    assert analysis.exposed(spans) == pytest.approx(by_ticks(spans), abs=1e-9)
    both = analysis.exposed(spans) + analysis.hidden(spans)
    assert both == pytest.approx(intervals.total(analysis.communication(spans)))
    parts = analysis.step_breakdown(spans, 0, 0)
    assert sum(parts.values()) == pytest.approx(analysis.step_seconds(spans, 0, 0))


def test_a_breakdown_by_hand():
    spans = [
        Span(0, "input", 1.0, 1.5, lane=INPUT, step=3),
        Span(0, "forward", 1.5, 2.5, step=3),
        Span(0, "backward", 3.0, 5.0, step=3),
        Span(0, "all_reduce", 4.0, 7.0, 100, LINK, 3, "bucket 0"),
        Span(0, "wait", 5.0, 7.0, step=3),
        Span(0, "clip", 7.0, 7.2),
        Span(0, "optimizer", 7.5, 8.0, step=3),
        Span(1, "forward", 0.0, 9.0, step=3),
    ]
    assert analysis.step_breakdown(spans, rank=0, step=3) == pytest.approx(
        {
            "input": 0.5,
            "forward": 1.0,
            "backward": 2.0,
            "waiting for other ranks": 0.0,
            "exposed communication": 2.0,
            "optimizer": 0.5,
            "clip": 0.2,
            "other": 0.8,
        }
    )


def late_rank(*, raw_from_launch):
    """Rank 1 launches two buckets at 5 and 6; rank 0 had launched them at 2 and 3, and computed until 4.

    raw_from_launch: True as in a measured run, whose spans begin at each rank's own launch; False as in a
    paced one, whose spans begin when the last rank has come.
    """
    first, second = (2.0, 3.0) if raw_from_launch else (5.0, 6.5)
    return [
        Span(0, "forward", 0.0, 1.0, step=2),
        Span(0, "backward", 1.0, 4.0, step=2),
        Span(0, "all_reduce", first, 6.0, 100, LINK, 2, "bucket 0"),
        Span(0, "all_reduce", second, 7.0, 100, LINK, 2, "bucket 1"),
        Span(0, "wait", 4.0, 7.5, step=2),
        Span(0, "optimizer", 7.5, 8.0, step=2),
        Span(1, "backward", 4.0, 6.5, step=2),
        Span(1, "all_reduce", 5.0, 6.0, 100, LINK, 2, "bucket 0"),
        Span(1, "all_reduce", 6.5, 7.0, 100, LINK, 2, "bucket 1"),
        Span(1, "wait", 6.5, 7.5, step=2),
    ]


@pytest.mark.parametrize("raw_from_launch", [True, False])
def test_waiting_for_a_late_rank_is_not_communication(raw_from_launch):
    spans = late_rank(raw_from_launch=raw_from_launch)
    parts = analysis.step_breakdown(spans, rank=0)
    assert parts["waiting for other ranks"] == pytest.approx(1.5)
    assert parts["exposed communication"] == pytest.approx(1.5)
    assert parts["other"] == pytest.approx(0.5)  # after the last transfer nobody is waited for
    assert sum(parts.values()) == pytest.approx(8.0)
    late = analysis.step_breakdown(spans, rank=1)
    assert late["waiting for other ranks"] == 0
    assert late["exposed communication"] == pytest.approx(0.5)
    waits = [span for span in analysis.effective(spans) if span.lane == analysis.WAITING_LANE]
    assert {(span.rank, span.name, span.detail) for span in waits} == {(0, analysis.WAITING, "rank 1")}
    assert [(span.start, span.end) for span in waits] == [(4.0, 5.0), (6.0, 6.5)]
    begins = {(s.rank, s.detail): s.start for s in analysis.effective(spans) if s.lane == LINK}
    assert begins[0, "bucket 0"] == begins[1, "bucket 0"] == 5.0


def test_one_rank_alone_waits_for_nobody():
    spans = [span for span in late_rank(raw_from_launch=True) if span.rank == 0]
    assert analysis.effective(spans) == spans
    assert analysis.step_breakdown(spans)["waiting for other ranks"] == 0


def test_only_what_belongs_together_is_matched():
    """Messages from one to one, groups of some ranks that work one after the other, unequal numbers."""
    apart = [Span(0, "all_reduce", 0, 1, 1, LINK, 2), Span(1, "all_reduce", 5, 6, 1, LINK, 2)]
    messages = [Span(0, "send", 0, 4, 1, LINK, 2), Span(1, "send", 3, 5, 1, LINK, 2)]
    unequal = [Span(0, "all_reduce", 0, 4, 1, LINK, 2), *(Span(1, "all_reduce", 3, 5, 1, LINK, 2),) * 2]
    for spans in (apart, messages, unequal):
        assert analysis.effective(spans) == spans
    # Without a detail, the first belongs to the first.
    repeated = [Span(r, "all_reduce", 2 * k + r, 2 * k + 2, 1, LINK, 2) for r in (0, 1) for k in (0, 1)]
    begins = [span.start for span in analysis.effective(repeated) if span.lane == LINK]
    assert begins == [1, 3, 1, 3]


def test_loading_data_meanwhile_is_input_and_not_waiting():
    spans = [*late_rank(raw_from_launch=True), Span(0, "input", 4.25, 4.75, lane=INPUT, step=2)]
    parts = analysis.step_breakdown(spans, rank=0)
    assert (parts["input"], parts["waiting for other ranks"]) == pytest.approx((0.5, 1.0))
    waits = [span for span in analysis.effective(spans) if span.lane == analysis.WAITING_LANE]
    assert sum(span.seconds for span in waits) == pytest.approx(1.0)


def test_the_rank_that_backward_ends_on_last_is_known_for_each_step():
    spans = [
        Span(r, "backward", 0, end, step=s)
        for s, ends in enumerate([(1, 2), (4, 3)])
        for r, end in enumerate(ends)
    ]
    assert analysis.last_ranks(spans) == {0: 1, 1: 0}


@pytest.mark.parametrize(
    ("lengths", "chosen"), [([9, 1, 3, 2], 3), ([9, 1, 3], 1), ([9, 5], 1), ([9], 0), ([9, 1, 5, 6, 7], 3)]
)
def test_a_median_step_is_not_one_of_the_first_two(lengths, chosen):
    spans = [Span(0, "forward", 10.0 * i, 10.0 * i + length, step=i) for i, length in enumerate(lengths)]
    assert analysis.median_step(spans) == chosen
    assert analysis.median_step([Span(0, "mine", 0, 1)]) is None


def test_the_median_step_is_that_of_all_ranks():
    # Rank 0 alone would choose step 3 (length 2); with rank 1 the steps last 5, 9 and 6.
    own, whole = {2: 1.0, 3: 2.0, 4: 3.0}, {2: 5.0, 3: 9.0, 4: 6.0}
    spans = [Span(0, "forward", 10 * s, 10 * s + length, step=s) for s, length in own.items()]
    spans += [Span(1, "forward", 10 * s, 10 * s + length, step=s) for s, length in whole.items()]
    assert analysis.median_step(spans) == 4
    assert sum(analysis.step_breakdown(spans, 0).values()) == pytest.approx(3.0)


def test_questions_that_have_no_answer_say_why():
    spans = [Span(0, "forward", 0, 1, step=0), Span(1, "forward", 0, 1, step=0)]
    with pytest.raises(ValueError, match="of ranks 0, 1; give those of one"):
        analysis.exposed(spans)
    with pytest.raises(ValueError, match="step 7 was not recorded; recorded: 0"):
        analysis.of_step(spans, 7)
    with pytest.raises(ValueError, match="rank 5 recorded no spans; those that did: 0, 1"):
        analysis.step_breakdown(spans, rank=5)
    with pytest.raises(ValueError, match="there are no spans"):
        analysis.window([])
