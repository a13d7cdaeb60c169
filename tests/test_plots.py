"""What the figures say: numbers equal to the arithmetic, the kind named, colours fixed, errors clear."""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
import subprocess
import sys

import pytest

os.environ.setdefault("MPLBACKEND", "agg")

import matplotlib as mpl
from matplotlib import colors, pyplot

from course_lib import analysis, figure, plots
from course_lib.figure import EXPOSED_COLOUR, HIDDEN_COLOUR, RANK_COLOURS
from course_lib.simulate import Layer, simulate_step, sweep_bucket_caps
from course_lib.spans import LINK, Span

LAYERS = [Layer(f"layer {index}", (1_000_000, 1_000_000), 0.006, 0.018) for index in range(12)]


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def simulated(cap=4, **options):
    return simulate_step(LAYERS, 4, 2, 1500, cap, optimizer_seconds=0.012, **options)


def on_ranks(simulation, ranks, steps=1, slower=0.0):
    """The spans as a real run has them: on another clock, the later ranks slower."""
    return [
        dataclasses.replace(
            span,
            rank=rank,
            step=step,
            start=100 + step + span.start * (1 + slower * rank),
            end=100 + step + span.end * (1 + slower * rank),
        )
        for step in range(steps)
        for rank in range(ranks)
        for span in simulation.spans
    ]


def texts(ax):
    """Everything that a reader of these axes can read."""
    written = [text.get_text() for text in ax.texts]
    titles = [ax.get_title(loc) for loc in ("left", "center", "right")]
    return [text for text in [*written, *titles, ax.get_xlabel(), ax.get_ylabel()] if text]


def amount(ax, word):
    """The milliseconds that a label such as "exposed 84 ms" gives."""
    found = [re.fullmatch(rf"{word} ([\d.,]+) ms", text) for text in texts(ax)]
    return [float(match[1].replace(",", "")) for match in found if match]


def filled(ax, colour):
    """The milliseconds of each box of this colour in the rows (not the bands behind them)."""
    wanted = colors.to_rgba(colour)
    widths = []
    for collection in ax.collections:
        faces = collection.get_facecolor()
        if collection.get_zorder() == 2 and len(faces) and tuple(faces[0]) == pytest.approx(wanted):
            for path in collection.get_paths():
                x = path.vertices[:, 0]
                widths.append(x.max() - x.min())
    return widths


# Timelines


@pytest.mark.parametrize("cap", [0.01, 1, 4, 25, 1000])
def test_a_timeline_gives_the_exposed_and_hidden_time_that_arithmetic_gives(cap):
    simulation = simulated(cap)
    ax = plots.timeline(simulation)
    assert amount(ax, "exposed") == [pytest.approx(simulation.exposed_seconds * 1e3, abs=0.51)]
    assert amount(ax, "hidden") == [pytest.approx(simulation.overlap_seconds * 1e3, abs=0.51)]
    assert sum(filled(ax, EXPOSED_COLOUR)) == pytest.approx(simulation.exposed_seconds * 1e3)
    assert sum(filled(ax, HIDDEN_COLOUR)) == pytest.approx(simulation.overlap_seconds * 1e3)
    assert f"{simulation.step_seconds * 1e3:.0f} ms" in texts(ax)


def test_a_timeline_names_its_kind_its_step_and_its_units():
    ax = plots.timeline(on_ranks(simulated(), 2, steps=3), kind="paced", step=2)
    assert ax.get_title("right") == "paced"
    assert "step 2" in ax.get_title("left")
    assert "milliseconds" in ax.get_xlabel()
    assert plots.timeline(simulated()).get_title("right") == "modelled"


def test_a_timeline_starts_where_the_step_starts():
    ax = plots.timeline(on_ranks(simulated(), 2, steps=3), kind="paced", step=2)
    assert ax.get_xlim()[0] == 0
    assert ax.get_xlim()[1] < 3 * simulated().step_seconds * 1e3


def test_the_first_step_is_not_representative():
    spans = on_ranks(simulated(1000), 2) + [
        dataclasses.replace(span, step=span.step + 1) for span in on_ranks(simulated(4), 2, steps=2)
    ]
    ax = plots.timeline(spans, kind="paced")
    assert "step 1" in ax.get_title("left")


