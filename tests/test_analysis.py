"""Where the time went: interval arithmetic against counting milliseconds."""

from __future__ import annotations

import random

import pytest

from course_lib import analysis
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
    assert both == pytest.approx(analysis.total(analysis.communication(spans)))
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
            "exposed communication": 2.0,
            "optimizer": 0.5,
            "clip": 0.2,
            "other": 0.8,
        }
    )


def test_a_median_step_is_not_the_first():
    lengths = [9.0, 1.0, 3.0, 2.0]
    spans = [Span(0, "forward", 10.0 * i, 10.0 * i + length, step=i) for i, length in enumerate(lengths)]
    assert analysis.median_step(spans) == 3
    assert analysis.median_step(spans[:1]) == 0
    assert analysis.median_step([Span(0, "mine", 0, 1)]) is None


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
