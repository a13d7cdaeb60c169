"""The explorer and the explanation: what a learner touches follows what they set."""

from __future__ import annotations

import pytest

from course_lib import Pace
from course_lib.explain import explain
from course_lib.explorer import BucketExplorer
from course_lib.simulate import Layer, simulate_step
from course_lib.spans import INPUT, LINK, Span

LAYERS = [Layer("linear", (2**20,), 0.004, 0.008)] * 12
PACE = Pace(gbps=0.5, latency_us=50)


def test_moving_a_slider_redraws_the_picture():
    explorer = BucketExplorer(LAYERS, ranks=4)
    before = bytes(explorer.picture.value)
    assert bytes(before).startswith(b"\x89PNG")
    explorer.cap.value = 25
    assert bytes(explorer.picture.value) != before


def test_the_explorer_simulates_what_its_sliders_say():
    explorer = BucketExplorer(LAYERS, ranks=4, pace=PACE)
    explorer.cap.value, explorer.ranks.value = 2, 64
    expected = simulate_step(LAYERS, 64, 0.5, 50, bucket_cap_mb=2)
    assert explorer.simulation().step_seconds == expected.step_seconds


def test_measured_points_appear_only_on_the_link_and_ranks_that_they_were_measured_on():
    explorer = BucketExplorer(LAYERS, ranks=4, measured={PACE: {2: [0.2], 25: [0.3]}})
    assert dict(explorer.points()) == {2: [0.2], 25: [0.3]}
    explorer.gbps.value = 10
    assert not explorer.points()
    explorer.gbps.value, explorer.ranks.value = 0.5, 8
    assert not explorer.points()


def test_without_a_front_end_the_explorer_leaves_its_picture_and_its_words():
    bundle = BucketExplorer(LAYERS, ranks=4, pace=PACE)._repr_mimebundle_()
    assert isinstance(bundle["image/png"], str)
    assert "modelled" in bundle["text/plain"] and "0.5 Gbit/s" in bundle["text/plain"]


def test_an_explorer_needs_a_link():
    with pytest.raises(ValueError, match="bandwidth"):
        BucketExplorer(LAYERS, ranks=4, pace=Pace())


class FakeRun:
    kind = "measured"

    def __init__(self, spans):
        self.spans = spans


def step(*parts, transfers=()):
    spans = [Span(0, name, start, end, None, lane, 1) for name, start, end, lane in parts]
    return FakeRun([*spans, *(Span(0, "all_reduce", a, b, size, LINK, 1) for a, b, size in transfers)])


@pytest.mark.parametrize(
    ("run", "advice"),
    [
        (
            step(("input", 0, 5, INPUT), ("forward", 5, 6, "compute"), ("backward", 6, 8, "compute")),
            "num_workers",
        ),
        (step(("forward", 0, 1, "compute"), ("backward", 1, 3, "compute")), "as long as its computation"),
        (
            step(("forward", 0, 1, "compute"), ("backward", 1, 3, "compute"), transfers=[(3, 6, 10**7)]),
            "smaller bucket_cap_mb",
        ),
        (
            step(
                ("forward", 0, 1, "compute"),
                ("backward", 1, 3, "compute"),
                transfers=[(2 + i, 3 + i, 1000) for i in range(6)],
            ),
            "larger bucket_cap_mb",
        ),
        (
            step(
                ("forward", 0, 1, "compute"),
                ("backward", 1, 3, "compute"),
                transfers=[(2, 5, 10**7), (5, 8, 10**7)],
            ),
            "no_sync",
        ),
    ],
)
def test_the_advice_names_what_to_change_first(run, advice):
    assert advice in explain(run).advice