def test_a_rank_has_one_colour_in_every_figure():
    spans = on_ranks(simulated(), 4)
    whole, part = plots.timeline(spans, kind="paced"), plots.timeline(spans, kind="paced", ranks=[2])
    for rank, colour in enumerate(RANK_COLOURS[:4]):
        assert filled(whole, colour) == [pytest.approx(216)], rank
        assert bool(filled(part, colour)) == (rank == 2)


def test_many_ranks_become_a_choice_that_keeps_the_extremes():
    spans = on_ranks(simulated(), 9)
    late = [s if s.rank != 5 or s.lane != LINK else dataclasses.replace(s, end=s.end + 0.05) for s in spans]
    ax = plots.timeline(late, kind="paced")
    title = ax.get_title("left")
    assert "the first, the last, the least and the most waiting of 9 ranks" in title
    names = [text for text in texts(ax) if text.startswith("rank ")]
    assert names == ["rank 0", "rank 5", "rank 8"]
    assert plots.timeline(late, kind="paced", ranks=[1, 2]).get_title("left").endswith("ranks 1, 2 of 9")


def test_buckets_are_drawn_one_after_the_other_and_labelled():
    # Three in flight at once, as gloo's two threads and its queue do: the picture shows them queue.
    spans = [Span(0, "backward", 0, 0.1, step=0)] + [
        Span(0, "all_reduce", 0.01 * k, 0.05 * (k + 1), 10 * 2**20, LINK, 0, f"bucket {k}") for k in range(3)
    ]
    ax = plots.timeline(spans, kind="measured")
    assert filled(ax, HIDDEN_COLOUR) == [pytest.approx(100)]
    assert filled(ax, EXPOSED_COLOUR) == [pytest.approx(50)]
    assert texts(ax).count("10 MiB") == 3


def late_rank():
    """Rank 0 is through with backward at 4 and waits until rank 1 launches its bucket at 6."""
    return [
        Span(0, "backward", 0.000, 0.004, step=2),
        Span(0, "all_reduce", 0.003, 0.008, 2**20, LINK, 2, "bucket 0"),
        Span(0, "wait", 0.004, 0.008, step=2),
        Span(1, "backward", 0.000, 0.007, step=2),
        Span(1, "all_reduce", 0.006, 0.008, 2**20, LINK, 2, "bucket 0"),
        Span(1, "wait", 0.007, 0.008, step=2),
    ]


def test_waiting_for_another_rank_is_drawn_as_such_and_not_as_communication():
    ax = plots.timeline(late_rank(), kind="measured")
    assert "waits for rank 1" in texts(ax)
    assert filled(ax, figure.WAITING_COLOUR) == [pytest.approx(2)]
    assert amount(ax, "exposed") == [2.0, 1.0]
    assert amount(ax, "hidden") == [0.0, 1.0]
    (compared,) = plots.compare_timelines([Recorded(late_rank())], ["one"])
    assert amount(compared, "exposed") == [2.0]
    assert filled(compared, figure.WAITING_COLOUR) == [pytest.approx(2)]
    breakdown = texts(plots.breakdown(late_rank(), kind="measured"))
    assert any(text.startswith(("waiting for other ranks", "waiting for\n")) for text in breakdown)


class Recorded:
    kind = "measured"

    def __init__(self, spans):
        self.spans = spans


def test_a_wait_that_is_too_narrow_for_words_is_named_beside():
    spans = [*late_rank(), Span(0, "forward", -0.1, 0.0, step=2), Span(1, "forward", -0.1, 0.0, step=2)]
    assert texts(plots.timeline(spans, kind="measured")).count("waits for rank 1") == 1


def test_every_phase_is_named_once_even_if_it_is_narrow():
    spans = [
        Span(0, "input", 0.000, 0.001, lane="input", step=2),
        Span(0, "forward", 0.001, 0.002, step=2),
        Span(0, "backward", 0.002, 0.003, step=2),
        Span(0, "all_reduce", 0.003, 0.200, 2**20, LINK, 2, "bucket 0"),
        Span(0, "optimizer", 0.200, 0.201, step=2),
    ]
    both = [*spans, *(dataclasses.replace(span, rank=1) for span in spans)]
    ax = plots.timeline(both, kind="measured")
    for name in ("input", "forward", "backward", "optimizer"):
        assert texts(ax).count(name) == 1
    ax.figure.canvas.draw()
    boxes = sorted(
        text.get_window_extent().extents.tolist() for text in ax.texts if text.get_text() in plots.PHASES
    )
    assert all(left[2] <= right[0] for left, right in itertools.pairwise(boxes))


