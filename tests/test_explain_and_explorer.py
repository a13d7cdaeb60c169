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


C = "compute"
DDP_STEP = [("forward", 0, 1, C), ("backward", 1, 3, C)]


def step(*parts, transfers=(), number=3, rank=0):
    """A run of one step; transfers: (start, end, bytes) of each bucket."""
    spans = [Span(rank, name, start, end, None, lane, number) for name, start, end, lane in parts]
    sent = [
        Span(rank, "all_reduce", start, end, size, LINK, number, f"bucket {index}")
        for index, (start, end, size) in enumerate(transfers)
    ]
    return FakeRun([*spans, *sent])


@pytest.mark.parametrize(
    ("run", "advice"),
    [
        (step(("input", 0, 5, INPUT), ("forward", 5, 6, C), ("backward", 6, 8, C)), "num_workers"),
        (step(*DDP_STEP), "as long as its computation"),
        (step(*DDP_STEP, transfers=[(3, 6, 10**7)]), "smaller bucket_cap_mb: at most 2,000 ms more"),
        (step(*DDP_STEP, transfers=[(2 + i, 3 + i, 1000) for i in range(6)]), "larger bucket_cap_mb"),
        (step(*DDP_STEP, transfers=[(2, 5, 10**7), (5, 8, 10**7)]), "no_sync"),
    ],
)
def test_the_advice_names_what_to_change_first(run, advice):
    assert advice in explain(run).advice


def test_no_bucket_size_is_advised_where_backward_is_too_short_to_hide_the_communication():
    advice = explain(step(*DDP_STEP, transfers=[(3, 23, 10**7)])).advice
    assert "20,000 ms of communication stand against 2,000 ms of backward" in advice
    assert "no bucket size can hide it" in advice and "no_sync" in advice
    assert "bucket_cap_mb" not in advice
    # A little is hidden already, and what could be added is little.
    advice = explain(step(*DDP_STEP, transfers=[(1.5, 6, 10**7), (6, 12, 10**7)])).advice
    assert "no bucket size can hide the rest" in advice


def test_communication_of_your_own_gets_no_advice_on_buckets():
    run = step(*DDP_STEP)
    run.spans.append(Span(0, "all_reduce", 3, 6, 10**7, LINK, 3))
    advice = explain(run).advice
    assert "3,000 ms of communication stand against 2,000 ms of backward" in advice
    assert "bucket" not in advice


def late_rank(kind="measured", number=2, late=(1, 1, 1, 1)):
    """Four steps on `number` ranks; in each the rank in `late` launches its bucket 4 s after the others."""
    spans = []
    for step, last in enumerate(late, start=2):
        for rank in range(number):
            computed = 100 * step + (6 if rank == last else 2)
            spans += [
                Span(rank, "backward", 100 * step, computed, step=step),
                Span(rank, "all_reduce", computed, 100 * step + 7, 10**7, LINK, step, "bucket 0"),
                Span(rank, "wait", computed, 100 * step + 7, step=step),
            ]
    run = FakeRun(spans)
    run.kind = kind
    return run


def test_waiting_for_a_late_rank_is_said_with_its_name(monkeypatch):
    monkeypatch.setattr("course_lib.explain.usable_cores", lambda: 2)
    explanation = explain(late_rank())
    assert explanation.seconds["waiting for other ranks"] == 4
    assert "rank 0 waits for rank 1, the last to launch" in explanation.advice
    assert "in 4 of 4 steps" in explanation.advice and "equal work" in explanation.advice
    assert "rank 1" not in explain(late_rank(), 1).advice  # the late one waits for nobody


def test_ranks_that_share_cores_are_told_so(monkeypatch):
    monkeypatch.setattr("course_lib.explain.usable_cores", lambda: 2)
    assert "4 ranks share 2 cores" in explain(late_rank(number=4)).advice
    assert "equal work" in explain(late_rank("paced", number=4)).advice  # paced compute shares nothing
    slow = late_rank(number=4)
    slow.spans = [span for span in slow.spans if span.name != "wait"]
    slow.spans = [
        Span(
            s.rank, s.name, s.start, s.end + (50 if s.lane == LINK else 0), s.bytes, s.lane, s.step, s.detail
        )
        for s in slow.spans
    ]
    assert "communication needs them too" in explain(slow, 1).advice


def test_a_delay_that_moves_from_rank_to_rank_is_not_unequal_work(monkeypatch):
    monkeypatch.setattr("course_lib.explain.usable_cores", lambda: 8)
    run = late_rank(number=4, late=(1, 2, 3, 1))
    advice = explain(run).advice
    assert "moves from rank to rank" in advice and "1 of 4" in advice
    assert "equal work" not in advice


def test_time_in_which_nothing_was_recorded_is_not_called_computation():
    run = step(("forward", 0, 1, C), ("backward", 3, 5, C))
    assert "40% of the step (2,000 ms) nothing was recorded" in explain(run).advice
    assert "as long as its computation" not in explain(run).advice
    # With a wait that is shorter, both are said, the larger first.
    run = step(("input", 0, 1, INPUT), ("forward", 1, 2, C), ("backward", 5, 6, C))
    advice = explain(run).advice
    assert 0 <= advice.index("nothing was recorded") < advice.index("num_workers")


def test_a_run_without_steps_says_what_to_do():
    with pytest.raises(ValueError, match=r"no training step: call probe\(model\).*loop runs at least once"):
        explain(FakeRun([Span(0, "mine", 0, 1)]))
    with pytest.raises(ValueError, match="rank 7 recorded no spans"):
        explain(step(*DDP_STEP), 7)


def test_a_run_of_one_step_says_that_it_is_not_typical():
    run = step(*DDP_STEP, transfers=[(3, 6, 10**7)], number=0)
    assert "only the first step was recorded" in repr(explain(run))
    assert "only the first step was recorded" in explain(run)._repr_html_()
    assert "one bucket, whatever the cap" in explain(run).advice
    assert "only the first" not in repr(explain(step(*DDP_STEP)))


def test_no_workers_are_advised_for_a_batch_that_is_there_at_once():
    run = step(("input", 0, 0.0015, INPUT), ("forward", 0.0015, 0.002, C), ("backward", 0.002, 0.004, C))
    advice = explain(run).advice
    assert "fetching the batch" in advice and "num_workers" not in advice
