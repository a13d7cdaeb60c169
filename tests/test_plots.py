"""What the figures say: numbers equal to the arithmetic, the kind named, colours fixed, errors clear."""

from __future__ import annotations

import dataclasses
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
    assert ax.get_title("left").endswith("of 9")
    names = [text for text in texts(ax) if text.startswith("rank ")]
    assert len(names) == 4
    assert {"rank 0", "rank 5", "rank 8"} <= set(names)


def test_buckets_are_drawn_one_after_the_other_and_labelled():
    # Three in flight at once, as gloo's two threads and its queue do: the picture shows them queue.
    spans = [Span(0, "backward", 0, 0.1, step=0)] + [
        Span(0, "all_reduce", 0.01 * k, 0.05 * (k + 1), 10_000_000, LINK, 0, f"bucket {k}") for k in range(3)
    ]
    ax = plots.timeline(spans, kind="measured")
    assert filled(ax, HIDDEN_COLOUR) == [pytest.approx(100)]
    assert filled(ax, EXPOSED_COLOUR) == [pytest.approx(50)]
    assert texts(ax).count("10 MB") == 3


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
    [(12, "12 B"), (2000, "2.0 kB"), (4_194_304, "4.2 MB"), (29_400_000, "29 MB"), (1e9, "1.0 GB")],
)
def test_sizes_are_in_decimal_units(size, text):
    assert figure.megabytes(size) == text


def test_a_notebook_shows_every_figure_also_when_the_first_one_is_ours(tmp_path, monkeypatch):
    import nbformat
    from nbclient import NotebookClient

    monkeypatch.delenv("MPLBACKEND", raising=False)
    draw = "from course_lib.plots import sweep\nsweep([1, 2], [1, 2]);"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(draw) for _ in range(3)])
    NotebookClient(notebook, kernel_name="python3", timeout=60).execute(cwd=str(tmp_path))
    for cell in notebook.cells:
        assert any("image/png" in output.get("data", {}) for output in cell.outputs)