def test_messages_are_not_counted_as_buckets():
    spans = [Span(0, "forward", 0, 0.1, step=2), Span(0, "backward", 0.1, 0.2, step=2)]
    spans += [Span(0, "broadcast", 0, 1e-5, 8, LINK, 2) for _ in range(2)]
    spans += [
        Span(0, "all_reduce", 0.15 + k / 100, 0.16 + k / 100, 589_824, LINK, 2, f"bucket {k}")
        for k in range(12)
    ]
    assert "12 buckets of 576 KiB + 2 messages" in texts(plots.timeline(spans, kind="paced"))


def test_a_number_without_a_unit_is_written_only_where_the_row_gives_the_unit():
    narrow = [
        Span(0, "backward", 0.0, 1.0, step=2),
        *(Span(0, "all_reduce", k / 22, (k + 1) / 22, 589_824, LINK, 2, f"bucket {k}") for k in range(22)),
    ]
    written = texts(plots.timeline(narrow, kind="paced"))
    assert written.count("576") == 22
    assert "22 buckets\nof 576 KiB" in written
    mixed = [*narrow, Span(0, "broadcast", 0, 0.001, 8, LINK, 2)]
    assert "576" not in texts(plots.timeline(mixed, kind="paced"))


def test_all_figures_speak_of_the_step_that_is_explained():
    from course_lib.explain import explain

    whole = {0: 9, 1: 1, 2: 0.3, 3: 0.9, 4: 0.6}
    spans = [Span(0, "forward", 10 * s, 10 * s + 0.1 * s, step=s) for s in range(5)]
    spans += [Span(1, "forward", 10 * s, 10 * s + length, step=s) for s, length in whole.items()]
    assert explain(Recorded(spans)).step == 4
    assert "step 4" in plots.timeline(spans, kind="measured").get_title("left")
    assert "step 4" in plots.breakdown(spans, kind="measured").get_title("left")
    (ax,) = plots.compare_timelines([Recorded(spans)], ["one"])
    assert "400 ms" in texts(ax)


def test_your_own_spans_are_drawn_with_their_names():
    simulation = simulated()
    start, end = simulation.spans[-1].start, simulation.spans[-1].end
    spans = [*simulation.spans, Span(0, "clip gradients", start, end), Span(0, "train step", 0, end)]
    assert {"clip gradients", "train step", "yours"} <= set(texts(plots.timeline(spans, kind="measured")))
    only = plots.timeline([Span(0, "matmul", 5, 6)], kind="measured")
    assert {"matmul", "1,000 ms"} <= set(texts(only))
    assert "link" not in texts(only)


def test_a_step_without_communication_says_so():
    assert "nothing sent" in texts(plots.timeline(simulated(synchronise=False)))


def test_axes_that_are_given_are_drawn_on_and_settings_left_alone():
    with mpl.rc_context({"font.size": 17, "axes.spines.top": True}):
        before = dict(mpl.rcParams)
        _, ax = pyplot.subplots()
        assert plots.timeline(simulated(), ax) is ax
        _, ax = pyplot.subplots()
        assert plots.breakdown(simulated(), ax) is ax
        _, ax = pyplot.subplots()
        assert plots.sweep([1, 2], [0.1, 0.2], ax=ax) is ax
        assert dict(mpl.rcParams) == before


@pytest.mark.parametrize("draw", [plots.timeline, plots.breakdown])
def test_what_cannot_be_drawn_is_said(draw):
    with pytest.raises(ValueError, match=r"no spans were recorded.*probe"):
        draw([], kind="paced")
    with pytest.raises(ValueError, match=r"kind must be one of measured, .*not None"):
        draw(simulated().spans)
    with pytest.raises(ValueError, match="not 'guessed'"):
        draw(simulated(), kind="guessed")
    with pytest.raises(ValueError, match="step 9 was not recorded; recorded: 0"):
        draw(simulated(), step=9)
    with pytest.raises(ValueError, match="cannot draw a int"):
        draw(7, kind="paced")


def test_a_rank_that_recorded_nothing_is_named():
    with pytest.raises(ValueError, match="rank 3 recorded no spans; those that did: 0"):
        plots.timeline(simulated(), ranks=[3])
    with pytest.raises(ValueError, match="rank 3 recorded no spans; those that did: 0"):
        plots.breakdown(simulated(), rank=3)


def test_compared_timelines_share_one_axis_and_name_the_fastest():
    runs = [simulated(cap) for cap in (0.01, 4, 1000)]
    axes = plots.compare_timelines(runs, ["small", "good", "huge"])
    assert len({ax.get_xlim() for ax in axes}) == 1
    assert [ax.get_title("left") for ax in axes] == ["small", "good", "huge"]
    assert [ax.get_title("right") for ax in axes] == ["modelled"] * 3
    for ax, run in zip(axes, runs, strict=True):
        assert amount(ax, "exposed") == [pytest.approx(run.exposed_seconds * 1e3, abs=0.51)]
    fastest = ["fastest" in " ".join(texts(ax)) for ax in axes]
    assert fastest == [False, True, False]


def test_compared_timelines_need_a_label_each():
    with pytest.raises(ValueError, match="2 sources and 1 labels"):
        plots.compare_timelines([simulated(), simulated()], ["one"])
    with pytest.raises(ValueError, match="0 sources"):
        plots.compare_timelines([], [])


# Breakdown


def test_a_breakdown_adds_up_and_gives_ms_and_percent():
    simulation = simulated(input_seconds=0.050)
    ax = plots.breakdown(simulation)
    widths = [bar.get_width() for bar in ax.patches]
    assert sum(widths) == pytest.approx(simulation.step_seconds * 1e3)
    parts = analysis.step_breakdown(simulation.spans)
    assert widths == [pytest.approx(seconds * 1e3) for seconds in parts.values() if seconds > 0]
    share = 100 * simulation.exposed_seconds / simulation.step_seconds
    label = next(text for text in texts(ax) if text.startswith("exposed"))
    assert label.endswith(f"{simulation.exposed_seconds * 1e3:.0f} ms, {share:.0f} %")
    assert ax.get_title("right") == "modelled"


def test_every_part_of_a_breakdown_is_named_even_if_it_is_narrow():
    spans = [
        Span(0, "forward", 0, 1, step=0),
        Span(0, "clip", 1, 1.001),
        Span(0, "optimizer", 1.01, 1.02, step=0),
    ]
    written = " ".join(texts(plots.breakdown(spans, kind="measured")))
    assert all(name in written for name in ("forward", "clip", "optimizer", "other"))


# Sweeps


def drawn_sweep(**options):
    caps = [1, 4, 25]
    modelled = [simulation.step_seconds for simulation in sweep_bucket_caps(LAYERS, caps, 4, 2, 1500)]
    measured = [[0.40, 0.42, 0.41], [0.30, 0.33, 0.31], [0.50, 0.52, 0.51]]
    return plots.sweep(caps, measured, modelled, kind="paced", **options), modelled


def test_a_sweep_marks_the_best_of_both():
    ax, modelled = drawn_sweep()
    assert "paced best: 4 MiB, 310 ms" in texts(ax)
    assert f"modelled best: 4 MiB, {modelled[1] * 1e3:.0f} ms" in texts(ax)
    assert ax.get_title("right") == "● paced     — modelled"


def test_a_sweep_draws_medians_spread_and_the_real_settings():
    ax, modelled = drawn_sweep()
    lines = {line.get_marker() + line.get_linestyle(): line.get_ydata() for line in ax.lines[:2]}
    assert list(lines["oNone"]) == pytest.approx([410, 310, 510])
    assert list(lines["None-"]) == pytest.approx([seconds * 1e3 for seconds in modelled])
    spread = [path.vertices[:, 1].tolist() for path in ax.collections[0].get_paths()]
    assert spread == [pytest.approx(pair) for pair in ([400, 420], [300, 330], [500, 520])]
    assert [label.get_text() for label in ax.get_xticklabels()] == ["1", "4", "25"]
    assert (ax.get_xscale(), ax.get_xlabel()) == ("log", "bucket_cap_mb (MiB, log scale)")


def test_a_sweep_shows_your_prediction_even_off_the_measured_range():
    ax, _ = drawn_sweep(prediction=200)
    assert "your prediction" in texts(ax)
    assert ax.get_xlim()[1] > 200
    assert "your prediction" not in texts(drawn_sweep()[0])


@pytest.mark.parametrize("prediction", [0.25, 1, 5, 25, 200])
def test_your_prediction_is_never_cut_off(prediction):
    ax, _ = drawn_sweep(prediction=prediction)
    ax.figure.canvas.draw()
    (label,) = [text for text in ax.texts if text.get_text() == "your prediction"]
    inside, box = ax.get_window_extent(), label.get_window_extent()
    assert inside.x0 <= box.x0 and box.x1 <= inside.x1


@pytest.mark.parametrize(
    ("seconds", "from_zero"),
    [([0.1, 0.2, 0.3], True), ([0.28, 0.3, 0.31], False), ([0.001, 0.2, 0.3], True), ([0.2, 0.2], False)],
)
def test_a_sweep_starts_at_zero_where_that_costs_little_and_else_says_so(seconds, from_zero):
    ax = plots.sweep(range(1, len(seconds) + 1), seconds, seconds)
    low, high = ax.get_ylim()
    assert (low <= 0) == from_zero == ("starts above 0" not in ax.get_ylabel())
    assert min(ax.get_yticks()) == 0 if from_zero else low > high / 3
    ax.figure.canvas.draw()
    marks = [text for text in ax.texts if "best" in text.get_text()]
    assert len(marks) == 2
    for mark in marks:
        box = mark.get_window_extent()
        assert ax.get_window_extent().y0 <= box.y0
        assert box.y1 < ax.transData.transform((1, min(seconds) * 1e3))[1]


def test_a_sweep_may_be_only_modelled_or_have_a_finer_line():
    ax = plots.sweep([1, 2, 4], modelled=[0.3, 0.2, 0.4])
    assert ax.get_title("right") == "— modelled"
    ax = plots.sweep([1, 4], [0.3, 0.4], [0.3, 0.2, 0.4], modelled_x=[1, 2, 4], kind="measured")
    assert "modelled best: 2 MiB, 200 ms" in texts(ax)


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        (([1, 2], None), {}, "give measured, modelled or both"),
        (([], [1.0]), {}, "x must be numbers above 0"),
        (([0, 1], [1.0, 2.0]), {}, "x must be numbers above 0"),
        (([1, 2], [1.0]), {}, "measured must have one value for each of the 2 settings; it has 1"),
        (([1, 2], [[1.0], []]), {}, "without samples"),
        (([1], [1.0]), {"prediction": -1}, "prediction must be numbers above 0"),
        (([1], [1.0]), {"kind": "dreamt"}, "kind must be one of"),
    ],
)
def test_a_sweep_that_cannot_be_drawn_is_said(arguments, options, message):
    with pytest.raises(ValueError, match=message):
        plots.sweep(*arguments, **options)


# Shared


def test_a_widget_gets_png_and_no_figure_is_left_open():
    data = figure.png(plots.compare_timelines([simulated()], ["one"])[0])
    assert data.startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []


def test_importing_the_plots_leaves_the_backend_to_the_notebook():
    code = (
        "import course_lib.plots, matplotlib, sys;"
        "chosen = dict.__getitem__(matplotlib.rcParams, 'backend');"
        "sys.exit(isinstance(chosen, str) or 'matplotlib.pyplot' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "MPLBACKEND"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == 0


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0"), (0.000004, "0"), (0.00035, "0.35"), (0.0084, "8.4"), (0.084, "84"), (1.25, "1,250")],
)
def test_milliseconds_have_no_more_digits_than_needed(seconds, text):
    assert figure.milliseconds(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (12, "12 B"),
        (2000, "1.95 KiB"),
        (589_824, "576 KiB"),
        (2**20 - 1, "1 MiB"),
        (2_359_296, "2.25 MiB"),
        (27.5 * 2**20, "27.5 MiB"),
        (300 * 2**20, "300 MiB"),
        (2**30, "1 GiB"),
    ],
)
def test_sizes_are_in_the_units_that_bucket_cap_mb_counts(size, text):
    assert figure.binary_size(size) == text


def test_a_notebook_shows_every_figure_also_when_the_first_one_is_ours(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.delenv("MPLBACKEND", raising=False)
    draw = "from course_lib.plots import sweep\nsweep([1, 2], [1, 2]);"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(draw) for _ in range(3)])
    NotebookClient(notebook, kernel_name="python3", timeout=60).execute(cwd=str(tmp_path))
    for cell in notebook.cells:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs)
